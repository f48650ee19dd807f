"""Deploy mode: model classes whose full heads come first, and their registration with transformers.

The classes of a family derive from transformers' classes and add the head layout in the config and
the HybridCache, nothing else. Their model_type ("hybrid_qwen3", ...) is unknown to plain
transformers, so loading without bosch fails instead of running full attention.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Mapping
from typing import Any

import torch
from transformers.cache_utils import DynamicCache, StaticCache
from transformers.distributed.configuration_utils import DistributedConfig
from transformers.utils import logging as transformers_logging

from bosch.attention import HeadLayout
from bosch.backends import BACKENDS, check_backend, resolve_backend
from bosch.errors import UserError
from bosch.model.adapters import reorder_adapters
from bosch.model.cache import CACHE_NAME, HeadGroupsLayer, HybridCache
from bosch.model.configuration import base_classes, hybrid_config_class, hybrid_mask
from bosch.model.families import (
    LAYER_KINDS,
    attention_needs,
    decoder_layers,
    mixes_documents,
    text_config,
)
from bosch.model.interface import (
    NAME,
    attention_modules,
    cache_room,
    check_shows_weights,
    layouts_of,
    masks_for_generate,
    register_attention,
    required_state,
    set_layouts,
)
from bosch.window import Window

logger = transformers_logging.get_logger(__name__)

# The backend of each attn_implementation that a user can name.
_BACKEND_OF: dict[str | None, str] = {
    None: "auto",
    NAME: "auto",
    "bosch": "auto",
    "auto": "auto",
    **{name: backend for backend, e in BACKENDS.items() for name in (backend, *e.aliases)},
}


def deploy_layouts(config: Any) -> list[HeadLayout | None]:
    """Layouts from `config.hybrid_attention`, None without attention; UserError if damaged."""
    _check_base_types(config, getattr(config, "_name_or_path", "") or "config.json")
    rows = hybrid_mask(config).layers
    kinds = decoder_layers(config)
    layouts: list[HeadLayout | None] = [None] * kinds.count
    for layer, row in zip(kinds.full, rows, strict=True):
        layouts[layer] = HeadLayout.deploy(row)
    for layer, size in kinds.windows.items():
        layouts[layer] = HeadLayout.deploy({Window(size): kinds.own_heads})
    return layouts


def _check_base_types(config: Any, where: str) -> None:
    text = text_config(config)
    types, layers = getattr(text, "layer_types", None), text.num_hidden_layers
    if types is None:
        return
    if len(types) != layers or any(kind not in LAYER_KINDS for kind in types):
        raise UserError(
            f"{where}: layer_types must hold {', '.join(LAYER_KINDS)} for each of {layers} "
            f"layers, found {types!r}; make the model again"
        )


class HybridModelMixin:
    """Adds layouts, a backend and a cache to the model class of a family."""

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        layouts = deploy_layouts(config)
        parent: Any = super()
        parent.__init__(config, *args, **kwargs)
        if text_config(config) is not config:  # the text config has its own implementation
            self.get_decoder().set_attn_implementation(NAME)  # type: ignore[attr-defined]
        self._install(layouts)
        self.register_load_state_dict_pre_hook(reorder_adapters)  # type: ignore[attr-defined]
        # At the decoder, since libraries replace the `forward` of the whole model.
        prepare = functools.partial(_prepare_pass, mixes_documents(config))
        self.get_decoder().register_forward_pre_hook(prepare, with_kwargs=True)  # type: ignore[attr-defined]

    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name_or_path: Any,
        *args: Any,
        output_loading_info: bool = False,
        **kwargs: Any,
    ) -> Any:
        """transformers' method, which here refuses a directory with other weights."""
        parent: Any = super()
        model, info = parent.from_pretrained(
            pretrained_model_name_or_path, *args, output_loading_info=True, **kwargs
        )
        check_weights(pretrained_model_name_or_path, model, info)
        return (model, info) if output_loading_info else model

    def add_adapter(self, adapter_config: Any, *args: Any, **kwargs: Any) -> None:
        """transformers' method; the adapter is the hybrid's own."""
        if adapter_config.base_model_name_or_path is None:
            adapter_config.base_model_name_or_path = self.config.name_or_path  # type: ignore[attr-defined]
        parent: Any = super()
        parent.add_adapter(adapter_config, *args, **kwargs)

    def load_adapter(self, *args: Any, **kwargs: Any) -> Any:
        """transformers' method, which does not call `load_state_dict`."""
        parent: Any = super()
        result = parent.load_adapter(*args, **kwargs)
        loaded = {name: weight.data for name, weight in self.named_parameters()}  # type: ignore[attr-defined]
        ordered = dict(loaded)
        reorder_adapters(self, ordered)
        for name, weight in loaded.items():
            weight.copy_(ordered[name])
        return result

    @classmethod
    def prepare_distribute_model(cls, distributed_config: Any, *args: Any, **kwargs: Any) -> Any:
        """Refuse to split heads or layers: layouts have all heads of a layer, caches all layers."""
        if isinstance(distributed_config, dict):
            distributed_config = DistributedConfig.from_dict(distributed_config)
        if distributed_config.tp_size > 1 or distributed_config.pp_size > 1:
            raise UserError(
                "tp_plan, tp_size, distributed_config: a hybrid's heads and layers cannot be split "
                "over processes by transformers; serve it with vLLM's --tensor-parallel-size, or "
                "load it with device_map"
            )
        parent: Any = super()
        return parent.prepare_distribute_model(distributed_config, *args, **kwargs)

    @classmethod
    def is_custom_code(cls) -> bool:
        """False, or transformers skips modules without parameters, whose buffers no file has."""
        return False

    def _install(self, layouts: list[HeadLayout | None]) -> None:
        needs = attention_needs(self.config)  # type: ignore[attr-defined]
        check_backend(self._hybrid_backend, needs)
        set_layouts(self, layouts, self._hybrid_backend)

    def _check_and_adjust_attn_implementation(
        self, attn_implementation: str | None, *args: Any, **kwargs: Any
    ) -> str:
        """Every implementation that is requested means the hybrid attention with that backend."""
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
        return HybridCache.of(self)

    def new_static_cache(self, max_cache_len: int) -> HybridCache:
        """An empty cache of fixed size for `max_cache_len` tokens, with which decoding compiles."""
        return HybridCache.of(self, max_cache_len)

    def _prepare_cache_for_generation(
        self,
        generation_config: Any,
        model_kwargs: dict[str, Any],
        generation_mode: Any,
        batch_size: int,
        max_cache_length: int,
    ) -> None:
        user_cache = model_kwargs.get(CACHE_NAME)
        if user_cache is not None or generation_config.use_cache is False:
            if user_cache is not None:
                adopt_cache(self, user_cache)
            parent: Any = super()
            parent._prepare_cache_for_generation(
                generation_config, model_kwargs, generation_mode, batch_size, max_cache_length
            )
            return
        if generation_config.cache_implementation == "static":
            cache = self._static_cache(generation_config, batch_size, max_cache_length)
        elif generation_config.cache_implementation in (None, "dynamic"):
            cache = self.new_cache()
            if generation_config.is_assistant:
                cache.activate_past_recording()  # type: ignore[no-untyped-call]
        else:
            raise UserError(
                f"cache_implementation='{generation_config.cache_implementation}' has no hybrid "
                "form: choose dynamic or static"
            )
        model_kwargs[CACHE_NAME] = cache

    def _static_cache(
        self, generation_config: Any, batch_size: int, max_cache_length: int
    ) -> HybridCache:
        """A static cache as large as the largest so far, as in transformers: no recompilation."""
        configured = getattr(generation_config, "max_cache_len", None) or 0
        self._static_length = max(max_cache_length, configured, getattr(self, "_static_length", 0))
        cache = self.new_static_cache(self._static_length)
        devices = {next(module.parameters()).device for module in attention_modules(self)}
        if generation_config.prefill_chunk_size is not None and len(devices) == 1:
            # Chunks of a prompt are compiled, too, and compiled code must not allocate the cache.
            copies = max(generation_config.num_beams, generation_config.num_return_sequences)
            kinds = decoder_layers(self.config)  # type: ignore[attr-defined]
            sliding, full = (kinds.own_heads, kinds.own_head_dim), (kinds.heads, kinds.head_dim)
            sizes = [sliding if n in kinds.windows else full for n in range(kinds.count)]
            cache.early_initialization(
                batch_size=batch_size * copies,
                num_heads=[heads for heads, _ in sizes],
                head_dim=[dim for _, dim in sizes],
                dtype=self.dtype,  # type: ignore[attr-defined]
                device=self.device,  # type: ignore[attr-defined]
            )
        return cache

    def init_continuous_batching(self, *args: Any, **kwargs: Any) -> Any:
        """Refused: transformers' pools of pages expect heads of one kind in a layer."""
        raise UserError(
            "continuous batching: the heads of a layer differ; call generate, or serve with vLLM"
        )

    create_masks_for_generate = staticmethod(masks_for_generate)


