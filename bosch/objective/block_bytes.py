"""Memory of a decoder's blocks beside attention, measured on meta tensors, which take none."""

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

# OPT's name here for its two maps, which are in no block.
_MAPS = "fc"
# Tokens of a measurement: a whole chunk of every recurrence that is computed in chunks.
_TOKENS = 256


class PeakMemory(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the storages that operations allocate inside the context, until they are freed.

    `peak` is the most bytes that were alive at once, `largest` the biggest single storage. Storages
    that existed before are not counted, nor those that a kernel allocates and frees itself. Works
    on meta tensors, which have sizes and no memory.
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


class SavedBytes(NamedTuple):
    """Bytes that autograd saves of a token in a layer: the mean over layers, and the most."""

    mean: float
    most: float


_NOTHING = SavedBytes(0.0, 0.0)


@dataclass(frozen=True)
class BlockBytes:
    """Bytes of a token in a layer's blocks beside its attention, with frozen weights.

    `plain` is the largest peak of a block in a pass without gradients, `plain_feed_forward` that of
    feed-forward blocks. `saved` is what autograd saves, a mean over layers; `norms` and `others`
    are its parts in norms and in blocks that are not feed-forward, like recurrences. `added` is the
    most that a block's backward pass adds. `both_feed_forward` and `both_other` are the largest
    peaks of both passes, of a feed-forward block, which a gradient recomputes some tokens at a
    time, and of another one. `trained` and `frozen` are what autograd saves in feed-forward blocks
    whose weights have gradients, and have none.
    """

    plain: float
    saved: float
    added: float
    both_feed_forward: float
    both_other: float = 0.0
    norms: float = 0.0
    others: float = 0.0
    plain_feed_forward: float = 0.0
    has_head_norms: bool = True  # of queries and keys
    trained: SavedBytes = _NOTHING
    frozen: SavedBytes = _NOTHING


class _Block(NamedTuple):
    """Bytes of a token: peak of a forward pass, saved by autograd, peak of both passes.

    `trained` is saved by autograd if the weights have gradients, too.
    """

    plain: float
    saved: float
    both: float
    trained: float


@functools.lru_cache(maxsize=4)
def block_bytes(model: Any, value_bytes: int) -> BlockBytes:
    """The blocks of a model on the meta device, with values of 2 or 4 bytes.

    Recurrences count as torch computes them: kernels take less.
    """
    text, kinds = text_config(model.config), decoder_layers(model.config)
    attending, attention = {*kinds.full, *kinds.windows}, known_family(model.config).attention
    measured: dict[Any, _Block] = {}
    layers, norms = model.get_decoder().layers, 0.0
    feed_forward, other_blocks = list[_Block](), list[_Block]()
    trained, frozen = [0.0] * len(layers), [0.0] * len(layers)
    for number, layer in enumerate(layers):
        for name, child in _blocks_of(layer):
            parameters = sum(linear_flops(module, text) for module in child.modules()) // 2
            is_norm = "Norm" in type(child).__name__
            is_attention = number in attending and name == attention
            if is_attention or not (parameters or is_norm):
                continue
            shapes = type(child), tuple(weight.shape for weight in child.parameters())
            if shapes not in measured:
                measured[shapes] = _measured(child, text.hidden_size, parameters, value_bytes)
            block = measured[shapes]
            if is_norm:  # at least its input, the layer's hidden states
                norms += max(block.saved, text.hidden_size * value_bytes)
                continue
            (feed_forward if name in FEED_FORWARD else other_blocks).append(block)
            if name in (*FEED_FORWARD, _MAPS):
                trained[number] += block.trained
                frozen[number] += block.saved
    blocks = [*feed_forward, *other_blocks]
    attention_module = getattr(layers[kinds.full[0]], attention)
    return BlockBytes(
        plain=max(block.plain for block in blocks),
        saved=(norms + sum(block.saved for block in blocks)) / len(layers),
        added=max(block.both - block.saved for block in blocks),
        both_feed_forward=max((block.both for block in feed_forward), default=0.0),
        both_other=max((block.both for block in other_blocks), default=0.0),
        norms=norms / len(layers),
        others=sum(block.saved for block in other_blocks) / len(layers),
        plain_feed_forward=max((block.plain for block in feed_forward), default=0.0),
        has_head_norms=any("Norm" in type(m).__name__ for m in attention_module.modules()),
        trained=SavedBytes(sum(trained) / len(layers), max(trained)),
        frozen=SavedBytes(sum(frozen) / len(layers), max(frozen)),
    )


def _blocks_of(layer: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Modules of a layer by name; OPT's fc1 and fc2, which are in no block, as one module."""
    children = dict(layer.named_children())
    if "fc1" in children:
        yield _MAPS, nn.Sequential(*map(children.pop, ("fc1", "activation_fn", "fc2")))
    yield from children.items()


def _measured(block: nn.Module, hidden: int, parameters: int, value_bytes: int) -> _Block:
    """A block's bytes.

    Grouped experts have a meta kernel only for bf16. If a block cannot be run on hidden states
    alone, its bytes are estimated as those of a feed-forward block with as many `parameters` in
    linear maps, and a warning says so.
    """
    value_dtype = torch.float32 if value_bytes == 4 else torch.bfloat16
    inputs = block.in_features if isinstance(block, nn.Linear) else hidden
    for dtype in dict.fromkeys((value_dtype, torch.bfloat16)):
        try:
            sizes = _run(copy.deepcopy(block).to(dtype), inputs, dtype)
        except Exception as error:  # of any module of transformers' and any kernel
            fault = f"{type(error).__name__}: {error}".partition("\n")[0]
            continue
        return _Block(*(size * value_bytes / dtype.itemsize for size in sizes))
    _warn_of_estimate(type(block).__name__, fault)
    width = parameters / (3 * hidden) * value_bytes
    return _Block(4 * width, 3 * width, 7 * width, 4 * width)


@functools.cache
def _warn_of_estimate(block: str, fault: str) -> None:
    """Warn once per process: a plan measures the same model for every length and batch."""
    logger.warning("the memory of %s is estimated, it cannot be measured (%s)", block, fault)


def _run(block: nn.Module, width: int, dtype: torch.dtype) -> _Block:
    states = torch.empty(1, _TOKENS, width, device="meta", dtype=dtype)
    with torch.no_grad(), PeakMemory() as plain:
        block(states)
    states.requires_grad_()
    with torch.enable_grad(), PeakMemory() as memory:
        trained = _saved_by(block, states, memory)[1]
    block.requires_grad_(False)
    with torch.enable_grad(), PeakMemory() as memory:
        first, saved = _saved_by(block, states, memory)
        torch.autograd.grad(first.sum(), states)
    return _Block(*(size / _TOKENS for size in (plain.peak, saved, memory.peak, trained)))


def _saved_by(block: nn.Module, states: Tensor, memory: PeakMemory) -> tuple[Tensor, int]:
    """The block's first output, and the bytes that autograd saves beside it."""
    out = block(states)
    first = out[0] if isinstance(out, tuple) else out
    del out
    return first, memory.now - first.nbytes
