"""The report's page: complete, self-contained, and clear about stages that a recipe leaves out."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from bosch.errors import RunError
from bosch.heads import HeadMask, HeadMaskFile
from bosch.search.trace import TracePoint
from bosch.window import Window
from stages.evaluate.answers import TaskGroup
from stages.evaluate.scores import ORIGINAL
from stages.evaluate.stage import EvaluateConfig
from stages.evaluate.suites.positions.suite import position_table
from stages.evaluate.tables import suite_table
from stages.pages import page as template
from stages.pages.charts import Picture
from stages.pages.tables import as_cell
from stages.report import charts
from stages.report import run as report
from stages.report.index import write_index
from stages.report.page import (
    cost_table,
    filters,
    other_suites,
    score_table,
    speed_table,
)
from stages.report.predictions import samples_by_model
from stages.report.provenance import collect_provenance, flatten
from stages.report.results import Results, collect_predictions, load_results
from stages.report.stage import ReportConfig
from stages.report.terminal import print_summary, summarize
from stages.report.verdict import Difference, verdict
from stages.search.charts import trace
from stages.search.live import LiveView
from stages.search.stage import SearchConfig
from tests import report_fixture
from tests.golden_page import REPORTS, golden_report, outline
from tests.search_case import Additive, config_of, evaluator_of


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return report_fixture.publish(tmp_path_factory.mktemp("stages"))


@pytest.fixture(scope="module")
def results(published: dict[str, Path]) -> Results:
    return load_results(published)


@pytest.fixture(scope="module")
def page(published: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> str:
    return make(tmp_path_factory.mktemp("report"), published)


@pytest.fixture
def inputs(published: dict[str, Path], tmp_path: Path) -> dict[str, Path]:
    """A copy of the inputs that a test may change."""
    shutil.copytree(published["search"].parent, tmp_path, dirs_exist_ok=True)
    return {stage: tmp_path / stage for stage in published}


@pytest.fixture
def only_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out pictures and the chart script, which take most of a second to make."""
    monkeypatch.setattr(template, "library", lambda: "")
    monkeypatch.setattr(Picture, "svg", lambda picture, width: "")
    monkeypatch.setattr("altair.utils.schemapi.DEBUG_MODE", False)  # validates every part


def make(folder: Path, inputs: dict[str, Path], **section: Any) -> str:
    report.run(report_fixture.config(inputs, **section), inputs, folder)
    return (folder / "index.html").read_text(encoding="utf-8")


def rows_of(picture: Picture | None) -> list[dict[str, Any]]:
    """The first data set of a chart."""
    assert picture is not None
    chart = picture.chart.to_dict(validate=False)
    while "data" not in chart:
        chart = chart["layer"][0]
    return picture.chart.to_dict(validate=False)["datasets"][chart["data"]["name"]]


@pytest.mark.parametrize("publish", REPORTS)
def test_the_page_equals_the_golden_one(publish: Callable[[Path], Any], tmp_path: Path) -> None:
    """Its text, its charts and the summary; tests/golden_page.py writes the files again."""
    report = golden_report(publish, tmp_path)
    assert report.splitlines() == REPORTS[publish].read_text(encoding="utf-8").splitlines()


def test_the_page_is_well_formed_and_loads_nothing(page: str) -> None:
    parsed = outline(page)
    for tag, attributes in parsed.tags:
        assert tag not in ("link", "iframe", "img", "object")
        assert not {"src", "xlink:href"} & attributes.keys()
        assert (attributes.get("href") or "#").startswith("#")
    rows = [attributes for tag, attributes in parsed.tags if tag == "tr"]
    assert {row.get("class") for row in rows if row.get("data-task")} == {None}
    assert any(row.get("class") == "total" for row in rows)
    style = page[page.index("<style>") : page.index("</style>")]
    assert not re.search(r"https?://|@import|url\(", style)
    # The policy allows the two scripts on the page: charts, and the page's own.
    policy = next(a["content"] or "" for _, a in parsed.tags if "http-equiv" in a)
    scripts = [text for kind, text in parsed.scripts if kind is None]
    hashes = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in scripts]
    assert policy.startswith("default-src 'none'; ") and len(scripts) == 2
    assert re.findall(r"'sha256-([^']+)'", policy) == hashes


