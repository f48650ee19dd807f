"""The launcher of a stage's processes: it passes signals on, and its status says how they ended."""

from __future__ import annotations

import json
import logging
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed import DistError
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from bosch.this_process import heeded
from pipeline.run import elastic


def failed(*ends: tuple[int, int, int]) -> ChildFailedError:
    """The error that torchrun raises: rank, time and status of each ended process."""
    error = ChildFailedError.__new__(ChildFailedError)
    error.failures = {
        rank: SimpleNamespace(timestamp=time, exitcode=status) for rank, time, status in ends
    }
    return error


@pytest.mark.parametrize(
    ("ends_with", "status", "left"),
    [
        (None, 0, {}),
        (failed((0, 3, -9), (1, 2, 1)), 1, {"ended.json": {"rank": 1}}),
        (failed((0, 1, 76), (1, 2, -9)), 137, {"ended.json": {"rank": 1}}),
        (failed((0, 1, 76), (1, 2, 76)), 76, {"ended.json": {"rank": 0}}),
        (failed((0, 1, 1), (1, 2, 75)), 75, {"ended.json": {"rank": 1}}),
        (SignalException("", signal.SIGINT), 130, {}),
        (DistError("no\nanswer"), 76, {"failure.node.json": {
            "kind": "lost",
            "message": "the launchers of the nodes cannot reach each other (no answer)",
        }}),
        (DistError("port: 29500, code: -98, name: EADDRINUSE"), 1, {"failure.node.json": {
            "kind": "user",
            "message": "this node's MASTER_PORT is in use (port: 29500, code: -98, name: "
            "EADDRINUSE); name a free one on all nodes",
        }}),
    ],
)  # fmt: skip
def test_the_status_is_that_of_the_first_failure(
    ends_with: Exception | None, status: int, left: dict[str, Any], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    parents: list[int] = []

    def torchrun(arguments: list[str]) -> None:
        assert arguments[0].startswith("--signals-to-handle=") and arguments[1:] == sys.argv[1:]
        for number in heeded(signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
            assert signal.getsignal(number) is elastic.forward_signal
        if ends_with is not None:
            raise ends_with

    monkeypatch.setenv(elastic.PARENT, "1")
    monkeypatch.setattr(sys, "argv", ["elastic", "--nnodes=1", "-m", str(tmp_path / "order.json")])
    monkeypatch.setattr(elastic, "die_with_runner", lambda: parents.append(1))
    monkeypatch.setattr("torch.distributed.run.main", torchrun)
    monkeypatch.setattr(logging.getLogger("torch.distributed"), "setLevel", parents.append)
    assert elastic.main() == status
    assert {file.name: json.loads(file.read_text()) for file in tmp_path.iterdir()} == left
    assert parents == [1, logging.CRITICAL], "its messages are the runner's own"


@pytest.mark.parametrize(
    ("interrupt", "found", "named"),
    [
        (signal.default_int_handler, elastic.forward_signal, "SIGINT,SIGQUIT"),
        (signal.SIG_IGN, signal.SIG_IGN, "SIGQUIT"),
    ],
)
def test_an_ignored_interrupt_stays_ignored(
    interrupt: Any, found: Any, named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a background command of a script; torchrun does not change the stop signals."""
    seen: list[Any] = []

    def torchrun(arguments: list[str]) -> None:
        seen.extend((signal.getsignal(signal.SIGINT), arguments[0]))

    monkeypatch.setenv(elastic.PARENT, "1")
    monkeypatch.setattr(elastic, "die_with_runner", lambda: None)
    monkeypatch.setattr("torch.distributed.run.main", torchrun)
    signal.signal(signal.SIGINT, interrupt)
    signal.signal(signal.SIGQUIT, signal.SIG_DFL)
    assert elastic.main() == 0
    assert seen == [found, f"--signals-to-handle={named}"]


def test_the_signal_handler_imports_nothing() -> None:
    """A second signal may interrupt the first one, and would find a half-imported module."""
    code = "import sys, pipeline.run.elastic; print('psutil' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "True", done.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_during_the_import_of_torch_gives_no_traceback(number: int) -> None:
    code = (
        "import os, sys, types; from pipeline.run import elastic\n"
        f"def find(name, *_): name == 'torch' and os.kill(os.getpid(), {number:d})\n"
        "sys.meta_path.insert(0, types.SimpleNamespace(find_spec=find)); elastic.main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (128 + number, "")


def test_signals_are_passed_on_or_end_the_launcher_if_there_are_no_processes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sent: list[int] = []
    children = [SimpleNamespace(send_signal=sent.append)] * 2
    monkeypatch.setattr(elastic.psutil.Process, "children", lambda self: children)
    elastic.forward_signal(signal.SIGTERM, None)
    assert sent == [signal.SIGTERM] * 2
    children.clear()
    with pytest.raises(SystemExit) as stop:
        elastic.forward_signal(signal.SIGTERM, None)
    assert stop.value.code == 143
