"""Before a search, a model's hybrid with windows wider than the text has to be the model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import bosch.model.materialize as materializing
from bosch.errors import RunError
from bosch.model.loading import load_model
from bosch.model.materialize import check_hybrid, materialize
from bosch.window import Window
from stages.train.checkpoint import save_model
from tests.hybrid_case import logits_of, mask_of, small_model, tokens


@pytest.mark.parametrize("family", ["qwen3", "llama", "gemma3", "gpt_oss", "phi3", "olmo3"])
def test_the_check_leaves_the_model_as_it_was(family: str) -> None:
    model, ids = small_model(family), tokens(1, 20)
    weights = {name: weight.clone() for name, weight in model.state_dict().items()}
    shares_head = model.lm_head.weight is model.get_input_embeddings().weight
    expected = logits_of(model, ids)
    check_hybrid(model, ids)
    assert all(torch.equal(weights[name], value) for name, value in model.state_dict().items())
    assert (model.lm_head.weight is model.get_input_embeddings().weight) is shares_head
    assert torch.equal(logits_of(model, ids), expected)


@pytest.mark.parametrize("family", ["qwen3", "gemma3"])
def test_a_head_of_its_own_stays_although_the_configuration_ties_it(
    family: str, tmp_path: Path
) -> None:
    model = small_model(family, tie_word_embeddings=True)
    save_model(model, tmp_path / "base", "5GB")
    file = tmp_path / "base" / "model.safetensors"
    weights = load_file(file)
    embeddings = next(w for name, w in weights.items() if name.endswith("embed_tokens.weight"))
    weights["lm_head.weight"] = embeddings * 1.5 + 0.01
    save_file(weights, file, metadata={"format": "pt"})
    ids = tokens(1, 20)
    base = load_model(tmp_path / "base", dtype=torch.float32)
    expected = logits_of(base, ids)
    assert not torch.allclose(expected, logits_of(model, ids), atol=0.01)
    check_hybrid(base, ids)
    save_model(materialize(base, mask_of(base.config, Window(20))), tmp_path / "hybrid", "5GB")
    hybrid = load_model(tmp_path / "hybrid", dtype=torch.float32)
    torch.testing.assert_close(logits_of(hybrid, ids), expected, rtol=1e-4, atol=1e-5)


def test_a_hybrid_that_is_not_the_model_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    reorder = materializing.in_order

    def wrong(name, weight, places, orders):  # type: ignore[no-untyped-def]
        weight = reorder(name, weight, places, orders)
        return weight.flip(0) if name.endswith("0.self_attn.v_proj.weight") else weight

    monkeypatch.setattr(materializing, "in_order", wrong)
    with pytest.raises(RunError, match="not the model: after layer 0 they differ by"):
        check_hybrid(small_model("llama"), tokens(1, 20))
