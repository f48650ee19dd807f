"""Greedy generation in batches: an answer depends neither on its batch nor on generation_config."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bosch.model.loading import load_model
from bosch.model.materialize import materialize
from bosch.window import Window
from stages.evaluate.answers import ModelError
from stages.evaluate.generation import NanCheck, Question, decode, generate, refuse_nan
from tests import nolima_case
from tests.hybrid_case import VOCABULARY, random_mask, small_model, tokens
from tests.tiny_data import tiny_tokenizer

PROMPT = tokens(1, 20)[0].numpy().astype("int32")


def answer(model: Any, tokenizer: Any, answers: list[str] | None = None, **options: Any) -> str:
    """Up to 13 tokens after the prompt."""
    questions = [Question(0, PROMPT, answers or [])]
    [[(_, text)]] = generate(model, tokenizer, questions, 13, 1, **options)
    return text


@pytest.mark.parametrize(
    "settings",
    [
        {"no_repeat_ngram_size": 1},
        {"repetition_penalty": 9.0},
        {"num_beams": 3},
        {"do_sample": True},
        {"stop_strings": ["a"]},
        {"cache_implementation": "offloaded"},
        {"suppress_tokens": [*range(3, VOCABULARY, 2)]},
    ],
)
def test_answers_are_greedy_whatever_generation_config_says(settings: dict[str, Any]) -> None:
    model, tokenizer = materialize(small_model(), random_mask(), Window(6)), tiny_tokenizer()
    expected, ids = answer(model, tokenizer), tokens(1, 20)
    for _ in range(13):
        ids = torch.cat([ids, model(ids).logits[:, -1:].argmax(-1)], dim=1)
    assert decode(tokenizer, ids[0, 20:]) == expected
    model.generation_config.update(**settings)
    assert answer(model, tokenizer) == expected
    assert all(getattr(model.generation_config, name) for name in settings)


def test_a_hybrid_with_unused_sampling_settings_of_its_base_is_saved(
    tmp_path: Path,
) -> None:
    """Like transformers saves the base itself if its published file is unchanged."""
    small_model().save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"do_sample": false, "temperature": 0.6}')
    base = load_model(str(tmp_path))
    materialize(base, random_mask(), Window(6)).save_pretrained(tmp_path / "hybrid")
    saved = json.loads((tmp_path / "hybrid" / "generation_config.json").read_text())
    assert (saved["do_sample"], saved["temperature"]) == (False, 0.6)


@pytest.mark.parametrize(
    ("answers", "ended"),
    [
        ([], 13),
        (["-"], 1),
        (["-", "E"], 12),
        (["G"], 13),  # which the prompt has
    ],
)
def test_an_answer_ends_with_the_last_expected_text(answers: list[str], ended: int) -> None:
    model, tokenizer = small_model(), tiny_tokenizer()
    assert "G" in decode(tokenizer, torch.from_numpy(PROMPT))
    whole = answer(model, tokenizer)
    assert whole.startswith("-----------E") and "G" not in whole
    assert answer(model, tokenizer, answers) == whole[:ended]


def test_a_line_ends_with_the_last_token_of_its_line_break(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some tokenizers put a space before any text."""
    model, tokenizer = small_model(), tiny_tokenizer()
    ids = [tokenizer.convert_tokens_to_ids(token) for token in "-E"]
    monkeypatch.setattr(tokenizer, "encode", lambda *_, **__: ids)
    assert answer(model, tokenizer, stop_at_newline=True) == "-----------E"
    monkeypatch.setattr(tokenizer, "encode", lambda *_, **__: ids[:1])
    for not_empty in (False, True):
        text = answer(model, tokenizer, stop_at_newline=True, not_empty=not_empty)
        assert text.startswith("-") != not_empty


def test_a_line_also_ends_at_the_models_end_token() -> None:
    model, tokenizer = small_model(), tiny_tokenizer()
    model.generation_config.eos_token_id = tokenizer.convert_tokens_to_ids("-")
    assert answer(model, tokenizer, stop_at_newline=True) == "-"


