"""How far each method's mask is from the best mask on budget, with every mask measured (Eq. 1).

    python -m studies.optimality recipes/study/enumerable.yaml --ratios 0.25,0.5,0.75

A model of a dozen KV heads has few enough masks on budget. Prints a page in Markdown: for each
ratio the optimum, and each method's gap to it by score and by log-likelihood, its rank among all
masks, and the score of its mask on other questions.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import combinations
from math import comb

import numpy as np

from bosch.budget import swa_budget
from bosch.masks import HeadMask
from bosch.score.evaluation_log import Evaluation, EvaluationLog
from bosch.window import Window
from studies.studied_model import StudiedModel, command, options, spread, table

MOST_MASKS = 20_000

Landscape = Mapping[HeadMask, Evaluation]


@dataclass(frozen=True)
class Standing:
    """A mask among all masks of its budget; rank 1 is the best, and equal values share a rank."""

    score_gap: float
    likelihood_gap: float
    score_rank: int
    likelihood_rank: int


def masks_on_budget(layers: int, heads: int, ratio: float, window: Window) -> Iterator[HeadMask]:
    """Every mask with exactly ceil(rho N) sliding KV heads, each once."""
    units = layers * heads
    for sliding in combinations(range(units), swa_budget(units, ratio)):
        is_full = np.ones(units, dtype=np.bool_)
        is_full[list(sliding)] = False
        yield HeadMask.of(is_full.reshape(layers, heads), window)


def standing(mask: HeadMask, landscape: Landscape) -> Standing:
    """Gaps and ranks of `mask`, which must be on budget."""
    own = landscape[mask]
    scores = [evaluation.score for evaluation in landscape.values()]
    likelihoods = [evaluation.log_likelihood for evaluation in landscape.values()]
    return Standing(
        max(scores) - own.score,
        max(likelihoods) - own.log_likelihood,
        1 + sum(score > own.score for score in scores),
        1 + sum(likelihood > own.log_likelihood for likelihood in likelihoods),
    )


def main() -> None:
    chosen = options(__doc__, "0.25,0.5,0.75").parse_args()
    model = StudiedModel(chosen.recipe, chosen.changes, chosen.held_out, chosen.examples)
    layers, heads = model.shape
    for ratio in chosen.ratios:
        count = comb(layers * heads, swa_budget(layers * heads, ratio))
        if count > MOST_MASKS:
            raise SystemExit(f"{count:,} masks at ratio {ratio:g}: too many to measure")
    print(f"# Distance to the true optimum\n\n{command('studies.optimality')}")
    log = EvaluationLog(None, model.calibration.context)
    for ratio in chosen.ratios:
        landscape = {}
        for mask in masks_on_budget(layers, heads, ratio, model.calibration.window):
            landscape[mask] = model.calibration.evaluate(mask)
            log.append(mask, landscape[mask], "enumeration")
        values = landscape.values()
        best = max(landscape, key=lambda mask: landscape[mask].log_likelihood)
        top = max(value.score for value in values)
        held_out = model.held_out_score(best)
        print(f"## ρ = {ratio:g}\n")
        print(
            f"{len(landscape)} masks. The best score is {top:.3f}, of "
            f"{sum(value.score == top for value in values)} masks; their mean is "
            f"{np.mean([value.score for value in values]):.3f}. The best log-likelihood is "
            f"{landscape[best].log_likelihood:.3f}; its mask scores {held_out[0]:.3f} held out.\n"
        )
        rows = []
        for method in chosen.methods:
            runs = [
                model.search(method, ratio, seed, log, budget_per_layer=chosen.budget)
                for seed in model.seeds_of(method, chosen.seeds)
            ]
            places = [standing(run.mask, landscape) for run in runs]
            rows.append([
                method,
                spread([place.score_gap for place in places]),
                spread([place.likelihood_gap for place in places]),
                ", ".join(str(place.score_rank) for place in places),
                ", ".join(str(place.likelihood_rank) for place in places),
                spread([model.held_out_score(run.mask)[0] for run in runs]),
                round(np.median([run.costs["evaluations"] for run in runs])),
            ])  # fmt: skip
        header = (
            "method", "gap of score", "gap of log-likelihood", "rank by score",
            "rank by log-likelihood", "held-out score", "evaluations",
        )  # fmt: skip
        print(table(header, rows), flush=True)


if __name__ == "__main__":
    main()
