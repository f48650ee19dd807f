"""Studies: their options, points and rows worked out by hand, and counts."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import Field

from bosch.analysis.intervals import (
    Estimate,
    crossed_difference,
    crossed_mean,
    crossed_test,
    holm,
    share,
)
from bosch.analysis.optimality import Standing
from bosch.errors import UserError
from bosch.heads import HeadMask
from bosch.model.cache import held_bytes
from bosch.model.materialize import materialize
from bosch.objective.evaluation_log import Evaluation
from bosch.window import Window
from pipeline.cli import main
from pipeline.commands import options
from pipeline.commands.study import runs, turnover
from pipeline.commands.study.charts import cost_curves, jaccard_maps, landscapes, stability_curves
from pipeline.commands.study.headbench import (
    Row,
    cache_shares,
    headbench_menu,
    records_of,
    table_of,
)
from pipeline.commands.study.page import StudyResult, publish
from pipeline.commands.study.runs import Measured
from pipeline.commands.study.studied_model import Setting
from recipes.study.make_composition_model import (
    FIRST_QUESTION,
    KINDS,
    VOCABULARY,
    exact_match,
    examples,
)
from stages.fields import Section
from stages.measure.results import figures
from stages.pages.charts import Picture
from tests.hybrid_case import mask_of, small_model, tokens
from tests.pipeline_case import ROOT, Case


def drawn(picture: Picture) -> list[list[dict[str, Any]]]:
    """The rows of a picture's datasets."""
    datasets: dict[str, list[dict[str, Any]]] = picture.chart.to_dict(validate=True)["datasets"]
    return list(datasets.values())


def axes(picture: Picture) -> list[str]:
    """Titles, scales and directions of the first mark's axes."""
    layer = picture.chart.to_dict(validate=True)["layer"][0]
    encodings = [layer["encoding"][name] for name in ("x", "y")]
    return [
        f"{encoding['title']} {encoding['scale']['type']} {encoding['scale'].get('domain', '')}"
        f"{' reversed' if encoding['scale'].get('reverse') else ''}"
        for encoding in encodings
    ]


def test_a_landscape_has_all_masks_in_order_and_marks_the_methods() -> None:
    masks = [HeadMask.from_swa_kv_heads([[head]], 3) for head in range(3)]
    evaluations = [Evaluation(0.5, nats) for nats in (-2.0, -0.5, 0.0)]
    standing = Standing(0.5, -0.5, 1, 0.0, 2, 0.5, 1, 1)
    [picture] = landscapes(
        {0.25: (dict(zip(masks, evaluations, strict=True)), {"rand": [standing]})}
    )
    rows, curve = drawn(picture)
    assert curve == [{"x": 1, "y": 1e-4}, {"x": 2, "y": 0.5}, {"x": 3, "y": 2.0}]
    assert rows == [{"series": "rand", "x": 2, "y": 0.5, "tip": "rand: rank 2, -0.5 nats"}]
    assert (picture.name, picture.heading) == ("landscape-0.25", "ρ = 0.25, 3 masks")
    assert axes(picture) == ["rank by log-likelihood log ", "− log-likelihood (nats) log  reversed"]


def measured(
    method: str, ratio: float, budget: int | None, passes: float, score: Estimate, nats: Estimate
) -> Any:
    return SimpleNamespace(
        setting=SimpleNamespace(method=method, ratio=ratio, budget=budget),
        mean={"score": score, "log_likelihood": nats}.__getitem__,
        cost={"full_forward_equivalents": passes}.__getitem__,
    )


def test_cost_curves_have_each_setting_once_for_each_measure_and_ratio() -> None:
    points = [
        measured("bosch", 0.5, 4, 10.0, Estimate(0.8, 0.7, 0.9), Estimate(-0.5, -0.6, -0.4)),
        measured("rand", 0.5, None, 1.0, Estimate(0.2, None, None), Estimate(0.0, None, None)),
        measured("rand", 0.75, None, 1.0, Estimate(0.1, 0.0, 0.2), Estimate(-3.0, -4.0, -2.0)),
    ]
    pictures = cost_curves(points, [0.5, 0.75])
    names = ["score-0.5", "score-0.75", "log_likelihood-0.5", "log_likelihood-0.75"]
    assert [picture.name for picture in pictures] == names
    bosch, rand = drawn(pictures[0])[0]
    assert bosch == {
        "series": "bosch", "x": 10.0, "y": 0.8, "low": 0.7, "high": 0.9,
        "tip": "bosch, κ = 4: 0.8, 10 full passes",
    }  # fmt: skip
    assert (rand["y"], rand["low"], rand["high"]) == (0.2, 0.2, 0.2)
    assert rand["tip"] == "rand: 0.2, 1 full passes"
    likely, missing = drawn(pictures[2])[0]
    assert (likely["y"], likely["low"], likely["high"], missing["y"]) == (0.5, 0.6, 0.4, 1e-4)
    assert [len(drawn(picture)[0]) for picture in pictures] == [2, 1, 2, 1]
    assert axes(pictures[0])[1] == "held-out score linear [-0.03, 1.03]"
    assert axes(pictures[2]) == [
        "full passes (log) log ", "− held-out log-likelihood (nats) log  reversed",
    ]  # fmt: skip


