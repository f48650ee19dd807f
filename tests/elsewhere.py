"""Run a piece of Python elsewhere than in the checkout, by default where there is no bosch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

_REPORT = """
import json, sys
def report(value):
    with open("report.jsonl", "a") as file:
        file.write(json.dumps(value) + "\\n")
"""
_WITHOUT_BOSCH = """
import importlib.abc
class Blocker(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name.partition(".")[0] in ("bosch", "stages", "data_prep", "pipeline"):
            raise ModuleNotFoundError("No module named " + name)
sys.meta_path.insert(0, Blocker())
import torch
from transformers import AutoConfig, AutoModelForCausalLM
"""


def run_elsewhere(code: str, cwd: Path, *, cache: Path, blocked: bool = True) -> list[Any]:
    """Run `code` in the directory `cwd`; what it calls `report` with. `blocked`: without bosch."""
    environment = dict(os.environ, HF_MODULES_CACHE=str(cache), OMP_NUM_THREADS="1")
    if not blocked:
        environment["PYTHONPATH"] = str(Path(__file__).parents[1])
    done = subprocess.run(
        [sys.executable, "-P", "-c", _REPORT + (_WITHOUT_BOSCH if blocked else "") + code],
        cwd=cwd, env=environment, capture_output=True, text=True, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = (cwd / "report.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]
