"""The report's page: complete, self-contained, and plain about what a recipe leaves out."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any, get_args

import pytest

from bosch.errors import RunError
from bosch.heads import HeadMaskFile
from bosch.model.cache_size import CacheSize
from bosch.search.evaluator import Phase
from bosch.window import Window
from stages.evaluate.answers import TaskGroup
from stages.evaluate.position_suite import position_table
from stages.evaluate.scores import Scores
from stages.evaluate.stage import EvaluateConfig
from stages.evaluate.tables import suite_table
from stages.report import run as report
from stages.report.figures import cache_lengths
from stages.report.results import load_results
from stages.report.scores_section import score_table
from stages.report.search_figures import PHASE_NAMES
from stages.report.search_section import TRACE_KEYS
from stages.report.verdict import verdict
from tests import report_fixture

VOID = {"meta", "br", "hr", "img", "input", "link"}


class Outline(HTMLParser):
    """Checks that tags balance and collects what the tests ask about."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def parse(page: str) -> Outline:
    outline = Outline()
    outline.feed(page)
    assert outline.open == []
    return outline


def make(
    root: Path, without: tuple[str, ...] = (), section: dict[str, Any] | None = None, **shape: int
) -> tuple[str, dict[str, Path]]:
    inputs = report_fixture.publish(root, without=without, **shape)
    report.run(report_fixture.config(inputs, **section or {}), inputs, root / "report")
    return (root / "report" / "index.html").read_text(encoding="utf-8"), inputs


def wide_picture(page: str, name: str) -> str:
    match = re.search(rf'<svg [^>]*aria-labelledby="{name}-t.*?</svg>', page, re.DOTALL)
    assert match is not None, name
    return match[0]


def test_the_page_says_what_vllm_holds_for_the_models_longest_request(tmp_path: Path) -> None:
    page, _ = make(tmp_path)
    table = page[page.index("One request in vLLM") :]
    table = table[: table.index("</table>")]
    cells = re.findall(r"<t[dh][^>]*>([^<]*)</t[dh]>", table)
    assert cells.count("CPU") == 2 and cells.count("40k") == 5


def test_page_is_well_formed_and_loads_nothing(tmp_path: Path) -> None:
    page, _ = make(tmp_path)
    outline = parse(page)
    for tag, attributes in outline.tags:
        assert tag not in ("link", "iframe", "img", "object")
        assert not {"src", "xlink:href"} & attributes.keys()
        assert (attributes.get("href") or "#").startswith("#")
    assert not re.search(r"https?://|@import|url\(", page)
    # The policy lets run the one script that is on the page.
    [script] = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in page


