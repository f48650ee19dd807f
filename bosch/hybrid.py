"""A decoder whose KV heads are full or slide, for transformers: layouts, attention, cache, models.

This file needs torch and transformers only. Each saved hybrid carries a copy of it, by which
`trust_remote_code=True` loads the model without bosch; where bosch is imported, its own is used.

Shapes: B batch, T queries, Tk keys, HQ query heads, HKV key/value heads of a layer, HG of a group,
D head dimension, W window, S sinks, C queries of a block. A slot is a place in the padded sequence.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import re
import shutil
import sys
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.backends.cuda import SDPAParams, can_use_flash_attention
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import CausalBias, causal_lower_right
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
    DynamicSlidingWindowLayer,
    LinearAttentionLayer,
    StaticCache,
    StaticLayer,
)
from transformers.distributed.configuration_utils import DistributedConfig
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
# Kernels that never store the logits of all queries and keys, on a GPU.
FUSED_KERNELS = [
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
]
# Up to this number of logits the math kernel may run: few queries, or small models in tests.
SMALL_LOGITS = 2**24
# From this many queries on, rows padded on the left go one by one; below, one mask is faster.
MIN_PADDED = 128
# Dense masks up to this many entries are made once per pass; larger ones block by block.
DENSE_MASK_ENTRIES = 2**24
# Longer blocks compute more pairs outside the window, shorter ones use a kernel less well.
_MAX_BLOCK = 128
# Modules that do not get `output_attentions`; with eager they return weights, as in transformers.
_ALWAYS_RETURN_WEIGHTS = (
    "NemotronAttention", "OPTAttention", "PersimmonAttention", "StableLmAttention",
)  # fmt: skip

logger = transformers_logging.get_logger(__name__)


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


@dataclass(frozen=True)
class HeadGroup:
    """KV heads of a layer, ascending, with the same window, or None for full heads."""

    heads: tuple[int, ...]
    window: Window | None = None


@dataclass(frozen=True)
class HeadLayout:
    """The heads of one layer in groups: full ones first, then from the widest window down.

    `windows` are those in use, in this order. The layout is contiguous if the heads of each group
    are adjacent, as in deploy mode; then a group's tensors are views (BOSCH B.2).
    """

    groups: tuple[HeadGroup, ...]
    num_key_value_heads: int
    windows: tuple[Window, ...]
    sinks: int
    has_full: bool
    is_contiguous: bool
    _places: tuple[int, ...]  # group numbers in order of their first heads
    _indices: dict[tuple[Window | str | None, int, torch.device], Tensor] = field(
        default_factory=dict, compare=False
    )

    @classmethod
    def of(cls, sizes: Sequence[int], sinks: int = 0) -> HeadLayout:
        """Layout from each KV head's window, 0 for a full one; sliding heads have `sinks` sinks."""
        kinds = sorted(set(sizes), key=lambda size: -size if size else float("-inf"))
        heads = [tuple(head for head, x in enumerate(sizes) if x == size) for size in kinds]
        groups = [
            HeadGroup(h, Window(x, sinks) if x else None) for h, x in zip(heads, kinds, strict=True)
        ]
        windows = tuple(group.window for group in groups if group.window is not None)
        return cls(
            tuple(groups),
            len(sizes),
            windows,
            sinks=sinks if windows else 0,
            has_full=len(windows) < len(groups),
            is_contiguous=all(h[-1] - h[0] + 1 == len(h) for h in heads),
            _places=tuple(sorted(range(len(heads)), key=lambda i: heads[i])),
        )

    def heads_of(self, states: Tensor, group: HeadGroup, q_per_kv: int = 1) -> Tensor:
        """Heads of `group` in [B, HKV * q_per_kv, T, D]: a view if contiguous, else a copy."""
        if len(self.groups) == 1:
            return states
        if self.is_contiguous:
            start = group.heads[0] * q_per_kv
            return states[:, start : start + len(group.heads) * q_per_kv]
        return states.index_select(1, self._index(group, q_per_kv, states.device))

    def merge(self, outputs: Sequence[Tensor], q_per_kv: int) -> Tensor:
        """Join the outputs [B, HQ_group, T, D] of all groups to [B, T, HQ, D], contiguous."""
        if len(outputs) == 1:
            return outputs[0].transpose(1, 2).contiguous()
        transposed = [output.transpose(1, 2) for output in outputs]
        if self.is_contiguous:
            return torch.cat([transposed[place] for place in self._places], dim=2)
        order = self._index(None, q_per_kv, outputs[0].device)
        return torch.cat(transposed, dim=2).index_select(2, order)

    def _index(self, group: HeadGroup | None, q_per_kv: int, device: torch.device) -> Tensor:
        """Head indices on `device`: those of a group, or for None the places of heads when merging.

        Cached, except in a compiled pass, which must not depend on earlier calls.
        """
        if torch.compiler.is_compiling():
            return self._make_index(group, q_per_kv, device)
        key = ("merged" if group is None else group.window, q_per_kv, device)
        if key not in self._indices:
            # Not an inference tensor, which autograd could not use later.
            with torch.inference_mode(False):
                self._indices[key] = self._make_index(group, q_per_kv, device)
        return self._indices[key]

    def _make_index(self, group: HeadGroup | None, q_per_kv: int, device: torch.device) -> Tensor:
        groups = self.groups if group is None else (group,)
        heads = [head for group in groups for head in group.heads]
        index = torch.tensor(heads, device=device)[:, None] * q_per_kv
        index = (index + torch.arange(q_per_kv, device=device)).reshape(-1)
        return torch.argsort(index) if group is None else index


# ---- One pass


@dataclass(eq=False)
class AttentionContext:
    """Positions of one pass, shared by all its layers; caches the masks that are derived from it.

    q_offset is the slot of the first query. `valid` [B, Tk] is False at padding, None without
    padding. `document` [B, Tk] numbers packed documents, only in a pass without padding and cache.
    `right_padded`: in a pass without past, all padding follows the real tokens; no real token can
    see it, so attention may ignore padding (the outputs of padded queries are not used).
    `start` []: slot of the first query as a tensor on the device, in a pass over a cache of fixed
    size. q_offset is then the last slot possible, and the key slots are all that the cache has.
    `covered`: least number of keys in the pass, 0 if it is not known.
    """

    q_length: int
    q_offset: int = 0
    valid: Tensor | None = None
    document: Tensor | None = None
    right_padded: bool = False
    start: Tensor | None = None
    covered: int = 0
    _memo: dict[Any, Any] = field(default_factory=dict)

    @property
    def kv_length(self) -> int:
        """Tk: key slots of the pass."""
        return self.q_offset + self.q_length

    @property
    def is_plain(self) -> bool:
        """Whether visibility depends only on distance: one document, no padding to hide."""
        return (self.valid is None or self.right_padded) and self.document is None

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
        pick = slice(row, row + 1)
        valid, document = (None if x is None else x[pick] for x in (self.valid, self.document))
        return AttentionContext(self.q_length, self.q_offset, valid, document)

    def memo(self, key: Any, make: Callable[[], Any]) -> Any:
        """`make()`, called once per pass and key; in a compiled pass it is called each time."""
        if torch.compiler.is_compiling():
            return make()
        if key not in self._memo:
            self._memo[key] = make()
        return self._memo[key]

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

    def left_padding(self) -> list[int] | None:
        """Padding slots before each row's tokens.

        None without padding, with documents, or if a row has padding elsewhere.
        """
        valid = self.valid
        if valid is None or self.document is not None:
            return None

        def make() -> list[int] | None:
            slots = valid.shape[1] - valid.sum(-1)
            on_left = valid == (torch.arange(valid.shape[1], device=valid.device) >= slots[:, None])
            return slots.tolist() if bool(on_left.all()) else None

        return self.memo("left_padding", make)

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

    def document_lengths(self) -> list[list[int]]:
        """Tokens of each document of each row, in order."""

        def make() -> list[list[int]]:
            starts = self.document_starts()
            return [torch.unique_consecutive(row, return_counts=True)[1].tolist() for row in starts]

        return self.memo("document_lengths", make)

    def rank(self, device: torch.device) -> Tensor:
        """Number of real tokens of the same document before each slot: [B or 1, Tk]."""

        def make() -> Tensor:
            slots = torch.arange(self.kv_length, device=device)[None]
            if self.document is not None:
                return slots - self.document_starts()
            if self.valid is not None:
                return self.valid.long().cumsum(-1) - self.valid.long()
            return slots

        return self.memo("rank", make)

    def _at(self, table: Tensor, slots: Tensor) -> Tensor:
        """table [B or 1, Tk] read at slots [b, ..., n], clamped into range: [B, ..., n]."""
        inside = slots.clamp(0, self.kv_length - 1)
        rows = max(table.shape[0], inside.shape[0])
        inside = inside.expand(rows, *inside.shape[1:])
        table = table.expand(rows, -1)
        return torch.gather(table, 1, inside.reshape(rows, -1)).reshape(inside.shape)


