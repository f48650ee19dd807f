"""`python -m pipeline compare RECIPE`: every method at every ratio, as in BOSCH Tables 1 and 2.

A cell of the tables is a recipe of its own, brought up to date like any other: what is in the store
is not made again, and a comparison that was stopped goes on.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import get_args

from bosch.errors import RunError, UserError
from pipeline.checks import Parts, find_faults
from pipeline.comparison import Cell, Comparison, Result, read_result, write_comparison
from pipeline.faults import suggest
from pipeline.graph import Stage
from pipeline.launch import Launcher, launch
from pipeline.recipe import LoadedRecipe, listing
from pipeline.runner import Choice, Runner
from stages.configs import SearchConfig
from stages.reporting.formats import format_seconds

HELP = "run methods at several ratios and print the paper's tables"
METHODS: tuple[str, ...] = get_args(SearchConfig.model_fields["method"].annotation)
_RATIOS = "0.25,0.5,0.75,0.875"
# The paper averages random layers over three runs; these methods do not depend on the seed.
_RANDOM, _RANDOM_RUNS = "rand", 3
_SEEDLESS = ("bme", "intr", "dcam", "apl", "proxy", "qada", "fisher", "bosch_plus")


def add_options(parser: argparse.ArgumentParser) -> None:
    """What a comparison can be told besides the recipe."""
    parser.add_argument("--methods", default="all", help="separated by commas (default: all)")
    parser.add_argument(
        "--ratios", default=_RATIOS, help="SWA ratios, separated by commas (default: %(default)s)"
    )
    parser.add_argument(
        "--seeds",
        help="seeds of the search, separated by commas (default: the recipe's; three for rand)",
    )
    parser.add_argument(
        "--with-training", action="store_true", help="train each hybrid, too, and score it again"
    )
    parser.add_argument("--dry-run", action="store_true", help="only say what would run, and why")
    parser.add_argument(
        "--wait", action="store_true", help="wait for stages that another run is making"
    )


def run_comparison(
    loaded: LoadedRecipe,
    options: argparse.Namespace,
    stages: Sequence[Stage],
    launcher: Launcher = launch,
) -> Comparison:
    """Bring every cell up to date and write the tables below runs/<recipe>/compare.

    Raises UserError listing everything that is wrong with the options, or what a stage raises.
    """
    cells = _cells(loaded, options)
    comparison = Comparison(
        recipe=loaded.recipe.name,
        model=loaded.recipe.model.path,
        folder=loaded.output_root / loaded.recipe.name / "compare",
        cells=tuple(cells),
        with_training=options.with_training,
    )

    def runner_of(cell: Cell) -> Runner:
        """Made anew for each use: it knows the hashes that others have computed meanwhile."""
        choice = Choice(until="evaluate", wait=options.wait)
        runner = Runner(_recipe_of(loaded, cell, options), choice, stages, launcher)
        runner.hasher.save()
        return runner

    pending = {cell: _pending(runner_of(cell)) for cell in cells}
    if options.dry_run:
        for cell, stages_to_run in pending.items():
            print(f"{cell}: {'; '.join(stages_to_run) or 'cached'}")
        return comparison
    results: dict[Cell, Result] = {}
    left = _Left(len(cells), sum(bool(one) for one in pending.values()), time.monotonic())
    for number, cell in enumerate(cells, start=1):
        runner = runner_of(cell)
        if pending[cell]:
            print(f"compare: {cell} (cell {number} of {left})", flush=True)
        try:
            ran = runner.run() > 0
        except (UserError, RunError) as error:
            raise type(error)(f"{cell}: {error}") from error
        left.done += bool(pending[cell])
        if loaded.world.node_rank == 0:
            results[cell] = read_result(runner)
            if ran or len(results) == len(cells):
                write_comparison(comparison, results)
    return replace(comparison, results=results)


@dataclass
class _Left:
    """How far a comparison is, and how long the rest will take at the pace so far."""

    cells: int
    to_run: int
    started: float
    done: int = 0

    def __str__(self) -> str:
        if not self.done:
            return str(self.cells)
        each, rest = (time.monotonic() - self.started) / self.done, self.to_run - self.done
        cells = "1 cell" if rest == 1 else f"{rest} cells"
        return f"{self.cells}, about {format_seconds(each * rest)} left for {cells}"


def _pending(runner: Runner) -> list[str]:
    return [
        f"{state.node.name} {state}"
        for state in runner.states()
        if state.node.name in runner.chosen and state.state != "cached"
    ]


def _cells(loaded: LoadedRecipe, options: argparse.Namespace) -> list[Cell]:
    """The cells in the order of the tables; raises UserError with every fault of the options."""
    recipe, faults = loaded.recipe, list[str]()
    if recipe.evaluate is None:
        faults.append("evaluate: a comparison needs this section, the recipe has none")
    if options.with_training and recipe.train is None:
        faults.append("--with-training: the recipe has no section train")
    methods = _methods(options.methods, faults)
    ratios = _ratios(options.ratios, faults)
    named = _seeds(options.seeds, faults) if options.seeds else []
    cells = [
        Cell(method, ratio, seed, seed == _own_seed(loaded))
        for method in methods
        for seed in _seeds_of(method, named, _own_seed(loaded))
        for ratio in ratios
    ]
    faults += dict.fromkeys(fault for cell in cells for fault in _unreachable(loaded, cell))
    if faults:
        raise UserError(listing("compare", faults))
    return cells


def _own_seed(loaded: LoadedRecipe) -> int:
    recipe = loaded.recipe
    return recipe.seed if recipe.search.seed is None else recipe.search.seed


def _seeds_of(method: str, named: Sequence[int], own: int) -> Sequence[int]:
    """Seeds that a method is run with: one where it draws nothing at random."""
    if method in _SEEDLESS:
        return named[:1] or [own]
    return named or [own + i for i in range(_RANDOM_RUNS if method == _RANDOM else 1)]


def _unreachable(loaded: LoadedRecipe, cell: Cell) -> Iterator[str]:
    """Faults of the recipe with this method and ratio; the recipe itself has none."""
    recipe = loaded.recipe
    search = _search_of(recipe.search, cell)
    parts = Parts(
        recipe.model, recipe.prepare, search, recipe.train, recipe.evaluate, recipe.runtime,
        loaded.info, loaded.world,
    )  # fmt: skip
    for fault in find_faults(parts, input_files=False):
        sentence = fault.removeprefix("search.swa_ratio: ")
        yield f"--ratios {cell.ratio:g} with {cell.method}: {sentence}"


def _search_of(search: SearchConfig, cell: Cell) -> SearchConfig:
    changes: dict[str, object] = {"method": cell.method, "swa_ratio": cell.ratio}
    if not cell.own_seed:
        changes["seed"] = cell.seed
    return search.model_copy(update=changes)


def _recipe_of(loaded: LoadedRecipe, cell: Cell, options: argparse.Namespace) -> LoadedRecipe:
    recipe = loaded.recipe
    changes = {
        "name": f"{recipe.name}/compare/{cell.folder}",
        "search": _search_of(recipe.search, cell),
        "train": recipe.train if options.with_training else None,
    }
    return replace(loaded, recipe=recipe.model_copy(update=changes))


def _methods(text: str, faults: list[str]) -> list[str]:
    if text == "all":
        return sorted(METHODS, key=Cell.order)
    known = []
    for name in dict.fromkeys(part.strip() for part in text.split(",")):
        if name in METHODS:
            known.append(name)
            continue
        near = suggest(name, METHODS)
        hint = f"did you mean {near}?" if near else f"choose from all, {', '.join(METHODS)}"
        faults.append(f"--methods {name}: unknown; {hint}")
    return sorted(known, key=Cell.order)


def _ratios(text: str, faults: list[str]) -> list[float]:
    ratios = set()
    for part in text.split(","):
        try:
            ratio = float(part)
        except ValueError:
            faults.append(f"--ratios {part}: is not a number")
            continue
        if 0.0 <= ratio <= 1.0:
            ratios.add(ratio)
        else:
            faults.append(f"--ratios {part}: does not lie between 0 and 1")
    return sorted(ratios)


def _seeds(text: str, faults: list[str]) -> list[int]:
    seeds = []
    for part in text.split(","):
        if part.strip().isdecimal() and int(part) < 2**31:
            seeds.append(int(part))
        else:
            faults.append(f"--seeds {part}: expected a whole number from 0 to 2147483647")
    return sorted(set(seeds))
