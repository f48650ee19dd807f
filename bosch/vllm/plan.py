"""How a hybrid model's heads become vLLM's attention modules, and what its cache then holds.

vLLM keeps one cache per attention module and wants one page size for all of them, so every module
has the same number g of KV heads, and every tensor-parallel rank the same modules. The plugin
builds the modules of this plan; the figures below repeat the arithmetic of vLLM's planner on them.
The settings of the engine on which they depend are here too: the plugin sets them, plans and
reports state figures for them. No torch, no vLLM.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from bosch.errors import UserError
from bosch.model.families import DecoderLayers

# A kind's modules fill groups as large as the largest kind where that pads the others by less.
_PADDED_UP_TO = 1.5

SERVED_RANKS, SERVED_TOKENS = (1, 2, 4, 8), (32 * 1024, 128 * 1024)

# Steps of fewer tokens read a prompt noticeably slower.
_LEAST_BATCH_TOKENS = 256


def batch_tokens(windows: Iterable[int], sequences: int, most: int) -> int:
    """`--max-num-batched-tokens` for these windows: what the plugin sets where no option says it.

    A sliding head's cache holds the tokens of all concurrent steps beside its window, and each of
    `sequences` needs one token of a step. `most` is vLLM's own choice.
    """
    return min(most, max(_LEAST_BATCH_TOKENS, min(windows, default=most), sequences))


@dataclass(frozen=True)
class Engine:
    """What vLLM chooses for a server on one kind of device where no option says it.

    `block_size` is in tokens, `concurrent_steps` is vLLM's `max_concurrent_batches`; `batch_tokens`
    and `sequences` are `EngineArgs.get_batch_defaults`, on a CPU for each rank.
    """

    name: str
    block_size: int
    concurrent_steps: int
    batch_tokens: int
    sequences: int
    per_rank: bool = False

    def tokens_in_flight(self, windows: Iterable[int], ranks: int = 1) -> int:
        """Tokens of all concurrent steps, with the plugin's choice for these windows."""
        times = ranks if self.per_rank else 1
        tokens = batch_tokens(windows, times * self.sequences, times * self.batch_tokens)
        return self.concurrent_steps * tokens


# vLLM itself takes blocks of 128 tokens on a CPU. Its kernels take multiples of 32, and a window
# ends within a block, so the plugin sets 32.
CPU = Engine("CPU", 32, 1, 2048, 128, per_rank=True)
SMALL_GPU = Engine("GPU", 16, 2, 2048, 256)
LARGE_GPU = Engine("GPU of 70 GiB or more", 16, 2, 8192, 1024)


def engine_on(device: str, gibibytes: float) -> Engine:
    """The engine on a device: `cpu`, or a GPU with so much memory."""
    if device == "cpu":
        return CPU
    return LARGE_GPU if gibibytes >= 70 and "a100" not in device else SMALL_GPU


@dataclass(frozen=True)
class CacheGroups:
    """Modules that share a block table: `count` groups of one kind; `window` None is full."""

    window: int | None
    count: int


@dataclass(frozen=True)
class ModulePlan:
    """The attention modules of every layer on each tensor-parallel rank.

    Each module has `kv_heads` KV heads. `layers` holds the caches of a layer's modules in their
    order, full ones first: None for a full one, else the window in tokens, the query's own
    included. `full_modules` counts each layer's modules of full heads on all shards together. Where
    the shards cannot share them equally, some modules of sliding heads have a full cache, so that
    all shards have the same caches.
    """

    ranks: int
    kv_heads: int
    layers: tuple[tuple[int | None, ...], ...]
    full_modules: tuple[int, ...]
    windows_of_layers: tuple[int, ...]
    shards: int

    def windows(self, layer: int, rank: int) -> tuple[int | None, ...]:
        """The windows in which a layer's modules attend on a rank, in their order; None is full."""
        shard = rank * self.shards // self.ranks
        full = _share(self.full_modules[layer], self.shards, shard)
        sliding = len(self.layers[layer]) - full
        return (None,) * full + (self.windows_of_layers[layer],) * sliding

    @property
    def padded_kv_heads(self) -> int:
        """Sliding KV heads of all shards that have a full cache."""
        full = sum(layer.count(None) for layer in self.layers) * self.shards
        return (full - sum(self.full_modules)) * self.kv_heads

    @property
    def sliding_windows(self) -> set[int]:
        """The windows of all caches that have one."""
        return {window for layer in self.layers for window in layer if window is not None}

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
        self, tokens: int, bytes_per_head: int, block_size: int, tokens_in_flight: int
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


