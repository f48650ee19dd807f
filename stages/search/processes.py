"""Processes of a search, with GPUs one each."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

from bosch.ranks import Ranks
from bosch.this_process import world_size


@contextmanager
def join_process_group(timeout_minutes: float) -> Iterator[Ranks]:
    """Join the process group of torchrun's variables, if they are set; leave it at the end.

    A rank waits for the others for `timeout_minutes`; torchrun notices a dead rank much sooner.
    After a failure the group is not destroyed, since this can hang if a rank is gone.
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
    if not ranks.is_first:
        # All ranks run the same search, so only one logs it.
        logging.getLogger("bosch.search").setLevel(logging.ERROR)
    yield ranks
    dist.destroy_process_group()
