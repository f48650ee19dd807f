"""Types for a stage, a recipe, and a loaded recipe.

`recipe[SearchConfig]` is the section of that type; `recipe.get(TrainConfig)` is None if the recipe
leaves it out. A stage is a package with a `stage.py` that sets STAGE, and a module with its
function. Nothing here or in a `stage.py` imports torch, so that `status` is fast.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Generic, Literal, TypeVar

from pydantic import AfterValidator, Field, create_model

from bosch.model.stored_config import StoredConfig
from stages.context import ModelConfig, Runtime
from stages.faults import Fault
from stages.fields import Section
from stages.published import TENSORBOARD, Summary

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
# Names that the store uses for its folders and the page of all runs.
_RESERVED = ("store", "work", "locks", "logs", "damaged", "index.html")
# Files of stages' outputs that hold times: two equal runs differ in them.
TIMED = ("stage*.log", Summary.FILE, f"{TENSORBOARD}/*", "evaluations.jsonl", "metrics.jsonl")
_Kind = TypeVar("_Kind", bound=Section)
OwnSection = TypeVar("OwnSection", bound=Section)


def folder_name(value: str) -> str:
    """A recipe's name; raises ValueError if it cannot be the name of a folder."""
    if not _NAME.fullmatch(value):
        raise ValueError(
            f"{value[:60]!r} cannot name a folder; use 1 to 100 letters, digits, '.', '_', '-', "
            "beginning with a letter or digit"
        )
    if value.lower() in _RESERVED:  # macOS's file systems ignore case
        raise ValueError(f"'{value}' is reserved for the store; choose another")
    return value


class Recipe(Section):
    """Fields of every recipe, without the sections of its stages, which `recipe_type` adds.

    In a loaded recipe paths are absolute; a hub model stays a name.
    """

    name: Annotated[str, AfterValidator(folder_name)] = Field(
        description="Name of the folder runs/<name>; default: the file's name."
    )
    seed: int = Field(0, ge=0, lt=2**31, description="Seed of all random draws.")
    model: ModelConfig = Field(description="The pretrained model.")
    compare: list[dict[str, Any]] = Field(
        default=[],
        description="Branches of the recipe, to compare with it: each entry overrides values by "
        "their dotted paths, and may have a `name`.",
    )
    runtime: Runtime = Field(
        default_factory=Runtime, description="What changes no result and is in no key."
    )

    def get(self, kind: type[_Kind]) -> _Kind | None:
        """The section of a type; None if the recipe leaves it out."""
        return next((value for _, value in self if isinstance(value, kind)), None)

    def __getitem__(self, kind: type[_Kind]) -> _Kind:
        section = self.get(kind)
        if section is None:
            raise KeyError(f"the recipe has no section of type {kind.__name__}")
        return section


@dataclass(frozen=True)
class World:
    """Nodes and processes of a distributed stage, as torchrun counts them."""

    nodes: int = 1
    node_rank: int = 0
    processes_per_node: int = 1
    master_addr: str = "127.0.0.1"
    master_port: int | None = None
    gpus: int = 0

    @property
    def size(self) -> int:
        return self.nodes * self.processes_per_node

    @property
    def used_gpus(self) -> int:
        """GPUs that the processes use, one each; 0 without GPUs."""
        return self.nodes * min(self.processes_per_node, self.gpus)


@dataclass(frozen=True, eq=False)
class ModelInfo(StoredConfig):
    """A model's config.json and the place of its files.

    `directory` is None for a hub model; `commit` is the revision of its config.json, None if it
    comes from recipes/shapes.
    """

    directory: Path | None = None
    commit: str | None = None


def call(function: str, *arguments: Any) -> Any:
    """Import `module:name`, call it and return its result; () for an empty name."""
    module, _, name = function.partition(":")
    return getattr(importlib.import_module(module), name)(*arguments) if module else ()


