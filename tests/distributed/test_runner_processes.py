"""Distributed stages: one torchrun launch, two processes; two nodes on one host; clean failures."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess

import pytest

from tests.pipeline_case import ROOT, Case, gone, wait_for

# Variables of other launchers: Slurm with PMI, Kubernetes with a service "master", accelerate.
_OF_ANOTHER_LAUNCHER = {
    "RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", "PMI_RANK": "3",
    "PMI_SIZE": "8", "MASTER_ADDR": "nowhere.invalid", "MASTER_PORT": "tcp://10.0.0.1:2222",
    "PET_NNODES": "2", "PET_RDZV_BACKEND": "c10d", "TORCHELASTIC_USE_AGENT_STORE": "True",
    "ACCELERATE_MIXED_PRECISION": "fp16",
}  # fmt: skip


def test_two_processes_run_one_stage(case: Case) -> None:
    """Stages ignore the variables of other launchers."""
    case.make("original")
    command = case.command("run", "runtime.processes=2", "--until", "train", distributed=True)
    environment = case.environment(**_OF_ANOTHER_LAUNCHER)
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert case.calls("train", rank=0) == case.calls("train", rank=1) == 1
    output = json.loads((case.output("train") / "output.json").read_text())
    assert output["world"] == "2"
    manifest = json.loads((case.output("train") / "manifest.json").read_text())
    assert (manifest["processes"], manifest["summary"]["rank"]) == (2, 0)
    assert (case.output("train") / "stage.rank1.log").exists()
    assert not (case.output("search") / "calls.1.txt").exists()


@pytest.mark.parametrize("kind", ["bug", "kill"])
def test_a_failure_under_torchrun_is_one_sentence(case: Case, kind: str) -> None:
    case.make("original")
    done = case.fork(
        "run", "runtime.processes=2", "--until", "train", distributed=True,
        FAKE_FAIL=f"train={kind}",
    )  # fmt: skip
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    reason = "process [01] was ended by SIGKILL; the same command resumes" if kind == "kill" else ""
    assert re.match(f"error: train: {reason}", done.stderr.strip().splitlines()[-1])
    assert len(done.stderr.strip().splitlines()) == 1


def test_two_nodes_share_one_run(case: Case) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    nodes = [
        case.start(
            "run", distributed=True, NNODES="2", NODE_RANK=str(rank), MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(port),
        )
        for rank in (0, 1)
    ]  # fmt: skip
    done = [node.done() for node in nodes]
    assert [node.returncode for node in done] == [0, 0], done
    assert case.calls("train", rank=0) == case.calls("train", rank=1) == 1
    assert case.calls("search") == 1
    assert "stage search runs" not in done[1].stdout


def test_killing_the_runner_ends_all_ranks(case: Case) -> None:
    case.make("original")
    run = case.start(
        "run", "runtime.processes=2", "--until", "train", distributed=True, FAKE_SLEEP="train=60"
    )
    pids = [int(wait_for(case.folder / f"train.{rank}")) for rank in (0, 1)]
    run.send_signal(signal.SIGKILL)
    run.wait()
    assert all(gone(pid) for pid in pids)
