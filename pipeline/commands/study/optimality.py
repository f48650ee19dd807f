"""Optimality gap: measures every mask on budget, and the rank of each method's mask."""

from __future__ import annotations

from dataclasses import asdict
from itertools import pairwise
from statistics import median
from typing import Any

import numpy as np

from bosch.analysis.optimality import Standing, count_on_budget, masks_on_budget, standing
from bosch.errors import UserError
from bosch.heads import HeadMask
from bosch.objective.evaluation_log import Evaluation, EvaluationLog
from bosch.progress import progress
from pipeline.commands.study import charts
from pipeline.commands.study.page import StudyResult
from pipeline.commands.study.studied_model import Setting, StudiedModel, digest_of, variants
from stages.formats import counted
from stages.pages.tables import Table

_MAX_MASKS = 20_000

Landscape = dict[HeadMask, Evaluation]


def study(model: StudiedModel) -> StudyResult:
    """Enumerate the masks of each ratio, on the calibration set and on held-out examples.

    Raises UserError when a ratio has too many masks to enumerate.
    """
    options = model.options
    layers, heads = model.shape
    for ratio in options.ratios:
        if (count := count_on_budget(layers, heads, ratio)) > _MAX_MASKS:
            raise UserError(
                f"study optimality: {layers} x {heads} KV heads have {count:,} masks at ratio "
                f"{ratio:g}, more than {_MAX_MASKS:,} that can be enumerated; take a smaller "
                "model, like that of recipes/study/enumerable.yaml"
            )
    calibration, held_out = model.calibration(0), model.held_out_set
    data: dict[str, Any] = {"shape": model.shape, "calibration_examples": len(calibration)}
    data |= {"held_out_examples": len(held_out), "seeds": options.seeds, "ratios": {}}
    curves = {}
    tables = [_anchor_table(model)]
    for ratio in options.ratios:
        log = evaluation_log(model, "calibration", calibration)
        landscape = _enumerate(model, ratio, calibration, log, "calibration set")
        held_out_landscape = _enumerate(
            model, ratio, held_out, evaluation_log(model, "held-out", held_out), "held-out set"
        )
        searches = {
            method if budget is None else f"{method}, κ = {budget}": [
                model.search(Setting(method, ratio, budget), seed, calibration_seed=0, log=log)
                for seed in range(options.seeds)
            ]
            for method, budget in variants(options.methods, options.budgets)
        }
        standings, held_out_standings = {}, {}
        for method, runs in searches.items():
            standings[method] = [standing(run.mask, landscape) for run in runs]
            held_out_standings[method] = [standing(run.mask, held_out_landscape) for run in runs]
        evaluations = {
            method: median(run.costs["evaluations"] for run in runs)
            for method, runs in searches.items()
        }
        curves[ratio] = (landscape, standings)
        tables.append(_table(ratio, landscape, standings, held_out_standings, evaluations))
        data["ratios"][f"{ratio:g}"] = {
            "optimum": _optimum(landscape),
            "held_out_optimum": _optimum(held_out_landscape),
            "methods": {
                method: {
                    "evaluations": evaluations[method],
                    "calibration": [*map(asdict, standings[method])],
                    "held_out": [*map(asdict, held_out_standings[method])],
                }
                for method in searches
            },
        }
    return StudyResult(
        "optimality", "Distance to the true optimum", _text(model), data, tables,
        {"landscape": charts.landscapes(curves)},
    )  # fmt: skip


def _anchor_table(model: StudiedModel) -> Table:
    """Table of the anchors: every head full, every head sliding."""
    rows = []
    for name, mask_of in (("all full", HeadMask.all_full), ("all sliding", HeadMask.all_sliding)):
        mask = mask_of(*model.shape)
        exact, likelihood = model.held_out(mask).mean(axis=0)
        rows.append([name, f"{exact:.3f}", f"{likelihood:.3f}"])
    header = ("mask", "held-out score", "held-out log-likelihood")
    return Table.of_rows("The model", header, rows)


def evaluation_log(model: StudiedModel, name: str, examples: Any) -> EvaluationLog:
    """Evaluation log for one set of examples, in the folder of results."""
    file = model.folder / f"{name}-{digest_of(model.context(examples))}.jsonl"
    return EvaluationLog(file, model.objective(examples).context)


