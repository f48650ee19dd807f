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
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from bosch.errors import RunError, UserError
from bosch.heads import HeadMask
from bosch.model.families import family_of
from bosch.model.fingerprint import model_fingerprint
from bosch.model.search_mode import apply_head_mask, mask_shape
from bosch.objective import answers
from bosch.objective.activation_cache import ActivationCache
from bosch.objective.batches import Batch, batch_of, batches_by_round, batches_of_rank
from bosch.objective.calibration import CalibrationExample, CalibrationSet
from bosch.objective.evaluation_log import CanWin, Evaluation, EvaluationContext, GateGradient
from bosch.objective.gate_gradients import gate_gradients
from bosch.objective.incremental_forward import IncrementalForward
from bosch.objective.memory import ActivationSizes, activation_sizes
from bosch.ranks import Ranks
from bosch.window import Windows, window_menu

logger = logging.getLogger(__name__)

_CHECK_TOKENS = 16
_ALL_LAYERS = 10  # times the rounding of one operation
_REUSE_BYTES = 2 * 1024**3


class Objective:
    """Measures head masks on a model in search mode.

    `reuse_bytes` bounds the memory of activations cached between passes (0: none). With
    `answers_only` off, the last layer is computed at all positions. Neither changes results. With
    several `ranks` each measures its share of the batches; all of them must evaluate the same masks
    in the same order, and get equal evaluations. The set is measured in up to `MAX_ROUNDS` rounds
    of consecutive examples, between which an evaluation can end early. `held_out` examples are used
    only by `evaluate_held_out`. Raises UserError if a sliding head would see every token of every
    example.
    """

    def __init__(
        self,
        model: Any,
        calibration: CalibrationSet,
        windows: Windows,
        *,
        batch_size: int = 8,
        reuse_bytes: int = _REUSE_BYTES,
        answers_only: bool = True,
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
        family_of(model.config)
        self.model, self.calibration = model, calibration
        self.num_layers, self.num_key_value_heads = self.shape = mask_shape(model.config)
        self.quantum = 1.0 / len(calibration)  # smallest difference between two scores
        self.ranks = ranks or Ranks()
        vocabulary = int(model.get_input_embeddings().weight.shape[0])
        rounds = batches_by_round(calibration, batch_size, vocabulary)
        self.rounds = len(rounds)
        self._batches = [batch for batches in rounds for batch in batches]
        self.batches = len(self._batches)  # also the largest useful number of ranks
        self._round_of = [number for number, batches in enumerate(rounds) for _ in batches]
        sizes = [[batch.positions for batch in batches] for batches in rounds]
        self._local_batches = set(batches_of_rank(sizes, self.ranks))
        self.cache = ActivationCache(self.num_layers, reuse_bytes)
        self._new_forward = partial(
            IncrementalForward, model, self.windows, answers_only=answers_only
        )
        self._forward = self._new_forward(self.cache)
        self._likelihood_of_round = [0.0] * self.rounds
        self._checked = False
        self._held_out = None
        if held_out is not None:
            self._held_out = Objective(
                model, held_out, self.windows, batch_size=batch_size, reuse_bytes=0,
                answers_only=answers_only, ranks=ranks,
            )  # fmt: skip

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
        first, *more = (window.size for window in self.windows)
        return EvaluationContext(
            calibration=self.calibration.fingerprint,
            model=model_fingerprint(self.model),
            window_size=first if not more else [first, *more],
            sinks=self.window.sinks,
        )

    def evaluate(
        self, mask: HeadMask, shared_layers: int = 0, *, can_win: CanWin | None = None
    ) -> Evaluation:
        """One pass over the calibration set, without generation.

        The next masks will agree with this one below layer `shared_layers`, whose activations are
        cached with priority. After each round `can_win` gets upper bounds of score and
        log-likelihood; if it returns False, the pass ends with these bounds and `is_bound` set.
        `seconds` is the time of the slowest rank. Raises RunError if the model's numbers are not
        finite or the ranks measure different masks, LostRankError if a rank has ended.
        """
        started = time.perf_counter()
        self._begin(mask, shared_layers)
        results, operations = self._empty()
        measured: list[int] = []
        for indices in self._rounds(can_win):
            self._measure(mask, indices, results, operations)
            measured += indices
            if can_win is None:
                continue
            score, likelihood = self._upper_bounds(self.ranks.merge(results)[0], measured)
            if not can_win(score, likelihood):
                break
        results, operations, seconds = self._merge(mask, results, operations, started)
        score, likelihood = self._upper_bounds(results, measured)
        if not math.isfinite(likelihood):
            raise RunError(
                f"the model's logits are not finite under head mask {mask.key}: "
                + remedy(self.model)
            )
        evaluation = Evaluation(
            score=score, log_likelihood=likelihood, seconds=seconds,
            full_forward_equivalents=float(operations.sum()) / self.full_pass_operations,
            whole_pass_equivalents=self.mask_passes(mask),
            is_bound=len(measured) < len(self._batches),
            round_likelihoods=self._round_means(results, measured),
        )  # fmt: skip
        self.observe(evaluation)
        return evaluation

    def evaluate_held_out(self, mask: HeadMask) -> Evaluation:
        """As `evaluate`, on the held-out examples; costs in passes over the search's examples."""
        assert self._held_out is not None, "no examples are held out"
        evaluation, scale = self._held_out.evaluate(mask), self.held_out_passes
        return replace(
            evaluation,
            full_forward_equivalents=scale * evaluation.full_forward_equivalents,
            whole_pass_equivalents=scale * evaluation.whole_pass_equivalents,
            round_likelihoods=(),
        )

    def observe(self, evaluation: Evaluation) -> None:
        """Order later passes' rounds by a logged evaluation; the latest counts half in a mean."""
        if len(evaluation.round_likelihoods) != self.rounds:
            return
        for number, mean in enumerate(evaluation.round_likelihoods):
            if mean is not None:
                self._likelihood_of_round[number] = 0.5 * (self._likelihood_of_round[number] + mean)

    def gradient_passes(self, share: int, shares: int) -> float:
        """Upper bound of `gate_gradient`'s full-forward equivalents, equal on all machines."""
        flops, indices = self._forward.flops, self._batches_of_share(share, shares)
        operations = sum(flops.gradient(self._batches[index]) for index in indices)
        return float(operations) / self.full_pass_operations

    def gate_gradient(self, mask: HeadMask, share: int = 0, shares: int = 1) -> GateGradient:
        """Derivative of the mean log-likelihood by each KV head's gate, at `mask`.

        The gate blends the narrowest window (0) and full attention (1). The mean is over part
        `share` of `shares` parts of the rounds. There are at most as many parts as rounds; higher
        numbers wrap around. Raises RunError as `evaluate`.
        """
        values, seconds, operations = self._gate_gradients(mask, share, shares)
        return GateGradient(values[..., 0].tolist(), seconds, operations)

    def window_gradient(self, mask: HeadMask, share: int = 0, shares: int = 1) -> GateGradient:
        """Estimated changes of the mean log-likelihood [L, HKV, 1 + windows], from one gradient.

        Entry k of a head is the change by choice k of `HeadMask.choices`, 0 for its current choice.
        First order: many changes together sum to less. Otherwise as `gate_gradient`.
        """
        values, seconds, operations = self._gate_gradients(mask, share, shares)
        values = torch.cat([values, torch.zeros_like(values[..., :1])], dim=2)
        chosen = torch.tensor(mask.choices.astype(int))[..., None]
        values = values - values.gather(2, chosen)
        return GateGradient(values.tolist(), seconds, operations)

    def _gate_gradients(
        self, mask: HeadMask, share: int, shares: int
    ) -> tuple[Tensor, float, float]:
        """Derivatives [L, HKV, windows] by all gates, seconds, and full-forward equivalents."""
        started = time.perf_counter()
        self._apply(mask)
        indices = self._batches_of_share(share, shares)
        shape = len(self._batches), *mask.is_full.shape, len(self.windows)
        gradients = torch.zeros(shape, dtype=torch.float64)
        operations = torch.zeros(len(self._batches), dtype=torch.float64)
        for index in sorted(self._local_batches.intersection(indices)):
            batch, recompute = self._batches[index], not self._keeps_activations(index)
            gradients[index] = gate_gradients(
                self.model, batch, mask, self._forward.layouts,
                recompute=recompute,
            )  # fmt: skip
            operations[index] = self._forward.flops.gradient(batch, recompute=recompute)
        gradients, operations, seconds = self._merge(mask, gradients, operations, started)
        values = gradients[indices].sum(dim=0) / self._examples(indices)
        if not bool(values.isfinite().all()):
            raise RunError(
                f"the model's gradients are not finite under head mask {mask.key}: "
                + remedy(self.model)
            )
        return values, seconds, float(operations.sum()) / self.full_pass_operations

    @cached_property
    def sizes(self) -> ActivationSizes:
        """Memory of passes and gradients, measured on meta tensors for the first gradient."""
        return activation_sizes(self.model)

    def _keeps_activations(self, index: int) -> bool:
        """Whether a batch's activations for the backward pass fit beside the cached ones."""
        windows = [window.size for window in self.windows]
        needed = self.sizes.gradient_without_recompute(
            *self._batches[index].input_ids.shape, *windows
        )
        return needed <= self.cache.max_bytes - self.cache.bytes

    def example_results(self, mask: HeadMask) -> Tensor:
        """Exact match and log-likelihood of each example in the set's order, [N, 2] float64."""
        self._begin(mask, 0)
        results, operations = self._empty()
        self._measure(mask, range(len(self._batches)), results, operations)
        return self._merge(mask, results, operations, time.perf_counter())[0]

    def whole_pass_operations(self, mask: HeadMask) -> int:
        """Operations of a pass over the set under `mask`, without savings."""
        flops = self._forward.flops
        return sum(flops.whole_pass(mask, batch) for batch in self._batches)

    @cached_property
    def full_pass_operations(self) -> int:
        """Operations of a full pass: every head full, no reuse."""
        return self.whole_pass_operations(HeadMask.all_full(*self.shape))

    def mask_passes(self, mask: HeadMask) -> float:
        """Cost of a complete evaluation of `mask` without savings, in full passes."""
        return self.whole_pass_operations(mask) / self.full_pass_operations

    def memory(self) -> dict[str, int]:
        """Memory of cached activations on this rank: the limit and the highest use."""
        return {"cache_bytes_limit": self.cache.max_bytes, "cache_bytes": self.cache.peak_bytes}

    def savings(self) -> dict[str, bool]:
        """Which savings are on; all are exact."""
        return self._forward.savings

    def _begin(self, mask: HeadMask, shared_layers: int) -> None:
        self._apply(mask)
        self.cache.begin(mask, shared_layers)

    def _apply(self, mask: HeadMask) -> None:
        apply_head_mask(self.model, mask, self.windows)
        self.check_output_head(mask)

    def _empty(self) -> tuple[Tensor, Tensor]:
        """Zeros for the results of examples [N, 2] and the operations of batches [K]."""
        results = torch.zeros(len(self.calibration), 2, dtype=torch.float64)
        return results, torch.zeros(len(self._batches), dtype=torch.float64)

    def _rounds(self, can_win: CanWin | None) -> list[list[int]]:
        """Indices of the batches to measure between two calls of `can_win`."""
        indices = range(len(self._batches))
        if can_win is None:
            return [list(indices)]
        # Rounds with a low likelihood under other masks come first, to detect a losing mask early.
        order = sorted(range(self.rounds), key=lambda p: (self._likelihood_of_round[p], p))
        return [[i for i in indices if self._round_of[i] == p] for p in order]

    @torch.inference_mode()
    def _measure(
        self, mask: HeadMask, indices: Sequence[int], results: Tensor, operations: Tensor
    ) -> None:
        """Fill in results and operations of this rank's batches among `indices`."""
        for index in sorted(self._local_batches.intersection(indices)):
            batch = self._batches[index]
            states, layer_operations = self._forward.answer_states(index, batch, mask)
            logits = answers.answer_logits(self.model, states)
            results[batch.examples] = answers.answer_results(logits, batch)
            head_operations = self._forward.flops.output_head * len(batch.answers)
            operations[index] += layer_operations + head_operations

    def _upper_bounds(self, results: Tensor, measured: Sequence[int]) -> tuple[float, float]:
        """Upper bounds of score and log-likelihood: unmeasured examples count as correct."""
        total = len(self.calibration)
        exact, likelihood = (sum(column) for column in results.T.tolist())
        return (exact + total - self._examples(measured)) / total, likelihood / total

    def _examples(self, indices: Sequence[int]) -> int:
        return sum(len(self._batches[index].examples) for index in indices)

    def _batches_of_share(self, share: int, shares: int) -> list[int]:
        """Indices of the batches of a share of the rounds, as in `gate_gradient`."""
        shares = min(shares, self.rounds)
        return [i for i, number in enumerate(self._round_of) if number % shares == share % shares]

    def _round_means(self, results: Tensor, measured: Sequence[int]) -> tuple[float | None, ...]:
        """Mean log-likelihood of the examples of each round; None for one not measured."""
        means: list[float | None] = [None] * self.rounds
        for number in {self._round_of[index] for index in measured}:
            batches = [self._batches[i] for i in measured if self._round_of[i] == number]
            means[number] = float(torch.cat([results[b.examples, 1] for b in batches]).mean())
        return tuple(means)

    def _merge(
        self, mask: HeadMask, results: Tensor, operations: Tensor, started: float
    ) -> tuple[Tensor, Tensor, float]:
        """Results and operations of all ranks, on every rank, and the slowest rank's seconds."""
        reports = torch.zeros(self.ranks.size, 3, dtype=torch.float64)
        mask_id = float(zlib.crc32(mask.key.encode()))
        reports[self.ranks.rank] = torch.tensor(
            [time.perf_counter() - started, mask_id, self._forward.failed_savings],
            dtype=torch.float64,
        )
        results, operations, reports = self.ranks.merge(results, operations, reports)
        if (reports[:, 1] != mask_id).any():
            raise RunError(
                "the processes of this search measure different head masks: all nodes need the "
                "same model, data and versions of the packages"
            )
        self._forward.switch_off(int(reports[:, 2].max()))
        return results, operations, float(reports[:, 0].max())

    @torch.inference_mode()
    def check_output_head(self, mask: HeadMask) -> None:
        """Raise UserError if states or logits differ from the model's own; runs once.

        The model must have `mask` applied.
        """
        if self._checked:
            return
        self._checked = True
        ids = self._batches[0].input_ids[0, :_CHECK_TOKENS]
        states, is_head_known = answers.states_and_check(self.model, ids)
        answer = len(ids) - 1
        batch = batch_of([CalibrationExample(tuple(ids.tolist()), answer)], [0])
        forward = self._new_forward(ActivationCache(self.num_layers, max_bytes=0))
        incremental = forward.answer_states(0, batch, mask)[0]
        if not is_head_known or not answers.equal_but_rounding(
            states[:-1], incremental, self.model.dtype, _ALL_LAYERS
        ):
            raise UserError(
                f"model.path: {type(self.model).__name__} changes its states before the output "
                "head, or its logits after it, in a way that the search does not support"
            )


def remedy(model: Any) -> str:
    """Advice for an error message: replace a damaged weight, or else use a wider dtype."""
    for name, weight in model.state_dict().items():
        if not bool(weight.isfinite().all()):
            return f"{name} of the model holds such numbers; make or fetch the model again"
    if model.dtype == torch.float32:
        return "they overflow even in float32"
    return "try model.dtype float32"
