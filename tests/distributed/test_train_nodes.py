"""Training on two nodes of one host: one is killed, the other says so, and both go on."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.training_case import ROOT, make_case, metrics, train_here, train_in_processes


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_case(tmp_path_factory.mktemp("case"))


def start_nodes(
    case: Path, work_dir: Path, changes: dict[str, Any], kill_on: int
) -> list[subprocess.Popen[str]]:
    """torchrun with one process on each of two nodes; that of node `kill_on` dies at step 5."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    nodes = []
    for node in (0, 1):
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        if node == kill_on:
            environment |= {"KILL_AT_STEP": "5", "KILL_RANK": str(node)}
        command = [
            sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=1", "--nnodes=2",
            f"--node-rank={node}", "--master-addr=127.0.0.1", f"--master-port={port}",
            "-m", "tests.training_case", str(case), str(work_dir), json.dumps(changes),
        ]  # fmt: skip
        nodes.append(
            subprocess.Popen(
                command, cwd=ROOT, env=environment, stderr=subprocess.PIPE,
                stdout=subprocess.DEVNULL, text=True,
            )
        )  # fmt: skip
    return nodes


def test_a_lost_node_is_named_and_both_go_on_to_the_same_losses(case: Path, tmp_path: Path) -> None:
    changes: dict[str, Any] = {"runtime": {"sharding": "fsdp", "save_every_steps": 2}}
    nodes = start_nodes(case, tmp_path / "work", changes, kill_on=1)
    errors = [node.communicate(timeout=300)[1] for node in nodes]
    assert all(node.returncode != 0 for node in nodes)
    assert "LostRankError: node 1 (process 1) of this run does not answer" in errors[0], errors[0]
    done = train_in_processes(case, tmp_path / "work", 2, per_node=1, **changes)
    assert done.returncode == 0, done.stderr
    assert "resuming from step-4" in done.stderr
    train_here(case, tmp_path / "alone")
    losses, alone = (
        [step["loss"] for step in metrics(tmp_path / name)] for name in ("work", "alone")
    )
    assert losses == pytest.approx(alone, rel=5e-4)
