"""How a hybrid's heads become vLLM's attention modules, and the size of its cache.

vLLM keeps one cache per attention module and requires one page size, so every module has the same
number g of KV heads, and every tensor-parallel rank the same modules. The plugin builds the modules
of this plan; the figures repeat the arithmetic of vLLM's planner. The engine settings on which they
depend are also here: plugin, plans and reports use them. Needs neither torch nor vLLM.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, islice, pairwise
from typing import Literal, NamedTuple, TypeAlias

from bosch.errors import UserError
from bosch.model.families import DecoderLayers
from bosch.window import Window

# vLLM makes groups as large as the largest kind if this pads the others by less than this factor.
_PADDED_UP_TO = 1.5

SERVED_TOKENS = (32 * 1024, 128 * 1024)

# Steps of fewer tokens read a prompt noticeably slower.
_MIN_BATCH_TOKENS = 256

# vLLM's blocks have 128 tokens on a CPU. Its kernels support multiples of 32, and a window ends
# within a block, so the plugin sets 32.
CPU_BLOCK_SIZE = 32
# vLLM's defaults on a large GPU: tokens of a block, tokens of a step, concurrent steps.
_BLOCK_SIZE, _BATCH_TOKENS, _STEPS = 16, 8192, 2


def batch_tokens(windows: Iterable[int], default: int, sequences: int = 1) -> int:
    """`--max-num-batched-tokens` that the plugin sets for these windows by default.

    A sliding head's cache holds its window and the tokens of all concurrent steps. `default` is
    vLLM's, `sequences` its `--max-num-seqs`, each of which needs a token of a step.
    """
    return min(default, max(_MIN_BATCH_TOKENS, min(windows, default=default), sequences))


# How modules are cut and grouped. `engine`: equal sizes, in vLLM's groups; `equal`: equal sizes, in
# the plugin's groups, which vLLM supports from 0.33 on; `unequal`: as few modules as fill the
# blocks, in the plugin's groups, which needs a cache layout with blocks outermost.
Grouping = Literal["engine", "equal", "unequal"]

# Of the plugin's groups: the maximum of a kind, and the allowed factor of memory for fewer groups
# or fewer unequal modules, since each takes time in every step.
_MAX_GROUPS, _FEWER_GROUPS = 64, 1.05


@dataclass(frozen=True)
class Request:
    """A request of `tokens`, and the engine settings on which its blocks depend.

    `tokens_in_flight` is vLLM's max_in_flight_tokens, the batch tokens of its concurrent steps,
    which a sliding head's cache holds in addition to its window while a prompt is read.
    """

    tokens: int
    block_size: int
    tokens_in_flight: int

    def blocks(self, window: int | None) -> int:
        """Blocks that vLLM reserves for the request in each group of a window (None: full)."""
        if window is None:
            return -(-self.tokens // self.block_size)
        cached_tokens = min(window - 1 + self.tokens_in_flight, self.tokens)
        # One more, since a window may begin within a block.
        return -(-cached_tokens // self.block_size) + 1


# Request for which unequal modules are cut, since the engine's requests are not known then.
_LONG_REQUEST = Request(32 * 1024, 16, 2048)


class _Packing(NamedTuple):
    """Groups of modules by kind, `num_groups` in all, for blocks of `room` KV heads; the cost."""

    cost: int
    num_groups: int
    room: int
    groups: dict[int | None, list[list[int]]]


def packed_groups(
    modules: Mapping[int | None, Sequence[int]], blocks: Mapping[int | None, int]
) -> tuple[int, dict[int | None, list[list[int]]]]:
    """The plugin's groups for the modules of each kind, with little unused memory.

    `blocks` is the number of blocks of a request in each group of a kind. Returns the KV heads that
    fit into a block (of the largest group), and by kind the indices of its modules by group.
    """
    bins = {
        kind: [_even_bins(heads, count) for count in range(1, min(len(heads), _MAX_GROUPS) + 1)]
        for kind, heads in modules.items()
    }

    def width(kind: int | None, groups: list[list[int]]) -> int:
        return max(sum(modules[kind][index] for index in group) for group in groups)

    packings = []
    for room in sorted({width(kind, groups) for kind in bins for groups in bins[kind]}):
        fitting = {
            kind: next((group for group in groups if width(kind, group) <= room), None)
            for kind, groups in bins.items()
        }
        groups = {kind: groups for kind, groups in fitting.items() if groups is not None}
        if len(groups) == len(bins):
            cost = room * sum(len(parts) * blocks[kind] for kind, parts in groups.items())
            packings.append(_Packing(cost, sum(map(len, groups.values())), room, groups))
    limit = _FEWER_GROUPS * min(packing.cost for packing in packings)
    affordable = [packing for packing in packings if packing.cost <= limit]
    best = min(affordable, key=lambda packing: packing.num_groups)
    return best.room, best.groups


def _even_bins(heads: Sequence[int], count: int) -> list[list[int]]:
    """Indices of `heads` in `count` bins of nearly equal sums: the largest into the emptiest bin.

    Equal ones are dealt in turn, so that each pipeline stage has its share of every bin.
    """
    bins: list[list[int]] = [[] for _ in range(count)]
    sums = [0] * count
    for index in sorted(range(len(heads)), key=lambda index: -heads[index]):
        emptiest = sums.index(min(sums))
        bins[emptiest].append(index)
        sums[emptiest] += heads[index]
    return bins


# KV heads of a layer by window (None: full), the widest first.
EngineHeads: TypeAlias = Mapping[int | None, int]


def engine_heads(rows: Iterable[Mapping[Window | None, int]]) -> list[EngineHeads]:
    """Heads by window, as vLLM counts windows: the query's own position included."""
    return [{None if w is None else w.size: count for w, count in row.items()} for row in rows]


