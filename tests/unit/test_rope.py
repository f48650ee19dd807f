"""A model with stretched RoPE equals one loaded with YaRN in its config.json.

With RoPE that depends on the length of a pass, results are those of a text read alone, at once.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Phi3Config, Phi3ForCausalLM

from bosch.errors import UserError
from bosch.masks import HeadMask
from bosch.model.families import max_positions, rope_depends_on_length
from bosch.model.loading import load_model
from bosch.model.search_mode import prepare_for_search
from bosch.model.stored_config import StoredConfig
from bosch.model.yarn import original_positions, yarn
from bosch.score.calibration import PARTS, CalibrationExample, CalibrationSet
from bosch.score.objective import Objective
from bosch.window import Window
from stages.evaluate import positions
from stages.evaluate.chat import ChatConfig
from stages.evaluate.lm import LanguageModel
from tests.hybrid_case import small_config, small_model, tokens
from tests.tiny_data import byte_tokenizer, save_tiny_model

_CARD_SIZES = {"factor": 4.0, "original_max_position_embeddings": 2048}
_CARD = {"rope_type": "yarn", **_CARD_SIZES}
_LINEAR = {"rope_type": "linear", "factor": 2.0}


def test_a_stretched_model_equals_one_loaded_with_yarn(tmp_path):
    folder = save_tiny_model(tmp_path / "model")
    model = load_model(folder, dtype="float32")
    ids = torch.arange(40)[None]
    with torch.no_grad():
        before = model(ids).logits
        with yarn(model, 2.0):
            stretched = model(ids).logits
            assert model.config.max_position_embeddings == 8192
        after = model(ids).logits
    config = json.loads((folder / "config.json").read_text())
    config["rope_parameters"] |= {
        "rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 4096,
    }  # fmt: skip
    config["max_position_embeddings"] = 8192
    (folder / "config.json").write_text(json.dumps(config))
    loaded = load_model(folder, dtype="float32")
    with torch.no_grad():
        torch.testing.assert_close(stretched, loaded(ids).logits)
    assert (stretched - before).abs().max() > 1e-3
    assert torch.equal(before, after) and model.config.max_position_embeddings == 4096
    with pytest.raises(UserError, match="scales RoPE already"), yarn(loaded, 2.0):
        pass


def test_only_the_text_decoder_is_stretched():
    family = "qwen3_vl"
    model, ids = small_model(family), tokens(1, 12)
    config = small_config(family)
    text = config.get_text_config()
    text.rope_parameters = {
        **text.rope_parameters,
        "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64,
    }  # fmt: skip
    text.max_position_embeddings = 256
    expected = type(model)(config).eval()
    expected.load_state_dict(model.state_dict())
    with torch.no_grad():
        before = model(input_ids=ids).logits
        with yarn(model, 4.0, 64):
            stretched = model(input_ids=ids).logits
        torch.testing.assert_close(stretched, expected(input_ids=ids).logits)
    assert (stretched - before).abs().max() > 1e-3


CARD = """For contexts beyond 32,768 tokens, add to `config.json`:
    {"rope_scaling": {"rope_type": "yarn", "factor": 4.0,
     "original_max_position_embeddings": 32768}}
or `vllm serve --rope-scaling '{"factor":4.0,"original_max_position_embeddings":32768}'` or
llama.cpp's `--rope-scaling yarn --yarn-orig-ctx 32768`.
"""


@pytest.mark.parametrize(
    ("config", "card", "length"),
    [
        ({"max_position_embeddings": 40960, "rope_scaling": None}, CARD, 32768),
        ({"original_max_position_embeddings": 4096}, CARD, 4096),
        ({"rope_parameters": {"original_max_position_embeddings": 8192}}, None, 8192),
        ({"rope_scaling": {"original_max_position_embeddings": 2048}}, CARD, 2048),
        ({}, CARD + "original_max_position_embeddings=4096", None),  # the card names two
        ({}, None, None),
    ],
)
def test_the_trained_length_is_that_of_config_or_card(tmp_path, config, card, length):
    path = tmp_path / "README.md"
    if card is not None:
        path.write_text(card)
    assert original_positions(config, path) == length


def test_the_trained_length_is_stretched(tmp_path):
    model = load_model(save_tiny_model(tmp_path / "model"), dtype="float32")
    (tmp_path / "README.md").write_text(CARD)
    for arguments, length in (((3.0, 2048), 6144), ((2.0, None, tmp_path / "README.md"), 65536)):
        with yarn(model, *arguments):
            rope = model.model.rotary_emb.config.rope_parameters
            assert rope["original_max_position_embeddings"] * arguments[0] == length
            assert model.config.max_position_embeddings == length


@pytest.mark.parametrize(
    ("changes", "positions"),
    [
        ({"rope_scaling": _CARD}, 8192),  # as Qwen3's card says: nothing else is changed
        ({"rope_scaling": _CARD, "max_position_embeddings": 8192}, 8192),
        ({"rope_scaling": {"type": "yarn", **_CARD_SIZES}}, 8192),
        ({"rope_parameters": {**_CARD, "rope_theta": 1e5}}, 8192),
        ({"rope_parameters": {"rope_type": "default"}, "rope_scaling": _CARD}, 8192),
        ({"rope_scaling": _LINEAR}, 4096),
        (
            {"rope_scaling": _LINEAR, "model_type": "gemma3_text"},
            2048,
        ),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, 2048),
        ({"rope_scaling": None}, 2048),
    ],
)
def test_positions_count_a_stated_scaling_of_rope(changes, positions):
    content = {"model_type": "qwen3", "max_position_embeddings": 2048, "num_hidden_layers": 2}
    content |= {"num_attention_heads": 2, "hidden_size": 8, "rope_theta": 1e5, **changes}
    stored = StoredConfig(content)
    assert stored.max_positions == positions
    if "llama3" not in str(changes):  # transformers wants more of its parameters
        assert max_positions(stored.of_transformers()) == positions


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
