"""Studies end to end, by the command line, on the trained model that can be enumerated."""

from __future__ import annotations

import csv
import json
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bosch.budget import swa_budget
from bosch.errors import UserError
from bosch.heads import HeadMask
from bosch.model.loading import load_model
from bosch.model.search_mode import prepare_for_search
from bosch.objective.calibration import CalibrationSet
from bosch.objective.evaluation_log import Evaluation
from bosch.objective.objective import Objective
from bosch.window import Window
from data_prep.documents.calibration import forced_records
from data_prep.documents.tokenizer import TokenizerSpec, load_tokenizer
from data_prep.text import haystack_words
from pipeline.cli import main
from pipeline.commands.study import StudyOptions, headbench
from pipeline.commands.study.optimality import evaluation_log
from pipeline.commands.study.studied_model import Setting, StudiedModel
from pipeline.recipe.load import LoadedRecipe, load_recipe
from pipeline.run.launch import Launcher
from stages.search.stage import STAGE
from stages.stage import World
from tests.pipeline_case import in_process

RECIPE = Path(__file__).resolve().parents[2] / "recipes" / "study" / "enumerable.yaml"
MODEL = RECIPE.parent / "enumerable_model"
EXAMPLES, LENGTH = 4, 192
SMALL = f"prepare.calibration.examples={EXAMPLES}", f"prepare.calibration.length={LENGTH}"


def study(name: str, folder: Path, *options: str) -> int:
    always = "--output", str(folder), "--held-out", "5", "--seeds", "2"
    return main(["study", name, str(RECIPE), *SMALL, *always, *options])


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]


def read(folder: Path, name: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / f"{name}.json").read_text())
    return content


