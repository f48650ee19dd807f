"""Sums one gradient over two ranks and eight passes, as FSDP does in training and in bf16.

python -m tests.gradient_sums prints both on the first rank. The ranks' gradients, 256 and 1,
are bf16 numbers; their sum is none.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from stages.context import Runtime
from stages.train.parallel import leave, make_accelerator
from stages.train.schedule import make_schedule
from stages.train.stage import TrainConfig

PASSES = 8


def summed(policy: MixedPrecisionPolicy) -> float:
    """The gradient of a weight, averaged over the ranks, after all passes."""
    model = fully_shard(torch.nn.Linear(2, 1, bias=False), mp_policy=policy)
    for _ in range(PASSES):
        model(torch.full((1, 2), 256.0 if dist.get_rank() == 0 else 1.0)).sum().backward()
    return float(model.weight.grad.full_tensor()[0, 0])


if __name__ == "__main__":
    train = TrainConfig(
        total_tokens=256, batch_tokens=64, checkpoint_tokens=[], mixed_precision="bf16"
    )
    runtime = Runtime(sharding="fsdp", micro_batch_size=1)
    schedule = make_schedule(train, runtime, 32, 2, False)
    accelerator = make_accelerator(train, runtime, schedule)
    shipped = summed(accelerator.state.fsdp_plugin.mixed_precision_policy)
    in_bf16 = summed(MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.bfloat16))
    if accelerator.is_main_process:
        print(f"gradients {shipped} {in_bf16}")
    leave()
