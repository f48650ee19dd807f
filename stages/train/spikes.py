"""Steps whose gradient is not finite, or far larger than those before: stop there, or leave out."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Iterable

from stages.configs import TrainConfig

_REMEMBERED = 100  # steps whose gradient norms a step's own is compared with
_LEAST = 20  # of them; before there are so many, only what is not finite is a bad step


class SpikeRule:
    """Judges gradient norms by those of the last good steps; the same on every process."""

    def __init__(self, train: TrainConfig) -> None:
        self._factor = train.spike_factor
        self._norms: deque[float] = deque(maxlen=_REMEMBERED)

    @property
    def norms(self) -> list[float]:
        """What a restart point keeps of the rule."""
        return list(self._norms)

    def restore(self, norms: Iterable[float]) -> None:
        """Go on from the `norms` of a restart point."""
        self._norms.extend(norms)

    def fault(self, norm: float) -> str | None:
        """What is wrong with a step of this gradient norm; a good step is remembered."""
        if not math.isfinite(norm):
            return f"grad_norm is {norm}"
        if self._factor is not None and len(self._norms) >= _LEAST:
            median = statistics.median(self._norms)
            if norm > self._factor * median:
                return (
                    f"grad_norm is {norm:.4g}, more than train.spike_factor = {self._factor:g} "
                    f"times {median:.4g}, the median of the last {len(self._norms)} good steps"
                )
        self._norms.append(norm)
        return None
