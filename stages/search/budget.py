"""The budget of a search, and the cache size of a head mask."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import Annotated, ClassVar, Self

from pydantic import BeforeValidator, model_validator

from bosch.budget import swa_budget
from bosch.errors import UserError
from bosch.masks import HeadMask
from bosch.model.cache_size import CacheSize
from bosch.model.families import DecoderLayers
from bosch.window import Window, named_share
from stages import fields
from stages.cost import BYTES
from stages.formats import format_bytes

# A search for a front holds out one in HELD_OUT_EVERY calibration examples to score its points.
HELD_OUT_EVERY = 4


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
    str, _amount_at(fields.bytes_of, 2**60, "a size and its context, like 2GiB @ 32k")
]


class Budget(fields.Section):
    """The hybrid's largest KV cache in transformers' generate: `kv_cache` or `bytes`."""

    ALTERNATIVES: ClassVar = (("kv_cache", "bytes"),)

    kv_cache: _ShareAt | None = None
    """Maximum KV cache as a share of the original's at a context, like `0.25 @ 32k`."""
    bytes: _SizeAt | None = None
    """Maximum KV cache in bytes for one request of a context, like `2GiB @ 32k`."""

    @model_validator(mode="after")
    def _check_amount(self) -> Self:
        (names,) = self.ALTERNATIVES
        if all(getattr(self, name) is None for name in names):
            raise ValueError(f"names no amount; set one of {', '.join(names)}")
        return self

    @property
    def name(self) -> str:
        """The field that is given."""
        return "bytes" if self.kv_cache is None else "kv_cache"

    @property
    def tokens(self) -> int:
        """The context at which the budget is counted."""
        return int(getattr(self, self.name).partition("@")[2])

    @property
    def amount(self) -> float:
        """The given number, without its context."""
        return float(getattr(self, self.name).partition("@")[0])


@dataclass(frozen=True)
class RequestCache:
    """The KV cache of one request of `tokens` tokens in transformers' generate; needs no torch.

    Layers that slide in the base model are counted, states of fixed size are not.
    """

    budget: Budget | None
    kinds: DecoderLayers
    dtype: str
    tokens: int

    @cached_property
    def original(self) -> int:
        """Bytes of the original model's cache."""
        return self.bytes_of(HeadMask.all_full(len(self.kinds.full), self.kinds.heads))

    def bytes_of(self, mask: HeadMask) -> int:
        """Bytes of a hybrid's cache."""
        size = CacheSize.of(mask.layers, self.kinds, BYTES[self.dtype], state_bytes=0)
        return size.dynamic(self.tokens)

    @property
    def allowed_bytes(self) -> int:
        """Bytes that the budget allows; without one the original's."""
        if self.budget is None:
            return self.original
        if self.budget.kv_cache is not None:
            share = Fraction(str(self.budget.amount))  # the float of 0.57 is less than 0.57
            return math.floor(share * self.original)
        return int(self.budget.amount)

    def with_sliding(self, sliding: int, window: Window) -> HeadMask:
        """A mask with `sliding` sliding heads, spread evenly over the layers."""
        return HeadMask.evenly(len(self.kinds.full), self.kinds.heads, sliding, window)

    def fewest_sliding(self, window: Window, most_bytes: int, granularity: int) -> int | None:
        """The fewest sliding heads within `most_bytes`, a multiple of `granularity`; or None."""
        units = range(0, len(self.kinds.full) * self.kinds.heads + 1, granularity)

        def fits(sliding: int) -> bool:
            return self.bytes_of(self.with_sliding(sliding, window)) <= most_bytes

        index = bisect_left(units, True, key=fits)
        return units[index] if index < len(units) else None

    def text(self, size: int) -> str:
        """`size` bytes as text, with their share of the original's."""
        return (
            f"{format_bytes(size)} of the original's {format_bytes(self.original)} at "
            f"{self.tokens:,} tokens ({size / self.original:.1%})"
        )


def sliding_ratio(cache: RequestCache, window: Window, granularity: int) -> float:
    """rho of the fewest sliding heads within a budget's bytes.

    Raises UserError if even the cache with all heads sliding is larger.
    """
    heads = len(cache.kinds.full) * cache.kinds.heads
    sliding = cache.fewest_sliding(window, cache.allowed_bytes, granularity)
    if sliding is None:
        assert cache.budget is not None
        least = cache.bytes_of(cache.with_sliding(heads, window))
        share = named_share(least, cache.original)
        raise UserError(
            f"{format_bytes(cache.allowed_bytes)} is less than the {format_bytes(least)} that all "
            f"heads with a window of {window} hold at {cache.tokens:,} tokens ({share} of the "
            "original's); choose more, or a smaller window",
            f"search.budget.{cache.budget.name}",
        )
    assert swa_budget(heads, sliding / heads) == sliding
    return sliding / heads
