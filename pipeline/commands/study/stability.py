"""Stability of Algorithm 1 over seeds; effect of budget and calibration size on the score."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bosch.analysis.intervals import Estimate, crossed_mean
from bosch.analysis.stability import Stability, ranking_stability
from bosch.progress import progress
from bosch.search.methods import METHODS
from bosch.search.ratio_assignment import layer_drops
from pipeline.commands.paths import model_label
from pipeline.commands.study import charts
from pipeline.commands.study.cost import measured
from pipeline.commands.study.page import StudyResult, interval_text
from pipeline.commands.study.studied_model import SearchOutcome, StudiedModel
from stages.pages.tables import Table
from stages.search.stage import SearchConfig

# B-single is Algorithm 1 alone, so it shows the layer ranking at Algorithm 1's cost.
_STAGE_ONE = "b_single"


def study(model: StudiedModel) -> StudyResult:
    """Rank correlations of Algorithm 1 over seeds; score against budget and calibration size."""
    options = model.options
    ranks = _rankings(model)
    searches = [method for method in options.methods if METHODS[method].searches]
    budgets = measured(model, searches)
    sizes = _sizes(model, searches)
    data = {
        "seeds": options.seeds,
        "layer_importance": ranks,
        "calibration_size": sizes,
        "budget": [
            {
                "method": p.method,
                "swa_ratio": p.ratio,
                "budget_per_layer": p.budget,
                "held_out_score": p.score._asdict(),
                "held_out_log_likelihood": p.likelihood._asdict(),
            }
            for p in budgets
        ],
    }
    budget_rows = [
        [
            f"{p.ratio:g}",
            p.method,
            str(p.budget),
            interval_text(p.score),
            interval_text(p.likelihood, 2),
        ]
        for p in budgets
    ]
    tables = [
        _rank_table(ranks),
        Table.of_rows(
            "Budget per layer against the final score",
            ("ρ", "method", "κ", "held-out score", "held-out log-likelihood"),
            budget_rows,
        ),
        _size_table(sizes),
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
    drops: list[float] = layer_drops(best, run.full_log_likelihood, scale=1.0).tolist()
    return drops


def _rankings(model: StudiedModel) -> list[dict[str, Any]]:
    options = model.options
    records = []
    settings = [(ratio, budget) for ratio in options.ratios for budget in options.budgets]
    with progress(2 * len(settings) * options.seeds, "Algorithm 1", "searches") as bar:
        for ratio, budget in settings:
            for same_set in (True, False):
                runs = []
                for seed in range(options.seeds):
                    set_seed = 0 if same_set else seed
                    runs.append(
                        model.search(
                            _STAGE_ONE, ratio, seed, budget=budget, calibration_seed=set_seed
                        )
                    )
                    bar.update()
                records += [
                    _stability(ratio, budget, same_set, measure, runs)
                    for measure in ("score", "log_likelihood")
                ]
    return records


def _stability(
    ratio: float, budget: int, same_set: bool, measure: str, runs: Sequence[SearchOutcome]
) -> dict[str, Any]:
    drops = [importances(run, measure) for run in runs]
    # Differences of sums of floats: what is equal must count as equal.
    result: Stability = ranking_stability([[round(d, 9) for d in run] for run in drops])
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


def _sizes(model: StudiedModel, searches: Sequence[str]) -> list[dict[str, Any]]:
    options = model.options
    records = []
    for ratio in options.ratios:
        for method in searches:
            for size in options.sizes:
                runs = [
                    model.search(method, ratio, seed, examples=size)
                    for seed in range(options.seeds)
                ]
                exact, likelihood = model.held_out_over_seeds([run.mask for run in runs])
                records.append(
                    {
                        "method": method,
                        "swa_ratio": ratio,
                        "examples": size,
                        "held_out_score": crossed_mean(exact, is_score=True)._asdict(),
                        "held_out_log_likelihood": crossed_mean(likelihood)._asdict(),
                    }
                )
    return records


def _rank_table(records: Sequence[dict[str, Any]]) -> Table:
    header = (
        "ρ", "κ", "calibration set", "importance by", "mean Spearman ρ", "least to most",
        "pairs without an order", "layers tied",
    )  # fmt: skip
    rows = []
    for r in records:
        none = r["mean"] is None
        rows.append(
            [
                f"{r['swa_ratio']:g}",
                str(r["budget_per_layer"]),
                "the same" if r["same_calibration_set"] else "of each seed",
                r["measure"].replace("_", "-"),
                "–" if none else f"{r['mean']:.2f}",
                "–" if none else f"{r['least']:.2f} to {r['most']:.2f}",
                str(r["undefined_pairs"]),
                f"{r['tied']:.0%}",
            ]
        )
    return Table.of_rows("Agreement of Algorithm 1's layer importances over seeds", header, rows)


def _size_table(records: Sequence[dict[str, Any]]) -> Table:
    rows = [
        [
            f"{r['swa_ratio']:g}",
            r["method"],
            str(r["examples"]),
            interval_text(Estimate(**r["held_out_score"])),
            interval_text(Estimate(**r["held_out_log_likelihood"]), 2),
        ]
        for r in records
    ]
    return Table.of_rows(
        "Calibration examples against the final score",
        ("ρ", "method", "examples", "held-out score", "held-out log-likelihood"),
        rows,
    )


def _text(model: StudiedModel) -> str:
    recipe, options = model.recipe, model.options
    window = recipe[SearchConfig].window_size
    return (
        f"`{model_label(recipe.model.path)}`, W = {window}, {options.seeds} "
        "seeds. Algorithm 1 ran once per seed: first with every seed on the same "
        "calibration set, so that only the optimiser's draws differ, then each on its own. "
        "Layer importance is d of Algorithm 2, from the score as published, and from the "
        "log-likelihood of the same masks. Spearman's ρ is between each two seeds, ties at average "
        "ranks; where a run ties all layers there is no order to compare. Scores below are on "
        f"{len(model.held_out_set)} held-out examples, with 95 % intervals over seeds "
        f"and examples; the calibration size varies at κ = {recipe[SearchConfig].budget_per_layer}."
    )
