"""Attention that mixes full heads and windows in one layer, and the backends that compute it.

Shapes: B batch, T queries, Tk keys, HQ query heads, HKV key/value heads, D head dimension.
All backends compute the same outputs and gradients as `eager`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import TypeAlias

import torch
from torch import Tensor

from bosch.attention.call import AttentionCall
from bosch.attention.context import AttentionContext
from bosch.attention.eager import eager_attention, eager_weights
from bosch.attention.flex import flex_kernel_attention
from bosch.attention.kernels import HALF_DTYPES
from bosch.attention.layout import CachedStates, HeadGroup, HeadLayout
from bosch.attention.logit_transform import LogitTransform
from bosch.attention.sdpa import sdpa_attention
from bosch.attention.varlen import varlen_attention
from bosch.backends import BACKENDS, WIDEST_HEAD, check_backend, check_sinks, resolve_backend

__all__ = [
    "BACKENDS",
    "AttentionCall",
    "AttentionContext",
    "CachedStates",
    "HeadGroup",
    "HeadLayout",
    "LogitTransform",
    "attention_weights",
    "check_sinks",
    "compute_attention",
    "fastest_backend",
    "hybrid_attention",
    "pass_context",
    "resolve_backend",
]


# Computes one layer's attention: [B, T, HQ, D].
AttentionFunction: TypeAlias = Callable[[AttentionCall], Tensor]
_FUNCTIONS: dict[str, AttentionFunction] = {
    "eager": eager_attention,
    "sdpa": sdpa_attention,
    "varlen": varlen_attention,
    "flex": flex_kernel_attention,
}


def fastest_backend(
    dtype: torch.dtype,
    *,
    sinks: int = 0,
    dropout: float = 0.0,
    needs: Collection[str] = (),
    chunks: bool = False,
    saved_outputs: bool = False,
) -> str:
    """Name of the fastest backend for whole sequences on this machine; all compute the same.

    On a GPU the first of torch's varlen attention and flex that can run and supports the dtype,
    sinks, dropout, the model's `needs` (`bosch.model.families.attention_needs`), parts of sequences
    (`chunks`), and outputs that are saved while the rest of a layer is recomputed
    (`saved_outputs`). Otherwise sdpa.
    """
    requests = {
        "sinks": sinks > 0,
        "dropout": dropout > 0,
        "chunks": chunks,
        "saved_outputs": saved_outputs,
        "float32": dtype not in HALF_DTYPES,
    }
    needed = {*needs, *(ability for ability, is_needed in requests.items() if is_needed)}
    for name, entry in BACKENDS.items():
        if "cpu" in entry.lacks and not needed.intersection(entry.lacks) and entry.usable():
            return name
    return "sdpa"


def hybrid_attention(
    query: Tensor,
    key: Tensor | CachedStates,
    value: Tensor | CachedStates,
    layout: HeadLayout,
    context: AttentionContext | None = None,
    *,
    scaling: float | None = None,
    softcap: float | None = None,
    head_logits: Tensor | None = None,
    dropout: float = 0.0,
    backend: str = "sdpa",
) -> Tensor:
    """Causal attention in which each KV head of `layout` is full or has a window (BOSCH §2.1, B.2).

    query [B, HQ, T, D]; key, value [B, HKV, Tk, D] with Tk >= T, where the queries are the last T
    slots, or the states that a HybridCache returned. `context` describes padding, documents and the
    past; by default there is one document without padding. `scaling` defaults to D**-0.5;
    `softcap` and `head_logits` [HQ] are as in `LogitTransform`. Returns [B, T, HQ, D], contiguous.
    Raises ValueError when the heads do not fit the layout, and UserError for what the backend
    lacks: sinks, logit transforms, dropout, a dtype, wide heads.
    """
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    transform = LogitTransform(scale, softcap, head_logits)
    context = pass_context(context, query, key)
    call = AttentionCall(query, key, value, layout, context, transform, backend, dropout)
    return compute_attention(call)


def pass_context(
    context: AttentionContext | None, query: Tensor, key: Tensor | CachedStates
) -> AttentionContext:
    """The context of a pass on a layer's device; by default one document without padding."""
    if context is not None:
        return context.on(query.device)
    if isinstance(key, CachedStates):
        raise ValueError("keys from a HybridCache need the context of the pass")
    return AttentionContext(query.shape[2], key.shape[2] - query.shape[2])


def compute_attention(call: AttentionCall) -> Tensor:
    """Attention of a call; raises as `hybrid_attention`."""
    key, heads = call.key, call.layout.num_key_value_heads
    key_heads = heads if isinstance(key, CachedStates) else key.shape[1]
    if key_heads != heads or call.query.shape[1] % heads:
        raise ValueError(
            f"the layout has {heads} KV heads, got {key_heads} with {call.query.shape[1]} query "
            "heads"
        )
    call = call.autocast()
    check_sinks(call.backend, call.layout.sinks)
    if needs := _needs(call):
        check_backend(call.backend, needs)
    # A cache holds different tokens for each head; sdpa replaces a backend that cannot read it.
    cannot_read = isinstance(key, CachedStates) and "cache" in BACKENDS[call.backend].lacks
    return _FUNCTIONS["sdpa" if cannot_read else call.backend](call)


def _needs(call: AttentionCall) -> dict[str, str]:
    """Abilities that a call needs of a backend, with the reasons, for `lacking`."""
    query, transform, needs = call.query, call.transform, {}
    if transform.softcap is not None:
        needs["softcap"] = "the model has"
    if transform.head_logits is not None:
        needs["head_logits"] = "the model has"
    if call.dropout:
        needs["dropout"] = f"the model's is {call.dropout}"
    if query.dtype not in HALF_DTYPES:
        needs["float32"] = f"the model's queries are {query.dtype}"
    if query.shape[-1] > WIDEST_HEAD:
        needs["wide_heads"] = f"the model's have {query.shape[-1]}"
    return needs


def attention_weights(call: AttentionCall) -> Tensor:
    """Attention weights of `hybrid_attention`, [B, HQ, T, Tk], before dropout."""
    call = call.autocast()
    return eager_weights(call._replace(value=call.key)).to(call.query.dtype)
