"""Reads a recipe from a YAML file and checks it, with the branches of `compare`.

It reports all faults of single fields or, if there are none, all faults between fields. The command
line overrides fields: `search.swa_ratio=0.5`, `prepare.sources.0.weight=2`. An entry of `compare`
overrides fields of its branch in the same way.
"""

from __future__ import annotations

import copy
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
from stages.faults import Fault, collected
from stages.fields import Section
from stages.inputs import Origins, absolute, input_faults
from stages.stage import LoadedRecipe, Stage, folder_name, recipe_type

ROOT = Path(__file__).resolve().parents[2]
# A plain text with a part that YAML would read as a comment.
_COMMENTED = re.compile(r"(?!['\"\[{])(.*\s)?#", re.DOTALL)
# The values that override others, by their dotted paths split at the dots.
Changes = Mapping[tuple[str, ...], Any]


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
    changes = dict(map(parse_override, overrides))
    content = apply_overrides(kind, read_mapping(file), changes)

    def read(
        content: dict[str, Any], typed: Iterable[tuple[str, ...]], main: LoadedRecipe | None = None
    ) -> tuple[LoadedRecipe | None, list[Fault]]:
        """The recipe and its faults; None if a field is invalid. `typed` are overridden fields."""
        # A section without a value counts as absent.
        values = {key: value for key, value in content.items() if value is not None}
        try:
            recipe = kind.model_validate({"name": file.stem, **values})
        except ValidationError as error:
            return None, field_faults(kind, error)
        command = Path.cwd() if changes else ROOT
        origins = Origins(file.absolute().parent, command, ROOT, frozenset(typed))
        recipe = absolute(recipe, origins)
        # Defaults that depend on other fields.
        completed = {
            stage.key: stage.completed(section, recipe)
            for stage in stages
            if stage.field is not None and (section := getattr(recipe, stage.key)) is not None
        }
        recipe = recipe.model_copy(update=completed)
        world = find_world(recipe.runtime.processes, env)
        if main is not None and main.recipe.model == recipe.model:
            info, faults = main.info, list[Fault]()
        else:
            model, place = recipe.model, origins.of(("model", "path"))
            info, faults = read_model(
                model.path, model.revision, place, fetch=fetch, files=model_files,
                family=model_family,
            )  # fmt: skip
        loaded = LoadedRecipe(file, recipe, info, world, tuple(stages))
        checked = loaded if model_family else replace(loaded, info=None)
        faults += [fault for stage in checked.present for fault in stage.checks(checked)]
        return loaded, [*faults, *(missing_inputs(checked) if input_files else ())]

    loaded, faults = read(content, changes)
    branches: dict[str, LoadedRecipe] = {}
    for index, entry in enumerate(loaded.recipe.compare if loaded is not None else ()):
        with collected(faults, f"compare.{index}"):
            name, own = _branch(entry)
            if name in branches:
                raise UserError(f"is called {name}, like another branch; give it a name")
            changed = apply_overrides(kind, {**content, "compare": []}, own)
            branch, found = read(changed, changes.keys() - own.keys(), loaded)
            faults += _within(name, found, faults)
            if branch is not None:
                branches[name] = branch
    if loaded is None or faults:
        raise UserError(listing(str(file), faults))
    return replace(loaded, branches=branches)


def all_faults(
    loaded: LoadedRecipe, find: Callable[[LoadedRecipe], Iterable[Fault]]
) -> list[Fault]:
    """What `find` finds in a recipe and in its branches."""
    faults = list(find(loaded))
    for name, branch in loaded.branches.items():
        faults += _within(name, find(branch), faults)
    return faults


def _within(branch: str, faults: Iterable[Fault], known: Sequence[Fault]) -> list[Fault]:
    """Faults of a branch that are not `known` as the recipe's own."""
    own = (fault for fault in faults if fault not in known)
    return [Fault(f"compare.{branch}.{fault.path}", fault.text) for fault in own]


def _branch(entry: Mapping[str, Any]) -> tuple[str, Changes]:
    """Name and overrides of an entry of `compare`; UserError for an invalid name."""
    own = dict(entry)
    given = own.pop("name", None)
    changes = dict(_leaves(own))
    values = (
        str(value) if path[-1] == "method" else f"{path[-1]}-{value}"
        for path, value in changes.items()
    )
    name = re.sub(r"[^A-Za-z0-9._]+", "-", "-".join(values)).strip("-")
    try:
        return folder_name(str(given or name)), changes
    except ValueError as error:
        raise UserError(str(error)) from None


def _leaves(
    values: Mapping[str, Any], above: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], Any]]:
    """The values of dotted paths, and of mappings in mappings."""
    for path, value in values.items():
        keys = (*above, *path.split("."))
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, keys)
        else:
            yield keys, value


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


def parse_override(text: str) -> tuple[tuple[str, ...], Any]:
    """Path and value of `key.path=value`; the value is YAML without comments."""
    path, equals, value = text.partition("=")
    keys = tuple(path.strip().split("."))
    if not equals or not all(keys):
        raise UserError(f"override '{text}': expected key.path=value, like search.swa_ratio=0.5")
    if _COMMENTED.match(value.strip()):
        value = json.dumps(value.strip(), ensure_ascii=False)
    return keys, parse_yaml(value, f"override '{text}'")


def apply_overrides(
    kind: type[Section], content: dict[str, Any], changes: Changes
) -> dict[str, Any]:
    """A copy of a recipe's mapping with these values, without the fields that they replace.

    A number in a path is an index into an existing list; missing mappings are created.
    Raises UserError for a path through anything else.
    """
    result = copy.deepcopy(content)
    for keys, value in changes.items():
        _set(result, keys, value)
    _drop_replaced(kind, result, changes)
    return result


def _drop_replaced(
    kind: type[Section], values: dict[str, Any], paths: Iterable[tuple[str, ...]]
) -> None:
    """Remove what overrides replace (`Section.drop_replaced`), in each section."""
    below: dict[str, list[tuple[str, ...]]] = {}
    for path in paths:
        if values.get(path[0]) is not None:
            below.setdefault(path[0], []).append(path[1:])
    kind.drop_replaced(values, below.keys())
    for name, rest in below.items():
        field = kind.model_fields.get(name)
        nested = nested_section(field.annotation)[0] if field is not None else None
        if nested is not None and isinstance(values[name], dict):
            _drop_replaced(nested, values[name], [path for path in rest if path])


def _set(content: dict[str, Any], keys: tuple[str, ...], value: Any) -> None:
    parent: Any = content
    override = f"override of {'.'.join(keys)}"
    for depth, key in enumerate(keys):
        index: Any = key
        if isinstance(parent, list):
            index = _index(parent, key, ".".join(keys[:depth]), override)
        elif not isinstance(parent, dict):
            raise UserError(
                f"{override}: {'.'.join(keys[:depth])} is the value {parent!r} "
                "and has no keys below it"
            )
        if depth == len(keys) - 1:
            parent[index] = copy.deepcopy(value)
            return
        if isinstance(parent, dict) and parent.get(index) is None:
            parent[index] = {}
        parent = parent[index]


def _index(items: list[Any], key: str, path: str, override: str) -> int:
    if not key.isdecimal() or len(key) > 6 or int(key) >= len(items):
        positions = f"; '{key}' is none of its positions 0 to {len(items) - 1}" if items else ""
        raise UserError(f"{override}: {path} is a list of {len(items)}{positions}")
    return int(key)
