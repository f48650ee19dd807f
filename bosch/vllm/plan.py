"""How a hybrid model's heads become vLLM's attention modules, and what its cache then holds.

vLLM keeps one cache per attention module and wants one page size for all of them, so every module
has the same number g of KV heads, and every tensor-parallel rank the same modules. The plugin
builds the modules of this plan; the figures below repeat the arithmetic of vLLM's planner on them.
The settings of the engine on which they depend are here too: the plugin sets them, plans and
reports state figures for them. No torch, no vLLM.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, islice, pairwise
from typing import Literal, TypeAlias

from bosch.errors import UserError
from bosch.model.families import DecoderLayers
from bosch.window import Window

# A kind's modules fill groups as large as the largest kind where that pads the others by less.
_PADDED_UP_TO = 1.5

SERVED_RANKS, SERVED_TOKENS = (1, 2, 4, 8), (32 * 1024, 128 * 1024)

# Steps of fewer tokens read a prompt noticeably slower.
_MIN_BATCH_TOKENS = 256


def batch_tokens(windows: Iterable[int], most: int, sequences: int = 1) -> int:
    """`--max-num-batched-tokens` for these windows: what the plugin sets where no option says it.

    A sliding head's cache holds the tokens of all concurrent steps beside its window. `most` is
    vLLM's own choice, `sequences` what `--max-num-seqs` says: each needs one token of a step.
    """
    return min(most, max(_MIN_BATCH_TOKENS, min(windows, default=most), sequences))


@dataclass(frozen=True)
class Engine:
    """vLLM's defaults for a server on one kind of device.

    `block_size` is in tokens, `concurrent_steps` is vLLM's `max_concurrent_batches`, `batch_tokens`
    is that of `EngineArgs.get_batch_defaults`, on a CPU for each rank.
    """

    name: str
    block_size: int
    concurrent_steps: int
    batch_tokens: int
    per_rank: bool = False

    def tokens_in_flight(self, windows: Iterable[int], ranks: int = 1) -> int:
        """Tokens of all concurrent steps, with the plugin's choice for these windows."""
        most = self.batch_tokens * (ranks if self.per_rank else 1)
        return self.concurrent_steps * batch_tokens(windows, most)


# vLLM itself takes blocks of 128 tokens on a CPU. Its kernels take multiples of 32, and a window
# ends within a block, so the plugin sets 32.
CPU = Engine("CPU", 32, 1, 2048, per_rank=True)
SMALL_GPU = Engine("GPU", 16, 2, 2048)
LARGE_GPU = Engine("GPU of 70 GiB or more", 16, 2, 8192)


def engine_on(device: str, gibibytes: float) -> Engine:
    """The engine on a device: `cpu`, or a GPU with so much memory."""
    if device == "cpu":
        return CPU
    return LARGE_GPU if gibibytes >= 70 and "a100" not in device else SMALL_GPU


# How modules are cut and grouped. `engine`: of equal size, in the groups that vLLM makes; `equal`:
# of equal size, in groups of our own, which vLLM takes from 0.33 on; `unequal`: as few as fill the
# blocks, in groups of our own, which needs a cache in whose layout the blocks are outermost.
Grouping = Literal["engine", "equal", "unequal"]

# In groups of our own: most of a kind, and how much more memory fewer groups, or fewer unequal
# modules, may take. Each costs time in every step.
_MAX_GROUPS, _FEWER_GROUPS = 64, 1.05


