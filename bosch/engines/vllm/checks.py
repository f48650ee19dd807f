"""Checks before vLLM loads a hybrid model."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from bosch.engines.vllm import plan as planner
from bosch.errors import UserError
from bosch.hybrid import HeadLayout, deploy_layouts
from bosch.model.families import decoder_layers, text_config
from bosch.weight_files import weight_faults

OLDEST_TESTED, NEWEST_TESTED = "0.32.0", "0.33.0"

_logger = logging.getLogger("vllm.bosch")


def check_servable(vllm_config: Any) -> None:
    """Raise UserError if vLLM cannot serve this hybrid model with these options."""
    check_engine()
    model = vllm_config.model_config
    check_order(plan_of(vllm_config), model.hf_config, vllm_config.lora_config)
    check_complete(Path(model.model))


def served_layouts(config: Any) -> dict[int, HeadLayout]:
    """Layouts of the layers with attention; raises UserError for those that cannot be split."""
    reason = planner.layers_refusal(decoder_layers(config))
    if text_config(config) is not config:
        reason = "it takes more than text"
    if reason:
        raise UserError(f"the plugin for vLLM does not serve this model, because {reason}")
    layouts = enumerate(deploy_layouts(config))
    return {layer: layout for layer, layout in layouts if layout is not None}


def check_engine() -> None:
    """Warn about a vLLM with which the plugin was not tested."""
    from vllm import __version__ as version

    tested = {name.rpartition(".")[0] for name in (OLDEST_TESTED, NEWEST_TESTED)}
    if ".".join(version.split(".")[:2]) not in tested:
        _logger.warning(
            f"vLLM {version}: bosch was tested with {OLDEST_TESTED} to {NEWEST_TESTED}; where "
            "tokens or the cache are not as expected, install one of these"
        )


def own_groups(vllm_config: Any) -> bool:
    """Whether this engine takes groups of unequal modules from the model's class."""
    from vllm.model_executor.models import interfaces

    if not hasattr(interfaces, "SupportsKVCacheGrouping"):
        return False
    from vllm import envs
    from vllm.v1.kv_cache_interface import KVCacheLayout

    name = vllm_config.cache_config.kv_cache_layout or envs.VLLM_KV_CACHE_LAYOUT
    layout = KVCacheLayout.__members__.get(name or "")
    return layout is not None and layout.is_block_outermost and layout.is_block_compact


def plan_of(vllm_config: Any) -> planner.ModulePlan:
    """Plan of the attention modules; raises UserError for sinks, or heads that cannot be shared."""
    model = vllm_config.model_config
    layouts = served_layouts(model.hf_config).values()
    sinks = max(layout.sinks for layout in layouts)
    if sinks:
        raise UserError(
            f"hybrid_attention.sinks is {sinks}: vLLM keeps a window of a sliding head and no "
            "sinks before it; serve the model with transformers"
        )
    request = planner.Request(
        planner.planned_tokens(model.max_model_len),
        vllm_config.cache_config.block_size,
        vllm_config.max_in_flight_tokens,
    )
    return planner.module_plan(
        [
            {group.window.size if group.window else None: len(group.heads) for group in x.groups}
            for x in layouts
        ],
        request,
        vllm_config.parallel_config.tensor_parallel_size,
        own_groups(vllm_config),
    )


def check_order(plan: planner.ModulePlan, config: Any, lora: Any) -> None:
    """Raise UserError if heads must move between ranks and the weights cannot be reordered."""
    orders = [planner.rank_order(plan, layer) for layer in range(len(plan.heads))]
    moved = any(order != sorted(order) for order in orders)
    reason = None
    if getattr(config, "quantization_config", None) is not None:
        reason = "quantised weights"
    elif lora is not None:
        reason = "LoRA adapters"
    if moved and reason:
        raise UserError(
            f"tensor_parallel_size is {plan.ranks}: the heads must be shared out again, which is "
            f"not possible with {reason}; serve them with tensor_parallel_size 1"
        )
    scheme = (getattr(config, "quantization_config", None) or {}).get("kv_cache_scheme")
    if scheme is not None:
        raise UserError(
            "quantization_config.kv_cache_scheme: scales of a quantised cache are stored for whole "
            "layers, and a hybrid layer has several caches; quantise the weights alone"
        )


def check_complete(folder: Path) -> None:
    """Raise UserError for a local checkpoint with missing, truncated or unfinished weights."""
    if not folder.is_dir():
        return
    for fault in weight_faults(folder):
        raise UserError(f"{fault}; if the checkpoint is still being written, wait until it is done")
