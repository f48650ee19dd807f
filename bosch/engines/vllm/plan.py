"""How a hybrid's heads become vLLM's attention modules, and the size of its cache.

vLLM keeps one cache per attention module and wants pages of one size, for which it gives smaller
modules longer blocks: so the sizes of the modules, in KV heads, divide the widest. Modules of one
window and size fill cache groups of equally many members. Every module and group takes time in
each step, every unfilled group or head takes memory, and the plan has few of both. The plugin
builds the modules of this plan; the figures repeat the arithmetic of vLLM's planner. The engine
settings on which they depend are also here: plugin, plans and reports use them. Needs neither torch
nor vLLM.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import accumulate, islice, pairwise, product
from typing import NamedTuple, TypeAlias

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


# The allowed factor of memory for fewer modules and groups, and what a group costs in modules.
_FEWER, _GROUP_COST = 1.05, 8
# Of the plugin's own groups of a kind.
_MAX_GROUPS = 64


@dataclass(frozen=True)
class Request:
    """A request of `tokens`, and the engine settings on which its blocks depend.

    `tokens_in_flight` is vLLM's max_in_flight_tokens, the batch tokens of its concurrent steps,
    which a sliding head's cache holds in addition to its window while a prompt is read.
    """

    tokens: int
    block_size: int
    tokens_in_flight: int

    def blocks(self, window: int | None, scale: int = 1) -> int:
        """Blocks that vLLM reserves for the request in each group of a window (None: full).

        The group's blocks have `scale` times the engine's tokens.
        """
        block_size = scale * self.block_size
        if window is None:
            return -(-self.tokens // block_size)
        cached_tokens = min(window - 1 + self.tokens_in_flight, self.tokens)
        # One more, since a window may begin within a block.
        return -(-cached_tokens // block_size) + 1


def packed_groups(
    modules: Mapping[int | None, Sequence[int]], blocks: Mapping[int | None, int]
) -> tuple[int, dict[int | None, list[list[int]]]]:
    """The plugin's groups for the modules of each kind, with little unused memory.

    `blocks` is the number of blocks of a request in each group of a kind. Returns the KV heads that
    fit into a block (of the largest group), and by kind the indices of its modules by group.
    """
    bins = {
        kind: [_even_bins(heads, number + 1) for number in range(min(len(heads), _MAX_GROUPS))]
        for kind, heads in modules.items()
    }

    def width(kind: int | None, groups: list[list[int]]) -> int:
        return max(sum(modules[kind][index] for index in group) for group in groups)

    packings = []
    for room in sorted({width(kind, groups) for kind in bins for groups in bins[kind]}):
        fit = {k: [groups for groups in bins[k] if width(k, groups) <= room][:1] for k in bins}
        if all(fit.values()):
            chosen = {kind: groups for kind, (groups,) in fit.items()}
            cost = room * sum(len(groups) * blocks[kind] for kind, groups in chosen.items())
            packings.append((sum(map(len, chosen.values())), room, cost, chosen))
    limit = _FEWER * min(cost for _, _, cost, _ in packings)
    _, room, _, chosen = min(p for p in packings if p[2] <= limit)
    return room, chosen


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


class Module(NamedTuple):
    """An attention module of a layer: on every rank the KV heads from `first`, in a window.

    It may also compute heads of other windows, whose output is not used: those beside its own that
    fill it up, and on several ranks those of which another rank has one more.
    """

    window: int | None
    first: int
    size: int


class Pool(NamedTuple):
    """What a request reserves and a block holds, in tokens of a KV head, and the cache groups."""

    reserved: int
    block: int
    groups: int


@dataclass(frozen=True)
class ModulePlan:
    """The attention modules of every layer on each tensor-parallel rank, the widest window first.

    The `shards` divide a layer's `heads` of each window. A window counts the query's own token.
    """

    ranks: int
    shards: int
    heads: tuple[EngineHeads, ...]
    modules: tuple[tuple[Module, ...], ...]
    own_groups: bool = False

    def heads_on(self, layer: int, shard: int) -> dict[int | None, int]:
        """KV heads of each window of a layer on a shard; the first shards may have one more."""
        shards, ends = self.shards, accumulate(self.heads[layer].values())
        own_ends = (end // shards + (shard < end % shards) for end in ends)
        counts = (end - start for start, end in pairwise([0, *own_ends]))
        return dict(zip(self.heads[layer], counts, strict=True))

    def used(self, layer: int, rank: int) -> list[range]:
        """The heads of which a rank uses the output of each module of a layer, in order."""
        counts = self.heads_on(layer, rank * self.shards // self.ranks)
        ends = dict(zip(counts, accumulate(counts.values()), strict=True))
        used, done = [], 0
        for window, first, size in self.modules[layer]:
            end = max(done, min(first + size, ends[window]))
            used.append(range(done, end))
            done = end
        return used

    @property
    def sliding_windows(self) -> set[int]:
        """The windows of all sliding caches."""
        return {window for window, _ in self.kinds if window is not None}

    @cached_property
    def kinds(self) -> _Kinds:
        """Number of modules by window and size."""
        return Counter((m.window, m.size) for modules in self.modules for m in modules)

    def request_bytes(self, request: Request, bytes_per_head: int) -> int:
        """Bytes of cache that vLLM reserves for a request on one rank."""
        return self.pool(request).reserved * bytes_per_head

    def pool(self, request: Request) -> Pool:
        """The cache in vLLM's groups, or in the plugin's own."""
        return (_own_pool if self.own_groups else _engine_pool)(self.kinds, request)


# Number of modules by window and size.
_Kinds: TypeAlias = Counter[tuple[int | None, int]]


def _engine_pool(kinds: _Kinds, request: Request) -> Pool:
    widest = max(size for _, size in kinds)
    fewest, most = min(kinds.values()), max(kinds.values())
    members = most if most < _PADDED_UP_TO * fewest else fewest
    groups = {kind: -(-count // members) for kind, count in kinds.items()}
    blocks = sum(n * request.blocks(w, widest // size) for (w, size), n in groups.items())
    block = members * widest * request.block_size
    return Pool(blocks * block, block, sum(groups.values()))


def _own_pool(kinds: _Kinds, request: Request) -> Pool:
    sizes: dict[int | None, list[int]] = {}
    for (window, size), count in kinds.items():
        sizes.setdefault(window, []).extend([size] * count)
    room, bins = packed_groups(sizes, {window: request.blocks(window) for window in sizes})
    blocks = sum(len(groups) * request.blocks(window) for window, groups in bins.items())
    block = room * request.block_size
    return Pool(blocks * block, block, sum(map(len, bins.values())))


def module_plan(
    layers: Sequence[EngineHeads], request: Request, ranks: int = 1, own_groups: bool = False
) -> ModulePlan:
    """The plan for layers with these heads and requests like `request`.

    UserError if the ranks cannot divide the heads. `own_groups`: one module for each window, in
    groups of the plugin's own.
    """
    heads = sum(layers[0].values())
    if ranks < 1 or max(ranks, heads) % min(ranks, heads):
        raise UserError(
            f"tensor_parallel_size: {heads} KV heads cannot be shared by {ranks} ranks; choose a "
            f"divisor of {heads}"
        )
    return _best_plan(tuple(tuple(row.items()) for row in layers), request, ranks, own_groups)


@lru_cache(maxsize=64)
def _best_plan(
    rows: tuple[tuple[tuple[int | None, int], ...], ...],
    request: Request,
    ranks: int,
    own_groups: bool,
) -> ModulePlan:
    heads = sum(count for _, count in rows[0])
    # With more ranks than heads vLLM gives each rank a copy of one head.
    shards = min(ranks, heads)
    heads //= shards
    # From the first head on any shard to the last.
    firsts: _Heads = defaultdict(dict)
    counts: _Heads = defaultdict(dict)
    for layer, row in enumerate(rows):
        for (window, count), end in zip(row, accumulate(n for _, n in row), strict=True):
            if count:
                firsts[window][layer] = (end - count) // shards
                counts[window][layer] = -(-end // shards) - firsts[window][layer]
    choices = []
    for cuts in _cuts(counts, heads, len(rows), own_groups):
        kinds: _Kinds = Counter()
        for window, cut in cuts.items():
            kinds.update((window, size) for sizes in cut.values() for size in sizes)
        largest = max(size for _, size in kinds)
        if not own_groups and any(largest % size for _, size in kinds):  # no module is the widest
            continue
        pool = (_own_pool if own_groups else _engine_pool)(kinds, request)
        choices.append((kinds.total() + _GROUP_COST * pool.groups, pool.reserved, cuts))
    limit = _FEWER * min(reserved for _, reserved, _ in choices)
    *_, cuts = min((c for c in choices if c[1] <= limit), key=lambda choice: choice[:2])
    modules: list[list[Module]] = [[] for _ in rows]
    for window in sorted(cuts, key=lambda w: (w is not None, -(w or 0))):
        for layer, sizes in cuts[window].items():
            first = firsts[window][layer]
            for size in sizes:
                modules[layer].append(Module(window, min(first, heads - size), size))
                first += size
    heads_of = tuple(map(dict, rows))
    return ModulePlan(ranks, shards, heads_of, tuple(map(tuple, modules)), own_groups)


# By window and layer; and the sizes of the modules that cover a window's heads, by layer.
_Heads: TypeAlias = dict[int | None, dict[int, int]]
_Cut: TypeAlias = dict[int, list[int]]


def _cuts(
    counts: _Heads, heads: int, layers: int, own_groups: bool
) -> Iterator[dict[int | None, _Cut]]:
    """Cuts by window into sizes that divide the widest, down to a smallest that may be filled up.

    Of all sizes but the smallest there is a multiple of some number of modules, so that they fill
    groups; the rest is cut further. The plugin's own groups need no cut.
    """
    if own_groups:
        yield {w: {layer: [n] for layer, n in of.items()} for w, of in counts.items()}
        return
    numbers = sorted({-(-layers * twelfths // 12) for twelfths in range(1, 13)})
    doubled = {n << k for n in (1, 3) for k in range(heads.bit_length())}
    for widest, number in product(sorted({n for n in doubled if n < heads} | {heads}), numbers):
        sizes = [size for size in range(widest, 0, -1) if widest % size == 0]
        least = range(1, len(sizes) + 1)
        cuts = {w: [_cut(of, sizes[:end], number) for end in least] for w, of in counts.items()}
        for full, sliding in product(least, least):
            yield {w: of[(full if w is None else sliding) - 1] for w, of in cuts.items()}


def _cut(counts: Mapping[int, int], sizes: Sequence[int], number: int) -> _Cut:
    """Cut into these sizes, of each but the smallest a multiple of `number`."""
    cut: _Cut = {layer: [] for layer in counts}
    rest = dict(counts)
    for size in sizes:
        last = size == sizes[-1]
        spare = size - 1 if last else 0
        fit = [layer for layer, count in rest.items() for _ in range((count + spare) // size)]
        kept = len(fit) if last else len(fit) - len(fit) % number
        for place in range(kept):
            layer = fit[place * len(fit) // kept]  # evenly: pipeline stages have their share
            cut[layer].append(size)
            rest[layer] -= size
    return cut


def layers_refusal(kinds: DecoderLayers) -> str | None:
    """Why the plugin does not serve a model with these layers; None if it does."""
    if kinds.windows and (kinds.own_heads, kinds.own_head_dim) != (kinds.heads, kinds.head_dim):
        return "its layers that slide in the original have another number or size of heads"
    return None


def planned_tokens(longest: int | None) -> int:
    """Length of the request for which the modules of a model of `longest` positions are planned."""
    return min(longest or SERVED_TOKENS[0], SERVED_TOKENS[0])


def served_tokens(longest: int | None) -> tuple[int, ...]:
    """Lengths of requests to compare: the defaults below the model's longest, and the longest."""
    if longest is None:
        return SERVED_TOKENS
    return (*(tokens for tokens in SERVED_TOKENS if tokens < longest), longest)


