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
from tests.hybrid_case import VOCABULARY, random_mask, small_model, tokens
from tests.tiny_data import byte_tokenizer, tiny_tokenizer

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
    model, tokenizer = materialize(small_model(), random_mask(Window(6))), tiny_tokenizer()
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
    materialize(base, random_mask(Window(6))).save_pretrained(tmp_path / "hybrid")
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


def test_a_prompt_beyond_the_positions_is_refused() -> None:
    """The last token of an answer is not read by the model."""
    model = small_model()
    most = model.config.max_position_embeddings
    short, long = (Question(n, np.zeros(most - 3 + n, np.int32), []) for n in (0, 1))
    assert len(list(generate(model, byte_tokenizer(), [short], 4, 1))) == 1
    with pytest.raises(ModelError, match=rf"answer of 4 are more than its {most:,} positions"):
        next(generate(model, None, [short, long], 4, 1))


def test_an_answer_does_not_change_next_to_a_longer_one_without_padding_token() -> None:
    model, tokenizer = small_model(), byte_tokenizer()
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
