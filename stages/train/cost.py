"""Cost of training, and the memory of a process."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from bosch.budget import LayerHeads, window_shares
from bosch.objective.decoder_shape import DecoderShape
from stages.context import Runtime
from stages.cost import BYTES, EFFICIENCY, Cost, Devices
from stages.fields import bytes_of
from stages.formats import counted, format_bytes, format_flops
from stages.materialize.stage import MaterializeConfig
from stages.prepare.stage import PrepareConfig
from stages.search.stage import SearchConfig
from stages.shape import shape_of
from stages.stage import LoadedRecipe
from stages.train.fit import MemoryBudget, remedy, training_budget
from stages.train.footprint import (
    TrainingJob,
    load_host_bytes,
    restart_point_bytes,
    step_traffic,
    unneeded_flops,
)
from stages.train.stage import TrainConfig, batch_faults

# Share of the peak in training of a mixture of experts, from BOSCH B.5: four days for 2.5B tokens
# of Qwen3-30B-A3B on 16 A800. Its forward passes reach the share of dense models: an evaluation
# takes 2.2 times as long as of Qwen3-1.7B (B.4), for 2.8 times the operations.
EXPERTS_EFFICIENCY = 0.0565


def cost(loaded: LoadedRecipe, devices: Devices) -> Cost:
    """All steps of the recipe; recomputation counts as work."""
    recipe, shape = loaded.recipe, shape_of(loaded)
    train, processes = recipe[TrainConfig], devices.processes
    steps, on = train.optimizer_steps, counted(processes, "process", "processes")
    tokens, length = steps * train.batch_tokens, recipe[PrepareConfig].sequence_length
    runtime, budget = recipe.runtime, None
    faults = list(batch_faults(train, runtime, length, processes))
    if not faults:
        budget = training_budget(loaded, processes, devices.memory, devices.on_gpu)
        runtime = budget.runtime
    unneeded = unneeded_flops(shape, train, tokens)
    mask_heads = recipe[SearchConfig].kv_heads(shape.kinds, recipe.model.dtype)
    flops = shape.training_flops(tokens, length, window_shares(mask_heads)) - unneeded
    original_flops = shape.training_flops(tokens, length) - unneeded
    teacher = shape.forward_flops(tokens, length) if train.teacher != "none" else 0.0
    saved, restart, storage_facts = _storage(loaded, runtime, devices)
    facts = [
        f"{counted(steps, 'step')} of {train.batch_tokens:,} tokens = {tokens:,} tokens",
        f"{counted(train.batch_tokens // length, 'sequence')} a step on {on}",
        f"{format_flops(flops)} without recomputation: {flops / original_flops:.0%} of the "
        "original's",
        *storage_facts,
    ]
    if teacher:
        facts.append(f"{format_flops(teacher)} of a forward pass of the original, the teacher")
    computed = flops + teacher
    if runtime.checkpointing != "none":
        computed += _recomputed_flops(shape, runtime, flops + unneeded, tokens)
    efficiency = devices.efficiency or (EXPERTS_EFFICIENCY if shape.experts else EFFICIENCY)
    facts.append(f"an MFU of {efficiency * (flops + teacher) / computed:.2g} is assumed")
    if shape.experts and not devices.efficiency:
        facts.append(
            f"at {efficiency:.3g} of the peak, as a mixture of experts: four days of "
            "Qwen3-30B-A3B on 16 A800 (BOSCH B.5); --efficiency says another"
        )
    for fact, score_flops in _scores(loaded, mask_heads, processes):
        facts.append(fact)
        computed += score_flops
    if budget is None:
        facts.append(f"does not run on {on}: {faults[0]}")
    else:
        facts += _exchange_facts(loaded, runtime, processes, mask_heads)
        facts += _memory_facts(loaded, budget, devices)
    jobs = (train.batch_tokens // length * runtime.context_parallel,)
    return Cost(computed, saved + restart, facts, jobs, efficiency, removed=restart)


def _recomputed_flops(
    shape: DecoderShape, runtime: Runtime, training_flops: float, tokens: int
) -> float:
    """Operations of the layers that are computed again; the output head is not."""
    forward = training_flops / 3
    if runtime.checkpointing == "attention":  # only matrix products: attention's output is saved
        forward = 2.0 * shape.active_parameters * tokens
    return forward - 2.0 * shape.table * tokens


def _storage(
    loaded: LoadedRecipe, runtime: Runtime, devices: Devices
) -> tuple[float, float, list[str]]:
    """Bytes on disk of checkpoints and of restart points, and remarks on host memory and disk."""
    shape, train = shape_of(loaded), loaded.recipe[TrainConfig]
    materialize, local = loaded.recipe[MaterializeConfig], devices.local_processes
    itemsize, checkpoints = BYTES[materialize.dtype], len(train.checkpoint_steps)
    saved = float(checkpoints * shape.parameters * itemsize)
    host = load_host_bytes(
        shape.parameters, itemsize, 2 if train.mixed_precision == "bf16" else 4,
        runtime.sharding, local, devices.on_gpu,
    )  # fmt: skip
    point = restart_point_bytes(shape, train, runtime.sharding)
    # A copy of the state of a node's processes; without sharding of the first process only.
    writing = point * (1.0 if runtime.sharding == "none" else local / devices.processes)
    # Each process holds one file of a checkpoint that is written.
    file = bytes_of(materialize.max_shard_size)
    files = float(min(shape.parameters * itemsize, file * local))
    restart = 2 * point  # the older is kept until the newer is complete
    facts = [
        f"host memory a node: {format_bytes(host)} while loading, {format_bytes(writing)} while "
        f"restart points are written, {format_bytes(files)} while checkpoints are",
        f"on disk {counted(checkpoints, 'checkpoint')} ({format_bytes(saved)}) and at most two "
        f"restart points ({format_bytes(restart)})",
    ]
    return saved, restart, facts


def _scores(
    loaded: LoadedRecipe, layers: Sequence[LayerHeads], processes: int
) -> Iterator[tuple[str, float]]:
    """Remarks and operations of the scores during training, for a mask of `layers`."""
    runtime, prepare = loaded.recipe.runtime, loaded.recipe[PrepareConfig]
    steps = loaded.recipe[TrainConfig].optimizer_steps
    groups = max(1, processes // runtime.context_parallel)
    for name, every, samples, length in (
        ("needles", runtime.needle_every_steps, runtime.needle_samples, prepare.calibration.length),
        (
            "held-out loss", runtime.heldout_every_steps, runtime.heldout_sequences,
            prepare.sequence_length,
        ),
    ):  # fmt: skip
        if every:
            runs = math.ceil(steps / every)  # the last step has a score too
            tokens = runs * math.ceil(samples / groups) * groups * length
            flops = shape_of(loaded).forward_flops(tokens, length, window_shares(layers))
            yield (
                f"{name} {counted(runs, 'time')}, on {counted(samples, 'sample')} of {length:,} "
                f"tokens: {format_flops(flops)}",
                flops,
            )


def _exchange_facts(
    loaded: LoadedRecipe,
    runtime: Runtime,
    processes: int,
    mask_heads: Sequence[LayerHeads],
) -> Iterator[str]:
    """Bytes that processes that share sequences send in a step."""
    recipe, shape = loaded.recipe, shape_of(loaded)
    sharing, length = runtime.context_parallel, recipe[PrepareConfig].sequence_length
    if sharing == 1:
        return

    def traffic(layers: Sequence[LayerHeads] = ()) -> float:
        job = TrainingJob(shape, recipe[TrainConfig], runtime, length, layers)
        return step_traffic(job) / processes

    sent = traffic(mask_heads)
    yield (
        f"context parallelism: {length // sharing:,} tokens of a sequence on each of {sharing} "
        f"processes, which send {format_bytes(sent)} each a step: {sent / traffic():.0%} of "
        "what the original's heads would"
    )


def _memory_facts(loaded: LoadedRecipe, budget: MemoryBudget, devices: Devices) -> Iterator[str]:
    """Memory of a process in training by its use, and whether it fits."""
    chosen = budget.runtime.checkpointing
    if chosen != loaded.recipe.runtime.checkpointing:
        yield f"runtime.checkpointing = auto is {chosen} with this memory"
    yield f"per process {budget.verdict}"
    if not budget.fits:
        yield remedy(loaded, devices.processes, devices.memory, devices.on_gpu)
    offloaded = budget.memory.offloaded * devices.local_processes
    if offloaded:
        yield f"host memory a node for the inputs of layers: {format_bytes(offloaded)}"
    breakdown = {
        **budget.memory.breakdown,
        "device and libraries": budget.overhead,
        "fragmentation": budget.margin,
    }
    for name, size in breakdown.items():
        if size:
            yield f"  {name:<20} {format_bytes(size)}"
