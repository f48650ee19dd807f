"""The kernels of the flash-attn package."""

from __future__ import annotations

import importlib.util

from bosch.backends import BackendEntry, has_gpu, register


def _has_flash() -> bool:
    return has_gpu() and importlib.util.find_spec("flash_attn") is not None


register(
    "flash",
    BackendEntry(
        "bosch.attention.flash:flash_kernel_attention",
        "flash_attn",
        10,
        ("flash_attention_2",),
        _has_flash,
        "a GPU and the flash-attn package",
        lacks=("sinks", "float32", "softcap", "wide_heads", "cpu"),
    ),
)
