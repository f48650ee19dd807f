"""A stage's processes: their start and threads, that none remains, and what their end means."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bosch.errors import DiskFullError, LostRankError, RunError, StoppedError, UserError
from bosch.files import write_json
from pipeline.recipe.load import ROOT
from pipeline.run import launch as launcher
from pipeline.run.launch import launch, torchrun_options
from stages.context import ModelConfig, Runtime, StageConfig
from stages.report.stage import ReportConfig
from stages.stage import World
from tests.pipeline_case import gone
from tests.search_case import order


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


# Leaves a process behind, writes its inputs to a file, and ends as the order says.
WORKER = """
import json, os, pathlib, subprocess, sys
file = pathlib.Path(sys.argv[2])
order, control = json.loads(file.read_text()), file.parent
left = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
inputs = [str(control), os.environ["BOSCH_WORK_DIR"], left.pid]
pathlib.Path(order["work_dir"], "inputs.json").write_text(json.dumps(inputs))
(control / "summary.json").write_text(json.dumps({"done": 1}))
if order["status"] < 0:
    os.kill(os.getpid(), -order["status"])
sys.exit(order["status"])
"""


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The work directory of a stage that runs WORKER."""
    (tmp_path / "worker.py").write_text(WORKER)
    monkeypatch.setattr(launcher, "PROCESS", (str(tmp_path / "worker.py"),))
    (tmp_path / "work").mkdir()
    return tmp_path / "work"


@pytest.mark.parametrize(("status", "node_rank"), [(0, 0), (3, 0), (0, 1)])
def test_no_process_and_no_folder_of_a_stage_remains(
    work: Path, status: int, node_rank: int
) -> None:
    search = {"stage": "search", "work_dir": str(work), "status": status}
    if status:
        with pytest.raises(RunError, match=r"^search: its process ended with status 3 without a"):
            launch(search, World())
    else:
        assert launch(search, World(node_rank=node_rank)) == {"done": 1}
    control, mark, pid = json.loads((work / "inputs.json").read_text())
    assert mark == (f"{work} node 1" if node_rank else str(work))
    assert gone(pid, 60) and not Path(control).exists()


@pytest.mark.parametrize("kills", [0, 1])
def test_a_killed_process_is_out_of_memory_only_if_the_kernel_reports_it(
    work: Path, monkeypatch: pytest.MonkeyPatch, kills: int
) -> None:
    counts = iter((5, 5 + kills))
    monkeypatch.setattr(launcher, "killed_by_kernel", lambda: next(counts))
    with pytest.raises(RunError) as caught:
        launch({"stage": "search", "work_dir": str(work), "status": -9}, World())
    assert ("because memory ran out" in str(caught.value)) == bool(kills)


def test_a_child_that_remains_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "GRACE_SECONDS", 0.2)
    code = "import signal, time; signal.signal(2, signal.SIG_IGN); time.sleep(600)"
    env = {**os.environ, "BOSCH_WORK_DIR": f"/none/{os.getpid()}"}
    with launcher.run_child([sys.executable, "-c", code], env) as child:
        pass
    assert child.poll() in (-signal.SIGKILL, -signal.SIGINT, 1)


def test_a_stage_of_several_processes_is_not_a_fork(
    work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a branch, in a run whose other stages are; the stand-in for torchrun reads no order."""
    monkeypatch.setattr(launcher, "_Fork", None)
    order = {"stage": "search", "work_dir": str(work), "status": 0}
    with pytest.raises(RunError, match="its process ended with status 1"):
        launch(order, World(processes_per_node=2), fork=True)


_FORKING = """
import json, os, pathlib, sys
from pipeline.run.launch import launch, preload
from stages.stage import World
order = json.loads(pathlib.Path(sys.argv[1]).read_text())
forks = preload([order["function"].partition(":")[0]], World(), "info")
print(os.getpid(), json.dumps(launch(order, World(), forks)))
"""


@pytest.mark.parametrize("seed", [0, 1])
def test_with_modules_loaded_a_stage_is_a_fork_that_leaves_no_process(
    tmp_path: Path, seed: int
) -> None:
    config = StageConfig(ReportConfig(), ModelConfig(path="x"), seed, Runtime())
    file = tmp_path / "order.json"
    write_json(file, order(config, {}, tmp_path, "tests.fake_stages:leaves_a_fork"))
    done = subprocess.run(
        [sys.executable, "-c", _FORKING, str(file)], capture_output=True, text=True
    )
    facts = json.loads((tmp_path / "facts.json").read_text())
    assert gone(facts["helper"]) and facts.pop("mark") == str(tmp_path)
    assert facts["argument"] == "-c"  # a process of its own has the path of its program there
    if seed:
        assert "its process was ended by SIGKILL" in done.stderr
    else:
        parent, _, summary = done.stdout.partition(" ")
        assert json.loads(summary) == facts and int(parent) == facts["parent"]


def failure(kind: str, message: str = "full") -> dict[str, str]:
    return {"kind": kind, "message": message}


@pytest.mark.parametrize(
    ("entries", "kind", "message"),
    [
        ([failure("lost"), failure("run", "search: full")], RunError, "search: full"),
        ([failure("run"), failure("user", "a: b")], UserError, "search: a: b"),
        ([failure("run"), failure("disk")], DiskFullError, "search: full"),
        ([failure("lost"), failure("stopped")], StoppedError, "search: full"),
        # Libraries raise their own errors when another process was killed.
        ([failure("unexpected"), failure("killed")], LostRankError, "search: full"),
        # torchrun stops the others.
        ([failure("stopped"), failure("killed")], LostRankError, "search: full"),
        ([], LostRankError, "search: its process was ended by SIGKILL; the same command resumes"),
    ],
)
def test_the_reason_of_the_first_kind_is_reported(
    entries: list[dict[str, str]], kind: type[Exception], message: str, tmp_path: Path
) -> None:
    for rank, entry in enumerate(entries):
        write_json(tmp_path / f"failure.{rank}.json", entry)
    error = launcher.failure_of(tmp_path, -9, {"stage": "search"}, False)
    assert type(error) is kind and str(error).startswith(message)


_SHOW = """
import os
def main():
    print(os.environ["OMP_WAIT_POLICY"], os.environ["GOMP_SPINCOUNT"])
    return 0
"""


def _variables(tmp_path: Path, **environment: str) -> str:
    (tmp_path / "shows_threads.py").write_text(_SHOW)
    clean = {name: value for name, value in os.environ.items() if "OMP" not in name}
    done = subprocess.run(
        [sys.executable, str(ROOT / "pipeline/__main__.py"), "--process", "shows_threads"],
        env={**clean, "PYTHONPATH": str(tmp_path), **environment},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    return done.stdout.strip()


def test_waiting_threads_do_not_spin_unless_the_user_says_so(tmp_path: Path) -> None:
    assert _variables(tmp_path) == "PASSIVE 0"
    assert _variables(tmp_path, OMP_WAIT_POLICY="ACTIVE") == "ACTIVE 0"
