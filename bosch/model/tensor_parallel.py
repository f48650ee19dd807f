"""A model sharded over several processes with transformers' tensor parallelism.

A process holds a slice of every large weight. If the family's plan splits the attention heads, each
process computes its heads; otherwise queries, keys and values are gathered, and each computes all.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from bosch.errors import RunError, UserError
from bosch.model.families import decoder_layers, text_config
from bosch.model.interface import attention_modules
from bosch.model.loading import load_config, load_model
from bosch.model.search_mode import local_kv_heads, set_local_kv_heads
from bosch.ranks import Ranks

logger = logging.getLogger(__name__)

_OPTION = "runtime.search_parallel: tensor"


def load_sharded(path: str | Path, ranks: Ranks, **options: Any) -> Any:
    """Load a model sharded over `ranks`, on all; raises as `divides_heads` and `check_shards`."""
    revision, trust = options.get("revision"), options.get("trust_remote_code", False)
    config = load_config(str(path), revision=revision, trust_remote_code=trust)
    divided = divides_heads(config, ranks.shards)
    from transformers.distributed.configuration_utils import DistributedConfig

    sharding = DistributedConfig(tp_size=ranks.shards)
    model = load_model(path, distributed_config=sharding, **options)
    if divided:
        count = decoder_layers(config).heads // ranks.shards
        set_local_kv_heads(model, slice(ranks.shard * count, (ranks.shard + 1) * count))
    share = check_shards(model, ranks.shards)
    logger.info(
        "the model is sharded over %d processes: this one holds %.0f %% of its weights",
        ranks.shards, 100 * share,
    )  # fmt: skip
    return model


def divides_heads(config: Any, shards: int) -> bool:
    """Whether each shard computes some heads; UserError for no plan or indivisible KV heads."""
    plan = getattr(config, "base_model_tp_plan", None)
    if not plan:
        raise UserError(
            f"{_OPTION}: transformers has no tensor-parallel plan for models of type "
            f"'{config.model_type}'; use data"
        )
    kinds = decoder_layers(config)
    if text_config(config) is not config or (kinds.windows and kinds.own_heads != kinds.heads):
        raise UserError(
            f"{_OPTION}: models of type '{config.model_type}' take more than text or have layers "
            "with other numbers of KV heads; use data"
        )
    styles = {name.rpartition(".")[2]: style for name, style in plan.items()}
    divided = styles.get("k_proj") == "colwise"
    if divided and kinds.heads % shards:
        raise UserError(
            f"{_OPTION}: the model's {kinds.heads} KV heads cannot be divided among {shards} "
            "processes; set runtime.processes to a divisor"
        )
    return divided


def check_shards(model: Any, shards: int) -> float:
    """This process's share of the weights; RunError if nearer to 1 than 1 / `shards`, or uneven."""
    for module in attention_modules(model):
        projections = [p for name, p in module.named_parameters() if name.endswith("proj.weight")]
        for weight in projections:
            count = local_shard(weight).numel()
            if count * shards != weight.numel():
                raise RunError(
                    f"{_OPTION}: a process holds {count:,} of the {weight.numel():,} values of an "
                    f"attention projection instead of 1 in {shards}; use data"
                )
    total: int = sum(parameter.numel() for parameter in model.parameters())
    held: int = sum(local_shard(parameter).numel() for parameter in model.parameters())
    # A plan may replicate embeddings and norms.
    if held > 0.5 * (1 + 1 / shards) * total:
        raise RunError(
            f"{_OPTION}: a process still holds {held / total:.0%} of the weights; use data"
        )
    return held / total


def local_shard(weight: Any) -> Tensor:
    """This process's part of a weight: the local shard of a DTensor."""
    return weight.to_local() if hasattr(weight, "to_local") else weight


def whole_weight(weight: Any) -> Tensor:
    """The whole weight, gathered if it is sharded; all processes must call it together."""
    return weight.full_tensor() if hasattr(weight, "full_tensor") else weight


def gather_heads(model: Any, states: Tensor) -> Tensor:
    """All heads [B, H, T, D], gathered from the processes that computed them."""
    if local_kv_heads(model) is None:
        return states
    local = states.contiguous()
    shards = [torch.empty_like(local) for _ in range(dist.get_world_size())]
    dist.all_gather(shards, local)
    return torch.cat(shards, dim=1)


def sum_over_shards(model: Any, values: Tensor) -> Tensor:
    """Sum over processes of values that are 0 for heads of other processes."""
    if local_kv_heads(model) is not None:
        dist.all_reduce(values)
    return values
