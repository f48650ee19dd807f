"""Floating-point operations of the parts of a pass, as torch's FlopCounterMode counts them.

A multiplication and an addition are two operations. Attention counts every pair of query and key
that a kernel is asked for: the whole square for full heads, the bands of the sdpa backend for
sliding ones. Norms, rotary embedding and activations are left out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from torch import nn

from bosch.attention.sdpa import block_size
from bosch.batches import Batch


@dataclass(frozen=True)
class LayerFlops:
    """Operations for each position that one decoder layer's linear maps compute."""

    query: int
    key_value: int
    output: int
    feed_forward: int

    @property
    def linear(self) -> int:
        """All of them."""
        return self.query + self.key_value + self.output + self.feed_forward

    @property
    def after_attention(self) -> int:
        """Those that follow the attention itself."""
        return self.output + self.feed_forward


class Pairs(NamedTuple):
    """Pairs of query and key for one full head and for one sliding head."""

    full: int
    sliding: int


class Flops:
    """Costs of a model at one window."""

    def __init__(self, model: Any, window_size: int, sinks: int) -> None:
        config = model.config
        self.layers = [_layer(layer, config) for layer in model.get_decoder().layers]
        heads = config.num_attention_heads
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
        self.per_pair: int = 4 * head_dim * (heads // config.num_key_value_heads)
        self.num_key_value_heads = int(config.num_key_value_heads)
        self.head: int = 2 * model.get_output_embeddings().weight.numel()
        self.window_size, self.sinks = window_size, sinks

    def pairs(self, batch: Batch) -> Pairs:
        """What a head of each kind computes for a batch."""
        rows, length = batch.input_ids.shape
        branches = batch.branches
        if branches is None:
            return self.pairs_apart(rows, length)
        texts = self.pairs_apart(rows, branches.trunk)
        tail = rows * branches.tail
        reach = len(branches.reach(self.window_size, self.sinks))
        return Pairs(texts.full + tail * length, texts.sliding + tail * reach)

    def pairs_apart(self, rows: int, length: int) -> Pairs:
        """The same for rows of one example each."""
        sliding = sliding_pairs(length, self.window_size, self.sinks)
        return Pairs(rows * length * length, rows * sliding)

    def attention(self, row: np.ndarray, pairs: Pairs) -> int:
        """Attention of a layer whose mask is `row` [HKV]."""
        full = int(row.sum())
        return self.per_pair * (full * pairs.full + (len(row) - full) * pairs.sliding)

    def both(self, pairs: Pairs) -> int:
        """Attention of a layer with every head of both kinds."""
        return self.per_pair * self.num_key_value_heads * sum(pairs)

    def answers(self, queries: int, length: int) -> int:
        """Attention of every head for `queries` positions in all, under a dense mask."""
        return self.per_pair * self.num_key_value_heads * queries * length

    def whole_pass(self, is_full: np.ndarray, batch: Batch) -> int:
        """A pass that saves nothing: each example has a row, every layer is computed everywhere.

        Only the head is at the answers alone. The mask is `is_full` [L, HKV].
        """
        rows = len(batch.examples)
        pairs = self.pairs_apart(rows, batch.longest)
        linear = sum(layer.linear for layer in self.layers) * rows * batch.longest
        attention = sum(self.attention(row, pairs) for row in is_full)
        return linear + attention + self.head * len(batch.answers)

    def gradient(self, batch: Batch) -> int:
        """Forward and backward pass for the gates: both kinds of attention, no weight gradients.

        Backward through a linear map costs as much as the map, through attention 2.5 times that.
        It ends at the lowest layer's attention outputs.
        """
        first, layers = self.layers[0], len(self.layers)
        linear = sum(layer.linear for layer in self.layers) * batch.size
        linear += self.head * len(batch.answers)
        backward = linear - (first.query + first.key_value) * batch.size
        attention = self.both(self.pairs(batch))
        return linear + backward + layers * attention + (layers - 1) * 5 * attention // 2


def sliding_pairs(length: int, window: int, sinks: int) -> int:
    """Pairs of query and key for one sliding head: bands of `block_size` queries."""
    if length <= window:
        return length * length
    block = block_size(window)
    if length < block:
        return length * (length + sinks)
    if sinks:
        return -(-length // block) * block * (sinks + window + block)
    count, rest = divmod(length - window, block)
    return window * window + count * block * (window + block) + rest * (window + rest)


def _layer(layer: nn.Module, config: Any) -> LayerFlops:
    attention: Any = layer.self_attn
    total = sum(_of(module, config) for module in layer.modules())
    output = _of(attention.o_proj, config)
    if hasattr(attention, "qkv_proj"):
        fused = _of(attention.qkv_proj, config)
        return LayerFlops(0, fused, output, total - fused - output)
    query = _of(attention.q_proj, config)
    key_value = _of(attention.k_proj, config) + _of(attention.v_proj, config)
    return LayerFlops(query, key_value, output, total - query - key_value - output)


def _of(module: nn.Module, config: Any) -> int:
    """Operations of a module's own matrices; a token visits some of the experts only."""
    total = 0
    if "Norm" in type(module).__name__:
        return 0
    for weight in module.parameters(recurse=False):
        if weight.ndim == 2:
            total += 2 * weight.numel()
        elif weight.ndim == 3:
            each = weight.numel() // weight.shape[0]
            total += 2 * each * int(config.num_experts_per_tok)
    return total
