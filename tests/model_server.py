"""A model server in a process of its own."""

from __future__ import annotations

import socket
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

_PATIENCE_SECONDS = 600


@contextmanager
def running(command_of: Callable[[str], Sequence[str]], log: Path, **options: Any) -> Iterator[str]:
    """The address of the server that a command starts on a free port, passed to it.

    Its output goes to `log`; `options` are those of Popen.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    address = f"http://127.0.0.1:{port}"
    with log.open("w") as file:
        server = subprocess.Popen(
            command_of(str(port)), stdout=file, stderr=subprocess.STDOUT, **options
        )
    try:
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while not _is_healthy(address):
            waits = server.poll() is None and time.monotonic() < deadline
            assert waits, f"the server did not start: {log.read_text()[-3000:]}"
            time.sleep(0.5)
        yield address
    finally:
        server.terminate()
        with suppress(subprocess.TimeoutExpired):  # instead of the reason why it did not start
            server.wait(timeout=60)
        server.kill()
        server.wait()


def _is_healthy(address: str) -> bool:
    try:
        with urllib.request.urlopen(f"{address}/health", timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False
