"""`python -m pipeline validate RECIPE`: what loading a recipe checks, without the network."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path

from bosch.errors import UserError
from data_prep import longbench
from pipeline.recipe.inputs import unknown_tasks
from pipeline.recipe.model_shape import cached_snapshot, file_faults, has_tokenizer
from pipeline.recipe.recipe import LoadedRecipe
from pipeline.run.graph import Stage
from stages.evaluate.harness_tasks import refuse_unscorable, task_manager
from stages.evaluate.stage import HarnessEvaluation


def add_options(parser: argparse.ArgumentParser) -> None:
    """There are none."""


def run(loaded: LoadedRecipe, options: argparse.Namespace, stages: Sequence[Stage]) -> int:
    """Say that the recipe, which has been loaded, is valid, and what a run would fetch."""
    evaluate = loaded.recipe.evaluate
    if evaluate is not None and evaluate.harness is not None:
        for name in unknown_tasks(evaluate.harness):
            raise UserError(
                f"{loaded.file}: evaluate.harness.tasks: lm-eval knows no task {name}; "
                "`lm-eval ls tasks` lists them all"
            )
        _check_scorable(loaded.file, evaluate.harness)
    names = [stage.name for stage in stages if getattr(loaded.recipe, stage.section) is not None]
    print(f"{loaded.file}: valid; its stages are {', '.join(names)}")
    for download in downloads(loaded):
        print(f"a run fetches {download}")
    return 0


def _check_scorable(file: Path, harness: HarnessEvaluation) -> None:
    """Raise UserError for tasks that lm-eval has and that a run would refuse."""
    names = [name for name in harness.task_names if longbench.task_of(name) is None]
    if not names:
        return
    try:
        refuse_unscorable(task_manager(names), names)
    except UserError as fault:
        raise UserError(f"{file}: {fault}") from None


def downloads(loaded: LoadedRecipe) -> Iterator[str]:
    """Files that are not on this machine and that a run fetches from the hub."""
    model = loaded.recipe.model
    if loaded.info is None:
        yield (
            f"the model {model.path} (its shape is not known here: what depends on it is checked "
            "when the run starts)"
        )
    elif loaded.info.directory is None:
        snapshot = cached_snapshot(model.path, model.revision)
        if snapshot is None or any(file_faults(snapshot)):
            yield f"the model {model.path}: config.json, tokenizer and weights"
    for name in sorted({source.tokenizer or "" for source in loaded.recipe.prepare.sources}):
        if not name or Path(name).is_dir():
            continue
        snapshot = cached_snapshot(name, None)
        if snapshot is None or not has_tokenizer(snapshot):
            yield f"the tokenizer {name}"
