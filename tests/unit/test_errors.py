"""Kinds of failures, and control characters in messages."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import pytest
from transformers import LlamaConfig

from bosch.errors import (
    LostRankError,
    RunError,
    UserError,
    causes,
    is_disk_full,
    printable,
)
from bosch.model.loading import load_config, load_model
from data_prep.documents.tokenizer import TokenizerSpec, load_tokenizer
from pipeline.recipe.model_shape import read_model
from pipeline.run.failures import describe


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
