"""A decoder whose KV heads are full or slide, for transformers: layouts, attention, cache, models.

This file needs torch and transformers only. Each saved hybrid carries a copy of it, by which
`trust_remote_code=True` loads the model without bosch; where bosch is imported, its own is used.

Shapes: B batch, T queries, Tk keys, HQ query heads, HKV key/value heads of a layer, HG of a group,
D head dimension, W window, S sinks, C queries of a block. A slot is a place in the padded sequence.
"""

from __future__ import annotations

import functools
import inspect
import re
import shutil
import sys
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.backends.cuda import SDPAParams, can_use_flash_attention
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    MODEL_MAPPING,
    AttentionInterface,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DynamicCache,
    DynamicLayer,
    LinearAttentionLayer,
    StaticCache,
    StaticLayer,
)
from transformers.generation.utils import ALL_CACHE_NAMES
from transformers.masking_utils import AttentionMaskInterface
from transformers.utils import logging as transformers_logging

CODE_FILE = "modeling_hybrid.py"  # the copy of this file in a model's directory
PREFIX = "hybrid_"
# Of the attention in transformers; a copy of this file has its own.
NAME = "bosch" if __name__ == "bosch.hybrid" else f"bosch_{zlib.crc32(__name__.encode()):08x}"
# transformers' name of the cache: "past_key_values", from transformers 5.24 on "cache".
CACHE_NAME: str = ALL_CACHE_NAMES[0]

HALF_DTYPES = (torch.float16, torch.bfloat16)
WIDEST_HEAD = 256  # most dimensions of a head in flash-attn's and torch's kernels
# Most entries of a mask, or of logits that no fused kernel computes: a few queries at a time.
DENSE_MASK_ENTRIES = 2**24
# Longer blocks compute more pairs outside the window, shorter ones copy each key more often.
_MAX_BLOCK = 256

logger = transformers_logging.get_logger(__name__)
T = TypeVar("T")


# ---- Which heads see which keys


@dataclass(frozen=True)
class Window:
    """Keys of a sliding head: the last `size`, the query's own included, and the first `sinks`."""

    size: int
    sinks: int = 0

    @property
    def past(self) -> int:
        """Past keys that the next query can see, without sinks: W - 1."""
        return self.size - 1

    @property
    def max_keys(self) -> int:
        """Most keys that a query sees; in longer texts a sliding head differs from a full one."""
        return self.size + self.sinks


class HeadGroup(NamedTuple):
    """KV heads of a layer, ascending, with the same window, or None for full heads."""

    heads: tuple[int, ...]
    window: Window | None = None


@dataclass(frozen=True)
class HeadLayout:
    """The heads of one layer in groups: full ones first, then from the widest window down.

    In this order, as in deploy mode, the tensors of a group are views (BOSCH B.2).
    """

    groups: tuple[HeadGroup, ...]

    @classmethod
    def of(cls, sizes: Sequence[int], sinks: int = 0) -> HeadLayout:
        """Layout from each KV head's window, 0 for a full one; sliding heads have `sinks` sinks."""
        groups = []
        for size in sorted(set(sizes), key=_from_full):
            heads = tuple(head for head, x in enumerate(sizes) if x == size)
            groups.append(HeadGroup(heads, Window(size, sinks) if size else None))
        return cls(tuple(groups))

    @property
    def sinks(self) -> int:
        return max(group.window.sinks if group.window else 0 for group in self.groups)

    @property
    def _order(self) -> list[int]:
        """The heads of all groups in turn."""
        return [head for group in self.groups for head in group.heads]

    @property
    def num_key_value_heads(self) -> int:
        return len(self._order)

    @property
    def is_in_order(self) -> bool:
        return self._order == sorted(self._order)

    def heads_of(self, states: Tensor, group: HeadGroup, q_per_kv: int = 1) -> Tensor:
        """Heads of `group` in [B, HKV * q_per_kv, T, D]: a view if in order, else a copy."""
        if len(self.groups) == 1:
            return states
        if self.is_in_order:
            start = group.heads[0] * q_per_kv
            return states[:, start : start + len(group.heads) * q_per_kv]
        return _pick(states, 1, group.heads, q_per_kv)

    def merge(self, outputs: Sequence[Tensor], q_per_kv: int) -> Tensor:
        """Join the outputs [B, HQ_group, T, D] of all groups to [B, T, HQ, D], contiguous."""
        if len(outputs) == 1:
            return outputs[0].transpose(1, 2).contiguous()
        joined = torch.cat([output.transpose(1, 2) for output in outputs], dim=2)
        places = sorted(range(len(self._order)), key=self._order.__getitem__)
        return joined if self.is_in_order else _pick(joined, 2, places, q_per_kv)


def _from_full(size: int) -> float:
    """Sorts windows: a full head's 0 first, then from the widest down."""
    return -size if size else float("-inf")


def _pick(states: Tensor, axis: int, heads: Sequence[int], q_per_kv: int) -> Tensor:
    index = [head * q_per_kv + query for head in heads for query in range(q_per_kv)]
    return states.index_select(axis, torch.tensor(index, device=states.device))


# ---- One pass


@dataclass(eq=False)
class AttentionContext:
    """Positions of one pass, shared by all its layers; caches the masks that are derived from it.

    q_offset is the slot of the first query. `valid` [B, Tk] is False at padding, None without
    padding. `document` [B, Tk] numbers packed documents, only in a pass without padding and cache.
    `start` []: slot of the first query as a tensor on the device, in a pass over a cache of fixed
    size. q_offset is then the last slot possible, and the key slots are all that the cache has.
    """

    q_length: int
    q_offset: int = 0
    valid: Tensor | None = None
    document: Tensor | None = None
    start: Tensor | None = None
    _memo: dict[object, Any] = field(default_factory=dict)

    @property
    def kv_length(self) -> int:
        """Tk: key slots of the pass."""
        return self.q_offset + self.q_length

    @property
    def is_plain(self) -> bool:
        """Whether visibility depends only on distance: one document, no padding to hide."""
        return self.valid is None and self.document is None

    @property
    def end(self) -> int | Tensor:
        """Slot after the last query."""
        return self.kv_length if self.start is None else self.start + self.q_length

    def query_slots(self, device: torch.device) -> Tensor:
        """Slots of the queries, [1, T]."""
        first = self.q_offset if self.start is None else self.start
        return (torch.arange(self.q_length, device=device) + first)[None]

    def on(self, device: torch.device) -> AttentionContext:
        """This context on `device`, a copy if it is on another; layers may be on several."""

        def copy() -> AttentionContext:
            tables = {name: getattr(self, name) for name in ("valid", "document", "start")}
            moved = {name: x.to(device) for name, x in tables.items() if x is not None}
            return replace(self, _memo={"device": device}, **moved)

        first = self.memo("device", lambda: device)
        return self if first == device else self.memo(device, copy)

    def row(self, row: int) -> AttentionContext:
        """The padding and documents of one row, in a pass without `start`."""
        tables = (self.valid, self.document)
        valid, document = (None if x is None else x[row : row + 1] for x in tables)
        return AttentionContext(self.q_length, self.q_offset, valid, document)

    def memo(self, key: object, make: Callable[[], T]) -> T:
        """`make()`, called once per pass and key; in a compiled pass it is called each time."""
        if torch.compiler.is_compiling():
            return make()
        if key not in self._memo:
            self._memo[key] = make()
        found: T = self._memo[key]
        return found

    def visible(self, queries: Tensor, keys: Tensor, window: Window | None = None) -> Tensor:
        """Whether each query slot sees each key slot.

        queries [b, ..., m] and keys [b, ..., n] hold slots, b being B or 1; key slots outside
        0 .. Tk - 1 are invisible to queries inside. Full heads have window None. A padded query
        sees itself, so that no row is empty. Returns bool [b, ..., m, n].
        """
        q, k = queries[..., :, None], keys[..., None, :]
        distance = q - k
        visible = (distance >= 0) & (k >= 0) & (k < self.kv_length)
        if window is not None:
            near = distance < window.size
            if window.sinks:
                rank = self._at(self.rank(keys.device), keys)[..., None, :]
                near = near | (rank < window.sinks)
            visible = visible & near
        if self.document is not None:
            ids_q, ids_k = self._at(self.document, queries), self._at(self.document, keys)
            visible = visible & (ids_q[..., :, None] == ids_k[..., None, :])
        if self.valid is not None:
            visible = (visible & self._at(self.valid, keys)[..., None, :]) | (distance == 0)
        return visible

    def sink_slots(self, sinks: int, device: torch.device) -> Tensor:
        """Slots [b, sinks] of each row's first real tokens, Tk if missing; not for documents."""

        def make() -> Tensor:
            if self.valid is None:
                slots = torch.arange(sinks, device=device)
                return slots.clamp(max=self.kv_length)[None]
            numbers = torch.arange(1, sinks + 1, device=device).expand(self.valid.shape[0], -1)
            counted = self.valid.long().cumsum(-1)
            return torch.searchsorted(counted, numbers.contiguous())

        return self.memo(("sink_slots", sinks), make)

    def document_starts(self) -> Tensor:
        """Slot at which the document of each slot starts, [B, Tk]."""
        document = self.document
        assert document is not None

        def make() -> Tensor:
            slots = torch.arange(self.kv_length, device=document.device).expand_as(document)
            first = torch.ones_like(document[:, :1], dtype=torch.bool)
            begins = torch.cat([first, document[:, 1:] != document[:, :-1]], dim=1)
            return torch.where(begins, slots, 0).cummax(dim=1).values

        return self.memo("document_starts", make)

    def rank(self, device: torch.device) -> Tensor:
        """Number of real tokens of the same document before each slot: [B or 1, Tk]."""

        def make() -> Tensor:
            slots = torch.arange(self.kv_length, device=device)[None]
            if self.document is not None:
                return slots - self.document_starts()
            if self.valid is None:
                return slots
            return self.valid.long().cumsum(-1) - self.valid.long()

        return self.memo("rank", make)

    def _at(self, table: Tensor, slots: Tensor) -> Tensor:
        """table [B or 1, Tk] read at slots [b, ..., n], clamped into range: [B, ..., n]."""
        inside = slots.clamp(0, self.kv_length - 1)
        rows = max(table.shape[0], inside.shape[0])
        inside = inside.expand(rows, *inside.shape[1:])
        table = table.expand(rows, -1)
        return torch.gather(table, 1, inside.reshape(rows, -1)).reshape(inside.shape)


