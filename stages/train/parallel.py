"""Processes and sharding; refuses a sharding that differs from the recipe's."""

from __future__ import annotations

import logging
import math
import warnings
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator, PartialState
from accelerate.parallelism_config import ParallelismConfig
from accelerate.state import AcceleratorState
from accelerate.utils import (
    DeepSpeedPlugin,
    DistributedDataParallelKwargs,
    DistributedType,
    FullyShardedDataParallelPlugin,
    GradientAccumulationPlugin,
)
from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy

from bosch.errors import RunError
from bosch.hardware import host_memory
from bosch.parallel.context import ContextParallel
from bosch.this_process import local_world_size, world_size
from stages.context import Runtime
from stages.train.schedule import Schedule
from stages.train.stage import TrainConfig
from stages.versions import require_package

# torch renamed `broadcast_buffers` in 2.13; accelerate still uses the old name.
warnings.filterwarnings("ignore", message="`broadcast_buffers` is deprecated")


def make_context_parallel(runtime: Runtime) -> ContextParallel | None:
    """The processes that share this one's sequences, adjacent in rank; None if there are none."""
    if runtime.context_parallel == 1:
        return None
    group, _ = dist.new_subgroups(
        runtime.context_parallel, timeout=timedelta(minutes=runtime.collective_timeout_minutes)
    )
    return ContextParallel(group)


def whole_weight(weight: Any) -> Tensor:
    """The whole weight, gathered if it is sharded; all processes must call it together."""
    return weight.full_tensor() if hasattr(weight, "full_tensor") else weight


def sharding_layout(runtime: Runtime) -> dict[str, object]:
    """How the shards of a restart point are split."""
    return {"sharding": runtime.sharding, "processes": world_size(), "replicas": runtime.replicas}


def actual_sharding(runtime: Runtime) -> Runtime:
    """The settings of this run: one process has nothing to shard over.

    Raises UserError if DeepSpeed is not installed.
    """
    if world_size() == 1:
        return runtime.model_copy(update={"sharding": "none", "replicas": 1})
    if runtime.sharding == "deepspeed":
        require_package(
            "deepspeed", "runtime.sharding = deepspeed", "set runtime.sharding to fsdp or none"
        )
    return runtime


def make_accelerator(
    train: TrainConfig, runtime: Runtime, schedule: Schedule, hidden: int
) -> Accelerator:
    """Join the process group; the accelerator sets sharding and precision of a model.

    `hidden` is the hidden size of its text decoder.
    """
    reset_accelerate()
    on_gpu, sharding = torch.cuda.is_available(), runtime.sharding
    copies = None
    if runtime.replicas > 1:
        shards = world_size() // runtime.replicas
        copies = ParallelismConfig(dp_replicate_size=runtime.replicas, dp_shard_size=shards)
    if world_size() > 1:
        backend, timeout = "nccl" if on_gpu else "gloo", timedelta(minutes=runtime.timeout_minutes)
        if sharding == "deepspeed":
            _join_by_deepspeed(backend, timeout)
        else:
            dist.init_process_group(backend, timeout=timeout)
    state = PartialState(cpu=not on_gpu)
    # accelerate would shard only over GPUs; gloo supports all that is needed.
    if sharding == "fsdp" and not on_gpu:
        state.distributed_type = DistributedType.MULTI_GPU
    elif sharding == "deepspeed":
        state.distributed_type = DistributedType.DEEPSPEED
    return Accelerator(
        mixed_precision=train.mixed_precision,
        gradient_accumulation_plugin=GradientAccumulationPlugin(
            num_steps=schedule.accumulation,
            sync_with_dataloader=False,
            # Otherwise each process keeps whole gradients between micro-batches.
            sync_each_batch=sharding == "fsdp",
        ),
        fsdp_plugin=_fsdp_plugin(train) if sharding == "fsdp" else None,
        parallelism_config=copies,
        deepspeed_plugin=(
            _deepspeed_plugin(train, schedule, hidden) if sharding == "deepspeed" else None
        ),
        kwargs_handlers=[
            DistributedDataParallelKwargs(find_unused_parameters=False, broadcast_buffers=False)
        ],
    )


def least_memory(device: torch.device) -> float:
    """Bytes that every process may hold: the smallest GPU, or share of a host's memory.

    Infinite if the host's memory cannot be read.
    """
    if device.type == "cuda":
        memory = float(torch.cuda.get_device_properties(device).total_memory)
    else:
        try:
            memory = host_memory() / local_world_size()
        except RunError:
            memory = math.inf
    if world_size() > 1:
        least = torch.tensor(memory, dtype=torch.float64, device=device)
        dist.all_reduce(least, op=dist.ReduceOp.MIN)
        memory = least.item()
    return memory


def _fsdp_plugin(train: TrainConfig) -> FullyShardedDataParallelPlugin:
    policy = None
    if train.mixed_precision == "bf16":
        # Sums in float32. No output_dtype: it would apply to each layer, whose inputs gradient
        # checkpointing keeps. The loss is in float32 anyway.
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        cpu_ram_efficient_loading=False,
        mixed_precision_policy=policy,
    )


def _deepspeed_plugin(train: TrainConfig, schedule: Schedule, hidden: int) -> DeepSpeedPlugin:
    return DeepSpeedPlugin(
        hf_ds_config={
            "train_batch_size": schedule.sequences,
            "train_micro_batch_size_per_gpu": schedule.micro_batch_size,
            "gradient_accumulation_steps": schedule.accumulation,
            "gradient_clipping": train.max_grad_norm,
            "bf16": {"enabled": train.mixed_precision == "bf16"},
            "data_types": {"grad_accum_dtype": "fp32"},
            "communication_data_type": "fp32",
            "zero_optimization": {
                "stage": 3,
                "overlap_comm": True,
                "contiguous_gradients": True,
                # As accelerate computes them, but for text models only.
                "reduce_bucket_size": hidden * hidden,
                "stage3_prefetch_bucket_size": int(0.9 * hidden * hidden),
                "stage3_param_persistence_threshold": 10 * hidden,
            },
        }
    )


def _join_by_deepspeed(backend: str, timeout: timedelta) -> None:
    import deepspeed

    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
    if backend == "gloo":
        # DeepSpeed would first compile shared-memory collectives; a killed compiler leaves a lock
        # on which every later run waits forever. gloo does not need them.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_backend=backend, auto_mpi_discovery=False, timeout=timeout)


def leave_process_group() -> None:
    """Leave the process group and reset accelerate's state, so that another stage can start."""
    reset_accelerate()
    if dist.is_initialized():
        dist.destroy_process_group()


def reset_accelerate() -> None:
    """Reset accelerate's state of this process, for which there is no public function."""
    AcceleratorState._reset_state(reset_partial_state=True)
