"""Kinds of failures and their messages; unusual terminals, clocks, disks and files; progress."""

from __future__ import annotations

import errno
import io
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from transformers import LlamaConfig

from bosch import progress
from bosch.errors import (
    LostRankError,
    RunError,
    UserError,
    causes,
    is_disk_full,
    printable,
)
from bosch.files import (
    hash_fault,
    load_json,
    make_symlink,
    read_json,
    replacing,
    write_json,
)
from bosch.model.loading import load_config, load_model
from data_prep.documents.tokenizer import TokenizerSpec, load_tokenizer
from pipeline import cli
from pipeline.commands import status
from pipeline.recipe.model_shape import read_model
from pipeline.run.failures import describe
from tests.pipeline_case import Case


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (UserError("typed wrong"), "user", "typed wrong"),
        (RunError("the node is gone"), "run", "the node is gone"),
        (LostRankError("rank 1 is gone"), "lost", "rank 1 is gone"),
        (MemoryError(), "run", "out of memory; see runtime for smaller batches"),
        (OSError(errno.EDQUOT, "quota"), "disk", "the disk of "),
        (RuntimeError("[enforce fail] No space left on device"), "disk", "the disk of "),
        (RuntimeError("I/O error: Disk quota exceeded (os error 122)"), "disk", "the disk of "),
        (KeyError("a\nb"), "unexpected", r"unexpected KeyError: 'a\nb'; the traceback is in "),
    ],
)
def test_a_failure_of_a_stage_has_a_kind_and_a_message(
    tmp_path: Path, error: BaseException, kind: str, message: str
) -> None:
    log = tmp_path / "logs" / "stage.log"
    failure = describe(error, tmp_path, log)
    assert failure["kind"] == kind and failure["message"].startswith(message)
    assert log.exists() == (kind == "unexpected")
    if kind == "disk":
        for name in ("__cause__", "__context__"):
            wrapped = RunError("cannot be written")
            setattr(wrapped, name, error)
            assert describe(wrapped, tmp_path, log) == failure
    if log.exists():
        assert "KeyError" in log.read_text()
        (tmp_path / "file").touch()
        failure = describe(error, tmp_path, tmp_path / "file" / "stage.log")
        assert failure["message"] == r"unexpected KeyError: 'a\nb'"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a\tb\nc ü → 字", "a\tb\nc ü → 字"),
        ("a\tb\nc\x9b\ud800", "a\tb\nc\\x9b\\ud800"),
        ("\x1b[2J\x00\r", "\\x1b[2J\\x00\\r"),
        ("~\x7f\x80 \x9f\xa0\udfff", "~\\x7f\\x80 \\x9f\xa0\\udfff"),
        ("\x0b\x1f", "\\x0b\\x1f"),
    ],
)
def test_control_characters_are_escaped(text: str, shown: str) -> None:
    assert printable(text) == shown


@pytest.mark.parametrize(
    ("fetch", "load"),
    [
        ("huggingface_hub.hf_hub_download",
         lambda: read_model("some/model", None, Path.cwd(), fetch=True)),
        ("bosch.model.loading.cached_file", lambda: load_config("some/model")),
        ("transformers.AutoModelForCausalLM.from_pretrained",
         lambda: load_model("some/model", config=LlamaConfig())),
        ("transformers.AutoTokenizer.from_pretrained",
         lambda: load_tokenizer(TokenizerSpec("some/model"))),
    ],
    ids=["shape", "config", "model", "tokenizer"],
)  # fmt: skip
def test_a_full_disk_of_the_hubs_cache_is_no_fault_of_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fetch: str, load: Callable[[], object]
) -> None:
    (tmp_path / "hub").mkdir()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("transformers.utils.hub.cached_file", Mock(return_value=None))
    monkeypatch.setattr(fetch, Mock(side_effect=OSError(errno.ENOSPC, "No space left on device")))
    with pytest.raises(OSError, match=r"No space left on device: .*hub") as full:
        load()
    failure = describe(full.value, tmp_path / "work", tmp_path / "stage.log")
    assert failure["kind"] == "disk"
    assert failure["message"].startswith(f"the disk of {tmp_path / 'hub'}")


def test_an_error_that_is_its_own_cause_ends_the_walk() -> None:
    first, second = ValueError("first"), KeyError("second")
    with pytest.raises(ValueError, match=r"^first$"):
        try:
            raise second from first
        except KeyError as error:
            assert error.__cause__ is not None
            raise error.__cause__  # noqa: B904 - as libraries unpack an error
    assert list(causes(first)) == [first, second]
    assert not is_disk_full(first)


