"""Trains like `tests.training_case` and writes what each rank held: `measured.<rank>.json`.

python -m tests.measured_training CASE WORK '{"train": {...}, "runtime": {...}}'
"""

from __future__ import annotations

import gc
import json
import os
from typing import Any

import torch
from accelerate import Accelerator
from torch.distributed.tensor import DTensor

from stages.train.loop import Loop
from tests.training_case import main

_COLLECTED: dict[str, Any] = {"gradients": [], "layer_inputs": [], "layer_outputs": []}


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _live_tensors() -> list[torch.Tensor]:
    """Every tensor that Python's garbage collector knows."""
    return [one for one in gc.get_objects() if issubclass(type(one), torch.Tensor)]


def _bytes(tensors: list[torch.Tensor]) -> int:
    storages = {
        t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()
        for t in map(_local, tensors)
        if t.device.type != "meta" and t.untyped_storage().nbytes()
    }
    return sum(storages.values())


def gradient_bytes() -> int:
    """Bytes of gradients that wait for the optimiser, whole ones that FSDP sets aside included."""
    gradients = [t.grad for t in _live_tensors() if t.is_leaf and t.grad is not None]
    for one in gc.get_objects():
        if type(one).__name__ == "FSDPParam" and one.unsharded_accumulated_grad is not None:
            gradients.append(one.unsharded_accumulated_grad)
    return _bytes(gradients)


def _note_output(layer: Any, args: Any, output: torch.Tensor) -> None:
    _COLLECTED["layer_outputs"].append(str(output.dtype))


def _record_steps() -> None:
    loss_of, backward = Loop.loss_of, Accelerator.backward

    def measured_backward(self: Any, *args: Any, **kwargs: Any) -> None:
        backward(self, *args, **kwargs)
        _COLLECTED["gradients"].append(gradient_bytes())

    def measured_loss(self: Loop, batch: Any, predicted: int) -> Any:
        shape = (*batch["input_ids"].shape, self.unwrapped.config.hidden_size)
        saved: list[torch.Tensor] = []

        def note(tensor: torch.Tensor) -> torch.Tensor:
            if tuple(tensor.shape) == shape:
                saved.append(tensor)
            return tensor

        layers = self.unwrapped.get_decoder().layers
        hooks = [layer.register_forward_hook(_note_output) for layer in layers]
        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            result = loss_of(self, batch, predicted)
        for hook in hooks:
            hook.remove()
        _COLLECTED["layer_inputs"].append(_bytes(saved))
        return result

    Accelerator.backward = measured_backward
    Loop.loss_of = measured_loss  # type: ignore[method-assign]


if __name__ == "__main__":
    _record_steps()
    work_dir = main()
    rank = os.environ.get("RANK", "0")
    (work_dir / f"measured.{rank}.json").write_text(json.dumps(_COLLECTED))
