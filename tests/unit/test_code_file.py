"""A hybrid model loads by transformers alone, through the code file it carries."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from bosch import code_file
from bosch.families import FAMILIES
from bosch.modeling import load_model, materialize
from tests.hybrid_case import random_mask, small_model, tokens

WINDOW, SINKS = 7, 2
LENGTH, NEW = 40, 10

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


def _run(code: str, cwd: Path, *, cache: Path, blocked: bool = True) -> list[Any]:
    """Run `code` elsewhere than in the checkout; what it calls `report` with."""
    environment = dict(os.environ, HF_MODULES_CACHE=str(cache), OMP_NUM_THREADS="1")
    if not blocked:
        environment["PYTHONPATH"] = str(Path(__file__).parents[2])
    done = subprocess.run(
        [sys.executable, "-P", "-c", _REPORT + (_WITHOUT_BOSCH if blocked else "") + code],
        cwd=cwd, env=environment, capture_output=True, text=True, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = (cwd / "report.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def _save(family: str, folder: Path) -> Any:
    hybrid = materialize(small_model(family), random_mask(), WINDOW, SINKS)
    hybrid.save_pretrained(folder)
    return hybrid


def _wanted(hybrid: Any, ids: torch.Tensor) -> tuple[torch.Tensor, list[Any]]:
    with torch.inference_mode():
        logits = hybrid(ids).logits
    return logits, hybrid.generate(ids, max_new_tokens=NEW, do_sample=False).tolist()


def test_transformers_alone_loads_the_same_hybrids_and_saves_them_again(tmp_path: Path) -> None:
    """Two families in one process: each keeps its own attention."""
    ids = tokens(2, LENGTH)
    wanted = {name: _wanted(_save(name, tmp_path / name), ids) for name in ("qwen3", "llama")}
    torch.save({name: logits for name, (logits, _) in wanted.items()}, tmp_path / "logits.pt")
    code = f"""
ids = torch.tensor({ids.tolist()})
wanted = torch.load("logits.pt")
models = {{
    name: AutoModelForCausalLM.from_pretrained(name, trust_remote_code=True) for name in wanted
}}
models["qwen3"].save_pretrained("again")
models["again"] = AutoModelForCausalLM.from_pretrained("again", trust_remote_code=True)
wanted["again"] = wanted["qwen3"]
for name, model in models.items():
    with torch.inference_mode():
        logits = model(ids).logits
    report([
        type(model).__name__, torch.equal(logits, wanted[name]),
        model.generate(ids, max_new_tokens={NEW}, do_sample=False).tolist(),
        model.new_cache().layers[0].layout.window_size,
    ])
report(any(name.partition(".")[0] == "bosch" for name in sys.modules))
"""
    *found, imported = _run(code, tmp_path, cache=tmp_path / "cache")
    assert imported is False
    assert found == [
        [f"Hybrid{prefix}ForCausalLM", True, wanted[name][1], WINDOW]
        for prefix, name in (("Qwen3", "qwen3"), ("Llama", "llama"), ("Qwen3", "qwen3"))
    ]
    again = load_model(tmp_path / "again", dtype="float32")
    with torch.inference_mode():
        assert torch.equal(again(ids).logits, wanted["qwen3"][0])
    names = {path.name for path in (tmp_path / "again").iterdir()}
    assert "modeling_hybrid.py" in names and len([n for n in names if n.endswith(".py")]) == 1


def test_a_plain_load_is_refused_without_bosch(tmp_path: Path) -> None:
    _save("qwen3", tmp_path / "model")
    code = """
for options in ({}, {"trust_remote_code": False}):
    for auto in (AutoConfig, AutoModelForCausalLM):
        try:
            auto.from_pretrained("model", **options)
            report("loaded")
        except ValueError as error:
            report("trust_remote_code=True" in str(error))
"""
    assert _run(code, tmp_path, cache=tmp_path / "cache") == [True] * 4


def test_with_bosch_the_installed_code_runs_whatever_is_trusted(tmp_path: Path) -> None:
    """And a model loaded by its code file before bosch came goes on beside one of bosch's."""
    hybrid, ids = _save("qwen3", tmp_path / "model"), tokens(1, LENGTH)
    torch.save(_wanted(hybrid, ids)[0], tmp_path / "logits.pt")
    code = f"""
import torch
from transformers import AutoModelForCausalLM
carried = AutoModelForCausalLM.from_pretrained("model", trust_remote_code=True)
import bosch
models = [carried, *(
    AutoModelForCausalLM.from_pretrained("model", trust_remote_code=trusted)
    for trusted in (None, False, True)
)]
ids, wanted = torch.tensor({ids.tolist()}), torch.load("logits.pt")
for model in models:
    with torch.inference_mode():
        report([
            type(model).__module__.partition(".")[0], torch.equal(model(ids).logits, wanted)
        ])
"""
    found = _run(code, tmp_path, cache=tmp_path / "cache", blocked=False)
    assert found == [["transformers_modules", True], *[["bosch", True]] * 3]


def test_whatever_bosch_loaded_carries_the_file_when_saved(tmp_path: Path) -> None:
    """Directories made before there was a code file gain it too."""
    _save("qwen3", tmp_path / "old")
    path = tmp_path / "old" / "config.json"
    config = json.loads(path.read_text())
    wanted = config.pop("auto_map")
    path.write_text(json.dumps(config))
    (tmp_path / "old" / "modeling_hybrid.py").unlink()
    AutoModelForCausalLM.from_pretrained(tmp_path / "old").save_pretrained(tmp_path / "new")
    assert json.loads((tmp_path / "new" / "config.json").read_text())["auto_map"] == wanted
    written = (tmp_path / "new" / "modeling_hybrid.py").read_text()
    assert written == code_file.code_file(FAMILIES["qwen3"])


@pytest.mark.parametrize("family", FAMILIES.values(), ids=str)
def test_the_code_file_is_python_that_names_no_bosch_module(family: Any) -> None:
    tree = ast.parse(code_file.code_file(family))
    modules = {
        module
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for module in (
            [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else [node.module or ""]
        )
    }
    assert "torch" in modules and not [m for m in modules if m.partition(".")[0] == "bosch"]


def test_modules_that_cannot_stand_in_one_file_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(code_file, "MODULES", ("errors.py", "errors.py"))
    with pytest.raises(RuntimeError, match=r"errors\.py defines .*UserError.* again"):
        code_file.code_file.__wrapped__(FAMILIES["qwen3"])
    monkeypatch.setattr(code_file, "MODULES", ("families.py",))
    with pytest.raises(RuntimeError, match=r"families\.py imports \['UserError'\]"):
        code_file.code_file.__wrapped__(FAMILIES["qwen3"])
