"""Data order, document positions, weight decay, metrics and files of training, one at a time."""

from __future__ import annotations

import errno
import hashlib
import itertools
import json
import os
import sys
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from datasets import load_from_disk
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from bosch.backends import BACKENDS
from bosch.errors import DiskFullError, RunError, UserError
from bosch.journal import Journal
from bosch.model.loading import load_model
from bosch.model.materialize import materialize
from bosch.window import Window
from stages.context import ModelConfig, Runtime
from stages.materialize.model_card import UNTRAINED
from stages.train import parallel, storage
from stages.train.checkpoint import CheckpointWriter
from stages.train.data import PackedSequences
from stages.train.loop import Loop
from stages.train.metrics import MetricsLog, Stopwatch
from stages.train.model import (
    apply_liger,
    attention_backend,
    check_liger_runs,
    load_for_training,
    shard_teacher,
    use_grouped_experts,
)
from stages.train.schedule import Schedule, make_schedule
from stages.train.stage import TrainConfig
from stages.train.storage import RestartPoints, disk_errors, restart_step
from stages.train.trainable import parameter_groups, restrict_training, untrained_parameters
from tests.hybrid_case import random_mask, small_model, tokens
from tests.training_case import SEQUENCE_LENGTH, SEQUENCES, make_case, stage_config


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_case(tmp_path_factory.mktemp("case"))


def schedule(steps: int = 10) -> Schedule:
    tokens = 4 * SEQUENCE_LENGTH
    train = TrainConfig(total_tokens=steps * tokens, batch_tokens=tokens, checkpoint_tokens=[])
    return make_schedule(train, Runtime(), SEQUENCE_LENGTH, 1, on_gpu=False)


def read_all(case: Path, seed: int) -> np.ndarray:
    data = PackedSequences(case / "prepare" / "train", seed)
    return np.stack([data[i]["input_ids"] for i in range(SEQUENCES)])


def test_every_sequence_is_read_once_in_an_order_of_the_seed(case: Path) -> None:
    rows = np.array(load_from_disk(str(case / "prepare" / "train"))["input_ids"][:])
    first, second = read_all(case, 1), read_all(case, 2)
    assert sorted(map(bytes, first)) == sorted(map(bytes, rows))
    assert not np.array_equal(first, second) and not np.array_equal(first, rows)
    assert np.array_equal(first, read_all(case, 1))


def test_experts_that_stay_without_grouped_products_are_refused() -> None:
    model = small_model("qwen3_moe")
    model.set_experts_implementation("eager")
    model.set_experts_implementation = lambda name: None
    with pytest.raises(RunError, match="by eager, not by grouped_mm"):
        use_grouped_experts(model)


