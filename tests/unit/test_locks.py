"""Locks: the holder is named; a lock is taken over only if its holder can be shown to be dead."""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from bosch.errors import RunError
from pipeline.run import locks
from pipeline.run.launch import end_leftovers
from pipeline.run.locks import hold, hold_briefly, read_holder

HOLD = (
    "import sys, time; from pathlib import Path; from pipeline.run.locks import hold\n"
    "with hold(Path(sys.argv[1]), 'x', 'r'): print('held', flush=True); time.sleep(60)"
)
UNSHARE = ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--kill-child"]


def _can_unshare() -> bool:
    if shutil.which("unshare") is None:
        return False
    return subprocess.run([*UNSHARE, "true"], capture_output=True).returncode == 0


def leave_lock(path: Path, **changes: object) -> None:
    """Leave a lock as a killed process does."""
    path.write_text(json.dumps({**locks.this_process("other").model_dump(), **changes}))


@contextmanager
def holder(path: Path, *prefix: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process that holds the lock."""
    command = [*prefix, sys.executable, "-c", HOLD, str(path)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE)
    try:
        assert process.stdout.readline() == b"held\n"
        yield process
    finally:
        process.kill()
        process.wait()


def test_a_living_holder_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    with holder(path) as process:
        sentence = rf"stage x is being made by pid {process.pid} on .*; wait for it, or pass --wait"
        with pytest.raises(RunError, match=sentence), hold(path, "stage x", "r"):
            pass
        assert read_holder(path) is not None


WHOLE = {"pid": 1, "host": "h", "boot": "b", "pid_namespace": "n", "since": 1.0, "recipe": "r"}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        '{"pid": 1}',
        "\x00" * 200,
        "[" * 100_000,
        *(
            json.dumps({**WHOLE, name: wrong})
            for name, wrong in [
                ("pid", "1"),
                ("host", 5),
                ("since", "now"),
                ("since", 1e300),
                ("recipe", None),
            ]
        ),
    ],
)
def test_a_torn_lock_has_no_holder(tmp_path: Path, text: str) -> None:
    path = tmp_path / "a.json"
    path.write_text(text)
    assert read_holder(path) is None
    with hold(path, "stage x", "r"):
        assert read_holder(path) is not None


@pytest.mark.parametrize(
    "harm",
    [
        lambda path: path.mkdir(),
        lambda path: path.symlink_to(path.with_name("elsewhere")),
        lambda path: path.symlink_to("/etc/passwd"),
        lambda path: os.mkfifo(path),
        lambda path: path.symlink_to("/dev/zero"),
        lambda path: path.hardlink_to(shutil.copy(__file__, path.with_name("other"))),
    ],
)
def test_a_folder_link_or_pipe_in_the_place_of_a_lock_is_reported(
    tmp_path: Path, harm: object
) -> None:
    path = tmp_path / "a.json"
    harm(path)  # type: ignore[operator]
    sentence = rf"^{path} is a folder, link or pipe where the lock of a run should be"
    with pytest.raises(RunError, match=sentence):
        read_holder(path)
    for lock in (hold(path, "stage x", "r"), hold_briefly(path)):
        with pytest.raises(RunError, match=sentence), lock:
            pass
    assert not (tmp_path / "elsewhere").exists()


def test_a_restarted_machine_has_no_holders(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    boot = {"boot": "an earlier one"}
    leave_lock(path, pid_namespace="pid:[1]", **boot)
    assert read_holder(path) is not None
    leave_lock(path, pid_namespace=locks.MACHINE_NAMESPACE, **boot)
    here = locks.this_process("").pid_namespace == locks.MACHINE_NAMESPACE
    assert (read_holder(path) is None) == here


@pytest.mark.parametrize(("boot", "is_free"), [("one", True), ("", False)])
def test_a_machine_is_recognised_by_its_boot_id_after_renaming(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, boot: str, is_free: bool
) -> None:
    monkeypatch.setattr(locks, "boot_id", lambda: boot)
    path = tmp_path / "a.json"
    leave_lock(path, host="renamed")
    assert (read_holder(path) is None) == is_free


@pytest.mark.parametrize(
    "elsewhere",
    [
        {"host": "elsewhere", "boot": "its own"},
        {"pid_namespace": "pid:[1]"},
        {"machine": "of the same name", "boot": "its own"},
        {
            "machine": "of the same name",
            "boot": "its own",
            "pid_namespace": locks.MACHINE_NAMESPACE,
        },
        {"machine": "", "boot": "its own", "pid_namespace": locks.MACHINE_NAMESPACE},
    ],
)
def test_locks_left_on_other_machines_or_in_containers_are_not_taken_over(
    tmp_path: Path, elsewhere: dict[str, object]
) -> None:
    """Even if the other machine has the same name."""
    path = tmp_path / "a.json"
    leave_lock(path, pid=2**22 + 1, **elsewhere)
    assert read_holder(path) is not None
    sentence = rf"stage x was begun by pid {2**22 + 1} on .* delete {path} if it is gone"
    with pytest.raises(RunError, match=sentence), hold(path, "stage x", "r"):
        pass
    path.unlink()
    with hold(path, "stage x", "r"):
        pass


@pytest.mark.skipif(not _can_unshare(), reason="PID namespaces need unshare and the right to it")
def test_a_holder_in_a_container_is_neither_replaced_nor_killed(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    with holder(path, *UNSHARE) as process:
        with pytest.raises(RunError, match="is being made by pid 1 on"), hold(path, "x", "r"):
            pass
        assert process.poll() is None
        process.kill()
        process.wait()
        with pytest.raises(RunError, match="if it is gone"), hold(path, "x", "r"):
            pass


@pytest.mark.skipif(not _can_unshare(), reason="PID namespaces need unshare and the right to it")
def test_only_leftover_processes_of_this_pid_namespace_are_ended(tmp_path: Path) -> None:
    marked = {**os.environ, "BOSCH_WORK_DIR": str(tmp_path)}
    script = ["sh", "-c", "echo started; sleep 60"]
    beside = subprocess.Popen(script, env=marked, stdout=subprocess.PIPE)
    # unshare itself is in this namespace, so only the process inside it has the mark.
    assign = f"BOSCH_WORK_DIR={tmp_path}"
    inside = subprocess.Popen([*UNSHARE, "env", assign, *script], stdout=subprocess.PIPE)
    try:
        for process in (beside, inside):
            assert process.stdout.readline() == b"started\n"
        assert end_leftovers(str(tmp_path)) >= 1
        assert beside.wait(10) == -signal.SIGKILL
        time.sleep(0.1)
        assert inside.poll() is None
    finally:
        for process in (beside, inside):
            process.kill()
            process.wait()


def test_waiting_is_reported_once_and_ends_with_the_holder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(locks, "WAIT_SECONDS", 0.02)
    path = tmp_path / "a.json"
    with holder(path) as process:
        threading.Timer(0.3, process.kill).start()
        with hold(path, "x", "r", wait=True):
            assert process.wait() == -signal.SIGKILL
    output = capsys.readouterr().out
    assert output.count("waiting: x ") == 1
    assert "--wait" not in output  # it waits already


def test_waiting_for_a_holder_that_may_be_dead_names_its_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(locks, "WAIT_SECONDS", 0.02)
    path = tmp_path / "a.json"
    leave_lock(path, host="elsewhere", boot="another")
    threading.Timer(0.3, path.unlink).start()
    with hold(path, "x", "r", wait=True):
        pass
    assert re.search(
        rf"^waiting: x was begun by .* still runs; delete {path} if it is gone$",
        capsys.readouterr().out, re.MULTILINE,
    )  # fmt: skip


def _count_up(path: str, counter: str, barrier: object, brief: bool) -> None:
    barrier.wait()  # type: ignore[attr-defined]
    for _ in range(5):
        lock = hold_briefly(Path(path)) if brief else hold(Path(path), "x", "r", wait=True)
        with lock:
            value = int(Path(counter).read_text())
            time.sleep(0.002)
            Path(counter).write_text(str(value + 1))


@pytest.mark.parametrize("brief", [False, True])
def test_only_one_process_at_a_time_holds_a_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, brief: bool
) -> None:
    """Although each removes the file, which a dead process had left."""
    path, counter = tmp_path / "a.json", tmp_path / "counter"
    counter.write_text("0")
    leave_lock(path)
    monkeypatch.setattr(locks, "WAIT_SECONDS", 0.005)
    context = multiprocessing.get_context("fork")
    barrier = context.Barrier(4)
    arguments = (str(path), str(counter), barrier, brief)
    jobs = [context.Process(target=_count_up, args=arguments) for _ in range(4)]
    for job in jobs:
        job.start()
    for job in jobs:
        job.join(60)
        assert job.exitcode == 0
    assert counter.read_text() == "20"
    assert not path.exists()


def test_deleting_a_lock_file_does_not_break_the_next_lock(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    with hold(path, "x", "first"):
        path.unlink()
        with hold(path, "x", "second"):
            pass
        second = hold(path, "x", "second")
        second.__enter__()
    assert str(getattr(read_holder(path), "recipe", None)) == "second"
    second.__exit__(None, None, None)
    assert not path.exists()
