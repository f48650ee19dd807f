"""Heartbeats of the first node of a run on several nodes, in a file on the shared disk.

The other nodes wait for stages that the first one runs alone, perhaps for hours. So that they do
not wait forever, the first node increments a counter in a file and writes there how its run ended.
"""

from __future__ import annotations

import contextlib
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

from bosch.errors import LostRankError, RunError
from bosch.files import read_json, write_json

BEAT_SECONDS = 10.0
# Nodes do not start simultaneously, and network file systems show changes late.
SILENT_SECONDS = 180.0


class FirstNodeHeartbeat:
    """The first node's side: a thread that writes a counter to `file` until its run ends."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._run = uuid.uuid4().hex
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._beat, daemon=True)
        self._thread.start()

    def _beat(self) -> None:
        beats = 0
        while True:
            with contextlib.suppress(OSError):
                write_json(self._file, {"run": self._run, "beats": beats})
            if self._stopped.wait(BEAT_SECONDS):
                return
            beats += 1

    @contextlib.contextmanager
    def until_end(self) -> Iterator[None]:
        """Write how the run inside the block ended, and stop the heartbeats."""
        ended, lost = "", False
        try:
            yield
        except BaseException as error:
            ended, lost = str(error) or type(error).__name__, isinstance(error, LostRankError)
            raise
        finally:
            self._stopped.set()
            self._thread.join()
            with contextlib.suppress(OSError):
                write_json(self._file, {"run": self._run, "ended": ended, "lost": lost})


class FirstNodeWatcher:
    """Another node's side; created when that node's run begins."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._last_record = read_json(file)  # may be from an earlier run
        self._changed = time.monotonic()
        self.alive = False

    def fault(self) -> RunError | None:
        """Why waiting is pointless; None while the first node's run may continue."""
        record = read_json(self._file)
        # None if a network file system cannot be read at the moment.
        if record is not None and record != self._last_record:
            self._last_record, self._changed, self.alive = record, time.monotonic(), True
        ended = record.get("ended") if isinstance(record, dict) else None
        if self.alive and ended:
            kind = LostRankError if record.get("lost") else RunError
            return kind(f"the run failed on the first node: {ended}")
        if time.monotonic() - self._changed < SILENT_SECONDS:
            return None
        if self.alive and ended == "":
            return RunError(
                "the first node's run is over, without this stage; give all nodes the same command"
            )
        earlier = f" (its last run failed: {ended})" if ended else ""
        return LostRankError(
            f"the first node sent no heartbeat in {SILENT_SECONDS / 60:g} minutes{earlier}; "
            "start the same command on all nodes again, on one shared output_root"
        )
