"""LoRA adapters that were trained on the base model, served on its hybrid."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from vllm.lora.request import LoRARequest

from bosch.model.materialize import materialize
from bosch.window import Window
from tests.hybrid_case import small_model
from tests.vllm_case import (
    SIZES,
    engine,
    generate,
    largest_difference,
    mask_of_counts,
    random_prompts,
)

RANK, TOLERANCE = 4, 1e-4


def test_an_adapter_of_the_base_moves_with_the_heads(tmp_path: Path) -> None:
    """As transformers computes the hybrid of the base with the adapter merged."""
    base, mask = small_model("qwen3", **SIZES).float(), mask_of_counts([1, 3, 2], Window(40))
    base.save_pretrained(tmp_path / "base")
    materialize(base, mask).save_pretrained(tmp_path / "hybrid")
    generator, weights = torch.Generator().manual_seed(1), {}
    for name, linear in base.named_modules():
        if isinstance(linear, torch.nn.Linear) and name != "lm_head":
            shapes = {"A": (RANK, linear.in_features), "B": (linear.out_features, RANK)}
            a, b = (torch.randn(shape, generator=generator) / 8 for shape in shapes.values())
            weights[f"base_model.model.{name}.lora_A.weight"] = a
            weights[f"base_model.model.{name}.lora_B.weight"] = b
            linear.weight.data += b @ a
    (tmp_path / "adapter").mkdir()
    save_file(weights, tmp_path / "adapter" / "adapter_model.safetensors")
    targets = sorted({name.split(".")[-3] for name in weights})
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "target_modules": targets}
    config["base_model_name_or_path"] = str(tmp_path / "base")
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps(config))
    reference, prompts = materialize(base, mask).eval(), random_prompts((5, 39, 100))
    request = LoRARequest("adapter", 1, str(tmp_path / "adapter"))
    with engine(tmp_path / "hybrid", enable_lora=True, max_lora_rank=8) as llm:
        without = generate(llm, prompts, 12, False)
        outputs = generate(llm, prompts, 12, False, lora_request=request)
    for prompt, output, other in zip(prompts, outputs, without, strict=True):
        distance, greedy = largest_difference(reference, prompt, output)
        assert distance < TOLERANCE and greedy
        assert largest_difference(reference, prompt, other)[0] > 0.05
