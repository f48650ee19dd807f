"""How a hybrid model's heads become vLLM's attention modules, and what its cache then holds.

vLLM keeps one cache per attention module and wants one page size for all of them, so every module
has the same number g of KV heads: the greatest common divisor of all full and sliding counts. The
plugin builds the modules of this plan; the figures below repeat the arithmetic of vLLM's planner
on them. No torch, no vLLM.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from bosch.errors import UserError
from bosch.model.families import DecoderLayers

# A kind's modules fill groups as large as the largest kind where that pads the others by less.
_PADDED_UP_TO = 1.5

# vLLM's own choices on a GPU, by which requests are compared where no engine is known.
BLOCK_SIZE, TOKENS_IN_FLIGHT = 16, 8192
SERVED_RANKS, SERVED_TOKENS = (1, 2, 4, 8), (32 * 1024, 128 * 1024)


@dataclass(frozen=True)
class CacheGroups:
    """Modules that share a block table: `count` groups of one kind; `window` None is full."""

    window: int | None
    count: int


@dataclass(frozen=True)
class ModulePlan:
    """The attention modules of every layer on each tensor-parallel rank.

    Each module has `kv_heads` KV heads. `layers` holds a layer's modules in the order of its heads,
    full ones first: None for a full module, else its window in tokens, the query's own included.
    """

    ranks: int
    kv_heads: int
    layers: tuple[tuple[int | None, ...], ...]

    @property
    def modules_per_group(self) -> int:
        """Modules that a block of the cache has room for, each in its own page."""
        counts = self._counts().values()
        smallest, largest = min(counts), max(counts)
        return largest if largest < _PADDED_UP_TO * smallest else smallest

    @property
    def groups(self) -> tuple[CacheGroups, ...]:
        """Cache groups by kind; the last of a kind may have pages that no module uses."""
        size = self.modules_per_group
        return tuple(CacheGroups(kind, -(-n // size)) for kind, n in self._counts().items())

    def _counts(self) -> Counter[int | None]:
        return Counter(kind for layer in self.layers for kind in layer)

    def blocks_per_request(self, tokens: int, block_size: int, tokens_in_flight: int) -> int:
        """Blocks vLLM sets aside for a request of `tokens`.

        `tokens_in_flight` is vLLM's max_in_flight_tokens, the batch tokens of its concurrent steps:
        a sliding head's cache holds them beside its window while a prompt is read.
        """
        blocks = 0
        for group in self.groups:
            each = -(-tokens // block_size)
            if group.window is not None:
                cached_tokens = min(group.window - 1 + tokens_in_flight, tokens)
                # One more: a window may begin within a block.
                each = -(-cached_tokens // block_size) + 1
            blocks += group.count * each
        return blocks

    def block_bytes(self, block_size: int, bytes_per_head: int) -> int:
        """Bytes of one block of the cache on one rank: a page for each module of a group.

        `bytes_per_head` are those of one head's key and value of one token.
        """
        return self.modules_per_group * block_size * self.kv_heads * bytes_per_head

    def request_bytes(
        self,
        tokens: int,
        bytes_per_head: int,
        block_size: int = BLOCK_SIZE,
        tokens_in_flight: int = TOKENS_IN_FLIGHT,
    ) -> int:
        """Bytes of cache vLLM sets aside on one rank for a request of `tokens`."""
        blocks = self.blocks_per_request(tokens, block_size, tokens_in_flight)
        return blocks * self.block_bytes(block_size, bytes_per_head)

    def cache_tokens(
        self, blocks: int, max_model_len: int, block_size: int, tokens_in_flight: int
    ) -> int:
        """Tokens vLLM reports for a cache of `blocks`: of requests of `max_model_len` each."""
        each = self.blocks_per_request(max_model_len, block_size, tokens_in_flight)
        return int(blocks / each * max_model_len)


def module_plan(
    full_kv_heads_per_layer: Sequence[int],
    num_key_value_heads: int,
    windows: Sequence[int],
    ranks: int = 1,
) -> ModulePlan:
    """The plan for layers with these full counts and windows of their sliding heads.

    Raises UserError where a layer's heads cannot be shared equally by the tensor-parallel ranks.
    """
    if ranks < 1 or max(ranks, num_key_value_heads) % min(ranks, num_key_value_heads):
        raise UserError(
            f"tensor_parallel_size: {num_key_value_heads} KV heads cannot be shared by {ranks} "
            f"ranks; choose a divisor of {num_key_value_heads}"
        )
    # With more ranks than heads vLLM gives each rank a copy of one head.
    shards = min(ranks, num_key_value_heads)
    heads = num_key_value_heads // shards
    for layer, full in enumerate(full_kv_heads_per_layer):
        if full % shards:
            fitting = math.gcd(*full_kv_heads_per_layer, num_key_value_heads)
            raise UserError(
                f"tensor_parallel_size: layer {layer} has {full} full KV heads, which {ranks} "
                f"ranks cannot share equally; serve on at most {fitting}"
            )
    full_counts = [full // shards for full in full_kv_heads_per_layer]
    size = math.gcd(heads, *full_counts)
    layers = tuple(
        (None,) * (full // size) + (window,) * ((heads - full) // size)
        for full, window in zip(full_counts, windows, strict=True)
    )
    return ModulePlan(ranks, size, layers)


@dataclass(frozen=True)
class ServedCache:
    """Bytes that vLLM holds on each of `ranks` ranks for a request of `tokens`.

    `refusal` says why it serves no hybrid on so many ranks; then both are 0.
    """

    ranks: int
    tokens: int
    original: int = 0
    hybrid: int = 0
    refusal: str = ""


def layers_refusal(kinds: DecoderLayers) -> str | None:
    """Why the plugin does not serve a model with such layers."""
    if kinds.states or len(kinds.full) + len(kinds.windows) < kinds.count:
        return "it has layers without attention or with states beside it"
    if kinds.windows and (kinds.own_heads, kinds.own_head_dim) != (kinds.heads, kinds.head_dim):
        return "its layers that slide by themselves have heads of another number or size"
    return None


def served_caches(
    full_kv_heads_per_layer: Sequence[int],
    num_key_value_heads: int,
    windows: Sequence[int],
    bytes_per_head: int,
    own: Sequence[int] = (),
) -> Iterator[ServedCache]:
    """What vLLM holds for a request of each length on each number of ranks.

    `own` are the windows of layers that slide in the original model too.
    """
    full_kv_heads_per_layer = [*full_kv_heads_per_layer, *[0] * len(own)]
    layers = len(windows)
    windows = [*windows, *own]
    for ranks in SERVED_RANKS:
        try:
            hybrid = module_plan(full_kv_heads_per_layer, num_key_value_heads, windows, ranks)
        except UserError as error:
            for tokens in SERVED_TOKENS:
                yield ServedCache(ranks, tokens, refusal=str(error))
            continue
        counts = [num_key_value_heads] * layers + [0] * len(own)
        original = module_plan(counts, num_key_value_heads, windows, ranks)
        for tokens in SERVED_TOKENS:
            yield ServedCache(
                ranks,
                tokens,
                original.request_bytes(tokens, bytes_per_head),
                hybrid.request_bytes(tokens, bytes_per_head),
            )


def any_mask(full_kv_heads: int, num_layers: int, num_key_value_heads: int) -> list[int]:
    """Full counts of one mask with so many full KV heads: whole layers, and what is left.

    vLLM holds the same bytes for every mask of a budget that its ranks can share: the numbers of
    full and sliding modules have the same ratio in all of them.
    """
    whole, rest = divmod(full_kv_heads, num_key_value_heads)
    return ([num_key_value_heads] * whole + [rest] + [0] * num_layers)[:num_layers]


def rank_order(num_full: int, num_key_value_heads: int, ranks: int) -> list[int]:
    """Order of a layer's KV heads in which each rank's share has its full heads first.

    The weights hold all full heads first, and vLLM gives each rank a contiguous share.
    """
    shards = min(ranks, num_key_value_heads)
    full, sliding = num_full // shards, (num_key_value_heads - num_full) // shards
    return [
        head
        for rank in range(shards)
        for head in (
            *range(rank * full, (rank + 1) * full),
            *range(num_full + rank * sliding, num_full + (rank + 1) * sliding),
        )
    ]
