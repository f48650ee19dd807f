"""Number of processes of distributed stages, from torchrun's variables or the recipe."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from itertools import takewhile
from pathlib import Path
from typing import Literal

from bosch.errors import UserError
from stages.stage import World

# Variables that launchers, schedulers and accelerate set for processes other than a stage's.
# Libraries would read them: a RANK makes a single process wait for others,
# ACCELERATE_MIXED_PRECISION=fp16 changes the precision of training.
_OTHER_PROCESSES = re.compile(
    r"((LOCAL|GROUP|ROLE)_)?(RANK|WORLD_SIZE)|ROLE_NAME|LOCAL_SIZE|CROSS_(RANK|SIZE)"
    r"|NNODES|NODE_RANK|NPROC_PER_NODE|MASTER_ADDR|MASTER_PORT|XLA_(USE|DOWNCAST)_BF16"
    r"|(PET|TORCHELASTIC|ACCELERATE|FSDP|PARALLELISM_CONFIG|MEGATRON_LM)_\w+"
    r"|(PMIX?|OMPI_COMM_WORLD|MV2_COMM_WORLD)_\w+|MPI_LOCAL(RANKID|NRANKS)"
)


def without_other_processes(env: Mapping[str, str]) -> dict[str, str]:
    """`env` for the processes of a stage, without variables about other processes."""
    return {name: value for name, value in env.items() if not _OTHER_PROCESSES.fullmatch(name)}


def count_gpus(env: Mapping[str, str] = os.environ) -> int:
    """Number of NVIDIA GPUs that this process may use, without importing torch."""
    visible = env.get("CUDA_VISIBLE_DEVICES")
    present = sum(1 for path in Path("/dev").glob("nvidia*") if path.name[6:].isdecimal())
    if visible is None:
        return present
    # CUDA reads the list up to the first invalid entry.
    devices = (item.strip() not in ("", "-1", "NoDevFiles") for item in visible.split(","))
    return min(present, sum(takewhile(bool, devices)))


def find_world(configured: int | Literal["auto"], env: Mapping[str, str] = os.environ) -> World:
    """The processes to start; NPROC_PER_NODE and similar variables override the recipe.

    With one node MASTER_ADDR and MASTER_PORT are ignored. Raises UserError for a variable that is
    not a number or a node rank out of range.
    """
    gpus = count_gpus(env)
    nodes = _integer(env, "NNODES", 1, least=1)
    rank = _integer(env, "NODE_RANK", 0, least=0)
    if rank >= nodes:
        raise UserError(f"NODE_RANK={rank}: expected a value below NNODES={nodes}")
    if env.get("NPROC_PER_NODE", "").strip() not in ("", "auto", "gpu"):
        processes = _integer(env, "NPROC_PER_NODE", 1, least=1)
    else:
        processes = max(gpus, 1) if configured == "auto" else configured
    if nodes == 1:
        return World(processes_per_node=processes, gpus=gpus)
    if not (env.get("MASTER_ADDR") and env.get("MASTER_PORT")):
        raise UserError(f"NNODES={nodes}: MASTER_ADDR and MASTER_PORT must be set on every node")
    port = _integer(env, "MASTER_PORT", 1, least=1, most=2**16 - 1)
    return World(nodes, rank, processes, env["MASTER_ADDR"], port, gpus)


def _integer(
    env: Mapping[str, str], name: str, default: int, least: int, most: int = 999_999
) -> int:
    text = env.get(name, "").strip() or str(default)
    if text.isdecimal() and len(text) <= 6 and least <= int(text) <= most:
        return int(text)
    raise UserError(
        f"environment variable {name}={text[:60]}: expected an integer from {least} to {most}"
    )