@dataclass(frozen=True)
class Request:
    """A request of `tokens`, and the settings of the engine on which its blocks depend.

    `tokens_in_flight` is vLLM's max_in_flight_tokens, the batch tokens of its concurrent steps: a
    sliding head's cache holds them beside its window while a prompt is read.
    """

    tokens: int
    block_size: int
    tokens_in_flight: int

    def blocks(self, window: int | None) -> int:
        """Blocks that vLLM sets aside for it in each group of a window; None is full."""
        if window is None:
            return -(-self.tokens // self.block_size)
        cached_tokens = min(window - 1 + self.tokens_in_flight, self.tokens)
        # One more: a window may begin within a block.
        return -(-cached_tokens // self.block_size) + 1


# For which unequal modules are cut: the engine's requests are not known where a model is built.
_LONG_REQUEST = Request(32 * 1024, 16, 2048)


def packed_groups(
    modules: Mapping[int | None, Sequence[int]], blocks: Mapping[int | None, int]
) -> tuple[int, dict[int | None, list[list[int]]]]:
    """Groups of our own for the KV heads of each kind's modules, in which little is left unused.

    `blocks` are those of a request in each group of a kind. A block has room for the KV heads of
    the largest group: returned first, then for each kind the indices of its modules by groups.
    """
    bins = {
        kind: [_even_bins(heads, count) for count in range(1, min(len(heads), _MAX_GROUPS) + 1)]
        for kind, heads in modules.items()
    }

    def width(kind: int | None, groups: list[list[int]]) -> int:
        return max(sum(modules[kind][index] for index in group) for group in groups)

    choices = []
    for room in sorted({width(kind, groups) for kind in bins for groups in bins[kind]}):
        fitting = {
            kind: next((group for group in groups if width(kind, group) <= room), None)
            for kind, groups in bins.items()
        }
        chosen = {kind: groups for kind, groups in fitting.items() if groups is not None}
        if len(chosen) == len(bins):
            cost = room * sum(len(groups) * blocks[kind] for kind, groups in chosen.items())
            choices.append((cost, sum(map(len, chosen.values())), room, chosen))
    least = min(cost for cost, *_ in choices)
    affordable = [choice for choice in choices if choice[0] <= _FEWER_GROUPS * least]
    _, _, room, chosen = min(affordable, key=lambda choice: choice[1])
    return room, chosen


def _even_bins(heads: Sequence[int], count: int) -> list[list[int]]:
    """Indices of `heads` in `count` bins of nearly equal sums: the largest first, the least full.

    Equal ones are dealt in turn, so that each stage of a pipeline has its share of every bin.
    """
    bins: list[list[int]] = [[] for _ in range(count)]
    sums = [0] * count
    for index in sorted(range(len(heads)), key=lambda index: -heads[index]):
        least = sums.index(min(sums))
        bins[least].append(index)
        sums[least] += heads[index]
    return bins


# KV heads of a layer by the window in which they attend, the widest first; None is full.
EngineHeads: TypeAlias = Mapping[int | None, int]


def engine_heads(rows: Iterable[Mapping[Window | None, int]]) -> list[EngineHeads]:
    """Heads by window as vLLM counts windows."""
    return [{None if w is None else w.vllm: count for w, count in row.items()} for row in rows]


@dataclass(frozen=True)
class ModulePlan:
    """The attention modules of every layer on each tensor-parallel rank.

    `caches` holds those of a layer's modules in their order, the widest first: None for a full one,
    else the window in tokens, the query's own included; `sizes` holds the modules' KV heads. The
    shards share a layer's `heads` of each window in units of `unit` KV heads. Where they cannot
    share them equally, some modules have a cache that is wider than their window, so that all
    shards have the same caches.
    """

    ranks: int
    shards: int
    unit: int
    caches: tuple[tuple[int | None, ...], ...]
    sizes: tuple[tuple[int, ...], ...]
    heads: tuple[EngineHeads, ...]
    grouping: Grouping = "engine"

    def heads_on(self, layer: int, shard: int) -> dict[int | None, int]:
        """KV heads of each window of a layer on a shard: the first shards have a unit more."""
        ends = []
        for end in accumulate(self.heads[layer].values()):
            units = end // self.unit
            ends.append((units // self.shards + (shard < units % self.shards)) * self.unit)
        counts = (end - start for start, end in pairwise([0, *ends]))
        return dict(zip(self.heads[layer], counts, strict=True))

    def windows(self, layer: int, rank: int) -> tuple[int | None, ...]:
        """The windows in which a layer's modules attend on a rank, in their order; None is full."""
        counts = self.heads_on(layer, rank * self.shards // self.ranks)
        window_of_head = [window for window, count in counts.items() for _ in range(count)]
        return tuple(window_of_head[end - 1] for end in accumulate(self.sizes[layer]))

    @property
    def padded_kv_heads(self) -> int:
        """KV heads of all shards that have a wider cache than they need."""
        ranks = [shard * self.ranks // self.shards for shard in range(self.shards)]
        return sum(
            size
            for layer, (caches, sizes) in enumerate(zip(self.caches, self.sizes, strict=True))
            for rank in ranks
            for window, cache, size in zip(self.windows(layer, rank), caches, sizes, strict=True)
            if window != cache
        )

    @property
    def sliding_windows(self) -> set[int]:
        """The windows of all caches that have one."""
        return {window for window in self._modules() if window is not None}

    def groups(self, request: Request) -> dict[int | None, int]:
        """How many groups of modules share a block table, by window; None is full.

        The blocks of some may have room that no module uses.
        """
        return self._packing(request)[1]

    def blocks_per_request(self, request: Request) -> int:
        """Blocks vLLM sets aside for a request."""
        return sum(count * request.blocks(kind) for kind, count in self.groups(request).items())

    def block_bytes(self, request: Request, bytes_per_head: int) -> int:
        """Bytes of one block of the cache on one rank, of an engine for such requests at most.

        `bytes_per_head` are those of one head's key and value of one token.
        """
        return self._packing(request)[0] * request.block_size * bytes_per_head

    def request_bytes(self, request: Request, bytes_per_head: int) -> int:
        """Bytes of cache vLLM sets aside on one rank for a request."""
        return self.blocks_per_request(request) * self.block_bytes(request, bytes_per_head)

    def cache_tokens(self, blocks: int, request: Request) -> int:
        """Tokens vLLM reports for a cache of `blocks`: of as many such requests as fit."""
        return int(blocks / self.blocks_per_request(request) * request.tokens)

    def _packing(self, request: Request) -> tuple[int, dict[int | None, int]]:
        """KV heads that a block of the cache has room for, and the number of groups by kind."""
        modules = self._modules()
        if self.grouping != "engine":
            room, bins = packed_groups(modules, {kind: request.blocks(kind) for kind in modules})
            return room, {kind: len(groups) for kind, groups in bins.items()}
        counts = [len(heads) for heads in modules.values()]
        smallest, largest = min(counts), max(counts)
        size = largest if largest < _PADDED_UP_TO * smallest else smallest
        return size * self.unit, {kind: -(-len(heads) // size) for kind, heads in modules.items()}

    def _modules(self) -> dict[int | None, list[int]]:
        """KV heads of the modules of each kind."""
        modules: dict[int | None, list[int]] = {}
        for caches, sizes in zip(self.caches, self.sizes, strict=True):
            for kind, heads in zip(caches, sizes, strict=True):
                modules.setdefault(kind, []).append(heads)
        return modules


def module_plan(
    layers: Sequence[EngineHeads], ranks: int = 1, grouping: Grouping = "engine"
) -> ModulePlan:
    """The plan for layers with these heads.

    Raises UserError where vLLM cannot share a layer's heads among the tensor-parallel ranks.
    """
    num_key_value_heads = sum(layers[0].values())
    if ranks < 1 or max(ranks, num_key_value_heads) % min(ranks, num_key_value_heads):
        raise UserError(
            f"tensor_parallel_size: {num_key_value_heads} KV heads cannot be shared by {ranks} "
            f"ranks; choose a divisor of {num_key_value_heads}"
        )
    # With more ranks than heads vLLM gives each rank a copy of one head.
    shards = min(ranks, num_key_value_heads)
    heads = num_key_value_heads // shards
    unit = 1 if grouping == "unequal" else _unit(layers, heads, shards)

    def plan_of_modules(most: int) -> ModulePlan:
        """With modules of at most `most` KV heads."""
        caches, sizes = [], []
        for layer in layers:
            ends = [divmod(end, unit * shards) for end in accumulate(layer.values())]
            # How far the heads of a window reach on the shards with the least and the most of them.
            least = [whole * unit for whole, _ in ends]
            cached = [(whole + bool(rest)) * unit for whole, rest in ends]
            # What has another window on some shards has a module of its own.
            parts = pairwise(sorted({0, *least, *cached}))
            modules = [
                (next(w for w, last in zip(layer, cached, strict=True) if end <= last), size)
                for start, end in parts
                for first in range(start, end, most)
                for size in [min(most, end - first)]
            ]
            caches.append(tuple(kind for kind, _ in modules))
            sizes.append(tuple(size for _, size in modules))
        return ModulePlan(ranks, shards, unit, tuple(caches), tuple(sizes), tuple(layers), grouping)

    if grouping != "unequal":
        return plan_of_modules(unit)
    # The largest modules that fill the blocks of a long request nearly as well as single heads.
    plans = [plan_of_modules(most) for most in range(heads, 0, -1)]
    sizes = [plan.request_bytes(_LONG_REQUEST, 1) for plan in plans]
    return next(
        plan for plan, size in zip(plans, sizes, strict=True) if size <= _FEWER_GROUPS * min(sizes)
    )


def _unit(layers: Sequence[EngineHeads], heads: int, shards: int) -> int:
    """KV heads of each module, where all have as many: for the fewest heads with a wider cache.

    Of those the fewest modules. A shard has `heads` KV heads of a layer.
    """
    largest = math.gcd(heads, *(count for layer in layers for count in layer.values()))
    units = [unit for unit in range(largest, 0, -1) if largest % unit == 0]
    ends = [end for layer in layers for end in list(accumulate(layer.values()))[:-1]]
    return min(units, key=lambda unit: unit * sum(-(-end // (unit * shards)) for end in ends))


@dataclass(frozen=True)
class ServedCache:
    """Bytes that vLLM holds on each of `ranks` ranks for a request of `tokens`.

    `padded` are those of `hybrid` that sliding heads hold because the ranks cannot share the full
    heads equally. `refusal` says why vLLM serves no hybrid on these ranks; then all are 0.
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
    layers: Sequence[EngineHeads],
    bytes_per_head: int,
    own: Sequence[int] = (),
    *,
    engine: Engine,
    lengths: Sequence[int] = SERVED_TOKENS,
    numbers_of_ranks: Sequence[int] = SERVED_RANKS,
) -> Iterator[ServedCache]:
    """What vLLM holds for a request of each length on each number of ranks.

    `own` are the windows of layers that slide in the original model too.
    """
    heads = sum(layers[0].values())
    full: EngineHeads = {None: heads}
    sliding: list[EngineHeads] = [{window: heads} for window in own]
    hybrid_layers, original_layers = [*layers, *sliding], [*[full] * len(layers), *sliding]
    one_rank = module_plan(hybrid_layers)
    for ranks in numbers_of_ranks:
        try:
            hybrid = module_plan(hybrid_layers, ranks)
        except UserError as error:
            for tokens in lengths:
                yield ServedCache(engine, ranks, tokens, refusal=str(error))
            continue
        original = module_plan(original_layers, ranks)
        for tokens in lengths:
            request, equal_share = (
                Request(tokens, engine.block_size, engine.tokens_in_flight(windows, ranks))
                for windows in (hybrid.sliding_windows, one_rank.sliding_windows)
            )
            held, originally = (
                plan.request_bytes(request, bytes_per_head) for plan in (hybrid, original)
            )
            share = one_rank.request_bytes(equal_share, bytes_per_head) // hybrid.shards
            if refusal := padding_refusal(hybrid, originally, held, share):
                yield ServedCache(engine, ranks, tokens, refusal=refusal)
                continue
            yield ServedCache(engine, ranks, tokens, originally, held, max(0, held - share))


def padding_refusal(hybrid: ModulePlan, original: int, held: int, share: int) -> str:
    """Why these ranks do not serve a hybrid: where padding costs more than its windows save.

    `original`, `held` and `share` are the bytes of a request on a rank: without windows, with them,
    and an equal share of what one rank holds.
    """
    if not hybrid.padded_kv_heads or not share <= original < held:
        return ""
    return (
        f"tensor_parallel_size: {hybrid.ranks} ranks cannot share the full KV heads of each layer "
        f"equally, and would hold {held / original:.2f} times the original's cache for a request; "
        "serve on fewer ranks"
    )


def any_mask(full_kv_heads: int, num_layers: int, num_key_value_heads: int) -> list[int]:
    """Full counts of one mask with `full_kv_heads`: whole layers, and what is left.

    vLLM holds the same bytes for every mask of a budget that its ranks can share equally: the
    numbers of full and sliding modules have the same ratio in all of them.
    """
    whole, rest = divmod(full_kv_heads, num_key_value_heads)
    return ([num_key_value_heads] * whole + [rest] + [0] * num_layers)[:num_layers]


def worst_shared_masks(
    full_kv_heads: int, num_layers: int, num_key_value_heads: int, ranks: int
) -> Iterator[list[int]]:
    """Full counts of masks with `full_kv_heads`, one of which makes ranks hold the most.

    One full head in a layer costs as much as one for every rank, and so does each that is one more
    than a multiple of the ranks: the first mask has the most such layers. Bytes follow the number
    of full modules, but do not always rise with it: each mask that follows has about one less.
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
    while True:
        yield list(counts)
        # A head of the layer that has the fewest too many goes to the one that has the most.
        over = sorted((count % shards, layer) for layer, count in enumerate(counts))
        odd = [layer for rest, layer in over if rest]
        if len(odd) < 2:
            return
        counts[odd[0]] -= 1
        counts[odd[-1]] += 1


def rank_order(plan: ModulePlan, layer: int) -> list[int]:
    """Order of a layer's KV heads in which each rank's share has its widest heads first.

    The weights hold all of the widest heads first, and vLLM gives each rank a contiguous share.
    """
    ends = pairwise(accumulate(plan.heads[layer].values(), initial=0))
    left = {w: iter(range(*end)) for w, end in zip(plan.heads[layer], ends, strict=True)}
    return [
        head
        for shard in range(plan.shards)
        for window, count in plan.heads_on(layer, shard).items()
        for head in islice(left[window], count)
    ]
