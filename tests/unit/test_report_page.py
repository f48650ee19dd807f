"""The report's page: complete, self-contained, and clear about stages that a recipe leaves out.

Its charts as files, and number formats.
"""

from __future__ import annotations

import csv
import json
import math
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import yaml

from bosch.errors import RunError
from bosch.search.trace import TracePoint
from stages.evaluate.tables import TaskGroup, suite_table
from stages.formats import (
    format_bytes,
    format_count,
    format_flops,
    format_hours,
    format_length,
    format_score,
    format_seconds,
    format_share,
    signed,
)
from stages.pages.charts import (
    Axis,
    AxisForm,
    Picture,
    Style,
    curves,
    save,
    styles,
)
from stages.pages.colours import COLOURS
from stages.pages.tables import as_cell
from stages.report import charts
from stages.report import page as report
from stages.report.index import write_index
from stages.report.page import model_table, provenance, score_table, summarize
from stages.report.results import Results, load_results
from stages.report.stage import ReportConfig
from stages.search.charts import trace
from tests import report_fixture
from tests.golden_page import REPORTS, golden_report, outline
from tests.hybrid_case import sliding_heads


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
    return {stage: tmp_path / folder.name for stage, folder in published.items()}


@pytest.fixture
def only_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out pictures, which take most of a second to make."""
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


def test_an_axis_of_tokens_begins_at_zero(results: Results) -> None:
    for picture in (charts.scores_by_tokens(results), charts.training_loss(results.training, None)):
        assert picture is not None
        scale = picture.chart.to_dict(validate=True)["layer"][0]["encoding"]["x"]["scale"]
        assert scale["domainMin"] == 0 and "padding" not in scale


def test_the_page_is_well_formed_and_loads_nothing(page: str) -> None:
    parsed = outline(page)
    for tag, attributes in parsed.tags:
        assert tag not in ("link", "iframe", "img", "object")
        assert not {"src", "xlink:href"} & attributes.keys()
        assert "href" not in attributes
    style = page[page.index("<style>") : page.index("</style>")]
    assert not re.search(r"https?://|@import|url\(", style)
    assert not any(tag == "script" for tag, _ in parsed.tags)
    policy = next(a["content"] or "" for _, a in parsed.tags if "http-equiv" in a)
    assert policy == "default-src 'none'; style-src 'unsafe-inline'"


def test_texts_are_escaped_in_markup_and_in_charts(page: str) -> None:
    assert "base<model>" not in page and "base&lt;model&gt;" in page
    row = {"series": "</script><b>", "x": 1.0, "y": 2.0, "tip": "<i>"}
    axis = charts.Axis("<u>")
    look = charts.styles(["</script><b>"])
    picture = Picture("one", charts.curves([row], axis, axis, look), "one.")
    still = picture.svg(470)
    assert "<b>" not in still and "<u>" not in still
    assert "aria-label" not in still  # of each mark: the figure has one for all


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
    summary = results.main.search.model_copy(update={"trace": points})
    picture = trace(summary, "final", "score")
    assert picture is not None
    x = picture.chart.to_dict()["layer"][0]["encoding"]["x"]
    assert x["scale"]["domain"] == [0.5, 5.5]
    assert [row["x"] for row in rows_of(picture) if row["series"] == "final mask"] == [4]


def test_the_head_mask_shows_each_head_as_in_the_file(results: Results) -> None:
    mask = results.main.found.mask
    rows = rows_of(charts.head_mask(mask))
    assert len(rows) == mask.is_full.size
    for row in rows:
        assert (row["series"] == "sliding") == (row["y"] in sliding_heads(mask)[row["x"]])


def test_the_page_states_the_provenance_of_its_numbers(
    published: dict[str, Path], results: Results, page: str
) -> None:
    """Paths below the checkout are relative to it."""
    changes = {"packages": {"torch": "3"}, "git_commit": "f" * 40}
    manifests = results.manifests | {"train": results.manifests["train"].model_copy(update=changes)}
    config, root = report_fixture.config(published), Path(__file__).resolve().parents[2]
    model = config.model.model_copy(update={"path": str(root / "recipes" / "base")})
    facts = yaml.safe_load(
        provenance(replace(config, model=model), replace(results, manifests=manifests))
    )
    assert facts["packages"] == ["numpy 2.0.0", "torch 2.13.0", "torch 3"]
    assert facts["model"]["path"] == "recipes/base" and facts["seed"] == 17
    assert facts["search"]["window_size"] == 128 and facts["train"]["total_tokens"] == 4_000_000
    assert facts["text of the evaluation"]["words"] == 70_000
    assert (
        "<dt>search</dt><dd>3 min 7 s, 0.42 GPU hours on 8 GPUs, key ssssssssssss, commit "
        "0123456789ab, with local changes, 2026-01-02T03:04:05+00:00</dd>"
    ) in page
    assert [name for name in re.findall("<dt>(.*?)</dt>", page) if "@" in name] == [
        f"{stage}@intr" for stage in ("search", "materialize", "train", "evaluate")
    ]


@pytest.mark.usefixtures("only_text")
@pytest.mark.parametrize("without", [("train",), ("original", "train", "evaluate")])
def test_stages_that_a_recipe_leaves_out_are_reported_as_absent(
    tmp_path: Path, without: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    inputs = report_fixture.publish(tmp_path, without=without)
    page = make(tmp_path / "report", inputs)
    text = outline(page).text
    assert ("Evaluation is not part of this recipe." in text) == ("evaluate" in without)
    for stage in without:
        assert f"<dt>{stage}</dt>" not in page
    assert ("Original" in capsys.readouterr().out) == ("evaluate" in inputs)


@pytest.mark.usefixtures("only_text")
def test_a_missing_score_is_reported_with_its_reason(
    tmp_path: Path, inputs: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """On the first screen and on the terminal; no score takes its place."""
    failed, reason = "tokens-4000000", "its logits are no numbers (NaN)"
    file = inputs["evaluate"] / "scores.json"
    scores = json.loads(file.read_text())
    scores["checkpoints"][failed] = {}
    del scores["positions"][failed]
    scores["missing"] = {"models": {failed: reason}, "lm_eval": {"gsm8k": "it has no data"}}
    report_fixture.write_json(file, scores)
    summary = report.run(report_fixture.config(inputs), inputs, tmp_path / "report")
    page = outline((tmp_path / "report" / "index.html").read_text(encoding="utf-8")).text
    out = " ".join(capsys.readouterr().out.split())
    for text in (page, out):
        assert f"Hybrid after 4,000,000 tokens could not be evaluated: {reason}." in text
        assert "gsm8k has no score: it has no data" in text
    [own] = [one for one in summary["models"] if one["name"] == failed]
    assert own["branch"] == "intr" and summary["decision"]["model"] == "tokens-1000000"


def test_tasks_that_only_one_model_has_are_in_the_table(tmp_path: Path) -> None:
    inputs = report_fixture.publish(tmp_path, without=("train",))
    file = inputs["evaluate"] / "scores.json"
    scores = json.loads(file.read_text())
    group = {"both": TaskGroup(("one", "two"), ("acc,none",), by_size=False, is_named=False)}
    one = {("one", 0): [1.0, 0.0]}
    both = one | {("two", 0): [1.0]}
    cells = report_fixture.cells
    scores["checkpoints"]["original"]["lm_eval"] = suite_table(cells(one), None, group)
    scores["checkpoints"]["hybrid"]["lm_eval"] = suite_table(cells(both), None, group)
    # Every suite has columns and rows, whatever its name, with or without lengths.
    mixed = one | {("four", 512): [1.0, 1.0]}
    scores["checkpoints"]["hybrid"]["another"] = suite_table(cells(mixed), cells(mixed))
    report_fixture.write_json(file, scores)
    results = load_results(inputs)
    models, table = model_table(results), score_table(results)
    assert table is not None
    assert models.header[:4] == [
        "model", "RULER, average", "Tasks of lm-eval, average", "another, average"
    ]  # fmt: skip
    texts = [[as_cell(cell).text for cell in row] for group in table.groups for row in group]
    rows = {(row[0], row[1]): row[2:] for row in texts}
    assert rows["one", ""] in (["–", "50.0", "–"], ["50.0", "50.0", "–"])
    assert rows["two", ""] == ["–", "100.0", "–"]
    assert rows["both (2 of 2 tasks)", ""] == ["–", "75.0", "–"]
    assert rows["four", "512"] == ["–", "100.0", "–"]


@pytest.mark.usefixtures("only_text")
def test_a_page_is_made_for_layer_rules_and_evaluations_without_scores(
    tmp_path: Path, inputs: dict[str, Path]
) -> None:
    path = inputs["search"] / "summary.json"
    summary = json.loads(path.read_text()) | {"trace": [], "notes": []}
    report_fixture.write_json(path, summary)
    scores = {"checkpoints": {"original": {}, "hybrid": {}}}
    report_fixture.write_json(inputs["evaluate"] / "scores.json", scores)
    text = outline(make(tmp_path / "report", inputs)).text
    assert "Not decided: there are no scores of a hybrid" in text


def test_the_index_has_the_table_of_every_run(results: Results, tmp_path: Path) -> None:
    summary = summarize(results, ReportConfig(title="t"))
    for name, content in (("b", json.dumps(summary)), ("a<b>", "{"), ("d", '{"decision": 1}')):
        folder = tmp_path / name / "report"
        folder.mkdir(parents=True)
        (folder / "summary.json").write_text(content)
    (tmp_path / "under way" / "search").mkdir(parents=True)
    write_index(tmp_path)
    page = outline((tmp_path / "index.html").read_text(encoding="utf-8"))
    lines = page.text.splitlines()
    rows = [line for line in lines if line.startswith("b | ")]
    assert len(rows) == len(results.models)
    assert rows[1].startswith("b | Hybrid, untrained | 31.0 −66.5 [−68.7, −64.3] | ")
    unread = [line for line in lines if "cannot be read" in line]
    assert [line.partition(" |")[0] for line in unread] == ["a<b>", "d"]
    links = [attributes["href"] for tag, attributes in page.tags if tag == "a"]
    assert {*links} == {f"{name}/report/index.html" for name in ("a<b>", "b", "d")}


def test_the_table_of_models_is_the_same_everywhere(
    published: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = outline(make(tmp_path, published)).text
    printed = " ".join(capsys.readouterr().out.split())
    with (tmp_path / "models.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert rows == json.loads((tmp_path / "summary.json").read_text())["table"]
    assert len(rows) == 7
    for row in rows:
        assert " ".join(" ".join(row.values()).split()) in printed
        assert " | ".join(row.values()) in text
    assert "29.7 % in generate 49.2 % in vLLM" in rows[1].values()


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("search/summary.json", "{"),
        ("search/summary.json", '{"trace": []}'),
        ("evaluate/scores.json", "[]"),
        ("evaluate/scores.json", '{"checkpoints": {"best": {"ruler": {"low": 1}}}}'),
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


def test_a_chart_file_contains_its_colours_and_its_description(tmp_path: Path) -> None:
    rows = [
        {"series": name, "x": x, "y": x + 1.0, "low": x, "high": x + 2.0, "tip": "a < b"}
        for name in ("one <series>", "two")
        for x in (1.0, 2.0)
    ]
    look = styles(["one <series>", "two"], {"two": Style("untrained", dashed=True)})
    chart = curves(rows, Axis("tokens", "length", log=True), Axis("y"), look)
    picture = Picture("name", chart, "a & b.", "Heading")
    for kind in ("svg", "png"):
        save(chart, tmp_path / f"plot.{kind}", picture.description)
    text = (tmp_path / "plot.svg").read_text(encoding="utf-8")
    root = ElementTree.fromstring(text)
    assert "var(" not in text and "one &lt;series&gt;" in text
    dashed = re.findall(r'<path [^>]*stroke="(#\w+)"[^>]*stroke-dasharray="6,4"', text)
    assert {*dashed} == {COLOURS["untrained"][0]}
    assert [element.text for element in root if element.tag.endswith("title")] == ["a & b."]
    assert (tmp_path / "plot.png").read_bytes()[:4] == b"\x89PNG"
    # On a page they come from the style sheet.
    assert "var(--hybrid)" in picture.svg(470)


@pytest.mark.parametrize(("ends", "drawn"), [((None, None), 0), ((None, 1.0), 1), ((0.5, 1.0), 1)])
def test_intervals_are_drawn_only_for_points_that_have_one(
    ends: tuple[float | None, ...], drawn: int
) -> None:
    rows = [
        {"series": "one", "x": x, "y": 2.0, "low": low, "high": low and 3.0, "tip": ""}
        for x, low in enumerate(ends)
    ]
    text = json.dumps(curves(rows, Axis("x"), Axis("y"), styles(["one"])).to_dict())
    assert text.count('"type": "rule"') == drawn


@pytest.mark.parametrize(
    ("form", "highest", "labels"),
    [
        ("count", 0.5, ["0", "0.1", "0.2", "0.3", "0.4", "0.5"]),
        ("count", 5000.0, ["0", "1k", "2k", "3k", "4k", "5k"]),
        ("count", 5e9, ["0", "1B", "2B", "3B", "4B", "5B"]),
        *(("bytes", size, [label]) for size, label in (
            (512, "512 B"), (1536, "1.5 KiB"), (3 * 2**19, "1.5 MiB"), (5 * 2**29, "2.5 GiB"),
        )),
        *(("length", length, [label]) for length, label in ((3072, "3k"), (1000, "1,000"))),
    ],
)  # fmt: skip
def test_an_axis_has_the_numbers_that_are_drawn(
    tmp_path: Path, form: AxisForm, highest: float, labels: list[str]
) -> None:
    rows = [{"series": "one", "x": 7.0, "y": y, "tip": ""} for y in (0.0, highest)]
    y = Axis("", form, zero=True, values=[highest] if len(labels) == 1 else None)
    chart = curves(rows, Axis("", values=[7.0]), y, styles(["one"]))
    save(chart, tmp_path / "plot.svg")
    root = ElementTree.fromstring((tmp_path / "plot.svg").read_text(encoding="utf-8"))
    texts = [
        element.text for element in root.iter() if element.tag.endswith("text") and element.text
    ]
    assert texts == ["7", *labels]


def test_series_have_distinct_and_stable_looks() -> None:
    names = [f"method {number}" for number in range(42)]
    assert len(set(styles(names).values())) == 42
    own = styles(names)["method 8"]
    look = styles(names[:10], {"method 0": own})
    assert look["method 0"] == own and len(set(look.values())) == 10


def test_numbers_are_formatted() -> None:
    assert format_score(None) == signed(math.nan, 1) == "–"
    assert [signed(value, 1) for value in (1.25, -1.25, 0.04, -0.04)] == [
        "+1.2",
        "−1.2",
        "0.0",
        "0.0",
    ]
    assert format_score(96.04) == "96.0"
    assert format_share(0.875) == "87.5 %"
    assert [format_share(value) for value in (0.75, 0.29, 0.9996, 0.0004, 1.5, 0)] == [
        "75 %", "29 %", "100.0 %", "0.0 %", "150 %", "0 %",
    ]  # fmt: skip
    assert [format_bytes(value) for value in (0, 512, 1536, 1024**2, 3.5 * 1024**3)] == [
        "0 B", "512 B", "1.5 KiB", "1 MiB", "3.5 GiB",
    ]  # fmt: skip
    assert [format_bytes(value) for value in (1023, 1024**2 - 1, -(1024**3) + 1, 1024**5)] == [
        "1023 B", "1 MiB", "-1 GiB", "1024 TiB",
    ]  # fmt: skip
    assert [format_count(value) for value in (0, 950, 12_500, 1.3e6, 2.5e9, 100_000)] == [
        "0", "950", "12.5k", "1.3M", "2.5B", "100k",
    ]  # fmt: skip
    assert [format_count(value) for value in (999.4, 999.5, 999_499, 999_999, 999_999_999)] == [
        "999", "1k", "999k", "1M", "1B",
    ]  # fmt: skip
    assert [format_length(value) for value in (600, 1024, 32768)] == ["600", "1k", "32k"]
    assert [format_seconds(value) for value in (0.42, 9.96, 38.4, 59.6, 185, 3600, 15_000)] == [
        "0.4 s", "10 s", "38 s", "1 min 0 s", "3 min 5 s", "1 h 0 min", "4 h 10 min",
    ]  # fmt: skip
    assert [format_hours(value) for value in (0.01, 0.5, 1.99, 1.999, 1234.5)] == [
        "less than a minute", "30 min", "119 min", "2.0 h", "1,234.5 h",
    ]  # fmt: skip
    flops = (12, 1500, 4e6, 2e9, 999.9e9, 3.25e15, 1.5e18, 2e21)
    assert [format_flops(value) for value in flops] == [
        "12 FLOP", "1.5 kFLOP", "4 MFLOP", "2 GFLOP", "1 TFLOP", "3.25 PFLOP", "1.5 EFLOP",
        "2000 EFLOP",
    ]  # fmt: skip