def test_stability_shows_the_agreement_of_different_sets_and_scores_by_size() -> None:
    rank = {"swa_ratio": 0.5, "measure": "log_likelihood", "budget_per_layer": 4, "mean": 0.25}
    ranks = [
        {**rank, "same_calibration_set": False},
        {**rank, "same_calibration_set": True},
        {**rank, "same_calibration_set": False, "mean": None},
    ]
    size = {"method": "bosch", "swa_ratio": 0.75, "examples": 8, "held_out_score": {"mean": 0.5}}
    agreement, score = stability_curves(ranks, [size])
    assert drawn(agreement)[0] == [
        {"series": "ρ = 0.5, log-likelihood", "x": 4, "y": 0.25, "tip": "0.25"}
    ]
    assert drawn(score)[0] == [{"series": "bosch, ρ = 0.75", "x": 8, "y": 0.5, "tip": "0.500"}]
    assert [picture.name for picture in stability_curves([], [size])] == ["size"]


def test_a_map_of_distances_has_a_row_for_each_method() -> None:
    [picture] = jaccard_maps({0.5: np.array([[0.0, 0.25], [0.75, 0.0]])}, ["a", "b"])
    assert drawn(picture)[0] == [
        {"x": "a", "y": "a", "value": 0.0}, {"x": "b", "y": "a", "value": 0.25},
        {"x": "a", "y": "b", "value": 0.75}, {"x": "b", "y": "b", "value": 0.0},
    ]  # fmt: skip


def point(model: str, length: int, ratio: float | None, window: int | None, speed: float) -> Any:
    return {
        "model": model, "length": length, "swa_ratio": ratio, "window_size": window,
        "out_of_memory": speed == 0, "prefill_tokens_per_second": speed,
        "decode_tokens_per_second": 2 * speed, "memory_p90_bytes": 1e9 * speed,
    }  # fmt: skip


def test_figures_of_measurements_have_a_panel_per_setting_and_a_line_per_model() -> None:
    points = [
        point("original", 1024, None, None, 10.0),
        point("original", 2048, None, None, 0),
        *(point("hybrid", 1024, ratio, window, speed) for ratio, window, speed in (
            (0.75, 64, 30.0), (0.5, 64, 20.0), (0.5, 1024, 15.0))),
    ]  # fmt: skip
    found = figures(points)
    assert {name: len(pictures) for name, pictures in found.items()} == {
        "figure_5_ratios": 6, "figure_6_windows": 6,
    }  # fmt: skip
    first = found["figure_5_ratios"]
    assert [panel.heading for panel in first[::3]] == [
        "prefill, tokens/s, W = 64", "prefill, tokens/s, W = 1,024",
    ]  # fmt: skip
    series = [(row["series"], row["x"], row["y"]) for row in drawn(first[0])[0]]
    assert series == [("original", 1024, 10.0), ("ρ = 0.75", 1024, 30.0), ("ρ = 0.5", 1024, 20.0)]
    assert drawn(first[0])[1] == [
        {"series": "original", "x": 2048, "tip": "original, 2k: out of memory"}
    ]
    assert all("✕ out of memory" in str(panel.chart.to_dict(validate=False)) for panel in first)
    assert [row["y"] for row in drawn(first[1])[0]] == [20.0, 60.0, 40.0]
    assert [row["y"] for row in drawn(first[2])[0]] == [10.0, 30.0, 20.0]
    assert len(drawn(first[3])[0]) == 2
    by_window = found["figure_6_windows"]
    assert by_window[0].heading == "prefill, tokens/s, ρ = 0.5"
    assert [row["series"] for row in drawn(by_window[0])[0]] == ["original", "W = 64", "W = 1,024"]
    scale = first[0].chart.to_dict(validate=False)["layer"][0]["encoding"]["color"]["scale"]
    assert scale["domain"] == ["original", "ρ = 0.5", "ρ = 0.75"]


