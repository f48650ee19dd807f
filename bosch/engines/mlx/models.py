"""mlx-lm's models of hybrid types: mlx-lm's classes with a cache for each group of heads.

For a model of type `hybrid_qwen3`, mlx-lm imports `mlx_lm.models.hybrid_qwen3`. The finder below
makes this module from mlx-lm's source of `qwen3`, as a copy, so that other models are not affected.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader
from types import ModuleType
from typing import Any

import mlx.core as mx
import numpy as np
import torch
from mlx_lm.models.cache import KVCache
from mlx_lm.utils import MODEL_REMAPPING
from torch import Tensor
from transformers import CONFIG_MAPPING, PreTrainedConfig

from bosch.engines.mlx.cache import HybridLayerCache, LayerPass, check_caches, grouped_attention
from bosch.errors import UserError
from bosch.hybrid import Window, deploy_layouts
from bosch.model.families import HYBRID_PREFIX, decoder_layers
from bosch.model.loading import full_attention_config
from bosch.model.published import published_names, renames_weights
from bosch.model.registration import register_model


def published_arrays(weights: dict[str, mx.array], config: PreTrainedConfig) -> dict[str, mx.array]:
    """`weights` with fused experts split; those that mlx-lm has quantised have its names."""
    quantised = any(name.endswith(".scales") for name in weights)
    if quantised or not renames_weights(config):
        return weights
    # One at a time, since mlx reads a weight when it is needed.
    tensors = ((name, _tensor(weights[name])) for name in list(weights))
    return {name: _array(tensor) for name, tensor in published_names(tensors, config)}


def _tensor(array: mx.array) -> Tensor:
    # numpy has no bfloat16.
    if array.dtype == mx.bfloat16:
        return torch.from_numpy(np.array(array.view(mx.uint16))).view(torch.bfloat16)
    return torch.from_numpy(np.array(array))


def _array(tensor: Tensor) -> mx.array:
    tensor = tensor.contiguous()
    if tensor.dtype == torch.bfloat16:
        return mx.array(tensor.view(torch.uint16).numpy()).view(mx.bfloat16)
    return mx.array(tensor.numpy())


_MODELS = "mlx_lm.models."
_ATTENTION = "scaled_dot_product_attention"

# Families whose logits and tokens equal transformers' (tests/mlx/test_families.py). Others mlx-lm
# may configure differently, or compute attention by itself.
SERVED = (
    "afmoe", "cohere", "dots1", "ernie4_5", "ernie4_5_moe", "gemma", "glm4", "glm4_moe", "granite",
    "granitemoe", "helium", "hunyuan_v1_dense", "laguna", "llama", "mellum", "ministral3",
    "mistral", "mixtral", "nemotron", "olmo2", "olmoe", "phi3", "qwen2", "qwen2_moe", "qwen3",
    "qwen3_moe", "seed_oss", "starcoder2",
)  # fmt: skip


def register() -> None:
    """Register the hybrid types with mlx-lm; harmless when called again."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.append(_Finder())


class _Finder(MetaPathFinder):
    """Finds mlx-lm's module of a hybrid type."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        prefix = _MODELS + HYBRID_PREFIX
        if not fullname.startswith(prefix):
            return None
        model_type = fullname.removeprefix(prefix)
        check_served(model_type)
        name = MODEL_REMAPPING.get(model_type, model_type)
        base = importlib.util.find_spec(_MODELS + name)
        assert base is not None and base.origin is not None
        loader = _HybridLoader(fullname, base.origin)
        loader.model_type = model_type
        return importlib.util.spec_from_loader(fullname, loader, origin=base.origin)


def check_served(model_type: str) -> None:
    """Raise UserError if a model type is not supported."""
    if model_type not in SERVED:
        raise UserError(
            f"mlx-lm: hybrid models of type '{model_type}' are not supported; supported are "
            f"{', '.join(SERVED)}; run others with transformers or vLLM"
        )


class _HybridLoader(SourceFileLoader):
    """Runs mlx-lm's source of a family, then replaces its classes by hybrid ones."""

    model_type: str

    def exec_module(self, module: ModuleType) -> None:
        super().exec_module(module)
        register_model(self.model_type)
        names = vars(module)
        names[_ATTENTION] = grouped_attention(names[_ATTENTION])
        names["ModelArgs"] = _args_of(names["ModelArgs"])
        names["Model"] = _model_of(names["Model"])


