"""A stage of one file has its place among the others: nothing else knows it.

tests/e2e/test_own_files.py plans and runs it in a checkout.
"""

from __future__ import annotations

import json
import os
from dataclasses import replace
from typing import Any

import pytest

from pipeline.cli import main
from pipeline.recipe.load import load_recipe
from pipeline.recipe.stage_list import in_order
from pipeline.run.runner import Runner, RunOptions
from stages.report import index
from tests import own_stage
from tests.pipeline_case import Case, fake_table, in_process


def test_it_may_read_all_stages_or_the_report_itself(
    case: Case, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A second stage that needs all, and one that needs the report, whose page is still named."""

    def with_page(*given: Any) -> dict[str, Any]:
        (given[2] / "index.html").write_text("page")
        return {}

    case.content["words"] = {"folder": str(case.corpus)}
    case.save()
    monkeypatch.setattr(own_stage, "with_page", with_page, raising=False)
    indexed: list[Any] = []
    monkeypatch.setattr(index, "write_index", indexed.append)
    table = [
        replace(stage, function="tests.own_stage:with_page") if stage.name == "report" else stage
        for stage in fake_table()
    ]
    digest = replace(own_stage.STAGE, name="digest", needs=None)
    send = replace(own_stage.STAGE, name="send", field=None, needs=("report",))
    stages = in_order([send, *table, digest])
    assert [stage.name for stage in stages][-3:] == ["digest", "report", "send"]
    loaded = load_recipe(case.file, env={}, stages=stages)
    assert Runner(loaded, RunOptions(), in_process).run() == 9
    summary = json.loads((case.output("digest") / "manifest.json").read_text())["summary"]
    read = {one.name for one in loaded.present} - {"digest", "report", "send"}
    assert set(summary["inputs"]) == read
    assert main(["run", str(case.file)], stages) == 0
    assert f"report: {case.output('report')}" in capsys.readouterr().out
    assert indexed == [case.runs]
    monkeypatch.setattr(os, "access", lambda *given: False)  # somebody else's results
    assert main(["run", str(case.file)], stages) == 0
    assert indexed == [case.runs]


def test_a_stage_that_needs_what_is_no_stage_is_refused() -> None:
    with pytest.raises(ValueError, match="stage words needs serach, which is no stage"):
        in_order([*fake_table(), replace(own_stage.STAGE, needs=("prepare", "serach"))])
