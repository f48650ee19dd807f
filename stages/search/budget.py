"""The budget of a search, and a head mask's cache size in the budget's engine."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import Annotated, ClassVar, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from bosch.budget import KEEP_TAIL, LayerHeads, even_counts, swa_budget
from bosch.errors import UserError
from bosch.model.cache_size import CacheSize
from bosch.model.families import DecoderLayers
from bosch.vllm import plan as vllm_plan
from bosch.window import Window, named_share
from stages import fields
from stages.cost import BYTES
from stages.formats import format_bytes

# A search for a front holds out one in HELD_OUT_EVERY calibration examples to score its points.
HELD_OUT_EVERY = 4

CacheType = Literal["float32", "bfloat16", "float16", "float8"]
CACHE_BYTES = {**BYTES, "float8": 1}


def _amount_at(
    parse_amount: Callable[[str], object], largest: float, expected: str
) -> BeforeValidator:
    """A validator of `AMOUNT @ TOKENS` that writes suffixes out: `0.25 @ 32k` is `0.25 @ 32768`."""

    def validate(value: object) -> object:
        first, _, second = (part.strip() for part in str(value).partition("@"))
        try:
            amount, tokens = parse_amount(first), fields.parse_count(second)
        except ValueError:
            amount = tokens = None
        if not isinstance(tokens, int) or not 0 < tokens <= fields.MOST:
            amount = None
        if not isinstance(amount, int | float) or not 0 < amount <= largest:
            raise ValueError(f"expected {expected}, found {value!r:.60}")
        return f"{amount!r} @ {tokens}"

    return BeforeValidator(validate)


_ShareAt = Annotated[
    str, _amount_at(fields.parse_number, 1, "a share of at most 1 and its context, like 0.25 @ 32k")
]
_SizeAt = Annotated[
    str, _amount_at(fields.parse_bytes, 2**60, "a size and its context, like 2GiB @ 32k")
]


class Budget(fields.Section):
    """The hybrid's largest KV cache: one of `ratio`, `kv_cache`, `bytes` and `keep`."""

    ALTERNATIVES: ClassVar = (("ratio", "kv_cache", "bytes", "keep"),)

    ratio: fields.Ratio | None = None
    """Share of KV heads that become sliding (rho); the same as swa_ratio."""
    kv_cache: _ShareAt | None = None
    """Maximum KV cache as a share of the original's at a context, like `0.25 @ 32k`."""
    bytes: _SizeAt | None = None
    """Maximum KV cache in bytes for one request of a context, like `2GiB @ 32k`; with engine vllm
    on each rank."""
    keep: Annotated[fields.Number, Field(gt=0, le=1)] | None = None
    """Share of the original's score that the chosen point of a front and all larger points keep, by
    a one-sided 95 % limit on samples held out from the search."""
    context: fields.Count | None = None
    """Tokens at which a front counts caches; default: those of the budget, else
    prepare.calibration.length."""
    engine: Literal["generate", "vllm"] = "generate"
    """The engine whose cache is counted: transformers' generate, or vLLM with the memory that it
    reserves."""
    cache_dtype: CacheType | None = None
    """Precision of the cache; default: that of model.dtype."""
    ranks: Annotated[int, Field(gt=0, le=1024)] = 1
    """Tensor-parallel ranks of engine vllm."""
    block_size: Annotated[int, Field(gt=0, le=2**20)] = vllm_plan.LARGE_GPU.block_size
    """Tokens of a cache block of engine vllm."""
    tokens_in_flight: fields.Count | None = None
    """Tokens of all concurrent steps of engine vllm, which a sliding head holds in addition to its
    window; default: the plugin's value on a large GPU."""

    @model_validator(mode="after")
    def _check_amount(self) -> Self:
        (names,) = self.ALTERNATIVES
        if all(getattr(self, name) is None for name in names):
            raise ValueError(f"names no amount; set one of {', '.join(names)}")
        return self

    @property
    def name(self) -> str:
        """The field that is given."""
        (names,) = self.ALTERNATIVES
        return next(name for name in names if getattr(self, name) is not None)

    @property
    def tokens(self) -> int | None:
        """The context at which the budget is counted, if it has one."""
        text = self.kv_cache or self.bytes
        return None if text is None else int(text.partition("@")[2])

    @property
    def amount(self) -> float:
        """The given number, without its context."""
        value = getattr(self, self.name)
        return float(value.partition("@")[0]) if isinstance(value, str) else float(value)


