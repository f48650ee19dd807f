"""Stage measure: speed and memory of the hybrid and the original, on this machine."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from stages.faults import Fault
from stages.fields import Count, Ratio, Section, rising, split
from stages.published import Record, Summary
from stages.search.stage import backend_faults
from stages.stage import LoadedRecipe, Stage, position_faults

# Lists, in a recipe or as a command's option.
Counts = Annotated[list[Count], BeforeValidator(split), AfterValidator(rising)]
Ratios = Annotated[list[Ratio], BeforeValidator(split), AfterValidator(rising)]


class MeasureConfig(Section):
    """Speed and memory of the hybrid beside the original; `bosch measure` has more options."""

    lengths: Counts = Field(default=[4096, 32768], min_length=1)
    """Tokens of the prompts."""
    decode_tokens: Count = 64
    """Tokens decoded after each prompt."""
    batch_size: Count = 1
    """Sequences measured together."""
    repeats: Count = 3
    """Runs of each point; the median is reported."""


class MeasureSettings(MeasureConfig):
    """How models are measured; every field is an option of the command."""

    ratios: Ratios = Field(default=[0.25, 0.5, 0.75, 0.875], min_length=1)
    """Shares of sliding KV heads; a hybrid model keeps its own head mask."""
    windows: Counts = Field(default=[1024], min_length=1)
    """Windows of the sliding heads."""
    sinks: int = Field(0, ge=0)
    """Sink tokens of the sliding heads."""
    dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    """float32, bfloat16 or float16."""
    chunk: Count = 8192
    """Prompt tokens in one forward pass."""
    attention: str = "auto"
    """Backend of the hybrid attention."""
    random_weights: bool = False
    """Use random weights, with config.json only."""


class OverOriginal(Record):
    """A hybrid's figures as multiples of the original's."""

    prefill_tokens_per_second: float
    decode_tokens_per_second: float
    memory_peak_bytes: float
    kv_cache_bytes: float


class Point(Record):
    """Figures of a model at a length; `over_original` of a hybrid, if neither ran out of memory."""

    model: str
    length: int
    out_of_memory: bool
    prefill_tokens_per_second: float | None = None
    decode_tokens_per_second: float | None = None
    memory_peak_bytes: float | None = None
    kv_cache_bytes: float | None = None
    over_original: OverOriginal | None = None


class Efficiency(Summary):
    """efficiency.json: points by length, the original's before the hybrid's, and the hardware."""

    FILE = "efficiency.json"

    points: list[Point]
    hardware: dict[str, Any] | None = None
    settings: dict[str, Any] = Field(default={})

    @property
    def machine(self) -> str:
        """The GPU or CPU that it ran on."""
        hardware = self.hardware or {}
        return str(hardware.get("gpu") or hardware.get("cpu") or hardware.get("device"))

    @property
    def hybrids(self) -> list[Point]:
        """The hybrid's points, in order of length."""
        return [point for point in self.points if point.model == "hybrid"]


def _faults(loaded: LoadedRecipe) -> Iterator[Fault]:
    lengths = loaded.recipe[MeasureConfig].lengths
    yield from position_faults(loaded, "measure.lengths", max(lengths))
    yield from backend_faults(loaded, {"cache": "measure decodes with a KV cache"})


STAGE = Stage(
    "measure",
    "stages.measure.measurement:run",
    MeasureConfig,
    field=Field(None, description="Measured speed and memory; left out, nothing is measured."),
    needs=("materialize",),
    model="weights",
    compared=False,
    checks=_faults,
    cost="stages.measure.cost:cost",
)
