"""`bosch evaluate RECIPE`: scores of checkpoints, or of any model directories.

Answers of earlier runs and calls are reused, whichever recipe they belong to.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from bosch.errors import RunError, UserError
from bosch.files import (
    Stamp,
    canonical_json,
    changed_file,
    file_hashes,
    make_folder,
    read_json,
    write_json,
    write_text,
)
from pipeline.commands import RecipeCommand
from pipeline.commands.missing import print_missing
from pipeline.commands.paths import typed_path
from pipeline.recipe.load import ROOT, find_faults
from pipeline.recipe.model_shape import file_faults, read_model
from pipeline.run.graph import Node
from pipeline.run.locks import hold, read_holder
from pipeline.run.runner import Choice, Runner
from stages.evaluate.answers import MODELS, VERSIONS, content_identity
from stages.evaluate.scores import (
    ABOUT_MARKS,
    HYBRID,
    ORIGINAL,
    SAMPLES,
    MeanScore,
    SelectedScores,
    SuiteScores,
    mark,
    read_samples,
    write_samples,
)
from stages.fields import path_text
from stages.formats import format_length, format_score
from stages.materialize.stage import MODEL
from stages.pages.tables import Table
from stages.recipe import LoadedRecipe
from stages.train.stage import TrainConfig, checkpoint_folders, checkpoint_name

COMMAND = RecipeCommand("score checkpoints, of a running training too, or any model directory")

_POLL_SECONDS = 30.0
# Between two stages of a run nobody holds a lock.
_IDLE_POLLS = 4
_HYBRID_STAGE, _TRAINING_STAGE = "materialize", "train"
_FUNCTION = "stages.evaluate.selected:run"


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
    runner = Runner(loaded, Choice())
    node = next((node for node in runner.nodes if node.name == "evaluate"), None)
    if node is None:
        raise UserError(f"{loaded.file}: has no section evaluate, which says what to evaluate")
    if options.watch and options.model:
        raise UserError("--watch follows the recipe's training; leave --model out")
    if options.model:
        scores = _evaluate(runner, node, _directories(loaded, options.model))
    elif options.watch:
        scores = _watch(runner, node, options.checkpoints)
    else:
        scores = _evaluate(runner, node, _checkpoints(runner, options.checkpoints))
    return print_missing(scores)


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


def _available(runner: Runner) -> dict[str, Path]:
    """The hybrid and the complete checkpoints that there are, of a running training too.

    Raises RunError where a published output of theirs is damaged.
    """
    folders: dict[str, Path] = {}
    for node in runner.nodes:
        if node.key is None or node.name not in (_HYBRID_STAGE, _TRAINING_STAGE):
            continue
        damage = runner.store.damage(node.name, node.key, runner.hasher)
        if damage is not None:
            raise RunError(
                f"the output of {node.name} is damaged ({damage}); run the recipe, which makes it "
                "again"
            )
        published = runner.store.published(node.name, node.key)
        place = published if published.exists() else runner.store.work(node.name, node.key)
        if node.name == _HYBRID_STAGE and (place / MODEL / "config.json").is_file():
            folders[HYBRID] = place / MODEL
        if node.name == _TRAINING_STAGE and (place / "checkpoints").is_dir():
            folders |= checkpoint_folders(place)
    return folders


def _checkpoints(runner: Runner, names: Sequence[str] | None) -> dict[str, Path]:
    available = _available(runner)
    for name in names or ():
        if name not in available:
            there = ", ".join(available) or "nothing"
            raise UserError(f"--checkpoints {name}: not there yet; there is {there}")
    chosen = {name: available[name] for name in names} if names else available
    if not chosen:
        raise UserError(
            f"{runner.name}: there is no model to evaluate yet; run the recipe, or name one "
            "with --model"
        )
    return chosen


def _watch(runner: Runner, node: Node, names: Sequence[str] | None) -> SelectedScores:
    """Evaluate what appears until training is finished and all of it is evaluated.

    Raises UserError for a name that no checkpoint will have, RunError where nobody trains.
    """
    train = runner.loaded.recipe.get(TrainConfig)
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
        finished, running = _is_finished(runner), _is_running(runner)
        available = {n: f for n, f in _available(runner).items() if not names or n in names}
        if set(available) - evaluated:
            scores = _evaluate(runner, node, available)
            evaluated = set(available)
        elif scores is not None and (evaluated == set(names) if names else finished):
            return scores
        elif finished:
            _checkpoints(runner, names)  # says what is not there
        else:
            idle_polls = 0 if running else idle_polls + 1
            if idle_polls > _IDLE_POLLS:
                raise RunError(
                    f"--watch: the training of {runner.name} is neither finished nor running; "
                    "continue it, or leave --watch out to evaluate what there is"
                )
            time.sleep(_POLL_SECONDS)


def _is_finished(runner: Runner) -> bool:
    """Whether no further model appears."""
    last = [one for one in runner.nodes if one.name in (_HYBRID_STAGE, _TRAINING_STAGE)][-1]
    return _is_whole(runner, last)


def _is_whole(runner: Runner, node: Node) -> bool:
    """Whether a stage's output is published and as it was then."""
    store, key = runner.store, node.key
    return (
        key is not None
        and store.manifest(node.name, key) is not None
        and store.damage(node.name, key, runner.hasher) is None
    )


