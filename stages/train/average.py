"""The mean of several checkpoints of one training, weight by weight."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from bosch.errors import RunError


def average_into(files: Sequence[Path], others: Sequence[Path]) -> None:
    """Replace the weights in `files` by their mean with those in `others`, in files of their names.

    `others` are model directories. All are checkpoints of one training, so their files hold the
    same tensors. Sums are float32, in the memory of one file; floating-point tensors alone are
    averaged.

    Raises:
        RunError: the files do not hold the same tensors.
    """
    for file in files:
        with safe_open(file, framework="pt") as opened:
            metadata = opened.metadata()
        own = load_file(file)
        sums = {name: value.float() for name, value in own.items() if value.is_floating_point()}
        for other in others:
            weights = load_file(other / file.name) if (other / file.name).is_file() else {}
            if weights.keys() != own.keys():
                raise RunError(f"{other / file.name}: holds other weights than {file}")
            for name, value in sums.items():
                value += weights[name].to(torch.float32)
        count = 1 + len(others)
        for name, value in sums.items():
            own[name] = (value / count).to(own[name].dtype)
        save_file(own, file, metadata=metadata)
