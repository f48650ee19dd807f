"""Memory of a decoder's blocks beside attention, measured on tensors that take none."""

from __future__ import annotations

import copy
import functools
import logging
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from bosch.model.families import decoder_layers, known_family, text_config
from bosch.objective.flops import FEED_FORWARD, linear_flops

logger = logging.getLogger(__name__)

# Tokens of a measurement: a whole chunk of every recurrence that is computed in chunks.
_TOKENS = 256


class PeakMemory(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the storages that operations allocate inside the context, until they are freed.

    `peak` is the most bytes that were alive at once, `largest` the biggest single one. What lay in
    memory before is not part of it, nor what a kernel allocates and frees by itself. Works on meta
    tensors, which have sizes and no memory.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.peak = self.largest = 0
        self._alive: dict[int, Any] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = {id(s) for s in _storages((args, kwargs))}
        out = func(*args, **(kwargs or {}))
        for storage in _storages(out):
            self._add(storage, before)
        return out

    def _add(self, storage: Any, inputs: set[int]) -> None:
        key = id(storage)
        if key in self._alive or key in inputs:
            return
        size = storage.nbytes()
        self._alive[key] = weakref.finalize(storage, self._freed, key, size)
        self.now += size
        self.peak, self.largest = max(self.peak, self.now), max(self.largest, size)

    def _freed(self, key: int, size: int) -> None:
        del self._alive[key]
        self.now -= size


def _storages(values: Any) -> list[Any]:
    return [leaf.untyped_storage() for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


@dataclass(frozen=True)
class BlockBytes:
    """Bytes of a token in a layer's blocks beside its attention; means over layers are `saved`.

    `plain` is the most of a pass without gradients. With frozen weights autograd keeps `saved`, its
    backward pass adds at most `added`; both together take at most `sliced` in a feed-forward block,
    which a gradient recomputes some tokens at a time, and `whole` in another one, like a
    recurrence. `norms` and `others` are the parts of `saved` that norms and the latter blocks keep,
    `again` is the part of `plain` that is a feed-forward block's.
    """

    plain: float
    saved: float
    added: float
    sliced: float
    whole: float = 0.0
    norms: float = 0.0
    others: float = 0.0
    again: float = 0.0
    norms_of_heads: bool = True  # queries and keys have norms of their own


class _Block(NamedTuple):
    """Bytes of a token: the most of a pass, what autograd keeps, the most of both passes."""

    plain: float
    saved: float
    both: float


@functools.lru_cache(maxsize=4)
def block_bytes(model: Any, value_bytes: int) -> BlockBytes:
    """The blocks of a model on the meta device, with values of 2 or 4 bytes.

    Recurrences count as torch computes them: kernels take less.
    """
    text, kinds = text_config(model.config), decoder_layers(model.config)
    attending, attention = {*kinds.full, *kinds.windows}, known_family(model.config).attention
    measured: dict[Any, _Block] = {}
    layers, norms = model.get_decoder().layers, 0.0
    sliced, others = list[_Block](), list[_Block]()
    for number, layer in enumerate(layers):
        for name, child in _blocks_of(layer):
            maps = sum(linear_flops(module, text) for module in child.modules()) // 2
            is_norm = "Norm" in type(child).__name__
            if (number in attending and name == attention) or not (maps or is_norm):
                continue
            shapes = type(child), tuple(weight.shape for weight in child.parameters())
            if shapes not in measured:
                measured[shapes] = _measured(child, text.hidden_size, maps, value_bytes)
            block = measured[shapes]
            if is_norm:  # its input at least, which is what layers pass on
                norms += max(block.saved, text.hidden_size * value_bytes)
            else:
                (sliced if name in FEED_FORWARD else others).append(block)
    every = [*sliced, *others]
    first = getattr(layers[kinds.full[0]], attention)
    return BlockBytes(
        plain=max(block.plain for block in every),
        saved=(norms + sum(block.saved for block in every)) / len(layers),
        added=max(block.both - block.saved for block in every),
        sliced=max((block.both for block in sliced), default=0.0),
        whole=max((block.both for block in others), default=0.0),
        norms=norms / len(layers),
        others=sum(block.saved for block in others) / len(layers),
        again=max((block.plain for block in sliced), default=0.0),
        norms_of_heads=any("Norm" in type(module).__name__ for module in first.modules()),
    )


def _blocks_of(layer: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Modules of a layer by name; two maps that stand in no block, and what is between, as one."""
    children = dict(layer.named_children())
    if "fc1" in children:
        yield "fc", nn.Sequential(*map(children.pop, ("fc1", "activation_fn", "fc2")))
    yield from children.items()


def _measured(block: nn.Module, hidden: int, maps: int, value_bytes: int) -> _Block:
    """A block's bytes.

    Grouped experts have a meta kernel only for bf16. If a block cannot be run on hidden states
    alone, its bytes are estimated from the parameters of its `maps`, as those of a feed-forward
    block with as many, and a warning says so.
    """
    own_dtype = torch.float32 if value_bytes == 4 else torch.bfloat16
    inputs = block.in_features if isinstance(block, nn.Linear) else hidden
    for dtype in dict.fromkeys((own_dtype, torch.bfloat16)):
        try:
            sizes = _run(copy.deepcopy(block).to(dtype), inputs, dtype)
        except Exception as error:  # of any module of transformers' and any kernel
            fault = f"{type(error).__name__}: {error}".partition("\n")[0]
            continue
        return _Block(*(size * value_bytes / dtype.itemsize for size in sizes))
    _warn_of_estimate(type(block).__name__, fault)
    width = maps / (3 * hidden) * value_bytes
    return _Block(4 * width, 3 * width, 7 * width)


@functools.cache
def _warn_of_estimate(block: str, fault: str) -> None:
    """Once a process: every length and batch of a plan asks for the same model."""
    logger.warning("the memory of %s is estimated, it cannot be measured (%s)", block, fault)


def _run(block: nn.Module, width: int, dtype: torch.dtype) -> _Block:
    states = torch.empty(1, _TOKENS, width, device="meta", dtype=dtype)
    with torch.no_grad(), PeakMemory() as plain:
        block(states)
    block.requires_grad_(False)
    states.requires_grad_()
    with torch.enable_grad(), PeakMemory() as both:
        out = block(states)
        first = out[0] if isinstance(out, tuple) else out
        del out
        saved = both.now - first.nbytes
        torch.autograd.grad(first.sum(), states)
    return _Block(plain.peak / _TOKENS, saved / _TOKENS, both.peak / _TOKENS)
