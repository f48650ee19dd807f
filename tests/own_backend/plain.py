"""A backend of one file beside those of the project: the reference under another name."""

from __future__ import annotations

import importlib
from typing import Any

from bosch.backends import BackendEntry, register


def attention(
    query: Any, key: Any, value: Any, layout: Any, context: Any, transform: Any, dropout: float
) -> Any:
    """One layer's attention; torch is imported when it is called for."""
    eager = importlib.import_module("bosch.attention.eager")
    return eager.eager_attention(query, key, value, layout, context, transform, dropout)


register("plain", BackendEntry(f"{__name__}:attention", "softmax", 20, lacks=("sinks", "kept")))
