"""The report's page: complete, self-contained, and plain about what a recipe leaves out."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import get_args

import pytest

from bosch.errors import RunError
from bosch.method.ledger import StageName
from stages import report
from stages.reporting.figures import cache_lengths
from stages.reporting.results import Cache, load_results
from stages.reporting.search_figures import STAGE_NAMES
from stages.reporting.search_section import TRACE_KEYS
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


def make(root: Path, without: tuple[str, ...] = (), **shape: int) -> tuple[str, dict[str, Path]]:
    inputs = report_fixture.publish(root, without=without, **shape)
    report.run(report_fixture.config(inputs), inputs, root / "report")
    return (root / "report" / "index.html").read_text(encoding="utf-8"), inputs


def wide_picture(page: str, name: str) -> str:
    match = re.search(rf'<svg [^>]*aria-labelledby="{name}-t.*?</svg>', page, re.DOTALL)
    assert match is not None, name
    return match[0]


def test_page_is_well_formed_and_loads_nothing(tmp_path: Path) -> None:
    page, _ = make(tmp_path)
    outline = parse(page)
    for tag, attributes in outline.tags:
        assert tag not in ("script", "link", "iframe", "img", "object")
        assert not {"src", "href", "xlink:href"} & attributes.keys()
    assert not re.search(r"https?://|@import|url\(", page)


def test_every_picture_is_named_for_those_who_do_not_see_it(tmp_path: Path) -> None:
    outline = parse(make(tmp_path)[0])
    ids = [attributes["id"] for _, attributes in outline.tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    pictures = [attributes for tag, attributes in outline.tags if tag == "svg"]
    assert len(pictures) == 2 * 11
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
        re.findall(r'class="name">(?:<i[^>]*></i>)?([^<]+)</div><div class="value">([^<]+)', page)
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
    ]
    per_table = (len(report_fixture.TASKS) + 1) * len(report_fixture.LENGTHS)
    assert page.count('<td class="score"') == len(tables) * per_table
    scores = json.loads((inputs["evaluate"] / "scores.json").read_text())
    cell = scores["checkpoints"]["tokens-1000000"]["needle"]["niah_single_1"]["512"]["score"]
    assert f">{cell:.1f}</td>" in page


def test_search_notes_and_provenance_are_shown_escaped(tmp_path: Path) -> None:
    page, _ = make(tmp_path)
    assert "Stage 1: 2 layers tie at score 1." in page
    assert "base<model>" not in page
    assert "base&lt;model&gt;" in page
    text = " ".join(parse(page).text)
    assert "search.window_size" in text
    assert "pydoc topics of Python 3" in text
    assert "train.sources.python.documents" in text
    assert "0123456789ab, with local changes" in text


@pytest.mark.parametrize(
    ("without", "sentences"),
    [
        (("train",), ["Training is not part of this recipe."]),
        (("evaluate",), ["Evaluation is not part of this recipe."]),
        (
            ("train", "evaluate"),
            ["Training is not part of this recipe.", "Evaluation is not part of this recipe."],
        ),
        (
            ("search", "materialize", "train", "evaluate"),
            ["A search is not part of this recipe.", "Materialising the hybrid model is not"],
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
    assert summary["absent_stages"] == list(without)


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


def test_layer_rules_without_evaluations_still_make_a_page(tmp_path: Path) -> None:
    inputs = report_fixture.publish(tmp_path)
    path = inputs["search"] / "summary.json"
    summary = json.loads(path.read_text()) | {"trace": [], "layer_importance": [], "notes": []}
    report_fixture.write_json(path, summary)
    report.run(report_fixture.config(inputs), inputs, tmp_path / "report")
    page = (tmp_path / "report" / "index.html").read_text(encoding="utf-8")
    assert "makes its mask without evaluating any" in page
    assert "does not probe layers one by one" in page


def test_a_search_by_swaps_has_its_dots_and_none_for_what_was_given_up(tmp_path: Path) -> None:
    inputs = report_fixture.publish(tmp_path)
    path = inputs["search"] / "summary.json"
    stages = ["anchors", "anchors", "start", "swaps", "swaps", "swaps", "final"]
    trace = [
        {"stage": stage, "step": step, "unit": stage, "score": 0.5, "log_likelihood": -1.0,
         "best_score": 0.5, "is_bound": step in (5, 6)}
        for step, stage in enumerate(stages, start=1)
    ]  # fmt: skip
    summary = json.loads(path.read_text()) | {"trace": trace, "gradients": 3}
    report_fixture.write_json(path, summary)
    report.run(report_fixture.config(inputs), inputs, tmp_path / "report")
    page = (tmp_path / "report" / "index.html").read_text(encoding="utf-8")
    for name in ("trace", "trace-ll"):
        picture = wide_picture(page, name)
        drawn = {
            stage: d.count("M") for stage, d in re.findall(r"dots (\w+)\" d=\"(.*?)\"", picture)
        }
        assert drawn == {"anchors": 2, "start": 1, "swaps": 1, "final": 1}
    assert "Gradients taken</th><td>3<" in page
    assert {stage for stage, *_ in TRACE_KEYS} | {"repair", "final"} == set(get_args(StageName))
    assert set(STAGE_NAMES) == set(get_args(StageName))


def test_summary_has_the_headline_numbers(tmp_path: Path) -> None:
    make(tmp_path)
    summary = json.loads((tmp_path / "report" / "summary.json").read_text())
    assert summary["needle"] == {
        "original": 97.5,
        "hybrid": 31.0,
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
        ("search/head_mask.json", "{"),
        ("search/head_mask.json", '{"num_layers": 6}'),
        ("evaluate/scores.json", "[]"),
        ("evaluate/scores.json", '{"checkpoints": {"best": {"needle": {"average": 1}}}}'),
        ("train/metrics.jsonl", '{"step": 1, "tokens": 5, "loss": 1.0}\n{"step": 2, "to\n'),
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
    cache = Cache(bytes_per_head=100.0, full_heads=2, sliding_heads=6, kept=7)
    assert cache.before(50) == 100 * 8 * 50
    assert cache.after(50) == 100 * (2 * 50 + 6 * 7)
    assert cache.after(5) == cache.before(5)
    assert cache.after(1001) - cache.after(1000) == cache.after_per_token
    assert cache_lengths(cache)[0] <= cache.kept < cache_lengths(cache)[-1]


def test_losses_that_are_no_numbers_are_told_and_not_drawn(tmp_path: Path) -> None:
    inputs = report_fixture.publish(tmp_path)
    path = inputs["train"] / "metrics.jsonl"
    path.write_text(path.read_text() + '{"step": 201, "tokens": 4020000, "loss": NaN}\n')
    report.run(report_fixture.config(inputs), inputs, tmp_path / "report")
    page = (tmp_path / "report" / "index.html").read_text(encoding="utf-8")
    assert "The loss of 1 logged steps is not finite" in page
    assert "nan" not in wide_picture(page, "loss")


def test_a_deep_model_has_a_cell_per_head(tmp_path: Path) -> None:
    page, _ = make(tmp_path, layers=48, heads=4)
    picture = wide_picture(page, "mask")
    assert picture.count("<rect") == 48 * 4
