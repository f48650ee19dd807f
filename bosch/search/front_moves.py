"""Moves of a search for a front: from the best layout of a budget to another."""

from __future__ import annotations

import numpy as np

from bosch.search.allotment import Choices, Values, allotted, slots_of
from bosch.search.front_state import State
from bosch.search.gradient_search import Move

# Masks in a row without success before another budget has its turn.
_PATIENCE = 6
_FRUITLESS = 40
# Penalty on the expected gain of swaps that share a unit with a failed swap.
_FAILURE = 0.05
# Number of single-unit steps among which pairs are formed.
_STEPS = 256


class Moves(State):
    """The state of the search, with its moves."""

    def improve(self) -> None:
        """Moves for one budget after another until the passes or the proposals are exhausted."""
        grown = Move("grown", lambda number: self._grown(number) if number else None)
        moves = [
            Move("exchange", self._exchange_move),
            Move("swap", self._swap),
            grown,
            Move("shrunk", self._shrunk_move),
            Move("kick", self._kick),
            *([Move("other start", self.other_start)] if self.other_start else []),
        ]
        fruitless = 0
        while self.points and self.free >= 1 and fruitless < _FRUITLESS * len(self.points):
            number = min(self.points, key=self._turn)
            move = max(moves, key=lambda m: m.promise)
            stuck = self._stuck_budget()
            if stuck is not None:
                number, move = stuck, grown
            point = self.points[number]
            if move.name == "kick" and point.failures < 2:
                move = moves[0]
            before = self.left
            choices = move.propose(number) if self._pays(point.choices) else None
            fruitless += 1
            won = False
            if choices is not None and (number, choices.tobytes()) not in self._tried:
                won = self._measure(number, choices, move.name, "swaps")
                fruitless = 0
            point = self.points[number]
            point.failures = 0 if won else point.failures + 1
            move.wins += won
            move.passes += max(before - self.left, 1.0)

    def _turn(self, number: int) -> tuple[int, float, float]:
        """Sort key: budgets that still improve first, by the next larger budget's advantage."""
        point = self.points[number]
        above = self.points[number + 1].evaluation if number + 1 < len(self.points) else self.full
        return (
            point.failures // _PATIENCE,
            point.evaluation.score - above.score,
            point.evaluation.log_likelihood - above.log_likelihood,
        )

    def _stuck_budget(self) -> int | None:
        """A budget that scores no better than the next smaller one, once per layout of that one."""
        for number in range(1, len(self.points)):
            below, point = self.points[number - 1], self.points[number]
            key = number, below.choices.tobytes()
            if point.evaluation.rank <= below.evaluation.rank and key not in self._regrown:
                self._regrown.add(key)
                return number
        return None

    def _exchange_move(self, number: int) -> Choices | None:
        point = self.points[number]
        pairs = max(1, int((point.budget - self.min_slots) / self.costs[0]) // 4)
        return self._exchange(point.choices, point.budget, max(1, pairs >> point.failures // 2))

    def _exchange(self, choices: Choices, budget: int, pairs: int) -> Choices:
        """Change up to 2 x `pairs` units by gradients, then half as many, and so on."""
        while pairs >= 1 and self._pays(choices):
            changed = self._change_units(choices, self.gradients.at(choices), budget, 2 * pairs)
            if (changed == choices).all():
                break
            choices = changed
            pairs //= 2
        return choices

    def _change_units(self, choices: Choices, values: Values, budget: int, limit: int) -> Choices:
        """The best layout of a budget by `values` in which about `limit` units change.

        Each unit's current choice gets a bonus, which limits the changes. Substitutes for each
        other predict the same gain, so half of the units that could get a wider window keep theirs.
        """
        is_kept = (choices > 0) & (self._rng.random(self.shape) < 0.5)
        widest = np.where(is_kept, choices, 0)
        is_current = np.arange(self.num_choices) == choices[..., None]

        def with_bonus(bonus: float) -> Choices:
            return allotted(values + bonus * is_current, self.costs, budget, widest=widest)

        low, high = 0.0, 2.0 * float(np.abs(values).max())
        best = with_bonus(low)
        if (best != choices).sum() <= limit:
            return best
        for _ in range(10):
            middle = (low + high) / 2
            changed = with_bonus(middle)
            count = int((changed != choices).sum())
            if 0 < count <= limit:
                best, high = changed, middle
            elif count == 0:
                high = middle
            else:
                low = middle
        if (best != choices).sum() <= limit:
            return best
        return with_bonus(high)

    def _swap(self, number: int) -> Choices | None:
        """The most promising untried change of two units, one wider and one narrower."""
        point = self.points[number]
        choices, values = point.choices, self.gradients.at(point.choices)
        current = np.take_along_axis(values, choices[..., None], axis=2)
        penalty = _FAILURE * float(np.abs(values[..., 0]).mean()) * point.failed
        gains = (values - current - penalty[..., None]).reshape(-1)
        steps = (self.costs - self.costs[choices][..., None]).reshape(-1)
        room = point.budget - slots_of(choices, self.costs)
        wider, narrower = (
            np.array(sorted(np.flatnonzero(mask), key=lambda i: -gains[i])[:_STEPS], dtype=int)
            for mask in (steps > 0, steps < 0)
        )
        if not len(wider):
            return None
        # The last column means no second unit.
        pair_gains = gains[wider][:, None] + np.append(gains[narrower], 0.0)
        slots = steps[wider][:, None] + np.append(steps[narrower], 0.0)
        same_unit = (wider // self.num_choices)[:, None] == np.append(
            narrower // self.num_choices, -1
        )
        pair_gains[(slots > room) | same_unit] = -np.inf
        for index in np.argsort(-pair_gains, axis=None, kind="stable"):
            first, second = divmod(int(index), pair_gains.shape[1])
            if pair_gains[first, second] == -np.inf:
                return None
            changed = choices.copy().reshape(-1)
            entries = [wider[first], *narrower[second : second + 1]]
            for entry in entries:
                changed[entry // self.num_choices] = entry % self.num_choices
            changed = changed.reshape(self.shape)
            if (number, changed.tobytes()) not in self._tried:
                for entry in entries:
                    point.failed.reshape(-1)[entry // self.num_choices] += 1
                return changed
        return None

    def _kick(self, number: int) -> Choices | None:
        """Random exchanges of some choices, then exchanges by gradients."""
        point = self.points[number]
        flat = point.choices.reshape(-1).copy()
        wide = np.flatnonzero(flat < self.num_choices - 1)
        narrow = np.flatnonzero(flat == self.num_choices - 1)
        pairs = min(len(wide), len(narrow))
        if pairs == 0:
            return None
        count = 1 + int(self._rng.integers(0, max(1, pairs // 4)))
        first, other = (self._rng.choice(part, count, replace=False) for part in (wide, narrow))
        flat[first], flat[other] = flat[other], flat[first]
        return self._exchange(flat.reshape(self.shape), point.budget, max(1, count // 2))

    def _grown(self, number: int) -> Choices:
        """The next smaller budget's layout, widened by its gradients."""
        return self._wider(number, self.gradients.at(self.points[number - 1].choices))

    def _wider(self, number: int, values: Values) -> Choices:
        """The next smaller budget's layout, widened by `values`."""
        below = self.points[number - 1].choices
        return allotted(values, self.costs, self.budgets[number], narrowest=below)

    def _shrunk_move(self, number: int) -> Choices | None:
        """The next larger budget's layout, narrowed by its gradients."""
        if number + 1 == len(self.points):
            return None
        above = self.points[number + 1].choices
        return allotted(self.gradients.at(above), self.costs, self.budgets[number], widest=above)
