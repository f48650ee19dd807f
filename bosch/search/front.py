"""The front: masks with several windows for several budgets, from one search by gradients.

A budget is a number of KV slots, heads x cached tokens at a context. One backward pass estimates
the change of the answers' log-likelihood by full attention and by each window of the menu for each
unit: the values of its choices. `bosch.search.allotment` turns them into a layout for a budget.
Steps are small, each with gradients over another part of the calibration examples.

1. Descent. Starting with every unit full, the slots fall by a constant factor, with a gradient at
   each level. Units get the narrowest window.
2. Gates. If the passes allow it, values are also learned by gradients at random layouts, as in
   `bosch.search.gates`, for all budgets.
3. Both are measured at a middle budget, and the better one gives the layouts of all budgets. At the
   first budget that scores less than the original, layouts with wider windows and with mixed
   windows are also measured, if a gradient predicts a gain; larger budgets use the best of them. If
   a budget scores less than the original and no more than the next smaller budget, the next larger
   layout grows from it by a gradient taken there.
4. Moves for one budget at a time: exchanges of windows by gradients, of many units or two; random
   exchanges followed by exchanges by gradients; the neighbouring budget's layout, grown or shrunk.
   Kinds of moves that succeeded more often for their cost are tried more often. What wins at one
   budget is tried at all larger ones. Held-out examples score every point.
"""

from __future__ import annotations

import math

import numpy as np

from bosch.analysis.intervals import share
from bosch.mask_files import Front, FrontPoint, HeldOut
from bosch.search.allotment import Choices, Values, allotted, slots_of
from bosch.search.bosch import SearchResult
from bosch.search.evaluator import SHARES, Evaluator
from bosch.search.front_moves import Moves
from bosch.search.front_state import Point
from bosch.search.gates import NOISE, STEP, RunningMean, largest, scaled
from bosch.search.gradient_search import check_passes, note_poor_mask
from bosch.search.loss import Anchors
from bosch.search.settings import SearchSettings

# Gradients of the starts: their share of the passes left by the first masks of all budgets, the
# largest share for the descent when there are gates, and the gates' share of these gradients.
_START_SHARE, _DESCENT_SHARE, _GATES_SHARE = 0.75, 0.4, 0.55
# Most levels of the descent.
_LEVELS = 20
_MIN_GATES, _MAX_GATES = 4, 64
# Smallest budgets whose numbers of full units are used for gates, and the fewest such units.
_GATE_BUDGETS, _MIN_FULL = 4, 4
# Kind of a layout that mixes all windows; other kinds are the number of their window.
_MIXED = 0
# Error rate of the one-sided limits of held-out scores.
_HELD_OUT_TAIL = 0.05


def front(evaluator: Evaluator, settings: SearchSettings) -> SearchResult:
    """Find masks for all budgets, with at most 1.5 times the passes of `bosch_plus` for one.

    The budgets are `evaluator.slot_budgets`; by default eight. Gradients count at their cost,
    held-out passes at their share of examples. The result's mask is the smallest of those with the
    best score, the original left out. Raises UserError if there is nothing to search for, a budget
    or window is impossible at the context, or the passes do not suffice for a gradient.
    """
    anchors = evaluator.anchors(settings.swa_ratio)
    anchors.check()
    search = FrontSearch(evaluator, settings)
    search.start()
    search.improve()
    return search.result(anchors)