@dataclass(frozen=True)
class ModulePlan:
    """The attention modules of every layer on each tensor-parallel rank.

    `caches` holds the windows of the caches of a layer's modules (None: full), the widest first,
    the query's own token included; `sizes` holds the modules' KV heads. The shards divide a layer's
    `heads` of each window in units of `unit` KV heads. If they cannot divide them equally, some
    modules have a cache that is wider than their window, so that all shards have equal caches.
    """

    ranks: int
    shards: int
    unit: int
    caches: tuple[tuple[int | None, ...], ...]
    sizes: tuple[tuple[int, ...], ...]
    heads: tuple[EngineHeads, ...]
    grouping: Grouping = "engine"

    def heads_on(self, layer: int, shard: int) -> dict[int | None, int]:
        """KV heads of each window of a layer on a shard; the first shards may have a unit more."""
        ends = []
        for end in accumulate(self.heads[layer].values()):
            units = end // self.unit
            ends.append((units // self.shards + (shard < units % self.shards)) * self.unit)
        counts = (end - start for start, end in pairwise([0, *ends]))
        return dict(zip(self.heads[layer], counts, strict=True))

    def windows(self, layer: int, rank: int) -> tuple[int | None, ...]:
        """The windows (None: full) in which a layer's modules attend on a rank, in order."""
        counts = self.heads_on(layer, rank * self.shards // self.ranks)
        window_of_head = [window for window, count in counts.items() for _ in range(count)]
        return tuple(window_of_head[end - 1] for end in accumulate(self.sizes[layer]))

    @property
    def sliding_windows(self) -> set[int]:
        """The windows of all sliding caches."""
        return {window for window in self._modules if window is not None}

    def request_bytes(self, request: Request, bytes_per_head: int) -> int:
        """Bytes of cache that vLLM reserves for a request on one rank."""
        width, groups = self.packing(request)
        blocks = sum(count * request.blocks(kind) for kind, count in groups.items())
        return blocks * width * request.block_size * bytes_per_head

    def packing(self, request: Request) -> tuple[int, dict[int | None, int]]:
        """KV heads that fit into a block of the cache, and the number of groups by kind."""
        modules = self._modules
        if self.grouping != "engine":
            room, bins = packed_groups(modules, {kind: request.blocks(kind) for kind in modules})
            return room, {kind: len(groups) for kind, groups in bins.items()}
        counts = [len(heads) for heads in modules.values()]
        smallest, largest = min(counts), max(counts)
        size = largest if largest < _PADDED_UP_TO * smallest else smallest
        return size * self.unit, {kind: -(-len(heads) // size) for kind, heads in modules.items()}

    @cached_property
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
    """The plan for layers with these heads; UserError if the ranks cannot divide them."""
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

    def plan_of_modules(limit: int) -> ModulePlan:
        """The plan with modules of at most `limit` KV heads."""
        modules: dict[tuple[tuple[int | None, int], ...], list[tuple[int | None, int]]] = {}
        rows = [tuple(layer.items()) for layer in layers]
        for row, layer in zip(rows, layers, strict=True):
            if row in modules:
                continue
            ends = [divmod(end, unit * shards) for end in accumulate(layer.values())]
            # Last head of each window on the shards with the fewest and the most of them.
            fewest = [whole * unit for whole, _ in ends]
            cached = [(whole + bool(rest)) * unit for whole, rest in ends]
            modules[row] = []
            # Heads with another window on some shards get their own module.
            for start, end in pairwise(sorted({0, *fewest, *cached})):
                cache = next(w for w, last in zip(layer, cached, strict=True) if end <= last)
                for first in range(start, end, limit):
                    modules[row].append((cache, min(limit, end - first)))
        caches = tuple(tuple(kind for kind, _ in modules[row]) for row in rows)
        sizes = tuple(tuple(size for _, size in modules[row]) for row in rows)
        return ModulePlan(ranks, shards, unit, caches, sizes, tuple(layers), grouping)

    if grouping != "unequal":
        return plan_of_modules(unit)
    # The largest modules that fill the blocks of a long request almost as well as single heads.
    plans = [plan_of_modules(limit) for limit in range(heads, 0, -1)]
    sizes = [plan.request_bytes(_LONG_REQUEST, 1) for plan in plans]
    max_bytes = _FEWER_GROUPS * min(sizes)
    return next(plan for plan, size in zip(plans, sizes, strict=True) if size <= max_bytes)


def _unit(layers: Sequence[EngineHeads], heads: int, shards: int) -> int:
    """KV heads of each module, if all are equal, with the fewest heads in a wider cache.

    Among these, the fewest modules. A shard has `heads` KV heads of a layer.
    """
    largest = math.gcd(heads, *(count for layer in layers for count in layer.values()))
    units = [unit for unit in range(largest, 0, -1) if largest % unit == 0]
    ends = [end for layer in layers for end in list(accumulate(layer.values()))[:-1]]
    return min(units, key=lambda unit: unit * sum(-(-end // (unit * shards)) for end in ends))


def layers_refusal(kinds: DecoderLayers) -> str | None:
    """Why the plugin does not serve a model with these layers; None if it does."""
    if kinds.states or len(kinds.full) + len(kinds.windows) < kinds.count:
        return "it has layers without attention, or with other states"
    if kinds.windows and (kinds.own_heads, kinds.own_head_dim) != (kinds.heads, kinds.head_dim):
        return "its layers that slide in the original have another number or size of heads"
    return None


def served_tokens(longest: int | None) -> tuple[int, ...]:
    """Lengths of requests to compare: the defaults below the model's longest, and the longest."""
    if longest is None:
        return SERVED_TOKENS
    return (*(tokens for tokens in SERVED_TOKENS if tokens < longest), longest)


def request_bytes(
    rows: Sequence[Mapping[Window | None, int]], kinds: DecoderLayers, itemsize: int, tokens: int
) -> int | None:
    """Bytes of cache that vLLM reserves for a request on one large GPU; None if not served.

    `rows` are the heads by window of the layers with full attention in the original.
    """
    sinks = any(window.sinks for row in rows for window in row if window is not None)
    if sinks or layers_refusal(kinds):
        return None
    own_windows: list[EngineHeads] = [{window: kinds.heads} for window in kinds.windows.values()]
    plan = module_plan([*engine_heads(rows), *own_windows])
    in_flight = _STEPS * batch_tokens(plan.sliding_windows, _BATCH_TOKENS)
    request = Request(tokens, _BLOCK_SIZE, in_flight)
    return plan.request_bytes(request, 2 * kinds.head_dim * itemsize)


def rank_order(plan: ModulePlan, layer: int) -> list[int]:
    """Order of a layer's KV heads in which each rank's part has its widest heads first.

    In the weights all of the widest heads come first, and vLLM gives each rank a contiguous part.
    """
    ends = pairwise(accumulate(plan.heads[layer].values(), initial=0))
    heads = {w: iter(range(*end)) for w, end in zip(plan.heads[layer], ends, strict=True)}
    order: list[int] = []
    for shard in range(plan.shards):
        for window, count in plan.heads_on(layer, shard).items():
            order += islice(heads[window], count)
    return order