def _enumerate(
    model: StudiedModel, ratio: float, examples: Any, log: EvaluationLog, set_name: str
) -> Landscape:
    """Evaluate all masks on budget; layers that a mask shares with the next are computed once."""
    objective = model.objective(examples)
    masks = list(masks_on_budget(*model.shape, ratio))
    missing = [mask for mask in masks if log.get(mask) is None]
    with progress(len(missing), f"all masks at {ratio:g}, {set_name}", "masks") as bar:
        for mask, following in pairwise([*missing, missing[-1]] if missing else []):
            log.append(mask, objective.evaluate(mask, _shared(mask, following)), "enumeration")
            bar.update()
    return {mask: evaluation for mask in masks if (evaluation := log.get(mask)) is not None}


def _shared(mask: HeadMask, following: HeadMask) -> int:
    """Number of layers below the first in which two masks differ; 0 for equal masks."""
    different = (mask.is_full != following.is_full).any(axis=1)
    return int(different.argmax())


def _optimum(landscape: Landscape) -> dict[str, Any]:
    evaluations = landscape.values()
    scores = np.array([evaluation.score for evaluation in evaluations])
    likelihoods = np.array([evaluation.log_likelihood for evaluation in evaluations])
    best = max(landscape, key=lambda mask: landscape[mask].log_likelihood)
    return {
        "masks": len(landscape),
        "score": float(scores.max()),
        "masks_of_best_score": int((scores == scores.max()).sum()),
        "log_likelihood": float(likelihoods.max()),
        "best_by_log_likelihood": best.key,
        "random_score": float(scores.mean()),
        "random_log_likelihood": float(likelihoods.mean()),
        "worst_score": float(scores.min()),
        "scores": np.sort(scores)[::-1].tolist(),
        "log_likelihoods": np.sort(likelihoods)[::-1].tolist(),
    }


def _table(
    ratio: float,
    landscape: Landscape,
    standings: dict[str, list[Standing]],
    held_out_standings: dict[str, list[Standing]],
    evaluations: dict[str, float],
) -> Table:
    best = _optimum(landscape)
    title = (
        f"ρ = {ratio:g}: {counted(best['masks'], 'mask')}, best score {best['score']:.3f} "
        f"({counted(best['masks_of_best_score'], 'mask')}), "
        f"best log-likelihood {best['log_likelihood']:.3f}; "
        f"a random mask: {best['random_score']:.3f} and {best['random_log_likelihood']:.3f}"
    )
    header = (
        "method", "evaluations", "score rank", "score gap", "log-likelihood rank",
        "log-likelihood gap", "held-out score gap", "held-out log-likelihood gap",
    )  # fmt: skip
    rows = []
    for method, method_standings in standings.items():
        held_out = held_out_standings[method]
        cells = [method, f"{evaluations[method]:g}"]
        for measure in ("score", "log_likelihood"):
            ranks = [getattr(s, f"{measure}_rank") for s in method_standings]
            cells += [_ranks(ranks), _gap(method_standings, measure)]
        rows.append([*cells, _gap(held_out, "score"), _gap(held_out, "log_likelihood")])
    return Table.of_rows(title, header, rows)


def _gap(standings: list[Standing], measure: str) -> str:
    return f"{np.mean([getattr(s, f'{measure}_gap') for s in standings]):.3f}"


def _ranks(ranks: list[int]) -> str:
    middle = f"{median(ranks):g}"
    return middle if min(ranks) == max(ranks) else f"{middle} (worst {max(ranks)})"


def _text(model: StudiedModel) -> str:
    layers, heads = model.shape
    options = model.options
    return (
        f"All masks on budget of a model of {layers} layers with {heads} KV heads "
        f"(`{model.label}`) were measured on the calibration set of "
        f"{counted(len(model.calibration(0)), 'example')} on which the methods search, and on "
        f"{counted(len(model.held_out_set), 'held-out example')}. Each method ran with "
        f"{counted(options.seeds, 'seed')} on the same calibration set. Rank 1 is the best; equal "
        "masks share a rank; ranks are medians over the seeds, gaps are means. `evaluations` "
        "counts different masks, anchors included; gradients are not among them."
    )
