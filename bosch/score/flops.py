"""Floating-point operations of each module of a pass, as torch's FlopCounterMode counts them.

Multiplication and addition count as two operations. Attention counts every pair of query and key
that a kernel computes: the whole square for full heads, the bands of the sdpa backend for sliding
heads. Norms, rotary embedding, activations and the recurrences of linear attention are not counted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from bosch.hybrid import Bands
from bosch.masks import HeadMask
from bosch.model import families
from bosch.model.interface import attention_module
from bosch.score.batches import Batch
from bosch.window import Window

# Families with parallel attention and feed-forward blocks; in some others it is configured.
_PARALLEL_BLOCKS = ("cohere", "cohere2", "cohere2_moe", "phi")


@dataclass(frozen=True)
class LayerFlops:
    """Operations of the linear maps of one decoder layer, per position."""

    inputs: int  # queries, keys, values and gates of attention
    output: int
    feed_forward: int

    @property
    def linear(self) -> int:
        """Operations of all maps."""
        return self.inputs + self.output + self.feed_forward


class Flops:
    """Costs of a model; `layers` are all, `full_layers` the rows of a mask."""

    def __init__(self, model: PreTrainedModel) -> None:
        text = families.text_config(model.config)
        kinds = families.decoder_layers(model.config)
        decoder = model.get_decoder()
        layers = decoder.layers
        sizes = dict.fromkeys(kinds.full, kinds.head_dim)
        sizes |= dict.fromkeys(kinds.windows, kinds.own_head_dim)
        self.layers = [
            _attention_layer(model, number, text, head_dim)
            if (head_dim := sizes.get(number)) is not None
            else LayerFlops(0, 0, _all_linear(layer, text))
            for number, layer in enumerate(layers)
        ]
        # Maps of the decoder outside its layers, like Gemma 4's per-layer embeddings.
        self.outside = sum(
            2 * module.weight.numel()
            for name, module in decoder.named_modules()
            if isinstance(module, nn.Linear) and not name.startswith("layers.")
        )
        self.full_layers = [self.layers[number] for number in kinds.full]
        self._is_parallel: bool = getattr(
            text, "use_parallel_residual", families.base_type(text) in _PARALLEL_BLOCKS
        )
        heads = text.num_attention_heads
        self.q_per_kv: int = heads // kinds.heads
        # Scores and sums of values of a KV group: 2 D operations each, per query head.
        self.per_pair: int = 4 * kinds.head_dim * self.q_per_kv
        self.num_key_value_heads = kinds.heads
        self.own_windows = kinds.windows
        self.per_own_pair: int = 4 * kinds.own_head_dim * heads
        self.output_head: int = 2 * model.get_output_embeddings().weight.numel()
        self._first_full = kinds.full[0]
        self.all_linear = self.outside + sum(layer.linear for layer in self.layers)

    def attention(self, row: Mapping[Window | None, int], batch: Batch) -> int:
        """Operations of the attention of KV heads by window (None: full)."""
        rows, length = batch.input_ids.shape
        return (
            rows
            * self.per_pair
            * sum(
                count * (length * length if window is None else sliding_pairs(length, window))
                for window, count in row.items()
            )
        )

    def whole_pass(self, mask: HeadMask, batch: Batch) -> int:
        """Operations of a pass with the output head only at the answers."""
        linear = self.all_linear * batch.positions
        attention = sum(self.attention(row, batch) for row in mask.layers)
        own_attention = sum(self._own_attention(layer, batch) for layer in self.own_windows)
        return linear + attention + own_attention + self.output_head * len(batch.answers)

    def _own_attention(self, layer: int, batch: Batch) -> int:
        """Operations of the attention of a layer that slides in the base model."""
        rows, length = batch.input_ids.shape
        return self.per_own_pair * rows * sliding_pairs(length, Window(self.own_windows[layer]))

    def gradient(self, batch: Batch, menu: Sequence[Window], *, recompute: bool = True) -> int:
        """Operations of a gate gradient: full attention and each window, no gradients of weights.

        With `recompute` the backward pass recomputes every layer that it reaches, whole: torch may
        leave out a layer's last map. Backward through a linear map costs as much as forward,
        through attention 2.5 times as much. It ends at the attention outputs of the lowest full
        layer, without blocks parallel to them.
        """
        first, above = self._first_full, self.layers[self._first_full :]
        lowest = above[0]
        parallel = lowest.feed_forward if self._is_parallel else 0
        linear = self.all_linear * batch.positions
        attention = self.attention(dict.fromkeys((None, *menu), self.num_key_value_heads), batch)
        own_attention = {layer: self._own_attention(layer, batch) for layer in self.own_windows}
        count = len(self.full_layers)
        reached = sum(layer.linear for layer in above) * batch.positions
        own_reached = sum(cost for layer, cost in own_attention.items() if layer > first)
        forward = linear + count * attention + sum(own_attention.values())
        backward = reached - (lowest.inputs + parallel) * batch.positions
        backward += ((count - 1) * attention + own_reached) * 5 // 2
        recomputed = 0
        if recompute:
            recomputed = reached + count * attention + own_reached
        return forward + recomputed + backward + 2 * self.output_head * len(batch.answers)


def sliding_pairs(length: int, window: Window) -> int:
    """Pairs of query and key of a sliding head, in the bands of the sdpa backend."""
    if length <= window.size:
        return length * length
    count, block, before = Bands.of(length, length, 0, window.size, window.sinks)
    keys = window.sinks + (before + 1) * block
    return (length - count * block) ** 2 + count * block * keys


def _attention_layer(
    model: PreTrainedModel, number: int, text: PreTrainedConfig, head_dim: int
) -> LayerFlops:
    linear = _all_linear(attention_module(model, number), text)
    output = 2 * text.num_attention_heads * head_dim * text.hidden_size
    everything = _all_linear(model.get_decoder().layers[number], text)
    return LayerFlops(linear - output, output, everything - linear)


def _all_linear(module: nn.Module, text: PreTrainedConfig) -> int:
    return sum(linear_flops(each, text) for each in module.modules())


def linear_flops(module: nn.Module, text: PreTrainedConfig) -> int:
    """Operations per token of a module's matrices, counting the experts that one token uses."""
    total = 0
    if "Norm" in type(module).__name__:
        return 0
    for name, weight in module.named_parameters(recurse=False):
        if name.endswith("bias"):  # is a matrix if each expert has a bias
            continue
        if weight.ndim == 2 or isinstance(module, nn.Conv1d):
            total += 2 * weight.numel()
        elif weight.ndim == 3:
            each = weight.numel() // weight.shape[0]
            total += 2 * each * families.experts_per_token(text)
    return total
