"""What every test gets."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import hypothesis
import pytest

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
