"""The recipe: one YAML file, typed, checked as a whole, every fault named at once."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, BeforeValidator, Field

from bosch.errors import UserError
from pipeline.checks import Parts, find_faults
from pipeline.faults import sentences
from pipeline.modelinfo import ModelInfo, is_hub_name, read_model
from pipeline.overrides import apply_overrides
from pipeline.partial import salvage, valid
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
_RESERVED = ("store", "work", "shared", "locks", "logs", "damaged")
# Fields that are paths, in whatever section they stand.
_PATHS = ("path", "tokenizer", "essay_dir", "output_root")
_Section = TypeVar("_Section", bound=Section)


def _folder_name(value: str) -> str:
    if not _NAME.fullmatch(value):
        raise ValueError(f"{value!r} cannot name a folder; use letters, digits, '.', '_', '-'")
    if value in _RESERVED:
        raise ValueError(f"'{value}' is the store's own folder; choose another name")
    return value


def _seed(value: object) -> object:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**31:
        raise ValueError(f"expected a whole number from 0 to 2147483647, found {value!r}")
    return value


class Recipe(Section):
    """A whole recipe; paths are absolute, a hub model stays a name."""

    name: Annotated[str, AfterValidator(_folder_name)] = Field(
        description="Name of the folder runs/<name>; default: the file's name."
    )
    seed: Annotated[int, BeforeValidator(_seed)] = Field(
        0, ge=0, description="Seed of everything that is drawn at random."
    )
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
    # A key without a value counts as left out, as YAML's writers mean it.
    given = {key: value for key, value in content.items() if value is not None}
    recipe, error = salvage(Recipe, {"name": file.stem, **given})
    faults = sentences(Recipe, error, "", Recipe) if error else []
    recipe = _absolute(recipe, root)
    info, model_faults = _read_model(recipe.model, root, fetch)
    processes = valid(recipe.runtime, "processes")
    world = find_world(processes or Runtime().processes, env)
    faults += model_faults
    faults += find_faults(
        Parts(
            recipe.model,
            recipe.prepare,
            recipe.search,
            recipe.train,
            recipe.evaluate,
            recipe.runtime,
            info,
            world if processes else None,
        ),
        input_files=input_files,
    )
    if faults:
        raise UserError(listing(str(file), faults))
    return LoadedRecipe(file, recipe, info, world)


def _read_model(model: ModelConfig, root: Path, fetch: bool) -> tuple[ModelInfo | None, list[str]]:
    """The model, where its path is valid."""
    path = valid(model, "path")
    if path is None:
        return None, []
    return read_model(path, valid(model, "revision"), root, fetch=fetch)


def listing(file: str, faults: Sequence[str]) -> str:
    """All faults of a file or a command as one message."""
    faults = list(dict.fromkeys(faults))
    if len(faults) == 1:
        return f"{file}: {faults[0]}"
    return "\n".join([f"{file}: {len(faults)} faults", *(f"  {fault}" for fault in faults)])


def _absolute(section: _Section, root: Path) -> _Section:
    """The section with its paths absolute."""
    placed: dict[str, Any] = {}
    for name, value in section:
        if isinstance(value, Section):
            placed[name] = _absolute(value, root)
        elif isinstance(value, list):
            placed[name] = [_absolute(x, root) if isinstance(x, Section) else x for x in value]
        elif isinstance(value, str) and name in _PATHS:
            placed[name] = _place(section, name, value, root)
    return section.model_copy(update=placed)


def _place(section: Section, name: str, value: str, root: Path) -> str:
    """The absolute path; what can only be meant as a name on the hub stays one."""
    path = os.path.normpath(root / Path(value).expanduser())
    if name == "tokenizer" and not os.path.isdir(path):
        return value
    if isinstance(section, ModelConfig) and not os.path.exists(path) and is_hub_name(value, root):
        return value
    return path
