"""`bosch validate RECIPE`: check a recipe without the network."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

from bosch.commands import print_json
from bosch.errors import UserError
from pipeline.commands import RecipeCommand
from pipeline.recipe.load import listing
from pipeline.recipe.model_shape import cached_snapshot, file_faults, has_tokenizer
from stages.prepare.stage import PrepareConfig
from stages.stage import LoadedRecipe, call

COMMAND = RecipeCommand("check a recipe, its model and its input files", json=True, fetch=False)


def run(loaded: LoadedRecipe, options: argparse.Namespace) -> int:
    """Print that the recipe is valid, and a run's downloads."""
    faults = [fault for stage in loaded.present for fault in call(stage.slow_checks, loaded)]
    if faults:
        raise UserError(listing(str(loaded.file), faults))
    names = [stage.name for stage in loaded.present]
    if options.json:
        facts = {"recipe": loaded.recipe.name, "file": str(loaded.file), "stages": names}
        print_json(facts | {"fetches": list(downloads(loaded))})
        return 0
    print(f"{loaded.file}: valid; its stages are {', '.join(names)}")
    for download in downloads(loaded):
        print(f"a run fetches {download}")
    return 0


def downloads(loaded: LoadedRecipe) -> Iterator[str]:
    """Models and tokenizers that a run downloads, as they are not on this machine."""
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
    for name in sorted({source.tokenizer or "" for source in loaded.recipe[PrepareConfig].sources}):
        if not name or Path(name).is_dir():
            continue
        snapshot = cached_snapshot(name, None)
        if snapshot is None or not has_tokenizer(snapshot):
            yield f"the tokenizer {name}"
