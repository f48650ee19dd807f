"""What each attention backend can compute, and what to say where it cannot. Needs no torch.

A new backend is a file in `bosch/attention/` with its function, and its entry here.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from collections.abc import Callable, Mapping
from typing import Literal, NamedTuple

from bosch.errors import UserError

BackendName = Literal["auto", "eager", "sdpa", "flex", "flash", "varlen"]

# What a backend may lack: how a sentence goes on after its name.
_LACKS = {
    "sinks": "has no sinks",
    "float32": "computes in float16 and bfloat16",
    "dropout": "has no attention dropout",
    "logits": "has neither capped attention scores nor an extra logit per head",
    "cache": "computes no passes with a KV cache",
    "cpu": "runs on a GPU alone",
}

VARLEN_MODULE = "torch.nn.attention.varlen"
_VARLEN_OPTIONS = {"scale", "window_size", "enable_gqa"}  # later than the function itself


def has_gpu() -> bool:
    """Whether torch sees a CUDA GPU; imports torch."""
    return bool(importlib.import_module("torch").cuda.is_available())


def _has_flash() -> bool:
    return has_gpu() and importlib.util.find_spec("flash_attn") is not None


def _has_varlen() -> bool:
    if not has_gpu() or importlib.util.find_spec(VARLEN_MODULE) is None:
        return False
    function = importlib.import_module(VARLEN_MODULE).varlen_attn
    return set(inspect.signature(function).parameters) >= _VARLEN_OPTIONS


def _always() -> bool:
    return True


class BackendEntry(NamedTuple):
    """What a backend is.

    `kernel`: part of the name of an operation it cannot do without. `aliases`: what transformers
    calls it. `usable`: whether it can be used here, and `needs` what that takes. `lacks`: names of
    `_LACKS`.
    """

    kernel: str
    aliases: tuple[str, ...] = ()
    usable: Callable[[], bool] = _always
    needs: str = ""
    lacks: tuple[str, ...] = ()


BACKENDS: dict[str, BackendEntry] = {
    "eager": BackendEntry("softmax"),
    "sdpa": BackendEntry("_scaled_dot_product_"),
    # Those for whole sequences on a GPU, the fastest first.
    "flash": BackendEntry(
        "flash_attn",
        ("flash_attention_2",),
        _has_flash,
        "a GPU and the flash-attn package",
        lacks=("sinks", "float32", "logits", "cpu"),
    ),
    "varlen": BackendEntry(
        "varlen_attn",
        (),
        _has_varlen,
        "a GPU and a torch with windows in torch.nn.attention.varlen",
        lacks=("sinks", "float32", "dropout", "logits", "cache", "cpu"),
    ),
    "flex": BackendEntry(
        "flex_attention",
        ("flex_attention",),
        has_gpu,
        "a GPU",
        lacks=("dropout", "logits", "cache", "cpu"),
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


def lacking(backend: str, requests: Mapping[str, str]) -> list[str]:
    """What a backend lacks, a sentence each; "auto" lacks nothing.

    `requests` says for each ability, by its name in `_LACKS`, who asks for it: "the model has 2".
    """
    if backend == "auto":
        return []
    able = [  # eager is for comparisons
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
    """Raise UserError for the first thing that is requested and that a backend lacks."""
    for sentence in lacking(backend, requests):
        raise UserError(f"{where}: {sentence}")


def check_sinks(backend: str, sinks: int) -> None:
    """Raise UserError when sliding heads have sinks and the backend cannot compute them."""
    if sinks:
        check_backend(backend, {"sinks": f"its layout has {sinks}"})
