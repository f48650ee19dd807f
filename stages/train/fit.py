"""Whether training fits into the memory of a process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bosch.budget import LayerHeads
from bosch.errors import UserError
from bosch.hardware import host_memory
from bosch.objective.decoder_shape import DecoderShape
from stages.context import Runtime
from stages.cost import memory_here
from stages.formats import format_bytes
from stages.prepare.stage import PrepareConfig
from stages.recipe import LoadedRecipe
from stages.shape import shape_of
from stages.train.footprint import TrainingMemory, training_memory
from stages.train.schedule import make_schedule
from stages.train.stage import CHECKPOINTING, TrainConfig, checkpointing_faults

# CUDA context, NCCL's buffers and the kernels' own workspaces, on a GPU.
_DEVICE_OVERHEAD = 2.0 * 2**30
# What the allocator cannot give out again, as a share of the rest.
_FRAGMENTATION = 0.05


@dataclass(frozen=True)
class Budget:
    """Memory of each training process by its `runtime`, and the bytes it may use."""

    runtime: Runtime
    memory: TrainingMemory
    capacity: float
    on_gpu: bool

    @property
    def overhead(self) -> float:
        return _DEVICE_OVERHEAD if self.on_gpu else 0.0

    @property
    def need(self) -> float:
        """Bytes that are certain to be needed."""
        return self.memory.peak + self.overhead

    @property
    def margin(self) -> float:
        return _FRAGMENTATION * self.memory.peak if self.on_gpu else 0.0

    @property
    def fits(self) -> bool:
        """Whether what is certain fits; the margin may be missing."""
        return self.need <= self.capacity

    @property
    def is_safe(self) -> bool:
        """Whether it fits with the margin."""
        return self.need + self.margin <= self.capacity

    @property
    def verdict(self) -> str:
        """Required and available bytes, and whether they fit."""
        total = f"{format_bytes(self.need + self.margin)} of {format_bytes(self.capacity)}"
        if not self.fits:
            return f"{total}: does not fit"
        if not self.is_safe:
            return f"{total}: may not fit, only the fragmentation margin is missing"
        return f"{total}: fits"


def training_budget(loaded: LoadedRecipe, processes: int, capacity: float, on_gpu: bool) -> Budget:
    """The memory of a recipe's training on `processes`.

    Raises UserError where the batch does not split over them.
    """
    recipe, length = loaded.recipe, loaded.recipe[PrepareConfig].sequence_length
    train, shape = recipe[TrainConfig], shape_of(loaded)
    return budget_of(train, recipe.runtime, length, shape, processes, capacity, on_gpu)


def budget_of(
    train: TrainConfig,
    runtime: Runtime,
    length: int,
    shape: DecoderShape,
    processes: int,
    capacity: float,
    on_gpu: bool,
    layers: Sequence[LayerHeads] = (),
) -> Budget:
    """The memory of training, under `runtime.checkpointing = auto` with the first that fits.

    `layers` as for `training_memory`. Raises UserError where the batch does not split.
    """
    schedule = make_schedule(train, runtime, length, processes, on_gpu)

    def budget(checkpointing: str) -> Budget:
        settled = runtime.model_copy(update={"checkpointing": checkpointing})
        memory = training_memory(
            shape, train, settled, processes=processes,
            tokens=schedule.micro_batch_size * length, accumulation=schedule.accumulation,
            length=length, layers=layers,
        )  # fmt: skip
        return Budget(settled, memory, capacity, on_gpu)

    if runtime.checkpointing != "auto":
        return budget(runtime.checkpointing)
    ways = [budget(way) for way in CHECKPOINTING if not any(checkpointing_faults(runtime, way))]
    return next((one for one in ways if one.is_safe), ways[-1])


def remedy(runtime: Runtime, on_gpu: bool) -> str:
    """What lowers the memory of a process, of that which is not set yet, as a sentence's end."""
    helps = {
        "runtime.sharding=fsdp": runtime.sharding == "none",
        "runtime.checkpointing=full": runtime.checkpointing in ("none", "attention"),
        "runtime.micro_batch_size=1": runtime.micro_batch_size not in ("auto", 1),
        "runtime.offload_activations=true": on_gpu and not runtime.offload_activations,
        "a higher runtime.context_parallel": (
            runtime.sharding != "deepspeed" and not runtime.compile
        ),
        "more processes to shard over": True,
        "shorter sequences": True,
    }
    return f"what takes less: {', '.join(name for name, less in helps.items() if less)}"


def refuse_what_cannot_fit(loaded: LoadedRecipe) -> None:
    """Raise UserError before anything runs where training is certain not to fit on this machine.

    Nothing is refused where the memory cannot be read, or the model's shape is not known.
    """
    capacity = memory_here(loaded.world)
    if loaded.info is None or capacity is None:
        return
    on_gpu, count = loaded.world.gpus > 0, loaded.world.size
    budget = training_budget(loaded, count, capacity, on_gpu)
    offloaded = budget.memory.offloaded * loaded.world.processes_per_node
    host = host_memory() if offloaded else 0.0
    if offloaded > host:
        raise UserError(
            f"{loaded.file}: runtime.offload_activations = true puts {format_bytes(offloaded)} of "
            f"layers' inputs into host memory, of {format_bytes(host)} there; set false, or "
            "runtime.context_parallel higher"
        )
    if not budget.fits:
        raise UserError(
            f"{loaded.file}: training needs {format_bytes(budget.need)} on each of {count} "
            f"process(es), of {format_bytes(capacity)} there; "
            f"{remedy(budget.runtime, on_gpu)} (plan shows what holds it)"
        )