def test_a_setting_has_the_mean_of_each_measure_over_seeds_and_examples() -> None:
    results = {
        "score": np.array([[1.0, 0.0, 1.0], [1.0, 1.0, 0.0]]),
        "log_likelihood": np.array([[-0.5, -3.0, -0.25], [-1.0, -2.0, -4.5]]),
    }
    runs: Any = [SimpleNamespace(costs={"passes": cost}) for cost in (2.0, 5.0)]
    row = Measured(Setting("bosch", 0.5), runs, results)
    assert row.mean("score") == crossed_mean(results["score"], is_score=True)
    mean, low, high = row.mean("log_likelihood")
    assert (mean, low) == crossed_mean(results["log_likelihood"])[:2]
    assert (mean, high) == (-11.25 / 6, 0.0)  # and not 1.4
    other = Measured(
        Setting("rand", 0.5), runs, {name: values[:1] for name, values in results.items()}
    )
    for measure, is_score in (("score", True), ("log_likelihood", False)):
        sides = results[measure], results[measure][:1]
        found = row.difference(measure, other)
        assert found == crossed_difference(*sides, is_score=is_score)
        assert found != crossed_difference(*sides, is_score=not is_score)
    assert row.cost("passes") == 3.5


def test_what_rounds_to_zero_has_no_sign() -> None:
    assert runs.interval_text(Estimate(-0.001, -0.004, 0.004), 2) == "0.00 [0.00, 0.00]"


def test_known_searches_do_not_count_in_the_time_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    free: list[bool] = []
    bar = SimpleNamespace(update=lambda **known: free.append(known["free"]))
    monkeypatch.setattr(runs, "progress", lambda *about: nullcontext(bar))
    finished = {("bosch", 0)}
    model: Any = SimpleNamespace(
        options=SimpleNamespace(seeds=2),
        finished=finished,
        search=lambda setting, seed: finished.add((setting.method, seed)),
    )
    runs.measured(model, [Setting("bosch", 0.5), Setting("rand", 0.5)], has_held_out=False)
    assert free == [True, False, False, False]


def test_a_studys_html_contains_no_markdown(tmp_path: Path) -> None:
    publish(StudyResult("one", "One", "(`model`) was read.", {}, []), tmp_path, "bosch study one")
    assert "(model) was read." in (tmp_path / "one.html").read_text()
    assert "(`model`) was read." in (tmp_path / "one.md").read_text()


def test_a_studys_page_and_records_are_copied_to_the_documentation(tmp_path: Path) -> None:
    folder, docs = tmp_path / "study", tmp_path / "docs" / "tiny"
    records = [{"head": 1, "share": 0.5}, {"head": 2, "share": None}]
    result = StudyResult("one", "One", "Two heads.", {"heads": 2}, [], records=records)
    page = publish(result, folder, "bosch study one", docs)
    content = json.loads((folder / "one.json").read_text())
    assert content == {"study": "one", "command": "bosch study one", "heads": 2}
    assert page == folder / "one.md" and "    bosch study one\n" in page.read_text()
    copies = {file.name: file.read_text() for file in docs.iterdir()}
    assert copies == {"one.md": page.read_text(), "one.csv": "head,share\n1,0.5\n2,\n"}


def test_intervals_of_turnover_stay_within_possible_values() -> None:
    """Of 6 heads 2 slide, then 4, of which 2, 1 and 0 are others: T is 1, 0.5 and 0, T_max 1."""
    shares = [
        ([0, 1], [2, 3, 4, 5]), ([0, 1], [1, 2, 3, 4]), ([0, 1], [0, 1, 2, 3]),
    ]  # fmt: skip
    masks = {
        (ratio, seed): HeadMask.from_swa_kv_heads([heads], 6)
        for seed, pair in enumerate(shares)
        for ratio, heads in zip((0.3, 0.6), pair, strict=True)
    }
    settings = SimpleNamespace(methods=["bosch"], ratios=[0.3, 0.6], budgets=[4], seeds=len(shares))
    study: Any = SimpleNamespace(
        options=settings, label="m", window=Window(4), held_out_set=[0] * 2, finished=(),
        search=lambda one, seed: SimpleNamespace(mask=masks[one.ratio, seed]),
        held_out=lambda mask: np.full((2, 2), float(mask in masks.values())),
    )  # fmt: skip
    result = turnover.study(study)
    assert "the diagonal compares different seeds of one method." in result.text
    [row], [swap] = result.data["turnover"], result.data["swap_test"]
    for name in ("turnover", "normalised"):
        assert row[name] == {"mean": 0.5, "low": 0.0, "high": 1.0}
    assert -1 <= swap["score_lost"]["low"] < swap["score_lost"]["high"] <= 1
    settings.seeds = 1
    assert "the diagonal has no pair: 0." in turnover.study(study).text


