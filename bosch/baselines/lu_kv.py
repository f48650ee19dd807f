"""LU-KV: the attention of the decoded answer that a head loses with each window.

arXiv 2602.08585 divides a cache among heads by curves of the long-horizon eviction loss: the
importance that later decoding steps with full attention give to evicted tokens. Here a window
evicts, and the importance is the attention probability, summed over steps; the paper's weights, if
any, are not known. Shapes: L layers, HKV key/value heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from bosch.baselines.blocks import attention_rows, hidden_sums, row_blocks
from bosch.baselines.capture import LayerStates, visit_layers
from bosch.baselines.ranking import Scores
from bosch.model.search_mode import mask_shape
from bosch.objective.calibration import CalibrationSet
from bosch.window import Window


def lu_kv(model: Any, calibration: CalibrationSet, windows: Sequence[Window]) -> Scores:
    """Losses [L, HKV, 1 + windows] of each KV head at full attention, which is 0, and each window.

    A loss is the attention probability that the window hides, in [0, 1], averaged over the KV
    head's query heads and over all positions that predict an answer token.
    """
    shape = mask_shape(model.config)
    sums = torch.zeros(*shape, 1 + len(windows), dtype=torch.float64)
    for example in calibration.examples:
        length = len(example.input_ids) - 1
        first = length - example.answer_length

        def add(layer: int, states: LayerStates, length: int = length, first: int = first) -> None:
            for begin, end in row_blocks(length, first):
                alpha = attention_rows(states, begin, end)
                by_head = alpha.view(shape[1], -1, *alpha.shape[1:]).mean(dim=1)
                sums[layer] += hidden_sums(by_head, begin, end, windows).cpu()

        visit_layers(model, torch.tensor(example.input_ids), add)
    steps = sum(example.answer_length for example in calibration.examples)
    return (sums / steps).numpy()
