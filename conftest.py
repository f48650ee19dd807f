"""Settings every test shares: no network, and GPU tests skipped where there is no GPU."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Models are so small that more threads would only wait for each other. And results round
# differently with another number of threads.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# A shell starts background jobs with SIGINT ignored, which processes of the tests would inherit.
_HANDLERS = {
    signal.SIGINT: signal.default_int_handler,
    signal.SIGTERM: signal.SIG_DFL,
    signal.SIGUSR1: signal.SIG_DFL,
    # These two as the tests were started: under nohup they outlive their terminal.
    signal.SIGHUP: signal.getsignal(signal.SIGHUP),
    signal.SIGQUIT: signal.getsignal(signal.SIGQUIT),
}


def _set_handlers() -> None:
    for number, handler in _HANDLERS.items():
        signal.signal(number, handler)


_set_handlers()


@pytest.fixture(autouse=True)
def _default_signal_handlers() -> Iterator[None]:
    """Reset the handlers that the command line sets where a test or a fixture calls it."""
    _set_handlers()
    yield
    _set_handlers()


def pytest_collection_finish() -> None:
    """Exclude what the tests have imported from garbage collection: it stays to the end."""
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def _freeze_what_a_module_leaves() -> Iterator[None]:
    """Exclude what a module has left, too: transformers collects garbage in every batch."""
    yield
    gc.collect()
    gc.freeze()


def _gpu_present() -> bool:
    return any(Path("/dev").glob("nvidia[0-9]*"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark tests by their folder; skip those that need a GPU where none is found."""
    root = Path(__file__).parent / "tests"
    for item in items:
        folder = item.path.relative_to(root).parts[0] if root in item.path.parents else ""
        if folder in ("gpu", "distributed"):
            item.add_marker(folder)
        if "gpu" in item.keywords and not _gpu_present():
            item.add_marker(pytest.mark.skip(reason="needs a GPU; none was found"))