@pytest.fixture(scope="module")
def searched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which the cost study has run."""
    folder = tmp_path_factory.mktemp("study")
    options = "--methods", "bosch,rand,dcam", "--ratios", "0.5,0.75", "--budgets", "3,6"
    assert study("cost", folder, *options) == 0
    return folder


def test_the_cost_study_has_every_method_ratio_and_budget(searched: Path) -> None:
    data = read(searched, "cost")
    points = {(p["method"], p["swa_ratio"], p["budget_per_layer"]) for p in data["points"]}
    expected = {("bosch", ratio, budget) for ratio in (0.5, 0.75) for budget in (3, 6)}
    expected |= {(method, ratio, None) for ratio in (0.5, 0.75) for method in ("rand", "dcam")}
    assert points == expected
    for point in data["points"]:
        assert len(point["score_of_each_seed"]) == 2
        score = point["held_out_score"]
        assert score["low"] <= score["mean"] <= score["high"]
        assert score["mean"] == pytest.approx(np.mean(point["score_of_each_seed"]))
    page = (searched / "cost.md").read_text()
    assert "--budgets 3,6" in page
    assert page.count("| bosch | 3 |") == 2
    assert page.count("difference (against bosch, κ = 6)") == 2 * 2
    for point in data["points"]:
        costs = (
            f"{point[name]:.1f}"
            for name in ("full_forward_equivalents", "naive_full_forward_equivalents", "seconds")
        )
        cells = [point["method"], str(point["budget_per_layer"] or ""), f"{point['evaluations']:g}"]
        assert f"| {' | '.join([*cells, *costs])} |" in page
    assert (searched / "cost-curves.png").stat().st_size > 10_000
    html = (searched / "cost.html").read_text()
    assert html.count('<figure class="chart"') == 2 * 2  # score and log-likelihood by ratio
    assert "<caption>ρ = 0.75</caption>" in html


def test_masks_of_searches_are_on_budget_and_use_their_own_calibration_sets(searched: Path) -> None:
    searches = [line for line in lines(searched) if line["key"]["kind"] == "search"]
    assert len(searches) == 2 * 2 * (2 + 2)
    for line in searches:
        mask = HeadMask.from_key(line["result"]["mask"])
        sliding = swa_budget(12, line["key"]["settings"]["swa_ratio"])
        assert int((~mask.is_full).sum()) == sliding
    for method, seeds in (("bosch", 2), ("rand", 2), ("dcam", 1)):  # dcam is not random
        own = [line["key"] for line in searches if line["key"]["method"] == method]
        assert len({key["settings"]["seed"] for key in own}) == seeds
        assert len({(key["settings"]["seed"], key["examples"]) for key in own}) == 2


def test_a_stopped_study_resumes(searched: Path, tmp_path: Path) -> None:
    """Without its last results it computes only these again and ends with the same numbers."""
    folder = tmp_path / "again"
    shutil.copytree(searched, folder)
    whole = (folder / "results.jsonl").read_text()
    shortened = whole.splitlines(keepends=True)[:-3]
    (folder / "results.jsonl").write_text("".join(shortened) + '{"key": {"kind"')
    options = "--methods", "bosch,rand,dcam", "--ratios", "0.5,0.75", "--budgets", "3,6"
    assert study("cost", folder, *options) == 0
    assert len(lines(folder)) == len(whole.splitlines())
    assert (folder / "results.jsonl").read_text().startswith("".join(shortened))
    mine, theirs = read(folder, "cost"), read(searched, "cost")
    for a, b in zip(mine["points"], theirs["points"], strict=True):
        assert a["held_out_score"] == b["held_out_score"]
        assert a["held_out_log_likelihood"] == b["held_out_log_likelihood"]


def test_the_turnover_study_reuses_searches(searched: Path) -> None:
    before = [line for line in lines(searched) if line["key"]["kind"] == "search"]
    options = "--methods", "bosch,dcam", "--ratios", "0.5,0.75", "--budgets", "3,6"
    assert study("turnover", searched, *options) == 0
    assert [line for line in lines(searched) if line["key"]["kind"] == "search"] == before
    data = read(searched, "turnover")
    static = next(r for r in data["turnover"] if r["method"] == "dcam")
    # One ranking per seed serves both ratios, so the sets are nested.
    assert static["turnover"]["mean"] == 0.0
    assert static["most"] == pytest.approx(0.5)
    assert [r["method"] for r in data["swap_test"]] == ["bosch"]
    _, turnover, swaps = (searched / "turnover.md").read_text().split("\n## ")
    for r in data["turnover"]:
        row = f"| {r['method']} | 0.5 → 0.75 | {r['turnover']['mean']:.3f} ["
        assert (
            row in turnover and f" | {r['most']:.3f} | {r['normalised']['mean']:.3f} [" in turnover
        )
    (r,) = data["swap_test"]
    scores = [r[name]["mean"] for name in ("score", "swapped_score", "score_lost")]
    cells = [cell.partition(" [")[0] for cell in swaps.splitlines()[-1].split(" | ")]
    assert cells[:2] == ["| bosch", "0.5 → 0.75"]
    assert [float(cell.replace("−", "-")) for cell in cells[2:5]] == pytest.approx(scores, abs=5e-4)


def test_the_cost_to_reach_the_published_procedure_is_that_of_the_cheapest_budget(
    searched: Path,
) -> None:
    options = "--methods", "bosch,bosch_plus", "--ratios", "0.5", "--budgets", "3,6"
    assert study("cost", searched, *options) == 0
    points = read(searched, "cost")["points"]
    base = points[1]
    assert (base["method"], base["budget_per_layer"]) == ("bosch", 6)
    goal = np.median(base["score_of_each_seed"])
    enough = [
        point
        for point in points
        if point["method"] == "bosch_plus" and np.median(point["score_of_each_seed"]) >= goal
    ]
    first = min(enough, key=lambda point: point["full_forward_equivalents"])
    page = (searched / "cost.md").read_text().partition("ρ = 0.5")[0]
    passes, own = (point["full_forward_equivalents"] for point in (base, first))
    assert (
        f"| 0.5 | {goal:.3f} | {passes:.1f} | {own:.1f} passes (κ = {first['budget_per_layer']}) "
        f"| {own / passes:.2f} |" in page
    )


def test_headbench_tests_every_selector_at_the_same_cache(searched: Path) -> None:
    options = "--methods", "bosch,rand,dcam,one_gradient", "--ratios", "0.5", "--budgets", "3"
    assert study("headbench", searched, *options) == 0
    with (searched / "headbench.csv").open() as file:
        rows = {row["method"]: row for row in csv.DictReader(file)}
    uniform = {"uniform_0_sinks": 0, "uniform_4_sinks": 4}
    assert {*rows} == {"bosch", "rand", "dcam", "one_gradient", *uniform}
    # By hand: 6 of 12 heads keep all of the longest example, the others 31 tokens each.
    examples = {line["key"]["examples"] for line in lines(searched) if held_out(line)}
    assert len(examples) == 1
    length = StudiedModel(*opened(searched)).held_out_set.max_length
    share = (6 * length + 6 * 31) / (12 * length)
    for name, row in rows.items():
        assert float(row["cache_generate"]) == pytest.approx(share, abs=1 / length), name
        assert float(row["cache_generate"]) <= share + 1e-9
        assert (row["cache_vllm"] == "") == (name == "uniform_4_sinks")
    # A row's score is that of its masks on the held-out examples.
    scores = {
        (line["key"]["mask"], str(line["key"]["window_size"]), line["key"]["sinks"]): line[
            "result"
        ]["exact"]
        for line in lines(searched)
        if held_out(line)
    }
    for method, window in (("dcam", "32"),):
        masks = [
            line["result"]["mask"]
            for line in lines(searched)
            if line["key"]["kind"] == "search" and line["key"]["method"] == method
            if line["key"]["settings"]["swa_ratio"] == 0.5
            and "head_granularity" not in line["key"]["settings"]
        ]
        assert len(masks) == 2
        mean = np.mean([scores[mask, window, 0] for mask in masks])
        assert float(rows[method]["score"]) == pytest.approx(mean)
    for name, sinks in uniform.items():
        size = next(
            key[1] for key in scores if key[1].isdigit() and key[1] != "32" and key[2] == sinks
        )
        exact = scores["3x4:0000", size, sinks]
        assert float(rows[name]["score"]) == pytest.approx(np.mean(exact))
    best = max(rows.values(), key=lambda row: float(row["score"]))
    first = next(iter(rows.values()))
    assert first["p_holm"] == "" and float(first["score"]) == float(best["score"])
    assert all(float(row["difference"]) <= 0 for row in [*rows.values()][1:])
    assert "Uniform, W = " in (searched / "headbench.md").read_text()


def held_out(line: dict[str, Any]) -> bool:
    return bool(line["key"]["kind"] == "held_out")


def opened(folder: Path) -> tuple[Any, StudyOptions, Path]:
    return load_recipe(RECIPE, SMALL), StudyOptions(seeds=2, held_out=5), folder


def test_the_granularity_study_compares_units_with_single_heads(
    searched: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = "--methods", "bosch,dcam", "--ratios", "0.5", "--budgets", "3,6"
    assert study("granularity", searched, *options, "--granularities", "2,5") == 0
    assert "No mask has ρ = 0.5 at g = 5." in (searched / "granularity.md").read_text()
    data = read(searched, "granularity")
    assert [(p["method"], p["head_granularity"]) for p in data["points"]] == [
        ("bosch", 1), ("bosch", 2), ("dcam", 1), ("dcam", 2)
    ]  # fmt: skip
    for point in data["points"]:
        difference = point["log_likelihood_difference"]["mean"]
        assert (difference == 0.0) == (point["head_granularity"] == 1)
        row = f"| {point['method']} | {point['head_granularity']} | {point['score']['mean']:.3f} ["
        assert (searched / "granularity.md").read_text().count(row) == 1
    searches = [line for line in lines(searched) if line["key"]["kind"] == "search"]
    units = [line for line in searches if "head_granularity" in line["key"]["settings"]]
    assert len(units) == 4
    for line in units:
        counts = HeadMask.from_key(line["result"]["mask"]).full_kv_heads_per_layer
        assert sum(counts) == 6 and not any(count % 2 for count in counts)
    for sizes, sentence in (("4", "for 3 layers of 4 KV heads no mask"), ("1", "name one above 1")):
        assert study("granularity", searched, *options, "--granularities", sizes) == 2
        assert sentence in capsys.readouterr().err


def test_the_stability_study_ranks_layers_by_both_measures(searched: Path) -> None:
    options = "--methods", "bosch", "--ratios", "0.5", "--budgets", "6", "--sizes", "2,4"
    assert study("stability", searched, *options, "search.budget_per_layer=6") == 0
    data = read(searched, "stability")
    kinds = {(r["budget_per_layer"], r["same_calibration_set"], r["measure"])
             for r in data["layer_importance"]}  # fmt: skip
    assert len(kinds) == 4
    # A layer's six candidates are enumerated, so with one set all seeds find the same.
    exact = [r for r in data["layer_importance"]
             if r["same_calibration_set"] and r["budget_per_layer"] == 6]  # fmt: skip
    assert exact[0]["drops"][0] == exact[0]["drops"][1]
    likelihood = next(r for r in exact if r["measure"] == "log_likelihood")
    assert likelihood["mean"] == pytest.approx(1.0)
    # With every head sliding it loses more than 20 nats.
    assert np.abs(likelihood["drops"]).max() < 0.1
    assert [(r["method"], r["examples"]) for r in data["calibration_size"]] == [
        ("bosch", 2),
        ("bosch", 4),
    ]
    _, ranks, _, sizes = (searched / "stability.md").read_text().split("\n## ")
    for r in data["layer_importance"]:
        calibration = "the same" if r["same_calibration_set"] else "of each seed"
        row = (
            f"| 0.5 | {r['budget_per_layer']} | {calibration} | {r['measure'].replace('_', '-')} | "
        )
        row += "– | –" if r["mean"] is None else f"{r['mean']:.2f} | {r['least']:.2f} to "
        assert ranks.count(row) == 1
    for r in data["calibration_size"]:
        assert f"| 0.5 | bosch | {r['examples']} | {r['held_out_score']['mean']:.3f} [" in sizes


def test_the_optimality_study_finds_the_true_optimum(tmp_path: Path) -> None:
    """The page's optimum is measured again by one plain pass, and no other mask is better."""
    options = "--methods", "bosch,bme", "--ratios", "0.16", "--budgets", "3"
    assert study("optimality", tmp_path, *options) == 0
    data = read(tmp_path, "optimality")["ratios"]["0.16"]
    optimum = data["optimum"]
    assert optimum["masks"] == len(optimum["scores"]) == 66
    for one in ("score", "log_likelihood"):  # the best first
        assert optimum[f"{one}s"][0] == optimum[one]
    objective = own_objective()
    best = objective.evaluate(HeadMask.from_key(optimum["best_by_log_likelihood"]))
    assert best.log_likelihood == pytest.approx(optimum["log_likelihood"], abs=1e-4)
    rng = np.random.default_rng(0)
    for _ in range(5):
        bits = rng.permutation(np.arange(12) >= 2).reshape(3, 4)
        assert objective.evaluate(HeadMask(bits)).log_likelihood <= best.log_likelihood + 1e-4
    assert list(data["methods"]) == ["bosch, κ = 3", "bme"]
    for method in data["methods"]:
        for own in data["methods"][method]["calibration"]:
            better = [ll for ll in optimum["log_likelihoods"] if ll > own["log_likelihood"]]
            assert own["log_likelihood_rank"] == 1 + len(better)
            higher = [score for score in optimum["scores"] if score > own["score"]]
            assert own["score_rank"] == 1 + len(higher)
    page = (tmp_path / "optimality.md").read_text()
    assert f"({optimum['masks_of_best_score']} mask" in page and "(1 masks)" not in page
    assert "| all full | 1.000 |" in page and "| all sliding | " in page
    for method, sets in data["methods"].items():
        (row,) = [line for line in page.splitlines() if line.startswith(f"| {method} | ")]
        cells = row.split(" | ")
        shown = [float(cells[column].strip(" |")) for column in (3, 5, 6, 7)]
        gaps = [
            np.mean([own[f"{measure}_gap"] for own in sets[which]])
            for which in ("calibration", "held_out")
            for measure in ("score", "log_likelihood")
        ]
        assert shown == pytest.approx(gaps, abs=5e-4)


