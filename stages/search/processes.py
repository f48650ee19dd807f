"""Processes of a search (with GPUs, one each), their kernels and memory."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from bosch.model.tensor_parallel import divides_heads
from bosch.objective.calibration import CalibrationSet
from bosch.objective.memory import reuse_room
from bosch.ranks import Ranks
from bosch.this_process import local_world_size, world_size
from bosch.window import Windows
from stages.context import Runtime
from stages.stage import LoadedRecipe


def refuse_shards(loaded: LoadedRecipe) -> None:
    """Raise UserError, before anything runs, if the processes cannot share the model's heads."""
    if loaded.recipe.runtime.search_parallel == "tensor" and loaded.info is not None:
        divides_heads(loaded.info.of_transformers(), loaded.world.size)


def numerics(
    device: torch.device,
    attention: str,
    batch_size: int,
    version: int,
    *,
    shards: int = 1,
    parts: int = 1,
) -> str:
    """Everything that the last bits of a result depend on, as text: device, kernels, batches, code.

    `version` is the stage's; `shards` processes share one model, `parts` split each sequence.
    """
    where = f"{torch.get_num_threads()} threads"
    if device.type == "cuda":
        where = torch.cuda.get_device_name(device)
    return (
        f"torch {torch.__version__}, {device.type}, {where}, {attention} attention, "
        f"batches of {batch_size}, version {version}"
        + (f", {shards} shards" if shards > 1 else "")
        + (f", {parts} parts" if parts > 1 else "")
    )


@contextmanager
def join_process_group(parallel: str, timeout_minutes: float) -> Iterator[Ranks]:
    """Join the process group of torchrun's variables, if they are set; leave it at the end.

    With `parallel` "tensor" the processes hold the shards of one model, with "context" those of
    each sequence. A rank waits for the others for `timeout_minutes`; torchrun notices a dead rank
    much sooner. After a failure the group is not destroyed, since this can hang if a rank is gone.
    """
    size, local = world_size(), int(os.environ.get("LOCAL_RANK", "0"))
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", local)
        torch.cuda.set_device(device)
    if size == 1:
        yield Ranks(device=device)
        return
    timeout = timedelta(minutes=timeout_minutes)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=timeout)
    ranks = Ranks(dist.get_rank(), size, device)
    if parallel != "data":
        ranks = Ranks(device=device, shard=dist.get_rank(), shards=size)
    if not ranks.is_first:
        # All ranks run the same search, so only one logs it.
        logging.getLogger("bosch.search").setLevel(logging.ERROR)
    yield ranks
    dist.destroy_process_group()


def reuse_bytes(
    runtime: Runtime, model: Any, windows: Windows, calibration: CalibrationSet, ranks: Ranks
) -> int:
    """Bytes of `runtime.reuse_memory`, by default the free memory of this process.

    With shards, the least free memory of all. Call it after the model is loaded.
    """
    if isinstance(runtime.reuse_memory, int):
        return runtime.reuse_memory
    split = runtime.search_parallel == "context"
    room = reuse_room(
        model,
        windows,
        min(runtime.eval_batch_size, len(calibration)),
        calibration.max_length,
        processes=local_world_size(),
        shards=1 if split else ranks.shards,
        sharing=ranks.shards if split else 1,
    )
    return ranks.least(room)