def test_end_tokens_are_ids() -> None:
    model = small_model()
    model.generation_config.eos_token_id = ["</s>"]
    question = Question(0, np.arange(5, 9, dtype=np.int32), [])
    with pytest.raises(ModelError, match=r"eos_token_id .* is \['</s>'\]"):
        list(generate(model, tiny_tokenizer(), [question], 12, 1))


def test_decoding_removes_special_tokens_and_keeps_blanks() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.clean_up_tokenization_spaces = True
    tokenizer.clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output = True
    text = [*tokenizer("a , b .")["input_ids"], tokenizer.eos_token_id]
    assert decode(tokenizer, torch.tensor(text)) == "a , b ."


@pytest.mark.parametrize(("max_new_tokens", "own"), [(4, None), (2, 4)])
def test_a_prompt_beyond_the_positions_is_refused(max_new_tokens: int, own: int | None) -> None:
    model = small_model()
    most = model.config.max_position_embeddings
    question = Question(0, np.zeros(most - 2, np.int32), [], new_tokens=own)
    with pytest.raises(ModelError, match=rf"answer of 4 are more than its {most:,} positions"):
        next(generate(model, None, [question], max_new_tokens, 1))


def test_the_limit_of_an_answer_does_not_depend_on_its_batch() -> None:
    """These three answers end at the positions or after 38 tokens."""
    model, tokenizer = small_model(), tiny_tokenizer()
    model.config.max_position_embeddings = 60
    questions = [
        Question(index, np.arange(3, 3 + length, dtype=np.int32), [], new_tokens=own)
        for index, (length, own) in enumerate([(40, 5), (20, 5), (10, 38)])
    ]
    answers = [
        {
            q.index: text
            for batch in generate(model, tokenizer, questions, 38, size)
            for q, text in batch
        }
        for size in (1, 2, 3)
    ]
    assert answers[0] == answers[1] == answers[2]
    assert len({len(tokenizer(text)["input_ids"]) for text in answers[0].values()}) > 1


@pytest.mark.parametrize("batch_size", [1, 2])
def test_a_longer_prompt_of_its_batch_does_not_cut_an_answer(
    batch_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, limits = small_model(), []
    generate_batch = model.generate

    def spy(*args: Any, generation_config: Any, **options: Any) -> Any:
        limits.append(generation_config.max_new_tokens)
        return generate_batch(*args, generation_config=generation_config, **options)

    monkeypatch.setattr(model, "generate", spy)
    most = model.config.max_position_embeddings
    # The last token of an answer is not read by the model.
    long = Question(0, np.zeros(most - 3, np.int32), [], new_tokens=4)
    short = Question(1, np.zeros(5, np.int32), [], new_tokens=6)
    batches = list(generate(model, nolima_case.tokenizer(), [short, long], 6, batch_size))
    assert [question for batch in batches for question, _ in batch] == [long, short]
    assert limits == [4, 6]


def test_an_answer_does_not_change_next_to_a_longer_one_without_padding_token() -> None:
    model, tokenizer = small_model(), nolima_case.tokenizer()
    tokenizer.pad_token = None
    questions = [Question(index, np.arange(5, 9 + index, dtype=np.int32), []) for index in range(4)]

    def texts(batch_size: int) -> dict[int, str]:
        batches = generate(model, tokenizer, questions, 12, batch_size)
        return {question.index: text for batch in batches for question, text in batch}

    ids = [int(one) for one in model.generate(torch.arange(5, 9)[None], max_new_tokens=12)[0, 4:]]
    model.generation_config.eos_token_id = ids[4]
    assert texts(4) == texts(1)
    assert len({len(text) for text in texts(1).values()}) > 1
    model.generation_config.eos_token_id = ids[0]
    assert texts(4) == texts(1) and texts(1)[0] == ""


def test_a_single_nan_logit_is_found() -> None:
    whole = torch.zeros(2, 5)
    faulty = whole.clone()
    faulty[1, 3] = torch.nan
    refuse_nan(whole)
    with pytest.raises(ModelError, match="no numbers"):
        refuse_nan(faulty)
    nan_check = NanCheck()
    nan_check.check()
    for logits in (whole, faulty, whole):
        assert nan_check(torch.zeros(2, 1), logits) is logits
    with pytest.raises(ModelError, match="no numbers"):
        nan_check.check()
