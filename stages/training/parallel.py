"""Processes and sharding: what was asked for is what runs, or nothing does."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any

import yaml

from bosch.errors import RunError, UserError
from stages.configs import Runtime

_LAUNCH = Path(__file__).resolve().parents[2] / "launch"
FSDP_CONFIG = _LAUNCH / "accelerate" / "fsdp2.yaml"
DEEPSPEED_CONFIG = _LAUNCH / "deepspeed" / "zero3.json"


def world_size() -> int:
    """Processes of this run, from torchrun's environment."""
    return int(os.environ.get("WORLD_SIZE", "1"))


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
    """The part of TrainingArguments that says how the model is spread over processes."""
    if runtime.sharding == "fsdp":
        config = yaml.safe_load(FSDP_CONFIG.read_text(encoding="utf-8"))["fsdp_config"]
        return {"fsdp": True, "fsdp_config": config}
    if runtime.sharding == "deepspeed":
        return {"deepspeed": str(DEEPSPEED_CONFIG)}
    return {"ddp_find_unused_parameters": False, "ddp_broadcast_buffers": False}


def check_sharding_runs(model: Any, runtime: Runtime) -> None:
    """Make sure that `model`, as prepared for training, is spread as the recipe says.

    Raises:
        RunError: another wrapper than the one asked for is in place, or a parameter is whole.
    """
    found = _found_sharding(model)
    if found != runtime.sharding:
        raise RunError(f"runtime.sharding = {runtime.sharding} was asked for and {found} would run")


def _found_sharding(model: Any) -> str:
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor
    from torch.nn.parallel import DistributedDataParallel

    if isinstance(model, FSDPModule):
        whole = [n for n, p in model.named_parameters() if not isinstance(p, DTensor)]
        return "fsdp" if not whole else f"fsdp with {whole[0]} not sharded"
    if type(model).__name__ == "DeepSpeedEngine":
        stage = model.zero_optimization_stage()
        return "deepspeed" if stage == 3 else f"deepspeed at ZeRO stage {stage}"
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
