"""A stage's processes: how they start, that none remains, and the error that their end becomes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bosch.errors import (
    DamagedWorkError,
    DiskFullError,
    LostRankError,
    RunError,
    StoppedError,
    UserError,
)
from bosch.files import write_json
from pipeline.recipe.load import ROOT
from pipeline.run import launch as launcher
from pipeline.run.failures import (
    DISK_FULL_STATUS,
    LOST_RANK_STATUS,
    REQUEUE_STATUS,
    Terminated,
)
from pipeline.run.launch import launch, torchrun_options
from stages.stage import World
from tests.pipeline_case import gone


@pytest.mark.parametrize(
    ("world", "options"),
    [
        (
            World(processes_per_node=3),
            ["--nproc-per-node=3", "--max-restarts=0", "--standalone", "--nnodes=1"],
        ),
        (
            World(2, 1, 4, "one", 29500),
            ["--nproc-per-node=4", "--max-restarts=0", "--nnodes=2", "--node-rank=1",
             "--master-addr=one", "--master-port=29500"],
        ),
    ],
)  # fmt: skip
def test_options_with_which_torchrun_is_started(world: World, options: list[str]) -> None:
    assert torchrun_options(world) == options


@pytest.mark.parametrize(
    ("world", "given", "expected"),
    [
        (World(), {}, {
            "BOSCH_WORK_DIR": "/w", "PYTHONUNBUFFERED": "1", "PYTHONSAFEPATH": "1",
            "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "8", "TOKENIZERS_PARALLELISM": "false",
            "DS_ACCELERATOR": "cpu", "WORLD_SIZE": None, "TQDM_DISABLE": "1",
        }),
        (World(), {}, {"TQDM_DISABLE": None}),
        (World(), {"TQDM_DISABLE": "0"}, {"TQDM_DISABLE": "0"}),
        (World(2, 0, 1), {"WORLD_SIZE": "7"}, {"BOSCH_WORK_DIR": "/w", "WORLD_SIZE": None}),
        (World(2, 1, 4, gpus=4), {"PYTHONPATH": "/a::/b"}, {
            "BOSCH_WORK_DIR": "/w node 1", "OMP_NUM_THREADS": "2", "DS_ACCELERATOR": None,
            "PYTHONPATH": f"{ROOT}:/a:/b",
        }),
        (World(processes_per_node=16), {}, {"OMP_NUM_THREADS": "1"}),
        (World(processes_per_node=2), {"OMP_NUM_THREADS": "5"}, {"OMP_NUM_THREADS": "5"}),
    ],
)  # fmt: skip
def test_environment_of_a_stages_processes(
    world: World, given: dict[str, str], expected: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("PYTHONPATH", *expected):
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(launcher, "cpu_cores", lambda: 8)
    # Progress bars are only for terminals.
    is_terminal = "TQDM_DISABLE" in expected and expected["TQDM_DISABLE"] is None
    monkeypatch.setattr(sys, "stderr", SimpleNamespace(isatty=lambda: is_terminal))
    env = launcher.stage_environment(world, "/w")
    assert {name: env.get(name) for name in expected} == expected


# Leaves a process behind, writes its inputs to a file, and ends with the order's status.
WORKER = """
import json, os, pathlib, subprocess, sys
file = pathlib.Path(sys.argv[2])
order, control = json.loads(file.read_text()), file.parent
assert not (control / "stale").exists()
left = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
inputs = [str(file), order, os.environ["BOSCH_WORK_DIR"], left.pid]
(control.parent / "inputs.json").write_text(json.dumps(inputs))
(control / "summary.json").write_text(json.dumps({"done": 1}))
if order["status"] < 0:
    os.kill(os.getpid(), -order["status"])
sys.exit(order["status"])
"""


@pytest.fixture
def worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The work directory of a stage that runs WORKER."""
    (tmp_path / "worker.py").write_text(WORKER)
    monkeypatch.setattr(launcher, "PROCESS", (str(tmp_path / "worker.py"),))
    (tmp_path / "work").mkdir()
    for rank in (0, 1):
        (tmp_path / f"work.control-{rank}").mkdir()
        (tmp_path / f"work.control-{rank}" / "stale").touch()
    return tmp_path / "work"