def test_every_picture_is_named_for_those_who_do_not_see_it(tmp_path: Path) -> None:
    outline = parse(make(tmp_path)[0])
    ids = [attributes["id"] for _, attributes in outline.tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    pictures = [attributes for tag, attributes in outline.tags if tag == "svg"]
    assert len(pictures) == 2 * 17
    for attributes in pictures:
        assert attributes["role"] == "img"
        assert set((attributes["aria-labelledby"] or "").split()) <= set(ids)


def test_head_mask_shows_each_head_as_in_the_file(tmp_path: Path) -> None:
    page, _ = make(tmp_path, layers=5, heads=4)
    picture = wide_picture(page, "mask")
    cells = re.findall(
        r'class="cell (\w+)"[^>]*><title>layer (\d+), KV head (\d+): (\w+)<', picture
    )
    assert len(cells) == 20
    sliding = report_fixture.sliding_heads(5, 4)
    for css, layer, head, word in cells:
        expected = "sliding" if int(head) in sliding[int(layer)] else "full"
        assert css == word == expected


def test_headline_numbers_are_the_stages_own(tmp_path: Path) -> None:
    page, _ = make(tmp_path)
    tiles = dict(
        re.findall(
            r'class="name">(?:<i[^>]*></i>)?([^<]+)</div><div class="value">(?:<a[^>]*>)?([^<]+)',
            page,
        )
    )
    assert tiles["Original model"].strip() == "97.5"
    assert tiles["Hybrid, untrained"].strip() == "31.0"
    assert tiles["Hybrid, trained"].strip() == "96.0"
    assert tiles["KV cache per token"] == "6 KiB → 1.5 KiB"
    assert tiles["Sliding KV heads (ρ)"] == "75 %"
    assert tiles["Window (W)"].strip() == "128"


def test_score_tables_hold_every_cell_of_every_checkpoint(tmp_path: Path) -> None:
    page, inputs = make(tmp_path)
    tables = re.findall(r"<table><caption>([^<]+) <span>.*?</table>", page, re.DOTALL)
    assert tables == [
        "Original",
        "Hybrid, untrained",
        "Hybrid after 1,000,000 tokens",
        "Hybrid after 4,000,000 tokens",
        "INTR, untrained",
    ]
    per_table = (len(report_fixture.TASKS) + 1) * len(report_fixture.LENGTHS)
    assert page.count('<td class="score"') == len(tables) * per_table
    scores = Scores.read(inputs["evaluate"]).checkpoints["tokens-1000000"]["needle"]
    cell = scores.tasks["niah_single_1"][512].score
    assert f">{cell:.1f}</a><small>" in page


def test_verdict_and_intervals_stand_on_the_page(tmp_path: Path) -> None:
    page, inputs = make(tmp_path)
    [sentence] = re.findall(r'<p class="verdict">([^<]+)</p>', page)
    assert re.fullmatch(
        r"At 2k the trained hybrid keeps 98\.5 % \[9\d\.\d, 99\.\d\] of the original&#x27;s score "
        r"with 0\.\d\d of its KV cache\. "
        r"Loss at tokens 4 to 7: \+0\.22 \[\+0\.11, \+0\.33\] nats against the original\.",
        sentence,
    )
    tile = "Loss at tokens 4 to 7, trained</div>"
    assert f'{tile}<div class="value">+0.22 <small>nats</small></div>' in page
    assert re.search(r"needle average, −1\.5 \[−\d\.\d, −\d\.\d\] against the original", page)
    for unit in ("points", "nats"):
        assert wide_picture(page, f"difference-{unit}").count("<circle") == 2
    # The untrained hybrid and the last checkpoint, three bins each.
    assert wide_picture(page, "positions-difference").count("<circle") == 2 * 3
    summary = json.loads((tmp_path / "report" / "summary.json").read_text())
    assert [row["name"] for row in summary["differences"]] == ["Needle", "Loss at tokens 4 to 7"]
    scores = Scores.read(inputs["evaluate"]).checkpoints["hybrid"]["needle"]
    cell = scores.tasks["niah_single_1"][512]
    assert f"{cell.score:.1f}</a><small>{cell.low:.1f}–{cell.high:.1f}</small>" in page
    assert cell.against_original is not None and cell.against_original.relation == "different"
    assert "≈ 31.0" not in page and "? 31.0" not in page


def scores_of(
    first: Sequence[float], second: Sequence[float], positions: Sequence[float]
) -> dict[str, Any]:
    """scores.json of a hybrid and the original with these scores, and losses of documents."""
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
         "would show a loss of 58 points.", "? 58.3"),
        ([1] * 300, [1] * 300, [], "keeps 100.0 % [98.8, 101.2]", ">≈ 100.0"),
        ([0] * 9 + [1] * 3, [1] * 12, [], "keeps 25.0 % [", ">25.0"),
        ([1] * 12, [0] * 12, [], "scores +100.0 [", ">100.0"),
        ([1] * 12, [1] * 12, [0.3], " +0.30 [too few] nats against the original; one document", ""),
        ([1] * 12, [1] * 12, [0.2, -0.1, 0.1], "; the documents do not decide whether", ""),
        ([1] * 12, [1] * 12, [0.21, 0.2, 0.22], "2: +0.21 [+0.17, +0.25] nats against the", ""),
    ],
)  # fmt: skip
def test_the_verdict_says_what_the_samples_do_not_decide(
    tmp_path: Path, first: list[float], second: list[float], positions: list[float], said: str,
    marked: str,
) -> None:  # fmt: skip
    inputs = report_fixture.publish(tmp_path, without=("train",))
    content = scores_of(first, second, positions)
    report_fixture.write_json(inputs["evaluate"] / "scores.json", content)
    results = load_results(inputs)
    sentence = verdict(results)
    assert sentence is not None and said in sentence
    assert "Other tasks: " in sentence
    [hybrid] = [scores for scores in results.needle or [] if scores.name == "hybrid"]
    assert marked in score_table(hybrid)


