"""The store: atomic publishing, crashes at every step of it, damage, kept hashes, and locks.

A lock has one holder at a time, which is named to others, and is freed when it dies.
"""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from bosch.errors import RunError
from bosch.files import replace
from pipeline.run import locks
from pipeline.run import store as store_module
from pipeline.run.graph import document_key
from pipeline.run.hashing import FileHasher, NotHashed
from pipeline.run.locks import hold, holder
from pipeline.run.store import Store
from stages.published import Manifest
from tests.pipeline_case import lose

DOCUMENT = {"stage": "search", "version": 1, "config": {"swa_ratio": 0.5}}
KEY = document_key(DOCUMENT)


def fill(store: Store, text: str = "content") -> Path:
    work = store.begin("search", KEY)
    (work / "sub").mkdir(exist_ok=True)
    (work / "sub" / "a.txt").write_text(text)
    (work / "b.txt").write_text("b" + text)
    return work


def publish(store: Store, text: str = "content") -> Path:
    fill(store, text)
    return store.publish("search", DOCUMENT, {"summary": {"x": 1}}, store.hasher())


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "runs")


def test_publishing_moves_the_work_and_writes_a_manifest(store: Store) -> None:
    (fill(store) / "empty").mkdir()  # which the manifest could not distinguish from an added one
    folder = store.publish("search", DOCUMENT, {"summary": {"x": 1}}, store.hasher())
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["key"] == KEY
    assert manifest["identity"] == DOCUMENT
    assert manifest["summary"] == {"x": 1}
    assert [file["path"] for file in manifest["files"]] == ["b.txt", "sub/a.txt"]
    # In the form that stages read.
    assert Manifest.read(folder).hashes.keys() == {"b.txt", "sub/a.txt"}
    assert manifest["seconds"] >= 0
    assert not store.work("search", KEY).exists()
    assert store.state("search", KEY) == {}
    assert store.damage("search", KEY, store.hasher()) is None


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o027, 0o640), (0o077, 0o600)])
def test_published_files_have_the_permissions_of_their_folders(
    store: Store, umask: int, mode: int
) -> None:
    """safetensors makes its files readable only by their owner, whatever the umask."""
    before = os.umask(umask)
    try:
        work = fill(store)
        (work / "sub" / "a.txt").chmod(0o600)
        folder = store.publish("search", DOCUMENT, {}, store.hasher())
    finally:
        os.umask(before)
    assert (folder / "sub" / "a.txt").stat().st_mode & 0o777 == mode
    assert store.damage("search", KEY, store.hasher()) is None


