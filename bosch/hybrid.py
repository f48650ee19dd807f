"""Deploy mode: model classes whose full heads come first, and their registration with transformers.

The classes of a family derive from transformers' own; they add the head layout from the config, the
HybridCache, and nothing to the computation. Their model_type ("hybrid_qwen3", ...) is unknown to
plain transformers, so that a load without bosch is refused and never runs full attention instead.
"""

from __future__ import annotations

import functools
import importlib
import json
import sys
from types import ModuleType
from typing import Any

from torch import Tensor

from bosch.attention import HeadLayout, resolve_backend
from bosch.cache import HybridCache
from bosch.configuration import hybrid_config_class
from bosch.errors import UserError
from bosch.families import Family, base_windows
from bosch.interface import (
    NAME,
    HeadState,
    attention_modules,
    layouts_of,
    masks_for_generate,
    register_attention,
    set_head_state,
)
from bosch.static_cache import StaticHybridCache
from bosch.windows import check_window

# What a user may ask for as attn_implementation, and the backend that means.
_BACKEND_OF = {
    None: "auto",
    NAME: "auto",
    "bosch": "auto",
    "auto": "auto",
    "eager": "eager",
    "sdpa": "sdpa",
    "flex": "flex",
    "flex_attention": "flex",
    "flash": "flash",
    "flash_attention_2": "flash",
}


def deploy_layouts(config: Any) -> list[HeadLayout]:
    """Layout of each layer from `config.hybrid_attention`; raises UserError when it is damaged."""
    where = getattr(config, "_name_or_path", "") or "config.json"
    table = getattr(config, "hybrid_attention", None)
    layers, heads = config.num_hidden_layers, config.num_key_value_heads
    expected = {"window_size", "sinks", "full_kv_heads_per_layer"}
    if not isinstance(table, dict) or not expected <= set(table):
        raise UserError(
            f"{where}: hybrid_attention must hold {', '.join(sorted(expected))}, found "
            f"{json.dumps(table, default=str)}; make the model again"
        )
    window, sinks, counts = (table[k] for k in ("window_size", "sinks", "full_kv_heads_per_layer"))
    try:
        check_window(window, sinks)
    except ValueError as error:
        raise UserError(f"{where}: hybrid_attention.{error}") from error
    valid = isinstance(counts, list) and all(type(n) is int and 0 <= n <= heads for n in counts)
    if not valid or len(counts) != layers:
        raise UserError(
            f"{where}: hybrid_attention.full_kv_heads_per_layer must hold {layers} numbers from 0 "
            f"to {heads}, found {counts!r}"
        )
    _check_base_types(config, where)
    layouts = []
    for layer, (count, own) in enumerate(zip(counts, base_windows(config), strict=True)):
        if own is not None and count:
            raise UserError(
                f"{where}: hybrid_attention.full_kv_heads_per_layer is {count} for layer {layer}, "
                "which slides in the base model too: expected 0"
            )
        layouts.append(HeadLayout.deploy(count, heads, own or window, 0 if own else sinks))
    return layouts


def _check_base_types(config: Any, where: str) -> None:
    types, layers = getattr(config, "layer_types", None), config.num_hidden_layers
    if types is None:
        return
    kinds = ("full_attention", "sliding_attention")
    if len(types) != layers or any(kind not in kinds for kind in types):
        raise UserError(
            f"{where}: base_layer_types must hold {' or '.join(kinds)} for each of {layers} "
            f"layers, found {types!r}; make the model again"
        )


