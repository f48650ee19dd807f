"""The types of a whole recipe, and of one that was read and checked."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, BeforeValidator, Field

from pipeline.recipe.model_shape import ModelInfo
from pipeline.recipe.processes import World
from stages.context import ModelConfig, Runtime
from stages.evaluate.stage import EvaluateConfig
from stages.fields import Section
from stages.materialize.stage import MaterializeConfig
from stages.prepare.stage import PrepareConfig
from stages.report.stage import ReportConfig
from stages.search.stage import SearchConfig
from stages.train.stage import TrainConfig

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_RESERVED = ("store", "work", "shared", "locks", "logs", "damaged")


def _folder_name(value: str) -> str:
    if not _NAME.fullmatch(value):
        raise ValueError(
            f"{value[:60]!r} cannot name a folder; use 1 to 100 letters, digits, '.', '_', '-'"
        )
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
    """A recipe and what was read beside it.

    `info` is None only for a hub model that is not on this machine while fetching was not allowed.
    """

    file: Path
    recipe: Recipe
    info: ModelInfo | None
    world: World

    @property
    def output_root(self) -> Path:
        return Path(self.recipe.runtime.output_root)
