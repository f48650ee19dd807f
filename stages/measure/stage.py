"""Stage measure: speed and memory of the hybrid and the original, on this machine."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from stages.faults import Fault
from stages.fields import Bytes, Count, Counts, Ratios, Section, rising
from stages.published import Record, Summary
from stages.search.stage import backend_faults
from stages.stage import LoadedRecipe, Stage, position_faults

DEFAULT_RATIOS, DEFAULT_WINDOW = (0.25, 0.5, 0.75, 0.875), 1024


class MeasureSettings(Section):
    """How models are measured; every field is an option of the command."""

    lengths: Counts = (4096, 8192, 16384, 32768)
    """tokens of the prompts"""
    ratios: Ratios | None = Field(
        None,
        description=f"shares of sliding KV heads (default: {','.join(map(str, DEFAULT_RATIOS))})",
    )
    windows: Counts | None = Field(
        None,
        description=(
            f"windows of the sliding heads (default: {DEFAULT_WINDOW}, or a hybrid model's own)"
        ),
    )
    sinks: int = Field(0, ge=0)
    """sink tokens of the sliding heads; a hybrid model keeps its own"""
    dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    """float32, bfloat16 or float16"""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto (a GPU where there is one), cpu or cuda"""
    threads: Count | None = None
    """threads of a CPU process (default: torch's own choice)"""
    clock: Literal["wall", "processor"] = "wall"
    """wall, or processor: CPU time summed over threads, for a machine with other work"""
    chunk: Count = 8192
    """prompt tokens in one forward pass"""
    decode_tokens: Count = 64
    """tokens decoded after the prompt"""
    batch_size: Count = 1
    """sequences measured together"""
    repeats: Count = 3
    """runs of each point; the median is reported"""
    attention: str = "auto"
    """backend of the hybrid attention"""
    original_attention: Literal[
        "auto", "sdpa", "eager", "flash_attention_2", "flash_attention_3", "hybrid"
    ] = "auto"
    """attention of the original: a name of transformers such as sdpa or flash_attention_2, or
    hybrid for the hybrid attention with every head full; auto: sdpa, or hybrid for a family without
    it"""
    memory_limit: Bytes | None = None
    """most memory of a run, like 40GB or 512MiB"""
    random_weights: bool = False
    """use random weights, with config.json only"""
    seed: int = Field(0, ge=0, lt=2**31)
    """seed of the prompts and of random weights"""


class MeasureConfig(Section):
    """Speed and memory of the hybrid beside the original; `bosch measure` has more options."""

    lengths: Annotated[list[Count], AfterValidator(rising)] = Field(
        default=[4096, 32768], min_length=1
    )
    """Tokens of the prompts."""
    decode_tokens: Count = 64
    """Tokens decoded after each prompt."""
    batch_size: Count = 1
    """Sequences measured together."""
    repeats: Count = 3
    """Runs of each point; the median is reported."""


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
    "stages.measure.run:run",
    MeasureConfig,
    field=Field(None, description="Measured speed and memory; left out, nothing is measured."),
    needs=("materialize",),
    model="weights",
    compared=False,
    checks=_faults,
    cost="stages.measure.cost:cost",
)
