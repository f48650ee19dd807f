"""What `plan` says of recipes of every kind.

The modules behind it: stages.cost, stages.search.cost, stages.train.cost, stages.train.fit,
stages.evaluate.cost, stages.materialize.cost, stages.prepare.stage, pipeline.commands.plan.
"""

from __future__ import annotations

from tests.golden_plans import GOLDEN, plans


def test_plans_are_the_golden_ones() -> None:
    """Every line; tests/golden_plans.py writes the file again."""
    assert list(plans()) == GOLDEN.read_text(encoding="utf-8").splitlines()