def test_every_picture_has_a_description_for_screen_readers(page: str) -> None:
    parsed = outline(page)
    ids = [attributes["id"] for _, attributes in parsed.tags if "id" in attributes]
    figures = [attributes for tag, attributes in parsed.tags if tag == "figure"]
    charts_on_page = [json.loads(text) for kind, text in parsed.scripts if kind is not None]
    assert len(figures) == len(charts_on_page) == 17
    for attributes in figures:
        assert attributes["role"] == "img" and ids.count(attributes["id"]) == 1
        assert str(attributes["aria-label"]).endswith(".")


def test_texts_are_escaped_in_markup_and_in_charts(page: str) -> None:
    assert "base<model>" not in page and "base&lt;model&gt;" in page
    assert "What is &lt;it&gt;?" in page
    row = {"series": "</script><b>", "x": 1.0, "y": 2.0, "tip": "<i>"}
    axis = charts.Axis("<u>")
    look = charts.styles(["</script><b>"])
    picture = Picture("one", charts.curves([row], axis, axis, look), "one.")
    assert "<" not in picture.json and json.loads(picture.json)
    still = picture.svg(470)
    assert "<b>" not in still and "<u>" not in still
    assert "aria-label" not in still  # of each mark: the figure has one for all


def test_a_method_may_name_its_phases_freely(results: Results, tmp_path: Path) -> None:
    view = LiveView(tmp_path, config_of(tmp_path, SearchConfig(swa_ratio=0.5, window_size=16)))
    evaluator = evaluator_of(Additive(np.ones((1, 3))))
    evaluator.watch = view.update
    for unit, phase in enumerate(("draws", "anchors", "second draws")):
        evaluator.evaluate(HeadMask(np.arange(3)[None] != unit), phase, "whole mask")
    view.close()
    summary = results.search.summary.model_copy(update={"trace": evaluator.trace})
    picture = trace(summary, "", "score")
    assert picture is not None
    drawn = picture.chart.to_dict(validate=True)
    legend = drawn["layer"][0]["encoding"]["color"]["scale"]
    series = dict(zip(legend["domain"], legend["range"], strict=True))
    assert {"draws", "anchors", "second draws"} < set(series)
    assert series["draws"] != series["second draws"]


def test_a_trace_ends_at_the_last_evaluation_and_marks_the_final_mask(
    results: Results,
) -> None:
    points = [
        TracePoint(
            step=step, phase="swaps", subproblem="swap", score=0.5, log_likelihood=-1.0,
            best_score=0.5, mask=mask,
        )
        for step, mask in enumerate(("early", "final", "other", "final", "early"), 1)
    ]  # fmt: skip
    summary = results.search.summary.model_copy(update={"trace": points})
    picture = trace(summary, "final", "score")
    assert picture is not None
    x = picture.chart.to_dict()["layer"][0]["encoding"]["x"]
    assert x["scale"]["domain"] == [0.5, 5.5]
    assert [row["x"] for row in rows_of(picture) if row["series"] == "final mask"] == [4]


def test_every_chart_is_valid_vega_lite(results: Results) -> None:
    search = results.search
    pictures = [
        charts.averages(results), *charts.against_original(results), charts.head_mask(search),
        charts.layer_importance(search)[0], charts.recovery(results),
        charts.training_loss(results.training or []), charts.positions(results)[0],
        charts.cache_by_length(results.cache), charts.document_lengths(results.statistics),
        trace(search.summary, "", "score"), charts.stage_times(results.stage_seconds),
    ]  # fmt: skip
    for picture in pictures:
        assert picture is not None and picture.chart.to_dict(validate=True)


def test_the_head_mask_shows_each_head_as_in_the_file(results: Results) -> None:
    rows = rows_of(charts.head_mask(results.search))
    mask = results.search.mask
    assert len(rows) == mask.num_layers * mask.num_key_value_heads
    for row in rows:
        assert (row["series"] == "sliding") == (row["y"] in mask.mask.swa_kv_heads[row["x"]])


def test_every_score_of_every_suite_is_on_the_page_and_links_to_samples(
    page: str, results: Results
) -> None:
    places = {cell.anchor for one in samples_by_model(results.predictions) for cell in one.cells}
    shown = outline(page).score_cells
    for name, suites in results.scores.checkpoints.items():
        for suite, scores in suites.items():
            for task, by_length in scores.tasks.items():
                for length, one in by_length.items():
                    place = f"samples-{name}-{suite}-{task}-{length}"
                    interval = f"{one.low:.1f}–{one.high:.1f}"
                    assert place in places
                    assert shown[f"#{place}"].endswith(f"{one.score:.1f}{interval}")
    assert set(re.findall(r'href="#([^"]+)"', page)) <= set(re.findall(r' id="([^"]+)"', page))