class HybridModelMixin:
    """What a hybrid model adds to its family: layouts, backend and cache."""

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        layouts = deploy_layouts(config)
        parent: Any = super()
        parent.__init__(config, *args, **kwargs)
        self._install(layouts)

    def _install(self, layouts: list[HeadLayout]) -> None:
        for module, layout in zip(attention_modules(self), layouts, strict=True):
            set_head_state(module, HeadState(layout, self._hybrid_backend))

    def _check_and_adjust_attn_implementation(
        self, attn_implementation: str | None, *args: Any, **kwargs: Any
    ) -> str:
        """Any implementation asked for means that backend of hybrid attention, never another."""
        known = attn_implementation is None or isinstance(attn_implementation, str)
        if not known or attn_implementation not in _BACKEND_OF:
            raise UserError(
                f"attn_implementation='{attn_implementation}' has no hybrid form: choose one of "
                f"{', '.join(str(name) for name in _BACKEND_OF if name)}"
            )
        register_attention()
        self._hybrid_backend = resolve_backend(_BACKEND_OF[attn_implementation])
        return NAME

    def set_attn_implementation(self, attn_implementation: Any, *args: Any, **kwargs: Any) -> None:
        """Choose the backend of the hybrid attention."""
        self._check_and_adjust_attn_implementation(attn_implementation)
        self._install(layouts_of(self))

    def new_cache(self) -> HybridCache:
        """An empty cache for this model."""
        return HybridCache(layouts_of(self))

    def new_static_cache(self, max_cache_len: int) -> StaticHybridCache:
        """An empty cache with room for `max_cache_len` tokens, with which decoding compiles."""
        return StaticHybridCache(layouts_of(self), max_cache_len)

    def _prepare_cache_for_generation(
        self,
        generation_config: Any,
        model_kwargs: dict[str, Any],
        generation_mode: Any,
        batch_size: int,
        max_cache_length: int,
    ) -> None:
        given = model_kwargs.get("past_key_values") is not None
        if given or generation_config.use_cache is False:
            parent: Any = super()
            parent._prepare_cache_for_generation(
                generation_config, model_kwargs, generation_mode, batch_size, max_cache_length
            )
            return
        cache: HybridCache | StaticHybridCache
        if generation_config.cache_implementation == "static":
            cache = self._static_cache(generation_config, batch_size, max_cache_length)
        elif generation_config.cache_implementation in (None, "dynamic"):
            cache = self.new_cache()
            if generation_config.is_assistant:
                cache.activate_past_recording()
        else:
            raise UserError(
                f"cache_implementation='{generation_config.cache_implementation}' has no hybrid "
                "form: choose dynamic or static"
            )
        model_kwargs["past_key_values"] = cache

    def _static_cache(
        self, generation_config: Any, batch_size: int, max_cache_length: int
    ) -> StaticHybridCache:
        """As large as ever one was, as transformers makes its own: then nothing compiles again."""
        wanted = getattr(generation_config, "max_cache_len", None) or 0
        self._static_length = max(max_cache_length, wanted, getattr(self, "_static_length", 0))
        cache = self.new_static_cache(self._static_length)
        modules: list[Any] = attention_modules(self)
        devices = {module.o_proj.weight.device for module in modules}
        if generation_config.prefill_chunk_size is not None and len(devices) == 1:
            # The chunks of a prompt are compiled too, and nothing may be allocated meanwhile.
            copies = max(generation_config.num_beams, generation_config.num_return_sequences)
            cache.early_initialization(
                batch_size=batch_size * copies,
                num_heads=modules[0].config.num_key_value_heads,
                head_dim=modules[0].head_dim,
                dtype=self.dtype,  # type: ignore[attr-defined]
                device=self.device,  # type: ignore[attr-defined]
            )
        return cache

    create_masks_for_generate = staticmethod(masks_for_generate)


def _forward_of(family: Family, parent: Any) -> Any:
    """`forward` of a family with a HybridCache where it would have made a cache of its own."""

    @functools.wraps(parent.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        positions = kwargs.get("position_ids")
        if not family.separates_documents and positions is not None and positions.shape[-1] > 1:
            _check_one_document(positions, kwargs.get("attention_mask"))
        wanted = kwargs.get("use_cache")
        if wanted is None:
            packed = positions is not None and kwargs.get("attention_mask") is None
            wanted = bool(self.config.use_cache) and not self.training and not packed
            if kwargs.get("past_key_values") is not None:
                wanted = True
            kwargs["use_cache"] = wanted
        if wanted and kwargs.get("past_key_values") is None and len(args) < 4:
            kwargs["past_key_values"] = self.new_cache()
        return parent.forward(self, *args, **kwargs)

    return forward


def _check_one_document(positions: Tensor, attention_mask: Any) -> None:
    """Raise ValueError for packed documents, which this family's masks would not keep apart."""
    if attention_mask is None and bool((positions.diff(dim=-1) != 1).any()):
        raise ValueError(
            "models of this type do not keep packed documents apart, and position_ids start again "
            "within a row: pass one document per row, with an attention_mask where rows are padded"
        )


@functools.cache
def hybrid_model_class(family: Family) -> Any:
    """Causal language model class of a family's hybrid models."""
    module = importlib.import_module(
        f"transformers.models.{family.module}.modeling_{family.module}"
    )
    base = getattr(module, f"{family.prefix}ForCausalLM")
    config_class = hybrid_config_class(family)
    body = {
        "config_class": config_class,
        "config": config_class,
        "__module__": __name__,
        "__doc__": f"{family.prefix} model with full and sliding heads in each layer.",
        "forward": _forward_of(family, base),
        "_can_set_attn_implementation_cached_value": True,
    }
    created = type(family.model_class, (HybridModelMixin, base), body)
    globals()[family.model_class] = created
    _name_in_transformers(family.model_class, created)
    return created


def _name_in_transformers(name: str, created: Any) -> None:
    """Make a class an attribute of transformers, where `transformers serve` looks it up.

    transformers loads itself twice over: what was imported before holds another module object of
    that name than what is imported later.
    """
    for module in list(sys.modules.values()):
        held = getattr(module, "__dict__", {}).get("transformers")
        if isinstance(held, ModuleType) and held.__name__ == "transformers":
            setattr(held, name, created)
    setattr(sys.modules["transformers"], name, created)


__all__ = [
    "HybridModelMixin",
    "deploy_layouts",
    "hybrid_model_class",
]
