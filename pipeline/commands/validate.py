"""`bosch validate RECIPE`: check a recipe without the network."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

from bosch.commands import print_json
from bosch.errors import UserError
from pipeline.commands import RecipeCommand
from pipeline.recipe.load import all_faults, listing
from pipeline.recipe.model_shape import cached_snapshot, file_faults, has_tokenizer
from pipeline.run.graph import resolve
from stages.faults import Fault
from stages.prepare.stage import PrepareConfig
from stages.stage import LoadedRecipe, call

COMMAND = RecipeCommand("check a recipe, its model and its inputs", json=True, without=("fetch",))


def run(loaded: LoadedRecipe, options: argparse.Namespace) -> int:
    """Print that the recipe is valid, and a run's downloads."""
    if faults := all_faults(loaded, _slow_faults):
        raise UserError(listing(str(loaded.file), faults))
    nodes = resolve(loaded)
    names = [node.name for node in nodes]
    if options.json:
        facts = {"recipe": loaded.recipe.name, "file": str(loaded.file), "stages": names}
        print_json(facts | {"fetches": list(downloads(loaded))})
        return 0
    print(f"{loaded.file}: valid; its stages are {', '.join(names)}")
    for branch in loaded.branches:
        if not any(node.branches[0] == branch for node in nodes):
            print(f"compare: {branch} is the same as the recipe or as another branch")
    for download in downloads(loaded):
        print(f"a run fetches {download}")
    return 0


def _slow_faults(loaded: LoadedRecipe) -> Iterator[Fault]:
    for stage in loaded.present:
        yield from call(stage.slow_checks, loaded)


def downloads(loaded: LoadedRecipe) -> Iterator[str]:
    """Models and tokenizers that a run downloads, as they are not on this machine."""
    model, info = loaded.recipe.model, loaded.info
    if info is None:
        yield f"the model {model.path} (its shape is not known here: checks wait for the run)"
    elif info.directory is None:
        snapshot = cached_snapshot(model.path, model.revision)
        if snapshot is None or any(file_faults(snapshot)):
            yield f"the model {model.path}: config.json, tokenizer and weights"
    for name in sorted({source.tokenizer or "" for source in loaded.recipe[PrepareConfig].sources}):
        if name and not Path(name).is_dir():
            snapshot = cached_snapshot(name, None)
            if snapshot is None or not has_tokenizer(snapshot):
                yield f"the tokenizer {name}"