def test_the_worst_samples_of_each_score_are_shown() -> None:
    place = {"checkpoint": "hybrid", "suite": "needle", "task": "vt", "length": 1024}
    text = {"question": "r" * 300, "answers": ["a", 7], "output": "x" * 400 + "y"}
    records = [
        {**place, **text, "index": index, "score": score}
        for index, score in ((4, 0.5), (0, 1.0), (1, 0.5), (2, 0.0), (3, 0.25))
    ]
    others = {**place, "task": "fwe", "length": 0, "index": 0}
    [model] = samples_by_model(collect_predictions([*records, {**others, "loss": [1.0]}]))
    [cell] = model.cells
    assert (model.label, cell.label, cell.task, cell.length) == (
        "Hybrid, untrained", "vt at 1k", "vt", "1k",
    )  # fmt: skip
    assert cell.table.rows == [
        (number, f"…{'r' * 300}", "a, 7", "x" * 400) for number in ("2: 0.0", "3: 25.0", "1: 50.0")
    ]
    [model] = samples_by_model(collect_predictions([{**others, "score": 1.0, "question": "?"}]))
    [cell] = model.cells
    assert (cell.label, cell.table.rows) == ("fwe", [("0: 100.0", "?", "", "")])


def test_the_page_states_the_provenance_of_its_numbers(
    published: dict[str, Path], results: Results
) -> None:
    later = results.manifests["train"].model_copy(
        update={"packages": {"torch": "3"}, "git_commit": "f" * 40}
    )
    found = collect_provenance(
        report_fixture.config(published),
        replace(results, manifests={**results.manifests, "train": later}),
    )
    assert found.versions == [("numpy", "2.0.0"), ("torch", "2.13.0, 3")]
    origin, recipe = dict(found.origin), dict(found.recipe)
    assert origin["Stage search"] == (
        "key ssssssssssss, commit 0123456789ab, with local changes, "
        "created 2026-01-02T03:04:05+00:00, GPUs: 8"
    )
    assert origin["Stage train"] == (
        "key tttttttttttt, commit ffffffffffff, created 2026-01-02T03:04:05+00:00"
    )
    assert (origin["Seed"], origin["Parameters"]) == ("17", "7,345,920")
    assert origin["Text of the evaluation, words"] == "70,000"
    assert recipe["search.window_size"] == "128" and recipe["train.total_tokens"] == "4,000,000"
    assert ("documents", "812") in found.statistics
    assert not [name for name, _ in found.statistics if "lengths" in name]
    values = {"b": 9999, "more": 10_000, "c": True, "d": None, "e": {}}
    assert dict(flatten({"a": values, "f": [], "g": [1, 2], "h": [{"i": 1}]})) == {
        "a.b": "9999", "a.more": "10,000", "a.c": "True", "a.d": "none", "a.e": "none",
        "f": "none", "g": "1, 2", "h.0.i": "1",
    }  # fmt: skip


def test_hidden_rows_name_their_task_and_length(page: str) -> None:
    tags = outline(page).tags
    assert [attributes["name"] for tag, attributes in tags if tag == "select"] == ["task", "length"]
    [form] = [attributes for tag, attributes in tags if tag == "form"]
    assert "hidden" in form  # until the script shows it
    assert {a["data-task"] for _, a in tags if "data-task" in a} == {*report_fixture.TASKS}
    assert {a["data-length"] for _, a in tags if "data-length" in a} == {"512", "1k", "2k"}


def scores_of(
    first: Sequence[float], second: Sequence[float], positions: Sequence[float]
) -> dict[str, Any]:
    """scores.json of a hybrid and the original with these scores and losses of documents."""
    mine, theirs = {("vt", 512): list(first)}, {("vt", 512): list(second)}
    suites = {name: suite_table(mine, theirs) for name in ("needle", "harness")}
    content: dict[str, Any] = {
        "checkpoints": {"original": {"needle": suite_table(theirs)}, "hybrid": suites}
    }
    if positions:
        losses = [[2.0, 2.0 + more] for more in positions]
        table = position_table(3, losses, [[2.0, 2.0]] * len(losses))
        content["positions"] = {"hybrid": table}
    return content