def test_the_first_picture_ranks_search_and_rivals(tmp_path: Path) -> None:
    page, _ = make(tmp_path)
    assert page.index('aria-labelledby="standing-t') < page.index('class="tiles"')
    picture = wide_picture(page, "standing")
    bars = re.findall(
        r'class="bar (\w+)"[^>]*width="([\d.]+)"[^>]*><title>([^:]+): ([\d.]+), interval', picture
    )
    assert [(css, label, value) for css, _, label, value in bars] == [
        ("rival", "INTR, untrained", "12.0"),
        ("untrained", "BOSCH, untrained", "31.0"),
        ("hybrid", "BOSCH, trained", "96.0"),
    ]
    lengths = [float(width) for _, width, _, _ in bars]
    assert lengths[1] / lengths[0] == pytest.approx(31 / 12, rel=0.01)
    assert "original 97.5" in picture
    # A rival is no point of the curve of recovery, and not the original.
    assert "12.0" not in wide_picture(page, "recovery")


def test_other_windows_have_their_curve_and_scores(tmp_path: Path) -> None:
    assert "Window sizes" not in make(tmp_path / "none")[0]
    inputs = report_fixture.publish(tmp_path)
    report_fixture.evaluate(inputs["evaluate"], *report_fixture.AVERAGES)
    report.run(report_fixture.config(inputs), inputs, tmp_path / "report")
    page = (tmp_path / "report" / "index.html").read_text(encoding="utf-8")
    picture = wide_picture(page, "windows")
    dots = re.findall(r'class="dot (\w+)"[^>]*><title>([^:]+): ([\d.]+), interval', picture)
    assert dots == [
        ("untrained", "BOSCH, W = 64", "20.0"),
        ("untrained", "BOSCH, W = 128", "31.0"),
        ("untrained", "BOSCH, W = 256", "60.0"),
        ("rival", "INTR, W = 64", "8.0"),
        ("rival", "INTR, W = 128", "12.0"),
        ("rival", "INTR, W = 256", "40.0"),
    ]
    assert "INTR, untrained, W = 256" in page
    # They are neither points of the recovery nor rivals in the first picture.
    assert "60.0" not in wide_picture(page, "recovery") + wide_picture(page, "standing")
    assert set(re.findall(r'href="#(samples-[^"]+)"', page)) <= set(
        re.findall(r'id="(samples-[^"]+)"', page)
    )


def test_every_score_leads_to_its_samples(tmp_path: Path) -> None:
    page, _ = make(tmp_path)
    links = set(re.findall(r'href="#(samples-[^"]+)"', page))
    assert len(links) == 5 * len(report_fixture.TASKS) * len(report_fixture.LENGTHS) + 5
    cells = re.findall(r'<h4 id="([^"]+)"', page)
    assert links == {*cells, *re.findall(r'<details class="card" id="([^"]+)"', page)}
    # In the score tables no number but the intervals is without a link.
    numbers = re.findall(r'<td class="score"[^>]*>(.*?)<small>', page)
    assert len(numbers) == 5 * (len(report_fixture.TASKS) + 1) * len(report_fixture.LENGTHS)
    assert all(number.startswith('<a href="#samples-') for number in numbers)
    assert "What is &lt;it&gt;?" in page and "output 62 of hybrid" in page
    assert "Loss by position" in page