class CachedGroup(NamedTuple):
    """Keys and values of one group of heads, as a cache returns them.

    key, value [B, HG, R, D] hold the last R slots, for full heads all; the sinks [B, HG, S, D] are
    the first tokens of each row once they have left these. In a cache of fixed size, slots after
    the last (full heads) or before the first (sliding heads) may be empty.
    """

    key: Tensor
    value: Tensor
    sink_key: Tensor | None = None
    sink_value: Tensor | None = None

    def seen(self, context: AttentionContext, window: Window | None) -> CachedGroup:
        """Without empty slots, unless only the device knows them; and without sinks among them."""
        length = context.kv_length
        slots = slice(length) if window is None else slice(-length, None)
        key, value, *sinks = self.key[:, :, slots], self.value[:, :, slots], *self[2:]
        if context.start is None and key.shape[2] == length:
            sinks = []
        return CachedGroup(key, value, *sinks)


@dataclass
class CachedStates:
    """A layer's keys and values by group, of a HybridCache; `done` is called after the pass."""

    groups: list[CachedGroup]
    done: Callable[[AttentionContext], None] | None = None

    def to(self, dtype: torch.dtype) -> CachedStates:
        """The same in another dtype, without `done`."""
        groups = ((None if x is None else x.to(dtype) for x in group) for group in self.groups)
        return CachedStates([CachedGroup(*group) for group in groups])  # type: ignore[arg-type]


def gather_sinks(
    recent: Tensor, earlier: Tensor | None, context: AttentionContext, sinks: int
) -> Tensor:
    """States of each row's first `sinks` real tokens, [B, HG, S, D].

    From `recent` (the last R slots), or `earlier` once they left it; arbitrary for missing tokens.
    """
    first = context.end - recent.shape[2]
    slots = context.sink_slots(sinks, recent.device)
    inside = (slots - first).clamp(0, recent.shape[2] - 1)[:, None, :, None]
    sinks_of_recent = recent.gather(2, inside.expand(*recent.shape[:2], -1, recent.shape[3]))
    if earlier is None:
        return sinks_of_recent
    return torch.where((slots >= first)[:, None, :, None], sinks_of_recent, earlier)


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
    if dropout:
        weights = torch.nn.functional.dropout(weights, p=dropout)
    return weights @ value


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


class GroupCall(NamedTuple):
    """Attention of one group of heads: full heads (`window` is None) or those of a window.

    query [B, HQ_group, T, D]; key, value [B, HG, R, D] are the last R slots. sink_key, sink_value
    [B, HG, S, D] or None are sinks before them. `slots` [R] names the slots if only the device
    knows them; negative ones are empty.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    window: Window | None
    context: AttentionContext
    transform: LogitTransform
    dropout: float
    sink_key: Tensor | None = None
    sink_value: Tensor | None = None
    slots: Tensor | None = None

    def with_slots(self) -> tuple[Tensor, Tensor, Tensor]:
        """Keys, values and slots [B or 1, S + R]; a slot outside 0 .. Tk - 1 hides its key."""
        key, value, slots, context = self.key, self.value, self.slots, self.context
        count = 0 if self.sink_key is None else self.sink_key.shape[2]
        if slots is None:
            first = context.kv_length - key.shape[2]
            slots = torch.arange(first, context.kv_length, device=key.device)
            if context.is_plain:  # sinks are slots 0, 1, …; those among the recent keys come last
                count = min(first, count)
        if not count or self.sink_key is None or self.sink_value is None:
            return key, value, slots[None]
        key = torch.cat([self.sink_key[:, :, :count], key], dim=2)
        value = torch.cat([self.sink_value[:, :, :count], value], dim=2)
        sinks = context.sink_slots(count, key.device)
        sinks = torch.where(sinks < slots[0], sinks, context.kv_length)
        return key, value, torch.cat([sinks, slots.expand(sinks.shape[0], -1)], dim=1)


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
        layout, key, value, context = self.layout, self.key, self.value, self.context
        q_per_kv = self.query.shape[1] // layout.num_key_value_heads
        outputs = []
        for number, group in enumerate(layout.groups):
            slots = None
            if isinstance(key, Tensor) and isinstance(value, Tensor):
                states = CachedGroup(layout.heads_of(key, group), layout.heads_of(value, group))
            else:
                assert isinstance(key, CachedStates)
                states = key.groups[number].seen(context, group.window)
                if context.start is not None and group.window is not None:
                    count = states.key.shape[2]
                    slots = torch.arange(-count, 0, device=self.query.device) + context.end
            heads = layout.heads_of(self.query, group, q_per_kv)
            transform = self.transform.of(layout, group, q_per_kv)
            sinks = states.sink_key, states.sink_value
            options = context, transform, self.dropout, *sinks, slots
            outputs.append(
                attend(GroupCall(heads, states.key, states.value, group.window, *options))
            )
        return layout.merge(outputs, q_per_kv)


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

    `mask` broadcasts to [B, HQ, T, Tk], or is one of torch.nn.attention.bias; `is_causal` needs Tk
    = T. RuntimeError if no kernel of FUSED_KERNELS takes them on a GPU, unless logits are few.
    """
    q_per_kv, is_grouped = query.shape[1] // key.shape[1], False
    if q_per_kv > 1:  # a branch, since the comparison is symbolic when compiled
        is_grouped = not is_gpu(query) or _flash_takes(query, key, value, mask)
        if not is_grouped:
            key, value = (states.repeat_interleave(q_per_kv, dim=1) for states in (key, value))
    allowed: Any = contextlib.nullcontext()
    if is_gpu(query) and not torch.compiler.is_compiling():
        logits = query.numel() // query.shape[-1] * key.shape[2]
        allowed = sdpa_kernel(FUSED_KERNELS) if logits > SMALL_LOGITS else allowed
    with allowed:
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, dropout_p=dropout, is_causal=is_causal,
            scale=scale, enable_gqa=is_grouped,
        )  # fmt: skip


def is_gpu(states: Tensor) -> bool:
    """Whether CUDA's kernels compute with `states`."""
    return states.device.type == "cuda"


