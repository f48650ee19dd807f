"""A stage of one file runs, is cached, checked, planned and reported: nothing else knows it."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from bosch.errors import UserError
from pipeline.cli import main
from pipeline.commands.plan import plan_lines
from pipeline.recipe.load import load_recipe
from pipeline.recipe.stage_list import in_order
from pipeline.run.runner import Runner, RunOptions
from stages.report import index
from stages.stage import LoadedRecipe
from tests import own_stage
from tests.pipeline_case import Case, fake_table, in_process

TABLE = in_order([*fake_table(), own_stage.STAGE])


@pytest.fixture
def case(case: Case) -> Case:
    case.content["words"] = {"folder": str(case.corpus)}
    case.save()
    return case


def load(case: Case, *overrides: str) -> LoadedRecipe:
    return load_recipe(case.file, overrides, env={}, stages=TABLE)


def states(case: Case, *overrides: str) -> dict[str, str]:
    runner = Runner(load(case, *overrides), RunOptions(), in_process)
    return {state.node.name: str(state) for state in runner.states()}


def test_it_runs_in_its_place_and_is_cached(case: Case) -> None:
    assert Runner(load(case), RunOptions(), in_process).run() == 8
    names = [stage.name for stage in TABLE]
    assert names.index("prepare") < names.index("words") < names.index("report")
    assert (case.output("words") / "words.txt").read_text() == "some\ntext"
    assert json.loads((case.output("words") / "manifest.json").read_text())["version"] == 3
    assert set(states(case).values()) == {"cached"}
    assert states(case, "words=null")["report"].startswith("to run")
    report = json.loads((case.output("report") / "output.json").read_text())
    assert "words" in report["inputs"]


def test_it_may_read_all_stages_or_the_report_itself(
    case: Case, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A second stage that needs all, and one that needs the report, whose page is still named."""

    def with_page(*given: Any) -> dict[str, Any]:
        (given[2] / "index.html").write_text("page")
        return {}

    monkeypatch.setattr(own_stage, "with_page", with_page, raising=False)
    indexed: list[Any] = []
    monkeypatch.setattr(index, "write_index", indexed.append)
    table = [
        replace(one, function="tests.own_stage:with_page") if one.name == "report" else one
        for one in fake_table()
    ]
    digest = replace(own_stage.STAGE, name="digest", needs=None)
    send = replace(own_stage.STAGE, name="send", field=None, needs=("report",))
    stages = in_order([send, *table, digest])
    assert [one.name for one in stages][-3:] == ["digest", "report", "send"]
    loaded = load_recipe(case.file, env={}, stages=stages)
    assert Runner(loaded, RunOptions(), in_process).run() == 9
    summary = json.loads((case.output("digest") / "manifest.json").read_text())["summary"]
    read = {one.name for one in loaded.present} - {"digest", "report", "send"}
    assert set(summary["inputs"]) == read
    assert main(["run", str(case.file)], stages) == 0
    assert f"report: {case.output('report')}" in capsys.readouterr().out
    assert indexed == [case.runs]


def test_a_stage_that_needs_what_is_no_stage_is_refused() -> None:
    with pytest.raises(ValueError, match="stage words needs serach, which is no stage"):
        in_order([*fake_table(), replace(own_stage.STAGE, needs=("prepare", "serach"))])


def test_its_section_decides_its_key(case: Case) -> None:
    Runner(load(case), RunOptions(), in_process).run()
    assert states(case, "words.most=5")["words"] == "to run (words.most changed 10 → 5)"
    assert states(case, "words.most=5")["evaluate"] == "cached"
    (case.corpus / "b.txt").write_text("more")
    assert states(case)["words"] == "to run (words.folder: b.txt is new; input prepare changed)"


@pytest.mark.parametrize(
    ("override", "fault"),
    [
        ("words.mots=5", "words.mots: unknown key; did you mean most?"),
        ("words.most=1M", "words.most: 1,048,576 is more than prepare.train_tokens"),
        ("words.folder=no/where", "words.folder: there is no folder"),
    ],
)
def test_its_faults_are_reported_with_the_others(case: Case, override: str, fault: str) -> None:
    with pytest.raises(UserError, match=r"search\.swa_ratio") as caught:
        load(case, override, "search.swa_ratio=2")
    if "unknown key" in fault:
        assert fault in str(caught.value)
    with pytest.raises(UserError) as caught:
        load(case, override)
    assert fault in str(caught.value)


def test_its_cost_stands_in_the_plan(case: Case) -> None:
    lines = list(plan_lines(load(case), "h100x8"))
    place = next(n for n, line in enumerate(lines) if line.startswith("  words"))
    assert lines[place].split(maxsplit=1)[1] == "100 B on disk"
    assert lines[place + 1].strip() == "- 10 words on 8 x h100"
