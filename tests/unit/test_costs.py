"""`plan` for recipes of several kinds."""

from __future__ import annotations

import json
from pathlib import Path

from pipeline.commands.plan import plan_costs, plan_devices
from pipeline.recipe.load import load_recipe
from stages.evaluate.stage import EvaluateConfig
from tests.golden_plans import GOLDEN, plans
from tests.pipeline_case import Case


def test_plans_equal_the_golden_ones() -> None:
    """Every line; tests/golden_plans.py writes the file again."""
    assert list(plans()) == GOLDEN.read_text(encoding="utf-8").splitlines()


def test_an_answer_takes_no_more_disk_than_planned(tmp_path: Path) -> None:
    """In samples.jsonl and among the answers of its model."""
    case = Case(tmp_path)

    def disk(samples: int) -> float:
        overrides = [
            f"evaluate.ruler.samples={samples}", "evaluate.tasks=[niah_single_2]",
            "train=null",
        ]  # fmt: skip
        loaded = load_recipe(case.file, overrides)
        lengths = loaded.recipe[EvaluateConfig].ruler.lengths
        return plan_costs(loaded, plan_devices(loaded))["evaluate"].disk / len(lengths)

    head = {"checkpoint": "original", "suite": "ruler", "task": "niah_single_2", "length": 32768}
    answer = {"score": 1.0, "scores": {"score,none": 1.0}, "answers": ["1234567"]}
    texts = {"question": "x" * 300, "output": " 1234567", "prompt": "0" * 16}
    line = json.dumps({**head, "index": 99, **answer, **texts})
    assert disk(2) - disk(1) >= 2 * (len(line) + 1)
