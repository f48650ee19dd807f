"""The trained weights: all, only attention's, or low-rank adapters (LoRA); and their optimizer."""

from __future__ import annotations

import math
import re
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from transformers.trainer_pt_utils import get_parameter_names

from bosch.model.interface import attention_modules
from bosch.model.loading import load_model
from stages.train.stage import LoraConfig, TrainConfig
from stages.versions import require_package

_ADAPTER = "default"  # peft's name of a model's only adapter
_A, _B = f"lora_A.{_ADAPTER}.weight", f"lora_B.{_ADAPTER}.weight"
# Mamba's layers use this linear map's weight without calling it: an adapter would have no effect.
_UNCALLED = "dt_proj"
# Patterns of parameters without weight decay: those of transformers' Trainer, which decays
# `norm_f` (Nemotron-H) and `post_norm1` (HyperCLOVA X).
_NOT_DECAYED = [r"bias", r"layernorm", r"rmsnorm", r"(^|\.|_)norm(_f|\d*)($|\.)"]
_BASE = re.compile(r"\.base_layer(?=\.(weight|bias)$)")


def untrained_parameters(model_dir: Path, trust_remote_code: bool = False) -> frozenset[str]:
    """Parameters that the model's code does not train, such as biases that balance experts.

    They have no gradient, but from_pretrained makes every weight trainable. Call it before
    DeepSpeed is set up, which would shard the empty model.
    """
    empty = load_model(model_dir, weights=False, trust_remote_code=trust_remote_code)
    return frozenset(
        name for name, parameter in empty.named_parameters() if not parameter.requires_grad
    )


def restrict_training(model: Any, train: TrainConfig, untrained: Collection[str] = ()) -> None:
    """Freeze `untrained` weights, and those that `train.freeze` and `train.lora` leave out.

    Raises UserError when peft is not installed.
    """
    if train.lora is not None:
        _add_adapters(model, train.lora, attention_only=train.freeze == "attention_only")
    elif train.freeze == "attention_only":
        model.requires_grad_(False)
        for module in attention_modules(model):
            module.requires_grad_(True)
    else:  # training data is text: image modules get no gradient
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


def _add_adapters(model: Any, lora: LoraConfig, attention_only: bool) -> None:
    require_package("peft", "train.lora", "leave train.lora out")
    import peft

    trained = attention_modules(model) if attention_only else [model.get_decoder()]
    inside = {id(module) for root in trained for module in root.modules()}
    targets = [
        name
        for name, module in model.named_modules()
        # A router may be a linear map that returns several values.
        if id(module) in inside
        and getattr(type(module), "forward", None) is nn.Linear.forward
        and name.rpartition(".")[2] != _UNCALLED
    ]
    alpha: Any = lora.alpha  # annotated as int by peft, but a float is correct
    config = peft.LoraConfig(
        r=lora.rank, lora_alpha=alpha, target_modules=targets,
        # Says that its heads are in the hybrid's order (`bosch.hybrid`).
        base_model_name_or_path=model.config.name_or_path,
    )  # fmt: skip
    peft.inject_adapter_in_model(config, model)


def first_adapters(model: Any, seed: int) -> dict[str, Tensor]:
    """Initial weights of adapters in float32: A uniform within 1/√inputs, B zero."""
    generator = torch.Generator().manual_seed(seed)
    weights: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        if name.endswith(_A):
            bound = 1 / math.sqrt(parameter.shape[1])
            values = torch.empty(parameter.shape)
            weights[name] = values.uniform_(-bound, bound, generator=generator)
        elif name.endswith(_B):
            weights[name] = torch.zeros(parameter.shape)
    return weights


def saved_name(name: str) -> str:
    """Name under which a weight of the model without adapters is saved."""
    return _BASE.sub("", name)


def is_adapter(name: str) -> bool:
    return name.endswith((_A, _B))


def merged(state: dict[str, Tensor], lora: LoraConfig) -> dict[str, Tensor]:
    """The weights of a model without adapters: W + alpha / rank · B·A, summed in float32.

    They are removed from `state`, to avoid a second copy. Raises KeyError for an incomplete
    adapter.
    """
    result = {}
    for name in [name for name in state if not is_adapter(name)]:
        value, plain = state.pop(name), saved_name(name)
        if plain != name and name.endswith(".weight"):
            stem = name.removesuffix("base_layer.weight")
            a, b = state[stem + _A].float(), state[stem + _B].float()
            value = (value.float() + lora.alpha / lora.rank * (b @ a)).to(value.dtype)
        result[plain] = value
    return result


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
