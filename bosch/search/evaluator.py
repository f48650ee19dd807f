"""Memoised S(z) for one search, with its trace, costs and notes."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from bosch.budget import swa_budget
from bosch.errors import RunError
from bosch.masks import HeadMask
from bosch.progress import Progress
from bosch.score.evaluation_log import Evaluation, EvaluationLog, GateGradient
from bosch.search.loss import Anchors
from bosch.search.trace import TracePoint, subproblem_key
from bosch.units import Units
from bosch.window import Window, window_menu

logger = logging.getLogger(__name__)

Values = npt.NDArray[np.float64]

# A gradient is taken over one of this many equal parts of the calibration examples, in turn.
SHARES = 8


class Scorer(Protocol):
    """Measures a mask: a model on a calibration set, or a function in a test.

    Optional methods, as `Objective` has them: `window_gradient`, with the arguments of
    `gate_gradient`, for gradients of several `windows`; `mask_passes(mask)`, the cost of an
    evaluation; and for a front `evaluate_held_out(mask)`, `held_out_examples`, `held_out_passes`.
    """

    @property
    def num_layers(self) -> int: ...

    @property
    def num_key_value_heads(self) -> int: ...

    @property
    def quantum(self) -> float:
        """Smallest difference between two different scores."""

    def evaluate(self, mask: HeadMask) -> Evaluation:
        """S(z)."""

    def gate_gradient(self, mask: HeadMask, share: int = 0, shares: int = 1) -> GateGradient:
        """Gradient of the log-likelihood by gate, over part `share` of `shares` of the examples."""

    def gradient_passes(self, share: int, shares: int) -> float:
        """Upper bound of the cost of `gate_gradient`, in full-forward equivalents."""


@dataclass(frozen=True)
class SlotBudgets:
    """Budgets of a search for a front, in KV slots (heads x cached tokens) at `context` tokens.

    `slots` of its points ascend; without any the search chooses them.
    """

    context: int
    slots: tuple[int, ...] = ()


class Evaluator:
    """Evaluates masks; the log holds all results, so no evaluation is repeated.

    Methods pass masks of `units`, by default single heads; log, trace and `best_on_budget` hold
    masks of heads. It also counts costs and collects trace and notes. `budget` is the number of
    sliding units of a mask on budget, known once the anchors are measured; a method with another
    budget sets `on_budget`. `best_on_budget` is the best such mask so far with its evaluation.
    `slot_budgets` are for methods that search a front. `fresh_seconds` is the scorer's time in
    this process; `ranking_passes` are those of a static ranking. `progress` and `watch`, if set,
    are updated and called after each evaluation.
    """

    def __init__(self, scorer: Scorer, log: EvaluationLog) -> None:
        self.scorer, self.log = scorer, log
        self.units = Units.of_neighbours(scorer.num_layers, scorer.num_key_value_heads)
        self.windows = window_menu(getattr(scorer, "windows", Window(1)))  # the widest first
        self.trace: list[TracePoint] = []
        self.notes: list[str] = []
        self._evaluations: dict[str, Evaluation] = {}
        self._gradients: dict[tuple[str, str], GateGradient] = {}
        self._held_out: dict[str, Evaluation] = {}
        self._best_in_subproblem: dict[tuple[str, str], float] = {}
        self.best_on_budget: tuple[HeadMask, Evaluation] | None = None
        self.budget = -1
        self.on_budget: Callable[[HeadMask], bool] = self._has_ratio
        self.slot_budgets: SlotBudgets | None = None
        self.fresh_seconds = 0.0
        self.ranking_passes = 0.0
        self.progress: Progress | None = None
        self.watch: Callable[[Evaluator], None] | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """Layers and units per layer: the shape of the masks that methods pass."""
        return self.units.shape

    def mask(self, is_full: npt.NDArray[np.bool_]) -> HeadMask:
        """Mask of units: full where `is_full`, in any shape, else with the narrowest window."""
        return HeadMask.of(is_full.reshape(self.shape).tolist(), self.windows[-1])

    def evaluate(self, mask: HeadMask, phase: str, subproblem: str) -> Evaluation:
        """S(z) of a mask of units, from the log or the model; RunError if it is not finite."""
        mask = self.units.head_mask(mask)
        repeated = mask.key in self._evaluations
        evaluation = self.log.get(mask)
        free = evaluation is not None
        if evaluation is None:
            evaluation = self.scorer.evaluate(mask)
            if not math.isfinite(evaluation.score + evaluation.log_likelihood):
                raise RunError(
                    f"head mask {mask.key} scored {evaluation.score} with log-likelihood "
                    f"{evaluation.log_likelihood}: a search needs finite numbers"
                )
            self.fresh_seconds += evaluation.seconds
            self.log.append(mask, evaluation, phase)
        self._evaluations[mask.key] = evaluation
        if not (repeated and phase == "final"):  # else the trace has the final mask already
            self._record(mask, evaluation, phase, subproblem, free)
        return evaluation

    def gate_gradient(self, mask: HeadMask, share: int, shares: int) -> GateGradient:
        """Gradient [L, U] by unit at a mask of units; runs the model only where the log lacks it.

        Searches charge its upper bound, so that masks do not depend on the machine's memory.
        """
        name = f"{share}/{shares}"
        gradient = self._gradient(self.scorer.gate_gradient, name, mask, share, shares)
        by_unit = self.units.gather(np.array(gradient.values, dtype=np.float64))
        return replace(gradient, values=by_unit.sum(axis=2).tolist())

    def window_values(self, mask: HeadMask, share: int, shares: int) -> Values:
        """Value of each choice over the narrowest window, [L, U, 1 + windows], by one gradient."""
        if len(self.windows) == 1:
            values = np.array(self.gate_gradient(mask, share, shares).values, dtype=np.float64)
            return np.stack([values, np.zeros_like(values)], axis=2)
        scorer: Any = self.scorer
        name = f"{share}/{shares} windows"
        gradient = self._gradient(scorer.window_gradient, name, mask, share, shares)
        changes = np.moveaxis(np.array(gradient.values, dtype=np.float64), 2, 0)
        by_unit = np.stack([self.units.gather(change).sum(axis=2) for change in changes], axis=2)
        values = by_unit - by_unit[..., -1:]
        return np.asarray(values, dtype=np.float64)

    def _gradient(
        self,
        method: Callable[..., GateGradient],
        name: str,
        mask: HeadMask,
        share: int,
        shares: int,
    ) -> GateGradient:
        mask = self.units.head_mask(mask)
        gradient = self.log.gradient(mask, name)
        if gradient is None:
            gradient = method(mask, share, shares)
            self.fresh_seconds += gradient.seconds
            self.log.append_gradient(mask, name, gradient)
        self._gradients[mask.key, name] = gradient
        return gradient

    @property
    def held_out_examples(self) -> int:
        """Number of examples that the scorer holds out."""
        return int(getattr(self.scorer, "held_out_examples", 0))

    @property
    def held_out_passes(self) -> float:
        """Upper bound of the cost of `evaluate_held_out`, in passes over the search's examples."""
        return float(getattr(self.scorer, "held_out_passes", 0.0))

    def evaluate_held_out(self, mask: HeadMask) -> Evaluation:
        """S(z) on the held-out examples, by the log or the model; not for search or trace."""
        mask = self.units.head_mask(mask)
        evaluation = self.log.held_out(mask)
        if evaluation is None:
            scorer: Any = self.scorer
            evaluation = scorer.evaluate_held_out(mask)
            self.fresh_seconds += evaluation.seconds
            self.log.append_held_out(mask, evaluation)
        self._held_out[mask.key] = evaluation
        return evaluation

    def cost_of_gradient(self, share: int, shares: int) -> float:
        """Upper bound of the cost of a gradient over this share, in full passes."""
        return self.scorer.gradient_passes(share, shares)

    def cost_of_mask(self, mask: HeadMask) -> float:
        """Cost of evaluating a mask of units, in full passes; 1 if the scorer does not count."""
        scorer: Any = self.scorer
        if not hasattr(scorer, "mask_passes"):
            return 1.0
        return float(scorer.mask_passes(self.units.head_mask(mask)))

    @property
    def passes_of_gradients(self) -> float:
        """Cost of all gradients of this search, in full passes."""
        return sum(g.full_forward_equivalents for g in self._gradients.values())

    def anchors(self, swa_ratio: float) -> Anchors:
        """S(all sliding), by the narrowest window, and S(all full), Eq. 2; sets `budget`."""
        layers, units = self.shape
        self.budget = swa_budget(layers * units, swa_ratio)
        all_sliding = HeadMask.all_sliding(*self.shape, self.windows[-1])
        sliding = self.evaluate(all_sliding, "anchors", "all sliding")
        full = self.evaluate(HeadMask.all_full(*self.shape), "anchors", "all full")
        logger.info("anchors: all sliding %.4f, all full %.4f", sliding.score, full.score)
        return Anchors(sliding.score, full.score)

    def note(self, text: str) -> None:
        """Add a note for the reader of the result; it goes to the log and the summary."""
        logger.warning("%s", text)
        self.notes.append(text)

    def costs(self) -> dict[str, float]:
        """Evaluations of this search and their costs, by the fields of `search/summary.json`.

        `evaluations` counts masks. Seconds and full-forward equivalents sum all passes of this
        search in all its attempts.
        """
        work: list[Evaluation | GateGradient] = [
            *self._evaluations.values(), *self._gradients.values(), *self._held_out.values(),
        ]  # fmt: skip
        return {
            "evaluations": len(self._evaluations),
            "gradients": len(self._gradients),
            "model_seconds": sum(e.seconds for e in work),
            "full_forward_equivalents": self.ranking_passes
            + sum(e.full_forward_equivalents for e in work),
        }

    def _record(
        self, mask: HeadMask, evaluation: Evaluation, phase: str, subproblem: str, free: bool
    ) -> None:
        search = subproblem_key(phase, subproblem)
        best = self._best_in_subproblem.get(search)
        if best is None or evaluation.score > best:
            best = self._best_in_subproblem[search] = evaluation.score
        point = TracePoint(phase, len(self.trace) + 1, subproblem, *evaluation.rank, best, mask.key)
        self.trace.append(point)
        if self.on_budget(mask):
            best_so_far = self.best_on_budget
            if best_so_far is None or evaluation.rank > best_so_far[1].rank:
                self.best_on_budget = mask, evaluation
        if self.progress is not None:
            self.progress.update(1, self._status(subproblem, best), free=free)
        if self.watch is not None:
            self.watch(self)
        message = "%s, %s, evaluation %d: score %.4f, log-likelihood %.4f, best %s"
        logger.debug(message, phase, subproblem, point.step, *evaluation.rank, best)

    def _has_ratio(self, mask: HeadMask) -> bool:
        return mask.num_sliding == self.budget * int(self.units.heads.shape[2])

    def _status(self, subproblem: str, best: float) -> str:
        """Text that follows the evaluation count on the progress bar."""
        status = f"{subproblem}: best score {best:.3f}"
        if self.best_on_budget is not None:
            status += f", on budget {self.best_on_budget[1].score:.3f}"
        return status
