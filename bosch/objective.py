"""S(z): exact-match rate of a masked model on the calibration set, by prefill (BOSCH Eq. 4).

The set is cut into the same batches for any number of ranks, and whole batches are dealt to ranks.
So an example has the same padding and the same neighbours everywhere, and the same numbers.

N examples, B batch, T tokens, A answer tokens of a batch, V vocabulary, C hidden size.
"""

from __future__ import annotations

import hashlib
import logging
import math
import time
import zlib
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bosch.calibration import CalibrationExample, CalibrationSet
from bosch.errors import RunError, UserError
from bosch.evaluation_log import Evaluation, EvaluationContext
from bosch.heads import HeadMask
from bosch.modeling import apply_head_mask, mask_shape
from bosch.prefix import PrefixReuse, returns_tensor
from bosch.ranks import Ranks

logger = logging.getLogger(__name__)

_SAMPLED_VALUES = 4096
_CHECK_TOKENS = 16
_REUSE_BYTES = 2 * 1024**3


@dataclass(frozen=True)
class _Batch:
    """Right-padded examples. Position `rows[i], columns[i]` predicts `answers[i]`."""

    examples: Tensor  # [B], their places in the calibration set
    input_ids: Tensor  # [B, T]
    rows: Tensor  # [A]
    columns: Tensor  # [A]
    answers: Tensor  # [A]


class Objective:
    """Measures head masks on a model in search mode.

    `reuse_bytes` bounds the memory of hidden states that are kept between passes (0: none). With
    several `ranks` each computes its share of the set, and all of them must ask for the same masks
    in the same order; every rank gets the same evaluations.
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
        ranks: Ranks | None = None,
    ) -> None:
        if window_size >= calibration.max_length:
            raise UserError(
                f"search.window_size is {window_size}, no shorter than the longest calibration "
                f"example ({calibration.max_length} tokens): lower it or raise "
                "prepare.calibration.length"
            )
        self.model, self.calibration = model, calibration
        self.window_size, self.sinks = window_size, sinks
        self.num_layers, self.num_key_value_heads = mask_shape(model.config)
        self._decoder = model.get_decoder()
        self.ranks = ranks or Ranks()
        self._batches = _batches(calibration, batch_size, _vocabulary(model))
        self._mine = _dealt([b.input_ids.numel() for b in self._batches], self.ranks)
        self._reuse = PrefixReuse(self._decoder.layers, reuse_bytes)
        self._checked = self._reuse_checked = False

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

    def evaluate(self, mask: HeadMask, shared_layers: int = 0) -> Evaluation:
        """One pass over the calibration set, teacher forced; no token is generated.

        The masks that follow will agree with this one below layer `shared_layers`: the input of
        that layer is kept. `seconds` is the time of the slowest rank. Raises RunError when the
        model gives numbers that are not finite or the ranks measure different masks, LostRankError
        when a rank has ended.
        """
        results, layers, seconds = self._measured(mask, shared_layers)
        exact, log_likelihood = (sum(column) for column in results.T.tolist())
        if not math.isfinite(log_likelihood):
            raise RunError(
                f"the model's logits are not finite under head mask {mask.key}: "
                "try model.dtype float32"
            )
        tokens = [batch.input_ids.numel() for batch in self._batches]
        computed = sum(n * many for n, many in zip(layers.tolist(), tokens, strict=True))
        return Evaluation(
            score=exact / len(self.calibration),
            log_likelihood=log_likelihood / len(self.calibration),
            seconds=seconds,
            full_forward_equivalents=computed / self.num_layers / sum(tokens),
        )

    def example_results(self, mask: HeadMask) -> Tensor:
        """Exact match and log-likelihood of each example in the set's order, [N, 2] float64.

        A pass like `evaluate`, whose means over the examples it details.
        """
        return self._measured(mask, shared_layers=0)[0]

    def _measured(self, mask: HeadMask, shared_layers: int) -> tuple[Tensor, Tensor, float]:
        """Results of each example [N, 2], layers computed of each batch, seconds."""
        started = time.perf_counter()
        apply_head_mask(self.model, mask, self.window_size, self.sinks)
        self._check_model()
        results = torch.zeros(len(self.calibration), 2, dtype=torch.float64)
        layers = torch.zeros(len(self._batches), dtype=torch.float64)
        self._reuse.begin(mask, shared_layers)
        for index in self._mine:
            batch = self._batches[index]
            results[batch.examples], layers[index] = self._pass(index, batch)
        self._reuse.finish(mask)
        return self._merged(mask, results, layers, time.perf_counter() - started)

    def _merged(
        self, mask: HeadMask, results: Tensor, layers: Tensor, seconds: float
    ) -> tuple[Tensor, Tensor, float]:
        """Everything that the ranks found in one pass, on all of them."""
        told = torch.zeros(self.ranks.size, 3, dtype=torch.float64)
        asked = float(zlib.crc32(mask.key.encode()))
        told[self.ranks.rank] = torch.tensor(
            [seconds, asked, not self._reuse.enabled], dtype=torch.float64
        )
        results, layers, told = self.ranks.merge(results, layers, told)
        if (told[:, 1] != asked).any():
            raise RunError(
                "the processes of this search measure different head masks: all nodes need the "
                "same model, data and versions of the packages"
            )
        if told[:, 2].any():
            self._reuse.disable()
        return results, layers, float(told[:, 0].max())

    @torch.inference_mode()
    def _pass(self, index: int, batch: _Batch) -> tuple[Tensor, int]:
        """Exact match and log-likelihood of each example [B, 2], and layers computed."""
        start = self._reuse.first_layer(index)
        with self._reuse.batch(index):
            logits = self._answer_logits(batch)
        layers = self.num_layers - start
        if start > 0 and not self._reuse_checked:
            self._reuse_checked = True
            with self._reuse.batch(index, whole=True):
                whole = self._answer_logits(batch)
            layers += self.num_layers
            if not torch.equal(whole, logits):
                logger.warning("reuse of lower layers is not exact for this model: switched off")
                self._reuse.disable()
                logits = whole
        return _match(logits, batch), layers

    def _answer_logits(self, batch: _Batch) -> Tensor:
        """Logits at the positions that predict answer tokens [A, V]; none elsewhere are made."""
        device = self.model.device
        states = self._decoder(input_ids=batch.input_ids.to(device), use_cache=False)
        hidden = states.last_hidden_state  # [B, T, C]
        return self._head(hidden[batch.rows.to(hidden.device), batch.columns.to(hidden.device)])

    def _head(self, hidden: Tensor) -> Tensor:
        """Output head on [A, C], in float32, with the soft cap of the families that have one."""
        logits: Tensor = self.model.get_output_embeddings()(hidden).float()
        cap = getattr(self.model.config, "final_logit_softcapping", None)
        return logits if cap is None else torch.tanh(logits / cap) * cap

    @torch.inference_mode()
    def _check_model(self) -> None:
        """Once: gathered hidden states through the head must be the model's own logits."""
        if self._checked:
            return
        self._checked = True
        ids = self._batches[0].input_ids[:1, :_CHECK_TOKENS].to(self.model.device)
        own = self.model(input_ids=ids, use_cache=False).logits[0].float()
        ours = self._head(self._decoder(input_ids=ids, use_cache=False).last_hidden_state[0])
        if not torch.allclose(own, ours, rtol=1e-3, atol=1e-3, equal_nan=True):
            raise UserError(
                f"model.path: {type(self.model).__name__} changes its logits after the output head "
                "in a way this search does not know"
            )
        if self._reuse.enabled and not returns_tensor(self._decoder, ids):
            logger.info("layers of %s cannot be passed over: no reuse", type(self.model).__name__)
            self._reuse.disable()


