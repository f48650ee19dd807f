"""A sub-problem as a solver sees it: n bits, a quota of ones, a budget of evaluations.

Bits are True for sliding units. It counts evaluations, returns known results again, and for a
candidate off its quota that cannot beat the best a lower bound of the loss.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from bosch.score.evaluation_log import Evaluation
from bosch.search.loss import Loss

logger = logging.getLogger(__name__)

Bits = npt.NDArray[np.bool_]


class BudgetSpent(Exception):
    """No evaluation is left."""


class Value(NamedTuple):
    """The value to minimise: -score, then -log-likelihood; or the loss of Eq. 5 alone."""

    loss: float
    tie: float = 0.0


@dataclass(frozen=True)
class Candidate:
    """A choice of sliding units with its evaluation."""

    bits: Bits
    value: Value
    evaluation: Evaluation


class Problem:
    """Choose `quota` of `size` units with at most `budget` calls of `measure`.

    `loss` is that of Eq. 5, for searches with `strict`. Without it all candidates must be on the
    quota, and the log-likelihood decides between equal scores, which differ by `quantum` or more.
    """

    def __init__(
        self,
        size: int,
        quota: int,
        budget: int,
        measure: Callable[[Bits], Evaluation],
        loss: Loss | None = None,
        quantum: float = 0.0,
    ) -> None:
        self.size, self.quota, self.budget = size, quota, budget
        self.loss, self.quantum = loss, quantum
        self.spent = 0
        self.best: Candidate | None = None
        self._measure = measure
        self._values: dict[bytes, Value] = {}
        self._lowest_off_budget = float("inf")
        self._scores: set[float] = set()

    @property
    def left(self) -> int:
        """Number of evaluations left."""
        return self.budget - self.spent

    @property
    def on_plateau(self) -> bool:
        """Whether every candidate on budget had the same score."""
        return self.spent > 1 and len(self._scores) <= 1

    def known(self, bits: Bits) -> bool:
        """Whether the value of `bits` is known."""
        return bits.tobytes() in self._values

    def value(self, bits: Bits) -> Value:
        """Loss of `bits`, measured at most once; raises BudgetSpent when no evaluation is left."""
        key = bits.tobytes()
        if key in self._values:
            return self._values[key]
        sliding = int(bits.sum())
        if self.loss is not None and sliding != self.quota and self.best is not None:
            bound = self.loss.value(1.0, sliding, self.quota, self.size)  # for S(z) <= 1
            if bound >= self.best.value.loss:
                return Value(bound, float("inf"))
        if self.left <= 0:
            raise BudgetSpent
        evaluation = self._measure(bits)
        self.spent += 1
        value = self._value(evaluation, sliding)
        self._values[key] = value
        self._remember(bits, value, evaluation, sliding)
        return value

    def _value(self, evaluation: Evaluation, sliding: int) -> Value:
        if self.loss is None:
            return Value(-evaluation.score, -evaluation.log_likelihood)
        return Value(self.loss.value(evaluation.score, sliding, self.quota, self.size))

    def scalar(self, value: Value) -> float:
        """One number in the order of `value`, for solvers that do not support pairs.

        The log-likelihood ll <= 0 enters as 1 / (1 - ll) in (0, 1], times half of the difference
        between neighbouring scores, so that it never changes the order of different scores.
        """
        if self.loss is not None or value.tie < 0.0:
            return value.loss
        return value.loss - 0.5 * self.quantum / (1.0 + value.tie)

    def result(self) -> Candidate:
        """The best evaluated candidate on budget."""
        assert self.best is not None
        return self.best

    def report_off_budget(self) -> None:
        """Log if the lowest loss belongs to a candidate off budget, which cannot be the result."""
        if self.best is not None and self._lowest_off_budget < self.best.value.loss:
            logger.info(
                "the optimiser's best mask is off its budget (loss %.4f): the best one on budget "
                "is taken instead (loss %.4f)",
                self._lowest_off_budget, self.best.value.loss,
            )  # fmt: skip

    def _remember(self, bits: Bits, value: Value, evaluation: Evaluation, sliding: int) -> None:
        if sliding != self.quota:
            self._lowest_off_budget = min(self._lowest_off_budget, value.loss)
            return
        self._scores.add(evaluation.score)
        if self.best is None or value < self.best.value:
            self.best = Candidate(bits.copy(), value, evaluation)


def random_bits(size: int, quota: int, rng: np.random.Generator) -> Bits:
    """A random choice of `quota` of `size` units."""
    bits = np.zeros(size, dtype=np.bool_)
    bits[rng.permutation(size)[:quota]] = True
    return bits
