"""Fronts of a search beside the exact ones, on landscapes small enough to measure every layout.

    python -m tests.benchmarks.front_certainty [--kappa 40] [--seeds 8] [--first-seed 0]
        [--layers 2] [--windows 16,64,256]

Of each landscape (`tests.benchmarks.window_landscapes`, layers of 4 units at 1,024 tokens: 65,536
layouts, 531,441 with 3 layers and 2 windows) eight budgets are spaced evenly on a logarithmic
scale. Printed is
the hypervolume of a front: the mean over the budgets of the value of its best mask within the
budget, as a share of that of the exact front. 1 is exact.

    fixed W      the best mask of full units and one window, that which is best for all budgets: no
                 search at a fixed window can exceed it
    by layer     the best layout whose layers are uniform
    ranking      full units by what each costs alone, beside the window that is best for all budgets
    MoA          the allotment by eight gradients at the original model, as a rule after MoA
                 (arXiv 2406.14909), whose elastic spans come from first-order effects
    gates        learned gates, a search for each budget and window; all its searches of a window
                 together may spend what the front may, each at least the four passes that a search
                 takes, so that they spend more. The best window counts
    bosch_plus   the same with bosch_plus
    front        one search; its passes stand behind it
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Iterable
from statistics import mean

import numpy as np
import numpy.typing as npt

from bosch.errors import UserError
from bosch.heads import HeadMask
from bosch.objective.evaluation_log import (
    CanWin,
    Evaluation,
    EvaluationContext,
    EvaluationLog,
    GateGradient,
)
from bosch.search.allotment import allotted
from bosch.search.evaluator import Evaluator, SlotBudgets
from bosch.search.runs import find_mask, run_method
from bosch.search.settings import SearchSettings, front_budget
from tests.benchmarks.landscapes import NAMES
from tests.benchmarks.window_landscapes import TOKENS, WindowLandscape

UNITS, BUDGETS = 4, 8
_GROUPED = [name for name in NAMES if name not in ("rugged", "layers", "by_layer")]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kappa", type=int, default=40)
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--names", default=",".join(_GROUPED))
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--windows", default="16,64,256")
    options = parser.parse_args()
    windows = tuple(int(size) for size in options.windows.split(","))
    logging.disable(logging.WARNING)
    totals: dict[str, list[float]] = {}
    for name in options.names.split(","):
        shares: dict[str, list[float]] = {}
        for seed in range(options.first_seed, options.first_seed + options.seeds):
            scorer = WindowLandscape(name, (options.layers, UNITS), windows, seed)
            for method, share in measured(scorer, seed, options.kappa).items():
                shares.setdefault(method, []).append(share)
        _print(name, {method: mean(values) for method, values in shares.items()})
        for method, values in shares.items():
            totals.setdefault(method, []).extend(values)
    _print("all", {method: mean(values) for method, values in totals.items()})
    _print("worst", {method: min(values) for method, values in totals.items() if values})


def measured(scorer: WindowLandscape, seed: int, kappa: int) -> dict[str, float]:
    """Shares of the exact hypervolume, by method; `passes` are those of the front."""
    shape = (scorer.num_layers, UNITS)
    layouts = scorer.layouts
    values, slots = scorer.value(layouts), scorer.slots(layouts)
    units, narrowest = layouts.shape[1], len(scorer.windows)
    spaced = np.geomspace(slots.min() + TOKENS, slots.max(), BUDGETS + 1)[:-1]
    budgets = tuple(int(budget) for budget in spaced)
    nothing = float(values[slots.argmin()])

    def hypervolume(found: npt.NDArray[np.bool_] | list[int]) -> float:
        chosen, held = values[found], slots[found]
        within = [chosen[held <= budget] for budget in budgets]
        return mean(float(max(nothing, *part)) if len(part) else nothing for part in within)

    exact = hypervolume(np.ones(len(layouts), dtype=np.bool_))
    index = {layout.tobytes(): number for number, layout in enumerate(layouts)}

    def of(masks: Iterable[npt.ArrayLike]) -> float:
        rows = [np.asarray(mask).reshape(-1).astype(np.int64) for mask in masks]
        return hypervolume([index[row.tobytes()] for row in rows])

    evaluator = Evaluator(scorer, EvaluationLog(None, EvaluationContext("", "", 1, 0)))
    evaluator.slot_budgets = SlotBudgets(TOKENS, budgets, budgets[len(budgets) // 2])
    settings = SearchSettings(0.5, budget_per_layer=kappa, seed=seed)
    front = find_mask("front", evaluator, settings).front
    by_layer = layouts.reshape(-1, *shape)
    uniform = (by_layer == by_layer[:, :, :1]).all(axis=(1, 2))
    kinds = range(1, narrowest + 1)
    full = np.zeros(units, dtype=np.int64)
    alone = [
        float(scorer.value(np.where(np.arange(units) == u, narrowest, 0))) for u in range(units)
    ]
    ranking = np.argsort(alone)
    results = {
        "fixed W": max(hypervolume(np.isin(layouts, (0, kind)).all(axis=1)) for kind in kinds),
        "by layer": hypervolume(uniform),
        "ranking": max(
            of(
                np.where(np.isin(np.arange(units), ranking[:count]), full, kind)
                for count in range(units + 1)
            )
            for kind in kinds
        ),
    }
    costs = np.array([TOKENS, *[window.held(TOKENS) for window in scorer.windows]], dtype=float)
    original = HeadMask.all_full(*shape)
    effects = np.mean([scorer.window_gradient(original, i, 8).values for i in range(8)], axis=0)
    results["MoA"] = of(allotted(effects, costs, budget) for budget in budgets)
    each = max(1, round(front_budget(settings, shape[0]) / len(budgets) * 10 / shape[0]))
    for method, label in (("learned_gates", "gates"), ("bosch_plus", "bosch_plus")):
        results[label] = max(
            of(_searched(method, _OneWindow(scorer, kind), seed, budgets, each)) for kind in kinds
        )
    results["front"] = of(front.mask(i).choices for i in range(len(front.points)))
    shares = {method: value / exact for method, value in results.items()}
    return shares | {"passes": evaluator.costs()["full_forward_equivalents"]}


def _searched(
    method: str, scorer: _OneWindow, seed: int, budgets: tuple[int, ...], kappa: int
) -> Iterable[npt.ArrayLike]:
    """Masks of one search for each budget, at one window."""
    units, held = scorer.num_layers * UNITS, scorer.windows[0].held(TOKENS)
    for count in {int((budget - units * held) / (TOKENS - held)) for budget in budgets}:
        if 0 < count < units:
            settings = SearchSettings(1 - count / units, budget_per_layer=kappa, seed=seed)
            try:
                mask = run_method(method, scorer, settings).mask
            except UserError:  # nothing is lost with every unit sliding
                mask = HeadMask.all_sliding(scorer.num_layers, UNITS)
            yield np.where(mask.is_full, 0, scorer.kind)


class _OneWindow:
    """A landscape of several windows whose sliding units all have one."""

    def __init__(self, scorer: WindowLandscape, kind: int) -> None:
        self._scorer, self.kind = scorer, kind
        self.num_layers, self.num_key_value_heads = scorer.num_layers, scorer.num_key_value_heads
        self.quantum, self.windows = scorer.quantum, (scorer.windows[kind - 1],)
        self.gradient_passes = scorer.gradient_passes

    def _mask(self, mask: HeadMask) -> HeadMask:
        return HeadMask.of_choices(np.where(mask.is_full, 0, self.kind))

    def evaluate(
        self, mask: HeadMask, shared_layers: int = 0, *, can_win: CanWin | None = None
    ) -> Evaluation:
        return self._scorer.evaluate(self._mask(mask), can_win=can_win)

    def gate_gradient(self, mask: HeadMask, share: int = 0, shares: int = 1) -> GateGradient:
        changes = np.array(self._scorer.window_gradient(self._mask(mask), share, shares).values)
        return GateGradient((changes[..., 0] - changes[..., self.kind]).tolist(), 0.0, 4.5 / 8)


def _print(name: str, shares: dict[str, float]) -> None:
    cells = "  ".join(f"{method} {value:6.3f}" for method, value in shares.items())
    sys.stdout.write(f"{name:11} {cells}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
