"""Abilities of the attention backends, and messages for those they lack. Needs no torch.

A backend is a file in this folder that registers its entry. Its function is in the same file, with
torch imported inside it, or in another file.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Literal, NamedTuple

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


class BackendEntry(NamedTuple):
    """Description of a backend.

    `function`: `module:name` of an `AttentionFunction`, which computes one layer's attention.
    `kernel`: part of the name of an operation that it always runs. `aliases`: its names in
    transformers. `usable`: whether it can run here; `needs`: the requirement, as text. `lacks`:
    keys of `_LACKS`. `rank`: order among the backends; the fastest one for a GPU has the lowest.
    """

    function: str
    kernel: str
    rank: int
    aliases: tuple[str, ...] = ()
    usable: Callable[[], bool] = lambda: True
    needs: str = ""
    lacks: tuple[str, ...] = ()


BACKENDS: dict[str, BackendEntry] = {}


def register(name: str, entry: BackendEntry) -> None:
    """Add a backend, in the order of ranks."""
    entries = sorted({**BACKENDS, name: entry}.items(), key=lambda item: item[1].rank)
    BACKENDS.clear()
    BACKENDS.update(entries)


def register_all(folders: Iterable[str]) -> None:
    """Import every file of these folders; each registers its backend."""
    for module in pkgutil.iter_modules(folders):
        importlib.import_module(f"{__name__}.{module.name}")


# A saved model's code file has all entries in one module, and no folder.
register_all(globals().get("__path__", ()))

if TYPE_CHECKING:
    BackendName = str
else:
    BackendName = Literal["auto", *BACKENDS]


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


def check_sinks(backend: str, sinks: int) -> None:
    """Raise UserError when sliding heads have sinks and the backend cannot compute them."""
    if sinks:
        check_backend(backend, {"sinks": f"its layout has {sinks}"})
