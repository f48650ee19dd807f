"""Locks of outputs: one holder at a time, named to others, and freed when it dies."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from bosch.errors import RunError
from pipeline.run import locks
from pipeline.run.locks import hold, holder

HOLDER = """
import pathlib, sys, time
from pipeline.run.locks import hold
with hold(pathlib.Path(sys.argv[1]), "tiny: stage search", "tiny"):
    print("held", flush=True)
    time.sleep(600)
"""


def test_a_second_run_is_told_who_holds_the_lock_which_a_kill_frees(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(locks, "MOMENT_SECONDS", 0.1)
    lock = tmp_path / "locks" / "search.lock"
    assert holder(lock) is None
    command = [sys.executable, "-c", HOLDER, str(lock)]
    first = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert first.stdout is not None and first.stdout.readline() == "held\n"
    who = f"pid {first.pid} on "
    assert (holder(lock) or "").startswith(who)
    with (
        pytest.raises(RunError, match=rf"stage search is being made by {who}.*; wait for it, or"),
        hold(lock, "tiny: stage search", "tiny"),
    ):
        pass
    timer = threading.Timer(0.5, first.send_signal, [signal.SIGKILL])
    timer.start()
    with hold(lock, "tiny: stage search", "tiny", wait=True):
        assert timer.finished.is_set()
        assert lock.with_suffix(".holder").read_text().startswith(f"pid {os.getpid()} on ")
    first.wait()
    assert capsys.readouterr().out.count(f"waiting: tiny: stage search is being made by {who}") == 1
    assert holder(lock) is None and not lock.with_suffix(".holder").exists()


def test_a_folder_in_the_place_of_a_lock_is_reported(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="cannot be locked"), hold(tmp_path, "search", "tiny"):
        pass
