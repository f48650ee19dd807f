"""Memoised S(z) for one search, with the trace of its evaluations, their costs and its notes."""

from __future__ import annotations

import inspect
import logging
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, Protocol

import numpy as np

from bosch.budget import swa_budget
from bosch.errors import RunError
from bosch.heads import HeadMask
from bosch.objective.evaluation_log import Evaluation, EvaluationLog, GateGradient
from bosch.progress import Progress
from bosch.search.loss import Anchors
from bosch.units import Units

logger = logging.getLogger(__name__)

Phase = Literal[
    "anchors", "layer_importance", "head_selection", "repair", "ablation", "start", "swaps", "final"
]
CanWin = Callable[[float, float], bool]

# Equal shares of the calibration examples that gradients are taken over, one after another.
SHARES = 8


class Scorer(Protocol):
    """Measures a mask: a model on a calibration set, or a function in a test."""

    @property
    def num_layers(self) -> int: ...

    @property
    def num_key_value_heads(self) -> int: ...

    @property
    def quantum(self) -> float:
        """Smallest difference of two scores that are not equal."""

    def evaluate(self, mask: HeadMask, shared_layers: int = 0) -> Evaluation:
        """S(z); the masks that follow will agree with this one below layer `shared_layers`."""


class GradientScorer(Scorer, Protocol):
    """A scorer that can end a losing evaluation early, and knows what each unit is worth."""

    def evaluate(
        self, mask: HeadMask, shared_layers: int = 0, *, can_win: CanWin | None = None
    ) -> Evaluation:
        """As `Scorer.evaluate`; bounds as soon as `can_win(score, log_likelihood)` is False."""

    def gate_gradient(self, mask: HeadMask, share: int = 0, shares: int = 1) -> GateGradient:
        """Gradient at `mask` over one of `shares` equal shares of the examples."""


@dataclass(frozen=True)
class TracePoint:
    """One evaluation in the order of the search; `best_score` is the best within its sub-problem.

    Where `is_bound` is set the evaluation ended early, and score and log-likelihood are bounds.
    """

    phase: Phase
    step: int
    subproblem: str
    score: float
    log_likelihood: float
    best_score: float
    mask: str
    is_bound: bool = False


