"""Prepares the fork server of `rank_processes` for what it imports next."""

from __future__ import annotations

import signal

# The project's modules look at it when they are imported; under nohup it is ignored.
signal.signal(signal.SIGHUP, signal.SIG_DFL)
