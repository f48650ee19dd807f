"""Any method by its name, on any scorer: what the search stage, comparisons and studies call."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from bosch.baselines import layer_rules
from bosch.baselines.static import STATIC_RANKINGS, StaticName, static_mask
from bosch.errors import UserError
from bosch.evaluation_log import EvaluationContext, EvaluationLog
from bosch.heads import HeadMask, swa_budget
from bosch.method.ablations import b_layer, b_multi, b_single
from bosch.method.bosch import SearchResult, bosch, finished
from bosch.method.ledger import Ledger, Scorer, TracePoint
from bosch.method.plus import bosch_plus, evaluations_of_plus
from bosch.method.settings import SearchSettings
from bosch.objective import Objective
from bosch.progress import Progress

logger = logging.getLogger(__name__)

Search = Callable[[Ledger, SearchSettings], SearchResult]

SEARCHES: dict[str, Search] = {
    "bosch": bosch,
    "bosch_plus": bosch_plus,
    "b_single": b_single,
    "b_multi": b_multi,
    "b_layer": b_layer,
}
LAYER_RULES = ("rand", "bme", "intr")
METHODS = (*SEARCHES, *LAYER_RULES, *STATIC_RANKINGS)


@dataclass(frozen=True)
class MethodRun:
    """What one method found, what it looked at on the way and what that cost.

    `costs` are those of `Ledger.costs`, with `solver_seconds`: time outside the model.
    """

    result: SearchResult
    trace: list[TracePoint]
    costs: dict[str, float]
    notes: list[str] = field(default_factory=list)

    @property
    def mask(self) -> HeadMask:
        """The mask found, exactly on budget."""
        return self.result.mask


def run_method(
    name: str,
    scorer: Scorer,
    settings: SearchSettings,
    *,
    swa_ratio: float | None = None,
    seed: int | None = None,
    log: EvaluationLog | None = None,
    progress: Progress | None = None,
) -> MethodRun:
    """Run one method of `METHODS`; the mask has exactly ceil(rho N) sliding units.

    `swa_ratio` and `seed` replace those of `settings`. Evaluations that `log` knows cost nothing;
    without one the run remembers its own only. Static rankings need a scorer with a model.
    Raises UserError when the name is unknown or the calibration set tells no mask from another.
    """
    if swa_ratio is not None:
        settings = replace(settings, swa_ratio=swa_ratio)
    if seed is not None:
        settings = replace(settings, seed=seed)
    if log is None:
        context = getattr(scorer, "context", EvaluationContext("", "", 1, 0))
        log = EvaluationLog(None, context)
    ledger = Ledger(scorer, log, progress)
    started = time.perf_counter()
    result = find_mask(name, ledger, settings)
    costs = ledger.costs()
    seconds = time.perf_counter() - started
    costs["solver_seconds"] = max(0.0, seconds - ledger.fresh_seconds)
    return MethodRun(result, ledger.trace, costs, ledger.notes)


def find_mask(name: str, ledger: Ledger, settings: SearchSettings) -> SearchResult:
    """As `run_method`, with a ledger that the caller keeps, also when the search is stopped."""
    shape = ledger.scorer.num_layers, ledger.scorer.num_key_value_heads
    ledger.target = swa_budget(shape[0] * shape[1], settings.swa_ratio)
    if name in SEARCHES:
        return SEARCHES[name](ledger, settings)
    if name not in METHODS:
        raise UserError(f"method '{name}' is unknown: choose one of {', '.join(METHODS)}")
    anchors = ledger.anchors()
    if name in STATIC_RANKINGS:
        mask = _ranked(name, ledger, settings)
        return finished(ledger, settings, mask, anchors)
    return finished(ledger, settings, _rule(name, shape, settings), anchors)


def _ranked(name: StaticName, ledger: Ledger, settings: SearchSettings) -> HeadMask:
    """Mask of a static ranking, with notes on what its reader must know."""
    objective: Any = ledger.scorer
    assert isinstance(objective, Objective)
    started = time.perf_counter()
    # Every rank goes by the first one's ranking: rounding on another device could differ.
    ranked = objective.ranks.from_first(
        static_mask(
            name,
            objective.model,
            objective.calibration,
            objective.window_size,
            settings.swa_ratio,
            settings.seed,
        )
    )
    logger.info("%s ranked all heads in %.1f s", name, time.perf_counter() - started)
    if ranked.tied:
        ledger.note(
            f"{name} gave {ranked.tied} units the same score at the border of the budget: "
            "those of lower index became sliding"
        )
    if objective.sinks:
        ledger.note(f"{name} ranked the heads by the window alone, without the sinks")
    return ranked.mask


def _rule(name: str, shape: tuple[int, int], settings: SearchSettings) -> HeadMask:
    if name == "rand":
        return layer_rules.rand(*shape, settings.swa_ratio, settings.seed)
    if name == "bme":
        return layer_rules.bme(*shape, settings.swa_ratio)
    return layer_rules.intr(*shape, settings.swa_ratio)


def most_evaluations(name: str, settings: SearchSettings, num_layers: int) -> int:
    """Upper bound of the evaluations of a method, for its progress."""
    if name not in SEARCHES:
        return 3
    if name == "bosch_plus":
        return 3 + evaluations_of_plus(settings, num_layers)
    stages = 2 if name == "bosch" else 1
    return 3 + stages * num_layers * settings.budget_per_layer