def _share(modules: int, shards: int, shard: int) -> int:
    """Of so many modules of full heads, those that one shard has: the first ones have one more."""
    return modules // shards + (shard < modules % shards)


def module_plan(
    full_kv_heads_per_layer: Sequence[int],
    num_key_value_heads: int,
    windows: Sequence[int],
    ranks: int = 1,
) -> ModulePlan:
    """The plan for layers with these full counts and windows of their sliding heads.

    Raises UserError where vLLM cannot share a layer's heads among the tensor-parallel ranks.
    """
    if ranks < 1 or max(ranks, num_key_value_heads) % min(ranks, num_key_value_heads):
        raise UserError(
            f"tensor_parallel_size: {num_key_value_heads} KV heads cannot be shared by {ranks} "
            f"ranks; choose a divisor of {num_key_value_heads}"
        )
    # With more ranks than heads vLLM gives each rank a copy of one head.
    shards = min(ranks, num_key_value_heads)
    heads = num_key_value_heads // shards
    largest = math.gcd(heads, *full_kv_heads_per_layer)

    def full_modules(size: int) -> list[int]:
        """Modules with a full cache in each layer on each rank, where modules have `size` heads."""
        return [-(-full // (size * shards)) for full in full_kv_heads_per_layer]

    # The fewest heads with a full cache, then the fewest modules.
    sizes = [size for size in range(largest, 0, -1) if largest % size == 0]
    size = min(sizes, key=lambda size: size * sum(full_modules(size)))
    layers = tuple(
        (None,) * full + (window,) * (heads // size - full)
        for full, window in zip(full_modules(size), windows, strict=True)
    )
    counts = tuple(full // size for full in full_kv_heads_per_layer)
    return ModulePlan(ranks, size, layers, counts, tuple(windows), shards)


@dataclass(frozen=True)
class ServedCache:
    """Bytes that vLLM holds on each of `ranks` ranks for a request of `tokens`.

    `padded` are those of `hybrid` that sliding heads hold because the ranks cannot share the full
    heads equally. `refusal` says why vLLM serves no hybrid on so many ranks; then all are 0.
    """

    engine: Engine
    ranks: int
    tokens: int
    original: int = 0
    hybrid: int = 0
    padded: int = 0
    refusal: str = ""


def layers_refusal(kinds: DecoderLayers) -> str | None:
    """Why the plugin does not serve a model with such layers."""
    if kinds.states or len(kinds.full) + len(kinds.windows) < kinds.count:
        return "it has layers without attention or with states beside it"
    if kinds.windows and (kinds.own_heads, kinds.own_head_dim) != (kinds.heads, kinds.head_dim):
        return "its layers that slide by themselves have heads of another number or size"
    return None


def served_tokens(longest: int | None) -> tuple[int, ...]:
    """Lengths of requests that are compared: the model's longest, and what is shorter of some."""
    if longest is None:
        return SERVED_TOKENS
    return (*(tokens for tokens in SERVED_TOKENS if tokens < longest), longest)


def served_caches(
    full_kv_heads_per_layer: Sequence[int],
    num_key_value_heads: int,
    windows: Sequence[int],
    bytes_per_head: int,
    own: Sequence[int] = (),
    *,
    engine: Engine,
    lengths: Sequence[int] = SERVED_TOKENS,
) -> Iterator[ServedCache]:
    """What vLLM holds for a request of each length on each number of ranks.

    `own` are the windows of layers that slide in the original model too.
    """
    full_kv_heads_per_layer = [*full_kv_heads_per_layer, *[0] * len(own)]
    originally_full = [num_key_value_heads] * len(windows) + [0] * len(own)
    windows = [*windows, *own]
    one_rank = module_plan(full_kv_heads_per_layer, num_key_value_heads, windows)
    for ranks in SERVED_RANKS:
        try:
            hybrid = module_plan(full_kv_heads_per_layer, num_key_value_heads, windows, ranks)
        except UserError as error:
            for tokens in lengths:
                yield ServedCache(engine, ranks, tokens, refusal=str(error))
            continue
        original = module_plan(originally_full, num_key_value_heads, windows, ranks)
        for tokens in lengths:
            sizes = [
                plan.request_bytes(
                    tokens,
                    bytes_per_head,
                    engine.block_size,
                    engine.tokens_in_flight(served.sliding_windows, ranks),
                )
                for plan, served in ((original, hybrid), (hybrid, hybrid), (one_rank, one_rank))
            ]
            refusal = padding_refusal(hybrid, *sizes[:2], tokens)
            if refusal:
                yield ServedCache(engine, ranks, tokens, refusal=refusal)
                continue
            padded = sizes[1] - sizes[2] // hybrid.shards if hybrid.padded_kv_heads else 0
            yield ServedCache(engine, ranks, tokens, sizes[0], sizes[1], max(0, padded))


def padding_refusal(hybrid: ModulePlan, original: int, held: int, tokens: int) -> str:
    """Why so many ranks do not serve a hybrid: where padding costs more than its windows save.

    `original` and `held` are the bytes of a request of `tokens` on a rank, without the windows and
    with them.
    """
    if not hybrid.padded_kv_heads or held <= original:
        return ""
    return (
        f"tensor_parallel_size: {hybrid.ranks} ranks cannot share the full KV heads of each layer "
        f"equally, and a request of {tokens:,} tokens would hold {held / original:.2f} times the "
        "original's cache; serve on fewer ranks"
    )


def any_mask(full_kv_heads: int, num_layers: int, num_key_value_heads: int) -> list[int]:
    """Full counts of one mask with so many full KV heads: whole layers, and what is left.

    vLLM holds the same bytes for every mask of a budget that its ranks can share equally: the
    numbers of full and sliding modules have the same ratio in all of them.
    """
    whole, rest = divmod(full_kv_heads, num_key_value_heads)
    return ([num_key_value_heads] * whole + [rest] + [0] * num_layers)[:num_layers]


def worst_shared_mask(
    full_kv_heads: int, num_layers: int, num_key_value_heads: int, ranks: int
) -> list[int]:
    """Full counts of a mask with so many full KV heads for which ranks hold the most.

    One full head in a layer costs as much as one for every rank, and so does each that is one more
    than a multiple of the ranks.
    """
    shards = min(ranks, num_key_value_heads)
    counts = [0] * num_layers
    left = full_kv_heads
    most = num_key_value_heads - shards + 1
    for step, limit in ((1, 1), (shards, most), (1, num_key_value_heads)):
        for layer in range(num_layers):
            added = min(left, limit - counts[layer]) // step * step
            counts[layer] += added
            left -= added
    return counts


def rank_order(num_full: int, num_key_value_heads: int, plan: ModulePlan) -> list[int]:
    """Order of a layer's KV heads in which each rank's share has its full heads first.

    The weights hold all full heads first, and vLLM gives each rank a contiguous share.
    """
    heads = num_key_value_heads // plan.shards
    full, sliding = iter(range(num_full)), iter(range(num_full, num_key_value_heads))
    order: list[int] = []
    for shard in range(plan.shards):
        mine = _share(num_full // plan.kv_heads, plan.shards, shard) * plan.kv_heads
        order += [*islice(full, mine), *islice(sliding, heads - mine)]
    return order
