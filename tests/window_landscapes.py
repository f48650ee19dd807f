"""Landscapes whose units have several windows, small enough for every layout to be measured.

As in `studies.landscapes`, but each unit is full or has one of several windows. A unit
with a window contributes a share of what a full one contributes; the share grows with the window
and differs between units, some of which need little more than the narrowest window. The value is
the landscape's multilinear form at these shares. Where every unit is full or has the narrowest
window, it equals the landscape's own value.

L layers, U units per layer, N = L U, C choices: 0 is full, k the k-th window from the widest.
"""

from __future__ import annotations

from functools import cached_property
from itertools import product

import numpy as np
import numpy.typing as npt

from bosch.masks import HeadMask
from bosch.score.evaluation_log import Evaluation, GateGradient
from bosch.window import Window
from studies.landscapes import GRADIENT_PASSES, QUANTUM, Groups, Landscape

Values = npt.NDArray[np.float64]

TOKENS = 1024
_STEEPNESS = 3.0


class WindowLandscape:
    """A scorer with gradients for several windows, from a landscape of groups that `seed` draws."""

    def __init__(
        self, name: str, shape: tuple[int, int], windows: tuple[int, ...], seed: int = 0
    ) -> None:
        self.num_layers, self.num_key_value_heads = shape
        self.windows = tuple(Window(size) for size in sorted(windows, reverse=True))
        self.quantum = QUANTUM
        units = shape[0] * shape[1]
        landscape = Landscape(name, units, seed)
        assert isinstance(landscape.form, Groups), f"{name} has no groups"
        self._form, self._noise = landscape.form, landscape.noise
        self._low, self._high = landscape.low, landscape.high
        rng = np.random.default_rng([seed, 7])
        narrowest = min(windows)
        need = np.exp(rng.uniform(np.log(narrowest / 2), np.log(8 * TOKENS), size=(units, 1)))
        share = 1 / (1 + (need / np.array(sorted(windows, reverse=True))) ** _STEEPNESS)
        share = (share - share[:, -1:]) / (1 - share[:, -1:])
        self.shares = np.concatenate([np.ones((units, 1)), share], axis=1)  # [N, C]

    def value(self, choices: npt.ArrayLike) -> Values:
        """Values of layouts [..., N]: 0 with all at the narrowest window, 1 with all full."""
        array = np.asarray(choices)
        active = self.shares[np.arange(array.shape[-1]), array]
        total = np.zeros(array.shape[:-1])
        for group, table in enumerate(self._form.phi):
            members = np.flatnonzero(self._form.group_of == group)
            bits = self._form.bit_of[members]
            for code in range(1 << len(members)):
                is_full = (code & bits) > 0
                probability = np.where(is_full, active[..., members], 1 - active[..., members])
                total = total + table[code] * probability.prod(axis=-1)
        return np.asarray((total - self._low) / (self._high - self._low))

    def slots(self, choices: npt.ArrayLike) -> npt.NDArray[np.int64]:
        """KV slots of layouts [..., N] at `TOKENS` tokens."""
        costs = np.array([TOKENS, *[window.held(TOKENS) for window in self.windows]])
        total: npt.NDArray[np.int64] = costs[np.asarray(choices)].sum(axis=-1)
        return total

    @cached_property
    def layouts(self) -> npt.NDArray[np.int64]:
        """Every layout, [C^N, N]."""
        units = self.num_layers * self.num_key_value_heads
        return np.array(list(product(range(len(self.windows) + 1), repeat=units)))

    def choices(self, mask: HeadMask) -> npt.NDArray[np.int64]:
        """The choice of each unit of a mask, [N]."""
        place = {0: 0} | {window.size: k for k, window in enumerate(self.windows, 1)}
        return np.array([place[size] for row in mask.windows for size in row])

    def evaluate(self, mask: HeadMask) -> Evaluation:
        value = float(self.value(self.choices(mask)))
        score = float(np.clip(np.floor(value / QUANTUM + 1e-9) * QUANTUM, 0.0, 1.0))
        return Evaluation(score, value)

    def window_gradient(self, mask: HeadMask, share: int = 0, shares: int = 1) -> GateGradient:
        """Changes of the value by each choice of each unit, times the noise of unit and share."""
        choices = self.choices(mask)
        slopes = np.empty(len(choices))
        for unit in range(len(choices)):
            both_ends = np.array([choices, choices])
            both_ends[:, unit] = 0, len(self.windows)
            full, narrowest = self.value(both_ends)
            slopes[unit] = full - narrowest
        slopes *= self._noise[share % 8]
        current = self.shares[np.arange(len(choices)), choices]
        changes = slopes[:, None] * (self.shares - current[:, None])
        values = changes.reshape(*mask.is_full.shape, -1).tolist()
        return GateGradient(values, 0.0, self.gradient_passes(share, shares))

    def gate_gradient(self, mask: HeadMask, share: int = 0, shares: int = 1) -> GateGradient:
        """Changes from the narrowest window to full."""
        gradient = self.window_gradient(mask, share, shares)
        changes = np.array(gradient.values)
        values = (changes[..., 0] - changes[..., -1]).tolist()
        return GateGradient(values, 0.0, gradient.full_forward_equivalents)

    def gradient_passes(self, share: int = 0, shares: int = 1) -> float:
        return GRADIENT_PASSES / min(shares, 8)