@pytest.mark.parametrize(("status", "node_rank"), [(0, 0), (3, 0), (0, 1)])
def test_no_process_and_no_folder_of_a_stage_remains(
    worker: Path, status: int, node_rank: int
) -> None:
    order = {"stage": "search", "work_dir": str(worker), "status": status}
    if status:
        with pytest.raises(RunError, match=r"^search: its process ended with status 3 without a"):
            launch(order, World())
    else:
        summary = launch(order, World(node_rank=node_rank))
        assert summary == ({} if node_rank else {"done": 1})
    *inputs, pid = json.loads((worker.parent / "inputs.json").read_text())
    mark = f"{worker} node 1" if node_rank else str(worker)
    assert inputs == [f"{worker}.control-{node_rank}/order.json", order, mark]
    assert gone(pid, 60)
    assert worker.exists() and not (worker.parent / f"work.control-{node_rank}").exists()


def test_torchrun_leaves_no_files_of_a_stage_that_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("work", "temporary"):
        (tmp_path / name).mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    with pytest.raises(RunError):
        launch({"stage": "search", "work_dir": str(tmp_path / "work")}, World(processes_per_node=2))
    assert not [*(tmp_path / "temporary").glob("torchelastic*")]


@pytest.mark.parametrize(
    ("status", "error"), [(REQUEUE_STATUS, StoppedError), (1, Terminated), (-9, Terminated)]
)
def test_a_stage_stopped_by_a_signal_has_saved_its_work_only_with_the_right_status(
    worker: Path, monkeypatch: pytest.MonkeyPatch, status: int, error: type[BaseException]
) -> None:
    ends, signals = iter((Terminated(), status)), list[int]()

    def wait() -> int:
        end = next(ends)
        if isinstance(end, Terminated):
            raise end
        return end

    child = SimpleNamespace(wait=wait, send_signal=signals.append)
    monkeypatch.setattr(launcher, "run_command", lambda *_: nullcontext(child))
    with pytest.raises(error):
        launch({"stage": "search", "work_dir": str(worker)}, World())
    assert signals == [signal.SIGUSR1]


@pytest.mark.parametrize("kills", [0, 1])
def test_a_killed_process_is_out_of_memory_only_if_the_kernel_reports_it(
    worker: Path, monkeypatch: pytest.MonkeyPatch, kills: int
) -> None:
    counts = iter((5, 5 + kills))
    monkeypatch.setattr(launcher, "killed_by_kernel", lambda: next(counts))
    with pytest.raises(RunError) as caught:
        launch({"stage": "search", "work_dir": str(worker), "status": -9}, World())
    assert ("because memory ran out" in str(caught.value)) == bool(kills)


def test_a_child_that_remains_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """With SIGTERM, then with SIGKILL."""
    monkeypatch.setattr(launcher, "GRACE_SECONDS", 0.2)
    stubborn = "import signal, time; signal.signal(15, signal.SIG_IGN); print(1, flush=True); "
    popen = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", lambda *a, **k: popen(*a, stdout=subprocess.PIPE, **k))
    for code, status in (
        ("print(1, flush=True); import time; time.sleep(600)", -signal.SIGTERM),
        (f"{stubborn} time.sleep(600)", -signal.SIGKILL),
    ):
        env = {**os.environ, "BOSCH_WORK_DIR": f"/none/{os.getpid()}"}
        with launcher.run_command([sys.executable, "-c", code], env) as child:
            child.stdout.readline()
        assert child.returncode == status


LOST = {"kind": "unexpected", "message": "unexpected DistBackendError: gone"}
USER, RUN = {"kind": "user", "message": "a: b"}, {"kind": "run", "message": "search: full"}
OTHER_RUN = {"kind": "run", "message": "search: empty"}
DISK = {"kind": "disk", "message": "no space"}
DAMAGED = {"kind": "damaged", "message": "no end"}
HANGS = {"kind": "lost", "message": "rank 0 hangs"}
FROZE = {"kind": "frozen", "message": "rank 0 froze"}


