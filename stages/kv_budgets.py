"""Names of KV slots as shares of the original's."""

from __future__ import annotations

from collections.abc import Sequence


def share_names(slots: Sequence[int], original: int) -> list[str]:
    """KV slots as shares of the original's (`12.5 %`), with enough digits to differ."""
    names: list[str] = []
    for digits in range(1, 17):
        names = [
            f"{100 * count / original:.{digits}f}".removesuffix(".0") + " %" for count in slots
        ]
        if len(set(names)) == len(names):
            break
    return names