@dataclass(frozen=True)
class Stage(Generic[OwnSection]):
    """A stage of the pipeline.

    `function` is imported only in the process that runs it. `section` is the type of the recipe's
    section that configures it, under the key `key` (default: the stage's name); a recipe without
    the section does not run the stage. `field` declares the key as required or not, with its
    description; None if another stage declares it. `version` is raised when results change.

    `needs` are the stages whose outputs it reads, if the recipe has them (None: all before it);
    `after` are other stages that run before it, without being read. `reads` are the keys of further
    sections that it reads, and `model` is the part of the base model that it reads. A `distributed`
    stage runs in all processes of the recipe, or in the number on each node that `processes`
    returns; any other runs in one process.

    Its output's key is the hash of its name, its version, its section and those it reads, the seed,
    the keys of the stages it needs, its input files and the base model.

    A branch of a recipe (`compare`) has the stages that are `compared`.

    `completed` fills in defaults of its section that depend on the rest of the recipe.

    If the recipe has the section, `checks` yields conflicts between fields of the recipe, and
    `missing` yields missing packages and files other than the section's inputs. `slow_checks` names
    a similar function that only `validate` calls.

    `cost` names the function of (recipe, devices) with the cost that `plan` prints.
    """

    name: str
    function: str
    section: type[OwnSection]
    version: int = 1
    field: Any = None  # a FieldInfo, which pydantic types as the declared value
    key: str = ""
    needs: tuple[str, ...] | None = ()
    after: tuple[str, ...] = ()
    reads: tuple[str, ...] = ()
    model: Literal["none", "tokenizer", "weights"] = "none"
    distributed: bool = False
    compared: bool = True
    processes: Callable[[LoadedRecipe], int] = lambda loaded: loaded.world.processes_per_node
    completed: Callable[[OwnSection, Recipe], OwnSection] = lambda section, recipe: section
    checks: Callable[[LoadedRecipe], Iterator[Fault]] = lambda loaded: iter(())
    missing: Callable[[LoadedRecipe], Iterator[Fault]] = lambda loaded: iter(())
    slow_checks: str = ""
    cost: str = ""

    def __post_init__(self) -> None:
        if not self.key:
            object.__setattr__(self, "key", self.name)

    @property
    def computes(self) -> bool:
        """Whether the stage runs a model, on GPUs if there are any."""
        return self.distributed or self.model == "weights"


@cache
def recipe_type(stages: tuple[Stage[Any], ...]) -> type[Recipe]:
    """The type of a recipe for these stages, with a field for the section of each."""
    fields: dict[str, Any] = {}
    for stage in stages:
        if stage.field is not None:
            optional = not stage.field.is_required() and stage.field.default is None
            kind: Any = stage.section | None if optional else stage.section
            fields[stage.key] = (kind, stage.field)
    return create_model("Recipe", __base__=Recipe, __doc__=Recipe.__doc__, **fields)


@dataclass(frozen=True)
class LoadedRecipe:
    """A recipe with its stages and the other files read with it.

    `info` is None only for a hub model that is not on this machine, if it must not be downloaded.
    `branches` are the recipes of `compare` by name.
    """

    file: Path
    recipe: Recipe
    info: ModelInfo | None
    world: World
    stages: tuple[Stage[Any], ...]
    branches: Mapping[str, LoadedRecipe] = field(default_factory=dict, compare=False)

    @property
    def positions(self) -> int | None:
        """The model's positions; None if it has no limit or is unknown."""
        return self.info.max_positions if self.info is not None else None

    @property
    def present(self) -> list[Stage[Any]]:
        return [stage for stage in self.stages if getattr(self.recipe, stage.key) is not None]

    @property
    def output_root(self) -> Path:
        return Path(self.recipe.runtime.output_root)


def model_processes(loaded: LoadedRecipe) -> int:
    """Processes per node of a stage in which each process holds the whole model."""
    spread = loaded.recipe.runtime.device_map != "none"
    return 1 if spread else loaded.world.processes_per_node


def position_faults(loaded: LoadedRecipe, path: str, length: int) -> Iterator[Fault]:
    """A fault if sequences of the length at `path` are too long for the model."""
    if loaded.positions is not None and length > loaded.positions:
        yield Fault(path, f"{length:,} is more than the model's {loaded.positions:,} positions")
