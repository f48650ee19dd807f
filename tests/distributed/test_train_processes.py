"""Training on two gloo processes agrees with one, for every way to shard the model."""

from __future__ import annotations

import copy
import json
import math
import os
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from safetensors.torch import load_file
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from bosch.model.loading import load_config
from bosch.score.decoder_shape import DecoderShape
from stages.context import Runtime
from stages.train.checkpoint import CheckpointWriter
from stages.train.cost import restart_point_bytes
from stages.train.loop import Loop
from stages.train.parallel import leave_process_group, make_accelerator
from stages.train.schedule import make_schedule
from stages.train.stage import TrainConfig
from stages.train.storage import RestartPoints
from tests.rank_processes import run_module
from tests.training_case import (
    DEEPSPEED,
    main,
    make_case,
    metrics,
    train_here,
    train_in_processes,
)

_PASSES = 8


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_case(tmp_path_factory.mktemp("case"))


@pytest.fixture(scope="module")
def one_process(case: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    work_dir = tmp_path_factory.mktemp("alone")
    train_here(case, work_dir, train={"document_masking": True})
    return work_dir


def losses(work_dir: Path) -> list[float]:
    return [record["loss"] for record in metrics(work_dir)]


def test_recomputation_and_offloading_change_no_bit_in_two_processes(
    case: Path, tmp_path: Path
) -> None:
    train = {"total_tokens": 3 * 128, "checkpoint_tokens": []}
    runtimes: dict[str, dict[str, Any]] = {
        "none": {"checkpointing": "none"},
        "attention": {"checkpointing": "attention", "offload_activations": True},
    }
    for name, runtime in runtimes.items():
        done = train_in_processes(
            case, tmp_path / name, 2, module="tests.offloaded_training", train=train,
            runtime={"sharding": "fsdp", **runtime},
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
    assert metrics(tmp_path / "attention") == metrics(tmp_path / "none")
    assert int((tmp_path / "attention" / "offloaded.1").read_text())


def tensor_bytes(point: Path) -> int:
    """Bytes of all tensors of a restart point, over all processes."""
    metadata = FileSystemReader(point).read_metadata().state_dict_metadata.values()
    tensors = [entry for entry in metadata if isinstance(entry, TensorStorageMetadata)]
    return sum(math.prod(tensor.size) * tensor.properties.dtype.itemsize for tensor in tensors)


def checked_checkpoints(*_: str) -> None:
    """Train, and save each checkpoint's weights a second time in another way.

    `expected-<tokens>` is gathered whole by torch or DeepSpeed and written by transformers;
    `files-<tokens>.<rank>`, beside the work directory, is the number of files that the rank wrote.
    """
    written: list[Any] = []
    write, group = Loop.write_checkpoint, CheckpointWriter.write_group

    def checked_checkpoint(self: Loop, tokens: int) -> None:
        if self.runtime.sharding == "deepspeed":
            state = self.model._zero3_consolidated_16bit_state_dict()
        else:
            options = StateDictOptions(full_state_dict=True, cpu_offload=True)
            state = get_model_state_dict(self.model, options=options)
        work_dir = self.restarts.directory.parent
        if self.accelerator.is_main_process:
            state.pop("lm_head.weight")  # tied embeddings
            self.unwrapped.save_pretrained(work_dir / f"expected-{tokens}", state_dict=state)
        written.clear()
        write(self, tokens)
        # Not in the work directory, which the other rank may be hashing.
        counted = work_dir.with_name(f"{work_dir.name}.files-{tokens}.{dist.get_rank()}")
        counted.write_text(str(len(written)))

    def counted_group(self: CheckpointWriter, *args: Any) -> None:
        written.append(args)
        group(self, *args)

    Loop.write_checkpoint = checked_checkpoint  # type: ignore[method-assign]
    CheckpointWriter.write_group = counted_group  # type: ignore[method-assign]
    main()


@pytest.mark.parametrize("sharding", ["fsdp", DEEPSPEED])
def test_two_processes_train_like_one_and_resume(
    case: Path, one_process: Path, tmp_path: Path, sharding: str
) -> None:
    """Documents of uneven length make the number of predicted tokens differ between processes.

    Checkpoints have three files, which the ranks write in turn, bit-identical to whole weights.
    """
    changes: dict[str, Any] = {
        "module": f"{__name__}:checked_checkpoints",
        "train": {"document_masking": True},
        "runtime": {"sharding": sharding, "micro_batch_size": 1, "save_every_steps": 4},
        "max_shard_size": "40KB",  # a layer
    }
    killed = train_in_processes(case, tmp_path, 2, kill_at_step=7, **changes)
    assert killed.returncode != 0
    points = [path.name for path in (tmp_path / "restart").glob("step-*")]
    assert points == ["step-4"], killed.stderr
    stated = restart_point_bytes(
        DecoderShape.of(load_config(str(case / "materialize" / "model"))),
        sharding,
    )
    # The moments of each weight include a count of steps.
    assert tensor_bytes(tmp_path / "restart" / "step-4") == pytest.approx(stated, rel=2e-3)
    done = train_in_processes(case, tmp_path, 2, **changes)
    assert done.returncode == 0, done.stderr
    assert "resuming from step-4" in done.stderr

    assert losses(tmp_path) == pytest.approx(losses(one_process), rel=5e-4)
    assert not (tmp_path / "restart").exists()
    for tokens in (384, 1280):
        checkpoint = tmp_path / "checkpoints" / f"tokens-{tokens}"
        index = json.loads((checkpoint / "model.safetensors.index.json").read_text())
        files = sorted(set(index["weight_map"].values()))
        assert files == [f"model-{n:05d}-of-00003.safetensors" for n in (1, 2, 3)]
        counted = (tmp_path.with_name(f"{tmp_path.name}.files-{tokens}.{r}") for r in (0, 1))
        counts = [int(path.read_text()) for path in counted]
        assert counts == [2, 1]
        ours = {}
        for file in files:
            ours |= load_file(checkpoint / file)
        whole = load_file(tmp_path / f"expected-{tokens}" / "model.safetensors")
        assert ours.keys() == index["weight_map"].keys() == whole.keys()
        assert all(torch.equal(value, whole[name]) for name, value in ours.items())
        elements = sum(value.numel() for value in whole.values())
        assert index["metadata"] == {"total_parameters": elements, "total_size": 4 * elements}
        theirs = load_file(one_process / "checkpoints" / f"tokens-{tokens}" / "model.safetensors")
        assert ours.keys() == theirs.keys()
        for name, value in ours.items():
            torch.testing.assert_close(value, theirs[name], atol=2e-3, rtol=0, msg=name)


def test_two_copies_sharded_over_two_processes_each_train_like_one(
    case: Path, one_process: Path, tmp_path: Path
) -> None:
    """HSDP, also after a kill; each process's steps 2 and 3 are profiled."""
    changes: dict[str, Any] = {
        "train": {"document_masking": True},
        "runtime": {
            "sharding": "fsdp", "replicas": 2, "micro_batch_size": 1, "save_every_steps": 4,
            "profile_steps": [2, 3],
        },
    }  # fmt: skip
    assert train_in_processes(case, tmp_path, 4, kill_at_step=7, **changes).returncode
    done = train_in_processes(case, tmp_path, 4, **changes)
    assert done.returncode == 0, done.stderr
    assert losses(tmp_path) == pytest.approx(losses(one_process), rel=5e-4)
    traces = [path.name.partition(".")[0] for path in (tmp_path / "tensorboard").glob("*.gz")]
    assert sorted(traces) == ["rank-0", "rank-1", "rank-2", "rank-3"]


def test_after_a_lost_node_more_processes_resume_from_a_complete_point(
    case: Path, one_process: Path, tmp_path: Path
) -> None:
    """Two nodes on one host; test_runner_processes.py has torchrun's part."""
    changes: dict[str, Any] = {
        "train": {"document_masking": True},
        "runtime": {"sharding": "fsdp", "micro_batch_size": 1, "save_every_steps": 2},
    }
    killed = train_in_processes(
        case, tmp_path, 2, kill_at_step=7, kill_rank=1, per_node=1, **changes
    )
    assert killed.returncode != 0
    message = "LostRankError: another process of this run does not answer"
    assert message in killed.stderr, killed.stderr
    done = train_in_processes(case, tmp_path, 4, per_node=2, **changes)
    assert done.returncode == 0, done.stderr
    assert "resuming from step-6" in done.stderr
    assert losses(tmp_path) == pytest.approx(losses(one_process), rel=5e-4)


def test_restart_points_are_read_by_any_sharding_and_number_of_processes(
    case: Path, one_process: Path, tmp_path: Path
) -> None:
    """From two processes with FSDP to one, and from one process to two with FSDP."""
    train = {"document_masking": True}
    sharded = {"sharding": "fsdp", "micro_batch_size": 1, "save_every_steps": 4}
    killed = train_in_processes(
        case, tmp_path / "2", 2, kill_at_step=7, train=train, runtime=sharded
    )
    assert [p.name for p in (tmp_path / "2" / "restart").glob("step-*")] == ["step-4"], (
        killed.stderr
    )
    before = losses(tmp_path / "2")[:4]
    summary = train_here(
        case, tmp_path / "2", train=train, runtime={"sharding": "fsdp", "save_every_steps": 99}
    )
    assert summary["sharding"] == "none" and summary["processes"] == 1
    assert losses(tmp_path / "2") == pytest.approx(losses(one_process), rel=1e-4)
    assert losses(tmp_path / "2")[:4] == before
    assert train_in_processes(case, tmp_path / "1", kill_at_step=7, train=train).returncode
    done = train_in_processes(case, tmp_path / "1", 2, train=train, runtime=sharded)
    assert done.returncode == 0 and "resuming from step-6" in done.stderr, done.stderr
    assert losses(tmp_path / "1") == pytest.approx(losses(one_process), rel=1e-4)


def test_bf16_losses_are_not_rounded(case: Path, tmp_path: Path) -> None:
    """bf16 has 8 bits: rounding of a loss or a token count would show."""
    train = {"mixed_precision": "bf16", "total_tokens": 256, "checkpoint_tokens": []}
    train_here(case, tmp_path / "one", train=train)
    runtime = {"sharding": "fsdp"}
    done = train_in_processes(case, tmp_path / "two", 2, train=train, runtime=runtime)
    assert done.returncode == 0, done.stderr
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=1e-3)
    sharded = torch.tensor(losses(tmp_path / "two"), dtype=torch.float64)
    assert (sharded != sharded.bfloat16().double()).all()
    # Nor are weights saved in float32: they equal the trained ones.
    file = tmp_path / "two" / "checkpoints" / "tokens-256" / "model.safetensors"
    saved = torch.cat([weight.flatten() for weight in load_file(file).values()])
    assert saved.dtype == torch.float32
    assert (saved != saved.bfloat16().float()).float().mean() > 0.9


def _sum_of_outputs(model: torch.nn.Module) -> torch.Tensor:
    """A model whose gradient for each weight is 256 on the first rank and 1 on the other."""
    value = 256.0 if dist.get_rank() == 0 else 1.0
    return model(torch.full((1, 2), value, dtype=torch.bfloat16)).sum()


def _summed_by_fsdp(precision: MixedPrecisionPolicy) -> float:
    """A weight's gradient, averaged over the ranks and summed over all passes."""
    model = fully_shard(torch.nn.Linear(2, 1, bias=False), mp_policy=precision)
    for _ in range(_PASSES):
        _sum_of_outputs(model).backward()
    return float(model.weight.grad.full_tensor()[0, 0])


def _summed_by_deepspeed(accelerator: Accelerator, changes: dict[str, object]) -> float:
    """The same, derived from a step of plain gradient descent with DeepSpeed's float32 weights."""
    from deepspeed.utils import safe_get_full_fp32_param

    layer = torch.nn.Linear(2, 1, bias=False)
    torch.nn.init.zeros_(layer.weight)
    plugin = accelerator.state.deepspeed_plugin
    shipped = copy.deepcopy(plugin.hf_ds_config.config)
    plugin.hf_ds_config.config |= changes
    model, _ = accelerator.prepare(layer, torch.optim.SGD(layer.parameters(), lr=1.0))
    plugin.hf_ds_config.config = shipped
    for _ in range(_PASSES):
        with accelerator.accumulate(model):
            accelerator.backward(_PASSES * _sum_of_outputs(model))  # divides by the number of ranks
    return -float(safe_get_full_fp32_param(next(model.parameters()))[0, 0])


def gradient_sums(sharding: str) -> None:
    """On each of two ranks: sums of gradients with training's settings, and sums in bf16.

    The ranks' gradients, 256 and 1, are bf16 numbers; their sum is none.
    """
    train = TrainConfig(
        total_tokens=32 * 2 * _PASSES, batch_tokens=32 * 2 * _PASSES, checkpoint_tokens=[],
        mixed_precision="bf16", max_grad_norm=1e9,
    )  # fmt: skip
    runtime = Runtime(sharding=sharding, micro_batch_size=1)
    schedule = make_schedule(train, runtime, 32, 2, False)
    assert schedule.accumulation == _PASSES
    accelerator = make_accelerator(train, runtime, schedule, 2)
    if sharding == "fsdp":
        gradients = [
            _summed_by_fsdp(accelerator.state.fsdp_plugin.mixed_precision_policy),
            _summed_by_fsdp(MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.bfloat16)),
        ]
    else:
        gradients = [
            _summed_by_deepspeed(accelerator, {}),
            _summed_by_deepspeed(accelerator, {"communication_data_type": "bf16"}),
            _summed_by_deepspeed(accelerator, {"data_types": {"grad_accum_dtype": "bf16"}}),
        ]
    shipped, *in_bf16 = gradients
    assert shipped == _PASSES * (256 + 1) / 2 and shipped not in in_bf16, gradients
    leave_process_group()


