"""AdamW, with its moments in float32 or, by torchao, in 8 bits."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from transformers.trainer_pt_utils import get_parameter_names

from stages.train.stage import TrainConfig
from stages.train.storage import processes, rank

# Patterns of parameters without weight decay: those of transformers' Trainer, which decays
# `norm_f` (Nemotron-H) and `post_norm1` (HyperCLOVA X).
_NOT_DECAYED = [r"bias", r"layernorm", r"rmsnorm", r"(^|\.|_)norm(_f|\d*)($|\.)"]


def make_optimizer(model: Any, train: TrainConfig) -> Optimizer:
    """AdamW over the trainable parameters of `model`, which under FSDP must be sharded already.

    With 8-bit moments, weights with fewer than 4,096 elements in a process, or a number that is not
    a multiple of 256, still have float32 moments.
    """
    groups = parameter_groups(model, train.weight_decay)
    betas = (train.adam_beta1, train.adam_beta2)
    if train.optimizer == "adamw":
        return torch.optim.AdamW(groups, lr=train.learning_rate, betas=betas, fused=True)
    from torchao.optim import AdamW8bit

    _register_new_empty()
    # Its step is compiled, and torch's cache on disk does not distinguish shards of a weight, so a
    # process could load the graph of another process's shard.
    torch.compiler.config.cache_key_tag = f"{rank()} of {processes()}"
    return AdamW8bit(groups, lr=train.learning_rate, betas=betas)


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Two groups of trainable parameters: with weight decay; without (biases and norms)."""
    decayed_names = set(get_parameter_names(model, [nn.LayerNorm], _NOT_DECAYED))
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    decayed = [parameter for name, parameter in trained if name in decayed_names]
    not_decayed = [parameter for name, parameter in trained if name not in decayed_names]
    return [
        {"params": decayed, "weight_decay": weight_decay},
        {"params": not_decayed, "weight_decay": 0.0},
    ]


def set_learning_rate(optimizer: Any, rate: float) -> None:
    """Set the rate of all groups; torchao's is a tensor, so that its step is compiled once."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate


def _register_new_empty() -> None:
    """Implement `new_empty` for torchao's 8-bit moments: asynchronous checkpoints call it.

    They ask for the size of the moment itself.
    """
    from torchao.optim.subclass_8bit import OptimState8bit

    @OptimState8bit.implements(torch.ops.aten.new_empty.default)  # type: ignore[untyped-decorator]
    def new_empty(_operation: Any, _types: Any, args: Any, kwargs: dict[str, Any]) -> Tensor:
        moment, size = args
        options = {name: value for name, value in kwargs.items() if name != "dtype"}
        codes = moment.codes.new_empty(size, **options)
        scale = moment.scale.new_empty(moment.scale.shape, **options)
        return OptimState8bit(codes, scale, moment.qmap.clone(), moment.signed)
