"""torch's FlexAttention: one compiled kernel for full and sliding heads."""

from __future__ import annotations

from bosch.backends import BackendEntry, has_gpu, register

register(
    "flex",
    BackendEntry(
        "bosch.attention.flex:flex_kernel_attention",
        "flex_attention",
        rank=12,
        aliases=("flex_attention",),
        usable=has_gpu,
        needs="a GPU",
        # torch's blocks for heads of 512 dimensions take 263,168 bytes of shared memory; an H100
        # has 232,448 (https://github.com/NVIDIA-NeMo/Automodel/pull/3064).
        lacks=("dropout", "softcap", "wide_heads", "cache", "saved_outputs", "cpu"),
    ),
)