@pytest.mark.parametrize(("entering", "room"), [([0], share(0.0, 2).high), ([4], 0.0)])
def test_a_swap_of_equal_scores_has_an_interval_with_room_for_a_loss(
    entering: list[int], room: float
) -> None:
    """All masks score 1; without turnover A' is A and loses nothing."""
    masks = {0.3: [*entering], 0.6: [2, 3, 4, 5]}
    settings = SimpleNamespace(methods=["bosch"], ratios=[*masks], budgets=[4], seeds=3)
    study: Any = SimpleNamespace(
        options=settings, label="m", window=Window(4), held_out_set=[0] * 2, finished=(),
        search=lambda one, seed: SimpleNamespace(
            mask=HeadMask.from_swa_kv_heads([masks[one.ratio]], 6)
        ),
        held_out=lambda mask: np.ones((2, 2)),
    )  # fmt: skip
    [swap] = turnover.study(study).data["swap_test"]
    assert swap["score_lost"] == {"mean": 0.0, "low": -room, "high": room}


def test_windows_of_headbench_are_shorter_than_every_example() -> None:
    lengths = {0: 90, 1: 70}

    def study(held_out: int, window: Window) -> Any:
        return SimpleNamespace(
            window=window,
            options=SimpleNamespace(seeds=len(lengths)),
            held_out_set=SimpleNamespace(max_length=held_out),
            calibration=lambda seed: SimpleNamespace(max_length=lengths[seed]),
        )

    # Powers of two times a quarter of the recipe's window, the widest first.
    assert headbench_menu(study(300, Window(32))) == tuple(map(Window, (64, 32, 16, 8)))
    assert headbench_menu(study(64, Window(32))) == tuple(map(Window, (32, 16, 8)))
    assert headbench_menu(study(300, Window(32, 6))) == tuple(
        Window(size, 6) for size in (32, 16, 8)
    )


def test_headbench_counts_states_of_fixed_size_in_both_caches() -> None:
    model = small_model("qwen3_next")
    mask, ids = mask_of(model.config), tokens(1, 20)
    hybrid = materialize(model, mask, Window(5))
    original, cache = model(ids, use_cache=True).past_key_values, hybrid.new_cache()
    hybrid(ids, past_key_values=cache)
    study: Any = SimpleNamespace(model=model, held_out_set=SimpleNamespace(max_length=20))
    assert cache_shares(study, mask, Window(5)) == (held_bytes(cache) / held_bytes(original), None)


def test_headbench_tests_each_selector_against_the_best_of_its_kind() -> None:
    scores = [np.tile(row, (2, 1)) for row in ([1.0, 1.0, 1.0, 0.0], [1.0, 0.0, 0.0, 0.0])]
    trained = [scores[1], scores[0]]
    rows = [
        Row(name, name, "", 0.5, None, score, [], Window(8), 0.3, None, 1.0, after)
        for name, score, after in zip("ab", scores, trained, strict=True)
    ]
    first, second = records_of(rows, 0.5, ["untrained", "trained"])
    assert (first["score"], second["score"]) == (0.75, 0.25)
    assert (first["difference"], second["difference"]) == (None, -0.5)
    assert (first["trained_difference"], second["trained_difference"]) == (-0.5, None)
    assert second["p_holm"] == first["trained_p_holm"] == crossed_test(*scores[::-1]).p_value
    table = table_of(0.5, [first, second], ["untrained", "trained"]).markdown()
    assert "after training" in table and table.count("-0.500") == 2


def test_headbench_corrects_for_all_pairs_because_the_examples_select_the_best() -> None:
    right = [40, 24, 20, 16]
    scores = [np.array([[1.0] * count + [0.0] * (48 - count)]) for count in right]
    rows = [
        Row(str(count), "", "", 0.5, None, score, [], Window(8), 0.3, None, 1.0)
        for count, score in zip(right, scores, strict=True)
    ]
    _, *others = records_of(rows, 0.5, ["untrained"])
    p_values = [crossed_test(score, scores[0]).p_value for score in scores[1:]]
    assert [row["p_holm"] for row in others] == holm(p_values, among=6)
    assert holm(p_values, among=6) != holm(p_values)


