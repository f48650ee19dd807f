"""From hidden states to results: the output head, exact match and log-likelihood of answers.

A answer tokens of a batch, C hidden size, V vocabulary, E examples of the batch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from bosch.objective.batches import Batch


def answer_logits(model: Any, hidden: Tensor) -> Tensor:
    """Output head of hidden states [A, C]: [A, V] in float32, scaled or capped as families do."""
    return scaled_logits(model.config, model.get_output_embeddings()(hidden).float())


def scaled_logits(config: Any, logits: Tensor) -> Tensor:
    """Logits [N, V] in float32, scaled or capped as the model's family does."""
    logits = logits / (getattr(config, "logits_scaling", None) or 1.0)
    logits = logits * (getattr(config, "logit_scale", None) or 1.0)
    cap = getattr(config, "final_logit_softcapping", None)
    return logits if cap is None else torch.tanh(logits / cap) * cap


def answer_results(logits: Tensor, batch: Batch) -> Tensor:
    """Per example [E, 2]: 1 where every answer token is the argmax, and their log-probability.

    Summed on the CPU, where the order of the sum is fixed.
    """
    answers = batch.answers.to(logits.device)
    log_probabilities = torch.log_softmax(logits, dim=-1).gather(1, answers[:, None])[:, 0]
    log_probabilities = log_probabilities.double().cpu()
    wrong = (logits.argmax(dim=-1) != answers).cpu()
    results = torch.ones(len(batch.examples), 2, dtype=torch.float64)
    results[batch.rows[wrong], 0] = 0.0
    results[:, 1] = 0.0
    results[:, 1].index_add_(0, batch.rows, log_probabilities)
    return results