@pytest.mark.parametrize(("family", "precision"), [("qwen3_moe", "no"), ("gpt_oss", "bf16")])
def test_experts_are_computed_in_the_precision_of_training(
    family: str, precision: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Autocast does not reach a grouped product. Weights and their gradients stay float32."""
    loaded = small_model(family).float()
    loaded.set_experts_implementation("eager")  # as its config.json may say
    monkeypatch.setattr("stages.train.model.load_model", lambda *_, **options: loaded)
    train = TrainConfig(mixed_precision=precision)
    trained: Any = load_for_training(Path("unused"), ModelConfig(path="unused"), train, Runtime())
    with GroupedProducts() as products, torch.autocast("cpu", torch.bfloat16, precision == "bf16"):
        ids = tokens(1, 12)
        trained(input_ids=ids, labels=ids)["loss"].backward()
    assert products.dtypes == {torch.bfloat16 if precision == "bf16" else torch.float32}
    experts = {n: p for n, p in trained.named_parameters() if ".experts." in n}
    assert experts and {p.grad.dtype for p in experts.values()} == {torch.float32}


class GroupedProducts(TorchDispatchMode):
    """Records the precisions of the inputs of all grouped products."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes = set[torch.dtype]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "grouped_mm" in str(func):
            self.dtypes |= {x.dtype for x in args[:2]}
        return func(*args, **(kwargs or {}))


def write_metrics(folder: Path, steps: int) -> Path:
    log = MetricsLog(folder, schedule(), 0)
    for step in range(1, steps + 1):
        log.write(step, 1.0 / step, 0.5, learning_rate=1e-3)
    log.close()
    return folder / "metrics.jsonl"


def test_norms_and_biases_do_not_decay_whatever_their_names() -> None:
    def linear() -> torch.nn.Linear:
        return torch.nn.Linear(4, 4, bias=False)

    modules = torch.nn.ModuleDict(
        {"ln": torch.nn.LayerNorm(4), "proj": torch.nn.Linear(4, 4), "q_norm": linear(),
         "RMSNorm_1": linear(), "norm_f": linear(), "post_norm1": linear(),
         "normal": linear(), "frozen": linear().requires_grad_(False)}
    )  # fmt: skip
    names = {parameter: name for name, parameter in modules.named_parameters()}
    decayed, others = parameter_groups(modules, 0.3)
    assert (decayed["weight_decay"], others["weight_decay"]) == (0.3, 0.0)
    assert {names[weight] for weight in decayed["params"]} == {"proj.weight", "normal.weight"}
    assert {names[weight] for weight in others["params"]} == {
        "ln.weight", "ln.bias", "proj.bias", "q_norm.weight", "RMSNorm_1.weight", "norm_f.weight",
        "post_norm1.weight",
    }  # fmt: skip


def test_metrics_after_the_restart_point_are_cut_off(tmp_path: Path) -> None:
    path = write_metrics(tmp_path, 5)
    with path.open("a") as file:
        file.write('{"step": 6, "lo')  # killed while writing
    assert [r["step"] for r in Journal(path).read_new(dict)] == [1, 2, 3, 4, 5]

    resumed = MetricsLog(tmp_path, schedule(), 3)
    resumed._started -= 8
    resumed.write(4, 9.0, 0.5, learning_rate=1e-3)
    resumed.write(5, 9.0, 0.5, learning_rate=1e-3)
    resumed.close()
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert [r["step"] for r in records] == [1, 2, 3, 4, 5]
    assert [r["tokens"] for r in records] == [128, 256, 384, 512, 640]
    assert records[3]["loss"] == 9.0 and records[3]["seconds"] >= records[2]["seconds"] + 8
    board = EventAccumulator(str(tmp_path / "tensorboard"))
    board.Reload()
    losses = [(event.step, round(event.value, 4)) for event in board.Scalars("train/loss")]
    assert losses == [(1, 1.0), (2, 0.5), (3, 0.3333), (4, 9.0), (5, 9.0)]
    # At eight seconds for one step there are six, at eight for two five.
    left = [r["seconds_left"] for r in records[3:]]
    assert left[0] >= 48 and left[1] >= 20 and left == pytest.approx([48, 20], rel=0.3)


def test_final_loss_is_none_if_its_record_is_lost(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = write_metrics(tmp_path, 10)
    assert MetricsLog(tmp_path, schedule(), 10).final_loss == 0.1
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]))
    assert MetricsLog(tmp_path, schedule(), 10).final_loss is None
    assert "holds 9 of the 10 steps done" in caplog.text


def save_point(points: RestartPoints, step: int, sharding: str = "none") -> Path:
    points.writing.mkdir(parents=True, exist_ok=True)
    (points.writing / "__0_0.distcp").write_text(f"state {step}")
    points.publish(step, {"sharding": sharding, "processes": 2})
    return points.directory / f"step-{step}"


def test_the_newest_complete_restart_point_is_the_latest(tmp_path: Path) -> None:
    points = RestartPoints(tmp_path)
    assert points.latest() is None
    for step in (8, 16, 104):
        save_point(points, step)
    (points.directory / "step-abc").mkdir()
    (points.writing / ".metadata").mkdir(parents=True)  # killed while writing
    latest = points.latest()
    assert latest is not None and restart_step(latest) == 104
    assert (latest / "__0_0.distcp").read_text() == "state 104"


