"""Processes of a run take no more threads than they may use, and waiting ones do not spin."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_SHOW = """
import os
def main():
    print(os.environ["OMP_WAIT_POLICY"], os.environ["GOMP_SPINCOUNT"])
    return 0
"""


def _variables(tmp_path: Path, **environment: str) -> str:
    (tmp_path / "shows_threads.py").write_text(_SHOW)
    clean = {name: value for name, value in os.environ.items() if "OMP" not in name}
    done = subprocess.run(
        [sys.executable, str(ROOT / "pipeline/__main__.py"), "--process", "shows_threads"],
        env={**clean, "PYTHONPATH": str(tmp_path), **environment},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    return done.stdout.strip()


def test_waiting_threads_do_not_spin_unless_the_user_says_so(tmp_path: Path) -> None:
    assert _variables(tmp_path) == "PASSIVE 0"
    assert _variables(tmp_path, OMP_WAIT_POLICY="ACTIVE") == "ACTIVE 0"