@pytest.mark.parametrize(
    ("first", "second", "positions", "said", "marked"),
    [
        ([0] * 5, [1] * 5, [], "; 5 samples are too few to tell the two apart.", "? 0.0"),
        ([1] * 7 + [0] * 5, [1] * 12, [], "; 12 samples do not decide whether it differs: they "
         "would show a loss of 57.8 points.", "? 58.3"),
        ([1, 0] * 500, [0, 1] * 500, [], "; 1,000 samples do not decide whether", "? 50.0"),
        ([1] * 300, [1] * 300, [], "keeps 100.0 % [98.8, 101.2]", "≈ 100.0"),
        ([0] * 9 + [1] * 3, [1] * 12, [], "keeps 25.0 % [", "25.0"),
        ([1] * 12, [0] * 12, [], "scores +100.0 [", "100.0"),
        ([1] * 12, [1] * 12, [0.3], "[too few] nats against the original; the documents are t", ""),
        ([1] * 12, [1] * 12, [0.2, -0.1, 0.1] * 2, "; the documents do not decide whether", ""),
        ([1] * 12, [1] * 12, [0.21, 0.2, 0.22] * 2, "2: +0.21 [+0.19, +0.23] nats against the", ""),
    ],
)  # fmt: skip
def test_the_verdict_says_if_there_are_too_few_samples(
    tmp_path: Path, first: list[float], second: list[float], positions: list[float], said: str,
    marked: str,
) -> None:  # fmt: skip
    inputs = report_fixture.publish(tmp_path, without=("train",))
    content = scores_of(first, second, positions)
    report_fixture.write_json(inputs["evaluate"] / "scores.json", content)
    results = load_results(inputs)
    sentence = verdict(results)
    assert sentence is not None and said in sentence
    assert "Tasks of lm-eval: " in sentence
    [hybrid] = [scores for scores in results.needle if scores.name == "hybrid"]
    assert marked in [cell for row in score_table(hybrid).rows for cell in row] or not marked


def test_search_figures_are_those_of_the_chosen_point(tmp_path: Path) -> None:
    inputs = report_fixture.publish_front(tmp_path)
    results = load_results(inputs)
    summary = {"evaluations": 9, "best_log_likelihood": -9}
    manifest = results.manifests["search"].model_copy(update={"summary": summary})
    results = replace(results, manifests={"search": manifest, "train": manifest})
    found = dict(collect_provenance(report_fixture.config(inputs), results).summaries)
    chosen = results.search.score_and_log_likelihood[1]
    assert found == {
        "search.evaluations": "9", "search.best_log_likelihood": str(chosen),
        "train.evaluations": "9", "train.best_log_likelihood": "-9",
    }  # fmt: skip


def test_windows_that_no_head_has_are_not_mentioned(results: Results) -> None:
    choices, menu = 2 * results.search.mask.mask.choices, [Window(128), Window(16)]
    mask = HeadMaskFile.of(
        HeadMask.of_choices(choices), menu, model="m", method="front", swa_ratio=0.5
    )
    search = replace(results.search, mask=mask)
    assert search.window_sizes == "16" and search.heads.keys() == {None, Window(16)}
    summary = summarize(replace(results, search=search), "title", ReportConfig())
    assert summary["window_size"] == 16 and "window_sizes" not in summary
    assert "128" not in str(charts.head_mask(search).chart.to_dict())
    full = replace(mask, mask=HeadMask.of_choices(0 * choices))
    assert replace(search, mask=full).window_sizes == "16 and 128"


def test_the_title_of_the_speed_table_states_dtype_and_batch_size(results: Results) -> None:
    assert results.efficiency is not None
    for settings, title in (
        ({}, "Measured on some GPU"),
        ({"dtype": "float32", "batch_size": 1}, "Measured on some GPU in float32"),
        ({"batch_size": 4}, "Measured on some GPU, 4 sequences together"),
    ):
        measured = results.efficiency.model_copy(update={"settings": settings})
        table = speed_table(replace(results, efficiency=measured))
        assert table is not None and table.title == title


