"""Run Python code elsewhere: in other directories, or without bosch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from functools import cache as once
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
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
# Forks a process for each piece of code.
_SERVER = """
import gc, json, os, sys, traceback
{imports}
gc.freeze()
for line in sys.stdin:
    order = json.loads(line)
    child = os.fork()
    if not child:
        status = 1
        try:
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            for number, name in ((1, "output"), (2, "errors")):
                os.dup2(os.open(order[name], os.O_WRONLY | os.O_CREAT), number)
            os.environ.update(order["environment"])
            os.chdir(order["cwd"])
            sys.path[:0] = order["path"]
            exec(compile(order["code"], "<code>", "exec"), {"__name__": "__main__"})
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush(), sys.stderr.flush()
            os._exit(status)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


# The slowest imports of transformers and of loading a model with it.
_SLOW_IMPORTS = """
import accelerate, contextlib, scipy.optimize, torch, torch._dynamo, torch.distributed.tensor
with contextlib.suppress(ImportError):
    import torchao.quantization
"""
_MODEL_IMPORTS = "from transformers import AutoModelForCausalLM, Qwen3ForCausalLM"


@once
def _server(imports: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-P", "-c", _SERVER.replace("{imports}", imports)],
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def run_python(
    code: str,
    cwd: Path = ROOT,
    bosch: bool = True,
    imports: str = _SLOW_IMPORTS,
    **environment: str,
) -> str:
    """The output of `code` in a fresh Python, which has imported neither transformers nor bosch.

    The code must not fail. `bosch`: whether the checkout is in its path.
    """
    server = _server(imports)
    with tempfile.TemporaryDirectory() as folder:
        output, errors = Path(folder, "output"), Path(folder, "errors")
        order = {
            "code": code, "cwd": str(cwd), "output": str(output),
            "errors": str(errors), "environment": environment,
            "path": [str(ROOT)] if bosch else [],
        }  # fmt: skip
        server.stdin.write(json.dumps(order) + "\n")
        server.stdin.flush()
        assert server.stdout.readline() == "0\n", errors.read_text()
        return output.read_text()


def run_elsewhere(code: str, cwd: Path, *, cache: Path, blocked: bool = True) -> list[Any]:
    """Run `code` in the directory `cwd`, with transformers imported; returns its `report` values.

    `blocked`: bosch and the other packages of the checkout cannot be imported.
    """
    set_module_cache = (
        f"import transformers.dynamic_module_utils as a\na.HF_MODULES_CACHE = {str(cache)!r}\n"
    )
    code = set_module_cache + _REPORT + (_WITHOUT_BOSCH if blocked else "") + code
    run_python(code, cwd, bosch=not blocked, imports=_MODEL_IMPORTS)
    return [json.loads(line) for line in (cwd / "report.jsonl").read_text().splitlines()]