class FrontSearch(Moves):
    """The search: its start and the result."""

    def start(self) -> None:
        """Measure a layout for each budget, from a middle one down, then up.

        The start that wins at the first budget gives all layouts; the kind of window is the one
        that wins at the first budget with wrong answers. The layout above a stuck one also uses the
        stuck layout's gradient, since gradients tell little where most units are full or most of
        what the answers need is missing.
        """
        if not self.budgets:
            return
        check_passes(self.gradients.cost, self.free, "one gradient")
        cost = max(self.gradients.cost, 1e-9)
        gradients = int(_START_SHARE * self.free / cost)
        for_gates = self.gates_to_learn(gradients)
        if for_gates:
            gradients = min(gradients - for_gates, int(_DESCENT_SHARE * self.free / cost))
        values, chain = self._descent(gradients)
        gates = self._learn(for_gates)
        first, narrowest = len(self.budgets) // 2, self.num_choices - 1
        self.unmeasured.discard(first)
        self._add(first, chain[first], "elimination")
        if gates is not None:
            learned = [self._layout(narrowest, gates, n) for n in range(len(self.budgets))]
            if self._wins(first, learned[first], "gates"):
                values, chain, learned = [gates] * len(chain), learned, chain
            self.other_start = lambda number: learned[number]
        kind = narrowest
        local: Values | None = None  # values at the layout of the next smaller budget
        for number in [*range(first, -1, -1), *range(first + 1, len(self.budgets))]:
            if number > first and self._is_stuck(number - 1) and self.free >= self.gradients.cost:
                local = self.gradients.at(self.points[number - 1].choices)
            if number != first:
                self.unmeasured.discard(number)  # releases the passes reserved for it
                choices = chain[number]
                if local is not None:
                    choices = self._wider(number, scaled(local) + scaled(values[number]))
                elif kind != narrowest:
                    choices = self._layout(kind, values[number], number)
                self._add(number, choices if self._affordable(choices) else chain[number], "start")
            if self._is_short(number) and not self.kinds_tried:
                kind = self._best_kind(number, values[number])

    def _is_stuck(self, number: int) -> bool:
        """Whether a budget scores below the original and no better than the next smaller one."""
        score, below = (self.points[index].evaluation.score for index in (number, number - 1))
        return self._is_short(number) and score <= below

    def _is_short(self, number: int) -> bool:
        """Whether a budget's mask scores below the original."""
        return self.points[number].evaluation.score < self.full.score - 1e-9

    def _best_kind(self, number: int, values: Values) -> int:
        """The window of sliding units that wins at a budget, or `_MIXED` for a mixture.

        Kinds are measured in order of their gain by a gradient at the best layout so far; at one
        that answers nothing, by `values`.
        """
        self.kinds_tried = True
        best = self.num_choices - 1
        # With one window there is nothing to mix.
        kinds = range(_MIXED, best) if best > 1 else ()
        layouts = {kind: self._layout(kind, values, number) for kind in kinds}
        while layouts and self._is_short(number):
            point = self.points[number]
            if not self._pays(point.choices):
                break
            is_blind = point.evaluation.score <= self._anchor(self.narrowest).score
            local = values if is_blind else self.gradients.at(point.choices)
            totals = {kind: _total(local, choices) for kind, choices in layouts.items()}
            kind = max(totals, key=lambda name: totals[name])
            if totals[kind] <= _total(local, point.choices):
                break
            if self._wins(number, layouts.pop(kind), f"window {kind}" if kind else "mixed"):
                best = kind
        return best

    def _layout(self, kind: int, values: Values, number: int) -> Choices:
        """The layout of greatest value for a budget, with one window or a mixture."""
        budget = self.budgets[number]
        if kind == _MIXED:
            return allotted(values, self.costs, budget)
        return self._one_window_layout(kind, values, budget)

    def _descent(self, affordable: int) -> tuple[list[Values], list[Choices]]:
        """Values of choices for each budget, and layouts with the narrowest window."""
        affordable = max(1, affordable)
        count = min(_LEVELS, max(len(self.budgets), affordable))
        lowest = self.budgets[0]
        spaced = np.geomspace(self.max_slots, max(self.min_slots, lowest), count + 1)[1:]
        levels = sorted({*self.budgets, *(int(s) for s in spaced if s > lowest)}, reverse=True)
        shares = max(1, min(SHARES, affordable // max(1, len(levels))))
        interval = max(1, math.ceil(len(levels) / affordable))
        choices = self.all_full
        starts: list[tuple[Values, Choices]] = []
        running = RunningMean(choices.size * self.num_choices)
        values: Values = np.zeros((*self.shape, self.num_choices))
        for number, level in enumerate(levels):
            if number % interval == 0:
                fresh = self.gradients.at(choices, shares)
                values = running.add(fresh.reshape(-1)).reshape(fresh.shape)
            choices = self._one_window_layout(self.num_choices - 1, values, level, choices)
            if level in self.budgets:
                starts.append((values.copy(), choices))
        starts.reverse()
        return [values for values, _ in starts], [layout for _, layout in starts]

    def _one_window_layout(
        self, kind: int, values: Values, budget: int, widest: Choices | None = None
    ) -> Choices:
        """A layout with one window (narrower for a small budget) and full units in `widest`."""
        while values[..., 0].size * self.costs[kind] > budget:
            kind += 1
        kinds = np.array([0, kind])
        bound = None if widest is None else (widest > 0).astype(np.int64)
        values, costs = values[..., kinds], self.costs[kinds]
        return kinds[allotted(values, costs, budget, widest=bound)]

    @property
    def _full_counts(self) -> list[int]:
        """Numbers of full units of the layouts at which gates are learned."""
        cost = self.costs[0] - self.costs[-1]
        counts = [int((budget - self.min_slots) / cost) for budget in self.budgets]
        return [count for count in counts if count >= _MIN_FULL][:_GATE_BUDGETS]

    def gates_to_learn(self, gradients: int) -> int:
        """Number of the `gradients` for gates; 0 if there are too few for two starts."""
        limit = min(_MAX_GATES, max(_MIN_GATES, self.all_full.size // 4))
        count = min(limit, round(_GATES_SHARE * gradients))
        return count if self._full_counts and count >= _MIN_GATES else 0

    def _learn(self, gradients: int) -> Values | None:
        """Values of choices, learned at layouts drawn from them as in `bosch.search.gates`.

        Numbers of full units and windows alternate, so that all budgets share the values.
        """
        if not gradients:
            return None
        gates: Values = np.zeros((*self.shape, self.num_choices))
        counts = self._full_counts
        for step in range(gradients):
            turn, number = divmod(step, len(counts))
            kind = self.num_choices - 1 - turn % (self.num_choices - 1)
            advantage = gates[..., 0] - gates[..., kind] + NOISE * self._rng.gumbel(size=self.shape)
            choices = np.where(largest(advantage.reshape(-1), counts[number]), 0, kind)
            gates = gates + STEP * scaled(self.gradients.add(choices.reshape(self.shape)))
        return gates

    def _add(self, number: int, choices: Choices, name: str) -> None:
        """Measure the first layout of a budget completely."""
        evaluation = self._evaluate(choices, "start", name)
        assert evaluation is not None
        point = Point(self.budgets[number], choices, evaluation, self._spent, np.zeros(self.shape))
        self.points[number] = point

    def _wins(self, number: int, choices: Choices, name: str) -> bool:
        """Whether a layout beats a budget's layout, if it can be measured."""
        return self._affordable(choices) and self._measure(number, choices, name)

    def result(self, anchors: Anchors) -> SearchResult:
        """The front, and its smallest mask of those with the best score, the original left out."""
        layouts = (self.min_slots, self.narrowest), (self.max_slots, self.all_full)
        ends = [Point(n, layout, self._anchor(layout), 0.0, np.zeros(0)) for n, layout in layouts]
        by_slots: dict[float, Point] = {}
        best = -1.0
        for point in [ends[0], *(self.points[number] for number in sorted(self.points)), ends[1]]:
            slots, score = slots_of(point.choices, self.costs), point.evaluation.score
            if score >= best or point is ends[1]:
                # A larger budget's mask may have no more slots than a smaller one's.
                for other in [one for one in by_slots if one >= slots]:
                    del by_slots[other]
                by_slots[slots] = point
            best = max(best, score)
        smaller = {slots: point for slots, point in by_slots.items() if slots < self.max_slots}
        result = smaller[max(smaller, key=lambda one: (smaller[one].evaluation.score, -one))]
        for slots, point in smaller.items():
            note_poor_mask(self.evaluator, slots / self.max_slots, point.evaluation.score)
        front_points = tuple(self._front_point(by_slots[slots]) for slots in sorted(by_slots))
        mask = self.mask(result.choices)
        evaluation = self.evaluator.evaluate(mask, "final", "final mask")
        return SearchResult(
            self.evaluator.units.head_mask(mask), evaluation, anchors, evaluation,
            front=Front(self.context, front_points),
        )  # fmt: skip

    def _front_point(self, point: Point) -> FrontPoint:
        mask, count = self.mask(point.choices), self.evaluator.held_out_examples
        held_out = None
        if count:
            score = self.evaluator.evaluate_held_out(mask).score
            held_out = HeldOut(*share(score, count, _HELD_OUT_TAIL))
        mask = self.evaluator.units.head_mask(mask)
        slots, score = mask.kv_slots(self.context), point.evaluation.score
        return FrontPoint(mask, slots, None, score, held_out, point.passes)


def _total(values: Values, choices: Choices) -> float:
    """The first-order value of a layout."""
    return float(np.take_along_axis(values, choices[..., None], axis=2).sum())
