"""The trained weights and their optimizer."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from transformers.trainer_pt_utils import get_parameter_names

from bosch.model.loading import load_model
from stages.train.stage import TrainConfig

# Patterns of parameters without weight decay: those of transformers' Trainer, which decays
# `norm_f` (Nemotron-H) and `post_norm1` (HyperCLOVA X).
_NOT_DECAYED = [r"bias", r"layernorm", r"rmsnorm", r"(^|\.|_)norm(_f|\d*)($|\.)"]


def untrained_parameters(model_dir: Path, trust_remote_code: bool = False) -> frozenset[str]:
    """Parameters that the model's code does not train, such as biases that balance experts.

    They have no gradient, but from_pretrained makes every weight trainable. Call it before
    DeepSpeed is set up, which would shard the empty model.
    """
    empty = load_model(model_dir, weights=False, trust_remote_code=trust_remote_code)
    return frozenset(
        name for name, parameter in empty.named_parameters() if not parameter.requires_grad
    )


def restrict_training(model: Any, untrained: Collection[str] = ()) -> None:
    """Freeze `untrained` weights, and those of image modules, which get no gradient from text."""
    text_modules = (model.get_decoder(), model.get_output_embeddings())
    trained = {
        id(parameter)
        for module in text_modules
        if module is not None
        for parameter in module.parameters()
    }
    for name, parameter in model.named_parameters():
        if id(parameter) not in trained or name in untrained:
            parameter.requires_grad_(False)


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
