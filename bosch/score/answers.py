"""From hidden states to results: the output head, exact match and log-likelihood of answers.

E examples of a batch, S of a set, A answer tokens, T tokens, C hidden size, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from bosch.model.families import logit_scale
from bosch.score.batches import Batch, final_states


def answer_logits(model: PreTrainedModel, hidden: Tensor) -> Tensor:
    """Logits [A, V] in float32 of hidden states [A, C], from the model's output head."""
    return scaled_logits(model.config, model.get_output_embeddings()(hidden).float())


def scaled_logits(config: PreTrainedConfig, logits: Tensor) -> Tensor:
    """The output head's products [..., V], scaled and soft-capped as in the family."""
    factor, divisor, cap = logit_scale(config)
    if divisor is not None:
        logits = logits / divisor
    if factor is not None:
        logits = logits * factor
    return logits if cap is None else torch.tanh(logits / cap) * cap


@torch.inference_mode()
def states_and_check(model: PreTrainedModel, ids: Tensor) -> tuple[Tensor, bool]:
    """Final states [T, C] for ids [T], and whether their `answer_logits` equal the model's logits.

    They differ if the model changes logits in a way that `scaled_logits` does not know.
    """
    states: list[Tensor] = []
    head = model.get_output_embeddings()
    hook = head.register_forward_pre_hook(lambda module, args: states.append(args[0]))
    try:
        expected = model(input_ids=ids[None].to(model.device), use_cache=False).logits[0]
    finally:
        hook.remove()
    return states[0][0], equal_but_rounding(
        expected, answer_logits(model, states[0][0]), model.dtype
    )


def equal_but_rounding(expected: Tensor, actual: Tensor, dtype: torch.dtype) -> bool:
    """Whether two results of the same shape differ, by their norms, only by rounding in `dtype`.

    Numbers that are not finite must be in the same places.
    """
    actual = actual.to(expected.device)
    finite = expected.isfinite()
    if not torch.equal(finite, actual.isfinite()):
        return False
    expected, actual = expected[finite].float(), actual[finite].float()
    share = 1e-3 if dtype == torch.float32 else 1e-2
    return bool((expected - actual).norm() <= share * expected.norm())


def batch_results(model: PreTrainedModel, batch: Batch) -> Tensor:
    """`answer_results` of a batch by a pass of the decoder, with logits only at the answers."""
    hidden = final_states(model.get_decoder(), batch.input_ids, model.device)
    rows, columns = batch.rows.to(hidden.device), batch.columns.to(hidden.device)
    return answer_results(answer_logits(model, hidden[rows, columns]), batch)


def answer_results(logits: Tensor, batch: Batch) -> Tensor:
    """Exact match (0 or 1) and log-likelihood of each example's answer, [E, 2], from logits [A, V].

    In float64, summed on the CPU, where the order of summation is fixed.
    """
    answers = batch.answers.to(logits.device)
    log_probabilities = torch.log_softmax(logits, dim=-1).gather(1, answers[:, None])[:, 0]
    log_probabilities = log_probabilities.double().cpu()
    wrong = (logits.argmax(dim=-1) != answers).cpu()
    results = torch.zeros(len(batch.examples), 2, dtype=torch.float64)
    results[:, 0] = 1.0
    results[batch.rows[wrong], 0] = 0.0
    results[:, 1].index_add_(0, batch.rows, log_probabilities)
    return results
