"""The quickstart recipe at a size for tests: real model, real stages, real kills."""

from __future__ import annotations

import hashlib
import html
import json
import os
import random
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from bosch.mask_files import HeadMaskFile
from bosch.masks import HeadMask
from bosch.model.loading import load_model
from bosch.model.search_mode import prepare_for_search
from bosch.rankings.layer_rules import intr
from bosch.score.calibration import CalibrationSet
from bosch.score.objective import Objective
from data_prep.documents.calibration import needle_prompts
from data_prep.text import haystack_words
from pipeline.recipe.load import ROOT, load_recipe
from stages.evaluate.chat import ChatConfig
from stages.evaluate.lm import LanguageModel
from stages.search.examples import answered
from tests.notebook import NOTEBOOK, run_notebook
from tests.rank_processes import Forked

RECIPE = "recipes/quickstart.yaml"
SMALL = [
    "prepare.sequence_length=256",
    "prepare.train_tokens=3072",
    "prepare.calibration.examples=2",
    "prepare.calibration.length=256",
    "search.method=bosch",
    "compare=[{search.method: intr}]",
    "search.swa_ratio=0.75",
    "search.window_size=128",
    "search.points=null",
    "search.budget_per_layer=3",
    "train.teacher=none",
    "train.learning_rate=3e-4",
    "train.total_tokens=3072",
    "train.batch_tokens=512",
    "train.checkpoint_tokens=[1536,3072]",
    "runtime.save_every_steps=2",
    "evaluate.tasks=[niah_single_2]",
    "evaluate.ruler.lengths=[256]",
    "evaluate.ruler.samples=2",
    "evaluate.positions.length=192",
    "evaluate.positions.documents=2",
]


def start(root: Path, *options: str) -> Forked:
    return Forked(["run", RECIPE, *SMALL, f"runtime.output_root={root}", *options], root / "log")


def finish(root: Path, *options: str) -> str:
    done = start(root, *options).done(600)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def results(root: Path, branch: str = "") -> dict[str, Any]:
    """Results that must not depend on kills: mask, losses and the digest of the weights."""
    output = root / "quickstart"
    metrics = [json.loads(line) for line in (output / f"train{branch}/metrics.jsonl").open()]
    weights = output / f"train{branch}/checkpoints/tokens-3072/model.safetensors"
    return {
        "mask": json.loads((output / f"search{branch}/head_mask.json").read_text())["windows"],
        "losses": [line["loss"] for line in metrics],
        "weights": hashlib.sha256(weights.read_bytes()).hexdigest(),
    }


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The command that users type; stages after the first one run in forked processes."""
    root = tmp_path_factory.mktemp("undisturbed")
    done = subprocess.run(
        ["launch/torchrun.sh", RECIPE, *SMALL, f"runtime.output_root={root}", "--until", "prepare"],
        cwd=ROOT, env={**os.environ, "NPROC_PER_NODE": "1"}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    finish(root)
    return root


@pytest.mark.slow
def test_the_pipeline_runs_and_a_second_run_does_nothing(undisturbed: Path) -> None:
    output = undisturbed / "quickstart"
    file = HeadMaskFile.load(output / "search/head_mask.json")
    assert file.mask.swa_ratio == 0.75
    assert len(results(undisturbed)["losses"]) == 6
    scores = json.loads((output / "evaluate/scores.json").read_text())["checkpoints"]
    assert list(scores) == ["original", "hybrid", "tokens-1536", "tokens-3072"]
    branch = HeadMaskFile.load(output / "search@intr/head_mask.json")
    assert branch.method == "intr" and branch.mask != file.mask and branch.mask.swa_ratio == 0.75
    steps, branch_steps = (
        [json.loads(line) for line in (output / stage / "metrics.jsonl").open()]
        for stage in ("train", "train@intr")
    )
    for step, branch_step in zip(steps, branch_steps, strict=True):
        for field in ("step", "tokens", "learning_rate"):
            assert branch_step[field] == step[field]
    assert branch_steps[0]["loss"] != steps[0]["loss"]
    page = (output / "report/index.html").read_text()
    assert "After 3,072 tokens of each the recipe's hybrid scores" in html.unescape(page)
    assert "<svg" in page
    assert "http-equiv" in page
    assert 'href="quickstart/report/index.html"' in (undisturbed / "index.html").read_text()
    assert "nothing to do" in finish(undisturbed)


@pytest.mark.slow
def test_a_run_killed_again_and_again_ends_the_same(undisturbed: Path, tmp_path: Path) -> None:
    rng = random.Random(20)
    until = ("--until", "train@intr")
    for stage, count in (("search", 0), ("train", 0), ("train", 1)):  # the last of the branch
        run = start(tmp_path, *until)
        while len([*tmp_path.glob(f"store/{stage}/*")]) < count or not [
            *tmp_path.glob(f"work/{stage}/*/*")
        ]:
            assert run.wait(0.05) is None
        assert run.wait(rng.uniform(0.1, 2)) is None
        os.killpg(run.pid, signal.SIGKILL)
        run.wait()
    finish(tmp_path, *until)
    assert results(tmp_path) == results(undisturbed)
    assert results(tmp_path, "@intr") == results(undisturbed, "@intr")


@pytest.mark.slow
def test_the_notebook_runs_on_a_finished_run(
    undisturbed: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("BOSCH_RUN", str(undisturbed / "quickstart"))
    run_notebook(NOTEBOOK)
    shown = capsys.readouterr().out
    assert "heads see 128 tokens" in shown and "tokens-3072" in shown and "def main(" in shown


def test_the_searchs_six_heads_retrieve_and_the_rules_do_not() -> None:
    """A published mask of the recipe's size and widest window, on questions no search has seen."""
    recipe = load_recipe(ROOT / RECIPE, fetch=False).recipe
    file = HeadMaskFile.load(ROOT / "recipes/masks/quickstart/bosch_plus-0.875.json")
    assert file.mask.menu == (recipe.search.window,)
    model = load_model(ROOT / recipe.model.path, dtype="float32")
    tokenizer = AutoTokenizer.from_pretrained(ROOT / recipe.model.path)
    tasks, words = recipe.prepare.calibration.tasks, haystack_words(None)
    prompts = needle_prompts(tasks, 12, 512, lambda task: 16, "evaluation", 7, tokenizer, words)
    lm = LanguageModel(model, tokenizer, ChatConfig(), 1)
    records = answered(lm, list(prompts))
    assert len(records) >= 10
    questions = CalibrationSet.from_records((r["input_ids"], r["answer_length"]) for r in records)
    prepare_for_search(model)
    objective = Objective(model, questions, file.mask.menu)
    shape = file.mask.shape
    full = objective.evaluate(HeadMask.all_full(*shape)).score
    rule_mask = HeadMask.of(intr(*shape, file.mask.swa_ratio), recipe.search.window)
    rule = objective.evaluate(rule_mask).score
    searched = objective.evaluate(file.mask).score
    assert full - rule >= 0.1
    assert searched - rule >= 0.4
