"""Attention that mixes full and sliding heads in one layer, and the backends that compute it.

Shapes: B batch, T queries, Tk keys, HQ query heads, HKV key/value heads, D head dimension.
Every backend gives what `eager` gives, in outputs and gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from bosch.attention.context import AttentionContext
from bosch.attention.eager import eager_attention, eager_weights
from bosch.attention.flash import flash_is_usable, flash_kernel_attention
from bosch.attention.flex import flex_kernel_attention
from bosch.attention.layout import CachedStates, HeadLayout
from bosch.attention.logit_transform import LogitTransform
from bosch.attention.sdpa import sdpa_attention
from bosch.attention.varlen import varlen_attention, varlen_is_usable
from bosch.errors import UserError

__all__ = [
    "BACKENDS",
    "AttentionContext",
    "CachedStates",
    "HeadLayout",
    "LogitTransform",
    "attention_weights",
    "check_sinks",
    "fastest_backend",
    "hybrid_attention",
    "resolve_backend",
]


class Backend(Protocol):
    """A function that computes one layer's attention: [B, T, HQ, D]."""

    def __call__(
        self,
        query: Tensor,
        key: Tensor | CachedStates,
        value: Tensor | CachedStates,
        layout: HeadLayout,
        context: AttentionContext,
        transform: LogitTransform,
        dropout: float = 0.0,
    ) -> Tensor: ...


def _always() -> bool:
    return True


class BackendEntry(NamedTuple):
    """A backend, whether it can be used here, and what it lacks; `needs` says what it needs."""

    attend: Backend
    usable: Callable[[], bool] = _always
    needs: str = ""
    has_sinks: bool = True
    only_plain_logits: bool = False
    only_half: bool = False  # float16 and bfloat16
    has_dropout: bool = True


BACKENDS: dict[str, BackendEntry] = {
    "eager": BackendEntry(eager_attention),
    "sdpa": BackendEntry(sdpa_attention),
    "flex": BackendEntry(
        flex_kernel_attention,
        torch.cuda.is_available,
        "a GPU",
        only_plain_logits=True,
        has_dropout=False,
    ),
    "flash": BackendEntry(
        flash_kernel_attention,
        flash_is_usable,
        "a GPU and the flash-attn package",
        has_sinks=False,
        only_plain_logits=True,
        only_half=True,
    ),
    "varlen": BackendEntry(
        varlen_attention,
        varlen_is_usable,
        "a GPU and a torch with windows in torch.nn.attention.varlen",
        has_sinks=False,
        only_plain_logits=True,
        only_half=True,
        has_dropout=False,
    ),
}
# For whole sequences on a GPU, the fastest first.
_BY_SPEED = ("flash", "varlen", "flex")


def resolve_backend(name: str = "auto") -> str:
    """Name of the backend to use: `name` itself, or sdpa for "auto".

    Raises UserError when `name` is unknown or what it needs is not installed; never another one.
    """
    if name == "auto":
        return "sdpa"
    if name not in BACKENDS:
        known = ", ".join(["auto", *BACKENDS])
        raise UserError(f"attention backend '{name}' is unknown: choose one of {known}")
    if not BACKENDS[name].usable():
        raise UserError(
            f"attention backend '{name}' cannot be used here: it needs {BACKENDS[name].needs}; "
            "choose auto"
        )
    return name


def fastest_backend(
    dtype: torch.dtype, *, sinks: int = 0, dropout: float = 0.0, plain_logits: bool = True
) -> str:
    """Name of the backend that computes whole sequences fastest here, exactly as the others do.

    On a GPU: flash-attn, torch's varlen attention, flex, whichever of them is there and has the
    dtype that attention is computed in, sinks, dropout and the model's logits. Else sdpa.
    """
    if not torch.cuda.is_available():
        return "sdpa"
    for name in _BY_SPEED:
        entry = BACKENDS[name]
        lacks = (
            (sinks and not entry.has_sinks)
            or (dropout and not entry.has_dropout)
            or (entry.only_plain_logits and not plain_logits)
            or (entry.only_half and dtype not in (torch.float16, torch.bfloat16))
        )
        if not lacks and entry.usable():
            return name
    return "sdpa"


def check_sinks(backend: str, sinks: int) -> None:
    """Raise UserError when sliding heads have sinks and the backend cannot compute them."""
    if sinks and not BACKENDS[backend].has_sinks:
        able = ", ".join(name for name, entry in BACKENDS.items() if entry.has_sinks)
        raise UserError(
            f"attention backend '{backend}' has no sinks, expected 0 and got {sinks}: set sinks to "
            f"0 or choose one of {able}"
        )


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
    """Causal attention in which each KV head of `layout` is full or sliding (BOSCH §2.1, B.2).

    query [B, HQ, T, D]; key, value [B, HKV, Tk, D] with Tk >= T, the queries being the last T
    slots, or what a HybridCache returned. `context` describes padding, documents and the past; by
    default there is neither padding nor more than one document. `scaling` defaults to D**-0.5;
    `softcap` and `head_logits` [HQ] are as in `LogitTransform`.

    Returns [B, T, HQ, D], contiguous. Raises ValueError when the heads do not fit the layout, and
    UserError for sinks or logit transforms that the backend does not have.
    """
    if context is None:
        if isinstance(key, CachedStates):
            raise ValueError("keys from a HybridCache need the context of the pass")
        context = AttentionContext(query.shape[2], key.shape[2] - query.shape[2])
    heads = layout.num_key_value_heads
    key_heads = heads if isinstance(key, CachedStates) else key.shape[1]
    if key_heads != heads or query.shape[1] % heads:
        raise ValueError(
            f"the layout has {heads} KV heads, got {key_heads} with {query.shape[1]} query heads"
        )
    if layout.sliding:
        check_sinks(backend, layout.window.sinks)
    query, key, value = _autocast(query, key, value)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    transform = LogitTransform(scale, softcap, head_logits)
    if BACKENDS[backend].only_plain_logits and not transform.is_plain:
        raise UserError(
            f"the {backend} backend has no soft-capping and no extra logit per head, which this "
            "model has: choose sdpa"
        )
    return BACKENDS[backend].attend(query, key, value, layout, context, transform, dropout)


def attention_weights(
    query: Tensor,
    key: Tensor | CachedStates,
    layout: HeadLayout,
    context: AttentionContext,
    transform: LogitTransform,
) -> Tensor:
    """Weights by which `hybrid_attention` sums the values, [B, HQ, T, Tk], before dropout."""
    query, key = _autocast(query, key)
    return eager_weights(query, key, layout, context, transform).to(query.dtype)


def _autocast(query: Tensor, *states: Any) -> tuple[Any, ...]:
    """Under autocast, all three in its dtype: norms leave queries and keys in float32.

    torch would do the same inside its own attention call, but on the bands, which overlap.
    """
    device = query.device.type
    if not torch.is_autocast_enabled(device):
        return query, *states
    dtype = torch.get_autocast_dtype(device)
    return query.to(dtype), *(x.to(dtype) for x in states)