class Evaluator:
    """Evaluates masks, each once: the log holds the results of this search and of earlier ones.

    Methods give masks of `units`, by default single heads; log, trace and `best_on_budget` hold
    masks of heads. It counts what the search costs and collects its trace and notes. `target` is
    the number of sliding heads of a mask on budget, once the anchors are measured; `best_on_budget`
    the best such mask so far with its evaluation. `fresh_seconds` is the time the scorer took in
    this process. `watch`, where set, is called after each evaluation.
    """

    def __init__(
        self, scorer: Scorer, log: EvaluationLog, progress: Progress | None = None
    ) -> None:
        self.scorer, self.log = scorer, log
        self.units = Units.of_neighbours(scorer.num_layers, scorer.num_key_value_heads)
        self.trace: list[TracePoint] = []
        self.notes: list[str] = []
        self._can_race = "can_win" in inspect.signature(scorer.evaluate).parameters
        self._progress = progress
        self._evaluations: dict[str, Evaluation] = {}
        self._reused: set[str] = set()
        self._gradients: dict[tuple[str, str], GateGradient] = {}
        self._best_in_subproblem: dict[tuple[str, str], float] = {}
        self.best_on_budget: tuple[HeadMask, Evaluation] | None = None
        self.target = -1
        self.fresh_seconds = 0.0
        self._naive = 0.0
        self.watch: Callable[[Evaluator], None] | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """Layers and units of each: the shape of masks that methods give."""
        return self.units.shape

    def evaluate(
        self,
        mask: HeadMask,
        phase: Phase,
        subproblem: str,
        shared_layers: int = 0,
        can_win: CanWin | None = None,
    ) -> Evaluation:
        """S(z) of a mask of units; runs the model only where the log does not hold the result.

        With `can_win` it may end early with bounds, where the scorer can.
        """
        mask = self.units.head_mask(mask)
        evaluation = self.log.recall(mask, phase)
        if evaluation is None and can_win is not None:
            bound = self.log.bound(mask)
            if bound is not None and not can_win(bound.score, bound.log_likelihood):
                evaluation = bound
        free = evaluation is not None
        if evaluation is None:
            scorer: Any = self.scorer
            options = {"can_win": can_win} if can_win is not None and self._can_race else {}
            evaluation = scorer.evaluate(mask, shared_layers, **options)
            if not math.isfinite(evaluation.score + evaluation.log_likelihood):
                raise RunError(
                    f"head mask {mask.key} scored {evaluation.score} with log-likelihood "
                    f"{evaluation.log_likelihood}: no search can go by numbers that are not finite"
                )
            self.fresh_seconds += evaluation.seconds
            self.log.append(mask, evaluation, phase)
        repeated = mask.key in self._evaluations
        self._evaluations[mask.key + "<" * evaluation.is_bound] = evaluation
        if self.log.reused(mask):
            self._reused.add(mask.key)
        if not (repeated and phase == "final"):
            self._record(mask, evaluation, phase, subproblem, free)
        return evaluation

    @property
    def has_gradients(self) -> bool:
        """Whether the scorer knows gradients of gates."""
        return hasattr(self.scorer, "gate_gradient")

    def gate_gradient(self, mask: HeadMask, share: int, shares: int) -> GateGradient:
        """Gradient by unit at a mask of units; runs the model only where the log lacks it."""
        mask, name = self.units.head_mask(mask), f"{share}/{shares}"
        gradient = self.log.gradient(mask, name)
        if gradient is None:
            scorer: Any = self.scorer
            gradient = scorer.gate_gradient(mask, share, shares)
            self.fresh_seconds += gradient.seconds
            self.log.append_gradient(mask, name, gradient)
        self._gradients[mask.key, name] = gradient
        by_unit = self.units.of_heads(np.array(gradient.values, dtype=np.float64))
        return replace(gradient, values=by_unit.sum(axis=2).tolist())

    @property
    def gradient_passes(self) -> float:
        """Full passes that all gradients of this search cost."""
        return sum(g.full_forward_equivalents for g in self._gradients.values())

    def anchors(self, swa_ratio: float) -> Anchors:
        """S(all sliding) and S(all full), the anchors of Eq. 2; `swa_ratio` sets the target."""
        self.target = swa_budget(self.units.heads.size, swa_ratio)
        sliding = self.evaluate(HeadMask.all_sliding(*self.shape), "anchors", "all sliding")
        full = self.evaluate(HeadMask.all_full(*self.shape), "anchors", "all full")
        logger.info("anchors: all sliding %.4f, all full %.4f", sliding.score, full.score)
        return Anchors(sliding.score, full.score)

    def note(self, text: str) -> None:
        """Something the reader of the result must know; goes to the log and the summary."""
        logger.warning("%s", text)
        self.notes.append(text)

    def costs(self) -> dict[str, float]:
        """Evaluations of this search and what they cost, in the terms of `search/summary.json`.

        Seconds and full-forward equivalents are those of the masks this search measured itself, in
        all its attempts. Results reused from other searches are counted apart, at what they
        cost there. `naive_full_forward_equivalents` counts one full pass for every evaluation in
        the trace, repeated masks of different sub-problems included.
        """
        paid = [e for key, e in self._evaluations.items() if key not in self._reused]
        reused = [self._evaluations[key] for key in self._reused]
        work: list[Evaluation | GateGradient] = [*paid, *self._gradients.values()]
        return {
            "evaluations": len({key.rstrip("<") for key in self._evaluations}),
            "reused_evaluations": len(reused),
            "gradients": len(self._gradients),
            "model_seconds": sum(e.seconds for e in work),
            "full_forward_equivalents": sum(e.full_forward_equivalents for e in work),
            "reused_full_forward_equivalents": sum(e.full_forward_equivalents for e in reused),
            "naive_full_forward_equivalents": self._naive + self.gradient_passes,
        }

    def trace_records(self) -> list[dict[str, object]]:
        """The trace as JSON-able records."""
        return [asdict(point) for point in self.trace]

    def _record(
        self, mask: HeadMask, evaluation: Evaluation, phase: Phase, subproblem: str, free: bool
    ) -> None:
        lowest = 0.0 if evaluation.is_bound else evaluation.score
        best = max(lowest, self._best_in_subproblem.get((phase, subproblem), lowest))
        self._best_in_subproblem[phase, subproblem] = best
        self._naive += evaluation.whole_pass_equivalents
        point = TracePoint(
            phase=phase,
            step=len(self.trace) + 1,
            subproblem=subproblem,
            score=evaluation.score,
            log_likelihood=evaluation.log_likelihood,
            best_score=best,
            mask=mask.key,
            is_bound=evaluation.is_bound,
        )
        self.trace.append(point)
        if mask.num_sliding == self.target and not evaluation.is_bound:
            best_so_far = self.best_on_budget
            if best_so_far is None or evaluation.rank > best_so_far[1].rank:
                self.best_on_budget = mask, evaluation
        if self._progress is not None:
            self._progress.update(1, self._status(subproblem, best), free=free)
        if self.watch is not None:
            self.watch(self)
        logger.debug(
            "%s, %s, evaluation %d: score %.4f, log-likelihood %.4f, best %.4f",
            phase, subproblem, point.step, point.score, point.log_likelihood, best,
        )  # fmt: skip

    def _status(self, subproblem: str, best: float) -> str:
        """Text behind the counter of evaluations."""
        status = f"{subproblem}: best score {best:.3f}"
        if self.best_on_budget is not None:
            status += f", on budget {self.best_on_budget[1].score:.3f}"
        return f"{status}, {len(self._reused)} reused" if self._reused else status
