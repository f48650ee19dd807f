"""Settings of vLLM's CPU build: one process, a small cache, threads where the machine has room."""

from __future__ import annotations

import os

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
# The engine in the tests' own process, so that they can ask it for its cache.
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
