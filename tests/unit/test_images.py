"""Models that take images, with images: the hybrid text model reads what the original's reads.

The reference is the eager backend, which equals transformers' own eager attention here with every
head full, images included.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from bosch.model.materialize import materialize
from bosch.model.search_mode import apply_head_mask, prepare_for_search
from bosch.window import Window
from tests.hybrid_case import mask_of, small_model, tokens

WINDOW = Window(7, 2)
IMAGE = 60  # the last token of the vocabulary
_NEAR = {"rtol": 1e-4, "atol": 1e-5}
QWEN = ("qwen2_5_vl", "qwen3_vl", "qwen3_5")


def _inputs(family: str, config: Any) -> dict[str, torch.Tensor]:
    """Two prompts with an image each: one at the start, one in the middle."""
    ids = tokens(2, 40).clamp(max=IMAGE - 1)
    generator = torch.Generator().manual_seed(1)
    vision = config.vision_config
    if family in QWEN:
        patch = 3 * vision.temporal_patch_size * vision.patch_size**2
        images = {
            "pixel_values": torch.randn(32, patch, generator=generator),
            "image_grid_thw": torch.tensor([[1, 4, 4], [1, 4, 4]]),
        }
        count = 16 // vision.spatial_merge_size**2
    else:
        images = {
            "pixel_values": torch.randn(2, 3, 16, 16, generator=generator),
            "image_sizes": torch.tensor([[16, 16], [16, 16]]),
        }
        count = 1
    ids[0, 2 : 2 + count] = IMAGE
    ids[1, 20 : 20 + count] = IMAGE
    if family in QWEN:
        images["mm_token_type_ids"] = (ids == IMAGE).long()
    return {"input_ids": ids, **images}


def _model(family: str) -> Any:
    model = small_model(family)
    name = "image_token_id" if family in QWEN else "image_token_index"
    setattr(model.config, name, IMAGE)
    return model


def _logits(model: Any, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    with torch.inference_mode():
        return model(**inputs, use_cache=False).logits


@pytest.mark.parametrize("family", [*QWEN, "mistral3"])
def test_images_pass_through_search_and_deploy_mode(family: str) -> None:
    model = _model(family)
    inputs = _inputs(family, model.config)
    model.set_attn_implementation("eager")
    original = _logits(model, inputs)
    other = {**inputs, "pixel_values": inputs["pixel_values"].flip(0)}
    assert (_logits(model, other) - original).abs().max() > 1e-3  # the images are read
    text = model.generate(**inputs, max_new_tokens=6, do_sample=False)
    prepare_for_search(model, "eager")
    torch.testing.assert_close(_logits(model, inputs), original, **_NEAR)
    assert torch.equal(model.generate(**inputs, max_new_tokens=6, do_sample=False), text)

    mask = mask_of(model.config, WINDOW)
    apply_head_mask(model, mask)
    oracle = _logits(model, inputs)
    assert (oracle - original).abs().max() > 0.05
    text = model.generate(**inputs, max_new_tokens=6, do_sample=False)
    hybrid = materialize(model, mask)
    torch.testing.assert_close(_logits(hybrid, inputs), oracle, **_NEAR)
    assert torch.equal(hybrid.generate(**inputs, max_new_tokens=6, do_sample=False), text)