def test_gpu_hours_have_a_price_only_where_the_recipe_states_one(tmp_path: Path) -> None:
    page, inputs = make(tmp_path / "hours")
    text = " ".join(parse(page).text)
    assert "GPU hours" in text and "USD" not in text.partition("Provenance")[0]
    summary = json.loads((tmp_path / "hours" / "report" / "summary.json").read_text())
    assert summary["gpu_hours"]["search"] == pytest.approx(187 * 8 / 3600)
    assert summary["gpu_hours"]["prepare"] == 0 and summary["cost"] is None
    page, _ = make(tmp_path / "price", section={"gpu_hour_price": 2.5, "currency": "EUR"})
    rows = dict(re.findall(r'<th scope="row">(\w+)</th>(<td>[^\n]*?)</tr>', page))
    seconds = sum(s * report_fixture.GPUS.get(n, 8) for n, s in report_fixture.SECONDS.items())
    hours, cost = seconds / 3600, 2.5 * seconds / 3600
    assert rows["together"].endswith(f"<td>{hours:,.2f}</td><td>{cost:,.2f}</td>")
    assert "GPU hours, at 2.50 EUR each" in page
    for folder in inputs.values():
        manifest = json.loads((folder / "manifest.json").read_text())
        del manifest["gpus"]
        report_fixture.write_json(folder / "manifest.json", manifest)
    report.run(report_fixture.config(inputs), inputs, tmp_path / "older")
    assert "there are no GPU hours" in (tmp_path / "older" / "index.html").read_text()


def test_what_the_filter_hides_names_its_task_and_length(tmp_path: Path) -> None:
    page, _ = make(tmp_path)
    outline = parse(page)
    menus = [attributes["name"] for tag, attributes in outline.tags if tag == "select"]
    assert menus == ["task", "length"]
    [form] = [attributes for tag, attributes in outline.tags if tag == "form"]
    assert "hidden" in form  # until the script shows it
    assert {a["data-task"] for _, a in outline.tags if "data-task" in a} == {*report_fixture.TASKS}
    assert {a["data-length"] for _, a in outline.tags if "data-length" in a} == {"512", "1k", "2k"}


def test_paths_below_the_checkout_are_shown_as_recipes_write_them(tmp_path: Path) -> None:
    inputs = report_fixture.publish(tmp_path)
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


def test_search_notes_and_provenance_are_shown_escaped(tmp_path: Path) -> None:
    page, _ = make(tmp_path)
    assert "Algorithm 1: 2 layers tie at score 1." in page
    assert "base<model>" not in page
    assert "base&lt;model&gt;" in page
    text = " ".join(parse(page).text)
    assert "search.window_size" in text
    assert "pydoc topics of Python 3" in text
    assert "sources.python.documents" in text
    assert "0123456789ab, with local changes" in text


@pytest.mark.parametrize(
    ("without", "sentences"),
    [
        (("train",), ["Training is not part of this recipe."]),
        (("original", "evaluate"), ["Evaluation is not part of this recipe."]),
        (
            ("original", "train", "evaluate"),
            ["Training is not part of this recipe.", "Evaluation is not part of this recipe."],
        ),
    ],
)
def test_absent_stages_are_said_to_be_absent(
    tmp_path: Path, without: tuple[str, ...], sentences: list[str]
) -> None:
    text = " ".join(parse(make(tmp_path, without)[0]).text)
    for sentence in sentences:
        assert sentence in text
    for stage in without:
        assert re.search(rf"Stage {stage}\s+not part of this recipe", text)
    summary = json.loads((tmp_path / "report" / "summary.json").read_text())
    assert set(summary["absent_stages"]) == set(without)


