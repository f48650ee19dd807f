"""`bosch compare RECIPE`: every method at every ratio, as in BOSCH Tables 1 and 2.

Each combination of method, ratio and seed is run like a recipe: results in the store are reused,
and a stopped comparison resumes.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import replace

from pydantic import Field

from bosch.commands import print_json, text_to_stderr
from bosch.errors import LostRankError, RunError, UserError, is_disk_full
from bosch.files import read_json
from bosch.search import methods
from pipeline.commands import RecipeCommand
from pipeline.commands import options as shared_options
from pipeline.commands.compare.comparison import (
    Combination,
    Comparison,
    Result,
    paper_scores,
    read_result,
)
from pipeline.commands.compare.page import REPORT, score_tables, write_comparison, write_predictions
from pipeline.commands.options import METHODS, Methods, Seeds, read_options
from pipeline.commands.paths import model_label, typed_path
from pipeline.recipe.load import find_faults, listing
from pipeline.run.graph import upstream_of
from pipeline.run.launch import Launcher, launch
from pipeline.run.runner import Runner, RunOptions
from stages.evaluate.stage import EvaluateConfig
from stages.fields import Ratios, Section
from stages.formats import counted, format_seconds
from stages.search.budget import Budget
from stages.search.stage import SearchConfig
from stages.stage import LoadedRecipe, Recipe
from stages.train.stage import TrainConfig

COMMAND = RecipeCommand("run methods at several ratios and print the paper's tables", json=True)


class CompareOptions(Section):
    """Options of a comparison."""

    methods: Methods = Field(METHODS, description="separated by commas")
    ratios: Ratios = Field((0.25, 0.5, 0.75, 0.875), description="SWA ratios")
    seeds: Seeds | None = Field(
        None, description="seeds of the search (default: the recipe's; three for rand)"
    )
    with_training: bool = Field(False, description="train each hybrid, too, and score it again")
    dry_run: bool = Field(False, description="only say what would run, and why")
    wait: bool = Field(False, description="wait for stages that another run is making")


def add_options(parser: argparse.ArgumentParser) -> None:
    shared_options.add_options(parser, CompareOptions)


def run(loaded: LoadedRecipe, arguments: argparse.Namespace) -> int:
    """Compare, and print the tables."""
    options = read_options(CompareOptions, arguments, "compare")
    with text_to_stderr(arguments.json):
        comparison = run_comparison(loaded, options)
    if arguments.json:
        print_json(read_json(comparison.folder / REPORT) if comparison.results else None)
    elif comparison.results:
        for table in score_tables(comparison):
            table.print()
        print(f"compare: {typed_path(comparison.folder / 'compare.html')}")
    with text_to_stderr(arguments.json):
        for sentence in comparison.missing:
            print(sentence)
    return 1 if comparison.missing else 0


def run_comparison(
    loaded: LoadedRecipe, options: CompareOptions, launcher: Launcher = launch
) -> Comparison:
    """Bring every combination up to date and write the tables below runs/<recipe>/compare.

    A failed combination is recorded, and the others continue. Raises UserError that lists every
    option that does not fit the recipe.
    """
    combinations = _combinations(loaded, options)
    comparison = Comparison(
        recipe=loaded.recipe.name,
        model=model_label(loaded.recipe.model.path),
        folder=loaded.output_root / loaded.recipe.name / "compare",
        combinations=tuple(combinations),
        with_training=options.with_training,
        paper=paper_scores(loaded.recipe),
    )

    def runner_of(combination: Combination) -> Runner:
        """A new runner for each use: it reads the hashes that earlier ones have saved."""
        run_options = RunOptions(wait=options.wait)
        runner = Runner(_recipe_of(loaded, combination, options), run_options, launcher)
        runner.hasher.save()
        return runner

    pending = {combination: _pending(runner_of(combination)) for combination in combinations}
    if options.dry_run:
        for combination, stages_to_run in pending.items():
            print(f"{combination}: {'; '.join(stages_to_run) or 'cached'}")
        return comparison
    results: dict[Combination, Result] = {}
    failures: dict[Combination, str] = {}
    comparison = replace(comparison, results=results, failures=failures)
    started, finished = time.monotonic(), 0
    for number, combination in enumerate(combinations, start=1):
        runner = runner_of(combination)
        if pending[combination]:
            remaining = sum(bool(pending[later]) for later in combinations[number - 1 :])
            estimate = _time_left(time.monotonic() - started, finished, remaining)
            text = f"combination {number} of {len(combinations)}{estimate}"
            print(f"compare: {combination} ({text})", flush=True)
        try:
            ran = runner.run() > 0
        except (UserError, RunError) as error:
            stops_all = isinstance(error, LostRankError) or is_disk_full(error)
            if stops_all or _stopped_in_shared_work(runner):
                raise type(error)(f"{combination}: {error}") from error
            failures[combination] = str(error)
            print(f"compare: {combination}: {error}", file=sys.stderr, flush=True)
            continue
        finished += bool(pending[combination])
        if loaded.world.node_rank == 0:
            results[combination] = read_result(runner)
            write_predictions(comparison, combination)
            if ran or comparison.is_complete:
                write_comparison(comparison)
    if failures and loaded.world.node_rank == 0:
        write_comparison(comparison)
    return comparison


def _stopped_in_shared_work(runner: Runner) -> bool:
    """Whether a run has failed in a stage that all combinations share."""
    states = [state for state in runner.states() if state.node.name in runner.chosen]
    first = next((state.node.name for state in states if state.state != "cached"), "search")
    return "search" not in (first, *upstream_of(first, runner.nodes))


def _time_left(seconds: float, finished: int, remaining: int) -> str:
    """An estimate of the time left after `finished` combinations; empty before the first."""
    if not finished:
        return ""
    text = format_seconds(seconds / finished * remaining)
    return f", about {text} left for {counted(remaining, 'combination')}"


def _pending(runner: Runner) -> list[str]:
    states = (state for state in runner.states() if state.node.name in runner.chosen)
    return [f"{state.node.name} {state}" for state in states if state.state != "cached"]


def _combinations(loaded: LoadedRecipe, options: CompareOptions) -> list[Combination]:
    """The combinations in the order of the tables; raises UserError with every fault."""
    recipe, faults = loaded.recipe, list[str]()
    if recipe.get(EvaluateConfig) is None:
        faults.append("evaluate: a comparison needs this section, the recipe has none")
    if options.with_training and recipe.get(TrainConfig) is None:
        faults.append("--with-training: the recipe has no section train")
    own_seed = recipe[SearchConfig].seed
    own_seed = recipe.seed if own_seed is None else own_seed
    combinations = [
        Combination(method, ratio, seed, seed == own_seed)
        for method in sorted(options.methods, key=Combination.order)
        for seed in _seeds_of(method, options.seeds or (), own_seed)
        for ratio in options.ratios
    ]
    for combination in combinations:
        # The recipe itself was checked before.
        for fault in find_faults(_recipe_of(loaded, combination, options), input_files=False):
            message = fault.removeprefix("search.swa_ratio: ")
            faults.append(f"--ratios {combination.ratio:g} with {combination.method}: {message}")
    if faults:
        raise UserError(listing("compare", list(dict.fromkeys(faults))))
    return combinations


def _seeds_of(method: str, seeds: Sequence[int], default: int) -> Sequence[int]:
    """Seeds with which a method is run; a single one if it is deterministic."""
    entry = methods.METHODS[method]
    if not entry.seeded:
        return [default]
    return seeds or [default + i for i in range(entry.seeds)]


def _search_of(recipe: Recipe, combination: Combination) -> SearchConfig:
    """The recipe's search at another ratio; a front counts caches as the recipe does."""
    search = recipe[SearchConfig]
    changes: dict[str, object] = {"swa_ratio": combination.ratio, "budget": None}
    if methods.METHODS[combination.method].finds_front:
        budget = search.chosen_budget
        amount = dict.fromkeys(Budget.ALTERNATIVES[0]) | {"ratio": combination.ratio}
        context = {"context": budget.context or budget.tokens}
        changes = {"swa_ratio": None, "budget": budget.model_copy(update=amount | context)}
    if not combination.own_seed:
        changes["seed"] = combination.seed
    return search.by_method(combination.method).model_copy(update=changes).completed(recipe)


def _recipe_of(
    loaded: LoadedRecipe, combination: Combination, options: CompareOptions
) -> LoadedRecipe:
    recipe = loaded.recipe
    evaluate = recipe.get(EvaluateConfig)
    # In a comparison every method is its own combination.
    reduced = {"rivals": [], "windows": [], "budgets": "chosen"}
    changes = {
        "name": f"{recipe.name}/compare/{combination.folder}",
        "evaluate": None if evaluate is None else evaluate.model_copy(update=reduced),
        "search": _search_of(recipe, combination),
        "rival": None,
        "train": recipe.get(TrainConfig) if options.with_training else None,
    }
    return replace(loaded, recipe=recipe.model_copy(update=changes)).up_to("evaluate")
