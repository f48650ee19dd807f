"""Peak memory of each of two ranks in training, summed over tensors."""

from __future__ import annotations

import ctypes
import gc
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file
from torch.distributed.tensor import DTensor
from transformers import Qwen3Config, Qwen3ForCausalLM

from bosch.masks import HeadMask
from bosch.model.materialize import materialize
from stages.measure.process import memory_meter
from stages.train import run
from stages.train.loop import Loop
from stages.train.storage import RestartPoints
from tests.training_case import (
    DEEPSPEED,
    SEQUENCE_LENGTH,
    main,
    make_case,
    stage_config,
    train_in_processes,
)

HIDDEN, INTERMEDIATE = 768, 3072
_M_MMAP_THRESHOLD = -3  # of malloc.h


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_case(tmp_path_factory.mktemp("case"))


def results_of_ranks(
    function: str, case: Path, work_dir: Path, **changes: Any
) -> list[dict[str, Any]]:
    """The results of `function`, one of those below, which runs on each of two ranks."""
    done = train_in_processes(case, work_dir, 2, module=f"{__name__}:{function}", **changes)
    assert done.returncode == 0, done.stderr
    return [json.loads((work_dir / f"result.{rank}.json").read_text()) for rank in (0, 1)]


def write_result(work_dir: Path, result: dict[str, Any]) -> None:
    (work_dir / f"result.{os.environ['RANK']}.json").write_text(json.dumps(result))


def test_fsdp_shards_gradients_between_micro_batches_and_keeps_bf16_layer_inputs(
    case: Path, tmp_path: Path
) -> None:
    """Equal bytes after every micro-batch: half of the model in float32 on each of two ranks."""
    weights = load_file(case / "materialize" / "model" / "model.safetensors")
    parameters = sum(value.numel() for value in weights.values())
    layers, hidden = 2, 32
    ranks = results_of_ranks(
        "measured_steps", case, tmp_path,
        train={"total_tokens": 256, "checkpoint_tokens": [], "mixed_precision": "bf16"},
        runtime={"sharding": "fsdp", "micro_batch_size": 1, "checkpointing": "full"},
    )  # fmt: skip
    for rank in ranks:
        assert len(rank["gradients"]) == 4  # two steps of two micro-batches
        assert len(set(rank["gradients"])) == 1
        assert rank["gradients"][0] == 4 * parameters / 2
        assert set(rank["layer_outputs"]) == {"torch.bfloat16"}
        # The layers' inputs in bf16, and four tensors of the same shape: the last layer's
        # output and its sum, and the head's normed states and their gradient.
        assert max(rank["layer_inputs"]) <= SEQUENCE_LENGTH * hidden * 2 * (layers + 4), rank


def _bytes(tensors: list[torch.Tensor]) -> int:
    local = [t.to_local() if isinstance(t, DTensor) else t for t in tensors]
    storages = [t.untyped_storage() for t in local if t.device.type != "meta"]
    return sum(
        {storage.data_ptr(): storage.nbytes() for storage in storages if storage.nbytes()}.values()
    )


def gradient_bytes() -> int:
    """Bytes of gradients that wait for the optimiser, including whole ones that FSDP sets aside."""
    alive = gc.get_objects()
    tensors = [candidate for candidate in alive if issubclass(type(candidate), torch.Tensor)]
    gradients = [t.grad for t in tensors if t.is_leaf and t.grad is not None]
    for part in alive:
        if type(part).__name__ == "FSDPParam" and part.unsharded_accumulated_grad is not None:
            gradients.append(part.unsharded_accumulated_grad)
    return _bytes(gradients)


