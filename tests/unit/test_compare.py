"""Comparisons: combinations, stages that run, tables and pages; stages run in this process."""

from __future__ import annotations

import argparse
import json
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from bosch.analysis.intervals import Documents
from bosch.errors import RunError, UserError
from bosch.search import methods
from pipeline.cli import main
from pipeline.commands.compare import command as compare
from pipeline.commands.compare.comparison import (
    Combination,
    Comparison,
    Result,
    SampleScores,
    ScoreRow,
    paper_scores,
)
from pipeline.commands.compare.page import markdown, page, score_tables, task_tables
from pipeline.commands.options import METHODS, read_options
from pipeline.commands.paths import model_label
from pipeline.recipe.load import load_recipe
from pipeline.recipe.stage_list import in_order
from pipeline.run.failures import DISK_FULL_STATUS
from pipeline.run.launch import failure_of
from pipeline.run.runner import Runner, RunOptions
from pipeline.run.worker import execute
from stages.evaluate.scores import Scores
from stages.pages import page as template
from stages.pages.charts import Picture
from stages.stage import Stage, World
from tests import own_stage
from tests.compare_stages import hybrid_score
from tests.golden_page import COMPARED, golden
from tests.pipeline_case import ROOT, Case, fake_table

PAPER = [
    "rand", "bme", "intr", "dcam", "apl", "proxy", "qada", "razor", "fisher",
    "bosch", "b_single", "b_multi", "b_layer",
]  # fmt: skip

FRONT = {
    "method": "front", "windows": [16, 64], "points": [0.4, 0.6],
    "budget": {"kv_cache": "0.6 @ 256"},
}  # fmt: skip


@pytest.fixture
def case(case: Case, monkeypatch: pytest.MonkeyPatch) -> Case:
    # Pages without the pictures that need no script, and without that script.
    monkeypatch.setattr(template, "library", lambda: "")
    monkeypatch.setattr(Picture, "svg", lambda picture, width: "")
    return case


def table() -> tuple[Stage[Any], ...]:
    functions = {
        name: f"tests.compare_stages:{name}"
        for name in ("search", "materialize", "original", "evaluate")
    }
    return tuple(
        replace(stage, function=functions.get(stage.name, stage.function), distributed=False)
        for stage in fake_table()
    )


class Launches:
    """Runs stages here, records which, and can stop at a stage or at a method's search."""

    def __init__(
        self, stop_at: int | str | None = None, error: type[BaseException] = RunError
    ) -> None:
        self.orders: list[Mapping[str, Any]] = []
        self.stop_at, self.error = stop_at, error

    def __call__(self, order: Mapping[str, Any], world: World) -> dict[str, Any]:
        if self.stop_at in (len(self.orders), order["section"]["values"].get("method", "")):
            raise self.error("stopped")
        self.orders.append(order)
        return execute(order)

    def count(self, stage: str) -> int:
        return sum(order["stage"] == stage for order in self.orders)


def comparison(case: Case, *arguments: str, launches: Launches | None = None) -> Comparison:
    parser = argparse.ArgumentParser()
    compare.add_options(parser)
    loaded = load_recipe(case.file, env={}, stages=table())
    options = read_options(compare.CompareOptions, parser.parse_args(arguments), "compare")
    return compare.run_comparison(loaded, options, launches or Launches())


def printed(
    case: Case,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    compared: Callable[..., Comparison],
    *arguments: str,
    is_json: bool = False,
) -> tuple[int, str]:
    """The exit status and output of the command; `compared` makes its comparison."""
    parser = argparse.ArgumentParser()
    compare.add_options(parser)
    options = parser.parse_args(arguments, argparse.Namespace(json=is_json))
    with monkeypatch.context() as patch:
        patch.setattr(compare, "run_comparison", compared)
        status = compare.run(load_recipe(case.file, env={}, stages=table()), options)
    return status, capsys.readouterr().out


