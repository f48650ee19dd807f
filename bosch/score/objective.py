"""S(z): exact-match rate of a masked model on the calibration set, by prefill (BOSCH Eq. 4).

Batches are equal for any number of ranks, and each rank measures whole batches. So the padding and
neighbours of an example, and its numbers, do not depend on the ranks. N examples of the set, K
batches.
"""

from __future__ import annotations

import logging
import math
import time
import zlib
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property

import torch
from torch import Tensor
from transformers import PreTrainedModel

from bosch.errors import RunError, UserError
from bosch.masks import HeadMask
from bosch.model.families import check_family, rope_depends_on_length
from bosch.model.fingerprint import model_fingerprint
from bosch.model.search_mode import apply_head_mask, mask_shape
from bosch.ranks import Ranks
from bosch.score import answers
from bosch.score.batches import Batch, batches_by_part, batches_of_rank, final_states
from bosch.score.calibration import CalibrationSet
from bosch.score.evaluation_log import Evaluation, EvaluationContext, GateGradient
from bosch.score.flops import Flops
from bosch.score.gate_gradients import choices_of, gate_gradients
from bosch.window import Window, window_menu

logger = logging.getLogger(__name__)

_CHECK_TOKENS = 16


class Objective:
    """Measures head masks on a model in search mode.

    With several `ranks` each measures its share of the batches; all of them must evaluate the same
    masks in the same order, and get equal evaluations. Gradients are by the choices of `windows`.
    `held_out` examples are used only by `evaluate_held_out`. Raises UserError if a sliding head
    would see every token of every example.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        calibration: CalibrationSet,
        windows: Window | Sequence[Window],
        *,
        batch_size: int = 8,
        ranks: Ranks | None = None,
        held_out: CalibrationSet | None = None,
    ) -> None:
        self.windows = window_menu(windows)
        self.window = self.windows[0]  # the widest
        if self.window.max_keys >= calibration.max_length:
            sinks = f" with {self.window.sinks} sinks" if self.window.sinks else ""
            raise UserError(
                f"search.window_size is {self.window.size}{sinks}, no shorter than the longest "
                f"calibration example ({calibration.max_length} tokens): lower it or raise "
                "prepare.calibration.length"
            )
        check_family(model.config)
        self.model, self.calibration = model, calibration
        self.num_layers, self.num_key_value_heads = self.shape = mask_shape(model.config)
        self.quantum = 1.0 / len(calibration)  # smallest difference between two scores
        self.ranks = ranks or Ranks()
        vocabulary = len(next(model.get_input_embeddings().parameters()))
        if rope_depends_on_length(model.config):  # a longer row would change the others' factors
            batch_size = 1
        parts = batches_by_part(calibration, batch_size, vocabulary)
        self.parts = len(parts)
        self._batches = [batch for batches in parts for batch in batches]
        self.batches = len(self._batches)  # also the largest useful number of ranks
        self._part_of = [number for number, batches in enumerate(parts) for _ in batches]
        sizes = [[batch.positions for batch in batches] for batches in parts]
        self._local_batches = set(batches_of_rank(sizes, self.ranks))
        self._flops = Flops(model)
        self._checked = self._recomputes = False
        self._held_out = None
        if held_out is not None:
            self._held_out = Objective(
                model, held_out, self.windows, batch_size=batch_size, ranks=ranks
            )

    def local_batches(self) -> list[Batch]:
        """The batches that this rank measures."""
        return [self._batches[index] for index in sorted(self._local_batches)]

    @property
    def held_out_examples(self) -> int:
        """Number of examples that `evaluate_held_out` measures."""
        return 0 if self._held_out is None else len(self._held_out.calibration)

    @property
    def held_out_passes(self) -> float:
        """Upper bound of the cost of `evaluate_held_out`, in full-forward equivalents."""
        if self._held_out is None:
            return 0.0
        return self._held_out.full_pass_operations / self.full_pass_operations

    @property
    def context(self) -> EvaluationContext:
        """All that scores depend on besides the mask."""
        return EvaluationContext(
            calibration=self.calibration.fingerprint,
            model=model_fingerprint(self.model),
            windows=[window.size for window in self.windows],
            sinks=self.window.sinks,
        )

    def evaluate(self, mask: HeadMask) -> Evaluation:
        """One pass over the calibration set, without generation.

        `seconds` is the time of the slowest rank. Raises RunError if the model's numbers are not
        finite or the ranks measure different masks, LostRankError if a rank has ended.
        """
        results, seconds = self._results(mask)
        exact, likelihood = (sum(column) / len(results) for column in results.T.tolist())
        if not math.isfinite(likelihood):
            raise RunError(
                f"the model's logits are not finite under head mask {mask.key}: "
                + remedy(self.model)
            )
        return Evaluation(exact, likelihood, seconds, self.mask_passes(mask))

    def evaluate_held_out(self, mask: HeadMask) -> Evaluation:
        """As `evaluate`, on the held-out examples; costs in passes over the search's examples."""
        assert self._held_out is not None, "no examples are held out"
        evaluation = self._held_out.evaluate(mask)
        passes = self.held_out_passes * evaluation.full_forward_equivalents
        return replace(evaluation, full_forward_equivalents=passes)

    def example_results(self, mask: HeadMask) -> Tensor:
        """Exact match and log-likelihood of each example in the set's order, [N, 2] float64."""
        return self._results(mask)[0]

    @torch.inference_mode()
    def _results(self, mask: HeadMask) -> tuple[Tensor, float]:
        """`example_results`, and the slowest rank's seconds."""
        started = time.perf_counter()
        self._apply(mask)
        results = torch.zeros(len(self.calibration), 2, dtype=torch.float64)
        for batch in self.local_batches():
            results[batch.examples] = answers.batch_results(self.model, batch)
        (results,), seconds = self._merge(mask, started, results)
        return results, seconds

    def gradient_passes(self, share: int, shares: int) -> float:
        """Upper bound of `gate_gradient`'s full-forward equivalents, equal on all machines."""
        indices = self._batches_of_share(share, shares)
        operations = sum(
            self._flops.gradient(self._batches[index], self.windows) for index in indices
        )
        return float(operations) / self.full_pass_operations

    def gate_gradient(self, mask: HeadMask, share: int = 0, shares: int = 1) -> GateGradient:
        """Derivative of the mean log-likelihood by each KV head's gate, at `mask`.

        The gate blends the narrowest window (0) and full attention (1). The mean is over share
        `share` of `shares` of the set's parts. There are at most as many shares as parts; higher
        numbers wrap around. Raises RunError as `evaluate`.
        """
        values, seconds, passes = self._gate_gradients(mask, share, shares)
        return GateGradient(values[..., 0].tolist(), seconds, passes)

    def window_gradient(self, mask: HeadMask, share: int = 0, shares: int = 1) -> GateGradient:
        """Estimated changes of the mean log-likelihood [L, HKV, 1 + windows], from one gradient.

        Entry 0 of a head is the change if it were full, entry k with the k-th window from the
        widest; 0 for its current one.
        First order: many changes together sum to less. Otherwise as `gate_gradient`.
        """
        values, seconds, passes = self._gate_gradients(mask, share, shares)
        values = torch.cat([values, torch.zeros_like(values[..., :1])], dim=2)
        values = values - values.gather(2, choices_of(mask, self.windows)[..., None])
        return GateGradient(values.tolist(), seconds, passes)

    def _gate_gradients(
        self, mask: HeadMask, share: int, shares: int
    ) -> tuple[Tensor, float, float]:
        """Derivatives [L, HKV, windows] by all gates, seconds, and full-forward equivalents."""
        started = time.perf_counter()
        self._apply(mask)
        indices = self._batches_of_share(share, shares)
        shape = len(self._batches), *mask.shape, len(self.windows)
        gradients = torch.zeros(shape, dtype=torch.float64)
        operations = torch.zeros(len(self._batches), dtype=torch.float64)
        for index in sorted(self._local_batches.intersection(indices)):
            batch = self._batches[index]
            gradients[index] = self._batch_gradients(batch, mask)
            operations[index] = self._flops.gradient(
                batch, self.windows, recompute=self._recomputes
            )
        (gradients, operations), seconds = self._merge(mask, started, gradients, operations)
        examples = sum(len(self._batches[index].examples) for index in indices)
        values = gradients[indices].sum(dim=0) / examples
        if not bool(values.isfinite().all()):
            raise RunError(
                f"the model's gradients are not finite under head mask {mask.key}: "
                + remedy(self.model)
            )
        return values, seconds, float(operations.sum()) / self.full_pass_operations

    def _batch_gradients(self, batch: Batch, mask: HeadMask) -> Tensor:
        """Sums over a batch [L, HKV, windows]; layers are recomputed once a GPU was too small."""
        try:
            return gate_gradients(self.model, batch, mask, self.windows, recompute=self._recomputes)
        except torch.OutOfMemoryError:
            if self._recomputes:
                raise
        logger.info("activations of a gradient do not fit: its layers are recomputed")
        self._recomputes = True
        torch.cuda.empty_cache()
        return gate_gradients(self.model, batch, mask, self.windows, recompute=True)

    def whole_pass_operations(self, mask: HeadMask) -> int:
        """Operations of a pass over the set under `mask`."""
        return sum(self._flops.whole_pass(mask, batch) for batch in self._batches)

    @cached_property
    def full_pass_operations(self) -> int:
        """Operations of a full pass, with every head full."""
        return self.whole_pass_operations(HeadMask.all_full(*self.shape))

    def mask_passes(self, mask: HeadMask) -> float:
        """Cost of an evaluation of `mask`, in full passes."""
        return self.whole_pass_operations(mask) / self.full_pass_operations

    def _apply(self, mask: HeadMask) -> None:
        apply_head_mask(self.model, mask)
        self.check_output_head()

    def _batches_of_share(self, share: int, shares: int) -> list[int]:
        """Indices of the batches of a share of the parts, as in `gate_gradient`."""
        shares = min(shares, self.parts)
        return [i for i, number in enumerate(self._part_of) if number % shares == share % shares]

    def _merge(
        self, mask: HeadMask, started: float, *results: Tensor
    ) -> tuple[Sequence[Tensor], float]:
        """Results of all ranks, on every rank, and the slowest rank's seconds."""
        reports = torch.zeros(self.ranks.size, 2, dtype=torch.float64)
        mask_id = float(zlib.crc32(mask.key.encode()))
        reports[self.ranks.rank] = torch.tensor(
            [time.perf_counter() - started, mask_id], dtype=torch.float64
        )
        *merged, reports = self.ranks.merge(*results, reports)
        if (reports[:, 1] != mask_id).any():
            raise RunError(
                "the processes of this search measure different head masks: all nodes need the "
                "same model, data and versions of the packages"
            )
        return merged, float(reports[:, 0].max())

    @torch.inference_mode()
    def check_output_head(self) -> None:
        """Raise UserError if states or logits differ from the model's own; runs once.

        The model must have a mask applied.
        """
        if self._checked:
            return
        self._checked = True
        ids = self._batches[0].input_ids[0, :_CHECK_TOKENS]
        expected, is_head_known = answers.states_and_check(self.model, ids)
        states = final_states(self.model.get_decoder(), ids[None], self.model.device)[0]
        if not is_head_known or not answers.equal_but_rounding(expected, states, self.model.dtype):
            raise UserError(
                f"model.path: {type(self.model).__name__} changes its states before the output "
                "head, or its logits after it, in a way that the search does not support"
            )


def remedy(model: PreTrainedModel) -> str:
    """Advice for an error message: replace a damaged weight, or else use a wider dtype."""
    for name, weight in model.state_dict().items():
        if not bool(weight.isfinite().all()):
            return f"{name} of the model holds such numbers; make or fetch the model again"
    if model.dtype == torch.float32:
        return "they overflow even in float32"
    return "try model.dtype float32"
