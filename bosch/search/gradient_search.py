"""One search by gradients of the heads' gates, for one budget of a cache or several.

A layout gives each unit a choice: full attention, or a window of the menu. One backward pass tells
the value of every choice of every unit at a layout: the change of the answers' log-likelihood.
`allotted` turns values into a layout within a budget. Each gradient uses the next of 8 parts of the
calibration examples.

1. Gates. If the passes suffice, values are learned by gradients at layouts within the budgets, in
   turn (after DuoAttention, arXiv 2410.10819, and ConSA, arXiv 2606.18056). For heads that depend
   on each other these are more informative than gradients where most heads are full.
2. Elimination. From all units full down to the smallest budget in even ratios, with a gradient
   before each step, since a unit's value rises when its substitutes slide.
3. Both are measured at a middle budget; the better one is measured first at all others.
4. Moves, for the budget with the largest gap to the next larger one, of the kind that has had the
   most success for its passes: exchanges of many units that halve, a swap of two, a start that was
   not measured, and the layout of the next smaller budget grown, or of the next larger one shrunk.
   Each start of each budget has a track of its own, with its best layout. A layout is also kept at
   every other budget that it fits and whose best one scores less.

With few passes, exchanges come before the first mask. Random numbers do not depend on the seed.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from bosch.analysis.intervals import share
from bosch.errors import UserError
from bosch.mask_files import Front, FrontPoint, HeldOut
from bosch.masks import HeadMask
from bosch.score.evaluation_log import Evaluation
from bosch.search.allotment import Choices, Values, allotted, slots_of, spaced_slots
from bosch.search.bosch import SearchResult, final_result
from bosch.search.evaluator import SHARES, Evaluator, SlotBudgets
from bosch.search.loss import Anchors
from bosch.search.settings import MIN_PLUS_BUDGET, SearchSettings, front_budget, plus_budget

logger = logging.getLogger(__name__)

# Gates: their share of the passes, fewest and most gradients (at most one for every four units),
# fewest full units of a mask that shows how units depend on each other, and the number of the
# smallest budgets that are used; step size of the ascent, and scale of the noise.
_GATES_SHARE, _MIN_GATES, _MAX_GATES = 0.35, 4, 64
_MIN_FULL, _GATE_BUDGETS = 4, 4
_STEP, _NOISE = 0.5, 0.5
# Elimination: its steps with one budget, and its share of the passes.
_STEPS, _ELIMINATION_SHARE = 8, 0.4
# Largest relative difference at which two gradients of a unit count as equal.
_AGREEMENT = 0.5
# Masks in a row without success before another budget, or another track of it, has its turn.
_PATIENCE, _STALLED = 6, 48
# Moves in a row that propose nothing, by budget, before the search ends.
_FRUITLESS = 40
# Penalty on the expected gain of swaps that share a unit with a failed swap.
_FAILURE = 0.05
# Number of single-unit steps among which swaps are formed.
_SWAPPED = 256
# Error rate of the one-sided limits of held-out scores.
_HELD_OUT_TAIL = 0.05


def bosch_plus(evaluator: Evaluator, settings: SearchSettings) -> SearchResult:
    """A mask with exactly ceil(rho N) sliding units, within `plus_budget`; else UserError."""
    anchors = evaluator.anchors(settings.swa_ratio)
    anchors.check()
    search = _of_one_budget(evaluator, settings)
    _note_least_budget(evaluator, settings)
    _check_passes(1 + search.gradient_cost, search.left, "one gradient and one mask")
    search.run()
    result = final_result(evaluator, settings, search.mask(search.points[0].best.choices), anchors)
    _note_poor_mask(evaluator, 1 - result.mask.swa_ratio, result.evaluation.score)
    return result


def front(evaluator: Evaluator, settings: SearchSettings) -> SearchResult:
    """Masks for all budgets of `evaluator.slot_budgets`, with 1.5 times the passes of `bosch_plus`.

    By default there are eight. Gradients count at their cost, held-out passes at their share of
    examples. The result's mask is the smallest of those with the best score, the original left out.
    Raises UserError if there is nothing to search for, a budget or window is impossible at the
    context, or the passes do not suffice for a gradient.
    """
    anchors = evaluator.anchors(settings.swa_ratio)
    anchors.check()
    search = front_search(evaluator, settings)
    if search.points:
        _check_passes(search.gradient_cost, search.free, "one gradient")
        search.run()
    return front_result(search, anchors)


def front_search(evaluator: Evaluator, settings: SearchSettings) -> GradientSearch:
    """The search of a front before its first gradient."""
    if evaluator.slot_budgets is None:
        # A scorer without a model has one token.
        calibration = getattr(evaluator.scorer, "calibration", None)
        evaluator.slot_budgets = SlotBudgets(int(getattr(calibration, "max_length", 1)))
    budgets = evaluator.slot_budgets
    held = [window.held(budgets.context) for window in evaluator.windows]
    if not all(a > b for a, b in zip([budgets.context, *held], held, strict=False)):
        raise UserError(
            f"search.windows: at {budgets.context:,} tokens each window must hold fewer than the "
            f"next and all fewer than full attention, they hold {held[::-1]}"
        )
    group = evaluator.units.heads.shape[2]
    costs = group * np.array([budgets.context, *held], dtype=np.float64)
    units = evaluator.shape[0] * evaluator.shape[1]
    least, most = int(units * costs[-1]), int(units * costs[0])
    for slots in budgets.slots:
        if slots < least:
            raise UserError(
                f"search.points: {slots:,} KV slots at {budgets.context:,} tokens are too few, "
                f"every head with the smallest window needs {least:,}"
            )
    chosen = budgets.slots or spaced_slots(least, costs[0], most)
    # The ends of the front are the anchors.
    inner = sorted({int(n) for n in chosen if least + costs[-2] - costs[-1] <= n < most})
    search = GradientSearch(evaluator, front_budget(settings, evaluator.shape[0]), costs, inner)
    search.keep_affordable_budgets()
    kept = [point.slots for point in search.points]
    evaluator.on_budget = lambda mask: mask.kv_slots(budgets.context) <= max(kept, default=-1)
    return search


def _of_one_budget(evaluator: Evaluator, settings: SearchSettings) -> GradientSearch:
    """A search among full units and the narrowest window; a slot is a full unit."""
    full_units = evaluator.shape[0] * evaluator.shape[1] - evaluator.budget
    passes = plus_budget(settings, evaluator.shape[0])
    return GradientSearch(evaluator, passes, np.array([1.0, 0.0]), [full_units])


def _note_least_budget(evaluator: Evaluator, settings: SearchSettings) -> None:
    """Add a note if other values of kappa would give the same passes."""
    layers = evaluator.shape[0]
    highest = kappa = settings.budget_per_layer
    while plus_budget(replace(settings, budget_per_layer=highest + 1), layers) == MIN_PLUS_BUDGET:
        highest += 1
    if highest > kappa:
        evaluator.note(
            f"search.budget_per_layer: {kappa} with {layers} layers is the least budget of "
            f"bosch_plus, {MIN_PLUS_BUDGET} passes, and so is every value up to {highest}"
        )


def _check_passes(needed: float, left: float, purpose: str) -> None:
    """Raise UserError if a search needs more passes for its `purpose` than it has `left`."""
    if left < needed:
        raise UserError(
            f"search.budget_per_layer: {purpose} costs {needed:.1f} passes over the calibration "
            f"set, and {max(0.0, left):.1f} are left: raise it, or take more examples"
        )


def _note_poor_mask(evaluator: Evaluator, kept: float, score: float) -> None:
    """Add a note if a mask with half of the original's cache scores less than half as much."""
    original = evaluator.log.get(evaluator.units.head_mask(HeadMask.all_full(*evaluator.shape)))
    if original is not None and kept >= 0.5 and score < original.score / 2:
        evaluator.note(
            f"a mask with {kept:.0%} of the original's cache scores {score:.4g}, less than half "
            f"of the original's {original.score:.4g}: a better one may have been missed; raise "
            "search.budget_per_layer, or take more examples"
        )


