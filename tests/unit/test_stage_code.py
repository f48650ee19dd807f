"""A change of a stage's code fails here until its version is raised or the change is recorded."""

from __future__ import annotations

import json

from tests.tools import stage_code


def test_the_code_of_every_stage_equals_the_recorded_one() -> None:
    recorded, now = json.loads(stage_code.FILE.read_text()), stage_code.current()
    changed = stage_code.behind(recorded, now)
    assert not changed, (
        f"code of stages changed since their version was looked at: {changed}. Raise version in "
        "the stages whose results change, then run: python -m tests.tools.stage_code"
    )
    assert recorded == now, "run: python -m tests.tools.stage_code"


def test_a_change_is_reported_until_the_version_is_raised() -> None:
    now = stage_code.current()
    module = "stages.prepare.run"
    recorded = {**now, "modules": {**now["modules"], module: "other"}}
    assert stage_code.behind(recorded, now) == {"prepare": [module]}
    raised = {**now, "versions": {**now["versions"], "prepare": 99}}
    assert stage_code.behind(recorded, raised) == {}


def test_scoring_code_has_a_version_of_its_own() -> None:
    """Scored answers are reused by later runs of the stages."""
    now = stage_code.current()
    for module in (
        "data_prep.tasks.needles",
        "data_prep.tasks.longbench",
        "stages.evaluate.generation",
    ):
        recorded = {**now, "modules": {**now["modules"], module: "other"}}
        assert stage_code.behind(recorded, now)[stage_code.ANSWERS] == [module]
        raised = {**now, "versions": {**now["versions"], stage_code.ANSWERS: "another"}}
        assert stage_code.ANSWERS not in stage_code.behind(recorded, raised)