def gpu_plan(
    layers: Sequence[EngineHeads], longest: int | None, tokens: int
) -> tuple[ModulePlan, Request]:
    """The plan for a model of `longest` positions on one large GPU, and a request of `tokens`."""
    windows = {window for layer in layers for window, n in layer.items() if n and window}
    in_flight = _STEPS * batch_tokens(windows, _BATCH_TOKENS)
    request = Request(tokens, _BLOCK_SIZE, in_flight)
    return module_plan(layers, replace(request, tokens=planned_tokens(longest))), request


def request_bytes(
    rows: Sequence[Mapping[Window | None, int]],
    kinds: DecoderLayers,
    itemsize: int,
    tokens: int,
    longest: int | None = None,
) -> int | None:
    """Bytes of cache that vLLM reserves for a request on one large GPU; None if not served.

    None, too, for models with states, to whose size vLLM adapts its pages. `rows` are the heads by
    window of the layers with full attention in the original, `longest` are the model's positions.
    """
    sinks = any(window.sinks for row in rows for window in row if window is not None)
    if sinks or kinds.states or layers_refusal(kinds):
        return None
    own_windows: list[EngineHeads] = [{window: kinds.heads} for window in kinds.windows.values()]
    plan, request = gpu_plan([*engine_heads(rows), *own_windows], longest, tokens)
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
