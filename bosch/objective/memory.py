"""Memory of the activations of a batch, and the memory left for reuse.

`tests/benchmarks/test_gradient_memory.py` compares it with allocated bytes. T tokens of an example,
W window.
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

# Share that an allocator loses between blocks, and share left to other programs of the machine.
_SHARE_OF_DEVICE = 0.85
_SHARE_OF_HOST = 0.5
# Tokens of an example in one piece of the feed-forward backward pass.
RECOMPUTED_TOKENS = 512


@dataclass(frozen=True)
class ActivationSizes:
    """Values per token of a decoder's layer, and the bytes of one value.

    `query` and `key_value` are the widths of all heads, `feed_forward` the width that one token
    passes through. If a model is sharded over `shards` processes, each holds a share of these
    three. If sequences are shared by `sharing` processes, each holds its tokens, and the keys and
    values of all while a layer attends.
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
    kept_scores: DecoderShape | None = None  # set if attention stores its scores

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
        return cls(
            shape.layers, shape.hidden, shape.query_size, shape.key_value_size,
            shape.active_width, value_bytes, shards, sharing, shape.experts_per_token,
            shape.norm_follows, shape if keeps_scores else None,
        )  # fmt: skip

    def state(self, tokens: int) -> int:
        """Bytes of this process's part of the hidden states of `tokens`."""
        return self._own(tokens) * self.hidden * self.value_bytes

    def layer_entry(self, tokens: int, windows: int) -> int:
        """Bytes that reuse stores for a layer: its input and its attention for every choice.

        It is all that reuse keeps of a layer.
        """
        outputs = (1 + windows) * self._per_shard(self.query)
        return self._own(tokens) * (self.hidden + outputs) * self.value_bytes

    def plain_pass(self, tokens: int) -> int:
        """Peak bytes of activations in a pass without gradients: those of one feed-forward block.

        If gate and width are one map, four parts are alive together; each expert of a token has a
        copy of its input and output. Scores without a fused kernel are computed in pieces.

        If sequences are shared, the peak may be an attention with only full heads: all keys and
        values as received, and in order.
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
        """Peak bytes of a gate gradient over `rows` examples of `length` tokens.

        `windows` are the sizes of the menu.

        Every layer's input, plus the larger of one layer's attention with what its backward pass
        needs and a feed-forward block that is recomputed in pieces. If a norm follows that block,
        both exist together.
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

        Bands of sliding heads overlap, so their gradients are W / block + 1 times as large as keys
        and values.
        """
        tokens = self._own(rows * length)
        query, key_value = self._per_shard(self.query), self._per_shard(self.key_value)
        values = 6 * self.hidden + 6 * (1 + len(windows)) * query + 4 * key_value
        # A chunk of a shared sequence has the bands of its window before it.
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
        """Values of received keys and values in a gradient of one layer's attention.

        For full heads: all in order, the gradients of both chunks, scattered over the sequence, and
        their sum. For each window: the joined keys and values of the two chunks, and both
        gradients.
        """
        if self.sharing == 1:
            return 0
        near = sum(min(length, self._own(length) + 2 * window) for window in windows)
        return 2 * self.key_value * rows * (6 * length + 4 * near)

    def kept_gradient(self, rows: int, length: int, *windows: int) -> int:
        """Bytes of a gate gradient that stores the activations of every layer.

        Per layer, what its backward pass needs and its feed-forward block.
        """
        tokens = rows * length
        attention = math.ceil(self._attention(rows, length, windows))
        width = 7 * self._per_shard(self.feed_forward)
        feed_forward = self._own(tokens) * width * self.value_bytes
        return self.layers * (self.state(tokens) + attention + feed_forward)

    def _piece(self, tokens: int) -> int:
        """Number of scores that are computed together without a fused kernel."""
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
    """Sizes of a loaded decoder; for a mixture of experts, of the experts that a token visits."""
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
    """Bytes that this process may cache between passes of batches of `rows` x `length` tokens.

    On a CPU, `processes` share the machine's memory. Call it after the model is loaded.
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
