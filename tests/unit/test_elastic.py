"""Signals to the launcher of a stage's processes reach them, whenever they come."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from pipeline.run import elastic


def test_a_signal_is_passed_on() -> None:
    """In a process of its own: here it would also end what other tests have started."""
    code = (
        "import signal, subprocess, sys\n"
        "from pipeline.run import elastic\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        "elastic.forward_signal(signal.SIGTERM, None)\n"
        "print(child.wait(30))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=90)
    assert done.stdout.strip() == str(-signal.SIGTERM), done.stderr


def test_the_handler_has_all_it_needs_before_a_signal_comes() -> None:
    """A second signal may interrupt the first, and would meet a module half imported."""
    code = "import sys, pipeline.run.elastic; print('psutil' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "True", done.stderr


def test_a_signal_before_there_are_processes_ends_the_launcher(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(elastic.psutil.Process, "children", lambda self: [])
    with pytest.raises(SystemExit) as stop:
        elastic.forward_signal(signal.SIGTERM, None)
    assert stop.value.code == 143