# ---- Attention


@dataclass(frozen=True, eq=False)
class LogitTransform:
    """Attention logits s = scaling * q·k, and the changes of some families before the softmax.

    With `softcap` c, s becomes c * tanh(s / c) (Gemma 2). `head_logits` [HQ] (GPT-OSS's sinks) are
    extra logits without a value, one per head.
    """

    scaling: float
    softcap: float | None = None
    head_logits: Tensor | None = None

    @property
    def is_plain(self) -> bool:
        """Whether fused kernels can compute it."""
        return self.softcap is None and self.head_logits is None

    def of(self, layout: HeadLayout, group: HeadGroup, q_per_kv: int) -> LogitTransform:
        """The transform of one group of heads."""
        if self.head_logits is None:
            return self
        head_logits = layout.heads_of(self.head_logits[None, :, None, None], group, q_per_kv)
        return replace(self, head_logits=head_logits.flatten())


class CachedGroup(NamedTuple):
    """Keys and values of one group of heads, as a cache returns them: [B, HG, S + R, D].

    `sinks` S: the first tokens of each row once they have left the last R slots, for full heads all
    slots. In a cache of fixed size, slots after the last (full heads) or before the first (sliding
    heads) may be empty.
    """

    key: Tensor
    value: Tensor
    sinks: int = 0


@dataclass
class CachedStates:
    """A layer's keys and values by group, of a HybridCache; `done` is called after the pass."""

    groups: list[CachedGroup]
    done: Callable[[AttentionContext], None] | None = None

    def to(self, dtype: torch.dtype) -> CachedStates:
        """The same in another dtype, without `done`."""
        return CachedStates([CachedGroup(k.to(dtype), v.to(dtype), s) for k, v, s in self.groups])


def sink_places(
    context: AttentionContext, window: Window, keys: int, sinks: int, device: torch.device
) -> Tensor:
    """Places [b, S] of each row's sinks among the keys of a group; arbitrary for missing tokens.

    Of the keys, `sinks` are sinks that have left the last slots, which the others hold.
    """
    first = context.end - (keys - sinks)
    slots = context.sink_slots(window.sinks, device)
    earlier = torch.arange(window.sinks, device=device)
    return torch.where(slots < first, earlier, slots - first + sinks).clamp(max=keys - 1)


class GroupCall(NamedTuple):
    """Attention of one group of heads: full heads (`window` is None) or those of a window.

    query [B, HQ_group, T, D]; key, value [B, HG, R, D] are `sinks` sinks that a cache held apart,
    and the last slots. `slots` [B or 1, R] if these are not the last R: one outside 0 .. Tk - 1
    hides its key.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    window: Window | None
    context: AttentionContext
    transform: LogitTransform
    dropout: float
    sinks: int = 0
    slots: Tensor | None = None

    def key_slots(self) -> Tensor:
        """Slots of the keys, [B or 1, R]."""
        if self.slots is not None:
            return self.slots
        length = self.context.kv_length
        return torch.arange(length - self.key.shape[2], length, device=self.key.device)[None]

    def visible(self, start: int = 0, count: int | None = None) -> Tensor:
        """Mask of all keys and these of the queries, [B or 1, 1, T, R]."""
        stop = start + (self.query.shape[2] if count is None else count)
        queries = self.context.query_slots(self.key.device)[:, start:stop]
        return self.context.visible(queries, self.key_slots(), self.window)[:, None]

    def of_cache(self, group: CachedGroup) -> GroupCall:
        """This call with the keys and values of a cache."""
        context, window, (key, value, sinks) = self.context, self.window, group
        length, recent = context.kv_length, key.shape[2] - sinks
        if context.start is None and (window is None or recent >= length):  # all slots are known
            known = slice(length) if window is None else slice(-length, None)
            return self._replace(key=key[:, :, known], value=value[:, :, known])
        if window is None or (context.start is None and not sinks):
            return self._replace(key=key, value=value)
        first = context.end - recent
        slots = (torch.arange(recent, device=key.device) + first)[None]
        if sinks:  # one among the last slots is a key there
            before = context.sink_slots(sinks, key.device)
            before = torch.where(before < first, before, length)
            slots = torch.cat([before, slots.expand(len(before), -1)], dim=1)
        return self._replace(key=key, value=value, sinks=sinks, slots=slots)


class AttentionCall(NamedTuple):
    """Attention of a layer, by one of `BACKENDS`.

    query [B, HQ, T, D]; key, value [B, HKV, Tk, D], or the states that a HybridCache returned.
    """

    query: Tensor
    key: Tensor | CachedStates
    value: Tensor | CachedStates
    layout: HeadLayout
    context: AttentionContext
    transform: LogitTransform
    backend: str = "sdpa"
    dropout: float = 0.0

    def autocast(self) -> AttentionCall:
        """The call in autocast's dtype, if autocast is on; norms leave queries and keys in float32.

        torch's attention would convert the overlapping bands instead.
        """
        device = self.query.device.type
        if not torch.is_autocast_enabled(device):
            return self
        dtype = torch.get_autocast_dtype(device)
        key, value = self.key.to(dtype), self.value.to(dtype)
        return AttentionCall(self.query.to(dtype), key, value, *self[3:])

    def by_group(self, attend: Callable[[GroupCall], Tensor]) -> Tensor:
        """Outputs [B, HQ_group, T, D] of `attend` for each group, joined to [B, T, HQ, D]."""
        query, key, value, layout = self.query, self.key, self.value, self.layout
        q_per_kv = query.shape[1] // layout.num_key_value_heads
        outputs = []
        for number, group in enumerate(layout.groups):
            heads = layout.heads_of(query, group, q_per_kv)
            transform = self.transform.of(layout, group, q_per_kv)
            call = GroupCall(
                heads, heads, heads, group.window, self.context, transform, self.dropout
            )
            if isinstance(key, CachedStates):
                call = call.of_cache(key.groups[number])
            elif isinstance(value, Tensor):
                states = layout.heads_of(key, group), layout.heads_of(value, group)
                call = call._replace(key=states[0], value=states[1])
            outputs.append(attend(call))
        return layout.merge(outputs, q_per_kv)


def dense_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    visible: Tensor | None,
    transform: LogitTransform,
    dropout: float = 0.0,
) -> Tensor:
    """Attention [B, HQ, T, D] with all logits in memory, and the softmax at least in float32.

    query [B, HQ, T, D]; key, value [B, HKV, Tk, D]; `visible` broadcasts to [B, HQ, T, Tk]. Rows
    may also be flattened into heads: query [1, B * HQ, T, D], key and value [1, B * HKV, Tk, D].
    """
    value = value.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
    weights = dense_weights(query, key, visible, transform).to(value.dtype)
    return F.dropout(weights, p=dropout) @ value if dropout else weights @ value


def dense_weights(
    query: Tensor, key: Tensor, visible: Tensor | None, transform: LogitTransform
) -> Tensor:
    """The softmax of the logits over the keys, [B, HQ, T, Tk], as in `dense_attention`."""
    key = key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
    products = query @ key.transpose(2, 3)
    logits = (products if query.dtype == torch.float64 else products.float()) * transform.scaling
    if transform.softcap is not None:
        logits = transform.softcap * torch.tanh(logits / transform.softcap)
    if visible is not None:
        logits = logits.masked_fill(~visible, float("-inf"))
    if transform.head_logits is not None:
        extra = transform.head_logits.to(logits.dtype)
        extra = extra.repeat(query.shape[1] // len(extra))[None, :, None, None]
        logits = torch.cat([logits, extra.expand(*logits.shape[:3], 1)], dim=3)
    return logits.softmax(dim=-1)[..., : key.shape[2]]


def eager_attention(call: AttentionCall) -> Tensor:
    """Attention of all groups of heads by dense masks: [B, T, HQ, D]. Memory grows with T * Tk."""
    return call.by_group(lambda g: dense_attention(*g[:3], g.visible(), g.transform, g.dropout))


def eager_weights(call: AttentionCall) -> Tensor:
    """Weights [B, HQ, T, Tk] before dropout; 0 for unseen slots, whether cached or not."""
    length = call.context.kv_length

    def weights(group: GroupCall) -> Tensor:
        near = dense_weights(group.query, group.key, group.visible(), group.transform)
        # Slots out of range, which no query sees, go into an extra column.
        slots = group.key_slots()
        places = torch.where((slots >= 0) & (slots < length), slots, length)[:, None, None]
        whole = near.new_zeros(*near.shape[:3], length + 1)
        return whole.scatter_add_(3, places.expand_as(near), near)[..., :length]

    return call.by_group(weights).transpose(1, 2)


def fused_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scale: float,
    mask: Tensor | None = None,
    dropout: float = 0.0,
    is_causal: bool = False,
) -> Tensor:
    """Attention [B, HQ, T, D] of `query` [B, HQ, T, D] to `key`, `value` [B, HKV, Tk, D].

    `mask` broadcasts to [B, HQ, T, Tk]; `is_causal` needs Tk = T.
    """
    q_per_kv, is_grouped = query.shape[1] // key.shape[1], False
    if q_per_kv > 1:  # a branch, since the comparison is symbolic when compiled
        is_grouped = not is_gpu(query) or (mask is None and _flash_takes(query, key, value))
        if not is_grouped:
            key, value = (states.repeat_interleave(q_per_kv, dim=1) for states in (key, value))
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, dropout_p=dropout, is_causal=is_causal, scale=scale,
        enable_gqa=is_grouped,
    )  # fmt: skip


def is_gpu(states: Tensor) -> bool:
    """Whether CUDA's kernels compute with `states`."""
    return states.device.type == "cuda"


