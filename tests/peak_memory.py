"""Bytes of all tensors that are alive, counted operation by operation, and the largest of them."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class PeakMemory(TorchDispatchMode):
    """Counts the storages that operations allocate inside the context, until they are freed.

    `peak` is the most bytes that were alive at once, `largest` the biggest single one. What lay in
    memory before is not part of it, nor what a kernel allocates and frees by itself. Works on meta
    tensors, which have sizes and no memory.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = self.largest = 0
        self.largest_shape: tuple[int, ...] = ()
        self._alive: dict[int, Any] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = {id(s) for s in _storages((args, kwargs))}
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                self._add(leaf, before)
        return out

    def _add(self, tensor: Tensor, inputs: set[int]) -> None:
        storage = tensor.untyped_storage()
        key = id(storage)
        if key in self._alive or key in inputs:
            return
        size = storage.nbytes()
        self._alive[key] = weakref.finalize(storage, self._freed, key, size)
        self.now += size
        self.peak = max(self.peak, self.now)
        if size > self.largest:
            self.largest, self.largest_shape = size, tuple(tensor.shape)

    def _freed(self, key: int, size: int) -> None:
        del self._alive[key]
        self.now -= size


def _storages(values: Any) -> list[Any]:
    return [leaf.untyped_storage() for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


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
        for one in gc.get_objects():
            if issubclass(type(one), torch.Tensor):
                self._add(one)
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
