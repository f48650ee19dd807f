"""Quantised weights behind vLLM: a hybrid and its original in each format, against transformers.

    .venv-vllm/bin/python -m tests.tools.vllm_quantised [FORMAT ...]

A model's projections are rounded and written as each tool writes them; transformers computes with
the same rounded weights, in full precision. Where a format rounds activations too, so does a hook.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.hybrid_case import small_model
from tests.tools.vllm_families import COUNTS, WINDOW, in_process, prepare
from tests.tools.vllm_families import outputs as serve
from tests.vllm_case import SIZES, largest_difference, load_reference, save_hybrid

GROUP = 32
_SHIFTS = torch.arange(8, dtype=torch.int32) * 4
# AWQ's order of the eight columns of a word.
_AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]


def int8(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """compressed-tensors, int-quantized: a scale per row, of activations one per token."""
    scale = weight.abs().amax(dim=1, keepdim=True) / 127
    levels = (weight / scale).round()
    return {"weight": levels.to(torch.int8), "weight_scale": scale}, levels * scale


def _in_groups(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Levels -8 to 7 [N, K], a scale for each group of columns [N, K / GROUP], rounded weights."""
    groups = weight.unflatten(1, (-1, GROUP))
    scale = groups.abs().amax(dim=2) / 7
    levels = (groups / scale[:, :, None]).round().clamp(-8, 7)
    return levels.flatten(1), scale, (levels * scale[:, :, None]).flatten(1)


def _packed(levels: Tensor) -> Tensor:
    """Eight numbers of 4 bits in a word along the last dimension, the first in its low bits."""
    words = levels.to(torch.int32).unflatten(-1, (-1, 8)) << _SHIFTS
    return words.sum(dim=-1, dtype=torch.int32)


def int4(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """compressed-tensors, pack-quantized: 4 bits, a scale per group, activations as they are."""
    levels, scale, rounded = _in_groups(weight)
    shape = torch.tensor(weight.shape)
    packed = _packed(levels + 8).contiguous()
    return {"weight_packed": packed, "weight_scale": scale, "weight_shape": shape}, rounded


def gptq(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """GPTQ: words along the inputs, zero points stored one too small."""
    levels, scale, rounded = _in_groups(weight)
    zeros = torch.full((scale.shape[1], scale.shape[0]), 7)
    return {
        "qweight": _packed(levels + 8).t().contiguous(),
        "qzeros": _packed(zeros),
        "scales": scale.t().contiguous(),
        "g_idx": torch.arange(weight.shape[1], dtype=torch.int32) // GROUP,
    }, rounded


def awq(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """AWQ: words along the outputs, in an order of its own."""
    levels, scale, rounded = _in_groups(weight)
    zeros = torch.full((scale.shape[1], scale.shape[0]), 8)

    def columns(numbers: Tensor) -> Tensor:
        return _packed(numbers.unflatten(-1, (-1, 8))[..., _AWQ_ORDER].flatten(-2))

    return {
        "qweight": columns(levels.t() + 8),
        "qzeros": columns(zeros),
        "scales": scale.t().contiguous(),
    }, rounded


def fp8(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """fp8 (e4m3) with one scale; activations are rounded with one while the model runs."""
    scale = weight.abs().amax() / 448
    levels = (weight / scale).to(torch.float8_e4m3fn)
    return {"weight": levels, "weight_scale": scale[None]}, levels.float() * scale


def _compressed(number_format: str, bits: int, **weights: Any) -> dict[str, Any]:
    number = {"num_bits": bits, "type": "int", "symmetric": True}
    group: dict[str, Any] = {"targets": ["Linear"], "weights": {**number, **weights}}
    if bits == 8:
        group["input_activations"] = {**number, "strategy": "token", "dynamic": True}
    return {
        "quant_method": "compressed-tensors", "format": number_format, "ignore": ["lm_head"],
        "quantization_status": "compressed", "config_groups": {"0": group},
    }  # fmt: skip


# Each format: how a weight is rounded and stored, and what config.json says.
FORMATS: dict[str, tuple[Callable[[Tensor], tuple[dict[str, Tensor], Tensor]], dict[str, Any]]] = {
    "int8": (int8, _compressed("int-quantized", 8, strategy="channel")),
    "int4": (int4, _compressed("pack-quantized", 4, strategy="group", group_size=GROUP)),
    "gptq": (
        gptq,
        {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": True,
         "lm_head": False},
    ),
    "awq": (
        awq,
        {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True,
         "version": "gemm", "modules_to_not_convert": ["lm_head"]},
    ),
    "fp8": (fp8, {"quant_method": "fp8", "activation_scheme": "dynamic",
                  "ignored_layers": ["lm_head"]}),
}  # fmt: skip
_ROUNDS_ACTIVATIONS = ("int8",)
# All inputs and outputs are multiples of what the kernels take.
_SIZES = {**SIZES, "intermediate_size": 64}


def quantise(folder: Path, rounded: Path, name: str) -> None:
    """Rewrite a saved model in a format; `rounded` gets the same weights in full precision."""
    store, settings = FORMATS[name]
    model = load_reference(folder)
    weights = load_file(folder / "model.safetensors")
    state = model.state_dict()
    for key in [key for key in weights if key.endswith("_proj.weight")]:
        stored, state[key] = store(weights.pop(key))
        stem = key.removesuffix("weight")
        weights |= {stem + part: tensor.contiguous() for part, tensor in stored.items()}
    model.load_state_dict(state)
    model.save_pretrained(rounded)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    path = folder / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps({**config, "quantization_config": settings}), encoding="utf-8")


def _quantise_input(linear: Any, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    (states,) = arguments
    scale = states.abs().amax(dim=-1, keepdim=True).clamp(min=1e-12) / 127
    return ((states / scale).round() * scale,)


def _compare(folder: Path, answers: Any, rounds_activations: bool) -> str:
    model = load_reference(folder)
    for name, module in model.named_modules():
        if rounds_activations and name.endswith("_proj"):
            module.register_forward_pre_hook(_quantise_input)
    pairs = [largest_difference(model, answer.prompt_token_ids, answer) for answer in answers]
    distance, greedy = max(pair[0] for pair in pairs), all(pair[1] for pair in pairs)
    return f"distance {distance:.2g}, tokens {'equal' if greedy else 'differ'}"


def _save(folder: Path, form: str) -> None:
    if form == "hybrid":
        save_hybrid(folder, "qwen3", COUNTS, WINDOW, **_SIZES)
    else:
        small_model("qwen3", **_SIZES).float().save_pretrained(folder)


def outcome(name: str, form: str) -> str:
    """The distance of one model in one format, or why there is none."""
    with tempfile.TemporaryDirectory() as folder:
        path, rounded = Path(folder) / "model", Path(folder) / "rounded"
        in_process(partial(_save, path, form))
        fault = in_process(partial(quantise, path, rounded, name))
        answers = fault or in_process(partial(serve, path))
        if isinstance(answers, str):
            return " ".join(answers.split())
        return str(in_process(partial(_compare, rounded, answers[1], name in _ROUNDS_ACTIVATIONS)))


def main() -> None:
    """Try the formats named, or all."""
    parser = argparse.ArgumentParser()
    parser.add_argument("formats", nargs="*", metavar="FORMAT", choices=[[], *FORMATS])
    formats = parser.parse_args().formats or FORMATS
    prepare()
    for name in formats:
        for form in ("hybrid", "original"):
            print(f"{name} {form}: {outcome(name, form)}", flush=True)


if __name__ == "__main__":
    main()
