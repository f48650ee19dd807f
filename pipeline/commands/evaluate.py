"""`bosch evaluate RECIPE`: scores of checkpoints, or of any model directories.

Answers from earlier runs of any recipe are reused.
"""

from __future__ import annotations

import argparse
import itertools
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from bosch.errors import RunError, UserError
from pipeline.commands import RecipeCommand
from pipeline.commands.evaluation import Evaluation
from pipeline.commands.paths import typed_path
from pipeline.recipe.load import ROOT, find_faults
from pipeline.recipe.model_shape import file_faults, read_model
from pipeline.recipe.processes import require_one_node
from pipeline.run.runner import Runner, RunOptions
from stages.evaluate.scores import (
    ABOUT_MARKS,
    HYBRID,
    ORIGINAL,
    BinLoss,
    MeanScore,
    PositionLoss,
    Scores,
    SelectedScores,
    SuiteScores,
    mark,
    power,
)
from stages.fields import path_text
from stages.formats import format_length, format_score, with_interval
from stages.pages.tables import Table
from stages.stage import LoadedRecipe
from stages.train.stage import TrainConfig, checkpoint_name

COMMAND = RecipeCommand("score checkpoints, of a running training too, or any model directory")

_POLL_SECONDS = 30.0
# Polls in a row without a running stage after which a run counts as ended; between two stages no
# stage is running.
_IDLE_POLLS = 4


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--checkpoints",
        metavar="NAME",
        nargs="+",
        type=_name,
        help="hybrid or tokens-<n>, of a finished or a running training; default: all",
    )
    parser.add_argument(
        "--model",
        metavar="MODEL_DIR",
        action="append",
        default=[],
        help="a model directory, in place of the recipe's checkpoints; may be repeated",
    )
    parser.add_argument(
        "--watch",
        action="store_true",
        help="evaluate checkpoints as they appear, until the training is finished",
    )


def _name(text: str) -> str:
    if "=" in text:  # an override, not a name
        raise argparse.ArgumentTypeError(
            f"'{text}' is an override, and no checkpoint's name: put it before --checkpoints"
        )
    return text


def run(loaded: LoadedRecipe, options: argparse.Namespace) -> int:
    """Evaluate and print the tables; returns 1 if a model or a task has no score."""
    require_one_node("evaluate", loaded.world)  # other nodes would wait for the lock of the first
    evaluation = Evaluation(Runner(loaded, RunOptions()))
    if options.watch and options.model:
        raise UserError("--watch follows the recipe's training; leave --model out")
    if options.checkpoints and options.model:
        raise UserError("--checkpoints names the recipe's models; leave it or --model out")
    faults: list[str] = []
    if options.watch:
        scores = _watch(evaluation, options.checkpoints)
    else:
        if options.model:
            folders, faults = _directories(loaded, options.model)
        else:
            folders, faults = _checkpoints(evaluation, options.checkpoints)
        if not folders:
            raise UserError("\n".join(faults))
        scores = _score(evaluation, folders)
    for fault in faults:
        print(fault)
    return print_missing(scores) or int(bool(faults))


def _score(evaluation: Evaluation, folders: Mapping[str, Path]) -> SelectedScores:
    """Score these models and the original; prints and writes the tables."""
    scores, samples = evaluation.score(folders)
    tables = score_tables(scores)
    evaluation.publish(scores, samples, "\n".join(table.markdown() for table in tables))
    for table in tables:
        table.print()
    print(f"scores and answers: {typed_path(evaluation.folder)}")
    return scores


def _directories(loaded: LoadedRecipe, paths: Sequence[str]) -> tuple[dict[str, Path], list[str]]:
    """Model directories by name, and reasons why others cannot be evaluated."""
    folders, faults = [], []
    for path in paths:
        try:
            folder = Path(os.path.realpath(Path(path_text(path)).expanduser()))
        except ValueError as error:
            faults.append(f"--model {path}: {error}")
            continue
        reasons = [
            reason.removeprefix("model.path: ") for reason in _directory_faults(loaded, folder)
        ]
        faults += [f"--model {folder}: {reason}" for reason in reasons]
        if not reasons and folder not in folders:
            folders.append(folder)
    names = [folder.name for folder in folders]
    unique = {name for name in names if names.count(name) == 1 and name != ORIGINAL}
    named = {folder.name if folder.name in unique else str(folder): folder for folder in folders}
    return named, faults


def _directory_faults(loaded: LoadedRecipe, folder: Path) -> Sequence[str]:
    if not os.path.isfile(folder / "config.json"):  # False also for impossible paths
        return ["not a model directory, it has no config.json"]
    info, faults = read_model(str(folder), None, ROOT, fetch=False, files=False, hybrid=True)
    if info is None:
        return faults
    checked = find_faults(replace(loaded, info=info), input_files=False)
    return [*file_faults(folder), *(fault for fault in checked if fault.startswith("evaluate."))]


def _checkpoints(
    evaluation: Evaluation, names: Sequence[str] | None
) -> tuple[dict[str, Path], list[str]]:
    """Checkpoints by name (without `names` all), and faults of names that do not exist."""
    available = evaluation.available()
    faults = _unplanned_faults(evaluation, names)
    faults += [
        f"--checkpoints {name}: not there yet; there is {', '.join(available) or 'nothing'}"
        for name in names or ()
        if name not in available and name in _planned(evaluation)
    ]
    if not names and not available:
        faults = [
            f"{evaluation.runner.name}: there is no model to evaluate yet; run the recipe, or name "
            "one with --model"
        ]
    return _chosen(available, names), faults


