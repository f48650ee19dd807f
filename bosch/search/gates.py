"""Gates learned by gradient at an exact ratio, for `learned_gates` and `bosch_plus`.

After DuoAttention (arXiv 2410.10819) and ConSA (arXiv 2606.18056): each unit has a logit, which
gradient ascent on the answers' log-likelihood changes. A head mask is binary, so each step draws a
mask on budget (the units with the largest logits plus Gumbel noise) and takes the gradient there
(straight through).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Bits = npt.NDArray[np.bool_]
Values = npt.NDArray[np.float64]

# Step size of the ascent, and scale of the noise.
STEP, NOISE = 0.5, 0.5
# Largest relative difference at which two gradients of a unit count as equal.
_AGREEMENT = 0.5


class Gates:
    """Logits of `units` gates [N], of which `full_units` are open."""

    def __init__(self, units: int, full_units: int, rng: np.random.Generator) -> None:
        self._logits = np.zeros(units)
        self._full_units, self._rng = full_units, rng

    def draw(self) -> Bits:
        """A mask on budget, drawn from the logits."""
        noise = self._rng.gumbel(size=len(self._logits))
        return largest(self._logits + NOISE * noise, self._full_units)

    def learn(self, gradient: Values) -> None:
        """One step of ascent by the gradient at a drawn mask; its largest entry sets the scale."""
        self._logits = self._logits + STEP * scaled(gradient)
        # At an exact ratio the mean has no effect; 0 keeps the logits small.
        self._logits = self._logits - self._logits.mean()

    def mask(self) -> Bits:
        return largest(self._logits, self._full_units)


def largest(values: Values, count: int) -> Bits:
    """Mask of the `count` largest values; among equal ones, those of lower index."""
    bits = np.zeros(len(values), dtype=np.bool_)
    bits[np.argsort(-values, kind="stable")[:count]] = True
    return bits


def scaled(gradient: Values) -> Values:
    """The gradient scaled to a largest entry of 1; an all-zero gradient is unchanged."""
    greatest = float(np.abs(gradient).max())
    return gradient / greatest if greatest > 0 else gradient


class RunningMean:
    """Running mean of each unit's value, which restarts when a gradient disagrees with it.

    A mean over parts is less noisy, but a unit's value rises when its substitutes slide.
    """

    def __init__(self, units: int) -> None:
        self._mean = np.zeros(units)
        self._count = np.zeros(units)

    def add(self, values: Values) -> Values:
        larger = np.maximum(np.abs(values), np.abs(self._mean))
        agree = np.abs(values - self._mean) <= _AGREEMENT * larger
        self._count = np.where(agree, self._count, 0) + 1
        self._mean = np.where(agree, self._mean + (values - self._mean) / self._count, values)
        return self._mean
