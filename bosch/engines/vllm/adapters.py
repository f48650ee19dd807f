"""LoRA adapters of a hybrid's base model, given the hybrid's order of heads when vLLM loads one."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bosch.hybrid import deploy_order, is_of_hybrid, reorder_weight


def reorder_base_adapters() -> None:
    """Have vLLM's workers reorder adapters that were trained on the base; harmless again."""
    from vllm.lora.worker_manager import WorkerLoRAManager

    load = WorkerLoRAManager._load_adapter
    if load.__module__ == __name__:
        return

    def load_adapter(self: Any, request: Any) -> Any:
        lora = load(self, request)
        config = self._adapter_manager.model.config
        if table := getattr(config, "hybrid_attention", None):
            content = json.loads((Path(request.lora_path) / "adapter_config.json").read_text())
            if not is_of_hybrid(content["base_model_name_or_path"], config.name_or_path):
                reorder(lora.loras, table)
        return lora

    WorkerLoRAManager._load_adapter = load_adapter


def reorder(loras: Mapping[str, Any], table: Mapping[str, Any]) -> None:
    """Give vLLM's adapter weights by module name the order of heads of `hybrid_attention`."""
    orders = dict(zip(table["layers"], map(deploy_order, table["windows"]), strict=True))
    for name, lora in loras.items():
        place = re.search(r"(?:^|\.)layers\.(\d+)\.(.+)$", name)
        if place is None or int(place[1]) not in orders:
            continue
        if (found := table["weights"].get(f"{place[2]}.weight")) is not None:
            axis, sizes = found
            part = "lora_b" if axis == 0 else "lora_a"
            weight = getattr(lora, part)
            setattr(lora, part, reorder_weight(weight, axis, sizes, orders[int(place[1])]))
