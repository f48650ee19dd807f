"""AdamW and the groups of its parameters."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from transformers.trainer_pt_utils import get_parameter_names

from stages.train.stage import TrainConfig

# Patterns of parameters without weight decay: those of transformers' Trainer, which decays
# `norm_f` (Nemotron-H) and `post_norm1` (HyperCLOVA X).
_NOT_DECAYED = [r"bias", r"layernorm", r"rmsnorm", r"(^|\.|_)norm(_f|\d*)($|\.)"]


def make_optimizer(model: Any, train: TrainConfig) -> Optimizer:
    """AdamW over the trainable parameters of `model`, which under FSDP must be sharded already."""
    groups = parameter_groups(model, train.weight_decay)
    betas = (train.adam_beta1, train.adam_beta2)
    return torch.optim.AdamW(groups, lr=train.learning_rate, betas=betas, fused=True)


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
