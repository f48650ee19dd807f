"""Trains like `tests.training_case` and writes what each rank kept on the host: `offloaded.<n>`.

On a CPU it is copied all the same, so that the copies are what the backward pass reads.

python -m tests.offloaded_training CASE WORK '{"train": {...}, "runtime": {...}}'
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from stages.train.loop import Loop
from tests.training_case import train_here


class Copies(torch.autograd.graph.saved_tensors_hooks):
    """As torch's save_on_cpu, with copies where there would be none; `most` bytes at once."""

    held = most = 0

    def __init__(self, pin_memory: bool) -> None:
        assert not pin_memory
        super().__init__(self._pack, lambda copy: copy)

    def _pack(self, tensor: Tensor) -> Tensor:
        Copies.held += tensor.nbytes
        Copies.most = max(Copies.most, Copies.held)
        return tensor.clone()


def train_offloaded(case: Path, work_dir: Path, **changes: Any) -> int:
    """Bytes of the step that held most."""
    passes = Loop.forward_backward

    def forward_backward(self: Loop, *args: Any) -> float:
        Copies.held = 0
        return passes(self, *args)

    Copies.most = 0
    with (
        patch("stages.train.loop.save_on_cpu", Copies),
        patch.object(Loop, "forward_backward", forward_backward),
    ):
        train_here(case, work_dir, **changes)
    return Copies.most


if __name__ == "__main__":
    work = Path(sys.argv[2])
    most = train_offloaded(Path(sys.argv[1]), work, **json.loads(sys.argv[3]))
    (work / f"offloaded.{os.environ.get('RANK', '0')}").write_text(str(most))
