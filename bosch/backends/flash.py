"""The kernels of the flash-attn package."""

from __future__ import annotations

import importlib.util

from bosch.backends import BackendEntry, has_gpu, register

register(
    "flash",
    BackendEntry(
        "bosch.attention.flash:flash_kernel_attention",
        "flash_attn",
        rank=10,
        aliases=("flash_attention_2",),
        usable=lambda: has_gpu() and importlib.util.find_spec("flash_attn") is not None,
        needs="a GPU and the flash-attn package",
        lacks=("sinks", "float32", "softcap", "head_logits", "wide_heads", "cpu"),
    ),
)
