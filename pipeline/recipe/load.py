"""Reads a recipe: one YAML file, typed, checked as a whole.

First come all faults of single fields; where there is none, all faults between fields.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from bosch.errors import UserError
from pipeline.recipe.checks import find_faults
from pipeline.recipe.faults import sentences
from pipeline.recipe.model_shape import is_hub_name, read_model
from pipeline.recipe.overrides import apply_overrides
from pipeline.recipe.processes import find_world
from pipeline.recipe.recipe import LoadedRecipe, Recipe
from pipeline.recipe.yaml_file import read_mapping
from stages.context import ModelConfig
from stages.fields import Section
from stages.prepare.stage import SourceConfig

# Relative paths in a recipe are taken from the checkout, wherever the command is called from.
ROOT = Path(__file__).resolve().parents[2]
# Fields that are paths, in whatever section they stand.
_PATHS = ("path", "tokenizer", "essay_dir", "data_dir", "output_root", "mask")
_Section = TypeVar("_Section", bound=Section)


def load_recipe(
    path: str | os.PathLike[str],
    overrides: Sequence[str] = (),
    *,
    fetch: bool = True,
    input_files: bool = True,
    model_files: bool = True,
    env: Mapping[str, str] = os.environ,
    root: Path = ROOT,
) -> LoadedRecipe:
    """Read, override and check a recipe; relative paths become absolute below `root`.

    `fetch` allows looking a hub model up over the network; without `input_files` the data need not
    be there yet, without `model_files` a model's directory needs nothing but its config.json.

    Raises:
        UserError: lists with dotted paths every field at fault, or every fault between fields.
    """
    file = Path(path)
    content = apply_overrides(read_mapping(file), overrides)
    # A key without a value counts as left out, as YAML's writers mean it.
    values = {key: value for key, value in content.items() if value is not None}
    try:
        recipe = _absolute(Recipe.model_validate({"name": file.stem, **values}), root)
    except ValidationError as error:
        raise UserError(listing(str(file), sentences(Recipe, error))) from None
    world = find_world(recipe.runtime.processes, env)
    info, faults = read_model(
        recipe.model.path, recipe.model.revision, root, fetch=fetch, files=model_files
    )
    loaded = LoadedRecipe(file, recipe, info, world)
    faults += find_faults(loaded, input_files=input_files)
    if faults:
        raise UserError(listing(str(file), faults))
    return loaded


def listing(file: str, faults: Sequence[str]) -> str:
    """All faults of a file or a command as one message."""
    faults = list(dict.fromkeys(faults))
    if len(faults) == 1:
        return f"{file}: {faults[0]}"
    return "\n".join([f"{file}: {len(faults)} faults", *(f"  {fault}" for fault in faults)])


def _absolute(section: _Section, root: Path) -> _Section:
    """The section with its paths absolute."""
    changes: dict[str, Any] = {}
    for name, value in section:
        if isinstance(value, Section):
            changes[name] = _absolute(value, root)
        elif isinstance(value, list):
            changes[name] = [_absolute(x, root) if isinstance(x, Section) else x for x in value]
        elif isinstance(value, str) and name in _PATHS:
            changes[name] = _absolute_path(section, name, value, root)
    return section.model_copy(update=changes)


def _absolute_path(section: Section, name: str, value: str, root: Path) -> str:
    """The absolute path; what can only be meant as a name on the hub stays one."""
    path = os.path.normpath(root / Path(value).expanduser())
    if name == "tokenizer" and not os.path.isdir(path):
        return value
    may_be_name = isinstance(section, ModelConfig) or (
        isinstance(section, SourceConfig) and section.kind == "huggingface"
    )
    if may_be_name and not os.path.exists(path) and is_hub_name(value, root):
        return value
    return path
