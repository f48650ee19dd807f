"""LoRA adapters of a hybrid's base model, given the hybrid's order of heads when vLLM loads one."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bosch.hybrid import heads_in, is_of_hybrid, reorder_weight


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
            if not is_of_hybrid(content.get("base_model_name_or_path"), config.name_or_path):
                reorder(lora.loras, table)
        return lora

    WorkerLoRAManager._load_adapter = load_adapter


def reorder(loras: Mapping[str, Any], table: Mapping[str, Any]) -> None:
    """Give vLLM's adapter weights by module name the order of heads of `hybrid_attention`."""
    for name, lora in loras.items():
        if (place := heads_in(name, table)) is not None:
            axis, sizes, order, _ = place
            part = "lora_b" if axis == 0 else "lora_a"
            setattr(lora, part, reorder_weight(getattr(lora, part), axis, sizes, order))