def _is_running(runner: Runner) -> bool:
    """Whether a process works on a stage of the recipe."""
    keys = [(one.name, one.key) for one in runner.nodes if one.key is not None]
    return any(read_holder(runner.store.lock(name, key)) is not None for name, key in keys)


def _evaluate(runner: Runner, node: Node, folders: Mapping[str, Path]) -> SelectedScores:
    """Evaluate these models and the original; the table goes to <root>/<recipe>/evaluation."""
    original = next(one for one in runner.nodes if one.name == ORIGINAL)
    runner.stamps(original)
    document: dict[str, Any] = {
        "original": original.key,
        "code": [node.stage.version, VERSIONS],
        "models": _identities(runner, folders),
    }
    stamps = runner.hasher.seen
    digest = hashlib.sha256(canonical_json(document).encode()).hexdigest()
    work = runner.store.work("evaluation", digest)
    make_folder(work)
    lock = runner.store.lock("evaluation", digest)
    with hold(lock, f"{runner.name}: this evaluation", runner.name, wait=True):
        # Starting a process that finds all done takes many times as long as looking here.
        if _whole(work) is None and not _select(runner, node, document, work):
            write_json(work / MODELS, document)
            _launch(runner, original, folders, document["models"], stamps, work)
        scores = SelectedScores.read(work)
    place = runner.store.root / runner.name / "evaluation"
    make_folder(place)
    write_json(place / SelectedScores.FILE, scores.content)
    write_text(place / SAMPLES, (work / SAMPLES).read_text(encoding="utf-8"))
    tables = list(score_tables(scores))
    write_text(place / "table.md", "\n".join(table.markdown() for table in tables))
    for table in tables:
        table.print()
    print(f"scores and answers: {typed_path(place)}")
    return scores


def _launch(
    runner: Runner,
    original: Node,
    folders: Mapping[str, Path],
    identities: Mapping[str, str],
    stamps: Mapping[str, Stamp],
    work: Path,
) -> None:
    """Answer and score; again from their new places where training published its checkpoints."""
    while True:
        (work / SelectedScores.FILE).unlink(missing_ok=True)
        order = {
            **runner.order(original, work, stamps),
            "stage": "evaluate",
            "function": _FUNCTION,
            "inputs": {name: str(folder) for name, folder in folders.items()},
        }
        failure: UserError | RunError | None = None
        try:
            runner.launcher(order, runner.loaded.world)
        except (UserError, RunError) as error:
            failure = error
        places = {name: _place_now(runner, folder) for name, folder in folders.items()}
        if places == folders:
            _require_unchanged(runner, original, folders, identities, stamps, work)
            if failure is not None:
                raise failure
            return
        folders = places
        runner.stamps(original)
        _identities(runner, folders)
        stamps = runner.hasher.seen


def _place_now(runner: Runner, folder: Path) -> Path:
    """Where a checkpoint is: publishing a stage's output moves it out of the work directory."""
    for node in runner.nodes:
        work = runner.store.work(node.name, str(node.key))
        if work in folder.parents and not folder.exists():
            return runner.store.published(node.name, str(node.key)) / folder.relative_to(work)
    return folder


def _select(runner: Runner, node: Node, document: Mapping[str, Any], work: Path) -> bool:
    """Take the models' scores and answers from an evaluation of more models, if there is one."""
    wanted = document["models"].items()
    for folder, original, models in _finished(runner, node, document):
        scores = _whole(folder) if wanted <= models.items() else None
        names = [ORIGINAL, *document["models"]]
        if scores is None or not scores.checkpoints.keys() >= set(names):
            continue
        answers = {name: original if name == ORIGINAL else folder for name in names}
        write_samples(
            work,
            (
                record
                for name, place in answers.items()
                for record in read_samples(place)
                if record["checkpoint"] == name
            ),
        )
        content = scores.content
        for part in ("checkpoints", "positions"):
            if part in content:
                content[part] = {n: content[part][n] for n in names if n in content[part]}
        content["sha256"] = file_hashes(work, [SAMPLES])
        SelectedScores.model_validate(content).write(work)
        return True
    return False


