"""`bosch evaluate RECIPE`: scores of checkpoints, or of any model directories.

Answers of earlier runs and calls are reused, whichever recipe they belong to.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from bosch.errors import RunError, UserError
from bosch.files import write_text
from pipeline.commands import RecipeCommand
from pipeline.commands.evaluation import Evaluation
from pipeline.commands.missing import print_missing
from pipeline.commands.paths import typed_path
from pipeline.recipe.load import ROOT, find_faults
from pipeline.recipe.model_shape import file_faults, read_model
from pipeline.run.runner import Choice, Runner
from stages.evaluate.score_tables import score_tables
from stages.evaluate.scores import HYBRID, ORIGINAL, SelectedScores
from stages.fields import path_text
from stages.recipe import LoadedRecipe
from stages.train.stage import TrainConfig, checkpoint_name

COMMAND = RecipeCommand("score checkpoints, of a running training too, or any model directory")

_POLL_SECONDS = 30.0
# Between two stages of a run nobody holds a lock.
_IDLE_POLLS = 4


def add_options(parser: argparse.ArgumentParser) -> None:
    """Which models."""
    parser.add_argument(
        "--checkpoints",
        metavar="NAME",
        nargs="+",
        help="hybrid or tokens-<n>, of a finished or a running training; default: all there are",
    )
    parser.add_argument(
        "--model",
        metavar="DIRECTORY",
        action="append",
        default=[],
        help="a model directory, in place of the recipe's checkpoints; may be repeated",
    )
    parser.add_argument(
        "--watch",
        action="store_true",
        help="evaluate checkpoints as they appear, until the training is finished",
    )


def run(loaded: LoadedRecipe, options: argparse.Namespace) -> int:
    """Evaluate, print the table and say where it is; 1 where a task has no score."""
    evaluation = Evaluation(Runner(loaded, Choice()))
    if options.watch and options.model:
        raise UserError("--watch follows the recipe's training; leave --model out")
    if options.model:
        scores = _score(evaluation, _directories(loaded, options.model))
    elif options.watch:
        scores = _watch(evaluation, options.checkpoints)
    else:
        scores = _score(evaluation, _checkpoints(evaluation, options.checkpoints))
    return print_missing(scores)


def _score(evaluation: Evaluation, folders: Mapping[str, Path]) -> SelectedScores:
    """Scores of these models and the original, which are printed and written as tables too."""
    scores = evaluation.score(folders)
    tables = score_tables(scores)
    write_text(evaluation.place / "table.md", "\n".join(table.markdown() for table in tables))
    for table in tables:
        table.print()
    print(f"scores and answers: {typed_path(evaluation.place)}")
    return scores


def _directories(loaded: LoadedRecipe, paths: Sequence[str]) -> dict[str, Path]:
    """Model directories by name; raises UserError for one that the samples cannot be asked."""
    folders = []
    for path in paths:
        try:
            folders.append(Path(os.path.realpath(Path(path_text(path)).expanduser())))
        except ValueError as error:
            raise UserError(f"--model {path}: {error}") from None
    for folder in folders:
        if not os.path.isfile(folder / "config.json"):  # also of a path that none can be
            raise UserError(f"--model {folder}: not a model directory, it has no config.json")
        info, faults = read_model(str(folder), None, ROOT, fetch=False, files=False, hybrid=True)
        if info is not None:
            faults = list(file_faults(folder))
            checked = find_faults(replace(loaded, info=info), input_files=False)
            faults += [fault for fault in checked if fault.startswith("evaluate.")]
        for fault in faults:
            raise UserError(f"--model {folder}: {fault.removeprefix('model.path: ')}")
    names = [folder.name for folder in folders]
    unique = {name for name in names if names.count(name) == 1 and name != ORIGINAL}
    return {folder.name if folder.name in unique else str(folder): folder for folder in folders}


def _checkpoints(evaluation: Evaluation, names: Sequence[str] | None) -> dict[str, Path]:
    available = evaluation.available()
    for name in names or ():
        if name not in available:
            there = ", ".join(available) or "nothing"
            raise UserError(f"--checkpoints {name}: not there yet; there is {there}")
    chosen = {name: available[name] for name in names} if names else available
    if not chosen:
        raise UserError(
            f"{evaluation.runner.name}: there is no model to evaluate yet; run the recipe, or name "
            "one with --model"
        )
    return chosen


def _watch(evaluation: Evaluation, names: Sequence[str] | None) -> SelectedScores:
    """Evaluate what appears until training is finished and all of it is evaluated.

    Raises UserError for a name that no checkpoint will have, RunError where nobody trains.
    """
    train = evaluation.runner.loaded.recipe.get(TrainConfig)
    planned = [HYBRID, *(checkpoint_name(n) for n in (train.checkpoint_steps if train else ()))]
    for name in names or ():
        if name not in planned:
            raise UserError(
                f"--checkpoints {name}: the recipe makes no such checkpoint; it makes "
                f"{', '.join(planned)}"
            )
    evaluated: set[str] = set()
    scores: SelectedScores | None = None
    idle_polls = 0
    while True:
        # Looked at before the checkpoints: what appears between is seen the next time.
        finished, running = evaluation.is_finished(), evaluation.is_running()
        available = evaluation.available()
        available = {n: f for n, f in available.items() if not names or n in names}
        if set(available) - evaluated:
            scores = _score(evaluation, available)
            evaluated = set(available)
        elif scores is not None and (evaluated == set(names) if names else finished):
            return scores
        elif finished:
            _checkpoints(evaluation, names)  # says what is not there
        else:
            idle_polls = 0 if running else idle_polls + 1
            if idle_polls > _IDLE_POLLS:
                raise RunError(
                    f"--watch: the training of {evaluation.runner.name} is neither finished nor "
                    "running; continue it, or leave --watch out to evaluate what there is"
                )
            time.sleep(_POLL_SECONDS)
