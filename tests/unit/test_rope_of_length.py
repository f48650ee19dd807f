"""RoPE that depends on the length of a pass: results are those of a text read alone, at once."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers import Phi3Config, Phi3ForCausalLM

from bosch.masks import HeadMask
from bosch.model.families import rope_depends_on_length
from bosch.model.search_mode import prepare_for_search
from bosch.score.calibration import PARTS, CalibrationExample, CalibrationSet
from bosch.score.objective import Objective
from bosch.window import Window
from stages.evaluate import positions
from stages.evaluate.chat import ChatConfig
from stages.evaluate.lm import LanguageModel
from tests.hybrid_case import small_model
from tests.tiny_data import byte_tokenizer

_LONGROPE = {
    "type": "longrope", "short_factor": [1.0] * 6, "long_factor": [1.0, 2.0, 4.0, 8.0, 16.0, 30.0],
}  # fmt: skip
ORIGINAL_LENGTH, LENGTH, VOCABULARY = 64, 200, 97


def _model() -> Any:
    torch.manual_seed(0)
    config = Phi3Config(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=64, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=512,
        original_max_position_embeddings=ORIGINAL_LENGTH, rope_scaling=_LONGROPE,
        partial_rotary_factor=0.75, sliding_window=None, pad_token_id=0, bos_token_id=1,
        eos_token_id=2, initializer_range=0.2,
    )  # fmt: skip
    return Phi3ForCausalLM(config).eval()


def test_it_is_read_from_the_configuration() -> None:
    assert rope_depends_on_length(_model().config)
    assert not rope_depends_on_length(small_model("llama").config)


def test_losses_by_position_are_those_of_one_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(positions, "CHUNK", 32)
    model, ids = _model(), np.random.default_rng(0).integers(3, VOCABULARY, LENGTH)
    tokens = torch.tensor(ids)
    with torch.no_grad():
        logits = model(tokens[None], use_cache=False).logits[0, :-1]
    expected = torch.nn.functional.cross_entropy(logits, tokens[1:], reduction="none")
    torch.testing.assert_close(
        torch.from_numpy(positions.token_losses(model, ids)), expected, rtol=0, atol=1e-3
    )


def test_a_short_question_beside_a_long_one_gets_its_own_answer() -> None:
    model, tokenizer, random = _model(), byte_tokenizer(), np.random.default_rng(1)
    texts = [tokenizer.decode(random.integers(3, 90, n).tolist()) for n in (20, LENGTH, 40)]
    asked = {number: (text, []) for number, text in enumerate(texts)}

    def answers(rows: int) -> dict[int, list[int]]:
        lm = LanguageModel(model, tokenizer, ChatConfig(), rows)
        return {number: ids for number, _, ids in lm.answer_ids(asked, 8)}

    assert answers(3) == answers(1)


def test_a_search_scores_a_short_example_as_if_it_were_alone() -> None:
    model, random = _model(), np.random.default_rng(2)
    examples = [
        CalibrationExample(tuple(random.integers(3, VOCABULARY, n).tolist()), 3)
        for n in (30, LENGTH) * PARTS
    ]
    prepare_for_search(model)

    def likelihood(chosen: list[CalibrationExample]) -> float:
        scorer = Objective(model, CalibrationSet(tuple(chosen)), Window(8), batch_size=2)
        return scorer.evaluate(HeadMask.all_full(*scorer.shape)).log_likelihood

    together, alone = likelihood(examples), [likelihood([example]) for example in examples]
    assert together == pytest.approx(sum(alone) / len(alone), abs=1e-4)