def check_weights(where: Any, model: Any, info: Mapping[str, Any]) -> None:
    """Raise UserError if loading left weights random, or did not use weights of the files.

    `info` is transformers' loading info. A bare decoder does not use the model's head.
    """
    missing = {*info["missing_keys"], *(str(key[0]) for key in info["mismatched_keys"])}
    if missing:
        raise UserError(
            f"{where}: {len(missing)} weights are missing or of another shape than config.json's, "
            f"{min(missing)} first; get the model again"
        )
    unexpected = set(info["unexpected_keys"])
    if model.base_model is model:
        prefix = f"{model.base_model_prefix}."
        unexpected = {name for name in unexpected if name.startswith((prefix, "layers."))}
    if unexpected:
        raise UserError(
            f"{where}: {len(unexpected)} weights of the files have no place in the model of "
            f"config.json, {min(unexpected)} first; get the model again"
        )


def adopt_cache(model: Any, cache: Any) -> None:
    """Replace the layers of an empty transformers cache, so that sliding heads save memory.

    A cache that already holds states, quantises or offloads them is not changed. It is exact, but
    its sliding heads hold every token, and a warning says so.
    """
    layers = getattr(cache, "layers", None)
    if layers is None or any(isinstance(layer, HeadGroupsLayer) for layer in layers):
        return
    # Every model has a layer with attention, which holds keys after any pass.
    started = any(getattr(layer, "keys", None) is not None for layer in layers)
    # Layers are cut to their windows, and sinks written, after attention. By then an offloaded
    # layer has left the device, perhaps in an incomplete copy.
    if started or not isinstance(cache, DynamicCache | StaticCache) or cache.offloading:
        logger.warning_once(
            f"A {type(cache).__name__} that holds, quantises or offloads states cannot take the "
            "form of a hybrid model: its sliding heads keep all tokens and save no memory; pass "
            "model.new_cache() or an empty DynamicCache"
        )
        return
    new: Any = HybridCache.of(model, cache_room(cache) if isinstance(cache, StaticCache) else None)
    if any(getattr(layer, "record_past", False) for layer in layers):
        new.activate_past_recording()
    cache.layers, cache.layer_class_to_replicate = new.layers, None


