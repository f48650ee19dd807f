"""Reads a recipe from a YAML file and checks it.

It reports all faults of single fields or, if there are none, all faults between fields. The command
line overrides fields: `search.swa_ratio=0.5`, `prepare.sources.0.weight=2`.
"""

from __future__ import annotations

import copy
import json
import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from bosch.errors import UserError
from pipeline.recipe.faults import field_faults, nested_section
from pipeline.recipe.model_shape import read_model
from pipeline.recipe.processes import find_world
from pipeline.recipe.stage_list import STAGES
from pipeline.recipe.yaml_file import parse_yaml, read_mapping
from stages.faults import Fault
from stages.fields import Section
from stages.inputs import Origins, absolute, input_faults
from stages.stage import LoadedRecipe, Stage, recipe_type

ROOT = Path(__file__).resolve().parents[2]
# A plain text with a part that YAML would read as a comment.
_COMMENTED = re.compile(r"(?!['\"\[{])(.*\s)?#", re.DOTALL)


def load_recipe(
    path: str | os.PathLike[str],
    overrides: Sequence[str] = (),
    *,
    fetch: bool = True,
    input_files: bool = True,
    model_files: bool = True,
    model_family: bool = True,
    stages: Sequence[Stage[Any]] = STAGES,
    env: Mapping[str, str] = os.environ,
) -> LoadedRecipe:
    """Read, override and check a recipe, and make its paths absolute.

    Relative paths start at the recipe's folder, those in overrides at the current directory, and
    defaults at the checkout.

    `fetch` allows downloading the configuration of a hub model. Without `input_files` data may be
    missing; without `model_files` a model's directory needs only its config.json. Without
    `model_family`, checks that need transformers are skipped.

    Raises UserError that lists every invalid field with its dotted path, or every fault between
    fields.
    """
    file, kind = Path(path), recipe_type(tuple(stages))
    content = apply_overrides(read_mapping(file), overrides)
    overridden = frozenset(tuple(dotted_path(override)) for override in overrides)
    _drop_replaced(kind, content, overridden)
    # A section without a value counts as absent.
    values = {key: value for key, value in content.items() if value is not None}
    try:
        recipe = kind.model_validate({"name": file.stem, **values})
    except ValidationError as error:
        raise UserError(listing(str(file), field_faults(kind, error))) from None
    origins = Origins(file.absolute().parent, Path.cwd() if overridden else ROOT, ROOT, overridden)
    recipe = absolute(recipe, origins)
    # Defaults that depend on other fields.
    changes = {
        stage.key: stage.completed(section, recipe)
        for stage in stages
        if stage.field is not None and (section := getattr(recipe, stage.key)) is not None
    }
    recipe = recipe.model_copy(update=changes)
    world = find_world(recipe.runtime.processes, env)
    info, faults = read_model(
        recipe.model.path,
        recipe.model.revision,
        origins.of(("model", "path")),
        fetch=fetch,
        files=model_files,
        family=model_family,
    )
    loaded = LoadedRecipe(file, recipe, info, world, tuple(stages))
    checked = loaded if model_family else replace(loaded, info=None)
    faults += find_faults(checked, input_files=input_files)
    if faults:
        raise UserError(listing(str(file), faults))
    return loaded


def _drop_replaced(
    kind: type[Section], content: dict[str, Any], overridden: Collection[tuple[str, ...]]
) -> None:
    """Remove from `content` the alternatives of overridden fields (`Section.ALTERNATIVES`)."""
    for path in overridden:
        owner: type[Section] | None = kind
        mapping: Any = content
        for depth, name in enumerate(path):
            if owner is None or not isinstance(mapping, dict) or mapping.get(name) is None:
                break
            same_parent = [other for other in overridden if other[:depth] == path[:depth]]
            siblings = {other[depth] for other in same_parent if len(other) > depth}
            for alternatives in owner.ALTERNATIVES:
                if name in alternatives:
                    for replaced in set(alternatives) - siblings:
                        mapping.pop(replaced, None)
            field, mapping = owner.model_fields.get(name), mapping[name]
            owner = nested_section(field.annotation)[0] if field is not None else None


def find_faults(loaded: LoadedRecipe, *, input_files: bool) -> list[Fault]:
    """All faults between the fields of a recipe; without `input_files` missing data is not one."""
    faults = [fault for stage in loaded.present for fault in stage.checks(loaded)]
    faults += _output_root_faults(loaded)
    return [*faults, *missing_inputs(loaded)] if input_files else faults


def _output_root_faults(loaded: LoadedRecipe) -> Iterator[Fault]:
    for stage in loaded.stages:
        link = loaded.output_root / loaded.recipe.name / stage.name
        if os.path.lexists(link) and not link.is_symlink():
            yield Fault(
                "runtime.output_root",
                f"{link} is in the place of the link to the stage's output; move it elsewhere",
            )


def missing_inputs(loaded: LoadedRecipe) -> Iterator[Fault]:
    """Inputs of a run that are missing or invalid."""
    for stage in loaded.present:
        if stage.field is not None:
            yield from input_faults(stage.key, getattr(loaded.recipe, stage.key))
        yield from stage.missing(loaded)


def listing(file: str, faults: Sequence[Fault]) -> str:
    """All faults of a file or a command as one message."""
    faults = list(dict.fromkeys(faults))
    if len(faults) == 1:
        return f"{file}: {faults[0]}"
    return "\n".join([f"{file}: {len(faults)} faults", *(f"  {fault}" for fault in faults)])


def apply_overrides(content: dict[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """A copy of a recipe's mapping with `key.path=value` set; values are YAML without comments.

    A number in the path is an index into an existing list; missing mappings are created.
    Raises UserError for a path through anything else.
    """
    result = copy.deepcopy(content)
    for override in overrides:
        keys, (_, equals, text) = dotted_path(override), override.partition("=")
        if not equals or not all(keys):
            raise UserError(
                f"override '{override}': expected key.path=value, like search.swa_ratio=0.5"
            )
        if _COMMENTED.match(text.strip()):
            text = json.dumps(text.strip(), ensure_ascii=False)
        _set(result, keys, parse_yaml(text, f"override '{override}'"), override)
    return result


def dotted_path(override: str) -> list[str]:
    """The keys of the value that an override replaces."""
    return override.partition("=")[0].strip().split(".")


def _set(content: dict[str, Any], keys: list[str], value: Any, override: str) -> None:
    parent: Any = content
    for depth, key in enumerate(keys):
        index: Any = key
        if isinstance(parent, list):
            index = _index(parent, key, ".".join(keys[:depth]), override)
        elif not isinstance(parent, dict):
            raise UserError(
                f"override '{override}': {'.'.join(keys[:depth])} is the value {parent!r} "
                "and has no keys below it"
            )
        if depth == len(keys) - 1:
            parent[index] = value
            return
        if isinstance(parent, dict) and parent.get(index) is None:
            parent[index] = {}
        parent = parent[index]


def _index(items: list[Any], key: str, path: str, override: str) -> int:
    if not key.isdecimal() or len(key) > 6 or int(key) >= len(items):
        positions = f"; '{key}' is none of its positions 0 to {len(items) - 1}" if items else ""
        raise UserError(f"override '{override}': {path} is a list of {len(items)}{positions}")
    return int(key)
