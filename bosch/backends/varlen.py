"""The kernel of flash-attn that comes with torch, for whole sequences."""

from __future__ import annotations

import importlib
import importlib.util
import inspect

from bosch.backends import BackendEntry, has_gpu, register

VARLEN_MODULE = "torch.nn.attention.varlen"
_VARLEN_OPTIONS = {"scale", "window_size", "enable_gqa"}  # added after the function itself


def _has_varlen() -> bool:
    if not has_gpu() or importlib.util.find_spec(VARLEN_MODULE) is None:
        return False
    function = importlib.import_module(VARLEN_MODULE).varlen_attn
    return set(inspect.signature(function).parameters) >= _VARLEN_OPTIONS


register(
    "varlen",
    BackendEntry(
        "bosch.attention.varlen:varlen_attention",
        "varlen_attn",
        rank=11,
        usable=_has_varlen,
        needs="a GPU and a torch with windows in torch.nn.attention.varlen",
        lacks=(
            "sinks", "float32", "dropout", "softcap", "head_logits", "wide_heads", "cache",
            "chunks", "cpu",
        ),
    ),
)  # fmt: skip