def compared(case: Case) -> str:
    """Page and CSV of three methods at two ratios with two seeds, with training."""
    arguments = ("--methods", "bosch,bme,bosch_plus", "--ratios", "0.25,0.5", "--seeds", "1,2")
    folder = comparison(case, *arguments, "--with-training").folder
    page, scores = (folder / f"compare.{form}" for form in ("html", "csv"))
    return golden(page.read_text(encoding="utf-8")) + scores.read_text(encoding="utf-8")


def test_the_page_equals_the_golden_one(case: Case) -> None:
    """tests/golden_comparison.py writes the file again."""
    assert compared(case).splitlines() == COMPARED.read_text(encoding="utf-8").splitlines()


def test_the_command_prints_json_or_tables(
    case: Case, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    here = partial(compare.run_comparison, launcher=Launches())
    arguments = ("--methods", "bosch,bme", "--ratios", "0.5")
    for is_json in (True, False):
        status, text = printed(case, monkeypatch, capsys, here, *arguments, is_json=is_json)
        assert status == 0
        (file,) = case.folder.rglob("compare.json")
        if is_json:
            assert json.loads(text) == json.loads(file.read_text())
    assert "BOSCH" in text and text.endswith(f"compare: {file.with_suffix('.html')}\n")


def test_methods_of_the_paper_come_first_in_its_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert set(PAPER) <= set(METHODS)
    monkeypatch.setitem(methods.METHODS, "own", methods.Method("Own", "one by one", "", ""))
    ordered = [*PAPER, "bosch_plus", "own"]
    assert sorted({*ordered}, key=Combination.order) == ordered


def test_combinations_share_stages_and_a_second_run_does_nothing(
    case: Case, capsys: pytest.CaptureFixture[str]
) -> None:
    launches = Launches()
    arguments = ("--methods", "bosch,bme", "--ratios", "0.25,0.5")
    first = comparison(case, *arguments, launches=launches)
    said = capsys.readouterr().out
    assert "(combination 1 of 4)" in said and " left for 1 combination)" in said
    stages = ("prepare", "original", "search", "materialize", "evaluate")
    assert [launches.count(name) for name in stages] == [1, 1, 4, 4, 4]
    assert launches.count("train") == launches.count("report") == 0
    [average] = first.averages("untrained", "bosch", 0.25, "needle")
    assert average.score == hybrid_score("bosch", 0.25, None)
    content = json.loads((first.folder / "compare.json").read_text())
    assert content["complete"]
    assert len(content["combinations"]) == 4
    originals = [
        row["score"]
        for combination in content["combinations"]
        for row in combination["rows"]
        if (row["models"], row["task"]) == ("original", "")
    ]
    assert originals == [97.0] * 4
    assert (first.folder / "compare.png").read_bytes()[:4] == b"\x89PNG"
    # The model's name is shown without the machine's folders.
    for name in ("compare.md", "compare.json", "compare.html", "compare.csv"):
        assert str(case.runs.parent) not in (first.folder / name).read_text()
    assert model_label(str(ROOT / "recipes" / "quickstart")) == "recipes/quickstart"
    assert model_label("Qwen/Qwen3-8B") == "Qwen/Qwen3-8B"
    again = Launches()
    assert comparison(case, *arguments, launches=again).results == first.results
    capsys.readouterr()
    dry = ("--methods", "bme,intr", "--ratios", "0.5", "--dry-run")
    assert comparison(case, *dry, launches=again).results == {}
    said = capsys.readouterr().out
    assert "BME at 0.5: cached" in said and "INTR at 0.5: search to run" in said
    assert again.orders == [] and not (first.folder / "intr-0.5").exists()
    comparison(case, "--methods", "bme", "--ratios", "0.5,0.75", launches=again)
    assert [order["stage"] for order in again.orders] == ["search", "materialize", "evaluate"]


def test_missing_or_outdated_pages_are_written_again(case: Case) -> None:
    arguments = ("--methods", "bme", "--ratios", "0.5")
    folder = comparison(case, *arguments).folder
    [predictions] = folder.glob("bme-0.5/predictions-*.html")
    written = {path: path.read_bytes() for path in (*folder.glob("compare.*"), predictions)}
    assert len(written) == 6
    (folder / "compare.csv").unlink()
    for path in (predictions, folder / "compare.html", folder / "compare.png"):
        path.write_text("of older code")
    comparison(case, *arguments)
    assert written == {path: path.read_bytes() for path in written}


@pytest.mark.parametrize("stop_at", [0, 5])
def test_a_stopped_comparison_resumes(case: Case, stop_at: int) -> None:
    arguments = ("--methods", "bosch,bme", "--ratios", "0.25,0.5")
    stopped, resumed = Launches(stop_at, KeyboardInterrupt), Launches()
    with pytest.raises(KeyboardInterrupt):
        comparison(case, *arguments, launches=stopped)
    json_file = case.runs / "tiny" / "compare" / "compare.json"
    if stop_at:
        assert json.loads(json_file.read_text())["complete"] is False
        assert "of 4 combinations are finished" in json_file.with_suffix(".md").read_text()
    compared = comparison(case, *arguments, launches=resumed)
    assert len(compared.results) == 4
    assert len(stopped.orders) + len(resumed.orders) == 14


@pytest.mark.parametrize("stop_at", [0, 3], ids=["prepare", "original"])
def test_a_failure_of_a_shared_stage_ends_the_comparison(case: Case, stop_at: int) -> None:
    with pytest.raises(RunError, match=r"BME at 0\.25: stopped"):
        comparison(case, "--methods", "bosch,bme", "--ratios", "0.25", launches=Launches(stop_at))


@pytest.mark.parametrize(
    ("status", "message"),
    [(DISK_FULL_STATUS, "search: the disk of .* is full"), (-9, "search: .*")],
)
def test_a_full_disk_and_a_killed_process_end_the_comparison(
    case: Case, status: int, message: str
) -> None:
    """They would stop the other combinations, too."""

    class Full(Launches):
        def __call__(self, order: Mapping[str, Any], world: World) -> dict[str, Any]:
            if order["section"]["values"].get("method") == "bme":
                raise failure_of(Path(order["work_dir"]), status, order, world, False)
            return super().__call__(order, world)

    launches = Full()
    with pytest.raises(RunError, match=rf"^BME at 0\.25: {message}"):
        comparison(case, "--methods", "bme,bosch", "--ratios", "0.25,0.5", launches=launches)
    assert [order["stage"] for order in launches.orders] == ["prepare"]


def test_a_model_without_scores_is_reported_with_the_reason(
    case: Case, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """A row of dashes alone would not show that its logits are NaN."""

    class Failing(Launches):
        def __call__(self, order: Mapping[str, Any], world: World) -> dict[str, Any]:
            summary = super().__call__(order, world)
            if order["stage"] == "evaluate" and len(self.orders) > 5:
                file = Path(order["work_dir"]) / Scores.FILE
                scores = json.loads(file.read_text())
                scores["checkpoints"]["hybrid"] = {}
                scores["missing"] = {"models": {"hybrid": "its logits are NaN"}}
                file.write_text(json.dumps(scores))
            return summary

    result = comparison(case, "--methods", "bosch,bme", "--ratios", "0.5", launches=Failing())
    sentence = "BOSCH at 0.5: models: hybrid has no score: its logits are NaN"
    assert result.missing == [sentence]
    for name in ("compare.md", "compare.html"):
        assert sentence in (result.folder / name).read_text()
    status, text = printed(case, monkeypatch, capsys, lambda *_: result)
    assert status == 1 and sentence in text


@pytest.mark.parametrize(("refused", "error"), [("bme", RunError), ("bosch", UserError)])
def test_a_failed_search_leaves_the_other_combinations_their_scores(
    case: Case, refused: str, error: type[Exception], monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """Also if the first one fails, before the shared stage original."""
    launches = Launches(refused, error)
    result = comparison(case, "--methods", "bosch,bme", "--ratios", "0.5", launches=launches)
    assert {combination.method for combination in result.results} == {"bosch", "bme"} - {refused}
    [sentence] = result.missing
    assert sentence == f"{refused.upper()} at 0.5 has no scores: stopped"
    for name in ("compare.md", "compare.html"):
        assert sentence in (result.folder / name).read_text()
    status, text = printed(case, monkeypatch, capsys, lambda *_: result)
    assert status == 1 and sentence in text
    # After the fault is mended, the comparison resumes with the failed combination.
    again = comparison(case, "--methods", "bosch,bme", "--ratios", "0.5")
    assert len(again.results) == 2 and not again.failures


def test_a_front_is_searched_once_for_all_ratios(case: Case) -> None:
    case.content["search"] = {
        "method": "front", "windows": [16, 64], "points": [0.4, 0.6, 0.8],
        "budget": {"kv_cache": "0.6 @ 128", "context": 256, "cache_dtype": "float8"},
    }  # fmt: skip
    case.save()
    launches = Launches()
    recipe = load_recipe(case.file, env={}, stages=table())
    Runner(recipe, RunOptions(until="search"), launches).run()
    result = comparison(case, "--methods", "front", "--ratios", "0.5,0.75", launches=launches)
    assert len(result.results) == 2 and launches.count("search") == 1
    scores = [combination.calibration_score for combination in result.results.values()]
    assert scores == [0.5, 0.75]  # of the point that each ratio uses
    made = [order for order in launches.orders if order["stage"] == "materialize"]
    budgets = [order["upstream"]["search"]["values"]["budget"] for order in made]
    assert [(budget["ratio"], budget["kv_cache"], budget["context"]) for budget in budgets] == [
        (0.5, None, 256), (0.75, None, 256),
    ]  # fmt: skip
    assert {budget["cache_dtype"] for budget in budgets} == {"float8"}


def test_sections_that_a_comparison_leaves_out_are_neither_run_nor_checked(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also a stage of the user's that needs checkpoints, if the comparison trains none."""
    own = replace(own_stage.STAGE, function="tests.fake_stages:run", needs=("prepare", "train"))
    stages_of_all = in_order([*table(), own])
    monkeypatch.setitem(globals(), "table", lambda: stages_of_all)
    case.content["words"] = {"folder": str(case.corpus)}
    case.content["search"] = FRONT
    case.content["evaluate"]["budgets"] = case.content["train"]["budgets"] = "all"
    case.content["measure"] = {"lengths": [512]}
    case.save()
    launches = Launches()
    result = comparison(case, "--methods", "bme", "--ratios", "0.5", launches=launches)
    assert len(result.results) == 1 and not result.failures
    stages = ["prepare", "search", "materialize", "original", "evaluate"]
    assert [order["stage"] for order in launches.orders] == stages
    # A method with one window uses the front's widest one.
    mask = json.loads((result.folder / "bme-0.5/materialize/model/head_mask.json").read_text())
    assert mask["window_size"] == 64


def test_a_combination_shares_the_recipes_own_results(case: Case) -> None:
    """The original does not depend on rivals and windows, which a comparison leaves out."""
    case.content["evaluate"] |= {"rivals": ["intr"], "windows": [64]}
    case.save()
    launches = Launches()
    loaded = load_recipe(case.file, ["search.method=bme"], env={}, stages=table())
    Runner(loaded, RunOptions(until="original"), launches).run()
    links = {
        path: os.readlink(path) for path in (case.runs / "tiny").iterdir() if path.is_symlink()
    }
    before = launches.count("search")
    comparison(case, "--methods", "bme,intr", "--ratios", "0.5", launches=launches)
    assert launches.count("search") == before + 1 and launches.count("original") == 1
    assert links == {path: os.readlink(path) for path in links}
    assert (case.runs / "tiny" / "compare" / "intr-0.5" / "search").is_symlink()


def test_random_layers_are_averaged_over_three_runs(case: Case) -> None:
    launches = Launches()
    compared = comparison(case, "--methods", "rand,bme,bosch", "--ratios", "0.5", launches=launches)
    seeds = [o["section"]["values"]["seed"] for o in launches.orders if o["stage"] == "search"]
    assert seeds == [None, 1, 2, None, None]
    assert launches.count("prepare") == 1
    groups = next(score_tables(compared)).groups
    rows = {row[0]: row[1:] for group in groups for row in group.rows}
    [random], [bosch] = rows["RAND"], rows["BOSCH"]
    assert random.startswith("21.0 (") and bosch == "80.0 (79.0–81.0)"
    low, high = map(float, random.partition(" ")[2].strip("()").split("–"))
    assert low < 12 and high > 33  # three seeds, one point apart, with 40 samples
    assert (random.rank, bosch.rank) == (0, 1)
    assert list(rows) == ["Original", "RAND", "BME", "BOSCH"]


@pytest.mark.parametrize(
    ("options", "faults"),
    [
        (
            ["--methods", "bosh,fisher,bosch", "--ratios", "0.5,1.5,x,0.75", "--seeds", "-1"],
            ["--methods: 'bosh'", "--ratios: expected a value at most 1, found ",
             "--ratios: 'x'", "--seeds: expected a value at least 0"],
        ),
        (
            ["--methods", "fisher,bosch", "--ratios", "0.5,0.75", "--with-training"],
            ["--ratios 0.75 with bosch: 0.75", "--with-training: the recipe has no section train",
             "evaluate: a comparison needs"],
        ),
    ],
    ids=["faulty", "unfit for the recipe"],
)  # fmt: skip
def test_all_invalid_options_are_reported_at_once(
    case: Case, options: list[str], faults: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    case.content["search"]["buckets"] = [0.0, 0.5]
    del case.content["train"]
    del case.content["evaluate"]
    case.save()
    assert main(["compare", str(case.file), *options]) == 2
    message = capsys.readouterr().err
    assert f"compare: {len(faults)} faults" in message
    assert [fault for fault in faults if fault not in message] == []


def made_up(scores: Mapping[str, Mapping[float, float]], samples: int = 400) -> Comparison:
    """Methods that answer the first samples of a task correctly, as many as their scores say."""
    combinations, results = [], {}
    for method, by_ratio in scores.items():
        for ratio, value in by_ratio.items():
            combination = Combination(method, ratio, 0, True)
            combinations.append(combination)
            right = round(value / 100 * samples)
            own = SampleScores.of({("vt", 512): [1.0] * right + [0.0] * (samples - right)})
            value = own.average
            rows = [
                ScoreRow("original", "needle", "", 0, 97.0, 96.0, 98.0),
                ScoreRow("untrained", "needle", "", 0, value, value - 1, value + 1),
            ]
            costs = {"evaluations": 3.0}
            results[combination] = Result(
                {"evaluate": "0" * 64}, 0.5, -1.0, costs, [], rows, None,
                samples={("untrained", "needle"): own},
            )  # fmt: skip
    return Comparison("r", "m", Path("x"), tuple(combinations), False, results)


def test_the_highest_is_bold_only_if_all_others_are_significantly_lower(capsys: Any) -> None:
    """At ρ = 0.75 the two highest differ by half a point on 400 samples."""
    compared = made_up(
        {
            "bme": {0.5: 10.0, 0.75: 30.5},
            "fisher": {0.5: 40.0, 0.75: 30.0},
            "bosch_plus": {0.5: 15.0, 0.75: 1.0},
        }
    )
    text = markdown(compared)
    assert "| BME | 10.0 (9.0–11.0) | <u>30.5 (29.5–31.5)</u> |" in text
    assert "| Fisher | **40.0 (39.0–41.0)** | <u>30.0 (29.0–31.0)</u> |" in text
    assert "| BOSCH+ | 15.0 (14.0–16.0) | 1.0 (0.0–2.0) |" in text
    assert "| Original | 97.0 (96.0–98.0) | 97.0 (96.0–98.0) |" in text
    assert "| Fisher | 0.75 | – | – | 0.500 | -1.000 | 3 |" in text
    assert text.index("Layer-level") < text.index("Head-level") < text.index("Not in the paper")
    tests = {(test.ratio, test.method): test for test in compared.tests("untrained", "needle")}
    assert tests.keys() == {
        (0.5, "bme"), (0.5, "bosch_plus"), (0.75, "fisher"), (0.75, "bosch_plus"),
    }  # fmt: skip
    near = tests[0.75, "fisher"]
    assert near.highest == "bme" and not near.is_lower and near.low < 0 < near.high + 1e-9
    assert all(test.is_lower for test in tests.values() if test is not near)
    assert all(test.p_holm >= test.p_value for test in tests.values())
    assert "| Fisher | −0.5 |" in text and "| BME | −30.0 |" in text
    for score_table in score_tables(compared):
        score_table.print()
    shown = capsys.readouterr().out
    assert "Table 1" in shown and "Fisher" in shown and "ρ = 0.75" in shown


def test_the_cache_in_vllm_is_shown_only_if_every_seed_has_one() -> None:
    compared = made_up({"rand": {0.5: 10.0, 0.75: 5.0}})
    results = {
        replace(one, seed=seed): replace(result, cache=cache)
        for one, result in compared.results.items()
        for seed, cache in enumerate([{"generate": 0.5, "vllm": 0.75}, {"generate": 0.25}])
        if one.ratio == 0.5 or seed == 0
    }
    text = markdown(replace(compared, combinations=tuple(results), results=results))
    assert "| RAND | 0.5 | 37.5% | – |" in text and "| RAND | 0.75 | 50.0% | 75.0% |" in text


def test_p_values_are_corrected_for_all_pairs_of_a_ratio() -> None:
    """The same samples select the highest method, so its tests count as all pairs."""
    ratios = [number / 20 for number in range(1, 19)]
    names = ("bme", "intr", "fisher", "dcam", "apl", "proxy", "razor", "qada", "rand", "bosch")
    plain = {name: dict.fromkeys(ratios, 100.0 * (name == "bosch")) for name in names}
    tests = made_up(plain).tests("untrained", "needle")
    assert len(tests) == 9 * 18 and all(test.is_lower for test in tests)
    # Each of eight samples is answered by only one of the two methods.
    few = made_up({"bme": {0.5: 40.0}, "fisher": {0.5: 42.0}})
    [pair] = few.tests("untrained", "needle")
    assert 0.001 < pair.p_holm < 0.01 and f"| {pair.p_holm:.3f} | yes |" in markdown(few)
    [pair] = made_up({"bme": {0.5: 40.0}, "fisher": {0.5: 46.0}}).tests("untrained", "needle")
    assert pair.p_holm == pair.p_value
    three = made_up({"bme": {0.5: 40.0}, "fisher": {0.5: 46.0}, "dcam": {0.5: 40.0}})
    for test in three.tests("untrained", "needle"):
        assert test.p_holm == pytest.approx(3 * pair.p_value)


def test_documents_are_weighted_by_their_number_of_samples() -> None:
    """Ten of 40 documents have nine samples each; a suite's average is the mean over samples."""
    compared = made_up({"bme": {0.5: 40.0}, "fisher": {0.5: 60.0}})
    right, counts = [1.0] * 10 + [0.0] * 30, [9] * 10 + [1] * 30
    for one, result in compared.results.items():
        scores = right if one.method == "fisher" else [0.0] * 40
        own = SampleScores.of({("qa", 512): Documents(scores, counts)})
        assert own.average == pytest.approx(75.0 * (one.method == "fisher"))
        result.samples["untrained", "needle"] = own
        for place, row in enumerate(result.rows):
            if row.models == "untrained":
                result.rows[place] = replace(row, score=own.average)
    [pair] = compared.tests("untrained", "needle")
    assert (pair.method, pair.difference) == ("bme", pytest.approx(-75.0))
    seeds = {
        replace(one, seed=seed): result
        for one, result in compared.results.items()
        for seed in range(3)
    }
    text = markdown(replace(compared, combinations=tuple(seeds), results=seeds))
    [(low, high)] = re.findall(r"\| Fisher \| \**75\.0 \(([\d.]+)–([\d.]+)\)", text)
    assert float(low) < 75 < float(high)
    uneven = SampleScores.of({("vt", 512): [1.0], ("vt", 1024): [0.0, 0.0, 0.0]})
    assert uneven.average == 50.0


def test_seeds_with_different_samples_get_the_range_of_their_averages() -> None:
    compared = made_up({"rand": {0.5: 20.0}})
    [(one, result)] = compared.results.items()
    original, row = result.rows
    seeds = {
        replace(one, seed=seed): replace(
            result, rows=[original, replace(row, score=score)], samples={}
        )
        for seed, score in enumerate((20.0, 30.0, 10.0))
    }
    compared = replace(compared, combinations=tuple(seeds), results=seeds)
    assert "| RAND | 20.0 (seeds 10.0–30.0) |" in markdown(compared)
    assert "RAND: 20.0, seeds from 10.0 to 30.0" in page(compared)


@pytest.mark.parametrize("more", [-1.0, 1.0])
def test_averages_that_are_not_means_over_subtasks_are_not_tested(more: float) -> None:
    compared = made_up({"bme": {0.5: 40.0}, "fisher": {0.5: 60.0}})
    assert len(compared.tests("untrained", "needle")) == 1
    for result in compared.results.values():
        result.rows[1] = replace(result.rows[1], score=result.rows[1].score + more)
    assert compared.tests("untrained", "needle") == []


def test_nothing_is_bold_with_five_samples() -> None:
    text = markdown(made_up({"bme": {0.5: 0.0}, "fisher": {0.5: 100.0}}, samples=5))
    assert "**" not in text and "<u>100.0 (" in text and "<u>0.0 (" in text


def test_nothing_is_bold_if_a_method_has_other_samples() -> None:
    compared = made_up({"bme": {0.5: 10.0}, "intr": {0.5: 79.5}, "fisher": {0.5: 80.0}})
    for one, result in compared.results.items():
        if one.method == "intr":
            result.samples["untrained", "needle"] = SampleScores.of({("vt", 512): [1.0, 0.59]})
    assert [test.method for test in compared.tests("untrained", "needle")] == ["bme"]
    text = markdown(compared)
    assert "<u>80.0 (" in text and "<u>79.5 (" in text and "| 10.0 (" in text and "**" not in text


def test_the_original_is_that_of_all_tasks_where_a_combination_leaves_one_out() -> None:
    compared = made_up({"bme": {0.5: 10.0}, "fisher": {0.5: 20.0}})
    for (one, result), average in zip(compared.results.items(), (98.0, 95.0), strict=True):
        original = replace(result.rows[0], score=average)
        tasks = ("vt",) if one.method == "bme" else ("vt", "niah")
        rows = [original, *(replace(original, task=task, length=512) for task in tasks)]
        result.rows[:1] = rows
    assert "| Original | 95.0 (" in markdown(compared)
    assert "original 95.0." in page(compared)


def test_a_suite_that_the_original_has_no_score_of_is_shown() -> None:
    compared = made_up({"bme": {0.5: 10.0}, "fisher": {0.5: 20.0}})
    for result in compared.results.values():
        del result.rows[0]
    text = markdown(compared)
    assert "| Original | – |" in text and "| Fisher | **20.0 (" in text
    assert "BME 10.0, Fisher 20.0." in page(compared)


def test_the_title_states_training_tokens_if_a_combination_has_trained_scores() -> None:
    compared = made_up({"bme": {0.5: 10.0}, "fisher": {0.5: 20.0}})
    [first, (one, result)] = compared.results.items()
    for count, title in ((2048, "after training on 2,048 tokens"), (None, "after training")):
        results = dict([first, (one, replace(result, trained_tokens=count))])
        tables = score_tables(replace(compared, with_training=True, results=results))
        assert [table.title.partition(", ")[2] for table in tables] == ["without training", title]


def test_the_page_shows_every_method_and_escapes_names() -> None:
    compared = made_up({"bme": {0.5: 10.0, 0.75: 3.0}, "fisher": {0.5: 20.0, 0.75: 4.0}})
    html = page(replace(compared, model="a <b> model"))
    assert "a &lt;b&gt; model" in html and "<b>" not in html
    assert html.count('<figure class="chart"') == 2  # a picture per ratio
    assert "BME 10.0, Fisher 20.0; original 97.0." in html
    assert "<td><strong>20.0 (19.0–21.0)</strong></td><td><u>4.0 (3.0–5.0)</u></td>" in html


def test_the_papers_scores_are_shown_if_model_and_settings_match(case: Case) -> None:
    compared = made_up({"intr": {0.5: 20.0}, "fisher": {0.5: 80.0}, "bosch_plus": {0.5: 90.0}})
    recipe = load_recipe(ROOT / "recipes/qwen3_8b_r075.yaml", fetch=False, input_files=False).recipe
    paper = paper_scores(recipe)
    scores = paper["needle"]
    assert scores[0.5]["fisher"] == 89.3 and scores[0.875]["bosch"] == 42.5 and len(paper) == 1
    text = markdown(replace(compared, paper=paper))
    assert "| Method | ρ = 0.5 | paper |" in text
    assert "| Original | 97.0 (96.0–98.0) | 99.1 |" in text
    assert "| Fisher | 80.0 (79.0–81.0) | 89.3 |" in text
    assert "| BOSCH+ | **90.0 (89.0–91.0)** | – |" in text
    for change in ({"window_size": 2048}, {"sinks": 4}):
        other = recipe.search.model_copy(update=change)
        assert not paper_scores(recipe.model_copy(update={"search": other}))
    for change in ({"lengths": [4096]}, {"tasks": ["vt"]}):
        needle = recipe.evaluate.needle.model_copy(update=change)
        evaluate = recipe.evaluate.model_copy(update={"needle": needle})
        assert not paper_scores(recipe.model_copy(update={"evaluate": evaluate}))
    assert not paper_scores(load_recipe(case.file, env={}).recipe)


def test_every_score_of_a_task_links_to_its_predictions(case: Case) -> None:
    result = comparison(case, "--methods", "bme,rand", "--ratios", "0.5", "--with-training")
    tables = list(task_tables(result))
    assert [table.name for table in tables] == ["tasks-0.5-untrained", "tasks-0.5-trained"]
    cells = [cell for table in tables for row in table.rows for cell in row[1:]]
    # Untrained and trained, at two lengths: original, RAND with three seeds, BME.
    assert len(cells) == 2 * 2 * 3
    targets = [cell.target for cell in cells if cell.target]
    targets += [target for cell in cells for _, target in cell.more if target]
    assert len(targets) == 2 * 2 * (1 + 3 + 1)
    html = (result.folder / "compare.html").read_text()
    for target in targets:
        file, _, name = target.partition("#")
        assert f'<h4 id="{name}">' in (result.folder / file).read_text()
        assert f'href="{target}"' in html
    assert 'data-task="vt" data-length="512"' in html
    # The header of an average links to the table of its tasks.
    columns = [cell.target for table in score_tables(result) for cell in table.header[1:]]
    assert columns == ["#tasks-0.5-untrained", "#tasks-0.5-trained"]
    assert all(html.count(f'id="{column[1:]}"') == 1 for column in columns)
    [predictions] = (result.folder / "bme-0.5").glob("predictions-*.html")
    assert "says tokens-2048" in predictions.read_text()
