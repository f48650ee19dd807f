"""The types of a whole recipe, and of one that was read and checked.

`recipe[SearchConfig]` is the section of that type; `recipe.get(TrainConfig)` is None where the
recipe leaves it out.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from pydantic import AfterValidator, Field, create_model

from bosch.model.stored_config import StoredConfig
from stages.context import ModelConfig, Runtime
from stages.fields import Section

if TYPE_CHECKING:
    from stages.stage import Stage

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
# Folders of the store, and the page of all runs.
_RESERVED = ("store", "work", "shared", "locks", "logs", "damaged", "index.html")
_Kind = TypeVar("_Kind", bound=Section)


def folder_name(value: str) -> str:
    """A recipe's name, which names its folder; raises ValueError for what cannot."""
    if not _NAME.fullmatch(value):
        raise ValueError(
            f"{value[:60]!r} cannot name a folder; use 1 to 100 letters, digits, '.', '_', '-'"
        )
    if value.lower() in _RESERVED:  # file systems of macOS take Store for store
        raise ValueError(f"'{value}' is a name of the store's own; choose another")
    return value


class Recipe(Section):
    """What every recipe has beside the sections of its stages, which `recipe_type` adds.

    Paths are absolute once it is loaded; a hub model stays a name.
    """

    name: Annotated[str, AfterValidator(folder_name)] = Field(
        description="Name of the folder runs/<name>; default: the file's name."
    )
    seed: int = Field(0, ge=0, lt=2**31, description="Seed of everything that is drawn at random.")
    model: ModelConfig = Field(description="The pretrained model.")
    runtime: Runtime = Field(
        default_factory=Runtime, description="What changes no result and is in no key."
    )

    def get(self, kind: type[_Kind]) -> _Kind | None:
        """The section of a type; None where the recipe leaves it out."""
        return next((value for _, value in self if isinstance(value, kind)), None)

    def __getitem__(self, kind: type[_Kind]) -> _Kind:
        section = self.get(kind)
        if section is None:
            raise KeyError(f"the recipe has no section of type {kind.__name__}")
        return section


def recipe_type(stages: Sequence[Stage[Any]]) -> type[Recipe]:
    """The type of a recipe for these stages: one field for the section of each."""
    fields: dict[str, Any] = {}
    for stage in stages:
        if stage.field is not None:
            optional = not stage.field.is_required() and stage.field.default is None
            kind: Any = stage.section | None if optional else stage.section
            fields[stage.key] = (kind, stage.field)
    return create_model("Recipe", __base__=Recipe, __doc__=Recipe.__doc__, **fields)


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
        """GPUs that the processes use, one each; 0 where there are none."""
        return self.nodes * min(self.processes_per_node, self.gpus)


@dataclass(frozen=True, eq=False)
class ModelInfo(StoredConfig):
    """A model's config.json, and where its files are.

    `directory` is None for a hub model; `commit` is the revision its config.json belongs to, None
    where it comes from recipes/shapes.
    """

    directory: Path | None = None
    commit: str | None = None


@dataclass(frozen=True)
class LoadedRecipe:
    """A recipe, the stages it was read for, and what was read beside it.

    `info` is None only for a hub model that is not on this machine while fetching was not allowed.
    """

    file: Path
    recipe: Recipe
    info: ModelInfo | None
    world: World
    stages: tuple[Stage[Any], ...]

    @property
    def positions(self) -> int | None:
        """The model's positions; None where it has no limit, or is not known."""
        return self.info.max_positions if self.info is not None else None

    @property
    def present(self) -> list[Stage[Any]]:
        """The stages that the recipe has a section for."""
        return [one for one in self.stages if getattr(self.recipe, one.key) is not None]

    def up_to(self, name: str) -> LoadedRecipe:
        """The same with no other stages than one and those that it needs, directly or not."""
        wanted = {name}
        for stage in reversed(self.stages):
            if stage.name in wanted:
                wanted.update(stage.needs or ())
        return replace(self, stages=tuple(s for s in self.stages if s.name in wanted))

    @property
    def output_root(self) -> Path:
        return Path(self.recipe.runtime.output_root)


def position_faults(loaded: LoadedRecipe, path: str, length: int) -> Iterator[str]:
    """Why sequences of the length that stands under `path` are too long for the model."""
    if loaded.positions is not None and length > loaded.positions:
        yield f"{path}: {length:,} is more than the model's {loaded.positions:,} positions"