@dataclass(frozen=True)
class EngineCache:
    """The KV cache of one request of `tokens` tokens in a budget's engine; needs no torch.

    `rows` are the heads by window of each layer with full attention in the base model. Layers that
    slide in the base model are counted, states of fixed size are not.
    """

    budget: Budget
    kinds: DecoderLayers
    dtype: str
    tokens: int

    @property
    def _itemsize(self) -> int:
        return CACHE_BYTES[self.budget.cache_dtype or self.dtype]

    @cached_property
    def original(self) -> int:
        """Bytes of the original model's cache."""
        return self.bytes_of([{None: self.kinds.heads}] * len(self.kinds.full))

    def bytes_of(self, rows: Sequence[LayerHeads]) -> int:
        """Bytes of a hybrid's cache (vLLM: per rank); UserError if ranks cannot share a layer."""
        if self.budget.engine == "generate":
            size = CacheSize.of(rows, self.kinds, self._itemsize, state_bytes=0)
            return size.dynamic(self.tokens)
        own_windows: list[vllm_plan.EngineHeads] = [
            {w: self.kinds.heads} for w in self.kinds.windows.values()
        ]
        layers, engine = [*vllm_plan.engine_heads(rows), *own_windows], vllm_plan.LARGE_GPU
        plan = vllm_plan.module_plan(layers, self.budget.ranks)
        in_flight = self.budget.tokens_in_flight or engine.tokens_in_flight(plan.sliding_windows)
        request = vllm_plan.Request(self.tokens, self.budget.block_size, in_flight)
        return plan.request_bytes(request, 2 * self.kinds.head_dim * self._itemsize)

    @property
    def allowed_bytes(self) -> int:
        """Bytes that the budget allows; for ratio and keep the original's."""
        if self.budget.kv_cache is not None:
            share = Fraction(str(self.budget.amount))  # the float of 0.57 is less than 0.57
            return math.floor(share * self.original)
        return int(self.budget.amount) if self.budget.bytes is not None else self.original

    def with_sliding(self, sliding: int, window: Window) -> list[LayerHeads]:
        """The heads of a mask with `sliding` sliding heads, spread evenly over the layers."""
        heads = self.kinds.heads
        counts = even_counts(len(self.kinds.full), heads, sliding)
        return [{None: full, window: heads - full} for full in counts]

    def fewest_sliding(self, window: Window, most_bytes: int, granularity: int) -> int | None:
        """The fewest sliding heads within `most_bytes`, a multiple of `granularity`; or None."""
        units = range(0, len(self.kinds.full) * self.kinds.heads + 1, granularity)
        fits = (n for n in units if self.bytes_of(self.with_sliding(n, window)) <= most_bytes)
        return next(fits, None)

    @property
    def ranks_text(self) -> str:
        """The end of a phrase about the bytes, if each rank has this many."""
        return f" on each of {self.budget.ranks} ranks" if self.budget.ranks > 1 else ""

    def text(self, size: int) -> str:
        """`size` bytes as text, with their share of the original's."""
        return (
            f"{format_bytes(size)}{self.ranks_text} of the original's "
            f"{format_bytes(self.original)} at {self.tokens:,} tokens "
            f"({size / self.original:.1%}, {self.budget.engine})"
        )


def engine_faults(budget: Budget, kinds: DecoderLayers, sinks: int) -> Iterator[str]:
    """Reasons why a budget's engine does not support sliding heads of the model."""
    where = "search.budget.engine: vllm"
    if budget.engine != "vllm":
        for name in ("ranks", "block_size", "tokens_in_flight"):
            if getattr(budget, name) != Budget.model_fields[name].default:
                yield f"search.budget.{name}: counts with search.budget.engine: vllm alone"
        return
    if sinks:
        yield f"{where} serves no sliding heads with sinks (search.sinks = {sinks})"
    if refusal := vllm_plan.layers_refusal(kinds):
        yield f"{where} does not serve this model: {refusal}"
        return
    try:
        vllm_plan.module_plan([{None: kinds.heads}] * len(kinds.full), budget.ranks)
    except UserError as error:
        yield f"search.budget.ranks: {str(error).removeprefix('tensor_parallel_size: ')}"


def keep_fault(keep: float, examples: int) -> str | None:
    """Why `examples` are too few to show that the share `keep` of a perfect score is kept."""
    held_out = examples // HELD_OUT_EVERY
    limit = KEEP_TAIL ** (1 / held_out) if held_out else 0.0
    if limit >= keep:
        return None
    reason = (
        f"search.budget.keep: {held_out} held-out examples, one in {HELD_OUT_EVERY} of "
        f"prepare.calibration.examples, show at most that {limit:.3g} of a perfect score is kept"
    )
    if keep == 1:
        return f"{reason}, and no number of them shows that all is; choose less than 1"
    enough = HELD_OUT_EVERY * math.ceil(math.log(KEEP_TAIL) / math.log(keep))
    return f"{reason}; choose that or less, or {enough:,} examples"


def sliding_ratio(cache: EngineCache, window: Window, granularity: int) -> float:
    """rho of a budget: its ratio, or that of the fewest sliding heads within its bytes.

    Raises UserError if even the cache with all heads sliding is larger.
    """
    heads = len(cache.kinds.full) * cache.kinds.heads
    if cache.budget.ratio is not None:
        return cache.budget.ratio
    sliding = cache.fewest_sliding(window, cache.allowed_bytes, granularity)
    if sliding is None:
        least = cache.bytes_of(cache.with_sliding(heads, window))
        share = named_share(least, cache.original)
        raise UserError(
            f"search.budget.{cache.budget.name}: {format_bytes(cache.allowed_bytes)} is less "
            f"than the {format_bytes(least)} that all heads with a window of {window} hold at "
            f"{cache.tokens:,} tokens ({cache.budget.engine}, {share} of the original's); "
            "choose more, or a smaller window"
        )
    assert swa_budget(heads, sliding / heads) == sliding
    return sliding / heads