def own_objective() -> Objective:
    """The optimality study's objective, built by the test."""
    tokenizer = load_tokenizer(TokenizerSpec(str(MODEL)))
    tasks = ["niah_single_2", "niah_multikey_1", "niah_multikey_2"]
    records = forced_records(
        tasks, EXAMPLES, LENGTH, "calibration", 5, tokenizer, haystack_words(None)
    )
    examples = CalibrationSet.from_records(record for _, record in records)
    model = load_model(MODEL, dtype="float32")
    prepare_for_search(model)
    return Objective(model, examples, Window(32), reuse_bytes=0)


def test_a_model_too_large_to_enumerate_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = RECIPE.parents[1] / "quickstart.yaml"
    assert main(["study", "optimality", str(recipe), "--output", str(tmp_path)]) == 2
    assert "more than 20,000 that can be enumerated" in capsys.readouterr().err


def test_a_study_keeps_results_by_version_and_reuses_as_the_recipe_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = []
    for version in (1, 1, 2):
        stage = replace(STAGE, version=version)
        monkeypatch.setattr("pipeline.commands.study.studied_model.SEARCH", stage)
        recipe = load_recipe(RECIPE, [*SMALL, "runtime.reuse_memory=5MB"], env={})
        model = StudiedModel(recipe, StudyOptions(), tmp_path)
        files.append(evaluation_log(model, "calibration", model.calibration(0)).path)
    assert files[0] == files[1] != files[2]
    assert model.objective(model.calibration(0)).memory()["cache_bytes_limit"] == 5_000_000