@pytest.mark.parametrize(
    "harm",
    [
        lambda point: (point / "__0_0.distcp").write_bytes(b"stat" + bytes(4)),
        lambda point: (point / "point.json").unlink(),
        lambda point: point.rename(point.with_name("step-24")),
    ],
)
def test_a_damaged_restart_point_is_set_aside_for_the_one_before(
    tmp_path: Path, harm: Callable[[Path], object], caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing is deleted, and without another point training does not begin again."""
    points = RestartPoints(tmp_path)
    whole, newest = save_point(points, 8), save_point(points, 16)
    (newest / ".DS_Store").touch()
    assert points.latest() == newest
    harm(newest)
    assert points.latest() == whole and "is damaged" in caplog.text
    (aside,) = points.directory.glob("damaged-0-step-*")
    assert (aside / "__0_0.distcp").is_file()
    whole.rename(points.directory / "step-9")
    for _ in range(2):
        with pytest.raises(UserError, match=r"restore its files and its name, or delete"):
            points.latest()
    next(points.directory.glob("damaged-1-*")).rename(whole)
    assert points.latest() == whole


def test_the_error_of_a_process_that_cannot_load_is_named(tmp_path: Path) -> None:
    for error in (torch.OutOfMemoryError("x"), RuntimeError("Connection reset by peer")):
        with pytest.raises(type(error)) as caught, storage.loading(tmp_path):
            raise CheckpointException("read", {1: (error, None)})  # type: ignore[dict-item]
        assert caught.value is error
    damaged = CheckpointException("read", {1: (EOFError("short"), None)})  # type: ignore[dict-item]
    message = r"cannot be loaded \(short\); remove it"
    with pytest.raises(RunError, match=message), storage.loading(tmp_path):
        raise damaged


def test_a_failed_background_write_of_a_restart_point_is_raised_at_the_next_check(
    tmp_path: Path,
) -> None:
    points = RestartPoints(tmp_path)
    points._pending = Future()
    points.check()
    points._pending.set_exception(OSError(28, "No space left on device"))
    with pytest.raises(RunError, match="No space left on device"):
        points.check()
    points.check()
    points._pending = Future()
    points._pending.set_exception(OSError(28, "No space left on device"))
    with pytest.raises(RunError, match="No space left on device"):  # also at the next save
        points.save({}, 8, {}, 1.0)


def test_each_file_of_a_checkpoint_is_hashed_by_one_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("tokens-1/a", "tokens-1/b/c", "tokens-2/a"):
        (tmp_path / "checkpoints" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "checkpoints" / name).write_text(name)
    monkeypatch.setattr(storage, "processes", lambda: 2)
    shares = []
    for rank in range(2):
        monkeypatch.setattr(storage, "rank", lambda rank=rank: rank)
        shares.append(storage.checkpoint_hashes(tmp_path))
    digest = {n: hashlib.sha256(n.encode()).hexdigest() for n in ("tokens-1/a", "tokens-2/a")}
    assert shares[0] == {name[:8]: {"a": value} for name, value in digest.items()}
    assert [*shares[1]["tokens-1"]] == ["b/c"] and storage.checkpoint_hashes(tmp_path / "x") == {}


def test_restart_points_of_deepspeed_fix_sharding_and_processes(tmp_path: Path) -> None:
    points = RestartPoints(tmp_path)
    deepspeed = {"sharding": "deepspeed", "processes": 2}
    points.check_layout(deepspeed)  # no point yet
    save_point(points, 1, "fsdp")
    for sharding, processes in itertools.product(("none", "fsdp"), (1, 2, 8)):
        points.check_layout({"sharding": sharding, "processes": processes})
    with pytest.raises(UserError, match=r"runtime\.sharding = fsdp on 2 process"):
        points.check_layout(deepspeed)
    save_point(points, 2, "deepspeed")
    points.check_layout(deepspeed)
    for changed in ({"sharding": "fsdp"}, {"processes": 1}):
        with pytest.raises(UserError, match=r"runtime\.sharding = deepspeed on 2 process"):
            points.check_layout({**deepspeed, **changed})


def test_the_disk_is_checked_before_the_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is full, or another process does not see the first one's files."""
    points = RestartPoints(tmp_path)
    points.check_shared_disk()
    assert not list(points.directory.iterdir())
    with monkeypatch.context() as patch:
        patch.setattr(storage, "from_all_processes", lambda value: [value, False])
        with pytest.raises(RunError, match=r"^not every process .* a disk that all nodes share$"):
            points.check_shared_disk()

    def full(folder: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(storage.files, "make_folder", full)
    message = r"cannot write a restart point below [^:]*GB free\): \[Errno 28\] No space left on"
    with pytest.raises(RunError, match=message):
        points.check_shared_disk()


@pytest.mark.parametrize(
    ("error", "free", "is_full"),
    [
        (RuntimeError("[enforce fail] unexpected pos 704 vs 598"), 2**20 - 1, True),
        (RuntimeError("[enforce fail] unexpected pos 704 vs 598"), 2**20, False),
        (RuntimeError("No space left on device (os error 28)"), 2**30, True),
        (OSError(errno.EDQUOT, "Disk quota exceeded"), 2**30, True),
        (OSError(errno.EACCES, "Permission denied"), 0, False),
    ],
)
def test_a_full_disk_is_distinguished_from_a_write_that_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, free: int, is_full: bool
) -> None:
    """torch's writer of archives does not say why a write failed."""
    left = SimpleNamespace(f_bavail=free, f_frsize=1, f_blocks=0, f_bfree=0)
    monkeypatch.setattr(os, "statvfs", lambda folder: left)
    with pytest.raises(RunError) as failure, disk_errors("a restart point", tmp_path):
        raise error
    assert isinstance(failure.value, DiskFullError) == is_full
    assert str(failure.value).endswith(f"GB free): {error}")


def test_a_missing_folder_is_a_disk_error_but_an_error_of_a_gpu_or_a_rank_is_not(
    tmp_path: Path,
) -> None:
    """gloo's error at saving is one that training reports as a lost rank."""
    gone = tmp_path / "run" / "train"
    with pytest.raises(RunError, match=r"GB free\): .*No such file"), disk_errors("x", gone):
        (gone / "file").touch()
    for said in (
        "CUDA error: an illegal memory access was encountered",
        "[third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [::1]:40123",
    ):
        error = RuntimeError(said)
        for raised in (error, CheckpointException("write", {0: (error, None)})):  # type: ignore[dict-item]
            with pytest.raises(RuntimeError) as caught, disk_errors("x", tmp_path):
                raise raised
            assert caught.value is error


def test_each_process_may_use_its_share_of_the_hosts_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    monkeypatch.setattr(parallel, "host_memory", lambda: 100)
    assert parallel.least_memory(torch.device("cpu")) == 25

    def unknown() -> float:
        raise RunError("unknown")

    monkeypatch.setattr(parallel, "host_memory", unknown)
    assert parallel.least_memory(torch.device("cpu")) == float("inf")


def test_one_process_shards_nothing_and_deepspeed_must_be_installed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    assert parallel.actual_sharding(Runtime(sharding="deepspeed")).sharding == "none"
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert parallel.actual_sharding(Runtime(sharding="fsdp")).sharding == "fsdp"
    with pytest.raises(UserError, match="deepspeed"):
        parallel.actual_sharding(Runtime(sharding="deepspeed"))


def test_liger_must_patch_every_norm_and_mlp(case: Path) -> None:
    config = stage_config()
    model = load_for_training(
        case / "materialize" / "model", config.model, config.section, config.runtime
    )
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    with pytest.raises(RunError, match=r"self_attn\.q_norm .Qwen3RMSNorm. still runs"):
        check_liger_runs(model)
    pytest.importorskip("liger_kernel")
    apply_liger(model)
    model.model.layers[1].mlp.forward = type(model.model.layers[1].mlp).forward
    with pytest.raises(RunError, match=r"layers\.1\.mlp .Qwen3MLP. still runs"):
        check_liger_runs(model)


@pytest.mark.parametrize(
    ("precision", "runtime", "name"),
    [
        ("bf16", {}, "varlen"),
        ("no", {}, "flex"),
        ("no", {"checkpointing": "attention"}, "sdpa"),
        ("no", {"checkpointing": "full"}, "flex"),
        ("bf16", {"context_parallel": 2}, "flex"),
        ("bf16", {"attention": "eager"}, "eager"),
    ],
)
def test_training_takes_the_fastest_backend_that_supports_the_model(
    case: Path,
    precision: str,
    runtime: dict[str, Any],
    name: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for backend in ("varlen", "flex"):
        monkeypatch.setitem(BACKENDS, backend, BACKENDS[backend]._replace(usable=lambda: True))
    config = stage_config(train={"mixed_precision": precision}, runtime=runtime)
    folder = case / "materialize" / "model"
    assert attention_backend(folder, config.model, config.section, config.runtime) == name


def test_sharding_loads_the_buffers_of_the_checkpoint() -> None:
    """The buffers by which experts are chosen; a checkpoint without them is refused."""
    source, model = small_model("glm4_moe"), small_model("glm4_moe", seed=1)
    for buffer in source.buffers():
        if buffer.is_floating_point():
            buffer.copy_(torch.rand_like(buffer))
    weights = {name: value.clone() for name, value in source.state_dict().items()}
    bias = next(name for name in weights if name.endswith("e_score_correction_bias"))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        alone: Any = SimpleNamespace(device=torch.device("cpu"), torch_device_mesh=None)
        shard_teacher(alone, model, dict(weights))
        for name, value in model.state_dict().items():
            whole = value.full_tensor() if isinstance(value, DTensor) else value
            assert torch.equal(whole, weights[name]), name
        del weights[bias]
        with pytest.raises(KeyError, match=bias):
            shard_teacher(alone, small_model("glm4_moe"), weights)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("family", ["dots1", "flint"])
def test_a_teacher_without_weights_has_the_dtypes_of_one_with_weights(
    tmp_path: Path, family: str
) -> None:
    """Weights sent to its shards are rounded to these: biases that choose experts, sinks."""
    small_model(family).bfloat16().save_pretrained(tmp_path)
    types = [
        {name: value.dtype for name, value in load_model(tmp_path, **how).state_dict().items()}
        for how in ({}, {"weights": False})
    ]
    assert types[0] == types[1] and torch.float32 in types[0].values()


@pytest.mark.parametrize("family", ["qwen3", "qwen3_vl"])
def test_vision_weights_are_not_trained_on_text(family: str) -> None:
    """DDP would wait for their gradients, and restart points would lack their moments."""
    model = small_model(family)
    restrict_training(model)
    frozen = {name for name, p in model.named_parameters() if not p.requires_grad}
    assert frozen == {name for name, _ in model.named_parameters() if ".visual." in name}
    assert bool(frozen) == (family == "qwen3_vl")


@pytest.mark.parametrize(
    ("family", "name"),
    [("afmoe", "expert_bias"), ("laguna", "e_score_correction_bias"), ("qwen3_moe", None)],
)
def test_weights_that_the_familys_own_code_never_trains_are_not_trained(
    tmp_path: Path, family: str, name: str | None
) -> None:
    """from_pretrained makes the biases that balance experts trainable; they get no gradient."""
    small_model(family).save_pretrained(tmp_path)
    model = load_model(tmp_path, dtype=torch.float32)
    restrict_training(model, untrained_parameters(tmp_path))
    model(input_ids=tokens(2, 32), labels=tokens(2, 32)).loss.backward()
    without = {n.rpartition(".")[2] for n, p in model.named_parameters() if not p.requires_grad}
    assert without == ({name} if name else set())
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)


def test_a_checkpoint_in_bf16_keeps_float32_where_the_base_has_it(tmp_path: Path) -> None:
    base = small_model("glm4_moe")
    for name, bias in base.named_buffers():
        if name.endswith("e_score_correction_bias"):
            bias.copy_(7 + 0.01 * torch.randn_like(bias))
    base.save_pretrained(tmp_path / "base")
    start = tmp_path / "start"
    hybrid = materialize(load_model(tmp_path / "base"), random_mask(Window(8)))
    hybrid.save_pretrained(start)
    (start / "README.md").write_text(f"{UNTRAINED}\n", encoding="utf-8")
    CheckpointWriter(tmp_path, start, torch.bfloat16, "1MB").write(1, hybrid.float())
    written = load_file(tmp_path / "checkpoints" / "tokens-1" / "model.safetensors")
    for name, weight in load_file(start / "model.safetensors").items():
        assert written[name].dtype == weight.dtype and torch.equal(written[name], weight), name


def test_a_checkpoint_in_several_files_equals_what_transformers_saves(tmp_path: Path) -> None:
    """Also experts (one weight in the model, many in the files) and integers."""
    model = materialize(small_model("qwen3_moe"), random_mask(Window(8)))
    model.register_buffer("count", torch.tensor([3]))
    model.register_buffer("scratch", torch.ones(2))
    vars(model)["_keys_to_ignore_on_save"] = {"scratch"}
    start = tmp_path / "start"
    model.save_pretrained(start)
    (start / "README.md").write_text(f"{UNTRAINED}\n", encoding="utf-8")
    (start / "templates").mkdir()
    (start / "templates" / "tool.jinja").write_text("a template")
    CheckpointWriter(tmp_path, start, torch.float32, "40KB").write(1000, model)
    written = tmp_path / "checkpoints" / "tokens-1000"
    names = json.loads((written / "model.safetensors.index.json").read_text())["weight_map"]
    expected = load_file(start / "model.safetensors")
    assert names.keys() == expected.keys() and len(set(names.values())) > 1
    # The weights at the start must not be loaded instead of the several files.
    assert {file.name for file in written.glob("*.safetensors")} == set(names.values())
    assert (written / "templates" / "tool.jinja").read_text() == "a template"
    for file in set(names.values()):
        for name, value in load_file(written / file).items():
            assert names[name] == file and value.dtype == expected[name].dtype
            assert torch.equal(value, expected[name])


def test_seconds_spent_outside_of_steps_are_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 1.0, 4.0, 5.0, 7.0])
    monkeypatch.setattr("stages.train.metrics.time", SimpleNamespace(monotonic=lambda: next(clock)))
    watch = Stopwatch()
    with watch.timed("saving"):
        pass
    assert watch.read() == (5.0, {"saving": 3.0})
    assert watch.read() == (2.0, {})


