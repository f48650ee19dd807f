"""Triton's interpreter runs Liger's kernels on a CPU; what it does not know is replaced here."""

from __future__ import annotations

import importlib
import os
import pkgutil
from collections.abc import Callable
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported

import numpy as np
import pytest

pytest.importorskip("liger_kernel")
import triton
import triton.language as tl
from triton.runtime import interpreter

_convert = interpreter._implicit_cvt


def _converted(argument: Any) -> Any:
    """Compiled kernels get floats as scalars of float32, interpreted ones as Python's."""
    if isinstance(argument, float):
        value = interpreter.TensorHandle(np.array([argument], np.float32), tl.float32)
        return tl.tensor(value, tl.float32)
    return _convert(argument)


class _FirstSetting:
    """A kernel that would be tuned, with the first of its settings: tuning needs a GPU."""

    def __init__(self, kernel: Any, settings: dict[str, Any]) -> None:
        self.kernel, self.settings = kernel, settings

    def __getitem__(self, grid: Any) -> Callable[..., Any]:
        return lambda *values, **named: self.kernel[grid](*values, **self.settings | named)


interpreter._implicit_cvt = _converted
triton.autotune = lambda configs, **_: lambda kernel: _FirstSetting(kernel, configs[0].kwargs)

# Of CUDA's own library, which the interpreter does not call.
_REPLACED = {
    "rsqrt": lambda x: 1.0 / tl.sqrt(x),
    "tanh": lambda x: 2.0 * tl.sigmoid(2.0 * x) - 1.0,
}
for module in pkgutil.iter_modules(importlib.import_module("liger_kernel.ops").__path__):
    kernels = importlib.import_module(f"liger_kernel.ops.{module.name}")
    for name, function in _REPLACED.items():
        if hasattr(kernels, name):
            setattr(kernels, name, function)