@pytest.mark.parametrize("sharding", ["fsdp", DEEPSPEED])
def test_gradients_are_summed_in_float32(sharding: str) -> None:
    """Over ranks and over passes; a sum in bf16 would differ."""
    done = run_module(f"{__name__}:gradient_sums", [sharding], 2)
    assert done.returncode == 0, done.stderr


def test_a_hanging_rank_counts_as_lost_and_one_that_saves_for_long_does_not(
    case: Path, tmp_path: Path
) -> None:
    """A collective may take 5 seconds in a step here, but minutes while ranks wait for saving, or
    for the first rank's work at the end.
    """

    def train(slow: str) -> subprocess.CompletedProcess[str]:
        changes: dict[str, Any] = {
            "train": {
                "total_tokens": 1280 if slow == "step" else 512,
                "checkpoint_tokens": [],
            },
            "runtime": {"collective_timeout_minutes": 5 / 60, "save_every_steps": 3},
        }
        arguments = [str(case), str(tmp_path / slow), json.dumps(changes), slow]
        return run_module(f"{__name__}:slow_training", arguments, 2)

    with ThreadPoolExecutor() as pool:  # they wait most of the time
        step, save = pool.map(train, ("step", "save"))
    assert "LostRankError: another process of this run does not answer" in step.stderr
    assert "Timed out waiting 5000ms" in step.stderr and step.returncode != 0
    assert save.returncode == 0, save.stderr
    assert len(losses(tmp_path / "save")) == 4


def slow_training(case: str, work_dir: str, changes: str, slow: str) -> None:
    """On each rank: the second one hangs in a step, or the first one saves and cleans up slowly."""

    def delayed(method: Any, seconds: float, condition: Any = lambda _: True) -> Any:
        def wait_and_run(self: Any, *args: Any) -> Any:
            if condition(self):
                time.sleep(seconds)
            return method(self, *args)

        return wait_and_run

    if slow == "save":
        RestartPoints.publish = delayed(RestartPoints.publish, 6.0)  # type: ignore[method-assign]
        RestartPoints.remove = delayed(RestartPoints.remove, 6.0)  # type: ignore[method-assign]
    elif os.environ["RANK"] == "1":
        Loop.loss_of = delayed(Loop.loss_of, 9.0, lambda loop: loop.step == 8)
    main()
