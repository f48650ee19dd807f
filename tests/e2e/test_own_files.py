"""A new stage, source, method or backend is one file or folder; no other file names it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from tests.pipeline_case import ROOT, Case
from tests.tiny_data import save_tiny_model

EXAMPLES = ROOT / "tests"
# Plan and run, all in one process.
COMMANDS = """
import json
import sys
from pathlib import Path
from pipeline.cli import main
from pipeline.recipe.load import load_recipe
from pipeline.run.runner import Runner
from pipeline.run.worker import execute

assert main(["plan", sys.argv[1]]) == 0
print("planned", file=sys.stderr)
loaded = load_recipe(Path(sys.argv[1]), (), env={})

def launch(order, _):
    if order["stage"] == "search":  # a random model answers no question
        examples = Path(order["work_dir"]) / "calibration.jsonl"
        records = [{"input_ids": [*range(3, 90 + n)], "answer_length": 2} for n in range(4)]
        examples.write_text("".join(json.dumps(record) + "\\n" for record in records))
    return execute(order)

Runner(loaded, launcher=launch).run()
"""


def test_a_recipe_uses_a_stage_source_and_method_added_as_files(
    tmp_path: Path,
) -> None:
    checkout = tmp_path / "checkout"
    for package in ("bosch", "data_prep", "stages", "pipeline"):
        shutil.copytree(ROOT / package, checkout / package)
    shutil.copy(EXAMPLES / "own_method/last_layers.py", checkout / "bosch/search/methods")
    shutil.copy(EXAMPLES / "own_source/backwards.py", checkout / "data_prep/documents/sources")
    (checkout / "stages/words").mkdir()
    (checkout / "stages/words/__init__.py").touch()
    shutil.copy(EXAMPLES / "own_stage.py", checkout / "stages/words/stage.py")

    case = Case(tmp_path)
    shutil.rmtree(case.model)
    save_tiny_model(case.model)
    lines = ["the cat sat on the mat", "one two three"]
    (case.corpus / "a.txt").write_text("\n".join(lines * 400))
    (case.corpus / "b.lines").write_text("\n".join(lines * 400))
    del case.content["train"]
    case.content["prepare"]["sources"].append(
        {"name": "b", "kind": "backwards", "path": str(case.corpus)}
    )
    case.content["prepare"]["calibration"]["length"] = 1024
    case.content["search"] |= {"method": "last_layers"}
    ruler = {"lengths": [512], "samples": 2}
    case.content["evaluate"] = {"tasks": ["niah_single_1"], "ruler": ruler}
    case.content["words"] = {"folder": str(case.corpus)}
    case.save()
    done = subprocess.run(
        [sys.executable, "-c", COMMANDS, case.file],
        env={**os.environ, "PYTHONPATH": str(checkout)},
        cwd=checkout,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.startswith("planned\n"), "libraries warn when they are imported"
    statistics = json.loads((case.output("prepare") / "statistics.json").read_text())
    assert statistics["sources"]["b"]["tokens_available"] > 4096
    mask = json.loads((case.output("materialize") / "model" / "head_mask.json").read_text())
    assert mask["method"] == "last_layers"
    models = json.loads((case.output("evaluate") / "scores.json").read_text())["checkpoints"]
    assert set(models) == {"original", "hybrid"}
    assert models["hybrid"]["ruler"]["niah_single_1"]["512"]["samples"] == 2
    assert "last_layers" in (case.output("report") / "index.html").read_text()
    # Ten words, the default of the stage's `most`.
    manifest = json.loads((case.output("words") / "manifest.json").read_text())
    assert manifest["summary"]["words"] == 10
