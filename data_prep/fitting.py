"""Search for the largest haystack that fits, when only building it tells its token count."""

from __future__ import annotations

from collections.abc import Callable

from bosch.errors import UserError

_MOST_STEPS = 40


def largest_fit(
    tokens: Callable[[int], int], length: int, per_unit: float, smallest: int, what: str
) -> int:
    """The largest haystack size whose sample has at most `length` tokens, to within one unit.

    Interpolation towards the length, kept inside a bracket that shrinks in every step; where it
    shrinks too slowly, bisection. Ends after a bounded number of steps whatever `tokens` does.
    Raises UserError, about `what`, when not even the `smallest` one fits.
    """
    fits, used = smallest, tokens(smallest)
    if used > length:
        raise UserError(
            f"{what} does not fit into {length} tokens: its shortest sample has {used}; "
            "raise the length or leave the task out"
        )
    too_large: int | None = None
    rate = per_unit
    for step in range(_MOST_STEPS):
        slack = length - used
        if slack < per_unit or too_large == fits + 1:
            break
        guess = fits + max(1, round(slack / rate - 0.25))
        if too_large is not None:
            guess = (fits + too_large) // 2 if step % 4 == 3 else min(guess, too_large - 1)
        count = tokens(guess)
        rate = max((count - used) / (guess - fits), 0.1)
        if count <= length:
            fits, used = guess, count
        else:
            too_large = guess
    return fits
