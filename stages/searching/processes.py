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

# A rank waits as long as another one needs for its share of one pass. That another has died is
# noticed much sooner, by torchrun.
_PATIENCE = timedelta(hours=6)


@contextmanager
def joined(parallel: str = "data") -> Iterator[Ranks]:
    """Join the process group that torchrun's variables describe, if they do; leave it at the end.

    With `parallel` "tensor" the processes hold the shards of one model.

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
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=_PATIENCE)
    ranks = Ranks(dist.get_rank(), size, device)
    if parallel == "tensor":
        ranks = Ranks(device=device, shard=dist.get_rank(), shards=size)
    if not ranks.is_first:
        # All ranks run the same search: one of them tells about it.
        logging.getLogger("bosch.method").setLevel(logging.ERROR)
    yield ranks
    dist.destroy_process_group()
