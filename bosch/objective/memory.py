"""Memory of the activations of a batch.

Small factors count tensors that exist at the same time. T tokens of an example, W window.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from bosch.attention.causal import DENSE_MASK_ENTRIES
from bosch.model.interface import attention_modules, head_state
from bosch.objective.block_bytes import BlockBytes
from bosch.objective.decoder_shape import DecoderShape
from bosch.window import Window, block_size


@dataclass(frozen=True)
class ActivationSizes:
    """Bytes of a decoder's activations with values of `value_bytes`, as also its `blocks` have.

    If a model is sharded over `shards` processes, each holds a share of the heads and of the
    `blocks`. If sequences are shared by `sharing` processes, each holds its tokens, and the keys
    and values of all while a layer attends. `keeps_scores`: attention stores its scores.
    """

    shape: DecoderShape
    blocks: BlockBytes
    value_bytes: int
    shards: int = 1
    sharing: int = 1
    keeps_scores: bool = False

    @classmethod
    def of(
        cls,
        shape: DecoderShape,
        value_bytes: int,
        shards: int = 1,
        sharing: int = 1,
        attention: str = "auto",
    ) -> ActivationSizes:
        """Make the sizes of a decoder with this shape."""
        keeps_scores = shape.keeps_scores("sdpa" if attention == "auto" else attention)
        return cls(shape, shape.blocks(value_bytes), value_bytes, shards, sharing, keeps_scores)

    def state(self, tokens: int) -> int:
        """Bytes of this process's part of the hidden states of `tokens`."""
        return self._local(tokens) * self.shape.hidden * self.value_bytes

    def plain_pass(self, rows: int, length: int) -> int:
        """Peak bytes of activations in a pass over `rows` sequences of `length` without gradients.

        They are those of one feed-forward block.

        Scores without a fused kernel are computed in pieces. If sequences are shared, the peak may
        be an attention with only full heads: all keys and values as received, and in order.
        """
        tokens = rows * length
        shape, key_value = self.shape, self.shape.key_value_size
        peak = 5 * self.state(tokens) + self._block_bytes(tokens, "plain")
        if self.sharing > 1:
            widths = 3 * shape.hidden + 2 * shape.query_size + 2 * key_value
            attention = self._local(tokens) * widths + 2 * 2 * key_value * tokens
            peak = max(peak, attention * self.value_bytes)
        softcap = self.keeps_scores and shape.softcap
        return peak + self._piece(rows, length) * (8 * (1 + softcap) + self.value_bytes)

    def gradient(self, rows: int, length: int, *windows: int) -> int:
        """Peak bytes of a gate gradient over `rows` examples of `length` tokens.

        `windows` are the sizes of the menu.

        Every layer's input, plus the largest of: the forward pass; one layer's attention with what
        its backward pass needs; and what that attention stores together with another block of its
        layer.
        """
        tokens = rows * length
        attention = self._attention(rows, length, windows) + self._score_gradients(rows, length)
        plain = self.plain_pass(rows, length)
        saved = self._saved(rows, length, (None, *windows)) + self._block_bytes(tokens, "norms")
        other_block = self._block_bytes(tokens, "both_other")
        saved += max(self._block_bytes(tokens, "both_feed_forward"), other_block)
        saved += 6 * self.state(tokens)
        peak = max(attention, max(plain, saved) + 2 * self.state(tokens))
        return self.shape.layers * self.state(tokens) + math.ceil(peak)

    def _saved(
        self,
        rows: int,
        length: int,
        choices: Sequence[int | None],
        widths: tuple[int, int] | None = None,
    ) -> float:
        """Bytes that autograd saves of a layer's attention with all `choices`, None or a window.

        For each choice, its outputs and their difference from the narrowest window's. `widths` are
        those of all queries and of all keys, by default in a layer with full attention.
        """
        widths = widths or (self.shape.query_size, self.shape.key_value_size)
        query, key_value = map(self._per_shard, widths)
        size = self.value_bytes * (2 * len(choices) * query + 2 * key_value)
        size += self._normed_heads(query + key_value)
        return self._local(rows * length) * size + self._scores(rows, length, choices)

    def _saved_by_own_windows(self, rows: int, length: int) -> float:
        """The same for all layers that slide in the base model."""
        kinds = self.shape.kinds
        widths = self.shape.own_query_size, kinds.own_heads * kinds.own_head_dim
        return sum(self._saved(rows, length, (size,), widths) for size in kinds.windows.values())

    def _normed_heads(self, width: int) -> int:
        """Bytes of a token's queries and keys, which their norms compute in float32."""
        return 4 * width if self.blocks.has_head_norms else 0

    def _attention(self, rows: int, length: int, windows: tuple[int, ...]) -> float:
        """The attention of one layer, with what its backward pass needs.

        Bands of sliding heads overlap, so their gradients are W / block + 1 times as large as keys
        and values.
        """
        tokens = self._local(rows * length)
        shape = self.shape
        query, key_value = map(self._per_shard, (shape.query_size, shape.key_value_size))
        values = 6 * shape.hidden + 6 * (1 + len(windows)) * query + 4 * key_value
        # A chunk of a shared sequence has the bands of its window before it.
        before = 0 if self.sharing > 1 else rows
        bands = sum(
            2 * key_value * (1 + window / block_size(window)) * max(0, tokens - before * window)
            for window in windows
        )
        size = self.value_bytes * (tokens * values + bands + self._exchanged(rows, length, windows))
        if self.value_bytes < 4:
            size += tokens * (self.blocks.norms + self._normed_heads(query + key_value))
        return size + self._scores(rows, length, (None, *windows))

    def _scores(self, rows: int, length: int, choices: Sequence[int | None]) -> float:
        """Attention's scores of every choice, where no kernel is fused."""
        if not self.keeps_scores:
            return 0.0
        shape, heads = self.shape, rows * self._heads
        menu = [None if size is None else Window(size) for size in choices]
        sizes = [shape.score_bytes(heads, length, window, self.value_bytes) for window in menu]
        return sum(sizes) / self.sharing

    def _exchanged(self, rows: int, length: int, windows: tuple[int, ...]) -> int:
        """Values of received keys and values in a gradient of one layer's attention.

        For full heads: all in order, the gradients of both chunks, scattered over the sequence, and
        their sum. For each window: the joined keys and values of the two chunks, and both
        gradients.
        """
        if self.sharing == 1:
            return 0
        near = sum(min(length, self._local(length) + 2 * window) for window in windows)
        return 2 * self.shape.key_value_size * rows * (6 * length + 4 * near)

    def _block_bytes(self, tokens: int, name: str) -> int:
        """This process's bytes for `tokens` of a field of `blocks`."""
        return math.ceil(self._local(tokens) * getattr(self.blocks, name) / self.shards)

    def _piece(self, rows: int, length: int) -> int:
        """Number of scores that are computed together without a fused kernel."""
        return self.keeps_scores * min(rows * self._heads * length**2, DENSE_MASK_ENTRIES)

    def _score_gradients(self, rows: int, length: int) -> int:
        heads = rows * self._heads
        return self.keeps_scores * self.shape.score_gradient_bytes(heads, length, None)

    @property
    def _heads(self) -> int:
        """Query heads of a layer in this process."""
        return self._per_shard(self.shape.query_size // self.shape.kinds.head_dim)

    def _local(self, tokens: int) -> int:
        return -(-tokens // self.sharing)

    def _per_shard(self, width: int) -> int:
        return -(-width // self.shards)


def activation_sizes(model: Any) -> ActivationSizes:
    """Sizes of a loaded decoder; for a mixture of experts, of the experts that a token visits."""
    shape = DecoderShape.of(model.config)
    state = head_state(attention_modules(model)[0])
    attention = "auto" if state is None else state.backend
    return ActivationSizes.of(shape, model.dtype.itemsize, attention=attention)
