"""The formula for the memory of a training step, against a step on fake tensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker

from bosch.hybrid import AttentionContext
from bosch.masks import HeadMask
from bosch.model.loading import auto_class, load_config
from bosch.model.search_mode import apply_head_mask, prepare_for_search
from bosch.score.decoder_shape import DecoderShape
from bosch.window import Window
from stages.context import Runtime
from stages.train.loss import install_loss
from stages.train.memory import TrainingJob, chunk_tokens
from stages.train.model import recompute_activations
from stages.train.stage import TrainConfig

SHAPES = Path(__file__).resolve().parents[2] / "recipes" / "shapes"
TOKENS, WINDOW = 8192, Window(1024)


def job(
    config: Any, runtime: dict[str, Any], processes: int = 1, capacity: float = 0.0, **train: Any
) -> TrainingJob:
    options = TrainConfig(
        batch_tokens=processes * TOKENS, total_tokens=processes * TOKENS, checkpoint_tokens=[],
        **train,
    )  # fmt: skip
    shape = DecoderShape.of(config)
    return TrainingJob(
        shape,
        options,
        Runtime(**runtime),
        TOKENS,
        mask_for(config).layers,
        processes,
        True,
        capacity,
    )


def mask_for(config: Any) -> HeadMask:
    """A quarter of each layer's heads is full."""
    layers, heads = config.num_hidden_layers, config.num_key_value_heads
    return HeadMask.evenly(layers, heads, layers * (heads - heads // 4), WINDOW)


def shape_config(name: str, layers: int) -> Any:
    config = load_config(str(SHAPES / name))
    config.num_hidden_layers = layers
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:layers]
    return config


def bytes_on_fake_tensors(config: Any, checkpointing: str, bf16: bool) -> int:
    """Peak of a forward and a backward pass: no weights and no memory."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        config._attn_implementation = "sdpa"
        model = auto_class(config).from_config(config, dtype=torch.float32).train()
        prepare_for_search(model, "sdpa")
        apply_head_mask(model, mask_for(config))
        install_loss(model)
        if checkpointing == "full":
            recompute_activations(model)
        tracker = MemTracker()
        tracker.track_external(model)
        ids = torch.zeros(1, TOKENS, dtype=torch.long)
        with tracker:
            with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
                loss = model(input_ids=ids, labels=ids, num_items_in_batch=TOKENS)["loss"]
            loss.backward()
    (peak,) = tracker.get_tracker_snapshot("peak").values()
    return int(peak["Total"])


@pytest.mark.parametrize(
    ("name", "precision", "checkpointing", "layers"),
    [
        ("qwen3_1p7b", "bf16", "full", 3), ("qwen3_1p7b", "no", "none", 2),
        ("llama3p1_8b", "no", "full", 2), ("llama3p1_8b", "bf16", "none", 3),
    ],
)  # fmt: skip
def test_the_formula_is_within_15_percent_of_fake_tensors(
    name: str, precision: str, checkpointing: str, layers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(AttentionContext, "is_plain", True)  # a GPU's kernels need no masks
    config = shape_config(name, layers)
    training = job(config, {"checkpointing": checkpointing}, mixed_precision=precision)
    # The optimizer's moments are no part of the two passes.
    stated = training.memory().peak - 8 * training.shape.parameters
    measured = bytes_on_fake_tensors(config, checkpointing, precision == "bf16")
    assert stated == pytest.approx(measured, rel=0.15)


def test_auto_keeps_activations_where_that_takes_at_most_60_percent_of_the_device() -> None:
    config = shape_config("qwen3_1p7b", 3)
    kept = job(config, {"checkpointing": "none"}).memory().peak
    for capacity, chosen in ((kept / 0.59, "none"), (kept / 0.61, "full")):
        assert job(config, {}, capacity=capacity).memory().checkpointing == chosen
    offloaded = job(config, {"offload_activations": True}, capacity=1e15).memory()
    assert offloaded.checkpointing == "full"


def test_sharding_and_recomputation_take_less_and_a_teacher_more() -> None:
    config = shape_config("qwen3_1p7b", 3)

    def peak(runtime: dict[str, Any], **train: Any) -> float:
        return job(config, runtime, 4, **train).memory().peak

    full = {"checkpointing": "full"}
    assert peak({"checkpointing": "none"}) > peak({"checkpointing": "attention"}) > peak(full)
    fsdp = {**full, "sharding": "fsdp"}
    assert peak(full) > peak(fsdp) > peak({**fsdp, "offload_activations": True})
    assert peak(fsdp, teacher="original") > peak(fsdp)
    weights = job(config, fsdp, 4).memory().weights
    assert weights == (4 + 8) * DecoderShape.of(config).parameters / 4


def test_logits_are_computed_in_chunks_of_256_mib() -> None:
    assert chunk_tokens(2**20) == 64
    assert chunk_tokens(2**20, distilled=True) == 32
    assert chunk_tokens(2**27) == 1