def test_complete_recipe_says_of_nothing_that_it_is_absent(tmp_path: Path) -> None:
    page, _ = make(tmp_path)
    assert "not part of this recipe" not in page
    assert 'class="absent"' not in page


def test_evaluation_without_needle_tasks_is_said(tmp_path: Path) -> None:
    inputs = report_fixture.publish(tmp_path)
    scores = {"checkpoints": {"original": {}, "hybrid": {}}}
    report_fixture.write_json(inputs["evaluate"] / "scores.json", scores)
    report.run(report_fixture.config(inputs), inputs, tmp_path / "report")
    page = (tmp_path / "report" / "index.html").read_text(encoding="utf-8")
    assert "This recipe&#x27;s evaluation has no needle tasks." in page


@pytest.mark.parametrize("failed", ["hybrid", "tokens-4000000", "intr"])
def test_what_has_no_score_is_said_with_the_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], failed: str
) -> None:
    """On the page's first screen and on the terminal; another checkpoint does not stand for it."""
    inputs = report_fixture.publish(tmp_path)
    file = inputs["evaluate"] / "scores.json"
    scores = json.loads(file.read_text())
    scores["checkpoints"][failed] = {}
    del scores["positions"][failed]
    reason = "its logits are no numbers (NaN)"
    scores["missing"] = {"models": {failed: reason}, "harness": {"gsm8k": "it has no data"}}
    report_fixture.write_json(file, scores)
    summary = report.run(report_fixture.config(inputs), inputs, tmp_path / "report")
    page = (tmp_path / "report" / "index.html").read_text(encoding="utf-8")
    out = " ".join(capsys.readouterr().out.split())
    for text in (page, out):
        assert f"models: {failed} has no score: {reason}" in text
        assert "gsm8k has no score: it has no data" in text
    assert page.index(f"{failed} has no score") < page.index('class="tiles"')
    assert (f"Could not be evaluated: {reason}" in page) == (failed != "intr")
    if failed == "tokens-4000000":
        assert summary["verdict"].endswith(f"could not be evaluated: {reason}.")
        assert summary["needle"]["trained"] is None


def test_tasks_that_only_one_model_has_stand_in_the_table(tmp_path: Path) -> None:
    inputs = report_fixture.publish(tmp_path)
    file = inputs["evaluate"] / "scores.json"
    scores = json.loads(file.read_text())
    group = {"both": TaskGroup(("one", "two"))}
    one = {("one", 0): [1.0, 0.0]}
    scores["checkpoints"]["original"]["harness"] = suite_table(one, groups=group)
    scores["checkpoints"]["hybrid"]["harness"] = suite_table(
        one | {("two", 0): [1.0]}, groups=group
    )
    report_fixture.write_json(file, scores)
    report.run(report_fixture.config(inputs), inputs, tmp_path / "report")
    page = (tmp_path / "report" / "index.html").read_text(encoding="utf-8")
    assert 'scope="row">two</th>' in page and "both (2 of 2 tasks)" in page


def test_layer_rules_without_evaluations_still_make_a_page(tmp_path: Path) -> None:
    inputs = report_fixture.publish(tmp_path)
    path = inputs["search"] / "summary.json"
    summary = json.loads(path.read_text()) | {"trace": [], "layer_importance": [], "notes": []}
    report_fixture.write_json(path, summary)
    report.run(report_fixture.config(inputs), inputs, tmp_path / "report")
    page = (tmp_path / "report" / "index.html").read_text(encoding="utf-8")
    assert "builds its mask without evaluations" in page
    assert "does not probe layers one by one" in page


