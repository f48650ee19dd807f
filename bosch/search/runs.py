"""Runs a method by its name on any scorer, for the search stage, comparisons and studies."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from bosch.budget import check_granularity
from bosch.errors import RunError, UserError
from bosch.masks import HeadMask
from bosch.model.search_mode import mask_shape
from bosch.rankings.ranking import Ranked, rank_units
from bosch.score.calibration import CalibrationSet
from bosch.score.evaluation_log import EvaluationContext, EvaluationLog
from bosch.score.objective import Objective, remedy
from bosch.search.bosch import SearchResult
from bosch.search.evaluator import SHARES, Evaluator, Scorer
from bosch.search.loss import Anchors
from bosch.search.methods import METHODS, Method
from bosch.search.settings import SearchSettings
from bosch.search.trace import TracePoint
from bosch.units import Units

if TYPE_CHECKING:
    from transformers import PreTrainedModel

logger = logging.getLogger(__name__)

Bits = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class MethodRun:
    """Result, trace, costs and notes of one run of a method.

    `costs`: those of `Evaluator.costs`, `solver_seconds` (time outside the model) and
    `earlier_seconds` (the part of `model_seconds` that earlier attempts spent).
    """

    result: SearchResult
    trace: list[TracePoint]
    costs: dict[str, float]
    notes: list[str] = field(default_factory=list)

    @property
    def mask(self) -> HeadMask:
        """The head mask, exactly on budget."""
        return self.result.mask


def run_method(
    name: str,
    scorer: Scorer,
    settings: SearchSettings,
    *,
    log: EvaluationLog | None = None,
) -> MethodRun:
    """Run a method of `METHODS`; the mask has exactly ceil(rho N) sliding units.

    Masks in `log` are not evaluated again. Raises UserError when the name is unknown, when a static
    ranking gets a scorer without a model, when the budget is too small for one gradient of a search
    with gradients, or when all masks score the same.
    """
    if log is None:
        context = getattr(scorer, "context", EvaluationContext("", "", [], 0))
        log = EvaluationLog(None, context)
    evaluator = Evaluator(scorer, log)
    started = time.perf_counter()
    result = find_mask(name, evaluator, settings)
    costs = evaluator.costs()
    seconds = time.perf_counter() - started
    costs["solver_seconds"] = max(0.0, seconds - evaluator.fresh_seconds)
    costs["earlier_seconds"] = max(0.0, costs["model_seconds"] - evaluator.fresh_seconds)
    return MethodRun(result, evaluator.trace, costs, evaluator.notes)


def find_mask(name: str, evaluator: Evaluator, settings: SearchSettings) -> SearchResult:
    """`run_method` with the caller's evaluator, which stays usable after an interrupted search.

    A method's function takes (evaluator, settings) for a search or an ablation, (scorer, settings)
    for a file, (L, H, rho) for a layer rule, and (model, calibration set, W) for a ranking, the
    last two with the settings in `Method.settings` as keywords.
    """
    method = METHODS.get(name)
    if method is None:
        raise UserError(f"method '{name}' is unknown: choose one of {', '.join(METHODS)}")
    scorer = evaluator.scorer
    check_granularity(
        scorer.num_layers, scorer.num_key_value_heads, settings.swa_ratio, settings.head_granularity
    )
    if settings.head_granularity > 1 and not (method.reads_attention or method.kind == "file"):
        evaluator.units = _units(evaluator, settings.head_granularity, method.gradients)
    if method.kind in ("search", "ablation"):
        return method.load()(evaluator, settings)
    anchors = evaluator.anchors(settings.swa_ratio)
    if method.kind == "ranking":
        mask = _ranked(name, evaluator, settings)
    elif method.kind == "file":
        mask = method.load()(scorer, settings)
    else:
        shape, ratio = evaluator.shape, settings.swa_ratio
        mask = evaluator.mask(method.load()(*shape, ratio, **_read_settings(method, settings)))
    return _measured(evaluator, mask, anchors)


def _measured(evaluator: Evaluator, mask: HeadMask, anchors: Anchors) -> SearchResult:
    """Result of a method that does not search: its mask, even where an anchor scores higher."""
    evaluation = evaluator.evaluate(mask, "final", "final mask")
    return SearchResult(evaluator.units.head_mask(mask), evaluation, anchors, evaluation)


def _units(evaluator: Evaluator, granularity: int, by_gradient: bool) -> Units:
    """Units of heads: neighbours, or heads of similar gradient at the original model."""
    full = HeadMask.all_full(*evaluator.shape)
    if by_gradient:
        return Units.by_value(evaluator.window_values(full, 0, SHARES)[..., 0], granularity)
    return Units.of_neighbours(*evaluator.shape, granularity)


def static_mask(
    name: str,
    model: PreTrainedModel,
    calibration: CalibrationSet,
    window_size: int,
    settings: SearchSettings,
) -> Ranked:
    """Rank the heads by a static ranking: the ceil(rho N) most local KV groups become sliding.

    `model` has full attention and does not change. UserError for an unsupported family, RunError
    for numbers not finite, ValueError for a granularity that does not divide a layer's KV heads.
    """
    method = METHODS[name]
    scores = method.load()(model, calibration, window_size, **_read_settings(method, settings))
    _, heads = mask_shape(model.config)
    if not np.isfinite(scores).all():
        raise RunError(f"{name} gives scores that are not finite: {remedy(model)}")
    granularity = settings.head_granularity
    return rank_units(scores, heads, settings.swa_ratio, method.most_local, granularity)


def _read_settings(method: Method, settings: SearchSettings) -> dict[str, Any]:
    return {name: getattr(settings, name) for name in method.settings}


def _ranked(name: str, evaluator: Evaluator, settings: SearchSettings) -> HeadMask:
    """Mask of a static ranking; notes ties at the budget, and sinks that the ranking ignored."""
    objective, started = _objective(name, evaluator), time.perf_counter()
    # All ranks use the first one's ranking: another device may round differently.
    ranked = objective.ranks.from_first(
        static_mask(name, objective.model, objective.calibration, objective.window.size, settings)
    )
    logger.info("%s ranked all heads in %.1f s", name, time.perf_counter() - started)
    evaluator.ranking_passes = METHODS[name].passes(len(objective.calibration))
    if ranked.tied:
        evaluator.note(
            f"{name} gave {ranked.tied} units the same score at the border of the budget: "
            "those of lower index became sliding"
        )
    if objective.window.sinks:
        evaluator.note(f"{name} ranked the heads by the window alone, without the sinks")
    return HeadMask.of(ranked.is_full, objective.window)


def _objective(name: str, evaluator: Evaluator) -> Objective:
    """The scorer, with its model and examples; raises UserError where it is no `Objective`."""
    if not isinstance(evaluator.scorer, Objective):
        raise UserError(
            f"method '{name}' reads the attention of a model on a calibration set: pass an "
            "Objective, or choose a method that asks for scores only"
        )
    return evaluator.scorer