def _chosen(folders: Mapping[str, Path], names: Sequence[str] | None) -> dict[str, Path]:
    """The folders of these names; without names all."""
    return {name: folder for name, folder in folders.items() if not names or name in names}


def _planned(evaluation: Evaluation) -> list[str]:
    """Names of all checkpoints of the recipe, including future ones."""
    train = evaluation.runner.loaded.recipe.get(TrainConfig)
    return [HYBRID, *map(checkpoint_name, train.checkpoint_steps if train else ())]


def _unplanned_faults(evaluation: Evaluation, names: Sequence[str] | None) -> list[str]:
    planned = _planned(evaluation)
    return [
        f"--checkpoints {name}: the recipe makes no such checkpoint; it makes {', '.join(planned)}"
        for name in names or ()
        if name not in planned and name not in evaluation.available()
    ]


def _watch(evaluation: Evaluation, names: Sequence[str] | None) -> SelectedScores:
    """Evaluate checkpoints as they appear, until training and all evaluations are finished.

    Raises UserError for a name that no checkpoint will have, RunError if no run is training.
    """
    if faults := _unplanned_faults(evaluation, names):
        raise UserError("\n".join(faults))
    evaluated: set[str] = set()
    scores: SelectedScores | None = None
    idle_polls = 0
    while True:
        # Read before the checkpoints, so that one that appears in between is found next time.
        finished, running = evaluation.is_finished(), evaluation.is_running()
        available = _chosen(evaluation.available(), names)
        if set(available) - evaluated:
            scores = _score(evaluation, available)
            evaluated = set(available)
        elif scores is not None and (evaluated == set(names) if names else finished):
            return scores
        elif finished:
            raise UserError("\n".join(_checkpoints(evaluation, names)[1]))
        else:
            idle_polls = 0 if running else idle_polls + 1
            if idle_polls > _IDLE_POLLS:
                raise RunError(
                    f"--watch: the training of {evaluation.runner.name} is neither finished nor "
                    "running; continue it, or leave --watch out to evaluate what there is"
                )
            time.sleep(_POLL_SECONDS)


def print_missing(scores: Scores) -> int:
    """Print reasons for missing scores; returns the exit status, 1 if there are any."""
    for sentence in scores.notes():
        print(sentence)
    return 1 if scores.missing else 0


def score_tables(scores: SelectedScores) -> list[Table]:
    """Tables of the suites by task and length, with 95 % intervals, and of losses by position.

    Marks precede scores without a significant difference from the original.
    """
    tables = []
    models = scores.checkpoints
    for suite in dict.fromkeys(itertools.chain(*models.values())):
        tables_of = {name: suites[suite] for name, suites in models.items() if suite in suites}
        rows = []
        subtasks = [
            (task, length)
            for table in tables_of.values()
            for task, by_length in table.tasks.items()
            for length in by_length
        ]
        for task, length in dict.fromkeys(subtasks):
            name = f"{task} at {format_length(length)}" if length else task
            cells = [table.tasks.get(task, {}).get(length) for table in tables_of.values()]
            rows.append([name, *(_cell(cell) for cell in cells)])
        for group in dict.fromkeys(name for table in tables_of.values() for name in table.groups):
            means = [table.groups.get(group) for table in tables_of.values()]
            largest = max(filter(None, means), key=lambda mean: len(mean.tasks))
            label = f"{group} ({len(largest.tasks)} of {largest.of} tasks)"
            rows.append([label, *(_cell(mean) for mean in means)])
        rows.append(["average", *(_cell(table) for table in tables_of.values())])
        comparisons = [table.against_original for table in tables_of.values()]
        comparison = next(filter(None, comparisons), None)
        title = f"{suite}, 95 % intervals; {ABOUT_MARKS}{power(comparison)}"
        tables.append(Table.of_rows(title, ["task", *tables_of], rows))
    if scores.positions:
        tables.append(_loss_table(scores.positions))
    return tables


def _loss_table(positions: Mapping[str, PositionLoss]) -> Table:
    first, *_ = positions.values()  # equal for all models
    rows = [
        [
            f"tokens {start:,} to {end - 1:,}",
            *(_loss(model.loss[at]) for model in positions.values()),
        ]
        for at, (start, end) in enumerate(itertools.pairwise(first.edges))
    ]
    title = f"loss by position, nats per token, 95 % intervals; {first.documents:,} documents"
    return Table.of_rows(title, ["position", *positions], rows)


def _loss(bin_loss: BinLoss) -> str:
    interval = "" if bin_loss.low is None else f" ({bin_loss.low:.3f} to {bin_loss.high:.3f})"
    return f"{bin_loss.mean:.3f}{interval}"


def _cell(score: MeanScore | SuiteScores | None) -> str:
    """A score or a suite's average; – without a score."""
    if score is None:
        return format_score(None)
    value = score.score if isinstance(score, MeanScore) else score.average
    return mark(score.against_original) + with_interval(value, score.low, score.high)
