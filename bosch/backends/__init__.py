"""Capabilities of the attention backends, and messages for what they lack. Needs no torch.

A backend is a file in this folder that registers its entry. Its function stands there too, with
torch imported inside it, or in a file of its own.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Literal, NamedTuple

from bosch.errors import UserError

WIDEST_HEAD = 256  # dimensions that flash-attn's kernels take, and so torch's

# What a backend may lack: the rest of a message that begins with its name.
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


def _always() -> bool:
    return True


class BackendEntry(NamedTuple):
    """Description of a backend.

    `function`: `module:name` of what computes one layer's attention, an `AttentionFunction`.
    `kernel`: part of the name of an operation it cannot do without. `aliases`: what transformers
    calls it. `usable`: whether it can be used here, and `needs` what that takes. `lacks`: names of
    `_LACKS`. `rank`: its place among the others, the fastest of those for a GPU first.
    """

    function: str
    kernel: str
    rank: int
    aliases: tuple[str, ...] = ()
    usable: Callable[[], bool] = _always
    needs: str = ""
    lacks: tuple[str, ...] = ()


BACKENDS: dict[str, BackendEntry] = {}


def register(name: str, entry: BackendEntry) -> None:
    """Add a backend, in the order of ranks."""
    entries = sorted({**BACKENDS, name: entry}.items(), key=lambda item: item[1].rank)
    BACKENDS.clear()
    BACKENDS.update(entries)


def register_all(folders: Iterable[str]) -> None:
    """Import every file of these folders of the package: each registers its backend."""
    for module in pkgutil.iter_modules(folders):
        importlib.import_module(f"{__name__}.{module.name}")


# The file that a saved model carries holds the entries one after another, and no folder.
register_all(globals().get("__path__", ()))

if TYPE_CHECKING:
    BackendName = str
else:
    BackendName = Literal["auto", *BACKENDS]


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
    """The missing capabilities of a backend, a message each; "auto" lacks nothing.

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
    for message in lacking(backend, requests):
        raise UserError(f"{where}: {message}")


def check_sinks(backend: str, sinks: int) -> None:
    """Raise UserError when sliding heads have sinks and the backend cannot compute them."""
    if sinks:
        check_backend(backend, {"sinks": f"its layout has {sinks}"})
