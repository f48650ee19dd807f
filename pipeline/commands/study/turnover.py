"""Which heads the methods choose: turnover between ratios, swap test, Jaccard distances."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise, product
from typing import Any

import numpy as np

from bosch.analysis.intervals import Estimate, crossed_difference, crossed_mean
from bosch.analysis.turnover import mean_distances, swapped, turnover
from bosch.heads import HeadMask
from bosch.search.methods import METHODS
from pipeline.commands.study import charts
from pipeline.commands.study.page import StudyResult
from pipeline.commands.study.runs import held_out_mean, interval_text, measured
from pipeline.commands.study.studied_model import Setting, StudiedModel
from stages.formats import counted
from stages.pages.tables import Table

_SWAPS = 3  # draws of A' per pair of masks, as in C.1

Masks = dict[str, dict[float, list[HeadMask]]]


def study(model: StudiedModel) -> StudyResult:
    """Turnover and swap test between neighbouring ratios, Jaccard distances at each ratio."""
    options = model.options
    masks = _masks(model)
    pairs = [pair for pair in pairwise(sorted(options.ratios)) if pair[0] > 0.0]
    turnovers = [_turnover(method, pair, masks) for method in options.methods for pair in pairs]
    searches = [method for method in options.methods if METHODS[method].searches]
    swaps = [_swap(model, method, pair, masks) for method in searches for pair in pairs]
    distances = {
        ratio: mean_distances({method: masks[method][ratio] for method in options.methods})
        for ratio in options.ratios
    }
    data = {
        "seeds": options.seeds,
        "turnover": turnovers,
        "swap_test": swaps,
        "methods": list(options.methods),
        "jaccard": {f"{ratio:g}": matrix.tolist() for ratio, matrix in distances.items()},
        "masks": {
            method: {f"{ratio:g}": [mask.key for mask in group] for ratio, group in groups.items()}
            for method, groups in masks.items()
        },
    }
    return StudyResult(
        "turnover", "Which heads are chosen", _text(model), data,
        [_turnover_table(turnovers), _swap_table(swaps)],
        {"jaccard": charts.jaccard_maps(distances, options.methods)},
    )  # fmt: skip


def _masks(model: StudiedModel) -> Masks:
    options = model.options
    settings = [
        Setting(method, ratio, options.budgets[-1])
        for method, ratio in product(options.methods, options.ratios)
    ]
    masks: Masks = {}
    for point in measured(model, settings, has_held_out=False):
        by_ratio = masks.setdefault(point.setting.method, {})
        by_ratio[point.setting.ratio] = [run.mask for run in point.runs]
    return masks


def _turnover(method: str, pair: tuple[float, float], masks: Masks) -> dict[str, Any]:
    small, large = pair
    pairs = zip(masks[method][small], masks[method][large], strict=True)
    turnovers = [turnover(*pair_of_masks) for pair_of_masks in pairs]
    normalised = crossed_mean([entry.normalised for entry in turnovers])
    most = turnovers[0].maximum  # equal for all masks on these budgets
    return {
        "method": method,
        "small": small,
        "large": large,
        "turnover": crossed_mean([entry.share for entry in turnovers]).within(0.0, most)._asdict(),
        "normalised": normalised.within(0.0, 1.0)._asdict(),
        "most": most,
    }


def _swap(
    model: StudiedModel, method: str, pair: tuple[float, float], masks: Masks
) -> dict[str, Any]:
    """Held-out results of A_l and A'_l; the draws of A' are averaged within a seed."""
    small, large = masks[method][pair[0]], masks[method][pair[1]]
    pairs = zip(small, large, strict=True)
    swaps = [[swapped(*pair_of_masks, draw) for draw in range(_SWAPS)] for pair_of_masks in pairs]
    results = np.stack([model.held_out(mask) for mask in large])  # [S, E, 2]
    swapped_results = np.stack([np.mean([*map(model.held_out, draws)], axis=0) for draws in swaps])
    has_turnover = any({*draws} != {mask} for mask, draws in zip(large, swaps, strict=True))
    record: dict[str, Any] = {"method": method, "small": pair[0], "large": pair[1]}
    for column, name in enumerate(("score", "log_likelihood")):
        original, changed = results[:, :, column], swapped_results[:, :, column]
        record[name] = held_out_mean(original, name)._asdict()
        record[f"swapped_{name}"] = held_out_mean(changed, name)._asdict()
        is_score = name == "score"
        lost = crossed_difference(original, changed, is_score=is_score, has_paired_seeds=True)
        if not has_turnover:
            lost = Estimate(0.0, 0.0, 0.0)
        record[f"{name}_lost"] = lost._asdict()
    return record


def _turnover_table(records: Sequence[dict[str, Any]]) -> Table:
    rows = [
        [
            record["method"],
            f"{record['small']:g} → {record['large']:g}",
            interval_text(Estimate(**record["turnover"])),
            f"{record['most']:.3f}",
            interval_text(Estimate(**record["normalised"])),
        ]
        for record in records
    ]
    return Table.of_rows("Turnover", ("method", "ρ", "T", "T_max", "T̃"), rows)


def _swap_table(records: Sequence[dict[str, Any]]) -> Table:
    scores = "score", "swapped_score", "score_lost"
    rows = [
        [
            record["method"],
            f"{record['small']:g} → {record['large']:g}",
            *(interval_text(Estimate(**record[name])) for name in scores),
            interval_text(Estimate(**record["log_likelihood_lost"]), 2),
        ]
        for record in records
    ]
    header = ("method", "ρ", "score of A", "score of A′", "score lost", "log-likelihood lost")
    return Table.of_rows(f"Swap test, {_SWAPS} draws of A′ for each seed", header, rows)


def _text(model: StudiedModel) -> str:
    options = model.options
    diagonal = "compares different seeds of one method" if options.seeds > 1 else "has no pair: 0"
    return (
        f"`{model.label}`, W = {model.window.size}, "
        f"{counted(options.seeds, 'seed')}, κ = {options.budgets[-1]}. "
        "T is the share of the heads sliding at the smaller ratio that are full at the larger one, "
        "T̃ that share over the largest possible one "
        "(BOSCH §4.3). A′ takes in what turned over in place of random members (BOSCH C.1); its "
        "scores are on "
        f"{counted(len(model.held_out_set), 'held-out example')}. "
        "Jaccard distances are between the sets "
        f"of sliding heads, means over all pairs of seeds; the diagonal {diagonal}. Brackets: 95 % "
        "intervals."
    )
