"""Fixtures of every test."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import torch

from data_prep.documents.tokenizer import TokenizerSpec, load_tokenizer
from tests.pipeline_case import Case
from tests.ruler_case import TOKENIZER

# Another job on the machine would make a slow example fail; only benchmarks assert times.
hypothesis.settings.register_profile("no deadline", deadline=None)
hypothesis.settings.load_profile("no deadline")


@pytest.fixture(autouse=True)
def _same_log_level() -> Iterator[None]:
    """Reset the root logger's level, which commands change, after each test."""
    yield
    logging.getLogger().setLevel(logging.WARNING)


@pytest.fixture(scope="session", autouse=True)
def _no_waiting_for_the_disk() -> Iterator[None]:
    """No fsync: slow on a busy disk, and useful only if the machine crashes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", os.fstat)  # it also fails for files that are not open
        yield


@pytest.fixture
def case(tmp_path: Path) -> Case:
    """A recipe whose stages take no time."""
    return Case(tmp_path)


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    """The quickstart's tokenizer."""
    return load_tokenizer(TokenizerSpec(str(TOKENIZER)))


@pytest.fixture
def one_thread(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Use one thread, also in new processes: time, rounding and reuse depend on the number."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
