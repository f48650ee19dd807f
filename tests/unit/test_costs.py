"""`plan` for recipes of several kinds."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from data_prep.tasks.samples import TAIL_CHARACTERS
from pipeline.commands.plan import plan_costs, plan_devices
from pipeline.recipe.load import load_recipe
from stages.evaluate.generation import Question
from stages.evaluate.stage import EvaluateConfig
from stages.evaluate.suite import answer_record
from stages.evaluate.suites.needle import NeedleEvaluation
from tests.golden_plans import GOLDEN, plans
from tests.pipeline_case import Case


def test_plans_equal_the_golden_ones() -> None:
    """Every line; tests/golden_plans.py writes the file again."""
    assert list(plans()) == GOLDEN.read_text(encoding="utf-8").splitlines()


def test_an_answer_takes_no_more_disk_than_planned(tmp_path: Path) -> None:
    """In samples.jsonl and, with fewer names, among the shared answers."""
    case = Case(tmp_path)

    def disk(samples: int) -> float:
        overrides = [
            f"evaluate.needle.samples={samples}", "evaluate.needle.tasks=[niah_single_2]",
            "train=null",
        ]  # fmt: skip
        loaded = load_recipe(case.file, overrides)
        needle = loaded.recipe[EvaluateConfig].suites["needle"]
        assert isinstance(needle, NeedleEvaluation)
        return plan_costs(loaded, plan_devices(loaded))["evaluate"].disk / len(needle.lengths)

    question = Question(99, np.zeros(1, np.int32), ["1234567"], "x" * TAIL_CHARACTERS)
    head = {"checkpoint": "original", "suite": "needle", "task": "niah_single_2", "length": 32768}
    line = json.dumps({**head, **answer_record(question, 1.0, ["1234567"], " 1234567")})
    assert disk(2) - disk(1) >= 2 * (len(line) + 1)