def test_the_seconds_of_a_stopped_search_include_all_its_attempts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three passes of an hour before the stop: the remaining ones take a moment."""
    model = StudiedModel(load_recipe(RECIPE, SMALL, env={}), StudyOptions(), tmp_path)
    evaluate, left = Objective.evaluate, [3, 2, 1]

    def until_it_is_stopped(self: Objective, *args: Any, **options: Any) -> Evaluation:
        if not left:
            raise KeyboardInterrupt
        left.pop()
        return replace(evaluate(self, *args, **options), seconds=3600.0)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Objective, "evaluate", until_it_is_stopped)
        model.search(Setting("bosch", 0.5, 3), 0)
    costs = model.search(Setting("bosch", 0.5, 3), 0).costs
    assert costs["seconds"] == pytest.approx(3 * 3600, abs=600)
    assert costs["model_seconds"] == pytest.approx(3 * 3600, abs=600)
    assert model.search(Setting("bosch", 0.5, 3), 1).costs["seconds"] < 600


@pytest.fixture
def without_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LoadedRecipe:
    """A recipe whose training changes no weight, and whose searches are not random."""
    monkeypatch.setattr("stages.search.run.write_traces", lambda *_: None)
    changes = [
        *SMALL, "prepare.train_tokens=8k", f"runtime.output_root={tmp_path / 'runs'}",
        "train={total_tokens: 600, batch_tokens: 256, learning_rate: 1e-30, warmup_ratio: 0, "
        "checkpoint_tokens: [], mixed_precision: 'no'}", "materialize.dtype=float32",
    ]  # fmt: skip
    return load_recipe(RECIPE, changes)


def noting(stages: list[str]) -> Launcher:
    """Runs stages in this process, and records their names."""

    def launcher(order: Mapping[str, Any], world: World) -> dict[str, Any]:
        stages.append(order["stage"])
        return in_process(order, world)

    return launcher


def test_headbench_with_training_also_scores_each_trained_hybrid(
    without_change: LoadedRecipe, tmp_path: Path
) -> None:
    stages: list[str] = []
    options = StudyOptions(
        methods=("rand", "dcam"), ratios=(0.5,), budgets=(3,), seeds=2, held_out=5,
        with_training=True,
    )  # fmt: skip
    model = StudiedModel(without_change, options, tmp_path / "study", noting(stages))
    result = headbench.study(model)
    assert stages.count("train") == 2 + 1 + 2, "rand draws two masks, dcam one, and two are uniform"
    assert len(result.records) == 4
    for record in result.records:
        assert record["trained_score"] == record["score"], record["method"]
        assert record["trained_score_of_each_seed"] == record["score_of_each_seed"]
    assert len(result.figures["scores"]) == 2
    assert "trained for 512 tokens" in result.text, "two whole steps"


def test_a_hybrid_that_training_does_not_change_scores_like_its_mask(
    without_change: LoadedRecipe, tmp_path: Path
) -> None:
    orders: list[str] = []
    options, launcher = StudyOptions(held_out=5), noting(orders)
    model = StudiedModel(without_change, options, tmp_path / "study", launcher)
    one = HeadMask.from_key("3x4:0a50")
    several = HeadMask.of_choices([[0, 1, 2, 1], [2, 2, 0, 0], [1, 0, 1, 2]])
    cases: list[tuple[HeadMask, Window | tuple[Window, ...] | None]] = [
        (one, None), (one, Window(20, 4)), (several, (Window(48), Window(16))),
    ]  # fmt: skip
    for mask, windows in cases:
        found = model.trained(mask, windows)
        np.testing.assert_allclose(found, model.held_out(mask, windows), atol=1e-4)
        stages = ["search", "materialize", "train"]
        assert orders == (stages if orders[0] == "search" else ["prepare", *stages])
        orders.clear()
    again = StudiedModel(without_change, options, tmp_path / "study", launcher)
    np.testing.assert_array_equal(again.trained(one), model.trained(one))
    assert orders == []


def test_a_study_can_read_its_questions_from_a_file(tmp_path: Path) -> None:
    recipe = load_recipe(RECIPE, [f"prepare.calibration.examples={EXAMPLES}"], env={})
    file = RECIPE.parent / "composition_8x8" / "calibration.jsonl"
    options = StudyOptions(examples=str(file), held_out=5)
    model = StudiedModel(recipe, options, tmp_path)
    every = CalibrationSet.load(file).examples
    assert model.held_out_set.examples == every[-5:]
    first, second = model.calibration(0), model.calibration(1)
    assert len(first) == len(second) == EXAMPLES
    assert set(first.examples) != set(second.examples)
    assert not set(first.examples) & set(every[-5:])
    assert model.calibration(0, 3).examples == first.examples[:3]
    assert "composition_8x8/calibration.jsonl" in model.about_examples
    more = len(every) - 5 + 1
    with pytest.raises(UserError, match=rf"too few for 5 .* and {more} to calibrate on .*--sizes"):
        model.calibration(0, more)
    most = StudyOptions(examples=str(file), held_out=len(every) - EXAMPLES + 1)
    with pytest.raises(UserError, match=rf"and {EXAMPLES} to calibrate on"):
        _ = StudiedModel(recipe, most, tmp_path).held_out_set


def test_questions_in_the_tokens_of_another_model_are_refused(tmp_path: Path) -> None:
    recipe = load_recipe(RECIPE, env={})
    file = tmp_path / "examples.jsonl"
    file.write_text(json.dumps({"input_ids": [1, 10**6, 3], "answer_length": 1}))
    model = StudiedModel(recipe, StudyOptions(examples=str(file)), tmp_path)
    with pytest.raises(UserError, match="has the token id 1,000,000, the model's vocabulary ends"):
        _ = model.about_examples
    file.unlink()
    model = StudiedModel(recipe, StudyOptions(examples=str(file)), tmp_path)
    with pytest.raises(UserError, match=r"\(No such file or directory\); name another file$"):
        _ = model.about_examples
