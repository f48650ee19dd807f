"""The processes of a search, each with a model and some batches of the calibration set."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from bosch.errors import LostRankError

T = TypeVar("T")

# gloo's messages for a broken connection or a late partner.
_BROKEN = ("gloo", "Connection closed by peer", "Connection reset by peer", "Broken pipe")


@dataclass(frozen=True)
class Ranks:
    """This process among `size` of a torch.distributed group; by default there is only one.

    `device` is where tensors must be for communication: a GPU for nccl, the CPU for gloo.
    """

    rank: int = 0
    size: int = 1
    device: torch.device = field(default_factory=partial(torch.device, "cpu"))

    @property
    def is_first(self) -> bool:
        """Whether this rank writes files and prints."""
        return self.rank == 0

    @property
    def is_alone(self) -> bool:
        """Whether there is no other process."""
        return self.size == 1

    def merge(self, *tensors: Tensor) -> list[Tensor]:
        """Exact sums of float64 CPU tensors, each entry set by one rank; raises LostRankError."""
        if self.is_alone:
            return list(tensors)
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors]).to(self.device)
        with partners_alive(every=True):
            dist.all_reduce(flat)
            flat = flat.cpu()
        sums = torch.split(flat, [tensor.numel() for tensor in tensors])
        return [total.reshape(tensor.shape) for total, tensor in zip(sums, tensors, strict=True)]

    def from_first(self, value: T) -> T:
        """Rank 0's `value`, on every rank. Raises LostRankError when another rank has ended."""
        if self.is_alone:
            return value
        box: list[Any] = [value]
        with partners_alive(every=True):
            dist.broadcast_object_list(box, src=0, device=self.device)
        return box[0]

    def gather(self, values: list[T]) -> list[T]:
        """The `values` of all ranks, in their order. Raises LostRankError as `from_first`."""
        if self.is_alone:
            return values
        boxes: list[Any] = [None] * self.size
        with partners_alive(every=True):
            dist.all_gather_object(boxes, values)
        return [value for box in boxes for value in box]


def limit_collectives(minutes: float) -> None:
    """Make collectives fail after `minutes` of waiting for another process."""
    if dist.is_initialized():
        # torch 2.14 has a public name.
        limit = getattr(dist, "set_timeout", dist.distributed_c10d._set_pg_timeout)
        limit(timedelta(minutes=minutes))


@contextmanager
def partners_alive(*, every: bool = False) -> Iterator[None]:
    """Raise LostRankError if a connection to another rank breaks inside the block.

    Other errors pass through; with `every`, which suits blocks that only communicate, each
    RuntimeError counts as a broken connection.
    """
    try:
        yield
    except RuntimeError as error:
        if not every and not (connection_broke(error) and dist.is_initialized()):
            raise
        reason = " ".join(str(error).split())[:200]
        message = f"another process of this run does not answer ({reason})"
        raise LostRankError(message) from error


def connection_broke(error: BaseException) -> bool:
    """Whether an error is gloo's or nccl's report that another process has ended."""
    return isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and any(sign in str(error) for sign in _BROKEN)
    )
