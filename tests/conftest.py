"""What every test gets."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

from tests.pipeline_case import Case

# A loaded machine is no fault of what is tested; no test asserts a time.
hypothesis.settings.register_profile("no deadline", deadline=None)
hypothesis.settings.load_profile("no deadline")


@pytest.fixture(autouse=True)
def _same_log_level() -> Iterator[None]:
    """A command that a test calls in its own process sets the root logger's level for good."""
    root = logging.getLogger()
    level = root.level
    yield
    root.setLevel(level)


@pytest.fixture
def case(tmp_path: Path) -> Case:
    """A recipe whose stages take no time."""
    return Case(tmp_path)
