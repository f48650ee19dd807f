"""`bosch run RECIPE`: brings the stages of a recipe up to date."""

from __future__ import annotations

import argparse
import importlib
import os
from pathlib import Path

from bosch.files import make_folder
from pipeline.commands import RecipeCommand
from pipeline.commands.status import print_states
from pipeline.run.runner import Runner, RunOptions
from stages.evaluate.scores import Scores
from stages.formats import counted
from stages.report.stage import PAGE
from stages.stage import LoadedRecipe

COMMAND = RecipeCommand("bring the stages of a recipe up to date")


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--until", metavar="STAGE", help="stop after this stage")
    parser.add_argument(
        "--from",
        dest="start",
        metavar="STAGE",
        help="do not run earlier stages; their results must exist",
    )
    parser.add_argument(
        "--force",
        metavar="STAGE",
        action="append",
        default=[],
        help="delete this stage's result and make it again, and then what needs it, if it comes "
        "out different; may be repeated",
    )
    parser.add_argument(
        "--branch", metavar="NAME", help="only a branch of compare, and what it shares with others"
    )
    parser.add_argument("--dry-run", action="store_true", help="only say what would run, and why")
    parser.add_argument(
        "--wait", action="store_true", help="wait for stages that another run is making"
    )


def run(loaded: LoadedRecipe, options: argparse.Namespace) -> int:
    """Run the stages and print where the results are; returns 1 if a task has no score."""
    force = tuple(options.force)
    choice = RunOptions(options.until, options.start, force, options.branch, options.wait)
    runner = Runner(loaded, choice)
    if options.dry_run:
        states = [state for state in runner.states() if state.node.name in runner.chosen]
        print_states(loaded, states)
        if runner.store.root.exists():
            runner.hasher.save()
        return 0
    results = loaded.output_root / loaded.recipe.name
    make_folder(results)
    ran = runner.run()
    name, here = loaded.recipe.name, Path.cwd()
    folder = results.relative_to(here) if results.is_relative_to(here) else results
    if ran == 0:
        stages = counted(len(runner.chosen), "stage is", "stages are")
        print(f"{name}: nothing to do; {stages} up to date in {folder}")
    else:
        print(f"{name}: finished; the results are in {folder}")
    page = folder / "report" / PAGE
    if "report" in runner.chosen and page.exists():
        print(f"report: {page}")
        # A run with nothing to do may have an output root that is read-only.
        if loaded.world.node_rank == 0 and (ran or os.access(loaded.output_root, os.W_OK)):
            # Imported here, since it loads templates.
            importlib.import_module("stages.report.index").write_index(loaded.output_root)
    names = [name for name in runner.chosen if name.partition("@")[0] == "evaluate"]
    if loaded.world.node_rank > 0:
        return 0
    scores = [Scores.read(results / name) for name in names]
    for sentence in dict.fromkeys(note for one in scores for note in one.notes()):
        print(sentence)
    return 1 if any(one.missing for one in scores) else 0
