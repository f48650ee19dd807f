"""FSDP: a model is sharded before it has weights, so that no process holds all of them in float32.

The first process reads them, in the precision they were saved in, and sends one after the other.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from accelerate.utils import fsdp2_prepare_model
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor


def shard_and_fill(
    accelerator: Any, model: Any, weights: dict[str, Tensor], names: Callable[[str], str]
) -> None:
    """Shard `model`, whose parameters are on the meta device, and fill it with `weights`.

    Only the first process has `weights`, by what `names` makes of a parameter's name; they are
    taken out one by one.
    """
    fsdp2_prepare_model(accelerator, model)
    _fill(model, weights, accelerator.device, names)


def shard_teacher(teacher: Any, weights: dict[str, Tensor], device: torch.device) -> None:
    """As `shard_and_fill`, for a model that is only read: layer by layer, in its own precision."""
    teacher.tie_weights()  # one parameter for both tables, before it is sharded
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for layer in teacher.get_decoder().layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(teacher, mesh=mesh)
    _fill(teacher, weights, device, str)


def _fill(
    model: Any, weights: dict[str, Tensor], device: torch.device, names: Callable[[str], str]
) -> None:
    model._apply(lambda t: torch.empty_like(t, device=device) if t.is_meta else t.to(device))
    model.tie_weights()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if dist.get_rank() == 0:
                whole = weights.pop(names(name)).to(device, parameter.dtype)
            else:
                whole = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
            parameter.copy_(distribute_tensor(whole, parameter.device_mesh, parameter.placements))
    weights.clear()
