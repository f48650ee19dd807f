"""Comparisons: which cells there are, what runs, what the tables say; stages run right here."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bosch.errors import RunError, UserError
from pipeline import compare
from pipeline.cli import main
from pipeline.comparison import Cell, Comparison, Result, Score, label_of, tables
from pipeline.comparison_page import markdown, print_tables
from pipeline.graph import Stage
from pipeline.recipe import load_recipe
from pipeline.runner import Choice, Runner
from pipeline.worker import execute
from pipeline.world import World
from tests.compare_stages import hybrid_score
from tests.pipeline_case import Case, fake_table

PAPER = [
    "rand", "bme", "intr", "dcam", "apl", "proxy", "qada", "razor", "fisher",
    "bosch", "b_single", "b_multi", "b_layer",
]  # fmt: skip


@pytest.fixture
def case(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Case:
    # Nothing here crashes the machine, and waiting for a busy disk would take most of the time.
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    return Case(tmp_path)


def table() -> tuple[Stage, ...]:
    functions = {
        name: f"tests.compare_stages:{name}" for name in ("search", "materialize", "evaluate")
    }
    return tuple(
        replace(stage, function=functions.get(stage.name, stage.function), distributed=False)
        for stage in fake_table()
    )


class Launches:
    """Runs stages here, remembers which, and may stop at one of them."""

    def __init__(self, stop_at: int | None = None, error: type[BaseException] = RunError) -> None:
        self.orders: list[Mapping[str, Any]] = []
        self.stop_at, self.error = stop_at, error

    def __call__(self, order: Mapping[str, Any], world: World) -> dict[str, Any]:
        if len(self.orders) == self.stop_at:
            raise self.error("stopped")
        self.orders.append(order)
        return execute(order)

    def count(self, stage: str) -> int:
        return sum(order["stage"] == stage for order in self.orders)


def comparison(case: Case, *arguments: str, launches: Launches | None = None) -> Comparison:
    parser = argparse.ArgumentParser()
    compare.add_options(parser)
    loaded = load_recipe(case.file, env={})
    return compare.run_comparison(
        loaded, parser.parse_args(arguments), table(), launches or Launches()
    )


def test_every_method_of_the_paper_has_its_place() -> None:
    assert set(PAPER) <= set(compare.METHODS)
    assert sorted(PAPER, key=Cell.order) == PAPER
    assert [name for name in PAPER if label_of(name) == name] == []
    assert sorted(["new", "bosch"], key=Cell.order) == ["bosch", "new"]


def test_cells_share_what_they_can_and_a_second_run_does_nothing(case: Case) -> None:
    launches = Launches()
    arguments = ("--methods", "bosch,bme", "--ratios", "0.25,0.5")
    first = comparison(case, *arguments, launches=launches)
    assert [launches.count(name) for name in ("prepare", "search", "materialize", "evaluate")] == [
        1, 4, 4, 4,
    ]  # fmt: skip
    assert launches.count("train") == launches.count("report") == 0
    assert first.values("bosch", 0.25, "untrained", "needle") == [hybrid_score("bosch", 0.25, None)]
    content = json.loads((first.folder / "compare.json").read_text())
    assert content["complete"]
    assert len(content["cells"]) == 4
    assert {cell["original"]["needle"]["average"] for cell in content["cells"]} == {97.0}
    assert (first.folder / "compare.png").read_bytes()[:4] == b"\x89PNG"
    stamps = {path: path.stat().st_mtime_ns for path in first.folder.iterdir() if path.is_file()}
    again = Launches()
    assert comparison(case, *arguments, launches=again).results == first.results
    assert again.orders == []
    assert stamps == {path: path.stat().st_mtime_ns for path in stamps}
    comparison(case, "--methods", "bme", "--ratios", "0.5,0.75", launches=again)
    assert [order["stage"] for order in again.orders] == ["search", "materialize", "evaluate"]


@pytest.mark.parametrize("stop_at", [0, 1, 5, 9])
def test_a_stopped_comparison_goes_on(case: Case, stop_at: int) -> None:
    arguments = ("--methods", "bosch,bme", "--ratios", "0.25,0.5")
    stopped, resumed = Launches(stop_at, KeyboardInterrupt), Launches()
    with pytest.raises(KeyboardInterrupt):
        comparison(case, *arguments, launches=stopped)
    json_file = case.runs / "tiny" / "compare" / "compare.json"
    if stop_at >= 4:
        assert json.loads(json_file.read_text())["complete"] is False
        assert "of 4 cells are finished" in json_file.with_suffix(".md").read_text()
    found = comparison(case, *arguments, launches=resumed)
    assert len(found.results) == 4
    assert len(stopped.orders) + len(resumed.orders) == 13


def test_a_stage_that_fails_is_named_with_its_cell(case: Case) -> None:
    with pytest.raises(RunError, match=r"BOSCH at 0\.25: stopped"):
        comparison(case, "--methods", "bosch", "--ratios", "0.25", launches=Launches(1))


def test_a_cell_is_the_recipe_itself_where_both_agree(case: Case) -> None:
    launches = Launches()
    loaded = load_recipe(case.file, ["search.method=bme"], env={})
    Runner(loaded, Choice(until="materialize"), table(), launches).run()
    links = {
        path: os.readlink(path) for path in (case.runs / "tiny").iterdir() if path.is_symlink()
    }
    before = launches.count("search")
    comparison(case, "--methods", "bme,intr", "--ratios", "0.5", launches=launches)
    assert launches.count("search") == before + 1
    assert links == {path: os.readlink(path) for path in links}
    assert (case.runs / "tiny" / "compare" / "intr-0.5" / "search").is_symlink()


def test_random_layers_are_averaged_over_three_runs(case: Case) -> None:
    launches = Launches()
    found = comparison(case, "--methods", "rand,bme,bosch", "--ratios", "0.5", launches=launches)
    seeds = [o["section"]["values"]["seed"] for o in launches.orders if o["stage"] == "search"]
    assert seeds == [None, 1, 2, None, None]
    assert len({order["inputs"]["prepare"] for order in launches.orders[1:2]}) == 1
    rows = {row.label: row.texts for rows in next(tables(found)).groups.values() for row in rows}
    assert rows == {"RAND": ["21.0 ± 1.0"], "BME": rows["BME"], "BOSCH": ["80.0"]}


def test_named_seeds_are_for_methods_that_draw(case: Case) -> None:
    launches = Launches()
    comparison(
        case, "--methods", "bme,bosch", "--ratios", "0.5", "--seeds", "0,7", launches=launches
    )
    seeds = [o["section"]["values"]["seed"] for o in launches.orders if o["stage"] == "search"]
    assert seeds == [None, None, 7]
    assert launches.count("prepare") == 1


def test_training_gives_a_second_table(case: Case) -> None:
    launches = Launches()
    found = comparison(
        case, "--methods", "bosch", "--ratios", "0.5", "--with-training", launches=launches
    )
    assert launches.count("train") == 1
    untrained, trained = tables(found)
    assert untrained.title == "Table 1: needle average, without training"
    assert trained.title == "Table 2: needle average, after training on 2,048 tokens"
    assert trained.groups["BOSCH and its ablations"][0].texts == ["85.0"]


def test_a_dry_run_says_what_would_run_and_writes_nothing(case: Case, capsys: Any) -> None:
    launches = Launches()
    comparison(case, "--methods", "bme", "--ratios", "0.5", launches=launches)
    done = len(launches.orders)
    arguments = ("--methods", "bme,intr", "--ratios", "0.5", "--dry-run")
    assert comparison(case, *arguments, launches=launches).results == {}
    told = capsys.readouterr().out
    assert "BME at 0.5: cached" in told
    assert "INTR at 0.5: search to run" in told
    assert len(launches.orders) == done
    assert not (case.runs / "tiny" / "compare" / "intr-0.5").exists()


def test_every_fault_is_named_at_once(case: Case, capsys: pytest.CaptureFixture[str]) -> None:
    case.content["search"]["buckets"] = [0.0, 0.5]
    del case.content["train"]
    del case.content["evaluate"]
    case.save()
    options = ["--methods", "bosh,fisher,bosch", "--ratios", "0.5,1.5,x,0.75", "--seeds", "-1"]
    status = main(["compare", str(case.file), *options, "--with-training"])
    told = capsys.readouterr().err
    assert status == 2
    assert "compare: 7 faults" in told
    for words in (
        "--methods bosh: unknown; did you mean bosch?",
        "--ratios 1.5: does not lie between 0 and 1",
        "--ratios x: is not a number",
        "--ratios 0.75 with bosch: 0.75 cannot be reached",
        "--seeds -1: expected a whole number",
        "--with-training: the recipe has no section train",
        "evaluate: a comparison needs this section",
    ):
        assert words in told
    assert "with fisher" not in told


def made_up(scores: Mapping[str, Mapping[float, float]]) -> Comparison:
    cells, results = [], {}
    for method, by_ratio in scores.items():
        for ratio, value in by_ratio.items():
            cell = Cell(method, ratio, 0, True)
            cells.append(cell)
            results[cell] = Result(
                {}, 0.5, -1.0, {"evaluations": 3.0}, [], {"needle": Score(97.0, 1.0)},
                {"needle": Score(value, 1.0)}, {}, None,
            )  # fmt: skip
    return Comparison("r", "m", Path("x"), tuple(cells), False, results)


def test_the_best_is_bold_the_second_underlined_and_ties_share(capsys: Any) -> None:
    found = made_up(
        {"bme": {0.5: 10.0, 0.75: 3.04}, "fisher": {0.5: 20.0, 0.75: 3.0}, "x": {0.5: 15, 0.75: 1}}
    )
    page = markdown(found)
    assert "| BME | 10.0 | **3.0** |" in page
    assert "| Fisher | **20.0** | **3.0** |" in page
    assert "| x | <u>15.0</u> | <u>1.0</u> |" in page
    assert "| Original | 97.0 | 97.0 |" in page
    assert page.index("Layer-level") < page.index("Head-level") < page.index("Not in the paper")
    print_tables(found)
    shown = capsys.readouterr().out
    assert "Table 1" in shown and "Fisher" in shown and "ρ = 0.75" in shown


def test_options_of_compare_are_checked_by_argparse(case: Case) -> None:
    with pytest.raises(SystemExit):
        main(["compare", str(case.file), "--method"])
    with pytest.raises(UserError, match="choose from all"):
        comparison(case, "--methods", "zzzzzzz")