def _match(logits: Tensor, batch: _Batch) -> Tensor:
    """Per example [B, 2]: 1 where every answer token is the argmax, and their log-probability.

    Summed on the CPU, where the order of the sum is fixed.
    """
    answers = batch.answers.to(logits.device)
    chosen = torch.log_softmax(logits, dim=-1).gather(1, answers[:, None])[:, 0].double().cpu()
    wrong = (logits.argmax(dim=-1) != answers).cpu()
    results = torch.ones(len(batch.examples), 2, dtype=torch.float64)
    results[batch.rows[wrong], 0] = 0.0
    results[:, 1] = torch.zeros(len(results), dtype=torch.float64).index_add_(0, batch.rows, chosen)
    return results


def _dealt(sizes: list[int], ranks: Ranks) -> list[int]:
    """Batches of this rank: the largest first, each to the rank that has least to do."""
    work = [0] * ranks.size
    mine = []
    for index in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        least = work.index(min(work))
        work[least] += sizes[index]
        if least == ranks.rank:
            mine.append(index)
    return sorted(mine)


def _batches(calibration: CalibrationSet, batch_size: int, vocabulary: int) -> list[_Batch]:
    """Examples sorted by length, so that padding is short, in batches."""
    examples = calibration.examples
    order = sorted(range(len(examples)), key=lambda place: len(examples[place].input_ids))
    highest = max(max(example.input_ids) for example in examples)
    if highest >= vocabulary:
        raise UserError(
            f"the calibration set holds token {highest}, the model knows {vocabulary}: it was "
            "prepared with another tokenizer, run prepare again"
        )
    parts = [order[first : first + batch_size] for first in range(0, len(order), batch_size)]
    return [_batch([examples[place] for place in part], part) for part in parts]


def _batch(examples: list[CalibrationExample], places: list[int]) -> _Batch:
    width = max(len(example.input_ids) for example in examples)
    input_ids = torch.zeros(len(examples), width, dtype=torch.long)
    rows: list[int] = []
    columns: list[int] = []
    answers: list[int] = []
    for row, example in enumerate(examples):
        length = len(example.input_ids)
        input_ids[row, :length] = torch.tensor(example.input_ids)
        first = length - example.answer_length
        rows += [row] * example.answer_length
        columns += range(first - 1, length - 1)
        answers += example.input_ids[first:]
    indices = (torch.tensor(values) for values in (rows, columns, answers))
    return _Batch(torch.tensor(places), input_ids, *indices)


def _vocabulary(model: Any) -> int:
    return int(model.get_input_embeddings().weight.shape[0])


def model_fingerprint(model: Any) -> str:
    """Identity of a loaded model: SHA-256 of names, types, shapes and a sample of every weight."""
    digest = hashlib.sha256()
    for name, weight in model.state_dict().items():
        flat = weight.detach().reshape(-1)
        sample = flat[:: max(1, flat.numel() // _SAMPLED_VALUES)].float().cpu().numpy()
        digest.update(f"{name} {weight.dtype} {tuple(weight.shape)}".encode())
        digest.update(sample.tobytes())
    return digest.hexdigest()
