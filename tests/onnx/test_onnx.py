"""Hybrids in ONNX Runtime GenAI: greedy tokens of `generate`, and caches that hold their windows.

launch/test.sh onnx
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime_genai
import pytest
import torch

from bosch.engines.onnx import export
from bosch.errors import UserError
from bosch.masks import HeadMask
from bosch.model.loading import load_model
from bosch.model.materialize import materialize
from tests.hybrid_case import KV_HEADS, small_model

WIDE, NARROW, SLACK, TOKENS = 9, 6, 16, 40
MASK = HeadMask([[0, WIDE, 0, NARROW], [WIDE] * KV_HEADS, [NARROW, NARROW, WIDE, WIDE]])


def saved(folder: Path, family: str, mask: HeadMask, **changes: Any) -> Path:
    materialize(small_model(family, **changes), mask).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        # The kernel needs a head size that 16 divides.
        ("llama", {"head_dim": 16}),
        ("qwen2", {"num_attention_heads": KV_HEADS, "hidden_size": 64}),
        ("qwen3", {"head_dim": 16}),
        ("mistral", {"head_dim": 16}),
    ],
)
def test_tokens_and_caches(family: str, changes: dict[str, Any], tmp_path: Path) -> None:
    hybrid = saved(tmp_path / "hybrid", family, MASK, **changes)
    model = onnxruntime_genai.Model(str(export(hybrid, tmp_path / "onnx")))
    prompt = np.random.default_rng(0).integers(3, 61, 30)
    options = onnxruntime_genai.GeneratorParams(model)
    length = 30 + TOKENS
    options.set_search_options(max_length=length, min_length=length, do_sample=False)
    engine = onnxruntime_genai.Generator(model, options)
    engine.append_tokens(prompt.astype(np.int32))
    while not engine.is_done():
        engine.generate_next_token()
    ours = load_model(hybrid, dtype="float32").generate(
        torch.from_numpy(prompt)[None],
        max_length=length,
        min_length=length,
        do_sample=False,
        eos_token_id=2,
    )
    assert list(engine.get_sequence(0)) == ours[0].tolist()
    held = [engine.get_input(f"past_key_values.{n}.key").shape[1:3] for n in range(6)]
    # A layer's groups: full heads, then the widest window; one size of cache for all windows.
    window = WIDE + SLACK
    assert [tuple(shape) for shape in held] == [
        (2, length), (1, window), (1, window), (4, window), (2, window), (2, window)
    ]  # fmt: skip


def test_what_the_engine_does_not_hold_is_refused(tmp_path: Path) -> None:
    sinks = saved(tmp_path / "sinks", "qwen3", HeadMask(MASK.windows, 2))
    with pytest.raises(UserError, match="have no sinks"):
        export(sinks, tmp_path / "onnx")
    other = saved(tmp_path / "other", "gemma2", HeadMask([[0, 0, WIDE, WIDE]] * 2))
    with pytest.raises(UserError, match="decoders of Llama's and Qwen3's form"):
        export(other, tmp_path / "onnx")
    small = saved(tmp_path / "small", "qwen3", MASK)
    with pytest.raises(UserError, match="heads of 8"):
        export(small, tmp_path / "onnx")
    assert not (tmp_path / "onnx").exists()
