"""The processes that torchrun started for the search, one GPU each where there are GPUs."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

from bosch.ranks import Ranks
from stages.context import Runtime


@contextmanager
def join_process_group(
    parallel: str = "data", timeout_minutes: float = Runtime().timeout_minutes
) -> Iterator[Ranks]:
    """Join the process group that torchrun's variables describe, if they do; leave it at the end.

    With `parallel` "tensor" the processes hold the shards of one model, with "context" those of
    each sequence. A rank waits for the others
    for `timeout_minutes`; that one has died is noticed much sooner, by torchrun.

    After a failure the group is left to the end of the process: parting from ranks that are gone
    can hang.
    """
    size, local = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("LOCAL_RANK", "0"))
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
        # All ranks run the same search: one of them tells about it.
        logging.getLogger("bosch.search").setLevel(logging.ERROR)
    yield ranks
    dist.destroy_process_group()
