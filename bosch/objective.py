"""S(z): exact-match rate of a masked model on the calibration set, by prefill (BOSCH Eq. 4).

The set is cut into the same batches for any number of ranks, and whole batches are dealt to ranks.
So an example has the same padding and the same neighbours everywhere, and the same numbers.

N examples of the set.
"""

from __future__ import annotations

import logging
import math
import time
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from bosch.answers import answer_logits, answer_results
from bosch.batches import batch_of, cut, dealt
from bosch.calibration import MAX_PARTS, CalibrationExample, CalibrationSet
from bosch.errors import RunError, UserError
from bosch.evaluation_log import Evaluation, EvaluationContext, GateGradient
from bosch.families import check_searchable
from bosch.fingerprint import model_fingerprint
from bosch.finite import remedy
from bosch.gate_gradients import gate_gradients
from bosch.heads import HeadMask
from bosch.kept_states import KeptStates
from bosch.layer_pass import LayerPass
from bosch.modeling import apply_head_mask, mask_shape
from bosch.ranks import Ranks

logger = logging.getLogger(__name__)

_CHECK_TOKENS = 16
_REUSE_BYTES = 2 * 1024**3

CanWin = Callable[[float, float], bool]


class Objective:
    """Measures head masks on a model in search mode.

    `reuse_bytes` bounds the memory of what is kept between passes (0: nothing); `answers_only` off
    computes the last layer at every position. Neither changes a result. With several `ranks` each
    computes its share of the set, and all of them must ask for the same masks in the same order;
    every rank gets the same evaluations. The set has up to 8 parts of consecutive examples, between
    which an evaluation can end early.
    Raises UserError when a sliding head would see every token of every example.
    """

    def __init__(
        self,
        model: Any,
        calibration: CalibrationSet,
        window_size: int,
        sinks: int = 0,
        *,
        batch_size: int = 8,
        reuse_bytes: int = _REUSE_BYTES,
        answers_only: bool = True,
        ranks: Ranks | None = None,
    ) -> None:
        if window_size >= calibration.max_length:
            raise UserError(
                f"search.window_size is {window_size}, no shorter than the longest calibration "
                f"example ({calibration.max_length} tokens): lower it or raise "
                "prepare.calibration.length"
            )
        check_searchable(model.config)
        self.model, self.calibration = model, calibration
        self.window_size, self.sinks = window_size, sinks
        self.num_layers, self.num_key_value_heads = mask_shape(model.config)
        self.ranks = ranks or Ranks()
        self.parts = min(MAX_PARTS, len(calibration.haystacks))
        parts = cut(calibration, self.parts, batch_size, _vocabulary(model))
        self._batches = [batch for part in parts for batch in part]
        self._part_of = [number for number, part in enumerate(parts) for _ in part]
        self._mine = dealt([batch.size for batch in self._batches], self.ranks)
        self.kept = KeptStates(self.num_layers, reuse_bytes)
        self._passes = LayerPass(
            model, window_size, sinks, self.kept,
            answers_only=answers_only, agree=self.ranks.agree,
        )  # fmt: skip
        self._likelihood_of_part = [0.0] * self.parts
        self._checked = False

    @property
    def batches(self) -> int:
        """Number of batches: more ranks than that have nothing to do."""
        return len(self._batches)

    @property
    def quantum(self) -> float:
        """Difference of two neighbouring scores: one example."""
        return 1.0 / len(self.calibration)

    @property
    def context(self) -> EvaluationContext:
        """What the scores depend on besides the mask."""
        return EvaluationContext(
            calibration=self.calibration.fingerprint,
            model=model_fingerprint(self.model),
            window_size=self.window_size,
            sinks=self.sinks,
        )

    def evaluate(
        self,
        mask: HeadMask,
        shared_layers: int = 0,
        *,
        can_win: CanWin | None = None,
    ) -> Evaluation:
        """One pass over the calibration set; no token is generated.

        The masks that follow will agree with this one below layer `shared_layers`: what is known of
        that layer is kept first. `can_win` is asked with what score and log-likelihood the mask can
        still reach, part after part; when it says no the pass ends, and these bounds are returned
        with `is_bound` set. `seconds` is the time of the slowest rank. Raises RunError when the
        model gives numbers that are not finite or the ranks measure different masks, LostRankError
        when a rank has ended.
        """
        started = time.perf_counter()
        self._begin(mask, shared_layers)
        results, spent = self._empty()
        seen: list[int] = []
        for stage in self._stages(can_win):
            self._measure(mask, stage, results, spent)
            seen += stage
            if can_win is None:
                continue
            score, likelihood = self._at_most(self.ranks.merge(results)[0], seen)
            if not can_win(score, likelihood):
                break
        results, spent, seconds = self._merged(mask, results, spent, time.perf_counter() - started)
        score, likelihood = self._at_most(results, seen)
        if not math.isfinite(likelihood):
            raise RunError(
                f"the model's logits are not finite under head mask {mask.key}: "
                + remedy(self.model)
            )
        self._remember(results, seen)
        whole = self._operations(HeadMask.all_full(*mask.is_full.shape))
        return Evaluation(
            score=score,
            log_likelihood=likelihood,
            seconds=seconds,
            full_forward_equivalents=float(spent.sum()) / sum(whole),
            whole_pass_equivalents=sum(self._operations(mask)) / sum(whole),
            is_bound=len(seen) < len(self._batches),
        )

    def gate_gradient(self, mask: HeadMask, share: int = 0, shares: int = 1) -> GateGradient:
        """What each KV head's gate is worth at `mask`, from one of `shares` shares of the parts.

        The derivative of the share's mean log-likelihood. There are no more shares than parts; the
        numbers of those beyond begin again. Raises RunError as `evaluate` does.
        """
        started = time.perf_counter()
        shares = min(shares, self.parts)
        share %= shares
        apply_head_mask(self.model, mask, self.window_size, self.sinks)
        self._check_model(mask)
        seen = [i for i, part in enumerate(self._part_of) if part % shares == share]
        found = torch.zeros(len(self._batches), *mask.is_full.shape, dtype=torch.float64)
        spent = torch.zeros(len(self._batches), dtype=torch.float64)
        for index in sorted(set(seen) & set(self._mine)):
            batch = self._batches[index]
            found[index] = gate_gradients(
                self.model, batch, mask,
                self._passes.all_full, self._passes.all_sliding,
            )  # fmt: skip
            spent[index] = self._passes.flops.gradient(batch)
        found, spent, seconds = self._merged(mask, found, spent, time.perf_counter() - started)
        values = found[seen].sum(dim=0) / self._examples(seen)
        if not bool(values.isfinite().all()):
            raise RunError(
                f"the model's gradients are not finite under head mask {mask.key}: "
                + remedy(self.model)
            )
        whole = self._operations(HeadMask.all_full(*mask.is_full.shape))
        return GateGradient(values.tolist(), seconds, float(spent.sum()) / sum(whole))

    def example_results(self, mask: HeadMask) -> Tensor:
        """Exact match and log-likelihood of each example in the set's order, [N, 2] float64.

        A pass like `evaluate`, whose means over the examples it details.
        """
        self._begin(mask, 0)
        results, spent = self._empty()
        self._measure(mask, range(len(self._batches)), results, spent)
        return self._merged(mask, results, spent, 0.0)[0]

    def memory(self) -> dict[str, int]:
        """Memory of kept states on this rank: what they may take and what they took at most."""
        return {"kept_bytes_limit": self.kept.max_bytes, "kept_bytes": self.kept.peak_bytes}

    def _begin(self, mask: HeadMask, shared_layers: int) -> None:
        apply_head_mask(self.model, mask, self.window_size, self.sinks)
        self._check_model(mask)
        self.kept.begin(mask, shared_layers)

    def _empty(self) -> tuple[Tensor, Tensor]:
        """Room for results of examples [N, 2] and operations of batches."""
        results = torch.zeros(len(self.calibration), 2, dtype=torch.float64)
        return results, torch.zeros(len(self._batches), dtype=torch.float64)

    def _stages(self, can_win: CanWin | None) -> list[list[int]]:
        """Batches in the order in which they are measured, between two decisions."""
        everything = range(len(self._batches))
        if can_win is None:
            return [list(everything)]
        # What other masks found hard comes first: a losing mask shows there.
        order = sorted(range(self.parts), key=lambda p: (self._likelihood_of_part[p], p))
        return [[i for i in everything if self._part_of[i] == p] for p in order]

    @torch.inference_mode()
    def _measure(
        self, mask: HeadMask, batches: Sequence[int], results: Tensor, spent: Tensor
    ) -> None:
        """Results and operations of this rank's batches among `batches`."""
        for index in sorted(set(batches) & set(self._mine)):
            batch = self._batches[index]
            hidden, operations = self._passes.hidden(index, batch, mask)
            results[batch.examples] = answer_results(answer_logits(self.model, hidden), batch)
            spent[index] += operations + self._passes.flops.head * len(batch.answers)

    def _at_most(self, results: Tensor, seen: Sequence[int]) -> tuple[float, float]:
        """Score and log-likelihood, if the model knew all that it has not seen."""
        total = len(self.calibration)
        exact, likelihood = (sum(column) for column in results.T.tolist())
        return (exact + total - self._examples(seen)) / total, likelihood / total

    def _examples(self, batches: Sequence[int]) -> int:
        return sum(len(self._batches[index].examples) for index in batches)

    def _remember(self, results: Tensor, seen: Sequence[int]) -> None:
        """How hard each part was for the masks so far; the latest count most."""
        for part in {self._part_of[index] for index in seen}:
            batches = [self._batches[i] for i in seen if self._part_of[i] == part]
            mean = float(torch.cat([results[b.examples, 1] for b in batches]).mean())
            self._likelihood_of_part[part] = 0.5 * (self._likelihood_of_part[part] + mean)

    def _operations(self, mask: HeadMask) -> list[int]:
        """Operations of a pass without any saving, by batch."""
        return [self._passes.flops.whole_pass(mask.is_full, batch) for batch in self._batches]

    def _merged(
        self, mask: HeadMask, results: Tensor, spent: Tensor, seconds: float
    ) -> tuple[Tensor, Tensor, float]:
        """Everything that the ranks found in one pass, on all of them."""
        told = torch.zeros(self.ranks.size, 3, dtype=torch.float64)
        asked = float(zlib.crc32(mask.key.encode()))
        told[self.ranks.rank] = torch.tensor(
            [seconds, asked, not self.kept.enabled], dtype=torch.float64
        )
        results, spent, told = self.ranks.merge(results, spent, told)
        if (told[:, 1] != asked).any():
            raise RunError(
                "the processes of this search measure different head masks: all nodes need the "
                "same model, data and versions of the packages"
            )
        if told[:, 2].any():
            self.kept.disable()
        return results, spent, float(told[:, 0].max())

    @torch.inference_mode()
    def _check_model(self, mask: HeadMask) -> None:
        """Once: hidden states of our own passes through the head must be the model's own logits."""
        if self._checked:
            return
        self._checked = True
        ids = self._batches[0].input_ids[0, :_CHECK_TOKENS]
        own = self.model(input_ids=ids[None].to(self.model.device), use_cache=False).logits[0]
        answer = len(ids) - 1
        batch = batch_of([CalibrationExample(tuple(ids.tolist()), answer)], [[0]])
        nothing = KeptStates(self.num_layers, 0)
        passes = LayerPass(
            self.model, self.window_size, self.sinks, nothing,
            answers_only=self._passes.answers_only, agree=self.ranks.agree,
        )  # fmt: skip
        ours = answer_logits(self.model, passes.hidden(0, batch, mask)[0])
        if not torch.allclose(own[:-1].float(), ours, rtol=1e-3, atol=1e-3, equal_nan=True):
            raise UserError(
                f"model.path: {type(self.model).__name__} changes its logits after the output head "
                "in a way this search does not know"
            )


def _vocabulary(model: Any) -> int:
    return int(model.get_input_embeddings().weight.shape[0])
