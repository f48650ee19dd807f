"""State of a search for a front: its budgets, values of choices, and measured layouts."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from bosch.errors import UserError
from bosch.masks import HeadMask
from bosch.objective.evaluation_log import Evaluation
from bosch.search.allotment import Choices, Values, slots_of, spaced_slots
from bosch.search.evaluator import SHARES, Evaluator, SlotBudgets
from bosch.search.gradient_search import GradientMeans
from bosch.search.settings import SearchSettings, front_budget

logger = logging.getLogger(__name__)

# Whether a score and log-likelihood are a point's best.
Wins = Callable[[float, float], bool]


@dataclass
class Point:
    """A budget, its best layout so far, and the success of its moves."""

    budget: int
    choices: Choices
    evaluation: Evaluation
    passes: float
    failed: Values
    failures: int = 0  # moves since the last success


class State:
    """The points of one search, the remaining passes, and the gradients."""

    def __init__(self, evaluator: Evaluator, settings: SearchSettings) -> None:
        self.evaluator, self.shape = evaluator, evaluator.shape
        # A scorer without a model has one token.
        longest = int(getattr(getattr(evaluator.scorer, "calibration", None), "max_length", 1))
        budgets = evaluator.slot_budgets or SlotBudgets(longest)
        self.context, self.menu = budgets.context, evaluator.windows
        held = [window.held(self.context) for window in self.menu]
        if not all(a > b for a, b in zip([self.context, *held], held, strict=False)):
            raise UserError(
                f"search.windows: at {self.context:,} tokens each window must hold fewer than the "
                f"next and all fewer than full attention, they hold {held[::-1]}"
            )
        group = evaluator.units.heads.shape[2]
        self.costs: Values = group * np.array([self.context, *held], dtype=np.float64)
        self.num_choices = len(self.costs)
        self._sizes = np.array([0, *(window.size for window in self.menu)])
        self.all_full: Choices = np.zeros(self.shape, dtype=np.int64)
        self.narrowest = np.full(self.shape, self.num_choices - 1)
        self.min_slots = int(slots_of(self.narrowest, self.costs))
        self.max_slots = int(slots_of(self.all_full, self.costs))
        self.left = self.all_passes = float(front_budget(settings, self.shape[0]))
        self.gradients = GradientMeans(evaluator, self._gradient)
        self.held_out_cost = evaluator.held_out_passes
        self.evaluations = 0
        self.points: dict[int, Point] = {}
        self.kinds_tried = False
        self.other_start: Callable[[int], Choices | None] | None = None
        self._rng = np.random.default_rng(0)
        self._measured: dict[bytes, Evaluation] = {}
        self._tried: set[tuple[int, bytes]] = set()
        self._cost_of: dict[bytes, float] = {}
        self._regrown: set[tuple[int, bytes]] = set()
        self._set_budgets(budgets)
        self.full = self._anchor(self.all_full)

    def _set_budgets(self, budgets: SlotBudgets) -> None:
        """The budgets of the points, without the ends of the front, which are the anchors."""
        for slots in budgets.slots:
            if slots < self.min_slots:
                raise UserError(
                    f"search.points: {slots:,} KV slots at {self.context:,} tokens are too few, "
                    f"every head with the smallest window needs {self.min_slots:,}"
                )
        chosen = budgets.slots or spaced_slots(self.min_slots, self.costs[0], self.max_slots)
        lowest = self.min_slots + self.costs[-2] - self.costs[-1]
        inner = {int(slots) for slots in chosen if lowest <= slots < self.max_slots}
        self.budgets = self._affordable_budgets(sorted(inner))
        self.unmeasured = {*range(len(self.budgets))}
        self.evaluator.on_budget = self._is_within
        logger.info(
            "front: budgets of %s KV slots at %d tokens, %.0f passes to spend",
            ", ".join(f"{budget:,}" for budget in self.budgets), self.context, self.left,
        )  # fmt: skip

    def _affordable_budgets(self, budgets: list[int]) -> list[int]:
        """The budgets for which the passes suffice, evenly spread."""
        costs = [self._cost_of_first(budget) for budget in budgets]
        rest = self.left - self._ends_cost - 2 * self.gradients.cost
        paid = len(budgets) if sum(costs) <= rest else int(rest / max([1e-9, *costs]))
        # `free` counts at least one pass for each mask, and a gradient comes before the first one.
        affordable = max(1, min(paid, int(self.left - self.gradients.cost)))
        if len(budgets) <= affordable:
            return budgets
        self.evaluator.note(
            f"search.budget_per_layer: {self.all_passes:g} passes pay for {affordable} of "
            f"{len(budgets)} points of the front"
        )
        spread = np.linspace(0, len(budgets) - 1, affordable).round().astype(int)
        return [budgets[index] for index in spread]

    def mask(self, choices: Choices) -> HeadMask:
        """The mask of units with these choices: 0 full, k the k-th window from the widest."""
        return HeadMask(self._sizes[choices].tolist(), self.menu[0].sinks)

    def _is_within(self, mask: HeadMask) -> bool:
        """Whether a mask of heads is within the largest budget."""
        return bool(self.budgets) and mask.kv_slots(self.context) <= self.budgets[-1]

    @property
    def _ends_cost(self) -> float:
        """Passes for the held-out examples of both ends."""
        return self.held_out_cost * (self._cost(self.narrowest) + self._cost(self.all_full))

    def _cost_of_first(self, budget: int) -> float:
        """Passes for a budget's layout with the narrowest window, held-out examples included."""
        full = int((budget - self.min_slots) / (self.costs[0] - self.costs[-1]))
        choices = self.narrowest.copy()
        choices.reshape(-1)[:full] = 0
        return (1 + self.held_out_cost) * self._cost(choices)

    def _cost(self, choices: Choices) -> float:
        """Passes for a layout, without the held-out examples."""
        key = choices.tobytes()
        if key not in self._cost_of:
            self._cost_of[key] = self.evaluator.cost_of_mask(self.mask(choices))
        return self._cost_of[key]

    @property
    def free(self) -> float:
        """Passes that are not reserved, but no more than masks may still be measured."""
        reserved = self._ends_cost + sum(
            self._cost_of_first(self.budgets[number]) for number in self.unmeasured
        )
        reserved += self.held_out_cost * sum(
            self._cost(point.choices) for point in self.points.values()
        )
        spare = self.all_passes - self.evaluations - len(self.unmeasured)
        return min(self.left - reserved, spare)

    def _affordable(self, choices: Choices) -> bool:
        """Whether the passes suffice for a layout and, if it wins, its held-out examples."""
        return self.free >= max(1.0, (1 + self.held_out_cost) * self._cost(choices))

    def _anchor(self, choices: Choices) -> Evaluation:
        """The evaluation of an anchor, in which all units have the same choice."""
        mask = self.evaluator.units.head_mask(self.mask(choices))
        evaluation = self.evaluator.log.get(mask)
        assert evaluation is not None
        return evaluation

    def _gradient(self, choices: Choices, share: int) -> Values:
        """A gradient at a layout, as values of all choices."""
        self.left -= self.evaluator.cost_of_gradient(share, SHARES)
        return self.evaluator.window_values(self.mask(choices), share, SHARES)

    def _pays(self, choices: Choices) -> bool:
        """Whether the passes suffice for one more mask and the gradient that proposes it."""
        gradient = self.gradients.cost if self.gradients.known(choices) is None else 0.0
        return self.free - gradient >= (1 + self.held_out_cost) * self._cost(choices)

    @property
    def _spent(self) -> float:
        return self.all_passes - self.left

    def _evaluate(
        self, choices: Choices, phase: str, name: str, wins: Wins | None = None
    ) -> Evaluation | None:
        """The evaluation of a layout, or None if it loses; known winners cost nothing."""
        key = choices.tobytes()
        if key not in self._measured:
            mask = self.mask(choices)
            evaluation = self.evaluator.evaluate(mask, phase, name)
            self.left -= evaluation.full_forward_equivalents
            self.evaluations += 1
            if wins is not None and not wins(*evaluation.rank):
                return None
            self._measured[key] = evaluation
        return self._measured[key]

    def _measure(self, number: int, choices: Choices, name: str, phase: str = "start") -> bool:
        """Measure a layout for a budget; keep it wherever it is the best so far."""
        point = self.points[number]
        key = number, choices.tobytes()
        if key in self._tried:
            return False
        self._tried.add(key)
        slots = slots_of(choices, self.costs)

        def improves(other: Point, score: float, log_likelihood: float) -> bool:
            if slots > other.budget:
                return False
            if other is point:
                return (score, log_likelihood) > other.evaluation.rank
            return score > other.evaluation.score

        def improved(*rank: float) -> list[Point]:
            return [other for other in self.points.values() if improves(other, *rank)]

        evaluation = self._evaluate(choices, phase, name, lambda *rank: bool(improved(*rank)))
        if evaluation is None:
            return False
        winners = improved(*evaluation.rank)
        for other in winners:
            other.choices, other.evaluation, other.passes = choices, evaluation, self._spent
            other.failed[:] = 0
            other.failures = 0
        won = any(other is point for other in winners)
        if won:
            logger.info(
                "front: %s: best mask of %s KV slots so far, score %.4f, log-likelihood %.4f, "
                "%.1f passes left",
                name, f"{point.budget:,}", *evaluation.rank, self.left,
            )  # fmt: skip
        return won