@dataclass(eq=False)
class Track:
    """The search from one start of a budget: its best layout, and its moves that failed."""

    start: str
    slots: int  # of its budget
    choices: Choices
    evaluation: Evaluation
    passes: float
    failed: Values  # failed swaps of each unit
    failures: int = 0  # moves since the last success
    exchanged: bool = False

    @property
    def rank(self) -> tuple[float, float]:
        return self.evaluation.rank


@dataclass
class Point:
    """A budget in KV slots, its starts that are not measured yet, and the tracks of the others."""

    slots: int
    starts: dict[str, Choices] = field(default_factory=dict)
    tracks: list[Track] = field(default_factory=list)
    failures: int = 0  # moves since the last success
    grown_from: set[bytes] = field(default_factory=set)

    @property
    def best(self) -> Track:
        return max(self.tracks, key=lambda track: track.rank)


# The track that a layout may improve, by default a new one, the layout, and a name for the trace.
Proposal = tuple[Track | None, Choices, str]


@dataclass
class Move:
    """A kind of move, with its success so far."""

    propose: Callable[[int], Proposal | None]
    wins: int = 0
    passes: float = 0.0

    @property
    def promise(self) -> float:
        """Wins per pass, with a prior of one win in two passes, so that each move is tried."""
        return (self.wins + 1.0) / (self.passes + 2.0)


