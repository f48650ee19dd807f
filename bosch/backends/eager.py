"""Attention as it is written down: the reference that the other backends are compared with."""

from __future__ import annotations

from bosch.backends import BackendEntry, register

register(
    "eager",
    BackendEntry("bosch.attention.eager:eager_attention", "softmax", 0, lacks=("saved_outputs",)),
)
