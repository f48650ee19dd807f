"""Numbers as text: scores, bytes, token counts, durations."""

from __future__ import annotations

import math
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[1]

# From this share of a unit on, three significant digits round up to one unit.
_ROUNDED_UP = 0.9995
_BINARY_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def format_score(value: float | None) -> str:
    """A score in points of 100 with one decimal; an en dash for None."""
    return "–" if value is None or math.isnan(value) else f"{value:.1f}"


def signed(value: float, digits: int) -> str:
    """A difference with + or − (U+2212); no sign for 0, an en dash for NaN."""
    if math.isnan(value):
        return "–"
    text = f"{value:+.{digits}f}"
    return text[1:] if not float(text) else text.replace("-", "−")


def interval(low: float, high: float, digits: int) -> str:
    """The ends of a difference's interval: `[−1.2, +0.3]`."""
    return f"[{signed(low, digits)}, {signed(high, digits)}]"


def format_share(value: float) -> str:
    """A share as a percentage, without a decimal if it is whole."""
    percent = round(100 * value, 9)  # 100 * 0.29 is 28.999999999999996
    return f"{percent:.{1 if percent % 1 else 0}f} %"


def format_bytes(value: float) -> str:
    """Bytes in the largest binary unit with a number of at least 1: `1.5 KiB`."""
    power = 0
    while abs(value) >= 1023.5 and power < len(_BINARY_UNITS) - 1:  # 1023.5 is written as 1024
        value, power = value / 1024, power + 1
    return f"{_significant(value)} {_BINARY_UNITS[power]}"


def format_flops(value: float) -> str:
    """Floating-point operations in the largest unit with a number of at least 1: `1.5 EFLOP`."""
    for power, prefix in ((18, "E"), (15, "P"), (12, "T"), (9, "G"), (6, "M"), (3, "k")):
        if value >= _ROUNDED_UP * 10**power:
            return f"{_significant(value / 10**power)} {prefix}FLOP"
    return f"{_significant(value)} FLOP"


def format_count(value: float) -> str:
    """A count in decimal thousands: `950`, `12.5k`, `1.3M`, `2.5B`."""
    for factor, suffix in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= _ROUNDED_UP * factor:
            return f"{_significant(value / factor)}{suffix}"
    return _significant(value)


def counted(number: int, noun: str, plural: str = "") -> str:
    """A number with its noun: `1 sample`, `12,000 samples`."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def format_length(value: int) -> str:
    """A context length in units of 1,024 if it is a multiple of 1,024: `32k`, `600`."""
    return f"{value // 1024}k" if value and value % 1024 == 0 else f"{value:,}"


def format_seconds(value: float) -> str:
    """A duration in its two largest units: `0.4 s`, `38 s`, `3 min 5 s`, `4 h 10 min`."""
    if round(value, 1) < 10:
        return f"{value:.1f} s"
    seconds = round(value)
    if seconds < 60:
        return f"{seconds} s"
    if seconds < 3600:
        return f"{seconds // 60} min {seconds % 60} s"
    minutes = round(value / 60)
    return f"{minutes // 60} h {minutes % 60} min"


def format_hours(hours: float) -> str:
    """Hours, or minutes below two hours: `less than a minute`, `38 min`, `1,234.5 h`."""
    if hours < 1 / 60:
        return "less than a minute"
    minutes = round(hours * 60)
    return f"{minutes} min" if minutes < 120 else f"{hours:,.1f} h"


def _significant(value: float) -> str:
    """At least three significant digits, without an exponent or trailing zeros."""
    if value == 0:
        return "0"
    decimals = max(0, 2 - math.floor(math.log10(abs(value))))
    text = f"{value:.{decimals}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text
