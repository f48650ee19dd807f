"""Prepares the fork server of `rank_processes` for what it imports next."""

from __future__ import annotations

import functools
import importlib
import signal
import subprocess
import sys

# The project's modules look at it when they are imported; under nohup it is ignored.
signal.signal(signal.SIGHUP, signal.SIG_DFL)

# vl_convert takes 2.4 s to make the script of pages, here once for all forked processes. It does so
# in a process of its own, since its engine, V8, must not be forked.
_CODE = "from stages.pages.page import library; print(library(), end='')"
_SCRIPT = subprocess.run(
    [sys.executable, "-c", _CODE], check=True, capture_output=True, encoding="utf-8"
).stdout
importlib.import_module("stages.pages.page").library = functools.cache(lambda: _SCRIPT)
