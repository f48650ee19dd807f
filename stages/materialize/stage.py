"""Stage materialize: the hybrid model's directory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Self

from pydantic import Field

from bosch.errors import RunError
from bosch.files import read_json
from bosch.model.stored_config import StoredConfig
from bosch.model.untrusted import lasting_quantiser
from bosch.search.methods import METHODS
from stages.faults import Fault
from stages.fields import Count, Section
from stages.published import RUN_AGAIN, Summary
from stages.search.stage import SearchConfig
from stages.stage import LoadedRecipe, Recipe, Stage


class MaterializeConfig(Section):
    """The deployable model: weights permuted so that full heads come first."""

    max_shard_size: Annotated[str, Field(pattern=r"^\d+(\.\d+)?[KMGT]B$")] = "5GB"
    """Largest safetensors file."""
    point: Count | None = None
    """Number of a front's point, from 1 for the smallest; default: the best within the search's
    budget. Other methods ignore it."""

    def completed(self, recipe: Recipe) -> Self:
        """The section without a point where there is no front."""
        finds_front = METHODS[recipe[SearchConfig].method].finds_front
        return self if finds_front else self.model_copy(update={"point": None})


MODEL = "model"


class MaterializeSummary(Summary):
    """materialize/summary.json: size of the model and of its key/value cache, in bytes.

    `point` is the index of a front's point; `state_bytes` is as in `CacheSize`.
    """

    parameters: int
    swa_ratio: float | None = None
    point: int | None = None
    kv_cache_bytes_per_token_before: int
    state_bytes: int = 0


def read_model_config(materialize: Path) -> StoredConfig:
    """The configuration of the hybrid model in the stage's directory."""
    path = materialize / MODEL / "config.json"
    config = read_json(path)
    if not isinstance(config, dict):
        raise RunError(f"{path}: missing or damaged; {RUN_AGAIN}")
    return StoredConfig(config)


def _faults(loaded: LoadedRecipe) -> Iterator[Fault]:
    quantiser = lasting_quantiser(loaded.info.config) if loaded.info is not None else None
    if quantiser is not None:
        yield Fault(
            "model.path",
            f"the model's weights are quantised by {quantiser}, and no hybrid can be made of them; "
            "name the model's plain weights",
        )


STAGE = Stage(
    "materialize",
    "stages.materialize.run:run",
    MaterializeConfig,
    field=Field(default_factory=MaterializeConfig, description="The hybrid model's directory."),
    completed=MaterializeConfig.completed,
    needs=("search",),
    checks=_faults,
    slow_checks="stages.materialize.weights:weight_faults",
    model="weights",
    cost="stages.materialize.cost:cost",
)