def _restarts(positions: Any) -> bool:
    """Whether positions restart within a row, as for packed documents.

    Positions with images have planes: (3, B, T) for time, height and width, which may restart
    anywhere, or (4, B, T) with the positions in the sequence first, which separate documents.
    """
    if positions.ndim == 3:
        if len(positions) == 3:
            return False
        positions = positions[0]
    # For a single token, as in decoding, avoid reading from the device.
    return positions.shape[-1] > 1 and bool((positions.diff(dim=-1) != 1).any())


def _prepare_pass(
    mixes: bool, decoder: Any, args: Any, kwargs: Any
) -> tuple[tuple[()], dict[str, Any]]:
    """Arguments of a decoder's pass, with a hybrid cache if the pass would make a cache.

    Raises ValueError for packed documents that this pass would not separate: transformers finds
    their borders in position_ids only without a cache, and in some families never. If
    `use_cache` is not passed, such a pass makes no cache.
    """
    decoder_class: Any = type(decoder)
    kwargs = dict(zip(_parameters(decoder_class), args, strict=False)) | kwargs
    old = kwargs.pop("past_key_values", None)  # transformers 5.24 renames it after this hook
    if old is not None and kwargs.get(CACHE_NAME) is None:
        kwargs[CACHE_NAME] = old
    if kwargs.get("output_attentions"):
        for module in attention_modules(decoder):
            check_shows_weights(required_state(module))
    past, use_cache = kwargs.get(CACHE_NAME), kwargs.get("use_cache")
    positions = kwargs.get("position_ids")
    if kwargs.get("attention_mask") is not None:
        positions = None
    undecided = use_cache is None and past is None
    if undecided:
        use_cache = bool(decoder.config.use_cache) and not decoder.training
    cached = past is not None or bool(use_cache)
    may_mix = cached or mixes
    # Reading positions breaks a compiled graph, so do it there only if the cache depends on them.
    reads_positions = may_mix and (undecided or not torch.compiler.is_compiling())
    if positions is not None and reads_positions and _restarts(positions):
        if mixes:
            raise ValueError(
                "models of this type do not keep packed documents apart, and position_ids start "
                "again within a row: pass one document per row, with an attention_mask where rows "
                "are padded"
            )
        if not undecided:
            raise ValueError(
                "packed documents are not kept apart in a pass with a cache, and position_ids "
                "start again within a row: pass use_cache=False, or one document per row"
            )
        use_cache = False
    if past is not None:
        adopt_cache(decoder, past)
    elif use_cache:
        kwargs[CACHE_NAME] = HybridCache.of(decoder)
    kwargs["use_cache"] = past is not None if use_cache is None else use_cache
    return (), kwargs


