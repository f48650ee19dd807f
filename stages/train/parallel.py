"""Processes and sharding; a sharding that would differ from the recipe's is refused."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any

import yaml

from bosch.errors import RunError, UserError
from stages.context import Runtime

_LAUNCH = Path(__file__).resolve().parents[2] / "launch"
FSDP_CONFIG = _LAUNCH / "accelerate" / "fsdp2.yaml"
DEEPSPEED_CONFIG = _LAUNCH / "deepspeed" / "zero3.json"


def world_size() -> int:
    """Processes of this run, from torchrun's environment."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def layout(runtime: Runtime) -> dict[str, object]:
    """What a restart point must share with the run that resumes from it."""
    return {"sharding": runtime.sharding, "processes": world_size()}


def check_sharding_possible(runtime: Runtime) -> None:
    """Refuse a sharding that cannot run here.

    Raises:
        UserError: DeepSpeed is not installed, or there is one process and nothing to shard over.
    """
    if runtime.sharding == "none":
        return
    if world_size() < 2:
        raise UserError(
            f"runtime.sharding = {runtime.sharding} needs at least two processes, and this run has "
            "one; set runtime.processes, or runtime.sharding = none"
        )
    if runtime.sharding == "deepspeed" and importlib.util.find_spec("deepspeed") is None:
        raise UserError(
            "runtime.sharding = deepspeed needs the package deepspeed, which is not installed; "
            "install it, or set runtime.sharding to fsdp or none"
        )


def sharding_arguments(runtime: Runtime) -> dict[str, Any]:
    """The TrainingArguments that say how the model is spread over processes."""
    if runtime.sharding == "fsdp":
        config = yaml.safe_load(FSDP_CONFIG.read_text(encoding="utf-8"))["fsdp_config"]
        # Without it the Trainer keeps whole gradients on every process between micro-batches.
        every_batch = {"gradient_accumulation_kwargs": {"sync_each_batch": True}}
        return {"fsdp": True, "fsdp_config": config, "accelerator_config": every_batch}
    if runtime.sharding == "deepspeed":
        return {"deepspeed": str(DEEPSPEED_CONFIG)}
    return {"ddp_find_unused_parameters": False, "ddp_broadcast_buffers": False}


def check_sharding_runs(model: Any, runtime: Runtime) -> None:
    """Make sure that `model`, as prepared for training, is spread as the recipe says.

    Raises:
        RunError: the model has another wrapper than the recipe says, or a parameter is not sharded.
    """
    actual = _actual_sharding(model)
    if actual != runtime.sharding:
        raise RunError(
            f"runtime.sharding = {runtime.sharding} is set, but the model would run with {actual}"
        )


def _actual_sharding(model: Any) -> str:
    import torch
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor
    from torch.nn.parallel import DistributedDataParallel

    if isinstance(model, FSDPModule):
        whole = [n for n, p in model.named_parameters() if not isinstance(p, DTensor)]
        return "fsdp" if not whole else f"fsdp with {whole[0]} not sharded"
    if type(model).__name__ == "DeepSpeedEngine":
        stage = model.zero_optimization_stage()
        if stage != 3:
            return f"deepspeed at ZeRO stage {stage}"
        sums = {model.get_data_types()[1], model.communication_data_type}
        return "deepspeed" if sums == {torch.float32} else f"deepspeed with sums in {sums}"
    distributed = isinstance(model, DistributedDataParallel)
    if distributed != (world_size() > 1):
        return f"{type(model).__name__} with {world_size()} processes"
    return "none"


def leave() -> None:
    """Leave the process group and forget accelerate's state, so that another stage can start."""
    import torch
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
