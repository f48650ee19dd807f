"""What every test gets."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def _same_log_level() -> Iterator[None]:
    """A command that a test calls in its own process sets the root logger's level for good."""
    root = logging.getLogger()
    level = root.level
    yield
    root.setLevel(level)