def measured_steps(*_: str) -> None:
    """Train, recording gradients after each micro-batch, and inputs and outputs of layers."""
    measured: dict[str, Any] = {"gradients": [], "layer_inputs": [], "layer_outputs": []}
    loss_of, backward = Loop.loss_of, Accelerator.backward

    def measured_backward(self: Any, *args: Any, **kwargs: Any) -> None:
        backward(self, *args, **kwargs)
        measured["gradients"].append(gradient_bytes())

    def record_output(layer: Any, args: Any, output: torch.Tensor) -> None:
        measured["layer_outputs"].append(str(output.dtype))

    def measured_loss(self: Loop, batch: Any, predicted: int) -> Any:
        shape = (*batch["input_ids"].shape, self.unwrapped.config.hidden_size)
        saved: list[torch.Tensor] = []

        def save_and_record(tensor: torch.Tensor) -> torch.Tensor:
            if tuple(tensor.shape) == shape:
                saved.append(tensor)
            return tensor

        layers = self.unwrapped.get_decoder().layers
        hooks = [layer.register_forward_hook(record_output) for layer in layers]
        with torch.autograd.graph.saved_tensors_hooks(save_and_record, lambda tensor: tensor):
            loss = loss_of(self, batch, predicted)
        for hook in hooks:
            hook.remove()
        measured["layer_inputs"].append(_bytes(saved))
        return loss

    Accelerator.backward = measured_backward
    Loop.loss_of = measured_loss  # type: ignore[method-assign]
    write_result(main(), measured)


@pytest.fixture(scope="module")
def large_case(case: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The case with a model of 71 million parameters in bf16."""
    config = Qwen3Config(
        vocab_size=64, hidden_size=HIDDEN, intermediate_size=INTERMEDIATE, num_hidden_layers=8,
        num_attention_heads=8, num_key_value_heads=4, head_dim=96, tie_word_embeddings=True,
        max_position_embeddings=128, bos_token_id=None, eos_token_id=0,
    )  # fmt: skip
    base = Qwen3ForCausalLM(config).to(torch.bfloat16)
    folder = tmp_path_factory.mktemp("large")
    mask = HeadMask(((6, 0, 0, 0),) * 8)
    materialize(base, mask).save_pretrained(folder / "materialize" / "model")
    (folder / "prepare").symlink_to(case / "prepare")
    return folder


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="peaks need Linux's /proc")
@pytest.mark.parametrize("sharding", ["fsdp", DEEPSPEED])
def test_loading_needs_little_more_than_one_bf16_model_per_node(
    large_case: Path, tmp_path: Path, sharding: str
) -> None:
    """Besides the ranks' float32 shards, which are in the GPU's memory if there is one."""
    runtime = {"sharding": sharding, "micro_batch_size": 1}
    ranks = results_of_ranks("measured_load", large_case, tmp_path, runtime=runtime)
    parameters = ranks[0]["parameters"]
    saved = 2 * parameters
    shard = 4 * parameters / 2
    print({name: [rank[name] / saved for rank in ranks] for name in ("peak", "kept")})
    assert all(0.9 * shard < rank["kept"] < 1.5 * shard for rank in ranks)
    largest_weight = 4 * HIDDEN * INTERMEDIATE  # in float32, on each rank
    assert sum(rank["peak"] - rank["kept"] for rank in ranks) < 1.2 * saved + 2 * largest_weight


def measured_load(case: str, work_dir: str, changes: str) -> None:
    """Load a model for training; write its parameters, and resident bytes since the load began.

    Every weight has its own mapping, so that a freed one is returned to the system.
    """
    # By default glibc raises this threshold when it first frees a large block. Freed weights that
    # lie between kept shards then stay resident: as much memory as the shards themselves.
    ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, 2**18)
    work, config = Path(work_dir), stage_config(**json.loads(changes))
    inputs = {name: Path(case, name) for name in ("prepare", "materialize")}
    load, meter, before = run.load_for_training, memory_meter(torch.device("cpu")), 0

    def load_from_here(*args: Any, **options: Any) -> Any:
        nonlocal before
        gc.collect()
        meter.restart()
        before = meter.in_use()
        return load(*args, **options)

    run.load_for_training = load_from_here
    # DeepSpeed's copies for its optimizer do not belong to loading.
    Accelerator.prepare = lambda self, *parts: parts
    loop = run.build_loop(config, inputs, work, RestartPoints(work))
    gc.collect()
    measured = {"peak": meter.peak() - before, "kept": meter.in_use() - before}
    measured["parameters"] = sum(getattr(p, "ds_numel", p.numel()) for p in loop.model.parameters())
    write_result(work, measured)
