"""Locks: one holder, told by name; a dead holder's lock is taken over, another host's never."""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
import threading
import time
from dataclasses import asdict
from pathlib import Path

import pytest

from bosch.errors import RunError
from pipeline import locks
from pipeline.locks import Holder, hold, read_holder


def write_lock(path: Path, **changes: object) -> None:
    mine = Holder(
        os.getpid(),
        locks._start_time(os.getpid()),
        locks.socket.gethostname(),
        locks._boot(),
        time.time(),
        "other",
    )
    path.write_text(json.dumps({**asdict(mine), **changes}))


def test_a_lock_is_held_and_given_back(tmp_path: Path) -> None:
    path = tmp_path / "locks" / "a.json"
    with hold(path, "stage x", "r"):
        holder = read_holder(path)
        assert holder is not None
        assert holder.pid == os.getpid()
    assert not path.exists()


def test_a_living_holder_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    write_lock(path)
    told = rf"stage x is being made by pid {os.getpid()} on"
    with pytest.raises(RunError, match=told), hold(path, "stage x", "r"):
        pass
    assert path.exists()


@pytest.mark.parametrize(
    "changes",
    [
        {"pid": 2**22 + 1},
        {"start_time": 1},
        {"boot": "an earlier boot"},
    ],
)
def test_a_dead_holder_is_replaced(tmp_path: Path, changes: dict[str, object]) -> None:
    path = tmp_path / "a.json"
    write_lock(path, **changes)
    assert read_holder(path) is None
    with hold(path, "stage x", "r"):
        assert read_holder(path) is not None


@pytest.mark.parametrize("torn", ["", "{", "[]", '{"pid": 1}'])
def test_a_torn_lock_is_nobodys(tmp_path: Path, torn: str) -> None:
    path = tmp_path / "a.json"
    path.write_text(torn)
    with hold(path, "stage x", "r"):
        assert read_holder(path) is not None


def test_another_hosts_lock_is_never_taken(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    write_lock(path, host="elsewhere", pid=2**22 + 1)
    told = rf"on elsewhere .* delete {path} if that process is gone"
    with pytest.raises(RunError, match=told), hold(path, "stage x", "r"):
        pass


def test_a_killed_process_loses_its_lock(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    code = (
        "import sys, time; from pathlib import Path; from pipeline.locks import hold\n"
        "with hold(Path(sys.argv[1]), 'x', 'r'): print('held', flush=True); time.sleep(60)"
    )
    child = subprocess.Popen([sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE)
    assert child.stdout is not None
    assert child.stdout.readline() == b"held\n"
    assert read_holder(path) is not None
    child.kill()
    # Not yet waited for, it is a zombie with its pid and start time: dead nevertheless.
    deadline = time.monotonic() + 10
    while read_holder(path) is not None and time.monotonic() < deadline:
        time.sleep(0.02)
    with hold(path, "x", "r"):
        pass
    child.wait()


def test_waiting_ends_when_the_holder_is_done(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    write_lock(path)
    threading.Timer(0.3, path.unlink).start()
    started = time.monotonic()
    with hold(path, "x", "r", wait=True):
        assert time.monotonic() - started >= 0.25


def _count_up(path: str, counter: str, barrier: object) -> None:
    barrier.wait()  # type: ignore[attr-defined]
    for _ in range(5):
        with hold(Path(path), "x", "r", wait=True):
            value = int(Path(counter).read_text())
            time.sleep(0.002)
            Path(counter).write_text(str(value + 1))


def test_only_one_process_takes_over_a_dead_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, counter = tmp_path / "a.json", tmp_path / "counter"
    counter.write_text("0")
    write_lock(path, start_time=1)
    monkeypatch.setattr(locks, "_WAIT_SECONDS", 0.005)
    context = multiprocessing.get_context("fork")
    barrier = context.Barrier(4)
    jobs = [
        context.Process(target=_count_up, args=(str(path), str(counter), barrier)) for _ in range(4)
    ]
    for job in jobs:
        job.start()
    for job in jobs:
        job.join(60)
        assert job.exitcode == 0
    assert counter.read_text() == "20"