def _whole(folder: Path) -> SelectedScores | None:
    """Finished scores that lack nothing: what was missing may be there by now."""
    scores = SelectedScores.finished(folder)
    return None if scores is None or scores.missing else scores


def _finished(
    runner: Runner, node: Node, document: Mapping[str, Any]
) -> Iterator[tuple[Path, Path, dict[str, Any]]]:
    """Finished evaluations: their folder, that of the original's answers, and their models."""
    if all(_is_whole(runner, one) for one in runner.nodes if one.name in (node.name, *node.needs)):
        published = runner.store.published(ORIGINAL, document["original"])
        identities = _identities(runner, _available(runner))
        yield runner.store.published(node.name, str(node.key)), published, identities
    for file in sorted(runner.store.work("evaluation", "").glob(f"*/{MODELS}")):
        earlier = read_json(file)
        same = ("original", "code")
        if earlier is not None and all(earlier.get(name) == document[name] for name in same):
            yield file.parent, file.parent, earlier["models"]


def _identities(runner: Runner, folders: Mapping[str, Path]) -> dict[str, str]:
    """What the answers of each model are stored under: its content, whatever its name."""
    model, hasher = runner.loaded.recipe.model, runner.hasher
    try:
        identities = {
            name: content_identity(folder, model, hasher.sha256) for name, folder in folders.items()
        }
    except OSError as error:
        raise UserError(f"{error.filename}: cannot be read: {error.strerror}") from None
    hasher.save()
    return identities


def _require_unchanged(
    runner: Runner,
    original: Node,
    folders: Mapping[str, Path],
    identities: Mapping[str, str],
    stamps: Mapping[str, Stamp],
    work: Path,
) -> None:
    """Raise RunError, and forget the answers, where a file was written while it was read.

    Also where its content is as before.
    """
    written = changed_file(stamps)
    now = _identities(runner, folders)
    changed = {name for name in folders if now[name] != identities[name]}
    if written is not None:
        changed |= {name for name, folder in folders.items() if folder in Path(written).parents}
    if written is None and not changed:
        return
    # What is no model's is the original's, or made the samples of all.
    forgotten = {identities[name] for name in changed or folders}
    if not changed:
        forgotten.add(str(runner.order(original, work)["model_identity"]))
    answers = runner.store.pool("evaluation") / "answers" / VERSIONS
    for folder in (work, *(answers / identity for identity in forgotten)):
        shutil.rmtree(folder, ignore_errors=True)
    names = ", ".join(f"--model {folders[name]}" for name in folders if name in changed)
    raise RunError(
        f"{names or written}: changed while it was evaluated, so its answers are thrown away; run "
        "the same command again"
    )


def score_tables(scores: SelectedScores) -> list[Table]:
    """For each suite a row for each task and length, with 95 % intervals.

    Marks stand before what the samples do not show to differ from the original.
    """
    tables = []
    models = scores.checkpoints
    for suite in dict.fromkeys(name for suites in models.values() for name in suites):
        tables_of = {name: suites[suite] for name, suites in models.items() if suite in suites}
        rows = []
        places = [(task, at) for table in tables_of.values() for task in table.tasks
                  for at in table.tasks[task]]  # fmt: skip
        for task, length in dict.fromkeys(places):
            name = f"{task} at {format_length(length)}" if length else task
            cells = [table.tasks.get(task, {}).get(length) for table in tables_of.values()]
            rows.append([name, *(_cell(cell) for cell in cells)])
        for group in dict.fromkeys(name for table in tables_of.values() for name in table.groups):
            means = [table.groups.get(group) for table in tables_of.values()]
            most = max((mean for mean in means if mean is not None), key=lambda m: len(m.tasks))
            covers = f"{group} ({len(most.tasks)} of {most.of} tasks)"
            rows.append([covers, *(_cell(mean) for mean in means)])
        rows.append(["average", *(_cell(t, t.average) for t in tables_of.values())])
        title = f"{suite}, 95 % intervals; {ABOUT_MARKS}"
        tables.append(Table.of_rows(title, ["task", *tables_of], rows))
    return tables


def _cell(score: MeanScore | SuiteScores | None, value: float | None = None) -> str:
    """A score, or the `value` of a suite's average; – for a model that has none."""
    if score is None:
        return format_score(None)
    if isinstance(score, MeanScore):
        value = score.score
    interval = f"{format_score(score.low)}–{format_score(score.high)}"
    return f"{mark(score.against_original)}{format_score(value)} ({interval})"
