"""What `plan` says of recipes of every kind.

The modules behind it: stages.cost, stages.search.cost, stages.train.cost, stages.train.fit,
stages.evaluate.cost, stages.materialize.cost, stages.prepare.stage, pipeline.commands.plan.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.commands.plan import plan_costs, plan_devices
from pipeline.recipe.load import load_recipe
from tests.golden_plans import GOLDEN, plans
from tests.pipeline_case import Case


def test_plans_are_the_golden_ones() -> None:
    """Every line; tests/golden_plans.py writes the file again."""
    assert list(plans()) == GOLDEN.read_text(encoding="utf-8").splitlines()


@pytest.mark.parametrize(("way", "speedup"), [("data", 1.0), ("context", 2.0)])
def test_processes_speed_one_sample_up_where_they_share_it(
    tmp_path: Path, way: str, speedup: float
) -> None:
    case = Case(tmp_path)
    overrides = [
        f"runtime.evaluate_parallel={way}", "evaluate.needle.samples=1",
        "evaluate.needle.tasks=[vt]",
    ]  # fmt: skip
    loaded = load_recipe(case.file, overrides, env={"NPROC_PER_NODE": "2"})
    cost = plan_costs(loaded, plan_devices(loaded))["original"]
    assert cost.speedup(2) == speedup
