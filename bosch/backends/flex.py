"""torch's FlexAttention: one compiled kernel for both kinds of heads."""

from __future__ import annotations

from bosch.backends import BackendEntry, has_gpu, register

register(
    "flex",
    BackendEntry(
        "bosch.attention.flex:flex_kernel_attention",
        "flex_attention",
        12,
        ("flex_attention",),
        has_gpu,
        "a GPU",
        lacks=("dropout", "softcap", "cache", "saved_outputs", "cpu"),
    ),
)
