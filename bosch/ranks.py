"""The processes that share one search: each has a model, and a part of the calibration set."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from bosch.errors import LostRankError

T = TypeVar("T")


@dataclass(frozen=True)
class Ranks:
    """This process among `size` of a torch.distributed group; by default it is alone.

    Or it holds part `shard` of a model that `shards` processes share: then all of them compute the
    same, and go by what the first one found. `device` is where this rank's tensors must lie to be
    sent: a GPU for nccl, the CPU for gloo.
    """

    rank: int = 0
    size: int = 1
    device: torch.device = field(default_factory=partial(torch.device, "cpu"))
    shard: int = 0
    shards: int = 1

    @property
    def is_first(self) -> bool:
        """Whether this rank is the one that writes files and speaks to the user."""
        return self.rank == self.shard == 0

    @property
    def is_alone(self) -> bool:
        """Whether there is no other process."""
        return self.size == self.shards == 1

    def merge(self, *parts: Tensor) -> list[Tensor]:
        """float64 tensors on the CPU in which each entry is set by one rank and 0 on the others.

        Every rank gets all entries, to the bit. Raises LostRankError when another rank has ended.
        """
        if self.is_alone:
            return list(parts)
        together = torch.cat([part.reshape(-1) for part in parts]).to(self.device)
        if self.shard > 0:
            together = torch.zeros_like(together)
        with _partners_alive():
            dist.all_reduce(together)
            together = together.cpu()
        pieces = torch.split(together, [part.numel() for part in parts])
        return [piece.reshape(part.shape) for piece, part in zip(pieces, parts, strict=True)]

    def from_first(self, value: T) -> T:
        """Rank 0's `value`, on every rank. Raises LostRankError when another rank has ended."""
        if self.is_alone:
            return value
        box: list[Any] = [value]
        with _partners_alive():
            dist.broadcast_object_list(box, src=0, device=self.device)
        result: T = box[0]
        return result

    def agree(self, fact: bool) -> bool:
        """Whether `fact` holds for every shard of the model, which must take the same decisions."""
        if self.shards == 1:
            return fact
        told = torch.tensor([int(fact)], device=self.device)
        with _partners_alive():
            dist.all_reduce(told, op=dist.ReduceOp.MIN)
            return bool(told.item())


@contextmanager
def _partners_alive() -> Iterator[None]:
    """Around a collective: gloo and nccl report a lost partner as a RuntimeError."""
    try:
        yield
    except RuntimeError as error:
        reason = " ".join(str(error).split())[:200]
        raise LostRankError(f"another process of this run does not answer ({reason})") from error
