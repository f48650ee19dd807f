"""Trains like `tests.training_case` and writes the most bytes of tensors each rank held at once.

python -m tests.peak_training CASE WORK '{"train": {...}, "runtime": {...}}'
"""

from __future__ import annotations

import gc
import json
import os
import sys
import weakref
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from stages.train.trainer import PretrainingTrainer
from tests.training_case import train_here


class TensorBytes(TorchDispatchMode):
    """Sums all storages that are alive after each operation, as large as they are by then.

    FSDP frees whole weights by shrinking their storages, so sizes are read anew each time.
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._alive: dict[int, Any] = {}
        for one in gc.get_objects():
            if issubclass(type(one), torch.Tensor):
                self._add(one)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves((result, args, kwargs)):
            if isinstance(leaf, torch.Tensor):
                self._add(leaf)
        storages = [storage for ref in self._alive.values() if (storage := ref()) is not None]
        self.peak = max(self.peak, sum(storage.nbytes() for storage in storages))
        return result

    def _add(self, tensor: torch.Tensor) -> None:
        local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
        if local.device.type == "meta" or type(local) not in (torch.Tensor, torch.nn.Parameter):
            return
        storage = local.untyped_storage()
        key = id(storage)
        if key not in self._alive:
            self._alive[key] = weakref.ref(storage, lambda _: self._alive.pop(key, None))


if __name__ == "__main__":
    counted: list[TensorBytes] = []
    step = PretrainingTrainer.training_step

    def training_step(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not counted:
            counted.append(TensorBytes())
            counted[0].__enter__()
        return step(self, *args, **kwargs)

    PretrainingTrainer.training_step = training_step  # type: ignore[method-assign]
    work_dir = Path(sys.argv[2])
    train_here(Path(sys.argv[1]), work_dir, **json.loads(sys.argv[3]))
    counted[0].__exit__(None, None, None)
    (work_dir / f"peak.{os.environ.get('RANK', '0')}.json").write_text(str(counted[0].peak))