def test_random_numbers_of_a_step_depend_on_seed_step_and_process() -> None:
    def drawn(seed: int, step: int, process: int) -> int:
        loop: Any = SimpleNamespace(
            seed=seed, step=step, accelerator=SimpleNamespace(process_index=process),
            optimizer=SimpleNamespace(param_groups=[]), learning_rate=1.0, budget=None,
        )  # fmt: skip
        Loop.start_step(loop)
        return torch.initial_seed()

    places = list(itertools.product((1, 2), (1, 2), (0, 1)))
    seeds = [drawn(*place) for place in places]
    assert len(set(seeds)) == len(places) and seeds == [drawn(*place) for place in places]


def test_speed_leaves_out_saving_and_scoring(tmp_path: Path) -> None:
    """Five of ten seconds."""
    written: dict[str, Any] = {}
    spent = {"checkpoint": 2.0, "answers": 3.0, "data": 0.25}
    loop: Any = SimpleNamespace(
        stopwatch=SimpleNamespace(read=lambda: (10.0, spent)), _peak_flops=4e3,
        metrics_log=SimpleNamespace(write=lambda *_, **values: written.update(values)),
        restarts=SimpleNamespace(directory=tmp_path / "restart"), step=3, learning_rate=0.5,
        schedule=SimpleNamespace(batch_tokens=100, sequences=4),
        flops=1e4,
    )  # fmt: skip
    Loop.log(loop, 1.0, 2.0, {"answers": 0.5})
    assert written.pop("memory") > 2**20
    assert written == {
        "learning_rate": 0.5, "tokens_per_second": 20.0, "mfu": 0.5, "data_seconds": 0.25,
        "checkpoint_seconds": 2.0, "answers": 0.5,
    }  # fmt: skip
