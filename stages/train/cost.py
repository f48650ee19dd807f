"""Cost of training, and the memory of a process."""

from __future__ import annotations

from bosch.budget import window_shares
from bosch.errors import UserError
from bosch.score.decoder_shape import DecoderShape
from stages.cost import BYTES, EFFICIENCY, Cost, Devices
from stages.formats import counted, format_bytes
from stages.prepare.stage import PrepareConfig
from stages.search.stage import SearchConfig
from stages.shape import shape_of
from stages.stage import LoadedRecipe
from stages.train.memory import TrainingJob
from stages.train.stage import TrainConfig, usable_processes

# Share of the peak in training of a mixture of experts, from BOSCH B.5: four days for 2.5B tokens
# of Qwen3-30B-A3B on 16 A800. Its forward passes reach the share of dense models: an evaluation
# takes 2.2 times as long as of Qwen3-1.7B (B.4), for 2.8 times the operations.
EXPERTS_EFFICIENCY = 0.0565


def cost(loaded: LoadedRecipe, devices: Devices) -> Cost:
    """All steps of the recipe; recomputation counts as work."""
    recipe, shape = loaded.recipe, shape_of(loaded)
    train, length = recipe[TrainConfig], recipe[PrepareConfig].sequence_length
    tokens = train.optimizer_steps * train.batch_tokens
    rows = recipe[SearchConfig].kv_heads(shape.kinds, recipe.model.dtype)
    processes = usable_processes(train, recipe.runtime, length, devices.processes)
    job = TrainingJob(
        shape, train, recipe.runtime, length, rows, processes,
        devices.on_gpu, devices.memory,
    )  # fmt: skip
    checkpointing: str = recipe.runtime.checkpointing
    try:
        memory = job.memory()
        checkpointing = memory.checkpointing
        parts = ", ".join(f"{format_bytes(size)} of {name}" for name, size in memory.parts.items())
        memory_text = (
            f"about {format_bytes(memory.peak)} of {format_bytes(devices.memory)} for each process "
            f"of training, runtime.checkpointing {checkpointing}: {parts}"
        )
    except UserError as error:
        count = counted(processes, "process", "processes")
        memory_text = f"training does not run on {count}: {error}"
    flops = shape.training_flops(tokens, length, window_shares(rows))
    computed = flops
    if train.teacher != "none":
        computed += shape.forward_flops(tokens, length)
    if checkpointing != "none":
        computed += _recomputed_flops(shape, checkpointing, flops, tokens)
    if recipe.runtime.answers_every_steps:
        runs = -(-train.optimizer_steps // recipe.runtime.answers_every_steps)
        asked = recipe[PrepareConfig].calibration
        computed += runs * shape.forward_flops(
            asked.examples * asked.length, asked.length, window_shares(rows)
        )
    efficiency = devices.efficiency or (EXPERTS_EFFICIENCY if shape.experts else EFFICIENCY)
    saved = len(train.checkpoint_steps) * shape.parameters * BYTES[recipe.model.dtype]
    # The older restart point is kept until the newer is complete.
    restart = 2 * restart_point_bytes(shape, recipe.runtime.sharding)
    note = f"{counted(train.optimizer_steps, 'step')} of {train.batch_tokens:,} tokens"
    if processes < devices.processes:
        note += f", on {processes} of {counted(devices.processes, 'process', 'processes')}"
    if shape.experts and not devices.efficiency:
        note += f", at {efficiency:.3g} of the peak"
    return Cost(
        computed,
        float(saved + restart),
        note,
        train.batch_tokens // length * recipe.runtime.context_parallel,
        efficiency,
        removed=float(restart),
        memory=memory_text,
    )


def restart_point_bytes(shape: DecoderShape, sharding: str) -> int:
    """A restart point on disk: weights in float32, and their moments.

    A tied table counts under both of its names, but DeepSpeed's point has each weight once.
    """
    both = shape.table if shape.tied and sharding != "deepspeed" else 0
    return 4 * (shape.parameters + both) + 8 * shape.parameters


def _recomputed_flops(
    shape: DecoderShape, checkpointing: str, training_flops: float, tokens: int
) -> float:
    """Operations of the layers that are computed again; the output head is not."""
    forward = training_flops / 3
    if checkpointing == "attention":  # only matrix products: attention's output is saved
        forward = 2.0 * shape.active_parameters * tokens
    return forward - 2.0 * shape.table * tokens