@functools.cache
def _parameters(decoder_class: Any) -> tuple[str, ...]:
    """Names of the parameters of a decoder's `forward`, in order."""
    return tuple(inspect.signature(decoder_class.forward).parameters)[1:]


@functools.cache
def hybrid_model_class(model_type: str) -> Any:
    """Causal language model class of a family's hybrid models."""
    created = _hybrid_class(model_type, base_classes(model_type)[2])
    _name_in_transformers(created.__name__, created)
    return created


@functools.cache
def hybrid_decoder_class(model_type: str) -> Any:
    """Class of a family's hybrid models without a head, for AutoModel."""
    return _hybrid_class(model_type, base_classes(model_type)[1])


def _hybrid_class(model_type: str, base: Any) -> Any:
    config_class, name = hybrid_config_class(model_type), f"Hybrid{base.__name__}"
    body = {
        "config_class": config_class,
        "config": config_class,
        "__module__": __name__,
        "__doc__": f"{base.__name__} with full and sliding heads in each layer.",
        "_can_set_attn_implementation_cached_value": True,
        # transformers looks for experts in the source of a class's module.
        "_can_set_experts_implementation_cached_value": base._can_set_experts_implementation(),
    }
    created = type(name, (HybridModelMixin, base), body)
    globals()[name] = created
    return created


def _name_in_transformers(name: str, created: Any) -> None:
    """Make a class an attribute of transformers, where `transformers serve` finds it.

    transformers replaces its module object while it loads, and the server may hold the older one.
    """
    setattr(sys.modules["transformers"], name, created)
    server = sys.modules.get("transformers.cli.serving.model_manager")
    if server is not None:
        setattr(server.transformers, name, created)