def _args_of(base: Any) -> type:
    class HybridArgs(base):  # type: ignore[misc]
        """mlx-lm's arguments of a family, with the layout of each layer that has one."""

        @classmethod
        def from_dict(cls, params: dict[str, Any]) -> HybridArgs:
            config = CONFIG_MAPPING[params["model_type"]].from_dict(params)
            base = full_attention_config(config)
            for setting in _unsupported_settings(base):
                raise UserError(
                    f"mlx-lm: {setting}, which it does not read as transformers does; run this "
                    "model with transformers or vLLM"
                )
            args = super().from_dict(params | _base_fields(base))
            full = decoder_layers(config).full
            layouts = deploy_layouts(config)
            args.layouts = tuple(x if layer in full else None for layer, x in enumerate(layouts))
            args.hybrid_config = config
            return args

    return HybridArgs


def _unsupported_settings(base: PreTrainedConfig) -> Iterator[str]:
    """Settings of the configuration with which mlx-lm would compute other logits."""
    rotation = getattr(base, "rope_parameters", None) or {}
    kind = rotation.get("rope_type", "default")
    if kind == "longrope":  # mlx-lm always uses the factors for long texts
        yield "rope_parameters.rope_type is longrope"
    for name, usual in (("attention_factor", None), ("truncate", True)):
        if kind == "yarn" and rotation.get(name, usual) != usual:
            yield f"rope_parameters.{name} is {rotation[name]}"
    names = ["hidden_act", *(["norm_topk_prob"] if base.model_type == "qwen2_moe" else [])]
    for name in names:  # mlx-lm has the usual values built in
        usual, value = (getattr(source, name, None) for source in (type(base)(), base))
        if value != usual:
            yield f"{name} is {value}"


def _base_fields(base: PreTrainedConfig) -> dict[str, Any]:
    """The configuration of the family itself, also with the names of published files."""
    content: dict[str, Any] = base.to_dict()
    content |= {name: getattr(base, name) for name in base.attribute_map}
    rotation = content.get("rope_parameters") or {}
    for name in ("rope_theta", "partial_rotary_factor"):
        if name in rotation:
            content[name] = rotation[name]
    kind = rotation.get("rope_type", "default")
    content["rope_scaling"] = None if kind == "default" else {"type": kind, **rotation}
    return content


def _model_of(base: Any) -> type:
    class HybridModel(base):  # type: ignore[misc]
        """mlx-lm's model of a family, with a cache for each group of heads."""

        def make_cache(self) -> list[object]:
            """Empty caches, one for each layer."""
            base_caches = super().make_cache() if hasattr(base, "make_cache") else None
            caches = base_caches or [KVCache() for _ in self.layers]
            return [
                cache if layout is None else HybridLayerCache.of(layout)
                for cache, layout in zip(caches, self.args.layouts, strict=True)
            ]

        def __call__(
            self, inputs: mx.array, cache: list[Any] | None = None, *args: object, **kwargs: object
        ) -> mx.array:
            """Logits [B, T, V] of tokens [B, T], which follow those in the caches, if any."""
            layouts = self.args.layouts
            if cache is not None:
                check_caches(cache, layouts)
            caches = [None] * len(layouts) if cache is None else cache
            masks: dict[Window | None, mx.array | str | None] = {}
            passes = [
                cache if layout is None else LayerPass(cache, layout, masks)
                for cache, layout in zip(caches, layouts, strict=True)
            ]
            return super().__call__(inputs, passes, *args, **kwargs)

        def sanitize(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
            """Weights under mlx-lm's names, from those of a hybrid or of mlx-lm."""
            weights = published_arrays(weights, self.args.hybrid_config)
            return dict(super().sanitize(weights)) if hasattr(base, "sanitize") else weights

        def shard(self, group: object = None) -> None:
            raise UserError("mlx-lm: a hybrid model is not shared among several machines")

    return HybridModel
