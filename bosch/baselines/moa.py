"""MoA: the first-order increase of the answers' loss when a head gets a window.

arXiv 2406.14909, as in its repository thu-nics/MoA (`LlamaModel_get_attention_matrix_log`,
`importance_to_accuracy_loss`): the influence of an attention weight is the change of the loss when
this weight becomes zero and the others of its row grow to sum to one again. L layers, HQ query
heads, HKV key/value heads, R rows of a block.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from bosch.baselines.blocks import alpha_gradients, attention_blocks, hidden_sums
from bosch.baselines.capture import LayerStates, visit_gradients
from bosch.baselines.ranking import Scores
from bosch.model.search_mode import mask_shape
from bosch.objective.calibration import CalibrationSet
from bosch.window import Window


def moa(model: Any, calibration: CalibrationSet, windows: Sequence[Window]) -> Scores:
    """Losses [L, HKV, 1 + windows] of each KV head: 0 for full, then one for each of `windows`.

    A loss sums the absolute influences that the window hides, averaged over examples. The loss of
    an example is the mean cross-entropy of its answer tokens under the original model. The largest
    influence among a KV head's query heads counts in each example; the repository takes it from
    the mean over examples of one length (`num_key_value_groups`). Raises as `visit_gradients`.
    """
    shape = mask_shape(model.config)
    sums = torch.zeros(*shape, 1 + len(windows), dtype=torch.float64)

    def add(layer: int, states: LayerStates) -> None:
        for begin, end, alpha in attention_blocks(states):
            gradient = alpha_gradients(states, begin, end)
            mean = (gradient * alpha).sum(dim=-1, keepdim=True)
            rest = 1 - alpha + torch.finfo(alpha.dtype).eps
            influences = (alpha * (gradient - mean) / rest).abs_()  # [HQ, R, end]
            largest = influences.view(shape[1], -1, *influences.shape[1:]).amax(dim=1)
            sums[layer] += hidden_sums(largest, begin, end, windows).cpu()

    for example in calibration.examples:
        visit_gradients(model, example, add)
    return (sums / len(calibration)).numpy()
