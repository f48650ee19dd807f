"""torch's fused kernels for full heads, bands for sliding ones: the default on every device."""

from __future__ import annotations

from bosch.backends import BackendEntry, register

register(
    "sdpa", BackendEntry("bosch.attention.sdpa:sdpa_attention", "_scaled_dot_product_", rank=1)
)