class GradientSearch:
    """State of one search: its points by ascending budget, the passes left, and the gradients.

    `costs` [C] are the slots of a unit by its choice: full, then the windows from the widest.
    """

    def __init__(
        self, evaluator: Evaluator, passes: float, costs: Values, budgets: Sequence[int]
    ) -> None:
        self.evaluator, self.shape, self.costs = evaluator, evaluator.shape, costs
        self.num_choices = len(costs)
        self.all_full: Choices = np.zeros(self.shape, dtype=np.int64)
        self.narrowest = np.full(self.shape, self.num_choices - 1)
        self.points = [Point(slots) for slots in budgets]
        self.all_passes = self.left = float(passes)
        self.evaluations = self.gradients = 0
        gradient_costs = [evaluator.cost_of_gradient(part, SHARES) for part in range(SHARES)]
        self.gradient_cost = max(gradient_costs)
        self._sizes = np.array([0, *(window.size for window in evaluator.windows)])
        self._held_out = evaluator.held_out_passes
        self.total: Values = np.zeros((*self.shape, self.num_choices))
        self._means: dict[bytes, tuple[Values, int]] = {}
        self._measured: dict[bytes, Evaluation] = {}
        self._tried: set[tuple[int, bytes]] = set()
        self._rng = np.random.default_rng(0)

    def mask(self, choices: Choices) -> HeadMask:
        """The mask of units with these choices: 0 full, k the k-th window from the widest."""
        return HeadMask(self._sizes[choices].tolist(), self.evaluator.windows[0].sinks)

    @property
    def _original(self) -> Evaluation:
        mask = self.evaluator.units.head_mask(self.mask(self.all_full))
        evaluation = self.evaluator.log.get(mask)
        assert evaluation is not None
        return evaluation

    # Passes and gradients.

    @property
    def free(self) -> float:
        """Passes that are not reserved, but no more than masks may still be measured.

        Reserved are the first mask of each budget, and the held-out examples of all points.
        """
        first = [point for point in self.points if not point.tracks]
        reserved = sum(self._cost_of_first(point.slots) for point in first)
        points = [point.best.choices for point in self.points if point.tracks]
        reserved += self._cost_of_ends + self._held_out * sum(map(self._cost, points))
        return min(self.left - reserved, self.all_passes - self.evaluations - len(first))

    def keep_affordable_budgets(self) -> None:
        """Leave out points, evenly spread, if the passes do not suffice for all."""
        costs = [self._cost_of_first(point.slots) for point in self.points]
        rest = self.left - self._cost_of_ends - 2 * self.gradient_cost
        paid = len(costs) if sum(costs) <= rest else int(rest / max([1e-9, *costs]))
        # At least one pass counts for each mask, and a gradient comes before the first one.
        affordable = max(1, min(paid, int(self.left - self.gradient_cost)))
        if len(costs) > affordable:
            self.evaluator.note(
                f"search.budget_per_layer: {self.all_passes:g} passes pay for {affordable} of "
                f"{len(costs)} points of the front"
            )
            spread = np.linspace(0, len(costs) - 1, affordable).round().astype(int)
            self.points = [self.points[index] for index in spread]

    @property
    def _cost_of_ends(self) -> float:
        """Passes for the held-out examples of both ends."""
        return self._held_out * (self._cost(self.narrowest) + self._cost(self.all_full))

    def _cost(self, choices: Choices) -> float:
        """Passes for a layout, without the held-out examples."""
        return self.evaluator.cost_of_mask(self.mask(choices))

    def _cost_of_first(self, slots: int) -> float:
        """Passes for a budget's layout with the narrowest window, held-out examples included."""
        choices = self.narrowest.copy()
        choices.reshape(-1)[: self._full_units(slots)] = 0
        return (1 + self._held_out) * self._cost(choices)

    def _full_units(self, slots: int) -> int:
        """Number of full units of a budget if all others have the narrowest window."""
        least = slots_of(self.narrowest, self.costs)
        return int((slots - least) / (self.costs[0] - self.costs[-1]))

    def _pays(self, choices: Choices, at: Choices | None = None) -> bool:
        """Whether the passes suffice for such a layout and, if it is new, the gradient `at`."""
        cost = max(1.0, (1 + self._held_out) * self._cost(choices))
        if at is not None and at.tobytes() not in self._means:
            cost += self.gradient_cost
        return self.free >= cost

    def gradient(self, choices: Choices) -> Values:
        """One more gradient at a layout, over the next part of the examples; the new mean there."""
        part = self.gradients % SHARES
        values = self.evaluator.window_values(self.mask(choices), part, SHARES)
        self.gradients += 1
        self.total = self.total + values
        self.left -= self.evaluator.cost_of_gradient(part, SHARES)
        logger.info(
            "search: gradient %d at %d full units, %.1f passes left",
            self.gradients, (choices == 0).sum(), max(0.0, self.left),
        )  # fmt: skip
        mean, count = self._means.get(choices.tobytes(), (np.zeros(1), 0))
        mean = (mean * count + values) / (count + 1)
        self._means[choices.tobytes()] = mean, count + 1
        return mean

    def values_at(self, choices: Choices, gradients: int = 1) -> Values:
        """The mean of at least so many gradients at a layout; computes those that are missing."""
        mean, count = self._means.get(choices.tobytes(), (np.zeros(1), 0))
        for _ in range(gradients - count):
            mean = self.gradient(choices)
        return mean

    # Starts.

    def run(self) -> None:
        """Measure the starts, then move until passes or proposals are exhausted."""
        slots = ", ".join(f"{point.slots:,}" for point in self.points)
        logger.info("search: budgets of %s KV slots, %.0f passes", slots, self.left)
        at_full = self.gradient(self.all_full)
        gates = self._gates()
        self._eliminate(reserved=(gates is not None) + (self.num_choices > 2))
        # Whole layers of greatest value with every unit full, then the best units of the next one.
        by_layer = 1e6 * at_full.sum(axis=1, keepdims=True) + at_full
        middle, preferred = len(self.points) // 2, "elimination"
        for number in [*range(middle, -1, -1), *range(middle + 1, len(self.points))]:
            point = self.points[number]
            if gates is not None:
                point.starts["gates"] = self.layout(gates, point.slots)
            if self.num_choices > 2:
                values = at_full if gates is None else gates
                point.starts["mixed"] = allotted(values, self.costs, point.slots)
            compared = list(point.starts)
            point.starts["mean"] = self.layout(self.total, point.slots)
            point.starts["layers"] = self.layout(by_layer, point.slots)
            if number > middle and self._is_stuck(number - 1) and self.free >= self.gradient_cost:
                below = self.points[number - 1].best.choices
                values = self.values_at(below)
                grown = allotted(values, self.costs, point.slots, narrowest=below)
                self._measure(point, None, grown, "grown")
                continue
            self._first(point, preferred, reserved=len(compared) - 1 if number == middle else 0)
            if number == middle:
                for name in compared[1:]:
                    if self.free >= 1:
                        self._measure(point, None, point.starts.pop(name), name)
                preferred = point.best.start
        self._improve()

    def _first(self, point: Point, name: str, reserved: int = 0) -> None:
        """Measure a budget's first layout; with few passes after exchanges."""
        choices = point.starts.pop(name)
        if name == "elimination" and self.free < 1 + reserved + 3 * self.gradient_cost:
            choices = self._exchanged(point.slots, choices, reserved)
        self._measure(point, None, choices, name)

    def _gates(self) -> Values | None:
        """Learned values of choices, or None if the passes do not suffice for two starts."""
        units = self.all_full.size
        count = min(_MAX_GATES, max(_MIN_GATES, units // 4))
        if self.gradient_cost > 0:
            count = min(count, int(_GATES_SHARE * (self.free + 1) / self.gradient_cost))
        is_large = any(self._full_units(point.slots) >= _MIN_FULL for point in self.points)
        return self.learn(count) if count >= _MIN_GATES and is_large else None

    def learn(self, count: int) -> Values:
        """Values of choices [L, U, C], learned by at most so many gradients at layouts drawn.

        Budgets and windows alternate, so that all budgets share the values. A layout is binary, so
        each step takes the gradient at one (straight through); its largest entry sets the scale.
        """
        gates: Values = np.zeros((*self.shape, self.num_choices))
        budgets = [one.slots for one in self.points if self._full_units(one.slots) >= _MIN_FULL]
        budgets = budgets[:_GATE_BUDGETS]
        for step in range(count):
            if self.free < self.gradient_cost:
                break
            turn, number = divmod(step, len(budgets))
            kind = self.num_choices - 1 - turn % (self.num_choices - 1)
            noisy = gates.copy()
            noisy[..., 0] += _NOISE * self._rng.gumbel(size=self.shape)
            values = self.gradient(self.layout(noisy, budgets[number], kind=kind))
            greatest = float(np.abs(values).max())
            gates = gates + (_STEP * values / greatest if greatest > 0 else 0.0)
        return gates

    def layout(
        self, values: Values, slots: int, *, kind: int | None = None, widest: Choices | None = None
    ) -> Choices:
        """The layout of greatest value with one window, narrower than `kind` for few slots.

        Full are only units that are full in `widest`.
        """
        kind = self.num_choices - 1 if kind is None else kind
        while self.all_full.size * self.costs[kind] > slots:
            kind += 1
        kinds = np.array([0, kind])
        bound = None if widest is None else (widest > 0).astype(np.int64)
        return kinds[allotted(values[..., kinds], self.costs[kinds], slots, widest=bound)]

    def _eliminate(self, reserved: int) -> None:
        """Slide the units of least value in even ratios, down to each budget in turn.

        If the passes allow, gradients over parts are averaged at each step.
        """
        cost, most = self.gradient_cost, slots_of(self.all_full, self.costs)
        last = self.points[0].slots
        surplus = (most - last) / (self.costs[0] - self.costs[-1])
        steps = max(1, min(max(_STEPS, 2 * len(self.points)), math.ceil(math.sqrt(surplus))))
        averaged = 1
        if cost > 0:
            affordable = min(self.free - reserved - cost, _STEPS * cost)
            passes = max(_ELIMINATION_SHARE * (self.free + 1), affordable)
            steps = max(1, min(steps, int(passes / cost)))
            averaged = min(SHARES, max(1, int(0.6 * passes / cost / steps)))
        lowest, choices = max(last, self.costs[0]), self.all_full
        running = RunningMean(self.num_choices * choices.size)
        for step in range(1, steps + 1):
            fresh = self.values_at(choices, averaged)
            values = running.add(fresh.reshape(-1)).reshape(fresh.shape)
            slots = last if step == steps else round(most * (lowest / most) ** (step / steps))
            for point in reversed(self.points):
                if point.slots >= slots and not point.starts:
                    choices = self.layout(values, point.slots, widest=choices)
                    point.starts["elimination"] = choices
            choices = self.layout(values, slots, widest=choices)

    # Moves.

    def _improve(self) -> None:
        """Moves for one budget after another until the passes or the proposals are exhausted."""
        kinds = self._exchange, self._swap, self._grown, self._shrunk, self._start
        moves = [Move(propose) for propose in kinds]
        grown = moves[2]
        fruitless = 0
        while self.free >= 1 and fruitless < _FRUITLESS * len(self.points):
            number = min(range(len(self.points)), key=self._turn)
            move = max(moves, key=lambda move: move.promise)
            stuck = self._stuck_point()
            if stuck is not None:
                number, move = stuck, grown
            point = self.points[number]
            left, rank = self.left, point.best.rank
            proposal = move.propose(number)
            is_new = proposal is not None and self._measure(point, *proposal)
            fruitless = 0 if is_new else fruitless + 1
            won = point.best.rank > rank
            point.failures = 0 if won else point.failures + 1
            move.wins += won
            move.passes += max(left - self.left, 1.0)

    def _turn(self, number: int) -> tuple[int, float, float]:
        """Sort key: budgets that still improve first, by the next larger budget's advantage."""
        point = self.points[number]
        score, log_likelihood = point.best.rank
        larger = [one.best.evaluation for one in self.points[number + 1 :]]
        above = [*larger, self._original][0].rank
        return point.failures // _PATIENCE, score - above[0], log_likelihood - above[1]

    def _stuck_point(self) -> int | None:
        """A budget that scores no better than the next smaller one, once per layout of that one."""
        for number in range(1, len(self.points)):
            below, point = self.points[number - 1].best, self.points[number]
            key = below.choices.tobytes()
            if point.best.rank <= below.rank and key not in point.grown_from:
                point.grown_from.add(key)
                return number
        return None

    def _is_stuck(self, number: int) -> bool:
        """Whether a budget scores below the original and no better than the next smaller one."""
        score = self.points[number].best.evaluation.score
        below = self.points[number - 1].best.evaluation.score if number else -1.0
        return score < self._original.score - 1e-9 and score <= below

    def _start(self, number: int) -> Proposal | None:
        """The next start that is not measured yet."""
        starts = self.points[number].starts
        if not starts:
            return None
        name = next(iter(starts))
        choices = starts.pop(name)
        return (None, choices, name) if self._pays(choices) else None

    def _grown(self, number: int) -> Proposal | None:
        """The next smaller budget's best layout, widened by its gradient."""
        return self._neighbour(number, number - 1) if number else None

    def _shrunk(self, number: int) -> Proposal | None:
        """The next larger budget's best layout, narrowed by its gradient."""
        return self._neighbour(number, number + 1) if number + 1 < len(self.points) else None

    def _neighbour(self, number: int, other: int) -> Proposal | None:
        point, choices = self.points[number], self.points[other].best.choices
        if not self._pays(point.best.choices, at=choices):
            return None
        bound, name = ("narrowest", "grown") if other < number else ("widest", "shrunk")
        values = self.values_at(choices)
        return point.best, allotted(values, self.costs, point.slots, **{bound: choices}), name

    def _movable(self, number: int) -> list[Track]:
        """Tracks for a move of which the passes suffice, the one whose turn it is first."""
        tracks = [one for one in self.points[number].tracks if self._pays(one.choices, one.choices)]
        tracks.sort(key=lambda one: one.rank, reverse=True)
        return sorted(tracks, key=lambda one: one.failures // _STALLED)

    def _exchange(self, number: int) -> Proposal | None:
        """Exchanges in a track, first of all in those without any."""
        tracks = self._movable(number)
        if not tracks:
            return None
        track = next((one for one in tracks if not one.exchanged), tracks[0])
        track.exchanged = True
        changed = self._exchanged(track.slots, track.choices, 1, track.failures // 2)
        return track, changed, "exchange"

    def _exchanged(
        self, slots: int, choices: Choices, reserved: int = 0, halvings: int = 0
    ) -> Choices:
        """Exchange up to a quarter of the full units, then half as many, by a gradient each."""
        pairs = max(1, max(1, self._full_units(slots) // 4) >> halvings)
        while pairs >= 1 and self.free >= reserved + self.gradient_cost:
            changed = self._changed(choices, self.values_at(choices), slots, pairs)
            if (changed == choices).all():
                break
            choices = changed
            pairs //= 2
        return choices

    def _changed(self, choices: Choices, values: Values, slots: int, pairs: int) -> Choices:
        """The best layout by `values` in which up to `pairs` units are wider, as many narrower.

        Substitutes for each other all predict the same gain, so half of the candidates are drawn.
        """
        every = np.arange(self.num_choices)
        gains = values - np.take_along_axis(values, choices[..., None], axis=2)
        wider, narrower = (
            np.where(is_allowed, gains, -np.inf).max(axis=2).reshape(-1)
            for is_allowed in (every < choices[..., None], every > choices[..., None])
        )
        pool = np.argsort(-wider, kind="stable")[: 2 * pairs]
        pool = pool[wider[pool] > -narrower.max()]
        drawn = pool[np.sort(self._rng.permutation(len(pool))[:pairs])]
        order = np.lexsort((self._rng.permutation(choices.size), -narrower))[:pairs]
        narrowest, widest = choices.copy(), choices.copy()
        widest.reshape(-1)[drawn] = 0
        narrowest.reshape(-1)[order] = self.num_choices - 1
        return allotted(values, self.costs, slots, narrowest=narrowest, widest=widest)

    def _swap(self, number: int) -> Proposal | None:
        """The most promising untried change of two units, one wider and one narrower."""
        for track in self._movable(number):
            swapped = self._swapped(track)
            if swapped is not None:
                return track, swapped, "swap"
        return None

    def _swapped(self, track: Track) -> Choices | None:
        choices, values = track.choices, self.values_at(track.choices)
        current = np.take_along_axis(values, choices[..., None], axis=2)
        penalty = _FAILURE * float(np.abs(values[..., 0]).mean()) * track.failed
        gains = (values - current - penalty[..., None]).reshape(-1)
        steps = (self.costs - self.costs[choices][..., None]).reshape(-1)
        wider, narrower = (
            index[np.argsort(-gains[index], kind="stable")][:_SWAPPED]
            for index in (np.flatnonzero(steps > 0), np.flatnonzero(steps < 0))
        )
        # The last column means no second unit.
        pair_gains = gains[wider][:, None] + np.append(gains[narrower], 0.0)
        slots = steps[wider][:, None] + np.append(steps[narrower], 0.0)
        second_unit = np.append(narrower // self.num_choices, -1)
        is_same = (wider // self.num_choices)[:, None] == second_unit
        pair_gains[(slots > track.slots - slots_of(choices, self.costs)) | is_same] = -np.inf
        for index in np.argsort(-pair_gains, axis=None, kind="stable"):
            first, second = divmod(int(index), pair_gains.shape[1])
            if pair_gains[first, second] == -np.inf:
                return None
            entries = np.array([wider[first], *narrower[second : second + 1]])
            changed = choices.copy()
            changed.reshape(-1)[entries // self.num_choices] = entries % self.num_choices
            if (track.slots, changed.tobytes()) not in self._tried:
                track.failed.reshape(-1)[entries // self.num_choices] += 1
                return changed
        return None

    def _measure(self, point: Point, track: Track | None, choices: Choices, name: str) -> bool:
        """Measure a layout for a track, by default a new one; False if it was tried before."""
        if (point.slots, choices.tobytes()) in self._tried:
            return False
        self._tried.add((point.slots, choices.tobytes()))
        evaluation = self._measured.get(choices.tobytes())
        if evaluation is None:
            phase = "start" if track is None else "swaps"
            evaluation = self.evaluator.evaluate(self.mask(choices), phase, name)
            self.left -= evaluation.full_forward_equivalents
            self.evaluations += 1
            self._measured[choices.tobytes()] = evaluation
        is_best = not point.tracks or evaluation.rank > point.best.rank
        if track is None:
            track = Track(name, point.slots, choices, evaluation, 0.0, np.zeros(self.shape))
            point.tracks.append(track)
            self._keep(track, choices, evaluation)
        elif evaluation.rank > track.rank:
            self._keep(track, choices, evaluation)
        else:
            track.failures += 1
        slots = slots_of(choices, self.costs)
        for other in self.points:
            fits = other is not point and other.tracks and slots <= other.slots
            if fits and evaluation.score > other.best.evaluation.score:
                self._keep(other.best, choices, evaluation)
                other.failures = 0
        if is_best:
            logger.info(
                "search: %s: best mask of %s KV slots so far, score %.4f, log-likelihood %.4f, "
                "%.1f passes left",
                name, f"{point.slots:,}", *evaluation.rank, max(0.0, self.left),
            )  # fmt: skip
        return True

    def _keep(self, track: Track, choices: Choices, evaluation: Evaluation) -> None:
        """A track's new best layout."""
        track.choices, track.evaluation = choices, evaluation
        track.passes, track.failures = self.all_passes - self.left, 0
        track.failed[:] = 0


class RunningMean:
    """Running mean of each unit's value, which restarts when a gradient disagrees with it.

    A mean over parts is less noisy, but a unit's value rises when its substitutes slide.
    """

    def __init__(self, size: int) -> None:
        self._mean, self._count = np.zeros(size), np.zeros(size)

    def add(self, values: Values) -> Values:
        larger = np.maximum(np.abs(values), np.abs(self._mean))
        agree = np.abs(values - self._mean) <= _AGREEMENT * larger
        self._count = np.where(agree, self._count, 0) + 1
        self._mean = np.where(agree, self._mean + (values - self._mean) / self._count, values)
        return self._mean


def _ascending(search: GradientSearch) -> list[Track]:
    """The best layouts and both ends by slots; those that score less than a smaller one left out.

    A larger budget's layout may have no more slots than a smaller one's.
    """
    by_slots: dict[float, Track] = {}
    ends = []
    for choices in (search.narrowest, search.all_full):
        mask = search.evaluator.units.head_mask(search.mask(choices))
        evaluation, slots = search.evaluator.log.get(mask), int(slots_of(choices, search.costs))
        assert evaluation is not None
        ends.append(Track("end", slots, choices, evaluation, 0.0, np.zeros(search.shape)))
    best = -1.0
    for track in [ends[0], *(point.best for point in search.points), ends[1]]:
        slots, score = int(slots_of(track.choices, search.costs)), track.evaluation.score
        if score >= best or track is ends[1]:
            for other in [one for one in by_slots if one >= slots]:
                del by_slots[other]
            by_slots[slots] = replace(track, slots=slots)
        best = max(best, score)
    return list(by_slots.values())


def front_result(search: GradientSearch, anchors: Anchors) -> SearchResult:
    """The front, and its smallest mask of those with the best score, the original left out."""
    evaluator, points = search.evaluator, _ascending(search)
    assert evaluator.slot_budgets is not None
    context, smaller = evaluator.slot_budgets.context, points[:-1]
    for point in smaller:
        _note_poor_mask(evaluator, point.slots / points[-1].slots, point.evaluation.score)
    best = max(smaller, key=lambda point: point.evaluation.score)  # the first of equal ones
    evaluation = evaluator.evaluate(search.mask(best.choices), "final", "final mask")
    found = Front(context, tuple(_front_point(search, point, context) for point in points))
    mask = evaluator.units.head_mask(search.mask(best.choices))
    return SearchResult(mask, evaluation, anchors, evaluation, front=found)


def _front_point(search: GradientSearch, track: Track, context: int) -> FrontPoint:
    evaluator, mask, held_out = search.evaluator, search.mask(track.choices), None
    if count := evaluator.held_out_examples:
        score = evaluator.evaluate_held_out(mask).score
        held_out = HeldOut(*share(score, count, _HELD_OUT_TAIL))
    mask = evaluator.units.head_mask(mask)
    score = track.evaluation.score
    return FrontPoint(mask, mask.kv_slots(context), None, score, held_out, track.passes)