def _flash_takes(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> bool:
    """Whether torch's flash kernel, the only one that shares KV heads, can take the states."""
    if isinstance(mask, CausalBias):  # made for this kernel alone
        return True
    if mask is not None:
        return False
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
    """Attention [B, HQ, T, D] of `query` [B, HQ, T, D] to `key`, `value` [B, HKV, Tk, D].

    `mask` is bool and broadcasts to [B, HQ, T, Tk]; `is_causal` needs Tk = T.
    """
    if transform.is_plain:
        return fused_attention(
            query, key, value, mask=mask, dropout=dropout, is_causal=is_causal,
            scale=transform.scaling,
        )  # fmt: skip
    # No fused kernel supports these logits: densely, equal to transformers' to the bit, and a few
    # queries at a time.
    rows, heads, length, _ = query.shape
    step = max(16, DENSE_MASK_ENTRIES // (rows * heads * key.shape[2]))
    outputs = []
    for start in range(0, length, step):
        stop = min(start + step, length)
        end = key.shape[2]
        visible = None if mask is None else mask[..., start:stop, :]
        if is_causal:
            end = stop
            slots = torch.arange(stop, device=query.device)
            visible = slots <= slots[start:, None]
        states = query[:, :, start:stop], key[:, :, :end], value[:, :, :end]
        outputs.append(dense_attention(*states, visible, transform, dropout))
    return torch.cat(outputs, dim=2)


def causal_attention(call: GroupCall) -> Tensor:
    """Causal attention over all keys, [B, HQ, T, D]; makes a mask only if it is needed."""
    query, key, value, context = call.query, call.key, call.value, call.context
    options, length = (call.transform, call.dropout), key.shape[2]
    # The keys are a cache of fixed size, with slots that are still empty.
    fixed = context.start is not None or length != context.kv_length
    if context.is_plain and not fixed:
        if context.q_length == 1 or context.q_offset == 0:
            return masked_attention(query, key, value, *options, is_causal=context.q_length > 1)
        out = attention_after_past(query, key, value, *options)
        if out is not None:
            return out
    if not fixed and not torch.compiler.is_compiling():
        if context.document is not None and context.valid is None:
            return _attend_parts(call, context.document_lengths())
        padding = context.left_padding() if context.q_length >= MIN_PADDED else None
        if padding is not None:
            return _attend_parts(call, [[slots, context.kv_length - slots] for slots in padding])
    queries = context.query_slots(query.device)
    keys = torch.arange(length, device=query.device)[None]
    rows = 1 if context.is_plain else query.shape[0]
    if fixed or rows * context.q_length * length <= DENSE_MASK_ENTRIES:
        mask = context.memo(("full", length), lambda: context.visible(queries, keys)[:, None])
        return masked_attention(query, key, value, *options, mask)
    step = max(64, DENSE_MASK_ENTRIES // (rows * context.kv_length))
    outputs = []
    for start in range(0, context.q_length, step):
        stop = min(start + step, context.q_length)
        end = context.q_offset + stop
        mask = context.visible(queries[:, start:stop], keys[:, :end])[:, None]
        block = query[:, :, start:stop], key[:, :, :end], value[:, :, :end]
        outputs.append(masked_attention(*block, *options, mask))
    return torch.cat(outputs, dim=2)


def _attend_parts(call: GroupCall, parts: list[list[int]]) -> Tensor:
    """Causal attention within each part of a row, [B, HQ, T, D], and none between parts.

    `parts`: tokens of each row's documents, or of its padding and the rest; they need no mask.
    """
    rows, offset = [], call.context.q_offset
    for number, lengths in enumerate(parts):
        row, outputs, start = slice(number, number + 1), [], 0
        for length in lengths:
            stop, first = start + length, max(start, offset)
            if first < stop:  # an earlier document may have keys only
                part = call._replace(
                    query=call.query[row, :, first - offset : stop - offset],
                    key=call.key[row, :, start:stop],
                    value=call.value[row, :, start:stop],
                    context=AttentionContext(stop - first, first - start),
                )
                outputs.append(causal_attention(part))
            start = stop
        rows.append(torch.cat(outputs, dim=2))
    return torch.cat(rows)


def attention_after_past(
    query: Tensor, key: Tensor, value: Tensor, transform: LogitTransform, dropout: float
) -> Tensor | None:
    """Causal attention of the last tokens to all keys; None if no kernel supports it."""
    states = (query, key, value)
    if not transform.is_plain or any(x.stride(-1) != 1 for x in states):
        return None
    shared = query.shape[1] != key.shape[1]
    if query.device.type != "cuda" or torch.compiler.is_compiling():
        return None
    if not can_use_flash_attention(SDPAParams(*states, None, dropout, False, shared)):
        return None  # torch would make a mask of all T x Tk
    return fused_attention(
        *states, mask=causal_lower_right(query.shape[2], key.shape[2]), dropout=dropout,
        scale=transform.scaling,
    )  # fmt: skip


def eager_attention(call: AttentionCall) -> Tensor:
    """Attention of all groups of heads by dense masks: [B, T, HQ, D]. Memory grows with T * Tk."""

    def attend(group: GroupCall) -> Tensor:
        keys, values, slots = group.with_slots()
        visible = _visible(group, slots)
        return dense_attention(group.query, keys, values, visible, group.transform, group.dropout)

    return call.by_group(attend)


def eager_weights(call: AttentionCall) -> Tensor:
    """Weights [B, HQ, T, Tk] before dropout; 0 for unseen slots, whether cached or not."""
    length = call.context.kv_length

    def weights(group: GroupCall) -> Tensor:
        keys, _, slots = group.with_slots()
        near = dense_weights(group.query, keys, _visible(group, slots), group.transform)
        # Slots out of range, which no query sees, go into an extra column.
        places = torch.where((slots >= 0) & (slots < length), slots, length)[:, None, None]
        whole = near.new_zeros(*near.shape[:3], length + 1)
        return whole.scatter_add_(3, places.expand_as(near), near)[..., :length]

    return call.by_group(weights).transpose(1, 2)


def _visible(group: GroupCall, slots: Tensor) -> Tensor:
    queries = group.context.query_slots(group.query.device)
    return group.context.visible(queries, slots, group.window)[:, None]


class _Bands(torch.autograd.Function):
    """Overlapping views without copies; backward adds the overlapping pieces slice by slice.

    Autograd's own backward adds single elements, which costs more than the attention itself.
    """

    @staticmethod
    def forward(ctx: Any, keys: Tensor, block: int, width: int) -> Tensor:
        ctx.length, ctx.block, ctx.width = keys.shape[1], block, width
        return _view(keys, block, width)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (grad,) = grads
        block, width = ctx.block, ctx.width
        n, heads, _, dim = grad.shape
        # The last piece has whole blocks, too, since torch.compile mishandles views with gaps.
        starts = range(0, width, block)
        total = grad.new_zeros(heads, starts[-1] + n * block, dim)
        for start in starts:
            piece = grad[:, :, start : start + block].transpose(0, 1)  # [H, n, <= C, D]
            target = total[:, start : start + n * block].view(heads, n, block, dim)
            target[:, :, : piece.shape[2]].add_(piece)
        return total[:, : ctx.length], None, None


def _view(keys: Tensor, block: int, width: int) -> Tensor:
    return keys.unfold(1, width, block).permute(1, 0, 3, 2)


def bands(keys: Tensor, block: int, window: int) -> Tensor:
    """Keys [H, n*C + W, D] as bands [n, H, C + W, D]; a view, differentiable."""
    width = block + window
    if keys.requires_grad and torch.is_grad_enabled():
        return _Bands.apply(keys, block, width)
    return _view(keys, block, width)


def block_size(window: int) -> int:
    """Queries that the sdpa backend computes together in a sliding head, C."""
    return max(16, min(_MAX_BLOCK, window))


def sdpa_attention(call: AttentionCall) -> Tensor:
    """Attention of all groups of heads: [B, T, HQ, D]."""
    key, value, length = call.key, call.value, call.context.kv_length
    # No query is W or more slots after a key, so all groups of heads see the same keys.
    fits = all(length <= window.size for window in call.layout.windows)
    if fits and isinstance(key, Tensor) and isinstance(value, Tensor):
        options = call.context, call.transform, call.dropout
        out = causal_attention(GroupCall(call.query, key, value, None, *options))
        return out.transpose(1, 2).contiguous()

    def attend(group: GroupCall) -> Tensor:
        return causal_attention(group) if group.window is None else _sliding(group, group.window)

    return call.by_group(attend)


def _trim(call: GroupCall, window: Window) -> GroupCall:
    """Drop keys that no query of this pass sees, except sinks, which are stored apart."""
    key, value, context = call.key, call.value, call.context
    needed = window.past + context.q_length
    # Each document has its own sinks, some of which may be among the first keys.
    if key.shape[2] <= needed or context.document is not None:
        return call
    sink_key = sink_value = None
    if window.sinks:
        sink_key = gather_sinks(key, call.sink_key, context, window.sinks)
        sink_value = gather_sinks(value, call.sink_value, context, window.sinks)
    return call._replace(
        key=key[:, :, -needed:], value=value[:, :, -needed:],
        sink_key=sink_key, sink_value=sink_value,
    )  # fmt: skip


def _sliding(call: GroupCall, window: Window) -> Tensor:
    """Sliding-window attention of a group, [B, HQ_group, T, D]."""
    context = call.context
    # A cache of fixed size: only the device knows the slots of the ring, so it needs a mask.
    if context.start is not None:
        return _sliding_dense(call, window)
    call = _trim(call, window)
    first = context.kv_length - call.key.shape[2]
    # All keys are within the window.
    if first == 0 and context.kv_length <= window.size:
        return causal_attention(call)
    block = block_size(window.size)
    # Fewer queries than a block: a mask costs less than padding them to a block.
    if context.q_length < block:
        return _sliding_dense(call, window)
    # A whole sequence in which every row sees the same slots: all rows at once.
    if context.is_plain and context.q_offset == 0 and call.sink_key is None:
        return _banded_prefill(call, window, block)
    # Padding, documents or a past: each row has its own mask and its own sinks.
    rows = [_banded_row(call, window, row, block) for row in range(call.query.shape[0])]
    return rows[0] if len(rows) == 1 else torch.cat(rows)


def _sliding_dense(call: GroupCall, window: Window) -> Tensor:
    """Attention with one mask: few queries (decoding, short chunks), or a cache of fixed size."""
    query, context = call.query, call.context
    key, value, slots = call.with_slots()
    mask = None
    if context.start is not None or not context.is_plain or context.q_length > 1:
        queries = context.query_slots(query.device)
        mask = context.memo(
            ("dense", window, key.shape[2]),
            lambda: context.visible(queries, slots, window)[:, None],
        )
    return masked_attention(query, key, value, call.transform, call.dropout, mask)


def _banded_prefill(call: GroupCall, window: Window, block: int) -> Tensor:
    """A whole sequence without padding: W + S causal queries, whole blocks, and a short rest."""
    query, key, value, sinks = call.query, call.key, call.value, window.sinks
    options, context = (call.transform, call.dropout), call.context
    batch, heads, length, dim = query.shape
    first = min(window.max_keys, length)
    beginning = query[:, :, :first], key[:, :, :first], value[:, :, :first]
    first_out = masked_attention(*beginning, *options, is_causal=True)
    outputs = [first_out]
    count = (length - first) // block
    middle = first + count * block
    # A band begins with the W slots before its first query.
    start, sink_states = first - window.size, (key[:, :, :sinks], value[:, :, :sinks])
    if count:
        out = _attend_bands(
            _blocks(query[:, :, first:middle].flatten(0, 1), count, block),
            bands(key[:, :, start:middle].flatten(0, 1), block, window.size),
            bands(value[:, :, start:middle].flatten(0, 1), block, window.size),
            tuple(x.flatten(0, 1)[None].expand(count, -1, -1, -1) for x in sink_states),
            _band_mask(context, block, window, query.device)[None],
            *options,
        )  # [n, B * HQ, C, D]
        outputs.append(out.transpose(0, 1).reshape(batch, heads, count * block, dim))
        del out  # it was copied
    if middle < length:
        rest, start = length - middle, middle - window.size
        mask = _band_mask(context, rest, window, query.device)
        last_key, last_value = key[:, :, start:], value[:, :, start:]
        if sinks:
            last_key = torch.cat([sink_states[0], last_key], dim=2)
            last_value = torch.cat([sink_states[1], last_value], dim=2)
        tail = query[:, :, middle:], last_key, last_value
        outputs.append(masked_attention(*tail, *options, mask))
    return torch.cat(outputs, dim=2) if len(outputs) > 1 else first_out


def _attend_bands(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    sinks: tuple[Tensor, ...],
    mask: Tensor,
    transform: LogitTransform,
    dropout: float,
) -> Tensor:
    """Attention of blocks [n, H, C, D] to their sinks [n, H, S, D] and bands, which are views.

    `mask` is [n or 1, C, S + C + W]. Sinks and bands are copied into one tensor, for few blocks at
    a time: without gradients the copies never take more memory than the keys.
    """
    if not sinks[0].shape[2]:
        return masked_attention(queries, keys, values, transform, dropout, mask[:, None])
    count = step = keys.shape[0]
    # In a backward pass each slice's gradient would be as large as all bands.
    if not (torch.is_grad_enabled() and (keys.requires_grad or values.requires_grad)):
        step = max(1, count * queries.shape[2] // (4 * keys.shape[2]))
    outputs = []
    for start in range(0, count, step):
        part = slice(start, start + step)
        seen_keys = torch.cat([sinks[0][part], keys[part]], dim=2)
        states = queries[part], seen_keys, torch.cat([sinks[1][part], values[part]], dim=2)
        visible = (mask if mask.shape[0] == 1 else mask[part])[:, None]
        outputs.append(masked_attention(*states, transform, dropout, visible))
    return torch.cat(outputs) if len(outputs) > 1 else outputs[0]


def _blocks(states: Tensor, count: int, block: int) -> Tensor:
    """[H, n * C, D] as [n, H, C, D]."""
    heads, _, dim = states.shape
    return states.reshape(heads, count, block, dim).transpose(0, 1)


def _band_mask(
    context: AttentionContext, queries: int, window: Window, device: torch.device
) -> Tensor:
    """Mask of `queries` queries over the sinks and their band: bool [queries, S + W + queries].

    The last keys of the band are the queries' own.
    """

    def make() -> Tensor:
        q = torch.arange(window.size, window.size + queries, device=device)[:, None]
        k = torch.arange(window.size + queries, device=device)[None]
        band = (k <= q) & (q - k < window.size)
        return torch.cat([band.new_ones(queries, window.sinks), band], dim=1)

    return context.memo(("plain band", queries, window), make)


def _banded_row(call: GroupCall, window: Window, row: int, block: int) -> Tensor:
    """One row of the batch with padding, documents, sinks or a past: [1, HQ_group, T, D]."""
    this_row, context = slice(row, row + 1), call.context
    query, key, value = (x[this_row] for x in (call.query, call.key, call.value))
    size, sinks, length = window.size, window.sinks, query.shape[2]
    count = -(-length // block)
    first = context.kv_length - key.shape[2]
    # Pad the keys so that block 0's band begins W slots before its first query, and the last block
    # is whole; padded keys have slots below `first` or beyond the end, which every mask hides.
    left, right = size - (context.q_offset - first), count * block - length
    query_blocks = _blocks(F.pad(query[0], (0, 0, 0, right)), count, block)
    keys, values = (bands(F.pad(x[0], (0, 0, left, right)), block, size) for x in (key, value))

    # Without padding and documents all rows share the mask of row 0.
    mask_row = 0 if context.valid is None and context.document is None else row
    memo_key = ("band", window, block, first, mask_row)
    mask, sink_slots = context.memo(memo_key, lambda: _row_mask(call, window, row, block))
    if sink_slots is None:
        sink_states = keys[:, :, :0], values[:, :, :0]
    elif call.sink_key is not None and call.sink_value is not None:
        # A cache stores sinks apart; some may be new in this pass.
        row_context = context.row(row)
        sink_key = gather_sinks(key, call.sink_key[this_row], row_context, sinks)
        sink_value = gather_sinks(value, call.sink_value[this_row], row_context, sinks)
        sink_states = sink_key.expand(count, -1, -1, -1), sink_value.expand(count, -1, -1, -1)
    else:
        # All keys are present: each block takes the sinks of the document in which its band begins.
        index = sink_slots.clamp(0, key.shape[2] - 1).reshape(-1)
        sink_key, sink_value = (x[0].index_select(1, index) for x in (key, value))
        sink_states = _blocks(sink_key, count, sinks), _blocks(sink_value, count, sinks)
    states = query_blocks, keys, values, sink_states
    out = _attend_bands(*states, mask, call.transform, call.dropout)
    return out.transpose(0, 1).flatten(1, 2)[None, :, :length]


def _row_mask(
    call: GroupCall, window: Window, row: int, block: int
) -> tuple[Tensor, Tensor | None]:
    """Masks [n, C, S + C + W] of a row's blocks; slots [n, S] of the sinks before each band.

    At most one document begins before a band and reaches into it; its sinks are the extra keys.
    Sinks inside the band are keys of the band.
    """
    context, size, sinks, device = call.context, window.size, window.sinks, call.key.device
    first = context.kv_length - call.key.shape[2]
    count = -(-context.q_length // block)
    starts = context.q_offset + block * torch.arange(count, device=device)[:, None]
    queries = starts + torch.arange(block, device=device)
    keys = starts + torch.arange(-size, block, device=device)
    keys = torch.where(keys < first, -1, keys)
    queries = queries.clamp(max=context.kv_length - 1)
    sink_slots = None
    if sinks:
        offsets = torch.arange(sinks, device=device)
        if context.document is not None:
            begin = (starts - size).clamp(min=0)
            sink_slots = context.document_starts()[row][begin] + offsets
        else:
            slots = context.sink_slots(sinks, device)
            sink_slots = slots[min(row, slots.shape[0] - 1)].expand(count, -1)
        before = (sink_slots < starts - size) | (sink_slots < first)
        keys = torch.cat([torch.where(before, sink_slots, -1), keys], dim=1)
    return context.row(row).visible(queries[None], keys[None], window)[0], sink_slots


# The backends by name. bosch adds those that run on a GPU only, and their names in transformers.
ATTENTION: dict[str, Callable[[AttentionCall], Tensor]] = {
    "eager": eager_attention,
    "sdpa": sdpa_attention,
}
BACKEND_OF: dict[str | None, str] = {
    None: "sdpa",
    NAME: "sdpa",
    "bosch": "sdpa",
    "auto": "sdpa",
    "eager": "eager",
    "sdpa": "sdpa",
}


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
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """transformers' attention interface: output [B, T, HQ, D], and weights [B, HQ, T, Tk].

    query [B, HQ, T, D]; key, value [B, HKV, Tk, D], or states from a HybridCache. Weights are None
    unless `output_attentions` is set; raises ValueError if the backend has none.
    """
    state = required_state(module)
    layout, context = state.layout, attention_mask
    _check_supported(layout, kwargs)
    with_weights = kwargs.get("output_attentions")
    if with_weights is None:
        with_weights = getattr(getattr(module, "config", None), "output_attentions", None)
    if with_weights:
        check_shows_weights(state)
    elif type(module).__name__ in _ALWAYS_RETURN_WEIGHTS:
        with_weights = state.backend == "eager" and state.attend is None
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    transform = LogitTransform(scale, kwargs.get("softcap"), kwargs.get("s_aux"))
    if context is None or isinstance(context, AttentionContext):
        context = pass_context(context, query, key)
    dropout = dropout if state.attend is None else 0.0
    call = AttentionCall(query, key, value, layout, context, transform, state.backend, dropout)
    if state.attend is not None:
        return state.attend(module, call), None
    if not isinstance(context, AttentionContext):
        raise ValueError("hybrid attention takes a 2-D attention mask [batch, keys], not a 4-D one")
    if attention_mask is not None and isinstance(key, Tensor) and isinstance(value, Tensor):
        length = context.kv_length
        reaches = [length] if layout.has_full else [window.past for window in layout.windows]
        if key.shape[2] < max(context.covered, min(length, max(reaches) + context.q_length)):
            raise ValueError(
                f"attention_mask covers {max(context.covered, length)} tokens, there are keys of "
                f"{key.shape[2]}"
            )
        call = call._replace(key=key[:, :, :length], value=value[:, :, :length])
    weights = eager_weights(call.autocast()).to(query.dtype) if with_weights else None
    out = compute_attention(call)
    if isinstance(key, CachedStates) and attention_mask is not None and key.done is not None:
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


def _check_supported(layout: HeadLayout, options: Mapping[str, Any]) -> None:
    """Raise ValueError for options of a layer that hybrid attention does not support."""
    if options.get("position_bias") is not None:
        raise ValueError("hybrid attention does not support position_bias")
    base_window = options.get("sliding_window")
    if base_window is not None and (layout.has_full or layout.windows != (Window(base_window),)):
        raise ValueError(
            f"this layer has a window of its own, {base_window}, which its heads do not have"
        )


def check_shows_weights(state: HeadState) -> None:
    """Raise ValueError if the backend cannot return attention weights."""
    if state.backend != "eager" or state.attend is not None:
        raise ValueError(
            f"output_attentions: the {state.backend} backend computes no attention weights; load "
            "the model with attn_implementation='eager', or call set_attn_implementation('eager')"
        )


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
    **kwargs: Any,
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
    offset = int(q_offset)
    valid, covered = None, 0
    if attention_mask is not None:
        total = offset + q_length
        if attention_mask.shape[1] < total:
            raise ValueError(
                f"attention_mask has {attention_mask.shape[1]} columns, expected {total}: "
                "the past included"
            )
        # May exceed the pass: free slots of a cache, or a past that does not exist.
        covered = kv_length if attention_mask.shape[1] == kv_length else 0
        valid = attention_mask[:, :total].bool()
        valid = None if bool(valid.all()) else valid
    document = None
    right_padded = (
        valid is not None and offset == 0 and not bool((valid.diff(dim=1) & valid[:, 1:]).any())
    )
    packable = attention_mask is None and offset == 0 and q_length > 1
    if packable and not allow_is_causal_skip and mask_function is not None:
        rows = torch.arange(batch_size, device=device)[:, None]
        slots = torch.arange(1, q_length, device=device)[None]
        begins = ~mask_function(rows, torch.zeros_like(rows), slots, slots - 1)
        begins = begins.expand(batch_size, -1)
        document = F.pad(begins.long(), (1, 0)).cumsum(-1)
    return AttentionContext(q_length, offset, valid, document, right_padded, covered=covered)


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
    **kwargs: Any,
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


def register_attention() -> None:
    """Register `NAME` as attention implementation of transformers; harmless when called again."""
    AttentionInterface.register(NAME, attention_forward)
    AttentionMaskInterface.register(NAME, context_of_pass)


# ---- The cache: one of transformers' cache layers for each group of heads

# It grows with the text, or has a fixed size: then its tensors are changed in place and its length
# is read on the device, so torch.compile traces decoding only once.
_States: TypeAlias = tuple[Tensor, Tensor]  # keys and values of a group, [B, HG, T, D]


class WindowLayer(DynamicSlidingWindowLayer):
    """The last W - 1 tokens, and the sinks once they are not among these."""

    keys: Any
    values: Any

    def __init__(self, window: Window) -> None:
        super().__init__(window.size)
        self.window = window
        self.sinks: Any = DynamicLayer()

    def settle(self, seen: _States, context: AttentionContext) -> None:
        """Keep the sinks, and drop what no later query sees; `context` is the pass of `seen`."""
        count, first = self.window.sinks, self.cumulative_length - seen[0].shape[2]
        stored = self.sinks.keys is not None and context.valid is None and first >= count
        if count and self.cumulative_length > self.window.past and not stored:
            pairs = zip(seen, (self.sinks.keys, self.sinks.values), strict=True)
            sinks = [gather_sinks(states, earlier, context, count) for states, earlier in pairs]
            self.sinks.lazy_initialization(*seen)
            self.sinks.keys, self.sinks.values = sinks
        if not self.record_past:
            self._keep(self.keys.shape[2])

    def _keep(self, count: int) -> None:
        """Of the first `count` tokens keep the last W - 1; a slice would keep all in memory."""
        part = slice(max(0, count - self.window.past), count)
        states = (self.keys[:, :, part], self.values[:, :, part])
        self.keys, self.values = (
            x if x.untyped_storage().nbytes() == x.nbytes else x.clone() for x in states
        )

    def can_remove(self, count: int) -> bool:
        left = self.cumulative_length - count
        return bool(self.keys.shape[2] - count >= min(left, self.window.past))

    def crop(self, tokens_to_remove: int) -> None:
        self.cumulative_length = max(0, self.cumulative_length + tokens_to_remove)
        self._keep(max(0, self.keys.shape[2] + tokens_to_remove))
        if self.cumulative_length <= self.window.past:
            self.sinks.reset()  # they are among the recent tokens again


class FixedLayer(StaticLayer):
    """A place for every token; tokens can be taken back."""

    def crop(self, tokens_to_remove: int) -> None:
        self.cumulative_length.add_(tokens_to_remove).clamp_(min=0)


class FixedWindowLayer(FixedLayer):
    """The last W tokens, the newest in the last place, and the sinks; or every token if it fits."""

    keys: Any
    values: Any

    def __init__(self, window: Window, room: int) -> None:
        self.room, fits = room, room <= window.max_keys
        super().__init__(room if fits else window.size)
        self.sinks: Any = StaticLayer(0 if fits else window.sinks)

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> _States:
        # Any token finds a place here: the table makes one beyond the room fail on the device.
        lengths = torch.arange(1, self.room + 1, device=self.device)
        last = self.cumulative_length + (key_states.shape[2] - 1)
        self.cumulative_length.copy_(lengths.index_select(0, last[None])[0])
        keys = torch.cat([self.keys[:, :, 1:], key_states], dim=2)
        values = torch.cat([self.values[:, :, 1:], value_states], dim=2)
        self.keys.copy_(keys[:, :, -self.max_cache_len :])
        self.values.copy_(values[:, :, -self.max_cache_len :])
        return keys, values

    def settle(self, seen: _States, context: AttentionContext) -> None:
        """Keep the sinks among the tokens that attention has read in the pass `context`."""
        for sinks, states in zip((self.sinks.keys, self.sinks.values), seen, strict=True):
            if sinks.shape[2]:
                sinks.copy_(gather_sinks(states, sinks, context, sinks.shape[2]))

    def can_remove(self, count: int) -> bool:
        return bool(self.cumulative_length <= self.max_cache_len)

    def crop(self, tokens_to_remove: int) -> None:
        super().crop(tokens_to_remove)
        for states in (self.keys, self.values):
            states.copy_(states.roll(-tokens_to_remove, dims=2))


def _part(window: Window | None, room: int | None) -> Any:
    """Cache layer of one group of heads."""
    if window is None:
        return DynamicLayer() if room is None else FixedLayer(room)
    return WindowLayer(window) if room is None else FixedWindowLayer(window, room)


def _each(name: str) -> Callable[..., None]:
    """A method that calls `name` of every layer that holds tensors."""

    def call(self: HeadGroupsLayer, *args: Any) -> None:
        for held in self.held:
            getattr(held, name)(*args)

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
        self.sinks: list[Any] = [getattr(part, "sinks", None) for part in self.parts]
        self.held: list[Any] = [*self.parts, *filter(None, self.sinks)]

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        self.batch_size = key_states.shape[0]
        new = self._split(key_states, value_states)
        for part, sinks, states in zip(self.parts, self.sinks, new, strict=True):
            for held in (part, sinks) if self.is_compileable and sinks is not None else (part,):
                held.lazy_initialization(*states)
                held.values = held.values.to(value_states.dtype)  # autocast may leave float32 keys
        self.is_initialized = True

    def _split(self, keys: Tensor, values: Tensor) -> list[_States]:
        heads = self.layout.heads_of
        return [(heads(keys, group), heads(values, group)) for group in self.layout.groups]

    def update(  # type: ignore[override]
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
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
        new = self._split(key_states, value_states)
        seen = [part.update(*states) for part, states in zip(self.parts, new, strict=True)]
        held = [
            CachedGroup(
                states[0], states[1], getattr(sinks, "keys", None), getattr(sinks, "values", None)
            )
            for states, sinks in zip(seen, self.sinks, strict=True)
        ]
        cached = CachedStates(held, functools.partial(self._settle, seen))
        return cached, cached

    def _settle(self, seen: list[_States], context: AttentionContext) -> None:
        for part, states in zip(self.parts, seen, strict=True):
            if hasattr(part, "settle"):
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
                part.activate_past_recording()

    def check_crop(self, tokens_to_remove: int) -> None:
        """Raise as `crop` does, and change nothing."""
        if tokens_to_remove > 0:
            raise ValueError("crop takes the negative number of tokens to remove")
        length = int(self.get_seq_length())
        for part in self.parts if 0 < -tokens_to_remove < length else ():
            if hasattr(part, "can_remove") and not part.can_remove(-tokens_to_remove):
                raise RuntimeError(
                    f"tokens cannot be taken back: of {length} the cache's sliding heads hold the "
                    f"last {part.keys.shape[2]}; use the dynamic cache, and call its "
                    "activate_past_recording() before the tokens are added"
                )

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last `-tokens_to_remove` tokens (0 only drops recorded ones).

        Raises ValueError for a positive number, and RuntimeError when sliding heads have dropped
        tokens that they would need again.
        """
        self.check_crop(tokens_to_remove)
        for part in self.parts if self.is_initialized else ():
            part.crop(tokens_to_remove)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        for held in self.held if self.is_initialized else ():
            if not self.is_compileable:
                held.reorder_cache(beam_idx)
                continue
            for states in (held.keys, held.values):  # compiled code knows their addresses
                states.copy_(states.index_select(0, beam_idx.to(states.device)))

    reset = _each("reset")
    offload = _each("offload")
    prefetch = _each("prefetch")
    batch_repeat_interleave = _each("batch_repeat_interleave")
    batch_select_indices = _each("batch_select_indices")


def _both(name: str) -> Callable[..., None]:
    """A method that calls `name` for the keys and values and for the states."""

    def call(self: Any, *args: Any) -> None:
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
        own: Sequence[Any] | None = None,
    ) -> None:
        others = own or [None] * len(layouts)
        pairs = zip(layouts, others, strict=True)
        super().__init__([_layer(layout, max_cache_len, other) for layout, other in pairs])

    @classmethod
    def of(cls, model: PreTrainedModel, max_cache_len: int | None = None) -> HybridCache:
        """Make an empty cache for a model in search or deploy mode."""
        own = DynamicCache(config=model.config).layers
        return cls(layouts_of(model), max_cache_len, own)

    @property
    def max_cache_len(self) -> int:
        """transformers' name before 5.20, which PEFT's prefix tuning still reads; -1: no limit."""
        return int(self.get_max_length())

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
            if not isinstance(layer, LinearAttentionLayer):
                continue
            if not layer.record_past:
                LinearAttentionLayer.crop(layer, tokens_to_remove)  # raises, and changes nothing
            if tokens_to_remove and any(layer.is_recurrent_states_initialized.values()):
                raise RuntimeError(
                    "tokens cannot be taken back from recurrent states: pass the text again with "
                    "a new cache"
                )
        super().crop(tokens_to_remove)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row `repeats` times, consecutively."""
        held = next(held for layer in self.layers for held in getattr(layer, "held", ()))
        rows = torch.arange(held.keys.shape[0])
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


def _reorder_adapters(hybrid: HybridModelMixin, weights: dict[str, Tensor], *others: Any) -> None:
    """Hook of `load_state_dict`: give LoRA adapters of the base model the hybrid's order of heads.

    PEFT's configuration names the model that an adapter was trained on. The hybrid's name replaces
    it, since the adapter, saved again, is the hybrid's. ValueError for other kinds of adapters in
    attention, and for adapters of an unknown model.
    """
    configs: Mapping[str, Any] = getattr(hybrid, "peft_config", {})
    foreign = {name for name, config in configs.items() if not _is_of_hybrid(config, hybrid)}
    if not foreign:
        return
    table = hybrid.config.hybrid_attention
    orders = dict(zip(table["layers"], map(deploy_order, table["windows"]), strict=True))
    linear = "|".join(re.escape(name.removesuffix(".weight")) for name in table["weights"])
    inside = re.compile(rf"(?:^|\.)layers\.(\d+)\.({linear})\.(.+)$")
    moved = set()
    for name, weight in weights.items():
        place = inside.search(name)
        if place is None or int(place[1]) not in orders:
            continue
        kind, *rest = place[3].split(".")
        adapter = next((part for part in rest if part in foreign), None)
        if adapter is None:
            continue
        if kind not in ("lora_A", "lora_B", "lora_magnitude_vector"):
            raise ValueError(
                f"{name}: an adapter of this kind was trained on another order of heads; train it "
                "on the hybrid, or merge it into the base model before materialize"
            )
        moved.add(adapter)
        axis, sizes = table["weights"][f"{place[2]}.weight"]
        if (kind == "lora_A") is (axis == 1):
            weights[name] = reorder_weight(weight, axis, sizes, orders[int(place[1])])
    for adapter in moved:
        configs[adapter].base_model_name_or_path = hybrid.config.name_or_path


def _is_of_hybrid(adapter: Any, hybrid: PreTrainedModel) -> bool:
    """Whether an adapter was trained on the hybrid, and not on its base model."""
    trained_on = adapter.base_model_name_or_path
    if (trained_on or "") == hybrid.config.name_or_path:
        return True
    try:
        content, _ = PreTrainedConfig.get_config_dict(trained_on)
    except Exception as error:
        raise ValueError(
            f"an adapter was trained on {trained_on!r}, which cannot be read, so the order of its "
            "heads is not known; correct base_model_name_or_path in its adapter_config.json"
        ) from error
    return str(content.get("model_type")).startswith(PREFIX)


# ---- Configurations and models


def deploy_order(row: Sequence[int]) -> list[int]:
    """KV heads of a layer, from full to the narrowest window, else in the base model's order."""
    return sorted(range(len(row)), key=lambda head: -row[head] if row[head] else float("-inf"))


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


class HybridConfigMixin:
    """Adds `hybrid_attention` to the configuration class of a family, and saves this file with it.

    A last line in the copy of this file makes the family's classes, which the configuration names.
    """

    def save_pretrained(self, save_directory: str | Path, *args: Any, **kwargs: Any) -> Any:
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
        return super().save_pretrained(save_directory, *args, **kwargs)  # type: ignore[misc]

    def __reduce__(self) -> tuple[Any, ...]:
        model_type = type(self).model_type  # type: ignore[attr-defined]
        return _empty, (model_type, 0), self.__dict__


def _empty(model_type: str, kind: int) -> Any:
    """For unpickling: an object of a family's class, which may not exist yet in this process."""
    found = hybrid_classes(model_type.removeprefix(PREFIX))[kind]
    return found.__new__(found)


class HybridModelMixin(PreTrainedModel):
    """Adds layouts, a backend and a cache to the model class of a family."""

    _kind: int  # the place in `hybrid_classes`

    def __init__(self, config: PreTrainedConfig, *args: Any, **kwargs: Any) -> None:
        layouts = deploy_layouts(config)
        super().__init__(config, *args, **kwargs)
        decoder: Any = self.get_decoder()
        if text_config(config) is not config:  # the text config has its own implementation
            decoder.set_attn_implementation(NAME)
        set_layouts(self, layouts, self._hybrid_backend)
        self.register_load_state_dict_pre_hook(_reorder_adapters)
        # At the decoder, since libraries replace the `forward` of the whole model.
        prepare = functools.partial(_prepare_pass, config.hybrid_attention["mixes_documents"])
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

    def add_adapter(self, adapter_config: Any, *args: Any, **kwargs: Any) -> None:
        """transformers' method; the adapter is the hybrid's own."""
        if adapter_config.base_model_name_or_path is None:
            adapter_config.base_model_name_or_path = self.config.name_or_path
        super().add_adapter(adapter_config, *args, **kwargs)

    def load_adapter(self, *args: Any, **kwargs: Any) -> Any:
        """transformers' method, which does not call `load_state_dict`."""
        result = super().load_adapter(*args, **kwargs)
        loaded = {name: weight.data for name, weight in self.named_parameters()}
        ordered = dict(loaded)
        _reorder_adapters(self, ordered)
        for name, weight in loaded.items():
            weight.copy_(ordered[name])
        return result

    @classmethod
    def prepare_distribute_model(cls, distributed_config: Any, *args: Any, **kwargs: Any) -> Any:
        """Refuse to split heads or layers: layouts have all heads of a layer, caches all layers."""
        if isinstance(distributed_config, dict):
            distributed_config = DistributedConfig.from_dict(distributed_config)
        if distributed_config.tp_size > 1 or distributed_config.pp_size > 1:
            raise ValueError(
                "tp_plan, tp_size, distributed_config: a hybrid's heads and layers cannot be split "
                "over processes by transformers; serve it with vLLM's --tensor-parallel-size, or "
                "load it with device_map"
            )
        return super().prepare_distribute_model(distributed_config, *args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return _empty, (self.config.model_type, self._kind), self.__dict__

    @classmethod
    def is_custom_code(cls) -> bool:
        """False, or transformers skips modules without parameters, whose buffers no file has."""
        return False

    def _check_and_adjust_attn_implementation(
        self, attn_implementation: str | None, *args: Any, **kwargs: Any
    ) -> str:
        """Every implementation that is requested means the hybrid attention with that backend."""
        known = attn_implementation is None or isinstance(attn_implementation, str)
        if not known or attn_implementation not in BACKEND_OF:
            raise ValueError(
                f"attn_implementation='{attn_implementation}' has no hybrid form: choose one of "
                f"{', '.join(name for name in BACKEND_OF if name)}"
            )
        register_attention()
        self._hybrid_backend = BACKEND_OF[attn_implementation]
        return NAME

    def set_attn_implementation(self, attn_implementation: Any, *args: Any, **kwargs: Any) -> None:
        """Choose the backend of the hybrid attention."""
        self._check_and_adjust_attn_implementation(attn_implementation)
        set_layouts(self, layouts_of(self), self._hybrid_backend)

    def new_cache(self) -> HybridCache:
        return HybridCache.of(self)

    def new_static_cache(self, max_cache_len: int) -> HybridCache:
        """An empty cache of fixed size for `max_cache_len` tokens, with which decoding compiles."""
        return HybridCache.of(self, max_cache_len)

    def _prepare_cache_for_generation(
        self,
        generation_config: GenerationConfig,
        model_kwargs: dict[str, Any],
        generation_mode: Any,
        batch_size: int,
        max_cache_length: int,
    ) -> None:
        user_cache = model_kwargs.get(CACHE_NAME)
        if user_cache is not None or generation_config.use_cache is False:
            if user_cache is not None:
                adopt_cache(self, user_cache)
            super()._prepare_cache_for_generation(
                generation_config, model_kwargs, generation_mode, batch_size, max_cache_length
            )
            return
        if generation_config.cache_implementation == "static":
            cache = self._static_cache(generation_config, batch_size, max_cache_length)
        elif generation_config.cache_implementation in (None, "dynamic"):
            cache = self.new_cache()
            if generation_config.is_assistant:
                cache.activate_past_recording()
        else:
            raise ValueError(
                f"cache_implementation='{generation_config.cache_implementation}' has no hybrid "
                "form: choose dynamic or static"
            )
        model_kwargs[CACHE_NAME] = cache

    def _static_cache(
        self, generation_config: GenerationConfig, batch_size: int, max_cache_length: int
    ) -> HybridCache:
        """A static cache as large as the largest so far, as in transformers: no recompilation."""
        configured = getattr(generation_config, "max_cache_len", None) or 0
        self._static_length = max(max_cache_length, configured, getattr(self, "_static_length", 0))
        cache = self.new_static_cache(self._static_length)
        modules = hybrid_modules(self)
        devices = {next(module.parameters()).device for module in modules if module is not None}
        if generation_config.prefill_chunk_size is not None and len(devices) == 1:
            # Chunks of a prompt are compiled, too, and compiled code must not allocate the cache.
            copies = max(generation_config.num_beams, generation_config.num_return_sequences)
            cache.early_initialization(
                batch_size=batch_size * copies,
                num_heads=[x.num_key_value_heads if x else 0 for x in layouts_of(self)],
                head_dim=[getattr(module, "head_dim", 0) for module in modules],
                dtype=self.dtype,
                device=self.device,
            )
        return cache

    create_masks_for_generate = staticmethod(masks_for_generate)


def check_weights(model: PreTrainedModel, info: Mapping[str, Any]) -> None:
    """Raise ValueError if loading left weights random, or did not use weights of the files.

    `info` is transformers' loading info. A bare decoder does not use the model's head.
    """
    where = model.config.name_or_path
    missing = {*info["missing_keys"], *(str(key[0]) for key in info["mismatched_keys"])}
    if missing:
        raise ValueError(
            f"{where}: {len(missing)} weights are missing or of another shape than config.json's, "
            f"{min(missing)} first; get the model again"
        )
    unexpected = set(info["unexpected_keys"])
    if model.base_model is model:
        prefix = f"{model.base_model_prefix}."
        unexpected = {name for name in unexpected if name.startswith((prefix, "layers."))}
    if unexpected:
        raise ValueError(
            f"{where}: {len(unexpected)} weights of the files have no place in the model of "
            f"config.json, {min(unexpected)} first; get the model again"
        )


def adopt_cache(model: PreTrainedModel, cache: Cache) -> None:
    """Replace the layers of an empty transformers cache, so that sliding heads save memory.

    A cache that already holds states, quantises or offloads them is not changed. It is exact, but
    its sliding heads hold every token, and a warning says so.
    """
    layers: list[Any] | None = getattr(cache, "layers", None)
    if layers is None or any(isinstance(layer, HeadGroupsLayer) for layer in layers):
        return
    # Every model has a layer with attention, which holds keys after any pass.
    started = any(getattr(layer, "keys", None) is not None for layer in layers)
    # Layers are cut to their windows, and sinks written, after attention. By then an offloaded
    # layer has left the device, perhaps in an incomplete copy.
    if started or not isinstance(cache, DynamicCache | StaticCache) or cache.offloading:
        logger.warning_once(
            f"A {type(cache).__name__} that holds, quantises or offloads states cannot take the "
            "form of a hybrid model: its sliding heads keep all tokens and save no memory; pass "
            "model.new_cache() or an empty DynamicCache"
        )
        return
    new = HybridCache.of(model, _cache_room(cache) if isinstance(cache, StaticCache) else None)
    if any(getattr(layer, "record_past", False) for layer in layers):
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
    mixes: bool, decoder: PreTrainedModel, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[()], dict[str, Any]]:
    """Arguments of a decoder's pass, with a hybrid cache if the pass would make a cache.

    Raises ValueError for packed documents that this pass would not separate: transformers finds
    their borders in position_ids only without a cache, and in some families never (`mixes`). If
    `use_cache` is not passed, such a pass makes no cache.
    """
    decoder_class: Any = type(decoder)
    kwargs = dict(zip(_parameters(decoder_class), args, strict=False)) | kwargs
    old = kwargs.pop("past_key_values", None)  # transformers 5.24 renames it after this hook
    if old is not None and kwargs.get(CACHE_NAME) is None:
        kwargs[CACHE_NAME] = old
    if kwargs.get("output_attentions"):
        for module in filter(None, hybrid_modules(decoder)):
            check_shows_weights(required_state(module))
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


@functools.cache
def _parameters(decoder_class: Any) -> tuple[str, ...]:
    """Names of the parameters of a decoder's `forward`, in order."""
    return tuple(inspect.signature(decoder_class.forward).parameters)[1:]


def takes_more_than_text(model_type: str) -> bool:
    """Whether models of a type have a text decoder as one of their parts."""
    return "text_config" in CONFIG_MAPPING[model_type].sub_configs


@functools.cache
def hybrid_classes(model_type: str) -> tuple[Any, Any, Any]:
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
