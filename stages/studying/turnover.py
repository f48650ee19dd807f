"""Which heads the methods choose: turnover between ratios, swap test, Jaccard distances."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from bosch.analysis.bootstrap import Interval, bootstrap_mean
from bosch.analysis.jaccard import mean_distances
from bosch.analysis.swap_test import swapped
from bosch.analysis.turnover import turnover
from bosch.heads import HeadMask
from bosch.method.run import SEARCHES
from bosch.progress import progress
from stages.studying import pictures
from stages.studying.result import StudyResult, Table, shown
from stages.studying.subject import Subject

_SWAPS = 3  # draws of A' for each pair of masks, as in C.1

Masks = dict[str, dict[float, list[HeadMask]]]


def study(subject: Subject) -> StudyResult:
    """Turnover and swap test between neighbouring ratios, Jaccard distances at each ratio."""
    options = subject.config.options
    masks = _masks(subject)
    pairs = [pair for pair in pairwise(sorted(options.ratios)) if pair[0] > 0.0]
    turnovers = [_turnover(method, pair, masks) for method in options.methods for pair in pairs]
    searches = [method for method in options.methods if method in SEARCHES]
    swaps = [_swap(subject, method, pair, masks) for method in searches for pair in pairs]
    distances = {
        ratio: mean_distances({m: masks[m][ratio] for m in options.methods})
        for ratio in options.ratios
    }
    data = {
        "seeds": options.seeds,
        "turnover": turnovers,
        "swap_test": swaps,
        "methods": list(options.methods),
        "jaccard": {f"{ratio:g}": matrix.tolist() for ratio, matrix in distances.items()},
        "masks": {
            method: {f"{ratio:g}": [mask.key for mask in own] for ratio, own in ratios.items()}
            for method, ratios in masks.items()
        },
    }
    return StudyResult(
        "turnover", "Which heads are chosen", _text(subject), data,
        [_turnover_table(turnovers), _swap_table(swaps)],
        {"jaccard": pictures.jaccard_maps(distances, options.methods)},
    )  # fmt: skip


def _masks(subject: Subject) -> Masks:
    options = subject.config.options
    masks: Masks = {method: {} for method in options.methods}
    total = len(options.methods) * len(options.ratios) * options.seeds
    with progress(total, "searches", "searches") as bar:
        for method in options.methods:
            for ratio in options.ratios:
                own = masks[method].setdefault(ratio, [])
                for seed in range(options.seeds):
                    own.append(subject.search(method, ratio, seed, budget=options.budgets[-1]).mask)
                    bar.update()
    return masks


def _turnover(method: str, pair: tuple[float, float], masks: Masks) -> dict[str, Any]:
    small, large = pair
    found = [
        turnover(a, b) for a, b in zip(masks[method][small], masks[method][large], strict=True)
    ]
    return {
        "method": method,
        "small": small,
        "large": large,
        "turnover": bootstrap_mean([t.raw for t in found])._asdict(),
        "normalised": bootstrap_mean([t.normalised for t in found])._asdict(),
        "most": found[0].most,
    }


def _swap(subject: Subject, method: str, pair: tuple[float, float], masks: Masks) -> dict[str, Any]:
    """Held-out results of A_l and A'_l; the draws of A' are averaged within a seed."""
    small, large = masks[method][pair[0]], masks[method][pair[1]]
    own = np.stack([subject.held_out(mask) for mask in large])  # [S, E, 2]
    changed = np.stack(
        [
            np.mean([subject.held_out(swapped(a, b, draw)) for draw in range(_SWAPS)], axis=0)
            for a, b in zip(small, large, strict=True)
        ]
    )
    record: dict[str, Any] = {"method": method, "small": pair[0], "large": pair[1]}
    for column, name in enumerate(("score", "log_likelihood")):
        mine, theirs = own[:, :, column], changed[:, :, column]
        record[name] = bootstrap_mean(mine)._asdict()
        record[f"swapped_{name}"] = bootstrap_mean(theirs)._asdict()
        record[f"{name}_lost"] = _within_seeds(mine, theirs)._asdict()
    return record


def _within_seeds(own: np.ndarray, changed: np.ndarray) -> Interval:
    """Mean loss; here both sides of a seed belong together, so their difference is resampled."""
    return bootstrap_mean(own - changed)


def _turnover_table(records: Sequence[dict[str, Any]]) -> Table:
    rows = [
        [
            r["method"],
            f"{r['small']:g} → {r['large']:g}",
            shown(Interval(**r["turnover"])),
            f"{r['most']:.3f}",
            shown(Interval(**r["normalised"])),
        ]
        for r in records
    ]
    return Table("Turnover", ("method", "ρ", "T", "T_max", "T̃"), rows)


def _swap_table(records: Sequence[dict[str, Any]]) -> Table:
    rows = [
        [
            r["method"],
            f"{r['small']:g} → {r['large']:g}",
            shown(Interval(**r["score"])),
            shown(Interval(**r["swapped_score"])),
            shown(Interval(**r["score_lost"])),
            shown(Interval(**r["log_likelihood_lost"]), 2),
        ]
        for r in records
    ]
    header = ("method", "ρ", "score of A", "score of A′", "score lost", "log-likelihood lost")
    return Table(f"Swap test, {_SWAPS} draws of A′ for each seed", header, rows)


def _text(subject: Subject) -> str:
    config, options = subject.config, subject.config.options
    return (
        f"`{Path(config.model.path).name}`, W = {config.search.window_size}, {options.seeds} "
        f"seeds, κ = {options.budgets[-1]}. T is the share of the heads sliding at the smaller "
        "ratio that are full at the larger one, T̃ that share over the largest possible one "
        "(BOSCH §4.3). A′ takes in what turned over in place of random members (BOSCH C.1); its "
        "scores are on "
        f"{len(subject.held_out_set)} held-out examples. Jaccard distances are between the sets "
        "of sliding heads, means over all pairs of seeds; the diagonal compares different seeds of "
        "one method. Brackets: 95 % bootstrap intervals."
    )