def test_a_search_by_swaps_has_its_dots_and_none_for_what_was_given_up(tmp_path: Path) -> None:
    inputs = report_fixture.publish(tmp_path)
    path = inputs["search"] / "summary.json"
    phases = ["anchors", "anchors", "start", "swaps", "swaps", "swaps", "final"]
    mask = HeadMaskFile.load(inputs["search"] / "head_mask.json").mask.key
    trace = [
        {"phase": phase, "step": step, "subproblem": phase, "score": 0.5, "log_likelihood": -1.0,
         "best_score": None if step == 5 else 0.5, "is_bound": step in (5, 6),
         "mask": mask if step in (4, 6) else "another"}
        for step, phase in enumerate(phases, start=1)
    ]  # fmt: skip
    summary = json.loads(path.read_text()) | {"trace": trace, "gradients": 3}
    report_fixture.write_json(path, summary)
    report.run(report_fixture.config(inputs), inputs, tmp_path / "report")
    page = (tmp_path / "report" / "index.html").read_text(encoding="utf-8")
    for name in ("trace", "trace-ll"):
        picture = wide_picture(page, name)
        drawn = {
            phase: d.count("M") for phase, d in re.findall(r"dots (\w+)\" d=\"(.*?)\"", picture)
        }
        [title] = re.findall(r'class="dot final"[^>]*><title>([^<]+)<', picture)
        assert title.startswith("final mask, evaluation 4: ")
        assert drawn == {"anchors": 2, "start": 1, "swaps": 1, "final": 1}
    # One line through starts and swaps, at the best score, which a bound never is.
    lines = re.findall(r'class="line best" d="M([^"]+)"', wide_picture(page, "trace"))
    heights = {point.split()[1] for line in lines for point in line.split("L")}
    assert len(lines) == 2 and len(heights) == 1
    assert "final mask</li>" in page
    assert "Gradients taken</th><td>3<" in page
    assert {phase for phase, *_ in TRACE_KEYS} | {"final"} == set(get_args(Phase))
    assert set(PHASE_NAMES) == set(get_args(Phase))


def test_summary_has_the_headline_numbers(tmp_path: Path) -> None:
    make(tmp_path)
    summary = json.loads((tmp_path / "report" / "summary.json").read_text())
    assert summary["needle"] == {
        "original": 97.5,
        "hybrid": 31.0,
        "rivals": {"intr": 12.0},
        "trained": 96.0,
        "trained_tokens": 4_000_000,
    }
    assert summary["swa_ratio"] == 0.75
    assert summary["kv_cache_bytes_per_token"]["before"] == 6144
    assert summary["kv_cache_bytes_per_token"]["after"] == 1536
    assert summary["stage_seconds"] == report_fixture.SECONDS


def test_terminal_table_names_absent_stages(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make(tmp_path, ("train",))
    out = capsys.readouterr().out
    assert re.search(r"hybrid trained\s*│\s*not part of this recipe", out)
    assert re.search(r"original\s*│\s*97\.5", out)


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
def test_damaged_inputs_are_named(tmp_path: Path, file: str, content: str | None) -> None:
    inputs = report_fixture.publish(tmp_path)
    path = tmp_path / file
    if content is None:
        path.unlink()
    else:
        path.write_text(content)
    with pytest.raises(RunError, match=re.escape(str(path))):
        load_results(inputs)


def test_cache_follows_the_formula() -> None:
    cache = CacheSize({None: 2, Window(8, 3): 6}, bytes_per_head=100)
    assert cache.original(50) == 100 * 8 * 50
    assert cache.dynamic(50) == 100 * (2 * 50 + 6 * 10)
    assert cache.dynamic(7) == cache.original(7)
    assert cache.dynamic(1001) - cache.dynamic(1000) == cache.per_token
    assert cache_lengths(cache)[0] <= 7 < cache_lengths(cache)[-1]


def test_a_deep_model_has_a_cell_per_head(tmp_path: Path) -> None:
    page, _ = make(tmp_path, layers=48, heads=4)
    picture = wide_picture(page, "mask")
    assert picture.count("<rect") == 48 * 4
