"""Charts as files, tables in every form, and number formats."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

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
