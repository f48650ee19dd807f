"""Plain attention, the reference for the other backends."""

from __future__ import annotations

from bosch.backends import BackendEntry, register

register(
    "eager",
    BackendEntry(
        "bosch.attention.eager:eager_attention", "softmax", rank=0, lacks=("saved_outputs",)
    ),
)
