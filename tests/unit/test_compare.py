"""Branches of a recipe (`compare`): their stages, what they share, and their faults."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bosch.errors import UserError
from pipeline.cli import main
from pipeline.commands.plan import plan_costs
from pipeline.recipe.load import ROOT, load_recipe
from pipeline.run.graph import resolve
from stages.cost import Devices
from stages.search.stage import SearchConfig
from tests.pipeline_case import Case, fake_table, runner

OWN = ["search", "materialize", "train", "evaluate"]


def compared(case: Case, *entries: dict[str, Any]) -> Case:
    case.content["compare"] = list(entries)
    case.save()
    return case


def states(case: Case, **options: Any) -> dict[str, str]:
    made = runner(case, **options)
    shown = {state.node.name: str(state).partition(" ")[0] for state in made.states()}
    return {name: shown[name] for name in made.chosen}


def test_a_branch_has_the_stages_that_its_overrides_change(case: Case) -> None:
    """Main branch first, report last; prepare and original are shared, and the rest of a seed."""
    entries: list[dict[str, Any]] = [
        {"search.method": "intr"}, {"train.learning_rate": 1e-4, "name": "slow"}, {"seed": 1},
        {"search.method": "intr", "train.learning_rate": 2e-4},
        {"model": {"dtype": "float32"}, "measure": {"lengths": [256]}},
    ]  # fmt: skip
    nodes = resolve(load_recipe(compared(case, *entries).file))
    names = ["prepare", "search", "materialize", "original", "train", "evaluate"]
    names += [f"{stage}@intr" for stage in OWN] + ["train@slow", "evaluate@slow"]
    names += [f"{name}@seed-1" for name in names[:6]]
    names += [f"{stage}@intr-learning_rate-0.0002" for stage in OWN[2:]]
    names += [f"{name}@lengths-256-dtype-float32" for name in names[1:6]]
    assert [node.name for node in nodes] == [*names, "report"]
    by_name = {node.name: node for node in nodes}
    assert dict(by_name["train@intr-learning_rate-0.0002"].inputs) == {
        "prepare": "prepare", "search": "search@intr", "materialize": "materialize@intr",
    }  # fmt: skip
    assert by_name["search@intr"].branches == ("intr", "intr-learning_rate-0.0002")
    report = by_name["report"].inputs
    assert report["search@slow"] == "search" and report["original@seed-1"] == "original@seed-1"
    assert report["materialize@intr-learning_rate-0.0002"] == "materialize@intr"
    assert len(report) == 6 * (1 + len(entries))


def test_a_branch_added_to_a_finished_run_runs_alone(case: Case) -> None:
    assert runner(case).run() == 7
    compared(case, {"search.method": "bme"}, {"train.learning_rate": 1e-4})
    own = {f"{stage}@bme" for stage in OWN} | {f"{stage}@learning_rate-0.0001" for stage in OWN[2:]}
    found = states(case)
    assert {name for name, state in found.items() if state != "cached"} == {*own, "report"}
    # One branch, with what it needs; its stages by name.
    assert set(states(case, branch="bme")) == {f"{stage}@bme" for stage in OWN} | {
        "prepare", "original"
    }  # fmt: skip
    assert list(states(case, until="train@bme", start="search@bme")) == [
        f"{stage}@bme" for stage in OWN[:3]
    ]
    assert runner(case, branch="bme").run() == 4
    folder = case.output("train@bme").resolve()
    assert folder.parent == case.output("train").resolve().parent != folder
    assert runner(case, force=("train@bme",)).run() == 4  # and the other branch, and the report
    assert case.calls("train@bme") == 1 and case.calls("train") == 1
    # Without the branches their links go.
    compared(case)
    runner(case).run()
    assert sorted(path.name for path in case.output("train").parent.glob("*@*")) == []


def test_the_plan_states_the_cost_of_branches(case: Case) -> None:
    compared(case, {"search.swa_ratio": 0.75})
    costs = plan_costs(load_recipe(case.file, env={}), Devices("cpu", 2, 1, 1, 1e12))
    assert 0 < costs["train@swa_ratio-0.75"].flops < costs["train"].flops
    assert "prepare@swa_ratio-0.75" not in costs


def test_branches_that_change_nothing_are_named(
    case: Case, capsys: pytest.CaptureFixture[str]
) -> None:
    case.content["search"]["method"] = "intr"
    compared(case, {"search.method": "intr"}, {"seed": 1}, {"seed": 1, "name": "again"})
    assert main(["validate", str(case.file)], fake_table()) == 0
    printed = capsys.readouterr().out
    assert "compare: intr is the same as" in printed and "compare: again is the same" in printed
    assert "seed-1 is" not in printed


@pytest.mark.parametrize(
    ("entry", "fault"),
    [
        (
            {"search.metod": "intr"},
            "compare.metod-intr.search.metod: unknown key; did you mean method?",
        ),
        ({"search.method": "front"}, "compare.front.search.points"),
        ({"search.window_size": 200}, "compare.window_size-200.search.window_size: "),
        ({"model.path.x": 1}, "compare.1: override of model.path.x: model.path is the value"),
        ({"seed": 1, "name": "bme"}, "compare.1: is called bme, like another branch"),
        ({"seed": 1, "name": "a/b"}, "compare.1: 'a/b' cannot name a folder"),
        ({}, "compare.1: '' cannot name a folder"),
    ],
)
def test_faults_of_a_branch_name_it(case: Case, entry: dict[str, Any], fault: str) -> None:
    if entry == {"search.method": "front"}:
        entry = {**entry, "search.points": [1e-9]}
        fault = "compare.front-points-1e-09.search.points"
    compared(case, {"search.method": "bme"}, entry)
    found = case.fault()
    assert found.startswith(fault) and "\n" not in found


def test_a_fault_of_the_recipe_is_said_once(case: Case) -> None:
    case.content["search"]["window_size"] = 200
    compared(case, {"search.method": "bme"}, {"search.swa_ratio": 0.25})
    assert case.fault().count("search.window_size") == 1


def test_a_branch_is_refused_where_there_is_none(case: Case) -> None:
    with pytest.raises(UserError, match=r"--branch x: the recipe has no branches"):
        runner(case, branch="x")


@pytest.mark.parametrize("as_branch", [False, True])
def test_another_method_drops_what_belongs_to_a_front(tmp_path: Path, as_branch: bool) -> None:
    """A rule keeps as many full heads as fit the budget, at the widest window or its own."""
    path = ROOT / "recipes/quickstart.yaml"
    if as_branch:
        entries = "compare=[{search.method: intr}, {search.method: razor, search.window_size: 16}]"
        branches = load_recipe(path, [entries], fetch=False).branches
        loaded, narrow = branches["intr"], branches["razor-window_size-16"]
    else:
        loaded = load_recipe(path, ["search.method=intr"], fetch=False)
        change = ["search.method=razor", "search.window_size=16"]
        narrow = load_recipe(path, change, fetch=False)
    for recipe, size, full in ((loaded, 64, 6), (narrow, 16, 8)):
        search = recipe.recipe[SearchConfig]
        assert (search.window_size, search.windows, search.points) == (size, None, None)
        assert recipe.info is not None
        rows = search.kv_heads(recipe.info.kinds, "float32")
        assert sum(row[None] for row in rows) == full