@pytest.mark.parametrize(
    ("files", "status", "processes", "kind", "message"),
    [
        ({"failure.0": LOST, "failure.1": RUN}, 1, 2, RunError, "search: full"),
        ({"failure.0": RUN, "failure.1": OTHER_RUN}, 1, 2, RunError, "search: full"),
        ({"failure.0": RUN, "failure.1": USER}, 1, 2, UserError, "search: a: b"),
        ({"failure.0": RUN, "failure.1": DAMAGED}, 1, 2, DamagedWorkError, "search: no end"),
        ({"ended": {"rank": 3}, "failure.0": LOST}, 1, 4, RunError,
         "search: unexpected DistBackendError: gone"),
        ({"failure.0": LOST}, -9, 2, LostRankError, "its launcher was ended (signal 9, SIGKILL)"),
        ({"failure.0": USER}, -9, 2, UserError, "search: a: b"),
        ({}, DISK_FULL_STATUS, 1, DiskFullError, "search: the disk of WORK is full"),
        ({"failure.0": RUN, "failure.1": DISK}, 1, 2, DiskFullError, "search: no space"),
        ({"failure.1": HANGS}, LOST_RANK_STATUS, 2, LostRankError,
         "search: rank 0 hangs; the same command resumes"),
        ({"failure.1": HANGS}, 1, 2, RunError, "ended with status 1"),
        ({"failure.1.frozen": FROZE}, -9, 2, LostRankError, "rank 0 froze"),
        ({"ended": {"rank": 3}}, 1, 4, RunError,
         "search: process 3 ended with status 1 without a reason in WORK/stage.rank3.log"),
        ({"ended": {"rank": 3}}, 134, 4, LostRankError,
         "search: process 3 crashed (signal 6, SIGABRT)"),
        ({"ended": {"rank": 3}, "failure.0": LOST}, 137, 4, LostRankError,
         "process 3 was ended (signal 9"),
        ({}, 1, 1, RunError, "its process ended with status 1 without a reason in "),
        ({}, 128 + 15, 1, LostRankError,
         "search: its process was ended (signal 15, SIGTERM) by a person, a job scheduler or the "
         "system, see their logs on this machine; the same command resumes from here"),
        ({}, -11, 1, LostRankError,
         "search: its process crashed (signal 11, SIGSEGV): a fault of a library or a device; see "
         "its output above and WORK/stage.log; the same command resumes"),
        ({}, -6, 2, LostRankError,
         "or NCCL gave up on one that hangs, after runtime.collective_timeout"),
    ],
)  # fmt: skip
def test_status_and_signal_decide_the_error_of_a_failed_stage(
    files: dict[str, Any], status: int, processes: int, kind: type[Exception], message: str,
    tmp_path: Path,
) -> None:  # fmt: skip
    for name, content in files.items():
        write_json(tmp_path / f"{name}.json", content)
    order = {"stage": "search", "work_dir": str(tmp_path)}
    world = World(processes_per_node=processes)
    error = launcher.failure_of(tmp_path, status, order, world, False)
    assert type(error) is kind and message in str(error).replace(str(tmp_path), "WORK")


@pytest.mark.parametrize(("blocks", "is_full"), [(255, True), (256, False)])
def test_a_disk_with_less_than_a_mebibyte_left_is_full(
    blocks: int, is_full: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The 1 MiB blocks of f_bfree are reserved for root.
    left = SimpleNamespace(f_bavail=blocks, f_frsize=4096, f_bfree=2**20, f_bsize=2**20, f_files=0)
    monkeypatch.setattr(os, "statvfs", lambda folder: left)
    order = {"stage": "search", "work_dir": str(tmp_path)}
    error = launcher.failure_of(tmp_path, 1, order, World(), False)
    assert (" is full; free some space" in str(error)) == is_full


@pytest.mark.parametrize(
    ("status", "is_killed"), [(-9, True), (128 + 9, True), (-15, False), (1, False)]
)
def test_only_a_killed_process_is_out_of_memory(
    status: int, is_killed: bool, tmp_path: Path
) -> None:
    order = {"stage": "search", "work_dir": str(tmp_path)}
    error = launcher.failure_of(tmp_path, status, order, World(), memory_ran_out=True)
    assert ("because memory ran out" in str(error)) == is_killed
