"""The recipe: one YAML file, typed, checked as a whole, every fault named at once."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError

from bosch.errors import UserError
from pipeline import checks
from pipeline.faults import sentences, unknown_key
from pipeline.modelinfo import ModelInfo, is_hub_name, read_model
from pipeline.overrides import apply_overrides
from pipeline.world import World, find_world
from pipeline.yamlfile import read_mapping
from stages.configs import (
    EvaluateConfig,
    MaterializeConfig,
    ModelConfig,
    PrepareConfig,
    ReportConfig,
    Runtime,
    SearchConfig,
    Section,
    TrainConfig,
)

# Relative paths in a recipe are taken from the checkout, wherever the command is called from.
ROOT = Path(__file__).resolve().parent.parent
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_RESERVED = ("store", "work", "locks", "logs", "damaged")
# Sections a recipe may leave out: without the section, there is no such stage.
_OPTIONAL = ("train", "evaluate")


class Recipe(Section):
    """A whole recipe; paths are absolute, a hub model stays a name."""

    name: str = Field(description="Name of the folder runs/<name>; default: the file's name.")
    seed: int = Field(0, ge=0, description="Seed of everything that is drawn at random.")
    model: ModelConfig = Field(description="The pretrained model.")
    prepare: PrepareConfig = Field(description="Training data and calibration set.")
    search: SearchConfig = Field(description="Which KV heads become sliding.")
    materialize: MaterializeConfig = Field(
        default_factory=MaterializeConfig, description="The hybrid model's directory."
    )
    train: TrainConfig | None = Field(
        None, description="Continual pretraining; left out, nothing is trained."
    )
    evaluate: EvaluateConfig | None = Field(
        None, description="Scores; left out, nothing is evaluated."
    )
    report: ReportConfig = Field(default_factory=ReportConfig, description="The HTML page.")
    runtime: Runtime = Field(
        default_factory=Runtime, description="What changes no result and is in no key."
    )


@dataclass(frozen=True)
class LoadedRecipe:
    """A valid recipe and what was read beside it.

    `info` is None only for a hub model that is not on this machine while fetching was not allowed.
    """

    file: Path
    recipe: Recipe
    info: ModelInfo | None
    world: World

    @property
    def output_root(self) -> Path:
        return Path(self.recipe.runtime.output_root)


def load_recipe(
    path: str | os.PathLike[str],
    overrides: Sequence[str] = (),
    *,
    fetch: bool = True,
    input_files: bool = True,
    env: Mapping[str, str] = os.environ,
    root: Path = ROOT,
) -> LoadedRecipe:
    """Read, override and check a recipe; relative paths become absolute below `root`.

    `fetch` allows looking a hub model up over the network; without `input_files` the data need not
    be there yet. Raises UserError that lists every
    fault of the recipe with its dotted path.
    """
    file = Path(path)
    content = apply_overrides(read_mapping(file), overrides)
    name, faults = _read_name(content, file)
    sections, more = _read_sections(content)
    faults += more
    sections = {key: _absolute(section, root) for key, section in sections.items()}
    runtime, model = sections.get("runtime"), sections.get("model")
    world = find_world(runtime if isinstance(runtime, Runtime) else Runtime(), env)
    info: ModelInfo | None = None
    if isinstance(model, ModelConfig):
        try:
            info = read_model(model.path, model.revision, root, fetch=fetch)
            if info is not None:
                checks.check_shape(info)
        except UserError as fault:
            info = None
            faults.append(str(fault))
    faults += checks.find_faults(sections, info, world, input_files=input_files)
    if faults:
        raise UserError(_listing(str(file), faults))
    values: dict[str, Any] = {"name": name, "seed": content.get("seed") or 0, **sections}
    return LoadedRecipe(file, Recipe.model_validate(values), info, world)


def _listing(file: str, faults: Sequence[str]) -> str:
    faults = list(dict.fromkeys(faults))
    if len(faults) == 1:
        return f"{file}: {faults[0]}"
    return "\n".join([f"{file}: {len(faults)} faults", *(f"  {fault}" for fault in faults)])


def _read_name(content: Mapping[str, Any], file: Path) -> tuple[str, list[str]]:
    name = content.get("name")
    name = file.stem if name is None else name
    faults = []
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        faults.append(f"name: {name!r} cannot name a folder; use letters, digits, '.', '_', '-'")
    elif name in _RESERVED:
        faults.append(f"name: '{name}' is the store's own folder; choose another name")
    seed = content.get("seed", 0)
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**31:
        faults.append(f"seed: expected a whole number from 0 to 2147483647, found {seed!r}")
    return str(name), faults


def _read_sections(content: Mapping[str, Any]) -> tuple[dict[str, Section], list[str]]:
    """The sections that are valid by themselves, and the faults of the others."""
    fields = Recipe.model_fields
    faults = [unknown_key(key, Recipe, list(fields)) for key in content if key not in fields]
    sections: dict[str, Section] = {}
    for key, kind in SECTION_TYPES.items():
        value = content.get(key)
        if value is None and key in _OPTIONAL:
            continue
        if value is None and fields[key].is_required():
            faults.append(f"{key}: is required and missing")
            continue
        try:
            sections[key] = kind.model_validate({} if value is None else value)
        except ValidationError as error:
            faults += sentences(kind, error, key, Recipe)
    return sections, faults


SECTION_TYPES: dict[str, type[Section]] = {
    "model": ModelConfig,
    "prepare": PrepareConfig,
    "search": SearchConfig,
    "materialize": MaterializeConfig,
    "train": TrainConfig,
    "evaluate": EvaluateConfig,
    "report": ReportConfig,
    "runtime": Runtime,
}


def _absolute(section: Section, root: Path) -> Section:
    """The section with its paths absolute; a hub name stays as it is."""

    def place(value: str | None) -> str | None:
        return None if value is None else os.path.normpath(root / Path(value).expanduser())

    if isinstance(section, ModelConfig):
        if not Path(str(place(section.path))).exists() and is_hub_name(section.path, root):
            return section
        return section.model_copy(update={"path": place(section.path)})
    if isinstance(section, PrepareConfig):
        sources = []
        for source in section.sources:
            folder = place(source.tokenizer)
            tokenizer = folder if folder and Path(folder).is_dir() else source.tokenizer
            paths = {"path": place(source.path), "tokenizer": tokenizer}
            sources.append(source.model_copy(update=paths))
        essay = {"essay_dir": place(section.calibration.essay_dir)}
        calibration = section.calibration.model_copy(update=essay)
        return section.model_copy(update={"sources": sources, "calibration": calibration})
    if isinstance(section, EvaluateConfig) and section.needle is not None:
        essay = {"essay_dir": place(section.needle.essay_dir)}
        return section.model_copy(update={"needle": section.needle.model_copy(update=essay)})
    if isinstance(section, Runtime):
        return section.model_copy(update={"output_root": place(section.output_root)})
    return section