def test_charts_need_no_scores_of_the_original_and_no_lengths_of_documents(
    results: Results,
) -> None:
    needle = [scores for scores in results.needle if scores.name != ORIGINAL]
    alone = replace(results, needle=needle)
    for picture in (charts.averages(alone), charts.recovery(alone)):
        assert picture is not None and picture.description.endswith(".")
        assert "original" not in picture.description + picture.json
    assert charts.document_lengths({"sources": {"a": {"lengths": []}}}) is None


@pytest.mark.usefixtures("only_text")
def test_large_numbers_have_no_exponents(tmp_path: Path, inputs: dict[str, Path]) -> None:
    changes = {"full_forward_equivalents": 1_234_567.8, "evaluations": 1_200}
    file = inputs["search"] / "summary.json"
    report_fixture.write_json(file, json.loads(file.read_text()) | changes)
    file = inputs["measure"] / "efficiency.json"
    efficiency = json.loads(file.read_text())
    efficiency["points"][0] |= {"prefill_tokens_per_second": 12_345.6}
    report_fixture.write_json(file, efficiency)
    page = make(tmp_path / "report", inputs)
    work = "Model work | 1,234,567.8 full passes over D"
    assert f"Masks evaluated | 1,200\n{work}" in outline(page).text
    # In the form of `bosch measure`.
    assert ">12.3k<" in page and "e+0" not in page


def test_gpu_hours_have_a_price_only_if_the_recipe_states_one(results: Results) -> None:
    free, priced = cost_table(results, None, "USD"), cost_table(results, 2.5, "EUR")
    assert free is not None and "EUR" not in free.header and free.title == "GPU hours"
    seconds = sum(s * report_fixture.GPUS.get(n, 8) for n, s in report_fixture.SECONDS.items())
    hours = seconds / 3600
    assert priced is not None and priced.title == "GPU hours, at 2.50 EUR each"
    assert priced.rows[-1][3:] == [f"{hours:,.2f}", f"{2.5 * hours:,.2f}"]
    manifests = {
        n: manifest.model_copy(update={"gpu_seconds": 0})
        for n, manifest in results.manifests.items()
    }
    assert cost_table(replace(results, manifests=manifests), 2.5, "EUR") is None


@pytest.mark.usefixtures("only_text")
def test_paths_below_the_checkout_are_shown_relative_to_it(
    tmp_path: Path, inputs: dict[str, Path]
) -> None:
    root = Path(__file__).resolve().parents[2]
    config = report_fixture.config(inputs)
    model = config.model.model_copy(update={"path": str(root / "recipes" / "base")})
    evaluate = EvaluateConfig(harness={"tasks": ["gsm8k"], "data_dir": str(root / "recipes/data")})
    sections = {**config.upstream, "evaluate": evaluate}
    report.run(replace(config, model=model, upstream=sections), inputs, tmp_path / "report")
    page = (tmp_path / "report" / "index.html").read_text(encoding="utf-8")
    assert str(root) not in page
    assert "model.path</th><td>recipes/base<" in page
    assert "evaluate.harness.data_dir</th><td>recipes/data<" in page


@pytest.mark.usefixtures("only_text")
@pytest.mark.parametrize(
    ("changes", "loss"),
    [
        ({}, ""),
        ({"teacher": "original"}, " (KL divergence from the original)"),
        ({"teacher": "original", "teacher_weight": 0.0}, ""),
        ({"teacher": "original", "teacher_weight": 0.7, "teacher_tokens": 0.37},
         " (70 % KL divergence from the original on the 37 % of tokens where it is largest, "
         "30 % cross-entropy)"),
    ],
)  # fmt: skip
def test_the_training_loss_is_called_what_it_is(
    tmp_path: Path, inputs: dict[str, Path], changes: dict[str, Any], loss: str
) -> None:
    config = report_fixture.config(inputs)
    train = config.upstream["train"].model_copy(update=changes)
    report.run(replace(config, upstream={**config.upstream, "train": train}), inputs, tmp_path)
    text = outline((tmp_path / "index.html").read_text(encoding="utf-8")).text
    assert f"Training loss{loss}: running mean, each logged step behind it" in text


