"""Whether training fits into the memory of a process, and which settings would make it fit."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

from bosch.backends import lacking
from bosch.errors import UserError
from bosch.hardware import host_memory
from bosch.model.families import split_fault
from stages.context import Runtime
from stages.cost import memory_here
from stages.formats import format_bytes
from stages.prepare.stage import PrepareConfig
from stages.search.stage import SearchConfig
from stages.shape import shape_of
from stages.stage import LoadedRecipe
from stages.train.footprint import TrainingJob, TrainingMemory, training_memory
from stages.train.schedule import make_schedule
from stages.train.stage import CHECKPOINTING, TrainConfig, batch_faults, checkpointing_faults

# CUDA context, NCCL's buffers and the kernels' own workspaces, on a GPU.
_DEVICE_OVERHEAD = 2.0 * 2**30
# Memory that the allocator cannot reuse, as a share of the rest.
_FRAGMENTATION = 0.05


@dataclass(frozen=True)
class MemoryBudget:
    """Memory that each training process needs under `runtime`, and the bytes it may use."""

    runtime: Runtime
    memory: TrainingMemory
    capacity: float
    on_gpu: bool

    @property
    def overhead(self) -> float:
        return _DEVICE_OVERHEAD if self.on_gpu else 0.0

    @property
    def need(self) -> float:
        """Bytes that are certain to be needed, without the margin."""
        return self.memory.peak + self.overhead

    @property
    def margin(self) -> float:
        return _FRAGMENTATION * self.memory.peak if self.on_gpu else 0.0

    @property
    def fits(self) -> bool:
        """Whether `need` fits; the margin may be missing."""
        return self.need <= self.capacity

    @property
    def is_safe(self) -> bool:
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


def training_budget(
    loaded: LoadedRecipe, processes: int, capacity: float, on_gpu: bool
) -> MemoryBudget:
    """The memory of a recipe's training on `processes`.

    Raises UserError where the batch cannot be divided among them.
    """
    return memory_budget(_job(loaded), processes, capacity, on_gpu)


def _job(loaded: LoadedRecipe) -> TrainingJob:
    recipe, shape = loaded.recipe, shape_of(loaded)
    rows = recipe[SearchConfig].kv_heads(shape.kinds, recipe.model.dtype)
    length = recipe[PrepareConfig].sequence_length
    return TrainingJob(shape, recipe[TrainConfig], recipe.runtime, length, rows)


def memory_budget(job: TrainingJob, processes: int, capacity: float, on_gpu: bool) -> MemoryBudget:
    """The memory of training; `runtime.checkpointing: auto` takes the first setting that fits.

    Raises UserError where the batch cannot be divided.
    """
    runtime = job.runtime
    schedule = make_schedule(job.train, runtime, job.length, processes, on_gpu)

    def budget(checkpointing: str) -> MemoryBudget:
        chosen = runtime.model_copy(update={"checkpointing": checkpointing})
        # `auto` is sdpa on a CPU; on a GPU it is a backend with a fused kernel, if one fits.
        attention = {} if on_gpu or runtime.attention != "auto" else {"attention": "sdpa"}
        memory = training_memory(
            replace(job, runtime=chosen.model_copy(update=attention)), processes=processes,
            tokens=schedule.micro_batch_size * job.length, accumulation=schedule.accumulation,
        )  # fmt: skip
        return MemoryBudget(chosen, memory, capacity, on_gpu)

    if runtime.checkpointing != "auto":
        return budget(runtime.checkpointing)
    possible = [name for name in CHECKPOINTING if not any(checkpointing_faults(runtime, name))]
    budgets = [budget(name) for name in possible]
    return next((candidate for candidate in budgets if candidate.is_safe), budgets[-1])


def remedy(loaded: LoadedRecipe, processes: int, capacity: float, on_gpu: bool) -> str:
    """The end of a message: the first of `_alternatives` with which training would fit.

    Where none fits with the margin on these processes, the first that may fit.
    """
    job, may_fit = _job(loaded), ""
    can_split = loaded.info is None or split_fault(loaded.info.loaded) is None
    for names, runtime, count in _alternatives(job.runtime, processes, can_split, on_gpu):
        if may_fit and count > processes:
            break
        if any(batch_faults(job.train, runtime, job.length, count)):
            continue
        budget = memory_budget(replace(job, runtime=runtime), count, capacity, on_gpu)
        if budget.is_safe:
            return f"it fits with {' and '.join(names)}"
        if budget.fits and not may_fit:
            may_fit = f"it may fit with {' and '.join(names)}"
    return may_fit or (
        "no sharding, checkpointing, context parallelism or number of processes makes it fit; "
        "shorten sequences"
    )


def _alternatives(
    runtime: Runtime, processes: int, can_split: bool, on_gpu: bool
) -> Iterator[tuple[list[str], Runtime, int]]:
    """Changes of `runtime` that leave results as they are, with the processes that they need.

    In order of processes, then of `context_parallel`, then of the number of changes. `can_split`:
    sequences of this model can be split over processes.
    """
    changes: dict[str, dict[str, object]] = {}
    if runtime.checkpointing not in ("auto", "full"):
        changes["runtime.checkpointing=full"] = {"checkpointing": "full"}
    if runtime.micro_batch_size != 1:
        changes["runtime.micro_batch_size=1"] = {"micro_batch_size": 1}
    if runtime.sharding == "none":
        changes["runtime.sharding=fsdp"] = {"sharding": "fsdp"}
    if on_gpu and not runtime.offload_activations:  # a CPU has its activations in host memory
        changes["runtime.offload_activations=true"] = {"offload_activations": True}
    sharing = [runtime.context_parallel]
    can_split = can_split and not lacking(runtime.attention, {"chunks": "they are split"})
    if can_split and runtime.sharding != "deepspeed" and not runtime.compile:
        sharing += [n for n in (2, 4, 8, 16, 32) if n > runtime.context_parallel]
    for factor, split in itertools.product((1, 2, 4, 8, 16, 32), sharing):
        count = processes * factor
        for size in range(len(changes) + 1):
            for chosen in itertools.combinations(changes, size):
                update = {key: value for name in chosen for key, value in changes[name].items()}
                changed = runtime.model_copy(update={**update, "context_parallel": split})
                if changed.sharding != "none" and count < 2:
                    continue
                if any(checkpointing_faults(changed, changed.checkpointing)):
                    continue
                names = list(chosen)
                if split != runtime.context_parallel:
                    names.append(f"runtime.context_parallel={split}")
                if factor > 1:
                    names.append(f"{count} processes instead of {processes}")
                if names:
                    yield names, changed, count


def refuse_excess_memory(loaded: LoadedRecipe) -> None:
    """Raise UserError, before anything runs, if training is certain not to fit on this machine.

    Nothing is refused if the memory cannot be read, or the model's shape is not known.
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
            f"layers' inputs into host memory, which has {format_bytes(host)}; set it to false, or "
            "raise runtime.context_parallel"
        )
    if not budget.fits:
        raise UserError(
            f"{loaded.file}: training needs {format_bytes(budget.need)} on each of {count} "
            f"process(es), which has {format_bytes(capacity)}; "
            f"{remedy(loaded, count, capacity, on_gpu)} (`bosch plan` lists what the memory holds)"
        )
