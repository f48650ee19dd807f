"""Model classes of the hybrid architectures for vLLM: vLLM's classes with split attention.

`HybridQwen3ForCausalLM` and similar classes are made at first use, from vLLM's class for the family
or its transformers backend. After that class has built the model, each layer's attention is
replaced by several of vLLM's modules, with or without a window.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.models import ModelRegistry
from vllm.model_executor.models.utils import extract_layer_index

from bosch.engines.vllm.checks import check_engine, plan_of, served_layouts
from bosch.engines.vllm.groups import groups_of_modules, module_name
from bosch.engines.vllm.plan import Module, rank_order
from bosch.errors import UserError
from bosch.model.head_weights import in_order
from bosch.model.loading import full_attention_config
from bosch.model.published import published_names

_TRANSFORMERS = "TransformersForCausalLM"
_TRANSFORMERS_EXPERTS = "TransformersMoEForCausalLM"


class SplitAttention(nn.Module):
    """One layer's attention in modules, and the heads of which the output of each is used."""

    def __init__(
        self, attentions: list[Attention], modules: Sequence[Module], used: Sequence[range]
    ) -> None:
        super().__init__()
        self.attentions = nn.ModuleList(attentions)
        self.modules_and_used = list(zip(modules, used, strict=True))
        self.heads = used[-1].stop

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Output [T, HQ * D] of query [T, HQ * D], key and value [T, HKV * D]."""

        def part(states: Tensor, first: int, count: int, heads: int) -> Tensor:
            width = states.shape[-1] // heads
            return states.narrow(-1, first * width, count * width)

        outputs = []
        for attention, ((_, first, size), used) in zip(
            self.attentions, self.modules_and_used, strict=True
        ):
            if used:
                states = (part(x, first, size, self.heads) for x in (query, key, value))
                outputs.append(part(attention(*states), used.start - first, len(used), size))
        return torch.cat(outputs, dim=-1)


@contextlib.contextmanager
def _recorded_arguments() -> Iterator[dict[str, dict[str, Any]]]:
    """Record the arguments of attention modules that are made inside the block, by module name."""
    original = Attention.__init__
    signature = inspect.signature(original)
    records: dict[str, dict[str, Any]] = {}

    @functools.wraps(original)
    def recording(self: Any, *args: Any, **kwargs: Any) -> None:
        bound = signature.bind(self, *args, **kwargs)
        arguments = dict(bound.arguments)
        arguments.pop("self")
        arguments |= arguments.pop("extra_impl_args", {})
        arguments["num_kv_heads"] = arguments.get("num_kv_heads") or arguments["num_heads"]
        records[arguments.get("prefix", "")] = arguments
        original(self, *args, **kwargs)

    Attention.__init__ = recording
    try:
        yield records
    finally:
        Attention.__init__ = original


def _module_arguments(arguments: dict[str, Any], module: Module, index: int) -> dict[str, Any]:
    """Arguments of a layer's module number `index`."""
    q_per_kv = arguments["num_heads"] // arguments["num_kv_heads"]
    changed = {
        "num_heads": module.size * q_per_kv,
        "num_kv_heads": module.size,
        "per_layer_sliding_window": module.window,
        # No second number in the name, from which vLLM reads the layer's number.
        "prefix": module_name(arguments["prefix"], index),
    }
    if (logits := arguments.get("sinks")) is not None:
        first = module.first * q_per_kv
        # A view of the parameter, into which weights are loaded later.
        changed["sinks"] = logits.data[first : first + changed["num_heads"]]
    return {**arguments, **changed}


