"""Attention with torch's varlen attention: one call for each group of heads.

It comes with torch (torch.nn.attention.varlen) and runs the kernels of flash-attn on a GPU. Shapes:
B batch, T queries, HQ query heads, D head dimension. Each row, or each document of a row, is a
sequence; all sequences are packed into one, [B * T, HQ, D].
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor

from bosch.backends import VARLEN_MODULE
from bosch.hybrid import AttentionCall, AttentionContext, GroupCall, sdpa_attention

_CAUSAL = (-1, 0)


def varlen_attention(call: AttentionCall) -> Tensor:
    """Attention [B, T, HQ, D]; by sdpa for passes with a past or with padding before a token."""
    context = call.context
    whole = context.q_offset == 0 and context.start is None
    if not whole or context.valid is not None:
        return sdpa_attention(call)
    return call.by_group(_varlen)


def _varlen(group: GroupCall) -> Tensor:
    """Causal attention within each sequence, [B, HQ, T, D]."""
    query, key, scale = group.query, group.key, group.transform.scaling
    window = _CAUSAL if group.window is None else (group.window.past, 0)
    kernel: Any = importlib.import_module(VARLEN_MODULE).varlen_attn
    borders, longest = group.context.memo("varlen", lambda: _borders(group.context, query))
    q, k, v = (states.transpose(1, 2).flatten(0, 1) for states in (query, key, group.value))
    bounds, grouped = (borders, borders, longest, longest), query.shape[1] != key.shape[1]
    out = kernel(q, k, v, *bounds, scale=scale, window_size=window, enable_gqa=grouped)
    rows, heads, length, dim = query.shape
    return out.view(rows, length, heads, dim).transpose(1, 2)


def _borders(context: AttentionContext, query: Tensor) -> tuple[Tensor, int]:
    """Bounds of the sequences, int32 [sequences + 1], and the length of the longest."""
    if context.document is None:
        lengths = [context.q_length] * query.shape[0]
    else:
        starts = context.document_starts()
        counts = [torch.unique_consecutive(row, return_counts=True)[1] for row in starts]
        lengths = torch.cat(counts).tolist()
    sizes = torch.tensor([0, *lengths], device=query.device)
    return sizes.cumsum(0).to(torch.int32), max(lengths)