@pytest.mark.usefixtures("only_text")
@pytest.mark.parametrize("without", [("train",), ("original", "train", "evaluate")])
def test_stages_that_a_recipe_leaves_out_are_reported_as_absent(
    tmp_path: Path, without: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    inputs = report_fixture.publish(tmp_path, without=without)
    text = outline(make(tmp_path / "report", inputs)).text
    assert "Training is not part of this recipe." in text
    assert ("Evaluation is not part of this recipe." in text) == ("evaluate" in without)
    for stage in without:
        assert f"Stage {stage} | not part of this recipe" in text
    summary = json.loads((tmp_path / "report" / "summary.json").read_text())
    assert set(summary["absent_stages"]) == set(without)
    original = r"97\.5" if "evaluate" in inputs else "not part of this recipe"
    out = capsys.readouterr().out
    assert re.search(rf"original\s+{original}", out)
    assert re.search(r"hybrid trained\s+not part of this recipe", out)


@pytest.mark.usefixtures("only_text")
@pytest.mark.parametrize("failed", ["hybrid", "tokens-4000000", "intr"])
def test_a_missing_score_is_reported_with_its_reason(
    tmp_path: Path, inputs: dict[str, Path], capsys: pytest.CaptureFixture[str], failed: str
) -> None:
    """On the first screen and on the terminal; no other checkpoint takes its place."""
    file = inputs["evaluate"] / "scores.json"
    scores = json.loads(file.read_text())
    scores["checkpoints"][failed] = {}
    del scores["positions"][failed]
    reason = "its logits are no numbers (NaN)"
    scores["missing"] = {"models": {failed: reason}, "harness": {"gsm8k": "it has no data"}}
    report_fixture.write_json(file, scores)
    summary = report.run(report_fixture.config(inputs), inputs, tmp_path / "report")
    page = outline((tmp_path / "report" / "index.html").read_text(encoding="utf-8")).text
    out = " ".join(capsys.readouterr().out.split())
    for text in (page, out):
        assert f"models: {failed} has no score: {reason}" in text
        assert "gsm8k has no score: it has no data" in text
    assert page.index(f"{failed} has no score") < page.index("KV cache per token")
    assert (f"Could not be evaluated: {reason}" in page) == (failed != "intr")
    assert ("hybrid untrained not evaluated" in out) == (failed == "hybrid")
    if failed == "tokens-4000000":
        assert summary["verdict"].endswith(f"could not be evaluated: {reason}.")
        assert summary["needle"]["trained"] is None


def test_tasks_that_only_one_model_has_are_in_the_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    inputs = report_fixture.publish(tmp_path, without=("train",))
    file = inputs["evaluate"] / "scores.json"
    scores = json.loads(file.read_text())
    rule: Any = SimpleNamespace(metric="acc", filter_list=None, weight_by_size=False)
    group = {"both": TaskGroup(("one", "two"), (rule,))}
    one = {("one", 0): [1.0, 0.0]}
    both = one | {("two", 0): [1.0]}

    def metrics(scores: Mapping[Any, Any]) -> Any:
        return {key: {"acc,none": values} for key, values in scores.items()}

    scores["checkpoints"]["original"]["harness"] = suite_table(one, None, group, metrics(one))
    scores["checkpoints"]["hybrid"]["harness"] = suite_table(both, None, group, metrics(both))
    report_fixture.write_json(file, scores)
    [part] = other_suites(load_results(inputs))
    [table] = part.tables
    assert (part.title, part.missing) == ("Tasks of lm-eval", [])
    assert [row[0] for row in table.rows] == ["one", "two", "both (2 of 2 tasks)"]
    assert [row[1] for row in table.rows] == ["50.0", "–", "50.0"]
    assert [as_cell(row[1]).share for row in table.rows] == [0.5, 0.0, 0.5]
    # Every suite has a sentence, a tile and a table, whatever its name. If any of its tasks has
    # a length, the table has a column for each length.
    mixed = one | {("four", 512): [1.0, 1.0]}
    scores["checkpoints"]["hybrid"]["another"] = suite_table(mixed, mixed)
    scores["missing"] = {"another": {"three": "it is gone"}}
    report_fixture.write_json(file, scores)
    results = load_results(inputs)
    assert "another: " in str(verdict(results))
    print_summary(results, summarize(results, "a run", ReportConfig()))
    averages = [line.split() for line in capsys.readouterr().out.splitlines() if "average" in line]
    untrained = [(row[0], row[-1]) for row in averages if {"hybrid", "untrained"} <= {*row}]
    assert untrained == [("Needle", "31.0"), ("Tasks", "75.0"), ("another", "75.0")]
    assert filters(results.scores.checkpoints.values()) == {
        "task": [*report_fixture.TASKS, "one", "two", "four"], "length": ["512", "1k", "2k"],
    }  # fmt: skip
    part = other_suites(results)[1]
    assert part.missing == ["another: three has no score: it is gone"]
    assert [row[0] for table in part.tables for row in table.rows] == ["one", "four", "all tasks"]
    labels = [row["label"] for row in rows_of(charts.against_original(results)[0])]
    assert "another, untrained" in labels


@pytest.mark.usefixtures("only_text")
def test_a_page_is_made_for_layer_rules_and_evaluations_without_needles(
    tmp_path: Path, inputs: dict[str, Path]
) -> None:
    path = inputs["search"] / "summary.json"
    summary = json.loads(path.read_text()) | {"trace": [], "layer_importance": [], "notes": []}
    report_fixture.write_json(path, summary)
    scores = {"checkpoints": {"original": {}, "hybrid": {}}}
    report_fixture.write_json(inputs["evaluate"] / "scores.json", scores)
    text = outline(make(tmp_path / "report", inputs)).text
    assert "builds its mask without evaluations" in text
    assert "does not probe layers one by one" in text
    assert "This recipe's evaluation has no needle tasks." in text


def test_the_index_has_a_row_for_every_run_that_has_a_report(
    published: dict[str, Path], results: Results, tmp_path: Path
) -> None:
    summary = summarize(results, "t", ReportConfig(gpu_hour_price=2.0))
    summary["model"] = "/models/base"
    manifest = (published["search"] / "manifest.json").read_text()
    for name, content in (
        ("b", None),
        ("menu", summary | {"window_sizes": [64, 128]}),
        ("a<b>", {"title": "older"}),
        ("c", "{"),
        ("d", {"needle": None, "kv_cache_bytes_per_token": 5}),
    ):
        folder = tmp_path / name / "report"
        folder.mkdir(parents=True)
        (folder / "manifest.json").write_text(manifest)
        text = content if isinstance(content, str) else json.dumps(content or summary)
        (folder / "summary.json").write_text(text)
    (tmp_path / "under way" / "search").mkdir(parents=True)
    page = outline(write_index(tmp_path).read_text(encoding="utf-8"))
    lines = page.text.splitlines()
    [row] = [line for line in lines if line.startswith("b | ")]
    assert row.startswith("b | Ship the hybrid after 4,000,000 tokens")
    assert " | base | bosch | 75 % | 128 | 97.5 | 31.0 | 96.0 | 6 KiB → 1.5 KiB" in row
    assert row.endswith("| 13.28 | 26.56 USD | 2026-01-02 03:04")
    values = [attributes["data-value"] for _, attributes in page.tags if "data-value" in attributes]
    assert [f"{float(value or 0):.2f}" for value in values] == ["1536.00", "13.28", "26.56"] * 2
    assert any(line.startswith("menu | ") and " | 64 and 128 | " in line for line in lines)
    unread = [line for line in lines if "cannot be read" in line]
    assert [line.partition(" |")[0] for line in unread] == ["a<b>", "c", "d"]
    links = [attributes["href"] for tag, attributes in page.tags if tag == "a"]
    assert links == [f"{name}/report/index.html" for name in ("a<b>", "b", "c", "d", "menu")]


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("search/summary.json", "{"),
        ("search/summary.json", '{"trace": []}'),
        ("evaluate/scores.json", "[]"),
        ("evaluate/scores.json", '{"checkpoints": {"best": {"needle": {"average": 1}}}}'),
        ("train/metrics.jsonl", '{"step": 1, "to\n'),
        ("materialize/summary.json", None),
    ],
)
def test_damaged_inputs_are_named(
    tmp_path: Path, inputs: dict[str, Path], file: str, content: str | None
) -> None:
    path = tmp_path / file
    if content is None:
        path.unlink()
    else:
        path.write_text(content)
    with pytest.raises(RunError, match=re.escape(str(path))):
        load_results(inputs)


@pytest.mark.parametrize(
    ("low", "high", "is_significant"),
    [(0.0, 0.2, False), (-0.2, 0.0, False), (0.01, 0.2, True), (-0.2, -0.01, True)],
)
def test_an_interval_that_ends_at_0_is_not_significant(
    low: float, high: float, is_significant: bool
) -> None:
    assert Difference("", "nats", (low + high) / 2, low, high).is_significant == is_significant
