"""Memory of the activations of one batch, for plans, and what it leaves a search for reuse.

Measured against the bytes that are really alive in
`tests/benchmarks/test_gradient_memory.py`. T tokens of an example, W window.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from bosch.attention.causal import DENSE_MASK_ENTRIES
from bosch.errors import RunError
from bosch.hardware import free_host_memory
from bosch.model.interface import attention_modules, head_state
from bosch.objective.decoder_shape import DecoderShape
from bosch.window import Window, Windows, block_size, window_menu

# What a device's allocator loses between blocks, and what other programs of a machine may want.
_SHARE_OF_DEVICE = 0.85
_SHARE_OF_HOST = 0.5
# Tokens of each example whose feed-forward activations are in memory together in a backward pass.
RECOMPUTED_TOKENS = 512


@dataclass(frozen=True)
class ActivationSizes:
    """Values per token of a decoder's layer, and the bytes of one value.

    `query` and `key_value` are those of all heads together, `feed_forward` the width that one token
    passes through. Of a model sharded over `shards` processes each holds its share of these three.
    Of sequences shared by `sharing` processes each holds its tokens, and while a layer attends the
    keys and values of all.
    """

    layers: int
    hidden: int
    query: int
    key_value: int
    feed_forward: int
    value_bytes: int
    shards: int
    sharing: int
    experts_per_token: int = 0
    norm_follows: bool = False
    kept_scores: DecoderShape | None = None  # of a decoder whose attention keeps its scores

    @classmethod
    def of(
        cls,
        shape: DecoderShape,
        value_bytes: int,
        shards: int = 1,
        sharing: int = 1,
        attention: str = "auto",
    ) -> ActivationSizes:
        """Sizes of a decoder whose shape is known from its configuration."""
        keeps_scores = shape.keeps_scores("sdpa" if attention == "auto" else attention)
        return cls(
            shape.layers, shape.hidden, shape.query_size, shape.key_value_size,
            shape.active_width, value_bytes, shards, sharing, shape.experts_per_token,
            shape.norm_follows, shape if keeps_scores else None,
        )  # fmt: skip

    def state(self, tokens: int) -> int:
        """Hidden states of `tokens`, as far as this process holds them."""
        return self._own(tokens) * self.hidden * self.value_bytes

    def layer_entry(self, tokens: int, windows: int) -> int:
        """Bytes of a layer's input and its attention, full and with each of `windows` windows.

        It is all that reuse keeps of a layer.
        """
        outputs = (1 + windows) * self._per_shard(self.query)
        return self._own(tokens) * (self.hidden + outputs) * self.value_bytes

    def plain_pass(self, tokens: int) -> int:
        """Peak activations of a pass without gradients: those of one feed-forward block.

        Of a gate and a width in one map all four parts are alive together; a token goes to each
        of its experts, and comes back. Scores that no kernel fuses are computed in pieces.

        Where sequences are shared, or of one attention whose heads are all full: all keys and
        values as they come from the processes, and put in order.
        """
        local_tokens = self._own(tokens)
        copies = 4 + 2 * self.experts_per_token
        work = local_tokens * (copies * self.hidden + 4 * self._per_shard(self.feed_forward))
        if self.sharing > 1:
            attention = local_tokens * (3 * self.hidden + 2 * self.query + 2 * self.key_value)
            work = max(work, attention + 2 * 2 * self.key_value * tokens)
        softcap = self.kept_scores is not None and self.kept_scores.softcap
        return work * self.value_bytes + self._piece(tokens) * (
            8 * (1 + softcap) + self.value_bytes
        )

    def gradient(self, rows: int, length: int, *windows: int) -> int:
        """Peak activations of a gate gradient over `rows` examples of `length` tokens.

        `windows` are the sizes of the menu.

        Every layer's input, and the attention of one layer with what its backward pass needs; or a
        feed-forward block, recomputed some tokens at a time. Where a norm follows that block, the
        recomputation of a layer runs it, beside that attention.
        """
        attention = self._attention(rows, length, windows)
        if self.norm_follows:
            width = 3 * self._per_shard(self.feed_forward)
            attention += self._own(rows * length) * width * self.value_bytes
        attention += 4 * self._piece(rows * length)  # their gradients
        recomputed = rows * min(length, RECOMPUTED_TOKENS) * 7 * self._per_shard(self.feed_forward)
        block = self.plain_pass(rows * length) + self.value_bytes * recomputed
        return self.layers * self.state(rows * length) + math.ceil(max(attention, block))

    def _attention(self, rows: int, length: int, windows: tuple[int, ...]) -> float:
        """The attention of one layer, with what its backward pass needs.

        The bands of the sliding heads overlap: their gradients are W / block + 1 times keys and
        values.
        """
        tokens = self._own(rows * length)
        query, key_value = self._per_shard(self.query), self._per_shard(self.key_value)
        values = 6 * self.hidden + 6 * (1 + len(windows)) * query + 4 * key_value
        # A chunk of a shared sequence has as many bands as if its window came before it.
        before = 0 if self.sharing > 1 else rows
        bands = sum(
            2 * key_value * (1 + window / block_size(window)) * max(0, tokens - before * window)
            for window in windows
        )
        size = self.value_bytes * (tokens * values + bands + self._exchanged(rows, length, windows))
        if self.value_bytes < 4:  # norms compute in float32
            size += 4 * tokens * (2 * self.hidden + query + key_value)
        if (shape := self.kept_scores) is not None:
            heads = rows * self._heads(shape)
            menu = (None, *map(Window, windows))
            kept = [shape.score_bytes(heads, length, window, self.value_bytes) for window in menu]
            size += sum(kept) / self.sharing
        return size

    def _exchanged(self, rows: int, length: int, windows: tuple[int, ...]) -> int:
        """Values of the keys and values of others in a gradient of one layer's attention.

        Of full heads: all in order, the gradients of both chunks as attention gives them, spread
        over the sequence, and their sum; of each window: what the two chunks see, joined, and both
        gradients.
        """
        if self.sharing == 1:
            return 0
        near = sum(min(length, self._own(length) + 2 * window) for window in windows)
        return 2 * self.key_value * rows * (6 * length + 4 * near)

    def kept_gradient(self, rows: int, length: int, *windows: int) -> int:
        """Bytes that a gate gradient takes which keeps the activations of every layer.

        Per layer: what the backward pass through one layer needs, and its feed-forward block.
        """
        tokens = rows * length
        attention = math.ceil(self._attention(rows, length, windows))
        width = 7 * self._per_shard(self.feed_forward)
        feed_forward = self._own(tokens) * width * self.value_bytes
        return self.layers * (self.state(tokens) + attention + feed_forward)

    def _piece(self, tokens: int) -> int:
        """Scores that are computed together where no kernel is fused."""
        if self.kept_scores is None:
            return 0
        return min(self._heads(self.kept_scores) * tokens**2, DENSE_MASK_ENTRIES)

    def _heads(self, shape: DecoderShape) -> int:
        return self._per_shard(shape.query_size // shape.kinds.head_dim)

    def _own(self, tokens: int) -> int:
        return -(-tokens // self.sharing)

    def _per_shard(self, width: int) -> int:
        return -(-width // self.shards)


def activation_sizes(model: Any, shards: int = 1, sharing: int = 1) -> ActivationSizes:
    """Sizes of a loaded decoder; of a mixture of experts, a token's share of them."""
    shape = DecoderShape.of(model.config)
    state = head_state(attention_modules(model)[0])
    attention = "auto" if state is None else state.backend
    return ActivationSizes.of(shape, model.dtype.itemsize, shards, sharing, attention)


def reuse_room(
    model: Any,
    windows: Windows,
    rows: int,
    length: int,
    *,
    processes: int = 1,
    shards: int = 1,
    sharing: int = 1,
) -> int:
    """Bytes that this process may keep between passes of batches of `rows` x `length` tokens.

    `processes` share this machine's memory where the model is on the CPU. Call it when the model is
    loaded.
    """
    sizes = [window.size for window in window_menu(windows)]
    needed = activation_sizes(model, shards, sharing).gradient(rows, length, *sizes)
    if model.device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(model.device)
        free += torch.cuda.memory_reserved(model.device)
        free -= torch.cuda.memory_allocated(model.device)
        return max(0, int(_SHARE_OF_DEVICE * free) - needed)
    try:
        free = free_host_memory()
    except RunError as error:
        raise RunError(f"{error}: set runtime.reuse_memory to a size") from error
    return max(0, int(_SHARE_OF_HOST * (free / processes - needed)))
