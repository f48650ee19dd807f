"""Attention that mixes full heads and windows in one layer: the backends that run on a GPU only.

The others and what all share are in `bosch.hybrid`. All backends compute the same outputs and
gradients as `eager`. Shapes: B batch, T queries, Tk keys, HQ query heads, HKV KV heads, D head
dimension.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

import torch
from torch import Tensor

from bosch.attention.flex import flex_kernel_attention
from bosch.attention.varlen import varlen_attention
from bosch.backends import BACKENDS, WIDEST_HEAD, check_backend
from bosch.hybrid import (
    ATTENTION,
    BACKEND_OF,
    HALF_DTYPES,
    AttentionCall,
    AttentionContext,
    CachedStates,
    HeadLayout,
    LogitTransform,
    compute_attention,
    pass_context,
    sdpa_attention,
)


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


def _checked(attend: Callable[[AttentionCall], Tensor]) -> Callable[[AttentionCall], Tensor]:
    """`attend` for calls that its backend supports; sdpa over a cache, whose heads differ."""

    def checked(call: AttentionCall) -> Tensor:
        check_backend(call.backend, _needs(call))
        return sdpa_attention(call) if isinstance(call.key, CachedStates) else attend(call)

    return checked


def _needs(call: AttentionCall) -> dict[str, str]:
    """Abilities that a call needs of a backend, with the reasons, for `lacking`."""
    query, transform, needs = call.query, call.transform, {}
    if call.layout.sinks:
        needs["sinks"] = f"its layout has {call.layout.sinks}"
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


for _name, _attend in (("varlen", varlen_attention), ("flex", flex_kernel_attention)):
    ATTENTION[_name] = _checked(_attend)
    BACKEND_OF.update(dict.fromkeys((_name, *BACKENDS[_name].aliases), _name))
