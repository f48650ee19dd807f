"""MoA: what the answers lose, to first order, where a head's attention ends at a window.

arXiv 2406.14909, as in its repository thu-nics/MoA (`LlamaModel_get_attention_matrix_log`,
`importance_to_accuracy_loss`): the influence of one attention value is the change of the loss
where it becomes zero and the others of its row grow to sum to one again. HQ query heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bosch.baselines.blocks import attention_blocks, grouped_product, outside
from bosch.baselines.capture import LayerStates, visit_gradients
from bosch.baselines.ranking import Scores
from bosch.model.search_mode import mask_shape
from bosch.objective.calibration import CalibrationSet
from bosch.window import Window


def moa(model: Any, calibration: CalibrationSet, windows: Sequence[Window]) -> Scores:
    """Losses [L, HKV, 1 + windows] of each choice of a KV head, 0 where it is full.

    The loss of an example is the mean cross-entropy of its answer tokens, at the original model.
    Influences are absolute, and of a KV head's query heads the largest counts, as in the repository
    with `num_key_value_groups`: here for each example, there of the mean over examples of one
    length. Raises UserError as `visit_gradients` does.
    """
    shape = mask_shape(model.config)
    sums = torch.zeros(*shape, 1 + len(windows), dtype=torch.float64)

    def add(layer: int, states: LayerStates) -> None:
        assert states.output_gradient is not None
        for begin, end, alpha in attention_blocks(states):
            effects = _effects(states, states.output_gradient, alpha, begin, end)
            largest = effects.view(shape[1], -1, *effects.shape[1:]).amax(dim=1)
            sums[layer] += outside(largest, begin, end, windows).cpu()

    for example in calibration.examples:
        visit_gradients(model, example, add)
    return (sums / len(calibration)).numpy().astype(np.float64)


def _effects(states: LayerStates, gradient: Tensor, alpha: Tensor, begin: int, end: int) -> Tensor:
    """|E| of rows begin .. end - 1, [HQ, R, end], with dL/dalpha(t, j) = dO_t . V_j."""
    slope = grouped_product(gradient[:, begin:end], states.value[:, :end])
    mean = (slope * alpha).sum(dim=-1, keepdim=True)
    rest = 1 - alpha + torch.finfo(alpha.dtype).eps
    return (alpha * (slope - mean) / rest).abs_()
