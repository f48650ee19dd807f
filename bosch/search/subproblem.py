"""Search some units of a mask jointly while the others stay fixed."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from bosch.masks import HeadMask
from bosch.score.evaluation_log import Evaluation
from bosch.search.evaluator import Evaluator
from bosch.search.loss import Loss
from bosch.search.settings import SearchSettings
from bosch.search.solvers import Problem, solve
from bosch.search.solvers.problem import Bits

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class SubProblem:
    """Which `quota` units of `layers` should slide; the other layers of `base` are fixed.

    A unit is a KV head, or with `whole_layers` a layer. Its evaluations have `phase` and `name`.
    """

    base: HeadMask
    layers: Sequence[int]
    quota: int
    phase: str
    name: str
    whole_layers: bool = False


@dataclass(frozen=True)
class Solution:
    """Best mask of a sub-problem; `plateau` is the score if all masks have it, else empty."""

    mask: HeadMask
    evaluation: Evaluation
    plateau: str


def optimise_layers(
    evaluator: Evaluator, settings: SearchSettings, loss: Loss | None, subproblem: SubProblem
) -> Solution:
    """Solve a sub-problem with at most kappa evaluations per layer, by a `loss` where given."""
    base, phase, name = subproblem.base, subproblem.phase, subproblem.name
    rows, quota = sorted(subproblem.layers), subproblem.quota
    units = 1 if subproblem.whole_layers else base.shape[1]

    def with_bits(bits: Bits) -> HeadMask:
        is_full = base.is_full
        is_full[rows] = ~bits.reshape(len(rows), units)
        return evaluator.mask(is_full)

    def measure(bits: Bits) -> Evaluation:
        return evaluator.evaluate(with_bits(bits), phase, name)

    problem = Problem(
        size=len(rows) * units, quota=quota, budget=settings.budget_per_layer * len(rows),
        measure=measure, loss=loss, quantum=evaluator.scorer.quantum,
    )  # fmt: skip
    phase_number = ("layer_importance", "head_selection").index(phase)
    # The seed does not depend on earlier sub-problems.
    seed = np.random.SeedSequence([settings.seed, phase_number, *rows]).generate_state(1)[0]
    candidate = solve(problem, settings.solver, int(seed))
    unit_name = "layers" if subproblem.whole_layers else "KV heads"
    message = "%s: %d of %d %s sliding, score %.4f, log-likelihood %.4f (%d evaluations)"
    rank, spent = candidate.evaluation.rank, problem.spent
    logger.info(message, name, quota, problem.size, unit_name, *rank, spent)
    plateau = ""
    if problem.on_plateau:
        plateau = f"scored {candidate.evaluation.score:.4g}"
    return Solution(with_bits(candidate.bits), candidate.evaluation, plateau)


def restore_units(
    evaluator: Evaluator,
    settings: SearchSettings,
    mask: HeadMask,
    layers: Sequence[int],
    surplus: int,
) -> HeadMask:
    """Make `surplus` sliding units full, one per layer of `layers` in turn: the best by score."""

    def rank(mask: HeadMask) -> tuple[float, float]:
        result = evaluator.evaluate(mask, "repair", f"layer {layer}")
        return settings.sort_key(*result.rank)

    while surplus > 0:
        for layer in layers:
            sliding = np.flatnonzero(mask.windows[layer])
            if surplus == 0 or not len(sliding):
                continue
            candidates = []
            for head in sliding:
                is_full = mask.is_full
                is_full[layer, head] = True
                candidates.append(evaluator.mask(is_full))
            mask = max(candidates, key=rank)
            surplus -= 1
    return mask