def test_a_target_that_cannot_be_replaced_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, link = tmp_path / "folder", tmp_path / "link"
    folder.mkdir()
    (folder / "notes").touch()
    with pytest.raises(OSError):
        make_symlink(folder, tmp_path)
    make_symlink(link, folder)
    make_symlink(link, tmp_path)  # one link replaces another
    assert link.resolve() == tmp_path and sorted(os.listdir(tmp_path)) == ["folder", "link"]

    def full(source: Path, target: Path) -> None:
        raise OSError(errno.ENOSPC, "no space")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="no space"), replacing(folder) as temporary:
        temporary.mkdir()
    assert os.listdir(folder) == ["notes"] and sorted(os.listdir(tmp_path)) == ["folder", "link"]


def test_a_command_that_runs_out_of_space_says_where(
    case: Case, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The system names no file if a write fails."""
    folder = case.folder / "output"
    folder.mkdir()

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left")

    monkeypatch.setattr(os, "fsync", full)
    assert cli.main(["new", str(case.model), "--output", str(folder / "recipe.yaml")]) == 1
    said = f"error: the disk of {folder}/recipe.yaml is full; free some space and run"
    assert capfd.readouterr().err.startswith(said)
    assert os.listdir(folder) == []


def test_a_file_that_may_be_intact_is_no_fault_of_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk's error is one; a lost connection to the disk is raised."""
    (tmp_path / "a").touch()
    assert hash_fault(tmp_path, {"a/b": ""}) == "a/b cannot be read (Not a directory)"
    lost = [OSError(number, os.strerror(number)) for number in (errno.EIO, errno.ESTALE)]
    monkeypatch.setattr("bosch.files.file_digest", Mock(side_effect=lost))
    assert hash_fault(tmp_path, {"a": ""}) == "a cannot be read (Input/output error)"
    with pytest.raises(OSError, match="Stale"):
        hash_fault(tmp_path, {"a": ""})


@pytest.mark.parametrize("is_full", [True, False])
def test_an_output_that_cannot_be_written_ends_with_1(case: Case, is_full: bool) -> None:
    """A full disk is reported; a closed pipe is not."""
    reader, output = os.pipe()
    os.close(reader)
    if is_full:
        os.dup2(os.open("/dev/full", os.O_WRONLY), output)
    done = subprocess.run(
        case.command("status"), env=case.environment(), stdout=output,
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    os.close(output)
    assert done.returncode == 1 and (" is full; free some space" in done.stderr) == is_full


def test_a_full_disk_writes_nothing_to_standard_output(
    case: Case, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Whether the output itself is full is found out without writing to it."""

    def full(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(status, "run", full)
    assert cli.main(["status", str(case.file), "--json"]) == 1
    printed = capfd.readouterr()
    assert printed.err.startswith(f"error: the disk of {case.runs} ") and not printed.out


def test_invalid_json_raises_value_error(tmp_path: Path) -> None:
    for text in (b"[" * 200_000, b"{", b"[1]\xff"):
        (tmp_path / "a.json").write_bytes(text)
        with pytest.raises(ValueError, match=r"."):
            load_json(tmp_path / "a.json")
    write_json(tmp_path / "a.json", {"name": "not UTF-8: \udcff, → ü"})
    assert read_json(tmp_path / "a.json") == {"name": "not UTF-8: \udcff, → ü"}
    assert "→ ü" in (tmp_path / "a.json").read_text()


def test_known_items_do_not_shorten_the_time_left(caplog, monkeypatch):
    clock = SimpleNamespace(monotonic=lambda: clock.now, now=0.0)
    monkeypatch.setattr(progress, "time", clock)
    monkeypatch.setattr(
        progress, "sys", SimpleNamespace(stderr=SimpleNamespace(isatty=lambda: False))
    )
    caplog.set_level("INFO")
    bar = progress.Progress(100, "search", "evaluations")
    bar.update(50, free=True)
    clock.now = 20.0
    bar.update(10, "layer 3: best score 0.500")
    # 10 evaluations in 20 s: 40 more take 80 s.
    assert "search: 60/100 evaluations, 20 s, 80 s left, layer 3: best score 0.500" in caplog.text
    clock.now = 40.0
    bar.update(50)  # more than were expected
    assert "search: 110/100 evaluations, 40 s, 0 s left" in caplog.text


def test_a_terminal_shows_a_bar_with_the_note_and_no_lines(caplog, monkeypatch):
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    monkeypatch.setattr(sys, "stderr", terminal)
    seconds = iter([0.0, *range(60, 600, 60)])
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: next(seconds)))
    caplog.set_level("INFO")
    with progress.progress(9, "search", "evaluations") as bar:
        bar.update(4, "layer 3")
        time.sleep(0.15)  # the bar is drawn ten times a second
        bar.update(5, "layer 4")
        shown = terminal.getvalue()
    assert "search: 100%" in shown and "9/9" in shown and "layer 4" in shown
    assert not caplog.messages and len(terminal.getvalue()) > len(shown)  # it is removed
