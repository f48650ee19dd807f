"""Abilities of the attention backends, and messages for those they lack. Needs no torch."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from collections.abc import Callable, Mapping
from typing import Literal, NamedTuple, get_args

from bosch.errors import UserError

WIDEST_HEAD = 256  # most dimensions of a head in flash-attn's and torch's kernels

# Abilities that a backend may lack, with the text that follows its name in the message.
_LACKS = {
    "sinks": "has no sinks",
    "float32": "computes in float16 and bfloat16",
    "dropout": "has no attention dropout",
    "softcap": "has no capped attention scores",
    "head_logits": "has no extra logit per head",
    "wide_heads": f"takes heads of {WIDEST_HEAD} dimensions at most",
    "cache": "computes no passes with a KV cache",
    "chunks": "computes whole sequences only",
    "saved_outputs": "has no kernel of its own whose outputs could be saved",
    "cpu": "runs on a GPU only",
}


def has_gpu() -> bool:
    """Whether torch sees a CUDA GPU; imports torch."""
    return bool(importlib.import_module("torch").cuda.is_available())


VARLEN_MODULE = "torch.nn.attention.varlen"
_VARLEN_OPTIONS = {"scale", "window_size", "enable_gqa"}  # added after the function itself


def _has_varlen() -> bool:
    if not has_gpu() or importlib.util.find_spec(VARLEN_MODULE) is None:
        return False
    function = importlib.import_module(VARLEN_MODULE).varlen_attn
    return set(inspect.signature(function).parameters) >= _VARLEN_OPTIONS


class BackendEntry(NamedTuple):
    """Description of a backend.

    `kernel`: part of the name of an operation that it always runs. `aliases`: its names in
    transformers. `usable`: whether it can run here; `needs`: the requirement, as text. `lacks`:
    keys of `_LACKS`.
    """

    kernel: str
    aliases: tuple[str, ...] = ()
    usable: Callable[[], bool] = lambda: True
    needs: str = ""
    lacks: tuple[str, ...] = ()


# Their functions are in `bosch.attention`. Of those for a GPU the fastest comes first.
BACKENDS = {
    # The reference for the others.
    "eager": BackendEntry("softmax", lacks=("saved_outputs",)),
    # torch's fused kernels for full heads, bands for sliding ones: the default on every device.
    "sdpa": BackendEntry("_scaled_dot_product_"),
    # The kernel of flash-attn that comes with torch, for whole sequences.
    "varlen": BackendEntry(
        "varlen_attn",
        aliases=("flash_attention_2",),
        usable=_has_varlen,
        needs="a GPU and a torch with windows in torch.nn.attention.varlen",
        lacks=(
            "sinks", "float32", "dropout", "softcap", "head_logits", "wide_heads", "cache",
            "chunks", "cpu",
        ),
    ),
    # torch's FlexAttention: one compiled kernel for full and sliding heads. Its blocks for heads of
    # 512 dimensions take 263,168 bytes of shared memory; an H100 has 232,448
    # (https://github.com/NVIDIA-NeMo/Automodel/pull/3064).
    "flex": BackendEntry(
        "flex_attention",
        aliases=("flex_attention",),
        usable=has_gpu,
        needs="a GPU",
        lacks=("dropout", "softcap", "wide_heads", "cache", "saved_outputs", "cpu"),
    ),
}  # fmt: skip
BackendName = Literal["auto", "eager", "sdpa", "varlen", "flex"]
assert get_args(BackendName) == ("auto", *BACKENDS)


def resolve_backend(name: str = "auto") -> str:
    """`name`, or sdpa for "auto"; raises UserError if it is unknown or cannot run (no fallback)."""
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


def lacking(backend: str, requests: Mapping[str, str]) -> list[str]:
    """Messages for the requested abilities that a backend lacks; "auto" lacks nothing.

    `requests` maps abilities, as named in `_LACKS`, to the reason, such as "the model has 2".
    """
    if backend == "auto":
        return []
    able = [  # eager is only for comparisons
        name
        for name, entry in BACKENDS.items()
        if name != "eager" and not requests.keys() & entry.lacks
    ]
    return [
        f"{backend} {_LACKS[ability]}, {request}; choose {' or '.join(able)}"
        for ability, request in requests.items()
        if ability in BACKENDS[backend].lacks
    ]


def check_backend(backend: str, requests: Mapping[str, str], where: str = "attention") -> None:
    """Raise UserError for the first requested ability that a backend lacks."""
    for message in lacking(backend, requests):
        raise UserError(f"{where}: {message}")