def _flash_takes(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether torch's flash kernel, the only one that shares KV heads, can take the states."""
    if torch.compiler.is_compiling():  # torch cannot answer while it traces
        dim = query.shape[-1]
        return query.dtype in HALF_DTYPES and dim == value.shape[-1] and dim <= WIDEST_HEAD
    return can_use_flash_attention(SDPAParams(query, key, value, None, 0.0, False, True))


def masked_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    transform: LogitTransform,
    dropout: float,
    mask: Tensor | None = None,
    is_causal: bool = False,
) -> Tensor:
    """As `fused_attention`; transformed logits densely, a few queries at a time, not causal."""
    if transform.is_plain:
        return fused_attention(
            query, key, value, scale=transform.scaling, mask=mask, dropout=dropout,
            is_causal=is_causal,
        )  # fmt: skip
    rows, heads, length, _ = query.shape
    step = max(16, DENSE_MASK_ENTRIES // (rows * heads * key.shape[2]))
    outputs = []
    for start in range(0, length, step):
        part = query[:, :, start : start + step]
        visible = None if mask is None else mask[..., start : start + step, :]
        outputs.append(dense_attention(part, key, value, visible, transform, dropout))
    return torch.cat(outputs, dim=2)


class Bands(NamedTuple):
    """The bands of a sliding head: `blocks` blocks of `block` queries C at the end of a text.

    Each sees the sinks, `before` blocks of keys and its own. The queries before take one mask.
    """

    blocks: int
    block: int
    before: int

    @classmethod
    def of(cls, length: int, keys: int, past: int, size: int, sinks: int) -> Bands:
        """Those of `length` queries and `keys` keys, the queries' own included."""
        block = max(16, min(_MAX_BLOCK, size))
        before = -(-size // block)
        # The first band begins after the sinks, and not before the first key.
        first = max(1, before * block + sinks - past, before * block - (keys - length))
        return cls(max(0, length - first) // block, block, before)


def sdpa_attention(call: AttentionCall) -> Tensor:
    """Attention of all groups [B, T, HQ, D] by torch's kernels; sliding heads are linear in T."""
    return call.by_group(_sdpa)


def _sdpa(call: GroupCall) -> Tensor:
    """Attention of a group: without a mask where one can do without, and sliding heads in bands."""
    context, window, length = call.context, call.window, call.context.kv_length
    options, keys = (call.transform, call.dropout), call.key.shape[2] - call.sinks
    one, plain = context.q_length == 1, context.is_plain and context.start is None
    # No query is W or more slots after a key.
    if window is None or length <= window.size:
        if plain and (one or (context.q_offset == 0 and call.transform.is_plain)):
            return masked_attention(*call[:3], *options, is_causal=not one)
    elif plain and one and keys <= min(window.size, length - call.sinks):
        return masked_attention(*call[:3], *options)
    elif context.start is None:
        bands = Bands.of(context.q_length, keys, context.q_offset, window.size, window.sinks)
        if bands.blocks:
            return _banded(call, window, bands)
    return _masked(call)


def _masked(call: GroupCall) -> Tensor:
    """Attention with a mask, a few queries at a time if it would be large."""
    query, context, length = call.query, call.context, call.query.shape[2]
    rows, keys = 1 if context.is_plain else query.shape[0], call.key.shape[2]
    step = length if context.start is not None else max(64, DENSE_MASK_ENTRIES // (rows * keys))
    options, outputs = (call.transform, call.dropout), []
    for start in range(0, length, step):
        if step >= length:
            mask = context.memo(("mask", call.window, keys, length), call.visible)
        else:
            mask = call.visible(start, step)
        part = query[:, :, start : start + step]
        outputs.append(masked_attention(part, call.key, call.value, *options, mask))
    return torch.cat(outputs, dim=2) if len(outputs) > 1 else outputs[0]


def _banded(call: GroupCall, window: Window, bands: Bands) -> Tensor:
    """Sliding attention whose work and memory are linear in T."""
    context, (count, block, before) = call.context, bands
    states, plain = (call.query, call.key, call.value), call.context.is_plain
    first, end, _ = (x.shape[2] - count * block for x in states)
    # Rows that see the same slots are computed together, as more heads of one row.
    rows = [[x.flatten(0, 1) for x in states]] if plain else zip(*states, strict=True)
    outputs = []
    for row, (query, key, value) in enumerate(rows):
        mask, places = context.memo(
            ("bands", window, bands, call.key.shape[2], row),
            functools.partial(_band_mask, call, window, bands, row),
        )
        queries = query[:, first:].unflatten(1, (count, block)).transpose(0, 1)
        keys, values = (
            _with_bands(x[:, places], x[:, end - before * block :], bands) for x in (key, value)
        )
        out = masked_attention(queries, keys, values, call.transform, call.dropout, mask[:, None])
        del keys, values  # before the output is copied
        outputs.append(out.transpose(0, 1).flatten(1, 2))
        del out
    slots = call.key_slots()[:, :end]
    query, key, value = states[0][:, :, :first], states[1][:, :, :end], states[2][:, :, :end]
    beginning = _masked(call._replace(query=query, key=key, value=value, slots=slots))
    rest = outputs[0].unflatten(0, states[0].shape[:2]) if plain else torch.stack(outputs)
    return torch.cat([beginning, rest], dim=2)


def _with_bands(sinks: Tensor, states: Tensor, bands: Bands) -> Tensor:
    """The keys or values [n, H, S + keys, D] of each block, from those of [H, keys, D]."""
    blocks = states.unflatten(1, (-1, bands.block)).transpose(0, 1)
    parts = [blocks[start : start + bands.blocks] for start in range(bands.before + 1)]
    return torch.cat([sinks.transpose(0, 1).expand(bands.blocks, -1, -1, -1), *parts], dim=2)


def _band_mask(call: GroupCall, window: Window, bands: Bands, row: int) -> tuple[Tensor, Tensor]:
    """Masks [n, C, S + keys] of a row's blocks over their sinks and bands, n = 1 if all are equal.

    And the places [n, S] of the sinks among the keys: those of the document that reaches into the
    band from before. Sinks inside the band are keys of the band.
    """
    context, sinks, device = call.context, window.sinks, call.key.device
    one, block, width = context.row(row), bands.block, bands.before * bands.block
    numbers = torch.arange(1 if context.is_plain else bands.blocks, device=device)
    queries = (context.kv_length - (bands.blocks - numbers) * block)[:, None]
    keys = queries + torch.arange(-width, block, device=device)
    if context.document is not None:
        slots = context.document_starts()[row][queries - width] + torch.arange(sinks, device=device)
        places = slots.clamp(max=call.key.shape[2] - 1)
    else:
        slots = one.sink_slots(sinks, device).expand(len(queries), -1)
        places = sink_places(one, window, call.key.shape[2], call.sinks, device)
    keys = torch.cat([torch.where(slots < queries - width, slots, -1), keys], dim=1)
    queries = queries + torch.arange(block, device=device)
    mask = one.visible(queries[None], keys[None], window)[0]
    return mask, places.expand(len(queries), -1)


# The backends by name. bosch adds those that run on a GPU only, and their names in transformers.
ATTENTION: dict[str, Callable[[AttentionCall], Tensor]] = {
    "eager": eager_attention,
    "sdpa": sdpa_attention,
}
BACKEND_OF: dict[str | None, str] = {
    None: "sdpa", NAME: "sdpa", "bosch": "sdpa", "auto": "sdpa", "sdpa": "sdpa", "eager": "eager",
}  # fmt: skip


def compute_attention(call: AttentionCall) -> Tensor:
    """Attention of a call by its backend; ValueError if the heads do not fit the layout."""
    key, heads = call.key, call.layout.num_key_value_heads
    key_heads = heads if isinstance(key, CachedStates) else key.shape[1]
    if key_heads != heads or call.query.shape[1] % heads:
        raise ValueError(
            f"the layout has {heads} KV heads, got {key_heads} with {call.query.shape[1]} query "
            "heads"
        )
    return ATTENTION[call.backend](call.autocast())


# ---- transformers' interfaces of attention and masks

_STATE = "bosch_heads"
Attend: TypeAlias = Callable[[nn.Module, AttentionCall], Tensor]


@dataclass(frozen=True)
class HeadState:
    """A module's layout and backend; `attend`, if set, computes [B, T, HQ, D], without dropout."""

    layout: HeadLayout
    backend: str
    attend: Attend | None = None


def head_state(module: nn.Module) -> HeadState | None:
    """State of an attention module; None if no head mask was applied."""
    return getattr(module, _STATE, None)


def required_state(module: nn.Module) -> HeadState:
    """State of an attention module; raises ValueError where no head mask was applied."""
    state = head_state(module)
    if state is None:
        raise ValueError("no head mask is applied to this model: call bosch.apply_head_mask first")
    return state


def set_head_state(module: nn.Module, state: HeadState | None) -> None:
    """Set the state of an attention module, None to remove it; weights do not change."""
    if state is not None:
        setattr(module, _STATE, state)
    elif hasattr(module, _STATE):
        delattr(module, _STATE)


def attention_of(layer: nn.Module) -> list[nn.Module]:
    """The modules of a decoder layer that compute attention."""
    return [child for child in layer.children() if "Attention" in type(child).__name__]


def hybrid_modules(model: PreTrainedModel) -> list[nn.Module | None]:
    """The attention module of each layer in search or deploy mode, None without attention."""
    modules = [attention_of(layer) for layer in model.get_decoder().layers]
    return [next((m for m in found if head_state(m) is not None), None) for found in modules]


def layouts_of(model: PreTrainedModel) -> list[HeadLayout | None]:
    """Layouts of all layers in search or deploy mode, None for a layer without attention."""
    modules = hybrid_modules(model)
    return [None if module is None else required_state(module).layout for module in modules]


def set_layouts(model: PreTrainedModel, layouts: Sequence[HeadLayout | None], backend: str) -> None:
    """Set the layout and backend of each decoder layer; None is a layer without attention."""
    for layer, layout in zip(model.get_decoder().layers, layouts, strict=True):
        if layout is not None:
            set_head_state(attention_of(layer)[0], HeadState(layout, backend))


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor | CachedStates,
    value: Tensor | CachedStates,
    attention_mask: AttentionContext | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    *,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    sliding_window: int | None = None,
    position_bias: Tensor | None = None,
    **kwargs: object,
) -> tuple[Tensor, Tensor | None]:
    """transformers' attention interface: output [B, T, HQ, D], and weights [B, HQ, T, Tk].

    query [B, HQ, T, D]; key, value [B, HKV, Tk, D], or states from a HybridCache. Only eager has
    weights.
    """
    state = required_state(module)
    layout = state.layout
    if position_bias is not None:
        raise ValueError("hybrid attention does not support position_bias")
    if sliding_window is not None and [x.window for x in layout.groups] != [Window(sliding_window)]:
        raise ValueError(
            f"this layer has a window of its own, {sliding_window}, which its heads do not have"
        )
    if isinstance(attention_mask, Tensor):
        raise ValueError("hybrid attention takes a 2-D attention mask [batch, keys], not a 4-D one")
    context = pass_context(attention_mask, query, key)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    transform = LogitTransform(scale, softcap, s_aux)
    call = AttentionCall(query, key, value, layout, context, transform, state.backend, dropout)
    if state.attend is not None:
        return state.attend(module, call._replace(dropout=0.0)), None
    if isinstance(key, Tensor) and isinstance(value, Tensor):
        length = context.kv_length
        # A cache of fixed size that is not a hybrid's has empty slots at the end.
        call = call._replace(key=key[:, :, :length], value=value[:, :, :length])
    weights = None
    if state.backend == "eager":
        weights = eager_weights(call.autocast()).to(query.dtype)
    out = compute_attention(call)
    if isinstance(key, CachedStates) and key.done is not None:
        key.done(context)
    return out, weights


def pass_context(
    context: AttentionContext | None, query: Tensor, key: Tensor | CachedStates
) -> AttentionContext:
    """The context of a pass on a layer's device; by default one document without padding."""
    if context is not None:
        return context.on(query.device)
    if isinstance(key, CachedStates):
        raise ValueError("keys from a HybridCache need the context of the pass")
    return AttentionContext(query.shape[2], key.shape[2] - query.shape[2])


def context_of_pass(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    mask_function: Callable[..., Tensor] | None = None,
    attention_mask: Tensor | None = None,
    allow_is_causal_skip: bool = True,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    **kwargs: object,
) -> AttentionContext:
    """transformers' mask interface: an `AttentionContext` instead of a mask.

    `attention_mask` is the 2-D padding mask [B, Tk]. Documents packed by position_ids are found
    with `mask_function`: a token that does not see the one before it begins a document.
    """
    if use_vmap:
        raise ValueError("hybrid attention does not support custom mask functions")
    if attention_mask is not None and attention_mask.ndim != 2:
        raise ValueError(
            f"hybrid attention takes a 2-D attention mask [batch, keys], not a "
            f"{attention_mask.ndim}-D one"
        )
    if isinstance(q_offset, Tensor) and (q_length == 1 or torch.compiler.is_compiling()):
        valid = None if attention_mask is None else padded_mask(attention_mask, kv_length)
        return AttentionContext(q_length, kv_length - q_length, valid, start=q_offset.clone())
    offset, valid, document = int(q_offset), None, None
    if attention_mask is not None:
        total = offset + q_length
        if attention_mask.shape[1] < total:
            raise ValueError(
                f"attention_mask has {attention_mask.shape[1]} columns, expected {total}: "
                "the past included"
            )
        # It may have columns for the free slots of a cache.
        valid = attention_mask[:, :total].bool()
        # No token sees padding that follows it; the outputs of padding are not used.
        follows = offset == 0 and not bool((valid.diff(dim=1) & valid[:, 1:]).any())
        valid = None if follows or bool(valid.all()) else valid
    elif offset == 0 and q_length > 1 and not allow_is_causal_skip and mask_function is not None:
        rows = torch.arange(batch_size, device=device)[:, None]
        slots = torch.arange(1, q_length, device=device)[None]
        begins = ~mask_function(rows, torch.zeros_like(rows), slots, slots - 1)
        begins = begins.expand(batch_size, -1)
        document = F.pad(begins.long(), (1, 0)).cumsum(-1)
    return AttentionContext(q_length, offset, valid, document)


def padded_mask(attention_mask: Tensor, length: int) -> Tensor:
    """A padding mask [B, Tk] as bool [B, length]; future tokens count as real."""
    missing = length - attention_mask.shape[1]
    return F.pad(attention_mask.bool(), (0, missing), value=True)


def masks_for_generate(
    config: PreTrainedConfig,
    inputs_embeds: Tensor,
    attention_mask: Tensor | None = None,
    past_key_values: Cache | None = None,
    cache: Cache | None = None,
    **kwargs: object,
) -> Tensor | None:
    """The mask `generate` passes with a static cache: the 2-D padding mask.

    It is padded to the cache's length; transformers' own function would build a 4-D mask. Before
    5.24 `cache` is `past_key_values`.
    """
    cache = past_key_values if cache is None else cache
    assert cache is not None
    if attention_mask is None or not isinstance(cache.get_seq_length(), Tensor):
        return attention_mask
    # Layers with states read the padding of this pass at the end of the mask.
    has_states = any(isinstance(layer, LinearAttentionLayer) for layer in cache.layers)
    if inputs_embeds.shape[1] > 1 and has_states:
        return attention_mask
    return padded_mask(attention_mask, _cache_room(cache))


def _cache_room(cache: Cache) -> int:
    """Tokens that a fixed cache has room for; get_max_length is -1 for layers that hold states."""
    return max(getattr(layer, "max_cache_len", 0) for layer in cache.layers)


# For models and caches of any library; transformers looks for both under the same name.
AttentionInterface.register(NAME, attention_forward)
AttentionMaskInterface.register(NAME, context_of_pass)


# ---- The cache: one of transformers' cache layers for each group of heads

# It grows with the text, or has a fixed size: then its tensors are changed in place and its length
# is read on the device, so torch.compile traces decoding only once.
_States: TypeAlias = tuple[Tensor, Tensor]  # keys and values of a group, [B, HG, S + R, D]


class WindowLayer(DynamicLayer):
    """The last W - 1 tokens, after the sinks once these are not among them."""

    keys: Tensor
    values: Tensor

    def __init__(self, window: Window) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.window, self.sinks, self.cumulative_length = window, 0, 0
        self.record_past = False

    def update(self, key_states: Tensor, value_states: Tensor, *args: object) -> _States:
        self.cumulative_length += key_states.shape[2]
        return super().update(key_states, value_states)

    def get_seq_length(self) -> int:
        return self.cumulative_length

    def settle(self, seen: _States, context: AttentionContext) -> None:
        """Drop what no later query sees, after the pass `context` has read the states `seen`."""
        count, device = seen[0].shape[2], seen[0].device
        self.places = context.memo(
            ("sinks", self.window, count, self.sinks),
            lambda: sink_places(context, self.window, count, self.sinks, device),
        )
        if not self.record_past:
            self._keep()

    def _keep(self) -> None:
        count, window = self.keys.shape[2], self.window
        if count > window.past + window.sinks:
            places = self.places.clamp(max=count - 1)
            self.keys, self.values = (  # copies, for slices would keep all in memory
                torch.cat([_at_places(x, places), x[:, :, count - window.past :]], dim=2)
                for x in (self.keys, self.values)
            )
            self.sinks = window.sinks

    def can_remove(self, count: int) -> bool:
        left, recent = self.cumulative_length - count, self.keys.shape[2] - self.sinks - count
        return bool(not self.sinks and self.keys.shape[2] == self.cumulative_length) or (
            recent >= min(left, self.window.past)
        )

    def crop(self, tokens_to_remove: int) -> None:
        self.cumulative_length += tokens_to_remove
        super().crop(tokens_to_remove)
        self._keep()

    def reset(self) -> None:
        super().reset()
        self.sinks = 0


def _at_places(states: Tensor, places: Tensor) -> Tensor:
    """States [B, HG, S, D] at places [b, S] of [B, HG, R, D]."""
    index = places[:, None, :, None].expand(*states.shape[:2], -1, states.shape[3])
    return states.gather(2, index)


class FixedLayer(StaticLayer):
    """A place for every token; tokens can be taken back."""

    keys: Tensor
    values: Tensor

    def crop(self, tokens_to_remove: int) -> None:
        self.cumulative_length.add_(tokens_to_remove)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        for states in (self.keys, self.values):  # compiled code knows their addresses
            states.copy_(states.index_select(0, beam_idx.to(states.device)))


class FixedWindowLayer(FixedLayer):
    """The sinks and the last W tokens, the newest in the last place; or every token if it fits."""

    def __init__(self, window: Window, room: int) -> None:
        super().__init__(min(room, window.max_keys))
        self.window, self.room = window, room
        self.sinks = window.sinks if room > window.max_keys else 0

    def update(self, key_states: Tensor, value_states: Tensor, *args: object) -> _States:
        # Any token finds a place here: the table makes one beyond the room fail on the device.
        lengths = torch.arange(1, self.room + 1, device=self.device)
        last = self.cumulative_length + (key_states.shape[2] - 1)
        self.cumulative_length.copy_(lengths.index_select(0, last[None])[0])
        sinks, seen = self.sinks, []
        for held, new in ((self.keys, key_states), (self.values, value_states)):
            seen.append(torch.cat([held[:, :, :sinks], held[:, :, sinks + 1 :], new], dim=2))
            held[:, :, sinks:].copy_(seen[-1][:, :, sinks - self.max_cache_len :])
        return seen[0], seen[1]

    def settle(self, seen: _States, context: AttentionContext) -> None:
        """Keep the sinks among the states `seen` that the pass `context` has read."""
        if self.sinks:
            count, device = seen[0].shape[2], seen[0].device
            places = sink_places(context, self.window, count, self.sinks, device)
            for held, states in zip((self.keys, self.values), seen, strict=True):
                held[:, :, : self.sinks].copy_(_at_places(states, places))

    def can_remove(self, count: int) -> bool:
        return bool(self.cumulative_length <= self.max_cache_len - self.sinks)

    def crop(self, tokens_to_remove: int) -> None:
        super().crop(tokens_to_remove)
        for states in (self.keys[:, :, self.sinks :], self.values[:, :, self.sinks :]):
            states.copy_(states.roll(-tokens_to_remove, dims=2))


_Part: TypeAlias = DynamicLayer | FixedLayer


def _part(window: Window | None, room: int | None) -> _Part:
    """Cache layer of one group of heads."""
    if window is None:
        return DynamicLayer() if room is None else FixedLayer(room)
    return WindowLayer(window) if room is None else FixedWindowLayer(window, room)


def _each(name: str) -> Callable[..., None]:
    """A method that calls `name` of every group's layer."""

    def call(self: HeadGroupsLayer, *args: object) -> None:
        for part in self.parts if self.is_initialized else ():
            getattr(part, name)(*args)

    return call


class HeadGroupsLayer(CacheLayerMixin):
    """Cache of one layer; attention settles the states that `update` returns after reading them."""

    is_sliding = False
    device: torch.device

    def __init__(self, layout: HeadLayout, room: int | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.layout, self.max_cache_len = layout, -1 if room is None else room
        self.is_compileable = self.supports_early_init = room is not None
        self.is_croppable = room is None
        self.parts = [_part(group.window, room) for group in layout.groups]

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        self.batch_size = key_states.shape[0]
        for part, states in zip(self.parts, self._split(key_states, value_states), strict=True):
            part.lazy_initialization(*states)
            if part.values is not None:  # autocast may leave float32 keys
                part.values = part.values.to(value_states.dtype)
        self.is_initialized = True

    def _split(self, keys: Tensor, values: Tensor) -> list[_States]:
        heads = self.layout.heads_of
        return [(heads(keys, group), heads(values, group)) for group in self.layout.groups]

    def update(  # type: ignore[override]
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[CachedStates, CachedStates]:
        """Add the tokens of a pass, [B, HKV, T, D]; returns all states that its queries may see.

        Raises torch's error for an index out of range if they exceed a fixed size.
        """
        heads = self.layout.num_key_value_heads
        if key_states.shape[1] != heads:
            raise ValueError(
                f"the cache is of a layer with {heads} KV heads and would get states of "
                f"{key_states.shape[1]}: pass a cache of this model, and do not split its heads "
                "over processes"
            )
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        pairs = zip(self.parts, self._split(key_states, value_states), strict=True)
        seen = [part.update(*states) for part, states in pairs]
        sinks = [getattr(part, "sinks", 0) for part in self.parts]
        groups = [CachedGroup(*states, n) for states, n in zip(seen, sinks, strict=True)]
        cached = CachedStates(groups, functools.partial(self._settle, seen))
        return cached, cached

    def _settle(self, seen: list[_States], context: AttentionContext) -> None:
        for part, states in zip(self.parts, seen, strict=True):
            if isinstance(part, WindowLayer | FixedWindowLayer):
                part.settle(states, context)

    def get_seq_length(self) -> Any:
        """Number of tokens so far; with a fixed size a tensor [] on the cache's device."""
        part = self.parts[0]
        return part.cumulative_length if self.is_compileable else part.get_seq_length()

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        if self.is_compileable:
            return self.max_cache_len, 0
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        return self.max_cache_len

    def activate_past_recording(self) -> None:
        """Keep all tokens of a pass until `crop`, so that it can take some back."""
        for part in self.parts:
            if isinstance(part, WindowLayer):
                part.record_past = True

    def check_crop(self, tokens_to_remove: int) -> None:
        """Raise as `crop` does, and change nothing."""
        if tokens_to_remove > 0:
            raise ValueError("crop takes the negative number of tokens to remove")
        length = int(self.get_seq_length())
        for part in self.parts if 0 < -tokens_to_remove < length else ():
            can_remove = getattr(part, "can_remove", None)
            if can_remove is not None and not can_remove(-tokens_to_remove):
                raise RuntimeError(
                    f"tokens cannot be taken back: of {length} the cache's sliding heads hold the "
                    "last few; use the dynamic cache, and call its activate_past_recording() "
                    "before the tokens are added"
                )

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last `-tokens_to_remove` tokens (0 only drops recorded ones).

        Raises ValueError for a positive number, and RuntimeError when sliding heads have dropped
        tokens that they would need again.
        """
        self.check_crop(tokens_to_remove)
        if -tokens_to_remove >= self.get_seq_length():
            self.reset()
        else:
            _each("crop")(self, tokens_to_remove)

    def reset(self) -> None:
        _each("reset")(self)
        self.is_initialized &= self.is_compileable

    reorder_cache = _each("reorder_cache")
    offload = _each("offload")
    prefetch = _each("prefetch")
    batch_repeat_interleave = _each("batch_repeat_interleave")
    batch_select_indices = _each("batch_select_indices")


def _both(name: str) -> Callable[..., None]:
    """A method that calls `name` for the keys and values and for the states."""

    def call(self: HeadGroupsAndStatesLayer, *args: object) -> None:
        for kind in (HeadGroupsLayer, LinearAttentionLayer):
            getattr(kind, name)(self, *args)

    return call


class HeadGroupsAndStatesLayer(  # type: ignore[misc]
    HeadGroupsLayer, LinearAttentionLayer
):
    """Cache of a layer that also has states of fixed size."""

    is_croppable = False

    def __init__(self, layout: HeadLayout, room: int | None, states: int) -> None:
        LinearAttentionLayer.__init__(self, states)
        HeadGroupsLayer.__init__(self, layout, room)
        self.is_croppable = self.supports_early_init = False

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        # Keys and values are positional arguments, states are keyword arguments.
        kind: Any = HeadGroupsLayer if args else LinearAttentionLayer
        kind.lazy_initialization(self, *args, **kwargs)

    reset = _both("reset")
    reorder_cache = _both("reorder_cache")
    crop = _both("crop")
    offload = _both("offload")
    prefetch = _both("prefetch")
    activate_past_recording = _both("activate_past_recording")


def _layer(layout: HeadLayout | None, room: int | None, own: Any) -> Any:
    """Cache of a layer, which is `own` without attention, and also has the states of `own`."""
    if layout is None:
        return own
    if isinstance(own, LinearAttentionLayer):
        return HeadGroupsAndStatesLayer(layout, room, own.number_of_states)
    return HeadGroupsLayer(layout, room)


class HybridCache(Cache):
    """Cache of a hybrid model, one `HeadGroupsLayer` for each layer with attention.

    `layouts` has None for a layer without attention; `own` are transformers' layers, for states of
    fixed size. After a pass a sliding KV head holds at most W - 1 + S entries, a full head all;
    with a fixed room of `max_cache_len` tokens W + S, and the room. Works with batches, left
    padding, beams and chunked prefill, and with `crop` under past recording.
    """

    def __init__(
        self,
        layouts: Sequence[HeadLayout | None],
        max_cache_len: int | None = None,
        own: Sequence[object] | None = None,
    ) -> None:
        others = own or [None] * len(layouts)
        pairs = zip(layouts, others, strict=True)
        super().__init__([_layer(layout, max_cache_len, other) for layout, other in pairs])

    @classmethod
    def of(cls, model: PreTrainedModel, max_cache_len: int | None = None) -> HybridCache:
        """Make an empty cache for a model in search or deploy mode."""
        own = DynamicCache(config=model.config).layers
        return cls(layouts_of(model), max_cache_len, own)

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last `-tokens_to_remove` tokens in all layers, or in none if one raises.

        Raises as the layers do, and RuntimeError for recurrent states, unless all tokens go.
        """
        if 0 < self.get_seq_length() <= -tokens_to_remove:
            self.reset()
            return
        for layer in self.layers:
            if isinstance(layer, HeadGroupsLayer):
                layer.check_crop(tokens_to_remove)
            if isinstance(layer, LinearAttentionLayer) and not (
                layer.record_past and (layer.is_croppable or not tokens_to_remove)
            ):
                raise RuntimeError(
                    "tokens cannot be taken back from recurrent states, nor from others without "
                    "activate_past_recording(): pass the text again with a new cache"
                )
        super().crop(tokens_to_remove)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row `repeats` times, consecutively."""
        layer = next(layer for layer in self.layers if isinstance(layer, HeadGroupsLayer))
        rows = torch.arange(len(layer.parts[0].keys))  # type: ignore[arg-type]
        self.batch_select_indices(rows.repeat_interleave(repeats))

    def batch_select_indices(self, indices: Any) -> None:
        """Keep only these rows, in this order; transformers does so in attention's layers only."""
        self.reorder_cache(indices)


# ---- Adapters of the base model, whose KV heads have another order


def reorder_weight(weight: Tensor, axis: int, sizes: Sequence[int], order: Sequence[int]) -> Tensor:
    """A weight with its KV heads in `order` (BOSCH B.2).

    Along `axis` there are, for each of `sizes` in turn, as many entries of every KV head: a fused
    projection of queries, keys and values has three sizes.
    """
    heads = torch.tensor(order, device=weight.device)[:, None]
    parts = []
    for part, size in zip(
        torch.split(weight, [size * len(order) for size in sizes], axis), sizes, strict=True
    ):
        entries = heads * size + torch.arange(size, device=weight.device)
        parts.append(part.index_select(axis, entries.flatten()))
    return torch.cat(parts, axis) if len(parts) > 1 else parts[0]


def heads_in(
    name: str, table: Mapping[str, Any]
) -> tuple[int, Sequence[int], list[int], str] | None:
    """Where the linear map at the beginning of `name` has heads, by config.hybrid_attention.

    Axis and sizes as in `reorder_weight`, the order of heads, and the rest of the name; None for
    other modules.
    """
    place = re.search(r"(?:^|\.)layers\.(\d+)\.(.+)$", name)
    if place is None or int(place[1]) not in table["layers"]:
        return None
    row = table["windows"][table["layers"].index(int(place[1]))]
    for weight, (axis, sizes) in table["weights"].items():
        linear = weight.removesuffix(".weight")
        if f"{place[2]}.".startswith(f"{linear}."):
            return axis, sizes, deploy_order(row), place[2][len(linear) + 1 :]
    return None


def _reorder_adapters(hybrid: HybridModelMixin, weights: dict[str, Tensor], *_: object) -> None:
    """Hook of `load_state_dict`: give LoRA adapters of the base model the hybrid's order of heads.

    PEFT's configuration names the model that an adapter was trained on. The hybrid's name replaces
    it, since the adapter, saved again, is the hybrid's. ValueError for other kinds of adapters in
    attention, and for adapters of an unknown model.
    """
    configs: Mapping[str, Any] = getattr(hybrid, "peft_config", {})
    own = hybrid.config.name_or_path or ""
    foreign = {
        name for name, x in configs.items() if not is_of_hybrid(x.base_model_name_or_path, own)
    }
    if not foreign:
        return
    moved = set()
    for name, weight in weights.items():
        found = heads_in(name, hybrid.config.hybrid_attention)
        if found is None:
            continue
        axis, sizes, order, rest = found
        kind, *names = rest.split(".")
        adapter = next((part for part in names if part in foreign), None)
        if adapter is None:
            continue
        if kind not in ("lora_A", "lora_B", "lora_magnitude_vector"):
            raise ValueError(
                f"{name}: an adapter of this kind was trained on another order of heads; train it "
                "on the hybrid, or merge it into the base model before materialize"
            )
        moved.add(adapter)
        if (kind == "lora_A") is (axis == 1):
            weights[name] = reorder_weight(weight, axis, sizes, order)
    for adapter in moved:
        configs[adapter].base_model_name_or_path = own


def is_of_hybrid(trained_on: str | None, hybrid: str) -> bool:
    """Whether an adapter was trained on the model of this name, and not on its base model."""
    if (trained_on or "") == hybrid:
        return True
    try:
        content, _ = PreTrainedConfig.get_config_dict(trained_on or "")
    except Exception as error:
        raise ValueError(
            f"an adapter was trained on {trained_on!r}, which cannot be read, so the order of its "
            "heads is not known; correct base_model_name_or_path in its adapter_config.json"
        ) from error
    return str(content.get("model_type")).startswith(PREFIX)


# ---- Configurations and models


def deploy_order(row: Sequence[int]) -> list[int]:
    """KV heads of a layer, from full to the narrowest window, else in the base model's order."""
    return sorted(range(len(row)), key=lambda head: _from_full(row[head]))


def deploy_layouts(config: PreTrainedConfig) -> list[HeadLayout | None]:
    """Layouts from `config.hybrid_attention`, None without attention; ValueError if damaged.

    `windows` has a row for each of `layers`, the layers with full attention in the base model, its
    heads in the base model's order. Heads of layers that slide in it have `own_windows`.
    """
    table: Any = getattr(config, "hybrid_attention", None)
    layouts: list[HeadLayout | None] = [None] * text_config(config).num_hidden_layers
    try:
        for layer, row in zip(table["layers"], table["windows"], strict=True):
            layouts[layer] = HeadLayout.of(
                [row[head] for head in deploy_order(row)], table["sinks"]
            )
        for layer, size in table["own_windows"].items():
            layouts[int(layer)] = HeadLayout.of([size] * table["own_heads"])
    except (TypeError, KeyError, ValueError, IndexError) as error:
        raise ValueError(
            f"{getattr(config, '_name_or_path', '') or 'config.json'}: hybrid_attention is damaged "
            f"({error!r:.200}); found {table!r:.500}; make the model again"
        ) from error
    return layouts


def text_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """Configuration of the text decoder, which a multimodal model's configuration contains."""
    return config.get_text_config(decoder=True)


_Pickled: TypeAlias = tuple[Callable[[str, int], object], tuple[str, int], dict[str, object]]


class HybridConfigMixin:
    """Adds `hybrid_attention` to the configuration class of a family, and saves this file with it.

    A last line in the copy of this file makes the family's classes, which the configuration names.
    """

    def save_pretrained(self, save_directory: str | Path, *args: object, **kwargs: object) -> None:
        folder = Path(save_directory)
        folder.mkdir(parents=True, exist_ok=True)
        model_type = type(self).model_type.removeprefix(PREFIX)  # type: ignore[attr-defined]
        names = [kind.__name__ for kind in hybrid_classes(model_type)]
        shutil.copyfile(__file__, folder / CODE_FILE)
        if NAME == "bosch":
            with (folder / CODE_FILE).open("a", encoding="utf-8") as file:
                file.write(f'\n\n{", ".join(names)} = hybrid_classes("{model_type}")\n')
        autos = {"AutoConfig": 0, "AutoModel": 1, "AutoModelForCausalLM": 2}
        if takes_more_than_text(model_type):
            autos["AutoModelForImageTextToText"] = 2
        module = CODE_FILE.removesuffix(".py")
        self.auto_map = {auto: f"{module}.{names[kind]}" for auto, kind in autos.items()}
        super().save_pretrained(save_directory, *args, **kwargs)  # type: ignore[misc]

    def __reduce__(self) -> _Pickled:
        model_type = type(self).model_type  # type: ignore[attr-defined]
        return _empty, (model_type, 0), self.__dict__


def _empty(model_type: str, kind: int) -> object:
    """For unpickling: an object of a family's class, which may not exist yet in this process."""
    found = hybrid_classes(model_type.removeprefix(PREFIX))[kind]
    return found.__new__(found)


class HybridModelMixin(PreTrainedModel):
    """Adds layouts, a backend and a cache to the model class of a family."""

    _kind: int  # the place in `hybrid_classes`

    def __init__(self, config: PreTrainedConfig, *args: object, **kwargs: object) -> None:
        layouts = deploy_layouts(config)
        super().__init__(config, *args, **kwargs)
        decoder = self.get_decoder()
        if text_config(config) is not config:  # the text config has its own implementation
            decoder.set_attn_implementation(NAME)
        set_layouts(self, layouts, self._hybrid_backend)
        self.register_load_state_dict_pre_hook(_reorder_adapters)
        # At the decoder, since libraries replace the `forward` of the whole model.
        names = tuple(inspect.signature(type(decoder).forward).parameters)[1:]
        mixes: bool = config.hybrid_attention["mixes_documents"]
        prepare = functools.partial(_prepare_pass, names, mixes)
        decoder.register_forward_pre_hook(prepare, with_kwargs=True)

    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name_or_path: Any,
        *args: Any,
        output_loading_info: bool = False,
        **kwargs: Any,
    ) -> Any:
        """transformers' method, which here refuses a directory with other weights."""
        model, info = super().from_pretrained(
            pretrained_model_name_or_path, *args, output_loading_info=True, **kwargs
        )
        check_weights(model, info)
        return (model, info) if output_loading_info else model

    def load_adapter(self, *args: Any, **kwargs: Any) -> object:
        """transformers' method, which does not call `load_state_dict`."""
        result = super().load_adapter(*args, **kwargs)
        loaded = {name: weight.data for name, weight in self.named_parameters()}
        ordered = dict(loaded)
        _reorder_adapters(self, ordered)
        for name, weight in loaded.items():
            weight.copy_(ordered[name])
        return result

    def __reduce__(self) -> _Pickled:
        return _empty, (self.config.model_type, self._kind), self.__dict__

    @classmethod
    def is_custom_code(cls) -> bool:
        """False, or transformers skips modules without parameters, whose buffers no file has."""
        return False

    def _check_and_adjust_attn_implementation(
        self, attn_implementation: object, *args: object, **kwargs: object
    ) -> str:
        """Every implementation that is requested means the hybrid attention with that backend."""
        if isinstance(attn_implementation, str | None) and attn_implementation in BACKEND_OF:
            self._hybrid_backend = BACKEND_OF[attn_implementation]
            return NAME
        raise ValueError(
            f"attn_implementation='{attn_implementation}' has no hybrid form: choose one of "
            f"{', '.join(name for name in BACKEND_OF if name)}"
        )

    def set_attn_implementation(self, attn_implementation: object, *_: object) -> None:
        """Choose the backend of the hybrid attention."""
        self._check_and_adjust_attn_implementation(attn_implementation)
        set_layouts(self, layouts_of(self), self._hybrid_backend)

    def new_cache(self) -> HybridCache:
        return HybridCache.of(self)

    def new_static_cache(self, max_cache_len: int) -> HybridCache:
        """An empty cache of fixed size for `max_cache_len` tokens, with which decoding compiles."""
        return HybridCache.of(self, max_cache_len)

    def _prepare_cache_for_generation(
        self, generation_config: GenerationConfig, model_kwargs: dict[str, Any], *args: object
    ) -> None:
        """transformers' method, whose caches get the layers of a hybrid."""
        kind, is_new = generation_config.cache_implementation, model_kwargs.get(CACHE_NAME) is None
        if kind not in (None, "dynamic", "static"):
            raise ValueError(
                f"cache_implementation='{kind}' has no hybrid form: choose dynamic or static"
            )
        super()._prepare_cache_for_generation(generation_config, model_kwargs, *args)
        cache = model_kwargs.get(CACHE_NAME)
        if cache is not None:
            adopt_cache(self, cache, is_new)
            if is_new and generation_config.is_assistant:
                cache.activate_past_recording()

    create_masks_for_generate = staticmethod(masks_for_generate)


def check_weights(model: PreTrainedModel, info: Mapping[str, Any]) -> None:
    """Raise ValueError if loading left weights random, or did not use weights of the files.

    `info` is transformers' loading info. A bare decoder does not use the model's head.
    """
    where = model.config.name_or_path
    missing = {*info["missing_keys"], *(str(key[0]) for key in info["mismatched_keys"])}
    unexpected = set(info["unexpected_keys"])
    if model.base_model is model:
        prefix = f"{model.base_model_prefix}."
        unexpected = {name for name in unexpected if name.startswith((prefix, "layers."))}
    for names, fault in (
        (missing, "are missing or of another shape than config.json's"),
        (unexpected, "of the files have no place in the model of config.json"),
    ):
        if names:
            raise ValueError(
                f"{where}: {len(names)} weights {fault}, {min(names)} first; get the model again"
            )


def adopt_cache(model: PreTrainedModel, cache: Cache, is_new: bool = False) -> None:
    """Replace the layers of an empty transformers cache, so that sliding heads save memory.

    A cache that already holds states, quantises or offloads them is not changed. It is exact, but
    its sliding heads hold every token, and a warning says so. A new one may have room for states.
    """
    old: list[Any] = cache.layers
    if any(isinstance(layer, HeadGroupsLayer) for layer in old):
        return
    # Every model has a layer with attention, which holds keys after any pass.
    room = [layer for layer in old if getattr(layer, "keys", None) is not None]
    # Layers are cut to their windows, and sinks written, after attention. By then an offloaded
    # layer has left the device, perhaps in an incomplete copy.
    can_change = isinstance(cache, DynamicCache | StaticCache) and not cache.offloading
    if not can_change or (room and not is_new):
        logger.warning_once(
            f"A {type(cache).__name__} that holds, quantises or offloads states cannot take the "
            "form of a hybrid model: its sliding heads keep all tokens and save no memory; pass "
            "model.new_cache() or an empty DynamicCache"
        )
        return
    new = HybridCache.of(model, _cache_room(cache) if isinstance(cache, StaticCache) else None)
    for layer, known in zip(new.layers, old, strict=False):
        if isinstance(layer, HeadGroupsLayer) and known in room:
            layer.lazy_initialization(known.keys, known.values)
    if any(getattr(layer, "record_past", False) for layer in old):
        new.activate_past_recording()
    cache.layers, cache.layer_class_to_replicate = new.layers, None


def _restarts(positions: Tensor) -> bool:
    """Whether positions restart within a row, as for packed documents.

    Positions with images have planes: (3, B, T) for time, height and width, which may restart
    anywhere, or (4, B, T) with the positions in the sequence first, which separate documents.
    """
    if positions.ndim == 3:
        if len(positions) == 3:
            return False
        positions = positions[0]
    # For a single token, as in decoding, avoid reading from the device.
    return positions.shape[-1] > 1 and bool((positions.diff(dim=-1) != 1).any())


def _prepare_pass(
    names: Sequence[str],
    mixes: bool,
    decoder: PreTrainedModel,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> tuple[tuple[()], dict[str, Any]]:
    """Arguments of a decoder's pass by `names`, with a hybrid cache if it would make a cache.

    Raises ValueError for packed documents that this pass would not separate: transformers finds
    their borders in position_ids only without a cache, and in some families never (`mixes`). If
    `use_cache` is not passed, such a pass makes no cache.
    """
    kwargs = dict(zip(names, args, strict=False)) | kwargs
    old = kwargs.pop("past_key_values", None)  # transformers 5.24 renames it after this hook
    kwargs[CACHE_NAME] = kwargs.get(CACHE_NAME) if old is None else old
    if kwargs.get("output_attentions"):
        module = next(module for module in hybrid_modules(decoder) if module is not None)
        backend = required_state(module).backend
        if backend != "eager":
            raise ValueError(
                f"output_attentions: the {backend} backend computes no attention weights; load the "
                "model with attn_implementation='eager', or call set_attn_implementation('eager')"
            )
    past, use_cache = kwargs.get(CACHE_NAME), kwargs.get("use_cache")
    positions = kwargs.get("position_ids")
    if kwargs.get("attention_mask") is not None:
        positions = None
    undecided = use_cache is None and past is None
    if undecided:
        use_cache = bool(decoder.config.use_cache) and not decoder.training
    cached = past is not None or bool(use_cache)
    # Reading positions breaks a compiled graph, so do it there only if the cache depends on them.
    reads_positions = (cached or mixes) and (undecided or not torch.compiler.is_compiling())
    if positions is not None and reads_positions and _restarts(positions):
        if mixes:
            raise ValueError(
                "models of this type do not keep packed documents apart, and position_ids start "
                "again within a row: pass one document per row, with an attention_mask where rows "
                "are padded"
            )
        if not undecided:
            raise ValueError(
                "packed documents are not kept apart in a pass with a cache, and position_ids "
                "start again within a row: pass use_cache=False, or one document per row"
            )
        use_cache = False
    if past is not None:
        adopt_cache(decoder, past)
    elif use_cache:
        kwargs[CACHE_NAME] = HybridCache.of(decoder)
    kwargs["use_cache"] = past is not None if use_cache is None else use_cache
    return (), kwargs


def takes_more_than_text(model_type: str) -> bool:
    """Whether models of a type have a text decoder as one of their parts."""
    return "text_config" in CONFIG_MAPPING[model_type].sub_configs


@functools.cache
def hybrid_classes(
    model_type: str,
) -> tuple[type[PreTrainedConfig], type[PreTrainedModel], type[PreTrainedModel]]:
    """A family's classes of hybrids: configuration, decoder, and model with a head.

    Their model_type ("hybrid_qwen3", ...) is unknown to plain transformers, so loading without this
    file fails instead of running full attention.
    """
    config_base = CONFIG_MAPPING[model_type]
    models = MODEL_FOR_CAUSAL_LM_MAPPING
    if takes_more_than_text(model_type):
        models = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    body = {
        "model_type": PREFIX + model_type,
        "hybrid_attention": None,
        "__annotations__": {"hybrid_attention": "dict | None"},
        "__module__": __name__,
        "__doc__": f"{config_base.__name__} of a model with full and sliding heads.",
    }
    config = type(f"Hybrid{config_base.__name__}", (HybridConfigMixin, config_base), body)
    bases = MODEL_MAPPING[config_base], models[config_base]
    decoder, model = (_model_class(base, config, kind) for kind, base in enumerate(bases, 1))
    _name_in_transformers(model)
    return config, decoder, model


def _model_class(base: Any, config: type, kind: int) -> type:
    body = {
        "_kind": kind,
        "config_class": config,
        "config": config,
        "__module__": __name__,
        "__doc__": f"{base.__name__} with full and sliding heads in each layer.",
        "_can_set_attn_implementation_cached_value": True,
        # transformers looks for experts in the source of a class's module.
        "_can_set_experts_implementation_cached_value": base._can_set_experts_implementation(),
    }
    return type(f"Hybrid{base.__name__}", (HybridModelMixin, base), body)


def _name_in_transformers(model: type) -> None:
    """Make a class an attribute of transformers, where `transformers serve` finds it.

    transformers replaces its module object while it loads, and the server may hold the older one.
    """
    setattr(sys.modules["transformers"], model.__name__, model)
    server = sys.modules.get("transformers.cli.serving.model_manager")
    if server is not None:
        setattr(server.transformers, model.__name__, model)
