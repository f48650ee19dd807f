"""Adapters that were trained on a hybrid's base model, whose KV heads have another order."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from torch import Tensor
from transformers import PreTrainedConfig

from bosch.errors import UserError
from bosch.model.configuration import hybrid_mask
from bosch.model.families import HYBRID_PREFIX, decoder_layers
from bosch.model.permutation import reorder_weight


def reorder_adapters(hybrid: Any, weights: dict[str, Tensor], *others: Any) -> None:
    """Hook of `load_state_dict`: give LoRA adapters of the base model the hybrid's order of heads.

    PEFT's configuration names the model that an adapter was trained on. The hybrid's name replaces
    it, since the adapter, saved again, is the hybrid's. UserError for other kinds of adapters in
    attention, and for adapters of an unknown model.
    """
    configs: Mapping[str, Any] = getattr(hybrid, "peft_config", {})
    foreign = {name for name, config in configs.items() if not _is_of_hybrid(config, hybrid)}
    if not foreign:
        return
    head_weights = hybrid.config.hybrid_attention["weights"]
    layers, order = decoder_layers(hybrid.config).full, hybrid_mask(hybrid.config).head_order
    orders = dict(zip(layers, order, strict=True))
    linear = "|".join(re.escape(name.removesuffix(".weight")) for name in head_weights)
    inside = re.compile(rf"(?:^|\.)layers\.(\d+)\.({linear})\.(.+)$")
    moved = set()
    for name, weight in weights.items():
        place = inside.search(name)
        if place is None or int(place[1]) not in orders:
            continue
        kind, *rest = place[3].split(".")
        adapter = next((part for part in rest if part in foreign), None)
        if adapter is None:
            continue
        if kind not in ("lora_A", "lora_B", "lora_magnitude_vector"):
            raise UserError(
                f"{name}: an adapter of this kind was trained on another order of heads; train it "
                "on the hybrid, or merge it into the base model before materialize"
            )
        moved.add(adapter)
        axis, sizes = head_weights[f"{place[2]}.weight"]
        if (kind == "lora_A") is (axis == 1):
            weights[name] = reorder_weight(weight, axis, sizes, orders[int(place[1])])
    for adapter in moved:
        configs[adapter].base_model_name_or_path = hybrid.config.name_or_path


def _is_of_hybrid(adapter: Any, hybrid: Any) -> bool:
    """Whether an adapter was trained on the hybrid, and not on its base model."""
    trained_on = adapter.base_model_name_or_path
    if (trained_on or "") == hybrid.config.name_or_path:
        return True
    try:
        content, _ = PreTrainedConfig.get_config_dict(trained_on)
    except Exception as error:
        raise UserError(
            f"an adapter was trained on {trained_on!r}, which cannot be read, so the order of its "
            "heads is not known; correct base_model_name_or_path in its adapter_config.json"
        ) from error
    return str(content.get("model_type")).startswith(HYBRID_PREFIX)
