"""Continuous batching of transformers: `generate_batch` and `transformers serve`.

transformers keeps the pages of a type of layer in one pool, with one number of KV heads and one
window. A hybrid layer has heads of both types, so transformers gets a model of *slices*: g KV heads
of one layer and one type, where g divides all such numbers. A slice is a layer in the pools, so a
sliding head holds a ring of W tokens and a full head all tokens. Shapes: T tokens of all requests
in a step, Tk keys, HQ query heads, HKV KV heads, D head dimension.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from bosch.attention.call import AttentionCall
from bosch.attention.kernels import fused_attention
from bosch.attention.layout import HeadGroup, HeadLayout
from bosch.attention.logit_transform import dense_attention
from bosch.errors import UserError
from bosch.model.families import decoder_layers, pages_refusal, text_config


def _type_of(group: HeadGroup) -> str:
    """transformers' name of a layer's type, by the window of its heads."""
    return "full_attention" if group.window is None else "sliding_attention"


# Attention modules that do not receive the pages of a pass from their layer.
_WITHOUT_PAGES = ("NemotronAttention", "PersimmonAttention", "StableLmAttention")


class PagedConfig:
    """The text configuration with slices as layers; `slices`: their indices by module and group."""

    def __init__(
        self, config: Any, layouts: Sequence[HeadLayout | None], modules: Sequence[nn.Module | None]
    ) -> None:
        self._text = text_config(config)
        self._attn_implementation = "sdpa"  # makes transformers prepare masks
        self.sliding_window = _only_window(config, layouts, modules)
        groups = [group for layout in layouts if layout is not None for group in layout.groups]
        self.num_key_value_heads = math.gcd(*(len(group.heads) for group in groups))
        self.head_dim = decoder_layers(config).head_dim
        self.layer_types: list[str] = []
        self.slices: dict[nn.Module, list[range]] = {}
        for layout, module in zip(layouts, modules, strict=True):
            if layout is None or module is None:
                continue
            self.slices[module] = []
            for group in layout.groups:
                first, count = len(self.layer_types), len(group.heads) // self.num_key_value_heads
                self.slices[module].append(range(first, first + count))
                self.layer_types += [_type_of(group)] * count
        self.num_hidden_layers = len(self.layer_types)

    def get_text_config(self, *args: Any, **kwargs: Any) -> PagedConfig:
        return self

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_text":
            raise AttributeError(name)
        return getattr(self._text, name)


def _only_window(
    config: Any, layouts: Sequence[HeadLayout | None], modules: Sequence[nn.Module | None]
) -> int | None:
    """The window of all sliding heads, None without; UserError for what pools do not support."""
    sliding = {window for layout in layouts if layout is not None for window in layout.windows}
    reason = pages_refusal(decoder_layers(config), sliding)
    if reason is None:
        if all(type(module).__name__ not in _WITHOUT_PAGES for module in modules):
            return next((window.size for window in sliding), None)
        reason = "layers that do not hand transformers' pages on to attention"
    raise UserError(f"continuous batching: this model has {reason}; call generate")


class PagedView:
    """A hybrid model as transformers' continuous batching sees it: with a `PagedConfig`."""

    _supports_flash_attn = False  # heads of two kinds in a layer: computed with masks

    def __init__(self, model: Any, config: PagedConfig) -> None:
        self.__dict__.update(_model=model, config=config)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._model, name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self._model, name)

    def eval(self) -> PagedView:
        self._model.eval()
        return self

    def __call__(self, attention_mask: Mapping[str, Tensor] | Tensor, **kwargs: Any) -> Any:
        """A pass over the tokens of all requests; a mask of each type is [1, 1, T, Tk].

        A mask is 0 for visible keys and very negative elsewhere; if all slices have one type there
        is a single mask. A row of padding sees no key, so it is made to see all: NaN otherwise.
        """
        if isinstance(attention_mask, Tensor):
            attention_mask = {self.config.layer_types[0]: attention_mask}
        visible = {}
        for name, mask in attention_mask.items():
            seen = mask == 0
            visible[name] = seen | ~seen.any(dim=-1, keepdim=True)
        # A 4-D mask is passed on unchanged; attention selects that of each type.
        first_mask = next(iter(attention_mask.values()))
        # Not named `cache`, in which an attention module would store all its heads as one slice.
        pages = kwargs.pop("cache")
        return self._model(attention_mask=first_mask, visible=visible, pages=pages, **kwargs)


def paged_attention(module: nn.Module, call: AttentionCall, options: Mapping[str, Any]) -> Tensor:
    """Attention [1, T, HQ, D] of a step's query, key and value over the pages of all requests."""
    query, key, value, layout = call.query, call.key, call.value, call.layout
    assert isinstance(key, Tensor) and isinstance(value, Tensor)
    cache = options["pages"]
    size, q_per_kv = cache.config.num_key_value_heads, query.shape[1] // key.shape[1]
    outputs = []
    for group, slices in zip(layout.groups, cache.config.slices[module], strict=True):
        new_keys, new_values = layout.heads_of(key, group), layout.heads_of(value, group)
        states = [
            cache.update(
                key_states=new_keys[:, i * size : (i + 1) * size],
                value_states=new_values[:, i * size : (i + 1) * size],
                layer_idx=index,
                kwargs=dict(options),  # a copy, since it is changed
            )
            for i, index in enumerate(slices)
        ]
        keys, values = (torch.cat(parts, dim=1) for parts in zip(*states, strict=True))
        queries = layout.heads_of(query, group, q_per_kv)
        visible = options["visible"][_type_of(group)]
        transform = call.transform.of(layout, group, q_per_kv)
        if call.backend == "eager" or not transform.is_plain:
            outputs.append(dense_attention(queries, keys, values, visible, transform))
        else:
            outputs.append(
                fused_attention(queries, keys, values, scale=transform.scaling, mask=visible)
            )
    return layout.merge(outputs, q_per_kv)
