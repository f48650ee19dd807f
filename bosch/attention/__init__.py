"""Attention that mixes full and sliding heads in one layer, and the backends that compute it.

Shapes: B batch, T queries, Tk keys, HQ query heads, HKV key/value heads, D head dimension.
Every backend gives what `eager` gives, in outputs and gradients.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from bosch.attention.layout import CachedStates, HeadLayout
from bosch.attention.scores import Scores
from bosch.attention.span import Span
from bosch.errors import UserError

__all__ = [
    "BACKENDS",
    "CachedStates",
    "HeadLayout",
    "Span",
    "check_sinks",
    "hybrid_attention",
    "resolve_backend",
]


class Backend(Protocol):
    """What computes one layer's attention: [B, T, HQ, D]."""

    def __call__(
        self,
        query: Tensor,
        key: Tensor | CachedStates,
        value: Tensor | CachedStates,
        layout: HeadLayout,
        span: Span,
        scores: Scores,
        dropout: float = 0.0,
    ) -> Tensor: ...


class BackendEntry(NamedTuple):
    """How a backend is loaded, on first use, whether it can be used here, and what it lacks.

    `needs` says what must be there for it to be usable.
    """

    load: Callable[[], Backend]
    usable: Callable[[], bool]
    needs: str = ""
    has_sinks: bool = True
    only_plain_scores: bool = False


def _load_eager() -> Backend:
    from bosch.attention.eager import eager_attention

    return eager_attention


def _load_sdpa() -> Backend:
    from bosch.attention.sdpa import sdpa_attention

    return sdpa_attention


def _load_flex() -> Backend:
    from bosch.attention.flex import flex_kernel_attention

    return flex_kernel_attention


def _load_flash() -> Backend:
    from bosch.attention.flash import flash_kernel_attention

    return flash_kernel_attention


def _always() -> bool:
    return True


def _has_flash() -> bool:
    return torch.cuda.is_available() and importlib.util.find_spec("flash_attn") is not None


BACKENDS: dict[str, BackendEntry] = {
    "eager": BackendEntry(_load_eager, _always),
    "sdpa": BackendEntry(_load_sdpa, _always),
    "flex": BackendEntry(_load_flex, torch.cuda.is_available, "a GPU", only_plain_scores=True),
    "flash": BackendEntry(
        _load_flash,
        _has_flash,
        "a GPU and the flash-attn package",
        has_sinks=False,
        only_plain_scores=True,
    ),
}


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


def check_sinks(backend: str, sinks: int) -> None:
    """Raise UserError when sliding heads have sinks and the backend cannot compute them."""
    if sinks and not BACKENDS[backend].has_sinks:
        able = ", ".join(name for name, entry in BACKENDS.items() if entry.has_sinks)
        raise UserError(
            f"attention backend '{backend}' has no sinks, {sinks} are asked for: set sinks to 0 or "
            f"choose one of {able}"
        )


def hybrid_attention(
    query: Tensor,
    key: Tensor | CachedStates,
    value: Tensor | CachedStates,
    layout: HeadLayout,
    span: Span | None = None,
    *,
    scaling: float | None = None,
    softcap: float | None = None,
    head_logits: Tensor | None = None,
    dropout: float = 0.0,
    backend: str = "sdpa",
) -> Tensor:
    """Causal attention in which each KV head of `layout` is full or sliding (BOSCH §2.1, B.2).

    query [B, HQ, T, D]; key, value [B, HKV, Tk, D] with Tk >= T, the queries being the last T
    slots, or what a HybridCache returned. `span` describes padding, documents and the past; by
    default there is neither padding nor more than one document. `scaling` defaults to D**-0.5;
    `softcap` and `head_logits` [HQ] are as in `Scores`.

    Returns [B, T, HQ, D], contiguous. Raises ValueError when the heads do not fit the layout, and
    UserError for sinks or scores that the backend does not have.
    """
    if span is None:
        if isinstance(key, CachedStates):
            raise ValueError("keys from a HybridCache need the span of the pass")
        span = Span(query.shape[2], key.shape[2] - query.shape[2])
    heads = layout.num_key_value_heads
    found = heads if isinstance(key, CachedStates) else key.shape[1]
    if found != heads or query.shape[1] % heads:
        raise ValueError(
            f"the layout has {heads} KV heads, got {found} with {query.shape[1]} query heads"
        )
    if layout.sliding:
        check_sinks(backend, layout.sinks)
    query, key, value = _autocast(query, key, value)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    scores = Scores(scale, softcap, head_logits)
    if BACKENDS[backend].only_plain_scores and not scores.is_plain:
        raise UserError(
            f"the {backend} backend caps no attention scores and adds no logits to them, as this "
            "model does: choose sdpa"
        )
    return BACKENDS[backend].load()(query, key, value, layout, span, scores, dropout)


def _autocast(query: Tensor, *states: Any) -> tuple[Any, ...]:
    """Under autocast, all three in its dtype: norms leave queries and keys in float32.

    torch would do the same inside its own attention call, but on the bands, which overlap.
    """
    device = query.device.type
    if not torch.is_autocast_enabled(device):
        return query, *states
    dtype = torch.get_autocast_dtype(device)
    return query.to(dtype), *(x.to(dtype) for x in states)
