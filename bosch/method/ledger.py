"""The book of one search: every evaluation it asked for, what it cost and what it found."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Literal, Protocol

from bosch.errors import RunError
from bosch.evaluation_log import Evaluation, EvaluationLog, GateGradient
from bosch.heads import HeadMask
from bosch.loss import Anchors
from bosch.progress import Progress

logger = logging.getLogger(__name__)

StageName = Literal[
    "anchors", "layer_importance", "head_selection", "repair", "start", "swaps", "final"
]
CanWin = Callable[[float, float], bool]


class Scorer(Protocol):
    """What measures a mask: a model on a calibration set, or a function in a test."""

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
    """One evaluation in the order of the search; `best_score` is the best within its unit.

    Where `is_bound` is set the evaluation ended early, and score and log-likelihood are bounds.
    """

    stage: StageName
    step: int
    unit: str
    score: float
    log_likelihood: float
    best_score: float
    mask: str
    is_bound: bool = False


class Ledger:
    """Evaluates masks through the log, and keeps the trace and the notes of the search.

    `target`, where set, is the number of sliding units of a finished mask. `fresh_seconds` is what
    the scorer took in this process, evaluations remembered from an earlier one left out. `watch`,
    where set, is called after each evaluation.
    """

    def __init__(
        self, scorer: Scorer, log: EvaluationLog, progress: Progress | None = None
    ) -> None:
        self.scorer, self.log = scorer, log
        self.trace: list[TracePoint] = []
        self.notes: list[str] = []
        self._progress = progress
        self._used: dict[str, Evaluation] = {}
        self._reused: set[str] = set()
        self._gradients: dict[tuple[str, str], GateGradient] = {}
        self._best_in_unit: dict[tuple[str, str], float] = {}
        self._best_on_budget: tuple[float, float, HeadMask] | None = None
        self.target: int | None = None
        self.fresh_seconds = 0.0
        self._naive = 0.0
        self.watch: Callable[[Ledger], None] | None = None

    def evaluate(
        self,
        mask: HeadMask,
        stage: StageName,
        unit: str,
        shared_layers: int = 0,
        can_win: CanWin | None = None,
    ) -> Evaluation:
        """S(z) of `mask`, by the model only if no search has measured it before.

        With `can_win`, which the scorer must then understand, it may end early with bounds.
        """
        evaluation = self.log.recall(mask, stage)
        if evaluation is None and can_win is not None:
            bound = self.log.bound(mask)
            if bound is not None and not can_win(bound.score, bound.log_likelihood):
                evaluation = bound
        free = evaluation is not None
        if evaluation is None:
            scorer: Any = self.scorer
            options = {} if can_win is None else {"can_win": can_win}
            evaluation = scorer.evaluate(mask, shared_layers, **options)
            if not math.isfinite(evaluation.score + evaluation.log_likelihood):
                raise RunError(
                    f"head mask {mask.key} scored {evaluation.score} with log-likelihood "
                    f"{evaluation.log_likelihood}: no search can go by numbers that are not finite"
                )
            self.fresh_seconds += evaluation.seconds
            self.log.append(mask, evaluation, stage)
        known = mask.key in self._used
        self._used[mask.key + "<" * evaluation.is_bound] = evaluation
        if self.log.reused(mask):
            self._reused.add(mask.key)
        if not (known and stage == "final"):
            self._record(mask, evaluation, stage, unit, free)
        return evaluation

    def gate_gradient(self, mask: HeadMask, share: int, shares: int) -> GateGradient:
        """Gradient [L, H] at `mask`, by the model only if this search does not know it."""
        name = f"{share}/{shares}"
        found = self.log.gradient(mask, name)
        if found is None:
            scorer: Any = self.scorer
            found = scorer.gate_gradient(mask, share, shares)
            self.fresh_seconds += found.seconds
            self.log.append_gradient(mask, name, found)
        self._gradients[mask.key, name] = found
        return found

    def anchors(self) -> Anchors:
        """S(all sliding) and S(all full), the anchors of Eq. 2."""
        shape = self.scorer.num_layers, self.scorer.num_key_value_heads
        sliding = self.evaluate(HeadMask.all_sliding(*shape), "anchors", "all sliding")
        full = self.evaluate(HeadMask.all_full(*shape), "anchors", "all full")
        logger.info("anchors: all sliding %.4f, all full %.4f", sliding.score, full.score)
        return Anchors(sliding.score, full.score)

    def note(self, text: str) -> None:
        """Something the reader of the result must know; goes to the log and the summary."""
        logger.warning("%s", text)
        self.notes.append(text)

    @property
    def best_on_budget(self) -> tuple[HeadMask, float, float] | None:
        """Mask, score and log-likelihood of the best mask so far that meets the target."""
        if self._best_on_budget is None:
            return None
        score, log_likelihood, mask = self._best_on_budget
        return mask, score, log_likelihood

    def costs(self) -> dict[str, float]:
        """Evaluations of this search and what they cost, in the terms of `search/summary.json`.

        Seconds and full-forward equivalents are those of the masks this search had to measure, in
        all its attempts. What other searches had paid for is counted apart, at what it cost them.
        `naive_full_forward_equivalents` counts a pass without savings for every evaluation a
        sub-problem asked for, repeated masks of different sub-problems included.
        """
        paid = [e for key, e in self._used.items() if key not in self._reused]
        reused = [self._used[key] for key in self._reused]
        work: list[Evaluation | GateGradient] = [*paid, *self._gradients.values()]
        return {
            "evaluations": len({key.rstrip("<") for key in self._used}),
            "reused_evaluations": len(reused),
            "gradients": len(self._gradients),
            "model_seconds": sum(e.seconds for e in work),
            "full_forward_equivalents": sum(e.full_forward_equivalents for e in work),
            "reused_full_forward_equivalents": sum(e.full_forward_equivalents for e in reused),
            "naive_full_forward_equivalents": self._naive
            + sum(g.full_forward_equivalents for g in self._gradients.values()),
        }

    def trace_records(self) -> list[dict[str, object]]:
        """The trace as JSON-able records."""
        return [asdict(point) for point in self.trace]

    def _record(
        self, mask: HeadMask, evaluation: Evaluation, stage: StageName, unit: str, free: bool
    ) -> None:
        lowest = 0.0 if evaluation.is_bound else evaluation.score
        best = max(lowest, self._best_in_unit.get((stage, unit), lowest))
        self._best_in_unit[stage, unit] = best
        self._naive += evaluation.whole_pass_equivalents
        point = TracePoint(
            stage=stage,
            step=len(self.trace) + 1,
            unit=unit,
            score=evaluation.score,
            log_likelihood=evaluation.log_likelihood,
            best_score=best,
            mask=mask.key,
            is_bound=evaluation.is_bound,
        )
        self.trace.append(point)
        if int((~mask.is_full).sum()) == self.target and not evaluation.is_bound:
            candidate = (evaluation.score, evaluation.log_likelihood, mask)
            if self._best_on_budget is None or candidate[:2] > self._best_on_budget[:2]:
                self._best_on_budget = candidate
        if self._progress is not None:
            self._progress.update(1, self._news(unit, best), free=free)
        if self.watch is not None:
            self.watch(self)
        logger.debug(
            "%s, %s, evaluation %d: score %.4f, log-likelihood %.4f, best %.4f",
            stage, unit, point.step, point.score, point.log_likelihood, best,
        )  # fmt: skip

    def _news(self, unit: str, best: float) -> str:
        """What is shown behind the counter of evaluations."""
        news = f"{unit}: best score {best:.3f}"
        if self._best_on_budget is not None:
            news += f", on budget {self._best_on_budget[0]:.3f}"
        return f"{news}, {len(self._reused)} reused" if self._reused else news
