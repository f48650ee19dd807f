"""Which of torch's attention kernels may run; all fused calls in bosch go through here.

On a GPU, if no fused kernel supports the arguments (for example a mask together with grouped
heads), torch silently falls back to its math kernel, which stores all logits. Here that is an
error, and keys and values are repeated for the query heads to avoid it. Shapes: B batch, T queries,
Tk keys, HQ query heads, HKV key/value heads, D head dimension.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.backends.cuda import SDPAParams, can_use_flash_attention
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import CausalBias

from bosch.backends import WIDEST_HEAD

HALF_DTYPES = (torch.float16, torch.bfloat16)
# Kernels that never store the logits of all queries and keys, on a GPU.
FUSED_KERNELS = [
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
]
# Up to this number of logits the math kernel may run: few queries, or small models in tests.
SMALL_LOGITS = 2**24


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
    with _allowed_kernels(query, key):
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


@contextlib.contextmanager
def _allowed_kernels(query: Tensor, key: Tensor) -> Iterator[None]:
    logits = query.numel() // query.shape[-1] * key.shape[2]
    if not is_gpu(query) or logits <= SMALL_LOGITS or torch.compiler.is_compiling():
        yield
        return
    with sdpa_kernel(FUSED_KERNELS):
        yield
