"""int8 weights and LoRA adapters on a hybrid model, made with the libraries' own functions."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, TorchAoConfig
from transformers.integrations.peft import MIN_PEFT_VERSION

from bosch.errors import UserError
from bosch.hybrid import HybridCache, layouts_of
from bosch.model.configuration import is_hybrid
from bosch.model.materialize import materialize
from bosch.model.search_mode import head_mask
from bosch.window import Window
from tests.hybrid_case import LAYERS, logits_of, random_mask, small_model, tokens

WINDOW, SINKS, LENGTH, NEW = 7, 2, 40, 8
MISSING = "the extra 'adapt' is not installed, or older than transformers asks for"


GUIDE = Path(__file__).resolve().parents[2] / "docs/guide/load.md"
_LINES = re.compile(r"(?ms)^```python\n(.*?)^```")


def _hybrid(folder: Path) -> Any:
    hybrid = materialize(
        small_model(hidden_size=64, head_dim=16), random_mask(Window(WINDOW, SINKS))
    )
    hybrid.save_pretrained(folder)
    return hybrid


def _offloaded(model: Any) -> Any:
    return pytest.importorskip("accelerate").cpu_offload(model, torch.device("cpu"))


def _wrapped(model: Any) -> Any:
    peft = pytest.importorskip("peft", MIN_PEFT_VERSION, MISSING)
    return peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"]))


def _adapted(model: Any) -> Any:
    peft = pytest.importorskip("peft", MIN_PEFT_VERSION, MISSING)
    model.add_adapter(peft.LoraConfig(target_modules=["q_proj"]))
    return model


@pytest.mark.parametrize(
    ("change", "reason"),
    [(_offloaded, "are offloaded"), (_wrapped, "merge_and_unload"), (_adapted, "merge_and_unload")],
)
def test_an_adapter_on_a_base_with_other_weights_is_refused(change: Any, reason: str) -> None:
    model = change(small_model())
    before = {name: weight.is_meta for name, weight in model.state_dict().items()}
    with pytest.raises(UserError, match=reason):
        materialize(model, random_mask(Window(WINDOW)), take_weights=True)
    assert before == {name: weight.is_meta for name, weight in model.state_dict().items()}


def _torchao() -> Any:
    quantization = pytest.importorskip("torchao.quantization", reason=MISSING)
    return TorchAoConfig(quantization.Int8WeightOnlyConfig())


def _bitsandbytes() -> Any:
    pytest.importorskip("bitsandbytes", reason=MISSING)
    return BitsAndBytesConfig(load_in_8bit=True)


def _int8_of(weight: Any) -> torch.Tensor:
    """The integers that a quantised weight holds."""
    held = getattr(weight, "qdata", weight)
    return torch.as_tensor(held.data if held is weight else held)


@pytest.mark.parametrize("config", [_torchao, _bitsandbytes])
def test_int8_weights_compute_nearly_the_same_with_the_same_cache(
    config: Any, tmp_path: Path
) -> None:
    hybrid, ids = _hybrid(tmp_path / "plain"), tokens(2, LENGTH)
    small = AutoModelForCausalLM.from_pretrained(tmp_path / "plain", quantization_config=config())
    small.save_pretrained(tmp_path / "int8")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "int8")
    expected = logits_of(hybrid, ids)
    full = logits_of(small_model(hidden_size=64, head_dim=16), ids)
    for model in (small, again):
        assert is_hybrid(model.config) and layouts_of(model) == layouts_of(hybrid)
        projection = model.model.layers[0].self_attn.q_proj
        assert _int8_of(projection.weight).dtype == torch.int8
        error = (logits_of(model, ids) - expected).abs().mean()
        assert 0 < error < 0.1 * (full - expected).abs().mean()
        cache = model.new_cache()
        generated = model.generate(ids, past_key_values=cache, max_new_tokens=NEW, do_sample=False)
        assert generated.shape == (2, LENGTH + NEW) and isinstance(cache, HybridCache)
        for layer, layout in zip(cache.layers, layouts_of(hybrid), strict=True):
            for cached, group in zip(layer.parts, layout.groups, strict=True):
                held = LENGTH + NEW - 1 if group.window is None else WINDOW - 1 + SINKS
                assert cached.keys.shape[1:3] == (len(group.heads), held)
    assert torch.equal(logits_of(small, ids), logits_of(again, ids))


def test_lora_trains_only_adapters_and_merges_them(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", MIN_PEFT_VERSION, MISSING)
    _hybrid(tmp_path / "plain")
    hybrid = AutoModelForCausalLM.from_pretrained(tmp_path / "plain")
    ids = torch.arange(4 * LENGTH).reshape(4, -1) % 13 + 3
    before = {name: weight.clone() for name, weight in hybrid.state_dict().items()}
    names = {"model": hybrid}
    [guide] = [line for line in _LINES.findall(GUIDE.read_text()) if "peft" in line]
    exec(guide, names)
    model = names["adapted"]
    trained = {name for name, weight in model.named_parameters() if weight.requires_grad}
    assert len(trained) == 2 * 7 * LAYERS and all("lora_" in name for name in trained)
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=5e-2)
    losses = []
    model.train()
    for _ in range(12):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]
    model.eval()
    expected = logits_of(model, ids)
    with model.disable_adapter():
        assert (logits_of(model, ids) - expected).abs().max() > 0.05
    model.save_pretrained(tmp_path / "adapter")
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "plain")
    assert all(torch.equal(weight, before[name]) for name, weight in plain.state_dict().items())
    loaded = peft.PeftModel.from_pretrained(plain, tmp_path / "adapter")
    assert torch.equal(logits_of(loaded, ids), expected)

    merged = loaded.merge_and_unload()
    torch.testing.assert_close(logits_of(merged, ids), expected, rtol=1e-4, atol=1e-5)
    merged.save_pretrained(tmp_path / "merged")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert is_hybrid(again.config) and torch.equal(logits_of(again, ids), logits_of(merged, ids))


@pytest.mark.parametrize(("family", "use_dora"), [("qwen3", True), ("phi3", False)])
def test_lora_of_the_base_moves_with_the_heads(family: str, use_dora: bool, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", MIN_PEFT_VERSION, MISSING)
    ids = tokens(2, LENGTH)
    small_model(family).save_pretrained(tmp_path / "base")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    hybrid = materialize(base, random_mask(Window(LENGTH)))  # all heads see the whole text
    hybrid.save_pretrained(tmp_path / "hybrid")
    config = peft.LoraConfig(target_modules="all-linear", r=4, use_dora=use_dora)
    adapted = peft.get_peft_model(base, config).eval()
    plain = logits_of(adapted, ids)
    for name, weight in adapted.named_parameters():
        if "lora_" in name:
            weight.data += torch.randn(weight.shape, generator=torch.Generator().manual_seed(1)) / 9
    expected = logits_of(adapted, ids)
    assert (expected - plain).abs().max() > 0.05
    adapted.save_pretrained(tmp_path / "adapter")

    near = {"rtol": 1e-4, "atol": 1e-4}
    loaded = peft.PeftModel.from_pretrained(_saved(tmp_path), tmp_path / "adapter")
    torch.testing.assert_close(logits_of(loaded, ids), expected, **near)
    if not use_dora:  # transformers' own method does not load its magnitudes, on the base neither
        own = _saved(tmp_path)
        own.load_adapter(str(tmp_path / "adapter"))
        torch.testing.assert_close(logits_of(own, ids), expected, **near)
    loaded.save_pretrained(tmp_path / "again")  # now the hybrid's
    again = peft.PeftModel.from_pretrained(_saved(tmp_path), tmp_path / "again")
    torch.testing.assert_close(logits_of(again, ids), expected, **near)

    (tmp_path / "base").rename(tmp_path / "gone")
    with pytest.raises(ValueError, match="order of its heads is not known"):
        peft.PeftModel.from_pretrained(_saved(tmp_path), tmp_path / "adapter")


def _saved(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder / "hybrid")


def test_another_adapter_of_the_base_is_refused(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", MIN_PEFT_VERSION, MISSING)
    small_model("llama").save_pretrained(tmp_path / "base")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    materialize(base, random_mask(Window(9))).save_pretrained(tmp_path / "hybrid")
    names = {"target_modules": ["k_proj", "down_proj"], "feedforward_modules": ["down_proj"]}
    peft.get_peft_model(base, peft.IA3Config(**names)).save_pretrained(tmp_path / "adapter")
    with pytest.raises(ValueError, match="trained on another order of heads"):
        peft.PeftModel.from_pretrained(_saved(tmp_path), tmp_path / "adapter")


def test_a_head_mask_applies_to_a_base_inside_peft() -> None:
    """`generate` is that of the model within, which must have the masks of the static cache too."""
    base, ids = small_model(), tokens(2, 20)
    model, padding = _wrapped(base).eval(), torch.ones(2, 20, dtype=torch.long)
    padding[0, :6] = 0
    options: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False, "disable_compile": True}
    with head_mask(model, random_mask(Window(4))):
        expected, found = (
            model.generate(input_ids=ids, attention_mask=padding, **options, **cache)
            for cache in ({"use_cache": False}, {"cache_implementation": "static"})
        )
    assert torch.equal(found, expected)
    assert "create_masks_for_generate" not in vars(base)


def test_a_prefix_by_peft_works() -> None:
    peft = pytest.importorskip("peft", MIN_PEFT_VERSION, MISSING)
    hybrid, ids = materialize(small_model(), random_mask(Window(7))), tokens(2, 20)
    config = peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    model = peft.get_peft_model(hybrid, config).eval()
    generated = model.generate(input_ids=ids, max_new_tokens=3, do_sample=False)
    for length in range(20, 23):
        logits = model(input_ids=generated[:, :length]).logits
        assert torch.equal(logits[:, -1].argmax(-1), generated[:, length])
