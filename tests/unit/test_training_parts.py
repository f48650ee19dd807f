"""Data order, document positions, metrics and files of training, one at a time."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from bosch.errors import RunError, UserError
from stages.configs import Runtime, TrainConfig
from stages.training import parallel
from stages.training.data import PackedSequences, collate, collate_documents
from stages.training.metrics import MetricsLog, read_metrics
from stages.training.model import _apply_liger, check_liger_runs, load_for_training, saved_dtype
from stages.training.schedule import Schedule, make_schedule
from stages.training.storage import RestartPoints, check_layout, disk_errors, restart_step
from tests.training_case import SEQUENCE_LENGTH, SEQUENCES, make_case, stage_config


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_case(tmp_path_factory.mktemp("case"))


def schedule(steps: int = 10) -> Schedule:
    tokens = 4 * SEQUENCE_LENGTH
    train = TrainConfig(total_tokens=steps * tokens, batch_tokens=tokens, checkpoint_tokens=[])
    return make_schedule(train, Runtime(), SEQUENCE_LENGTH, 1, on_gpu=False)


def read_all(case: Path, seed: int, steps: int = 10) -> np.ndarray:
    data = PackedSequences(case / "prepare" / "train")
    data.arrange(schedule(steps), seed)
    return np.stack([data[i]["input_ids"] for i in range(len(data))])


def test_every_sequence_is_read_once_in_an_order_of_the_seed(case: Path) -> None:
    stored = PackedSequences(case / "prepare" / "train")
    rows = np.stack([stored[i]["input_ids"] for i in range(SEQUENCES)])
    first, second = read_all(case, 1), read_all(case, 2)
    assert sorted(map(bytes, first)) == sorted(map(bytes, rows))
    assert not np.array_equal(first, second) and not np.array_equal(first, rows)
    assert np.array_equal(first, read_all(case, 1))
    assert len(read_all(case, 1, steps=3)) == 12


def test_too_little_data_is_refused_with_both_counts(case: Path) -> None:
    with pytest.raises(UserError) as error:
        read_all(case, 1, steps=11)
    assert "1,408" in str(error.value) and "1,280" in str(error.value)
    assert "prepare.train_tokens" in str(error.value)


def test_positions_start_again_with_every_document() -> None:
    row = {"input_ids": np.arange(6, dtype=np.int32), "document_lengths": np.array([2, 1, 3])}
    batch = collate_documents([row])
    assert batch["position_ids"].tolist() == [[0, 1, 0, 0, 1, 2]]
    assert batch["labels"].tolist() == [[-100, 1, -100, -100, 4, 5]]
    assert batch["input_ids"].tolist() == [[0, 1, 2, 3, 4, 5]]
    plain = collate([row, row])
    assert set(plain) == {"input_ids", "labels"} and plain["input_ids"].dtype == torch.int64
    assert torch.equal(plain["labels"], plain["input_ids"])


def test_metrics_behind_the_restart_point_are_cut_off(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path, schedule(), 0)
    for step in range(1, 6):
        log.write(step, 1.0 / step, 1e-3, 0.5)
    log.close()
    path = tmp_path / "metrics.jsonl"
    with path.open("a") as file:
        file.write('{"step": 6, "lo')  # killed while writing
    assert [r["step"] for r in read_metrics(path, 9)] == [1, 2, 3, 4, 5]

    resumed = MetricsLog(tmp_path, schedule(), 3)
    resumed.write(4, 9.0, 1e-3, 0.5)
    resumed.close()
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert [r["step"] for r in records] == [1, 2, 3, 4]
    assert [r["tokens"] for r in records] == [128, 256, 384, 512]
    assert records[3]["loss"] == 9.0 and records[3]["seconds"] >= records[2]["seconds"]


@pytest.mark.parametrize("damage", [b"", b'{"step": 1}\n\xff\n', b'{"step": 2}\n', b"[1]\n{"])
def test_metrics_that_lost_steps_are_not_continued(tmp_path: Path, damage: bytes) -> None:
    (tmp_path / "metrics.jsonl").write_bytes(damage)
    with pytest.raises(RunError, match=r"metrics\.jsonl: damaged, it holds [01] of the 3 steps"):
        MetricsLog(tmp_path, schedule(), 3)
    assert (tmp_path / "metrics.jsonl").read_bytes().startswith(damage[:11])


def test_only_the_latest_complete_restart_point_counts(tmp_path: Path) -> None:
    points = RestartPoints(tmp_path)
    assert points.latest() is None
    for step in (8, 16, 104):
        written = points.writing / f"checkpoint-{step}"
        written.mkdir(parents=True)
        (written / "optimizer.pt").write_text(str(step))
        points.publish(written, step, {"sharding": "none", "processes": 1})
    (points.writing / "checkpoint-112").mkdir()  # killed while writing
    latest = points.latest()
    assert latest is not None and restart_step(latest) == 104
    assert (latest / "optimizer.pt").read_text() == "104"
    points.clean()
    assert sorted(path.name for path in points.directory.iterdir()) == ["step-104"]


def test_restart_point_of_another_sharding_is_refused(tmp_path: Path) -> None:
    points = RestartPoints(tmp_path)
    written = points.writing / "checkpoint-1"
    written.mkdir(parents=True)
    points.publish(written, 1, {"sharding": "none", "processes": 2})
    point = points.latest()
    assert point is not None
    check_layout(point, {"sharding": "none", "processes": 1})
    with pytest.raises(UserError, match=r"runtime\.sharding = none.*fsdp"):
        check_layout(point, {"sharding": "fsdp", "processes": 2})


def test_a_full_disk_is_told_in_one_sentence(tmp_path: Path) -> None:
    message = r"cannot write a restart point.*GB free.*No space"
    with pytest.raises(RunError, match=message), disk_errors("a restart point", tmp_path):
        raise OSError(28, "No space left on device")


def test_sharding_that_cannot_run_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    parallel.check_sharding_possible(Runtime(sharding="none"))
    for sharding in ("fsdp", "deepspeed"):
        with pytest.raises(UserError, match=f"runtime.sharding = {sharding} needs at least two"):
            parallel.check_sharding_possible(Runtime(sharding=sharding))
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(parallel.importlib.util, "find_spec", lambda name: None)
    parallel.check_sharding_possible(Runtime(sharding="fsdp"))
    with pytest.raises(UserError, match="deepspeed, which is not installed"):
        parallel.check_sharding_possible(Runtime(sharding="deepspeed"))


def test_another_sharding_than_asked_for_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    plain = torch.nn.Linear(2, 2)
    parallel.check_sharding_runs(plain, Runtime(sharding="none"))
    with pytest.raises(RunError, match="fsdp was asked for and none would run"):
        parallel.check_sharding_runs(plain, Runtime(sharding="fsdp"))
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(RunError, match="Linear with 2 processes"):
        parallel.check_sharding_runs(plain, Runtime(sharding="none"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is present")
def test_liger_is_refused_without_a_gpu(case: Path) -> None:
    config = stage_config(train={"liger": True})
    with pytest.raises(UserError, match=r"train\.liger = true needs a GPU"):
        load_for_training(
            case / "materialize" / "model", config.model, config.section, config.runtime
        )


def test_liger_must_patch_every_norm_and_mlp(case: Path) -> None:
    config = stage_config()
    model = load_for_training(
        case / "materialize" / "model", config.model, config.section, config.runtime
    )
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    with pytest.raises(RunError, match=r"the loss .HybridQwen3ForCausalLM. still runs"):
        check_liger_runs(model)
    pytest.importorskip("liger_kernel")
    _apply_liger(model)
    model.model.layers[1].mlp.forward = type(model.model.layers[1].mlp).forward
    with pytest.raises(RunError, match=r"model\.layers\.1\.mlp .Qwen3MLP. still runs"):
        check_liger_runs(model)


def test_saved_precision_is_read_from_the_directory(tmp_path: Path) -> None:
    for text, dtype in {'{"dtype": "bfloat16"}': torch.bfloat16, "{}": torch.float32}.items():
        (tmp_path / "config.json").write_text(text)
        assert saved_dtype(tmp_path) == dtype
