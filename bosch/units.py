"""Units of choice: groups of g KV heads of a layer that become full or sliding together.

With g above 1 the number of full heads in every layer is a multiple of g, which a serving engine
may need for tensor-parallel ranks or for few large attention modules. A method chooses units with a
mask [L, H / g]. L layers, H KV heads per layer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from bosch.masks import HeadMask

Values = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Units:
    """Each layer's heads in units: unit u of layer l has the heads `heads[l, u]`."""

    heads: npt.NDArray[np.int64]  # [L, H / g, g]

    @classmethod
    def of_neighbours(cls, num_layers: int, num_heads: int, granularity: int = 1) -> Units:
        """Units of neighbouring heads."""
        return cls.by_value(np.zeros((num_layers, num_heads)), granularity)

    @classmethod
    def by_value(cls, values: Values, granularity: int) -> Units:
        """Units of heads of similar `values` [L, H], rising: few are full only to fill a unit."""
        order = np.argsort(values, axis=1, kind="stable")
        return cls(order.reshape(len(order), -1, granularity))

    @property
    def shape(self) -> tuple[int, int]:
        """Layers, and units per layer."""
        layers, units, _ = self.heads.shape
        return layers, units

    def head_mask(self, mask: HeadMask) -> HeadMask:
        """The mask of heads [L, H] for a mask of units [L, H / g]."""
        return HeadMask(self.spread(np.array(mask.windows)).tolist(), mask.sinks)

    def spread(self, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Values [L, H] of heads, each with that of its unit in `values` [L, H / g]."""
        by_head = np.empty((len(self.heads), self.heads[0].size), dtype=values.dtype)
        by_head[np.arange(len(by_head))[:, None, None], self.heads] = values[:, :, None]
        return by_head

    def gather(self, values: Values) -> Values:
        """Values [L, H] of heads by unit, [L, H / g, g]."""
        return np.take_along_axis(values[:, None, :], self.heads, axis=2)
