"""mlx-lm against transformers: logits of every supported family, in one pass and in pieces."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("mlx_lm")

import mlx.core as mx
import numpy as np
import torch
from mlx_lm.utils import load_model

from bosch.engines.mlx.models import SERVED, register
from bosch.errors import UserError
from bosch.model.families import decoder_layers
from tests.hybrid_case import FAMILY_NAMES, small_config
from tests.vllm_case import SIZES, load_reference, random_prompts, save_hybrid, save_menu_hybrid

WINDOW, COUNTS, TOLERANCE = 8, (1, 3, 2), 1e-4
# A chunk, single tokens while the window fills and wraps around, and then longer chunks.
PIECES = (3, 1, 17, 1, 1, 9, 1, 30, 1, 1, 1, 1, 1, 1, 2)
# Attention of a random model is not scaled by default, and its logits are too large to compare.
_EXTRA: dict[str, dict[str, Any]] = {"granitemoe": {"attention_multiplier": 32**-0.5}}

register()


def largest_difference(folder: Path, lengths: tuple[int, ...]) -> float:
    """Largest difference of mlx-lm's logits from transformers', for whole and split prompts."""
    reference, (model, _) = load_reference(folder), load_model(folder)
    largest = 0.0
    for prompt in random_prompts(lengths):
        with torch.inference_mode():
            expected = reference(torch.tensor([prompt]), use_cache=False).logits[0].numpy()
        caches, read, parts = model.make_cache(), 0, []
        for count in (*PIECES, len(prompt)):
            piece = prompt[read : read + count]
            if piece:
                parts.append(np.array(model(mx.array([piece]), cache=caches))[0])
            read += count
        whole = np.array(model(mx.array([prompt])))[0]
        for logits in (whole, np.concatenate(parts)):
            largest = max(largest, float(np.abs(logits - expected).max()))
    return largest


@pytest.mark.parametrize("sinks", [0, 3])
@pytest.mark.parametrize("family", SERVED)
def test_a_family_has_transformers_logits(tmp_path: Path, family: str, sinks: int) -> None:
    extra = _EXTRA.get(family, {})
    rows = len(decoder_layers(small_config(family, **SIZES, **extra)).full)
    save_hybrid(tmp_path, family, COUNTS[:rows], WINDOW, sinks, **extra)
    assert largest_difference(tmp_path, (5, WINDOW, WINDOW + 1, 70)) < TOLERANCE


def test_three_windows_have_transformers_logits(tmp_path: Path) -> None:
    save_menu_hybrid(tmp_path, "qwen3", [30, 12, 1])
    assert largest_difference(tmp_path, (5, 12, 13, 100)) < TOLERANCE


def test_an_unsupported_family_is_refused(tmp_path: Path) -> None:
    (other,) = {"gemma2"} & set(FAMILY_NAMES) - set(SERVED)
    save_hybrid(tmp_path, other, COUNTS[:2], WINDOW)
    with pytest.raises(UserError, match="models of type 'gemma2' are not supported"):
        load_model(tmp_path)


_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
_LONG = {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}


@pytest.mark.parametrize(
    ("family", "changes", "said"),
    [
        ("qwen3", {"hidden_act": "gelu"}, "hidden_act is gelu"),
        ("qwen2_moe", {"norm_topk_prob": True}, "norm_topk_prob is True"),
        ("phi3", {"rope_parameters": {**_LONG, "rope_theta": 1e4}}, "rope_type is longrope"),
        (
            "qwen3",
            {"rope_parameters": {**_YARN, "attention_factor": 1.0}},
            "attention_factor is 1.0",
        ),
        ("qwen3", {"rope_parameters": {**_YARN, "truncate": False}}, "truncate is False"),
    ],
)
def test_settings_that_mlx_lm_reads_differently_are_refused(
    tmp_path: Path, family: str, changes: dict[str, Any], said: str
) -> None:
    save_hybrid(tmp_path, family, COUNTS, WINDOW)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    with pytest.raises(UserError, match=f"mlx-lm: .*{said}, which it does not read as"):
        load_model(tmp_path)
