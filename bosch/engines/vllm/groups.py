"""Cache groups for a hybrid's modules, which vLLM requests from its model from 0.33 on."""

from __future__ import annotations

import re
from typing import Any

from bosch.engines.vllm.plan import packed_groups

_MODULE_NAME = re.compile(r"\.module\d+$")


def module_name(attention: str, index: int) -> str:
    """Name of a module that is part of a layer's attention."""
    return f"{attention}.module{index}"


def groups_of_modules(vllm_config: Any, kv_cache_spec: dict[str, Any]) -> list[Any]:
    """`packed_groups` in vLLM's types; vLLM's with a draft model or windows of all tokens."""
    from vllm.v1.core.kv_cache_planning import create_kv_cache_group_specs, get_kv_cache_groups
    from vllm.v1.kv_cache_interface import KVCacheGroupSpec, UniformTypeKVCacheSpecs

    others = [name for name in kv_cache_spec if _MODULE_NAME.search(name) is None]
    if vllm_config.scheduler_config.disable_hybrid_kv_cache_manager or others:
        return list(get_kv_cache_groups(vllm_config, kv_cache_spec))
    names: dict[int | None, list[str]] = {}
    for name, spec in kv_cache_spec.items():
        names.setdefault(getattr(spec, "sliding_window", None), []).append(name)
    heads: dict[int | None, list[int]] = {}
    blocks: dict[int | None, int] = {}
    for kind, modules in names.items():
        heads[kind] = [kv_cache_spec[name].num_kv_heads for name in modules]
        spec = kv_cache_spec[modules[0]]
        blocks[kind] = spec.max_memory_usage_bytes(vllm_config) // spec.page_size_bytes
    _, bins = packed_groups(heads, blocks)
    groups: list[Any] = []
    for kind, groups_of_kind in bins.items():
        for indices in groups_of_kind:
            members = [names[kind][index] for index in sorted(indices)]
            specs = {name: kv_cache_spec[name] for name in members}
            if len(set(specs.values())) == 1:
                groups += create_kv_cache_group_specs(kv_cache_spec, [members])
            else:
                groups.append(KVCacheGroupSpec(members, UniformTypeKVCacheSpecs.from_specs(specs)))
    return groups
