"""Bytes of all tensors that are alive, counted operation by operation, and the largest of them."""

from __future__ import annotations

import weakref
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class PeakMemory(TorchDispatchMode):
    """Counts the storages that operations allocate inside the context, until they are freed.

    `peak` is the most bytes that were alive at once, `largest` the biggest single one. What lay in
    memory before is no part of it, nor what a kernel allocates and frees by itself. Works on meta
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
