"""Prompts with a common beginning: it is computed once, and no answer changes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import GenerationConfig

from bosch.model.materialize import materialize
from bosch.window import Window
from stages.evaluate.shared_prompt import SharedPrompt
from stages.evaluate.suites.harness.suite import language_model
from tests.hybrid_case import random_mask, small_model, tokens
from tests.tiny_data import tiny_tokenizer

BEGINNING, NEW_TOKENS = 100, 5


def _model(kind: str) -> Any:
    if kind == "original":
        return small_model()
    return materialize(small_model(), random_mask(), Window(6, int(kind)))


def _padded(prompts: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    length = max(map(len, prompts))
    ids = torch.zeros(len(prompts), length, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, length - len(prompt) :] = prompt
        mask[row, length - len(prompt) :] = 1
    return ids, mask


def _prompts(sizes: list[int], first: int = 3) -> list[torch.Tensor]:
    beginning = tokens(1, BEGINNING)[0]
    return [
        torch.cat([beginning, torch.arange(size) % 7 + first + number])
        for number, size in enumerate(sizes)
    ]


def _generate(model: Any, ids: torch.Tensor, mask: torch.Tensor, **more: Any) -> Any:
    settings = GenerationConfig(
        max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=0,
        output_logits=True, return_dict_in_generate=True,
    )  # fmt: skip
    with torch.no_grad():
        return model.generate(ids, attention_mask=mask, generation_config=settings, **more)


def _count_tokens(model: Any) -> list[int]:
    counts: list[int] = []
    model.get_input_embeddings().register_forward_hook(
        lambda _, inputs, output: counts.append(inputs[0].numel())
    )
    return counts


@pytest.mark.parametrize("kind", ["original", "0", "4", "130"])
@pytest.mark.parametrize("sizes", [[3, 9, 20], [1, 1], [12]])
def test_answers_equal_those_of_whole_prompts(kind: str, sizes: list[int]) -> None:
    model = _model(kind)
    shared = SharedPrompt(model)
    # The second batch finds the beginning; a batch of one row compares with the batch before.
    for first in (3, 20):
        ids, mask = _padded(_prompts(sizes, first))
        whole = _generate(model, ids, mask)
        cache = shared.cache(ids, mask)
        if first == 20 or len(sizes) > 1:
            output = _generate(model, ids, mask, past_key_values=cache)
            assert output.sequences.tolist() == whole.sequences.tolist()
            torch.testing.assert_close(
                torch.stack(output.logits), torch.stack(whole.logits), rtol=1e-4, atol=1e-5
            )
    assert cache is not None


@pytest.mark.parametrize(
    ("sizes", "batches", "prefill"),
    [
        ([3, 9, 20], 4, BEGINNING + 4 * 3 * 20),
        # The first prompt is computed whole, the beginning with the second, then only the rests.
        ([9], 3, BEGINNING + 9 + BEGINNING + 2 * 9),
    ],
)
def test_the_common_beginning_is_computed_once(
    sizes: list[int], batches: int, prefill: int
) -> None:
    model = _model("4")
    counts, shared = _count_tokens(model), SharedPrompt(model)
    for first in (3, 10, 20, 30)[:batches]:
        ids, mask = _padded(_prompts(sizes, first))
        _generate(model, ids, mask, past_key_values=shared.cache(ids, mask))
    assert sum(counts) == prefill + batches * len(sizes) * (NEW_TOKENS - 1)


def test_a_beginning_longer_than_twice_the_common_one_is_computed_anew() -> None:
    model = _model("0")
    counts, shared = _count_tokens(model), SharedPrompt(model)
    shared.cache(*_padded(_prompts([3, 9])))
    for size, computed in ((102, 0), (103, BEGINNING + 102)):
        counts.clear()
        alike = _prompts([size])[0].expand(2, -1)
        assert shared.cache(alike, torch.ones_like(alike)) is not None
        assert sum(counts) == computed


@pytest.mark.parametrize("kind", ["original", "0", "4"])
@pytest.mark.parametrize("asked", [1, 4, 30])
def test_logits_after_the_beginning_equal_those_of_whole_rows(kind: str, asked: int) -> None:
    """Rows padded on the right; also if requested positions are inside the beginning."""
    model = _model(kind)
    counts, shared = _count_tokens(model), SharedPrompt(model)
    for first in (3, 20):
        rows = _prompts([3, 9, 20], first)
        ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
        counts.clear()
        logits = shared.rest_logits(ids, asked)
        assert logits is not None and logits.shape[1] == 20 + asked
        # The second batch finds the beginning.
        assert sum(counts) == 3 * (20 + asked) + (BEGINNING - asked if first == 3 else 0)
        with torch.no_grad():
            whole = model(ids).logits
        for row, (own, other) in enumerate(zip(logits, whole, strict=True)):
            end = len(rows[row])
            own = own[: end - ids.shape[1] or None]
            torch.testing.assert_close(own, other[end - len(own) : end], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("batch_size", [1, 4])
def test_the_harness_scores_options_like_whole_rows(
    monkeypatch: pytest.MonkeyPatch, batch_size: int
) -> None:
    """Worked examples before eight questions, with options of one token and of several."""
    from lm_eval.api.instance import Instance

    examples = "the cat sat on the mat and the dog ran to the house. " * 6
    requests = [
        Instance("loglikelihood", {}, (f"{examples}question {'why ' * number}", option), number)
        for number in range(8)
        for option in (" a", " a dog ran", " the house")
    ]
    base = small_model(vocab_size=512, max_position_embeddings=1024)
    model = materialize(base, random_mask(), Window(6, 4))
    counts, answers = _count_tokens(model), []
    for is_shared in (True, False):
        if not is_shared:
            monkeypatch.setattr(SharedPrompt, "rest_logits", lambda *_: None)
        counts.clear()
        lm = language_model(model, tiny_tokenizer(), batch_size)
        answers.append((lm.loglikelihood(requests, disable_tqdm=True), sum(counts)))
    (shared, few), (whole, many) = answers
    assert few < 0.5 * many
    for own, other in zip(shared, whole, strict=True):
        assert own[0] == pytest.approx(other[0], abs=1e-4) and own[1] == other[1]


def test_a_zero_that_may_be_padding_ends_the_common_beginning() -> None:
    shared = SharedPrompt(_model("0"))
    ids = torch.full((2, 90), 3)
    ids[:, 70:] = 0
    logits = shared.rest_logits(ids, 1)
    assert logits is not None and logits.shape[1] == 90 - 69
    ids[:, 40:] = 0
    assert shared.rest_logits(ids, 1) is None


def test_prompts_without_common_beginning_and_other_states_are_computed_whole() -> None:
    shared = SharedPrompt(_model("0"))
    ids = torch.stack([torch.full((90,), 3), torch.full((90,), 4)])
    assert shared.cache(ids, torch.ones_like(ids)) is None
    alike = torch.full((2, 90), 3)
    assert shared.cache(alike, torch.ones_like(alike)) is not None
    # A row's padding leaves too little of the common beginning, or is longer than it.
    assert shared.cache(*_padded(_prompts([3, 9]))) is not None
    for size in (50, 150):
        assert shared.cache(*_padded(_prompts([1, size]))) is None
    other = SharedPrompt(small_model("gemma2"))
    assert other.cache(alike, torch.ones_like(alike)) is None