class HybridMixin:
    """Splits the attention of the vLLM class it is mixed into."""

    # Whether vLLM has its own class for the family, which reads published checkpoints.
    _has_own_class: bool

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        check_engine()
        plan = self._hybrid_plan = plan_of(vllm_config)
        self._hybrid_rows = {
            layer: row
            for row, layer in enumerate(served_layouts(vllm_config.model_config.hf_config))
        }
        rank = get_tensor_model_parallel_rank()
        parent: Any = super()
        with _recorded_arguments() as records:
            parent.__init__(vllm_config=_with_base_config(vllm_config), prefix=prefix)
        registered = vllm_config.compilation_config.static_forward_context
        module: Any = self
        split = set()
        for name, attention in list(module.named_modules()):
            if not isinstance(attention, Attention):
                continue
            layer = extract_layer_index(attention.layer_name)
            row = self._hybrid_rows[layer]
            modules, used = plan.modules[row], plan.used(row, rank)
            arguments = records[attention.layer_name]
            if arguments["num_kv_heads"] != used[-1].stop or layer in split:
                raise UserError(
                    f"{type(self).__name__}: vLLM's attention of layer {layer} is not one module "
                    "of all its heads, so that it cannot be split"
                )
            del registered[attention.layer_name]
            attentions = [
                Attention(**_module_arguments(arguments, module, index))
                for index, module in enumerate(modules)
            ]
            _check_windows(attentions, tuple(module.window for module in modules), layer)
            owner, _, attribute = name.rpartition(".")
            replacement = SplitAttention(attentions, modules, used)
            setattr(module.get_submodule(owner), attribute, replacement)
            split.add(layer)
        self._check_all_split(split, registered)

    def _check_all_split(self, split: set[int], registered: dict[str, Any]) -> None:
        """Check that all caches of the engine belong to the new modules."""
        module: Any = self
        in_model = {id(child) for child in module.modules() if isinstance(child, Attention)}
        others = [
            name
            for name, layer in registered.items()
            if isinstance(layer, Attention) and id(layer) not in in_model
        ]
        if others or not split:
            raise UserError(
                f"{type(self).__name__}: vLLM keeps attention where it cannot be split "
                f"({', '.join(others) or 'no layer has an attention module'})"
            )

    @classmethod
    def get_kv_cache_groups(cls, vllm_config: Any, kv_cache_spec: dict[str, Any]) -> list[Any]:
        """Cache groups, which vLLM requests from 0.33 on (`SupportsKVCacheGrouping`)."""
        return groups_of_modules(vllm_config, kv_cache_spec)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> Any:
        """Load a checkpoint, reordered so that each rank's widest heads come first."""
        module: Any = self
        parent: Any = super()
        orders = {
            layer: rank_order(self._hybrid_plan, row) for layer, row in self._hybrid_rows.items()
        }
        places = module.config.hybrid_attention["weights"]
        weights = ((name, in_order(name, x, places, orders)) for name, x in weights)
        if self._has_own_class:
            weights = published_names(weights, module.config)
        return parent.load_weights(weights)


def _check_windows(
    attentions: list[Attention], expected: tuple[int | None, ...], layer: int
) -> None:
    """Check that the engine has not given a full module the window of the whole model."""
    windows = tuple(attention.sliding_window for attention in attentions)
    if windows != expected:
        raise UserError(
            f"layer {layer}: vLLM gave its attention the windows {windows} where the model has "
            f"{expected}; set sliding_window to null in config.json"
        )


def _with_base_config(vllm_config: Any) -> Any:
    """`vllm_config` of the family; the layout stays in it, the key of vLLM's compiled graphs."""
    model = copy.copy(vllm_config.model_config)
    base = full_attention_config(model.hf_config)
    base.hybrid_attention = model.hf_config.hybrid_attention
    base.architectures = model.hf_config.architectures
    model.hf_config = model.hf_text_config = base
    view = copy.copy(vllm_config)
    view.model_config = model
    return view


@functools.cache
def hybrid_engine_class(base: str) -> Any:
    """Model class for vLLM of the hybrids of a model class of transformers."""
    # vLLM inspects the class before the checks that refuse these families.
    refused = base in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.values()
    own_classes = {} if refused else {name.lower(): name for name in ModelRegistry.models}
    architecture = own_classes.get(base.lower())
    backend = _TRANSFORMERS_EXPERTS if "moe" in base.lower() else _TRANSFORMERS
    engine_class = ModelRegistry.models[architecture or backend].load_model_cls()
    body = {
        "__module__": __name__,
        "__doc__": f"{base} with full and sliding heads, for vLLM.",
        "_has_own_class": architecture is not None,
    }
    return type(f"Hybrid{base}", (HybridMixin, engine_class), body)


def __getattr__(name: str) -> Any:
    if name.startswith("Hybrid"):
        return hybrid_engine_class(name.removeprefix("Hybrid"))
    raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
