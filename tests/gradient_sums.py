"""Sums one gradient over two ranks and eight passes, as training does and with sums in bf16.

python -m tests.gradient_sums fsdp (or deepspeed) prints first the gradient that training's own
settings give, then those with bf16. The ranks' gradients, 256 and 1, are bf16 numbers; their sum is
none.
"""

from __future__ import annotations

import copy
import sys

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from stages.context import Runtime
from stages.train.parallel import leave, make_accelerator
from stages.train.schedule import make_schedule
from stages.train.stage import TrainConfig

PASSES = 8


def loss(model: torch.nn.Module) -> torch.Tensor:
    """Its gradient for each weight is 256 on the first rank and 1 on the other."""
    value = 256.0 if dist.get_rank() == 0 else 1.0
    return model(torch.full((1, 2), value, dtype=torch.bfloat16)).sum()


def summed_by_fsdp(policy: MixedPrecisionPolicy) -> float:
    """The gradient of a weight, averaged over the ranks, after all passes."""
    model = fully_shard(torch.nn.Linear(2, 1, bias=False), mp_policy=policy)
    for _ in range(PASSES):
        loss(model).backward()
    return float(model.weight.grad.full_tensor()[0, 0])


def summed_by_deepspeed(accelerator: Accelerator, changes: dict[str, object]) -> float:
    """The same, read from a step of plain gradient descent, for which DeepSpeed keeps float32."""
    from deepspeed.utils import safe_get_full_fp32_param

    layer = torch.nn.Linear(2, 1, bias=False)
    torch.nn.init.zeros_(layer.weight)
    plugin = accelerator.state.deepspeed_plugin
    shipped = copy.deepcopy(plugin.hf_ds_config.config)
    plugin.hf_ds_config.config |= changes
    model, _ = accelerator.prepare(layer, torch.optim.SGD(layer.parameters(), lr=1.0))
    plugin.hf_ds_config.config = shipped
    for _ in range(PASSES):
        with accelerator.accumulate(model):
            accelerator.backward(PASSES * loss(model))  # which divides by their number
    return -float(safe_get_full_fp32_param(next(model.parameters()))[0, 0])


if __name__ == "__main__":
    train = TrainConfig(
        total_tokens=32 * 2 * PASSES, batch_tokens=32 * 2 * PASSES, checkpoint_tokens=[],
        mixed_precision="bf16", max_grad_norm=1e9,
    )  # fmt: skip
    runtime = Runtime(sharding=sys.argv[1], micro_batch_size=1)
    schedule = make_schedule(train, runtime, 32, 2, False)
    assert schedule.accumulation == PASSES
    accelerator = make_accelerator(train, runtime, schedule, 2)
    if sys.argv[1] == "fsdp":
        gradients = [
            summed_by_fsdp(accelerator.state.fsdp_plugin.mixed_precision_policy),
            summed_by_fsdp(MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.bfloat16)),
        ]
    else:
        gradients = [
            summed_by_deepspeed(accelerator, {}),
            summed_by_deepspeed(accelerator, {"communication_data_type": "bf16"}),
            summed_by_deepspeed(accelerator, {"data_types": {"grad_accum_dtype": "bf16"}}),
        ]
    if accelerator.is_main_process:
        print("gradients", *gradients)
    leave()
