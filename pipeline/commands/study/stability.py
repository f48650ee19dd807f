"""Stability of Algorithm 1 over seeds; effect of budget and calibration size on the score."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

from bosch.analysis.stability import ranking_stability
from bosch.progress import progress
from bosch.search.bosch import layer_drops
from bosch.search.methods import METHODS
from pipeline.commands.study import charts
from pipeline.commands.study.cost import measured_by_budget
from pipeline.commands.study.page import StudyResult
from pipeline.commands.study.runs import Measured, measured
from pipeline.commands.study.studied_model import SearchOutcome, Setting, StudiedModel
from stages.formats import counted
from stages.pages.tables import Table
from stages.search.stage import SearchConfig

# B-single is Algorithm 1 alone, so it shows the layer ranking at Algorithm 1's cost.
_STAGE_ONE = "b_single"


def study(model: StudiedModel) -> StudyResult:
    """Rank correlations of Algorithm 1 over seeds; score against budget and calibration size."""
    options = model.options
    model.calibration(0, max(options.sizes))  # refuses too few examples early
    ranks = _rankings(model)
    searches = [method for method in options.methods if METHODS[method].searches]
    by_budget = measured_by_budget(model, searches)
    settings = [
        Setting(method, ratio, examples=size)
        for ratio, method, size in product(options.ratios, searches, options.sizes)
    ]
    by_size = measured(model, settings)
    sizes = [_record(point, "examples") for point in by_size]
    data = {
        "seeds": options.seeds,
        "layer_importance": ranks,
        "calibration_size": sizes,
        "budget": [_record(point, "budget_per_layer") for point in by_budget],
    }
    measures = ("held-out score", "held-out log-likelihood")
    tables = [
        _rank_table(ranks),
        Table.of_rows(
            "Budget per layer against the final score",
            ("ρ", "method", "κ", *measures),
            [_row(point, point.setting.budget) for point in by_budget],
        ),
        Table.of_rows(
            "Calibration examples against the final score",
            ("ρ", "method", "examples", *measures),
            [_row(point, point.setting.examples) for point in by_size],
        ),
    ]
    return StudyResult(
        "stability", "Stability of Algorithm 1, budget and calibration size", _text(model), data,
        tables, {"curves": charts.stability_curves(ranks, sizes)},
    )  # fmt: skip


def importances(run: SearchOutcome, measure: str) -> list[float]:
    """d of Algorithm 2 by layer, from the scores or from the log-likelihoods of Algorithm 1."""
    if measure == "score":
        return [row["drop"] for row in run.layers]
    best = [row["best_log_likelihood"] for row in run.layers]
    return layer_drops(best, run.full_log_likelihood, scale=1.0).tolist()


def _rankings(model: StudiedModel) -> list[dict[str, Any]]:
    options = model.options
    records = []
    settings = list(product(options.ratios, options.budgets))
    with progress(2 * len(settings) * options.seeds, "Algorithm 1", "searches") as bar:
        for ratio, budget in settings:
            for same_set in (True, False):
                runs = []
                for seed in range(options.seeds):
                    setting, set_seed = Setting(_STAGE_ONE, ratio, budget), 0 if same_set else seed
                    count = len(model.finished)
                    runs.append(model.search(setting, seed, calibration_seed=set_seed))
                    bar.update(free=len(model.finished) == count)
                records += [
                    _stability(ratio, budget, same_set, measure, runs)
                    for measure in ("score", "log_likelihood")
                ]
    return records


def _stability(
    ratio: float, budget: int, same_set: bool, measure: str, runs: Sequence[SearchOutcome]
) -> dict[str, Any]:
    drops = [importances(run, measure) for run in runs]
    # Rounded, so that equal differences of floats compare equal.
    result = ranking_stability([[round(drop, 9) for drop in run] for run in drops])
    return {
        "swa_ratio": ratio,
        "budget_per_layer": budget,
        "same_calibration_set": same_set,
        "measure": measure,
        "mean": result.mean,
        "least": min(result.correlations, default=None),
        "most": max(result.correlations, default=None),
        "correlations": result.correlations,
        "undefined_pairs": result.undefined,
        "tied": result.tied,
        "drops": drops,
    }


def _record(point: Measured, name: str) -> dict[str, Any]:
    size = point.setting.examples if name == "examples" else point.setting.budget
    return point.record("held_out_", **{name: size})


def _row(point: Measured, size: int | None) -> list[str]:
    return [f"{point.setting.ratio:g}", point.setting.method, str(size), *point.cells()]


def _rank_table(records: Sequence[dict[str, Any]]) -> Table:
    header = (
        "ρ", "κ", "calibration set", "importance by", "mean Spearman ρ", "least to most",
        "pairs without an order", "layers tied",
    )  # fmt: skip
    rows = []
    for record in records:
        mean = ends = "–"
        if record["mean"] is not None:
            mean = f"{record['mean']:.2f}"
            ends = f"{record['least']:.2f} to {record['most']:.2f}"
        rows.append(
            [
                f"{record['swa_ratio']:g}",
                str(record["budget_per_layer"]),
                "the same" if record["same_calibration_set"] else "of each seed",
                record["measure"].replace("_", "-"),
                mean,
                ends,
                str(record["undefined_pairs"]),
                f"{record['tied']:.0%}",
            ]
        )
    return Table.of_rows("Agreement of Algorithm 1's layer importances over seeds", header, rows)


def _text(model: StudiedModel) -> str:
    kappa = model.recipe[SearchConfig].budget_per_layer
    return (
        f"`{model.label}`, W = {model.window.size}, "
        f"{counted(model.options.seeds, 'seed')}. Algorithm 1 ran once per seed: first with every "
        "seed on the same calibration set, so that only the optimiser's draws differ, then each on "
        "its own. "
        "Layer importance is d of Algorithm 2, from the score as published, and from the "
        "log-likelihood of the same masks. Spearman's ρ is between each two seeds, ties at average "
        "ranks; where a run ties all layers there is no order to compare. Scores below are on "
        f"{counted(len(model.held_out_set), 'held-out example')}, with 95 % intervals over seeds "
        f"and examples; the calibration size varies at κ = {kappa}."
    )