@pytest.mark.parametrize("first", range(KINDS))
def test_scores_are_grouped_by_the_kinds_of_questions(first: int) -> None:
    """Wherever a list of records begins: a held-out set may begin with any kind."""

    def answers_the_last_kind(input_ids: torch.Tensor, use_cache: bool) -> Any:
        if FIRST_QUESTION + KINDS - 1 not in input_ids:
            return SimpleNamespace(logits=torch.zeros(*input_ids.shape, VOCABULARY))
        following = input_ids.roll(-1, dims=1)
        return SimpleNamespace(logits=torch.nn.functional.one_hot(following, VOCABULARY))

    records = examples(9)[first:]
    model: Any = answers_the_last_kind
    assert [exact_match(model, records, kind) for kind in range(KINDS)] == [0, 0, 1]


@pytest.mark.parametrize(
    ("option", "value", "sentence"),
    [
        ("--ratios", "0.5,2", "study: --ratios: expected a value at most 1, found "),
        ("--ratios", "0.75,0.7500001", "study: --ratios: two values differ only after their sixth"),
        ("--seeds", "0", "--seeds: expected a value greater than 0, found "),
        ("--seeds", "2,3", "--seeds: '2,3' is not a count"),
        ("--budgets", "4,x", "--budgets: 'x' is not a count"),
        ("--methods", "zzz", "--methods: 'zzz' is unknown; choose from all, "),
    ],
)
def test_meaningless_options_are_refused(
    option: str,
    value: str,
    sentence: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    case = Case(tmp_path)
    assert main(["study", "cost", str(case.file), option, value]) == 2
    assert sentence in capsys.readouterr().err
    assert not case.runs.exists()


class Settings(Section):
    """Options of a command."""

    seeds: options.Seeds = Field(default=(4,), description="100 % of them")
    methods: options.Methods = options.METHODS
    is_fast: bool = Field(default=False)


@pytest.mark.parametrize(
    ("typed", "values"),
    [
        ([], ((4,), options.METHODS, False)),
        (["--seeds", "2,0,2", "--methods", "rand,bosch,rand"], ((0, 2), ("rand", "bosch"), False)),
        (["--methods", "all", "--is-fast"], ((4,), options.METHODS, True)),
        (["--methods", "bosch,all"], ((4,), options.METHODS, False)),
        (["--seeds=-1"], "--seeds: expected a value at least 0"),
        (["--methods", "rnd", "--seeds", "x"], "it: 2 faults\n  --seeds: "),
        # A given mask is no method to compare.
        (["--methods", "given,rand"], "--methods: 'given' is unknown; choose from all, bosch"),
    ],
)
def test_options_become_a_section(typed: list[str], values: object) -> None:
    parser = argparse.ArgumentParser()
    options.add_options(parser, Settings)
    assert "(default: 4)" in parser.format_help() and "(default: all)" in parser.format_help()
    arguments = parser.parse_args(typed)
    if isinstance(values, str):
        with pytest.raises(UserError) as caught:
            options.read_options(Settings, arguments, "it")
        assert values in str(caught.value)
    else:
        read = options.read_options(Settings, arguments, "it")
        assert (read.seeds, read.methods, read.is_fast) == values


def test_options_are_refused_before_torch_is_loaded(tmp_path: Path) -> None:
    case = Case(tmp_path)
    done = subprocess.run(
        [
            sys.executable, "-c",
            "import sys; from pipeline.cli import main; print(main(sys.argv[1:]), 'torch' in "
            "sys.modules)",
            "study", "cost", str(case.file), "--methods", "bosch,bsch",
        ],
        cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    assert done.stdout.split() == ["2", "False"], done.stderr


def test_options_that_a_study_does_not_read_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    case = Case(tmp_path)
    for study, given, sentence in (
        ("cost", ["--with-training"], "--with-training: study headbench uses it, cost does not"),
        ("headbench", ["train=null", "--with-training"], "the recipe has no section train"),
        ("turnover", ["--sizes", "2,4"], "--sizes: study stability uses it, turnover does not"),
        ("stability", ["--granularities", "2"], "--granularities: study granularity uses it, "),
    ):
        assert main(["study", study, str(case.file), *given]) == 2
        assert sentence in capsys.readouterr().err
    for name, value in (("NNODES", "2"), ("MASTER_ADDR", "one"), ("MASTER_PORT", "1")):
        monkeypatch.setenv(name, value)
    assert main(["study", "cost", str(case.file)]) == 2
    assert "study works on one node only; NNODES asks for several" in capsys.readouterr().err
    assert not case.runs.exists()
