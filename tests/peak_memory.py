"""Bytes of all tensors alive, counted after each operation, and the largest sum."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class TensorBytes(TorchDispatchMode):
    """Sums all storages that are alive after each operation, as large as they are by then.

    FSDP frees whole weights by shrinking their storages, so sizes are read again each time.
    `before` are the bytes that were alive at the start, those of other tests among them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._alive: dict[int, Any] = {}
        gc.collect()
        for candidate in gc.get_objects():
            if issubclass(type(candidate), torch.Tensor):
                self._add(candidate)
        self.before = self._bytes()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves((result, args, kwargs)):
            if isinstance(leaf, torch.Tensor):
                self._add(leaf)
        self.peak = max(self.peak, self._bytes())
        return result

    def _bytes(self) -> int:
        storages = [storage for ref in list(self._alive.values()) if (storage := ref()) is not None]
        return sum(storage.nbytes() for storage in storages)

    def _add(self, tensor: torch.Tensor) -> None:
        local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
        if local.device.type == "meta" or type(local) not in (torch.Tensor, torch.nn.Parameter):
            return
        storage = local.untyped_storage()
        key = id(storage)
        if key not in self._alive:
            self._alive[key] = weakref.ref(storage, lambda _: self._alive.pop(key, None))