def test_checking_an_untouched_output_reads_nothing(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(store)

    def refuse(path: Path) -> str:
        raise AssertionError(f"{path} was read")

    monkeypatch.setattr("pipeline.run.hashing.file_digest", refuse)
    assert store.damage("search", KEY, store.hasher()) is None


@pytest.mark.parametrize(
    ("harm", "expected"),
    [
        (lambda f: (f / "b.txt").unlink(), "b.txt is missing"),
        (lambda f: (f / "b.txt").write_text("bigger than before"), "b.txt has other content"),
        (lambda f: (f / "b.txt").write_text("bCONTENT"), "b.txt has other content"),
        (lambda f: (f / "sub" / "a.txt").write_text("CONTENT"), "sub/a.txt has other content"),
        (lambda f: (f / "manifest.json").unlink(), "manifest.json is missing or damaged"),
        (lambda f: (f / "manifest.json").write_text("{"), "manifest.json is missing or damaged"),
        (lambda f: (f / "manifest.json").write_text("{}"), "manifest.json is missing or damaged"),
    ],
)
def test_damage_is_found(store: Store, harm: Any, expected: str) -> None:
    harm(publish(store))
    assert store.damage("search", KEY, store.hasher()) == expected


# A killed attempt may have left a half-written file, which is removed.
@pytest.mark.parametrize("newest", ["b.txt", ".tmp-0", "manifest.json", None])
def test_time_of_attempts_without_a_result_counts(
    store: Store, newest: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = fill(store)
    started = store.state("search", KEY)["attempts"][0]["started"]
    if newest is not None:
        (work / newest).touch()
        os.utime(work / newest, (started + 100, started + 100))
    else:
        with monkeypatch.context() as patch:
            patch.setattr(time, "time", lambda: started + 100)
            store.fail("search", KEY, "the loss diverged")
        assert store.state("search", KEY)["failure"] == "the loss diverged"
    folder = publish(store)
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["attempts"] == 2
    assert manifest["seconds"] == pytest.approx(100, abs=5)


@pytest.mark.parametrize("elsewhere", [False, True])
def test_links_lead_to_the_last_run(store: Store, elsewhere: bool) -> None:
    """Also in a folder that is itself a link, for example to another disk."""
    folder = publish(store)
    if elsewhere:
        (store.root.parent / "far" / "away").mkdir(parents=True)
        (store.root / "tiny").symlink_to(store.root.parent / "far" / "away")
    store.link("tiny", "search", KEY, ["search"])
    link = store.root / "tiny" / "search"
    assert link.resolve() == folder.resolve()
    assert not os.readlink(link).startswith("/")
    assert store.last_run("tiny") == {"search": KEY}
    for key in ("another", KEY):
        store.link("tiny", "search", key, ["search"])
        assert os.path.realpath(link) == os.path.realpath(store.published("search", key))
        assert store.last_run("tiny") == {"search": key}
    store.link("tiny", "report", KEY, ["report"])
    assert not link.is_symlink()
    assert store.last_run("tiny") == {"report": KEY}


def test_hashes_are_kept_and_renewed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.run.hashing.SETTLED_NS", 0)
    file, cache = tmp_path / "a", tmp_path / "cache.json"
    file.write_text("one")
    first = FileHasher(cache)
    digest = first.sha256(file)
    first.save()
    assert FileHasher(cache, budget_bytes=0).sha256(file) == digest
    [known] = json.loads(cache.read_text()).values()
    with cache.open("a") as more:  # a corpus of 300,000 files
        more.truncate(cache.stat().st_size - 1)
        more.write(f',"{"x" * 2**26}":{json.dumps(known)}}}')
    assert FileHasher(cache, budget_bytes=0).sha256(file) == digest
    for place in range(len(known) - 1):  # size, both times, inode, device
        other = [value + (at == place) for at, value in enumerate(known[:-1])]
        cache.write_text(json.dumps({str(file): [*other, digest]}))
        with pytest.raises(NotHashed):
            FileHasher(cache, budget_bytes=0).sha256(file)
    file.write_text("two")
    assert FileHasher(cache).sha256(file) != digest
    second = FileHasher(tmp_path / "other.json", budget_bytes=3).sha256(file)
    others = (json.dumps({str(file): 5}), json.dumps({str(file): [5]}))
    for damaged in ("{ torn", "[]", "[" * 100_000, *others):
        cache.write_text(damaged)
        assert FileHasher(cache).sha256(file) == second != digest


def test_a_hash_is_kept_only_if_the_file_has_not_just_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that was just written may change again within one tick of its clock."""
    monkeypatch.setattr("pipeline.run.hashing.SETTLED_NS", 10**12)
    file, cache = tmp_path / "a", tmp_path / "cache.json"
    file.write_text("one")
    hasher = FileHasher(cache)
    now = time.time_ns()
    for age_ns, known in ((-(10**12), False), (5 * 10**11, False), (2 * 10**12, True)):
        os.utime(file, ns=(now, now - age_ns))
        digest = hasher.sha256(file)
        hasher.save()
        assert cache.exists() == known
    assert FileHasher(cache, budget_bytes=0).sha256(file) == digest


@pytest.mark.parametrize("kind", ["folder", "file", "link to a folder", "link that leads nowhere"])
def test_a_folder_replaces_the_older_one(tmp_path: Path, kind: str) -> None:
    """Also if a killed process left the older one under its temporary name."""
    for place in (tmp_path / "place", tmp_path / ".tmp-old-place"):
        if kind == "folder":
            place.mkdir()
            (place / "old").touch()
        elif kind == "file":
            place.touch()
        else:
            place.symlink_to(tmp_path if "to" in kind else "gone")
        (tmp_path / "new").mkdir()
        (tmp_path / "new" / "new").touch()
        replace(tmp_path / "new", tmp_path / "place")
        assert [str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")] == [
            "place",
            "place/new",
        ]


@pytest.mark.parametrize("number", [errno.ESTALE, errno.EIO])
def test_a_briefly_unreadable_store_counts_neither_as_missing_nor_as_empty(
    store: Store, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    work = fill(store)
    with monkeypatch.context() as patch, pytest.raises(OSError, match=os.strerror(number)):
        lose(patch, work, number)
        store.begin("search", KEY)  # which would start it anew
    with monkeypatch.context() as patch, pytest.raises(OSError, match=os.strerror(number)):
        lose(patch, work / "sub", number)
        store.publish("search", DOCUMENT, {}, store.hasher())  # without the files in it
    folder = store.publish("search", DOCUMENT, {}, store.hasher())
    assert Manifest.read(folder).hashes.keys() == {"b.txt", "sub/a.txt"}


@pytest.mark.parametrize("number", [errno.ESTALE, errno.EACCES, errno.EPERM])
@pytest.mark.parametrize("name", ["manifest.json", "b.txt"])
def test_files_that_cannot_be_read_now_or_by_this_user_are_not_damaged(
    store: Store, monkeypatch: pytest.MonkeyPatch, name: str, number: int
) -> None:
    folder = publish(store)
    with monkeypatch.context() as patch, pytest.raises(OSError, match=os.strerror(number)):
        lose(patch, folder / name, number)
        store.damage("search", KEY, store.hasher())
    with monkeypatch.context() as patch:
        lose(patch, folder / name, errno.EIO)  # the disk reports an error
        assert store.damage("search", KEY, store.hasher()) is not None
    assert store.damage("search", KEY, store.hasher()) is None


def test_a_crash_before_the_rename_keeps_the_work_and_the_older_output(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(store, "old")
    work = fill(store, "new")

    def crash(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(store_module, "replace", crash)
        store.publish("search", DOCUMENT, {}, store.hasher())
    assert (store.published("search", KEY) / "b.txt").read_text() == "bold"
    assert store.begin("search", KEY) == work and not (work / "manifest.json").exists()
    store.publish("search", DOCUMENT, {}, store.hasher())
    assert (store.published("search", KEY) / "b.txt").read_text() == "bnew"
    assert store.damage("search", KEY, store.hasher()) is None


def test_work_on_other_inputs_is_discarded(store: Store) -> None:
    for digest, kept in (("a", []), ("a", ["part.txt"]), ("b", [])):
        work = store.begin("search", KEY, inputs={"prepare": digest})
        assert [path.name for path in work.iterdir()] == kept
        (work / "part.txt").touch()
        (work / ".tmp-left").touch()  # by a killed process


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
