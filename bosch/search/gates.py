"""Gates learned by gradient at an exact ratio: what `learned_gates` and a start of `bosch_plus` do.

After DuoAttention (arXiv 2410.10819) and ConSA (arXiv 2606.18056): each unit has a logit, a
multiplier holds the expected number of full units at the budget, and ascent on the answers'
log-likelihood moves the logits. A head mask is binary, so each step draws a mask on budget from the
logits and takes the gradient there (straight through).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Bits = npt.NDArray[np.bool_]
Values = npt.NDArray[np.float64]

_STEP, _NOISE = 0.5, 0.5
# Largest relative difference at which two gradients are taken to say the same of a unit.
_AGREEMENT = 0.5


class Gates:
    """Logits of `units` gates [N], of which `full_units` are open."""

    def __init__(self, units: int, full_units: int, rng: np.random.Generator) -> None:
        self._logits = np.zeros(units)
        self._full_units, self._rng = full_units, rng

    def drawn(self) -> Bits:
        """A mask on budget, drawn from the logits."""
        noise = self._rng.gumbel(size=len(self._logits))
        return largest(self._logits + _NOISE * noise, self._full_units)

    def learn(self, gradient: Values) -> None:
        """One step of ascent by the gradient at a drawn mask; its largest entry sets the scale."""
        self._logits = self._logits + _STEP * scaled(gradient)
        # The multiplier: at an exact ratio the logits' mean is of no consequence.
        self._logits = self._logits - self._logits.mean()

    def mask(self) -> Bits:
        """The units of largest logits."""
        return largest(self._logits, self._full_units)


def largest(values: Values, count: int) -> Bits:
    """The `count` largest values; of equal ones those of lower index."""
    bits = np.zeros(len(values), dtype=np.bool_)
    bits[np.argsort(-values, kind="stable")[:count]] = True
    return bits


def scaled(gradient: Values) -> Values:
    """The gradient with a largest entry of 1; zeros stay zeros."""
    greatest = float(np.abs(gradient).max())
    return gradient / greatest if greatest > 0 else gradient


class RunningWorth:
    """Mean worth of each unit over the steps in a row whose gradients agree on it.

    A gradient of one share of the examples is noisy, so that a mean over shares is better. But a
    unit whose substitutes slid is worth more than before: its mean starts again.
    """

    def __init__(self, units: int) -> None:
        self._mean = np.zeros(units)
        self._count = np.zeros(units)

    def add(self, worth: Values) -> Values:
        larger = np.maximum(np.abs(worth), np.abs(self._mean))
        agree = np.abs(worth - self._mean) <= _AGREEMENT * larger
        self._count = np.where(agree, self._count, 0) + 1
        self._mean = np.where(agree, self._mean + (worth - self._mean) / self._count, worth)
        return self._mean
