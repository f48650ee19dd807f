"""A front beside separate searches of the same KV slots, on a composition model.

    python -m tests.benchmarks.front_study composition_8x8 [--windows 8,16,32,64] [--kappa 16]
        [--seeds 8] [--rivals 16,2] [--without kick]

Each seed has 16 questions of its own, of which the front holds four out. Its eight budgets are
evenly spaced on a logarithmic scale. `--without` leaves moves out, or the learned gates. A rival is
bosch_plus for each budget and the narrowest window, with all 16 questions, at each kappa of
`--rivals`. Printed are shares of 96 other questions that are answered, for each budget the mean
over seeds of the best mask within it, the mean over all budgets, which is the hypervolume, and the
passes of one seed for all budgets, without reuse.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from bosch.heads import HeadMask
from bosch.model.loading import load_model
from bosch.model.search_mode import prepare_for_search
from bosch.objective.calibration import CalibrationSet
from bosch.objective.evaluation_log import EvaluationLog
from bosch.objective.objective import Objective
from bosch.search import front_moves
from bosch.search.allotment import Choices
from bosch.search.evaluator import Evaluator, SlotBudgets
from bosch.search.front import FrontSearch
from bosch.search.gradient_search import Move
from bosch.search.runs import find_mask, run_method
from bosch.search.settings import SearchSettings
from bosch.window import Window, rising_menu
from pipeline.recipe.load import ROOT
from recipes.study.make_composition_model import examples

CONTEXT, BUDGETS, QUESTIONS, TEST = 176, 8, 16, 96
_PASSES = "naive_full_forward_equivalents"


def main() -> None:
    options = _options()
    logging.disable(logging.WARNING)
    model: Any = load_model(str(ROOT / "recipes/study" / options.model), dtype="float32")
    prepare_for_search(model)
    sizes = [int(size) for size in options.windows.split(",")]
    study = _Study(model, sizes, options.first_seed + options.seeds - 1)
    scores: dict[str, list[list[float]]] = {}
    passes: dict[str, list[float]] = {}
    _leave_out({name for name in options.without.split(",") if name})
    for seed in range(options.first_seed, options.first_seed + options.seeds):
        for name, found, spent in study.found(seed, options.kappa, options.rivals):
            scores.setdefault(name, []).append(study.scores(found))
            passes.setdefault(name, []).append(spent)
            _print(f"seed {seed} {name}", scores[name][-1], spent)
    _print("KV slots", [float(budget) for budget in study.budgets], 0.0)
    for name, rows in scores.items():
        _print(name, np.mean(rows, axis=0).tolist(), float(np.mean(passes[name])))
        _print("  deviation", np.std(rows, axis=0).tolist(), 0.0)


class _Study:
    """The model, its budgets and its test questions."""

    def __init__(self, model: Any, sizes: list[int], last_seed: int) -> None:
        self.model, self.menu = model, rising_menu(sizes, 0)
        # The test's questions come first: no seed has any of them.
        self.records = examples(TEST + QUESTIONS * (last_seed + 1))
        config = model.config
        self.heads = config.num_hidden_layers * config.num_key_value_heads
        self.least, self.most = self.heads * sizes[0], self.heads * CONTEXT
        spaced = np.geomspace(self.least, self.most, BUDGETS + 2)[1:-1]
        self.budgets = tuple(round(slots) for slots in spaced)
        self.test = Objective(
            model, self._set(self.records[:TEST]), self.menu, batch_size=TEST, reuse_bytes=0
        )
        self._known: dict[str, float] = {}

    def found(self, seed: int, kappa: int, rivals: str) -> Iterator[tuple[str, Any, float]]:
        """Methods with their mask for each budget, the front's first, and their passes."""
        first = TEST + QUESTIONS * seed
        calibration = self._set(self.records[first : first + QUESTIONS])
        used, held_out = calibration.split(4)
        objective = Objective(self.model, used, self.menu, held_out=held_out)
        evaluator = Evaluator(objective, EvaluationLog(None, objective.context))
        evaluator.slot_budgets = SlotBudgets(
            CONTEXT, self.budgets, self.budgets[len(self.budgets) // 2]
        )
        settings = SearchSettings(1.0, budget_per_layer=kappa, seed=seed)
        front = find_mask("front", evaluator, settings).front
        masks = []
        for budget in self.budgets:
            within = [i for i, point in enumerate(front.points) if point.kv_slots <= budget]
            best = max(within, key=lambda i: (front.points[i].score, front.points[i].kv_slots))
            masks.append(front.mask(best))
        yield f"front {kappa}", masks, evaluator.costs()[_PASSES]
        narrowest = len(self.menu)
        for rival in (int(text) for text in rivals.split(",") if text):
            masks, spent = [], 0.0
            for budget in self.budgets:
                full = int((budget - self.least) / (CONTEXT - self.menu[-1].size))
                objective = Objective(self.model, calibration, Window(self.menu[-1].size))
                ratio = 1 - full / self.heads
                run = run_method(
                    "bosch_plus",
                    objective,
                    SearchSettings(ratio, budget_per_layer=rival, seed=seed),
                )
                masks.append(HeadMask.of_choices(np.where(run.mask.is_full, 0, narrowest)))
                spent += run.costs[_PASSES]
            yield f"bosch_plus {rival}", masks, spent

    def scores(self, masks: list[HeadMask]) -> list[float]:
        for mask in masks:
            if mask.key not in self._known:
                self._known[mask.key] = self.test.evaluate(mask).score
        return [self._known[mask.key] for mask in masks]

    @staticmethod
    def _set(records: list[dict[str, Any]]) -> CalibrationSet:
        return CalibrationSet.from_records((r["input_ids"], r["answer_length"]) for r in records)


def _leave_out(names: set[str]) -> None:
    """Moves of these names propose nothing; without gates there is one start."""
    unknown = names - {"exchange", "swap", "grown", "shrunk", "kick", "other start", "gates"}
    if unknown:
        raise SystemExit(f"--without: there is no {', '.join(sorted(unknown))}")
    if "gates" in names:
        FrontSearch.gates_to_learn = lambda self, gradients: 0  # type: ignore[method-assign]

    def move(name: str, propose: Callable[[int], Choices | None]) -> Move:
        return Move(name, (lambda number: None) if name in names else propose)

    front_moves.Move = move  # type: ignore[attr-defined, assignment, misc]


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", choices=["composition_8x8", "composition_12x4"])
    parser.add_argument("--windows", default="8,16,32,64")
    parser.add_argument("--kappa", type=int, default=16)
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--rivals", default="16,2")
    parser.add_argument("--without", default="")
    return parser.parse_args()


def _print(name: str, values: list[float], passes: float) -> None:
    cells = " ".join(f"{value:7,.3g}" if value > 99 else f"{value:7.3f}" for value in values)
    mean = float(np.mean(values))
    sys.stdout.write(f"{name:24} {cells}   mean {mean:.3f}  passes {passes:.1f}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
