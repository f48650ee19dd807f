"""The search's questions during training: what generation keeps, beside the loss.

A conversion can look equal by likelihood and lose many points by generation (arXiv 2603.26556). An
example holds the original's own greedy answer, so one pass tells whether the hybrid generates it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from bosch.score.calibration import CalibrationExample, CalibrationSet
from stages.context import Runtime
from stages.search.stage import EXAMPLES
from stages.train.loss import IGNORED
from stages.train.storage import processes, rank


@dataclass(frozen=True)
class Answers:
    """Scores a model on `examples` every `every` steps, and after the last step.

    `sharing` processes share each example (`runtime.context_parallel`).
    """

    examples: Sequence[CalibrationExample]
    every: int
    sharing: int = 1

    @classmethod
    def of(cls, runtime: Runtime, inputs: Mapping[str, Path]) -> Answers | None:
        """Those of the recipe's runtime section, if it has any."""
        if runtime.answers_every_steps is None:
            return None
        examples = CalibrationSet.load(inputs["search"] / EXAMPLES).examples
        return cls(examples, runtime.answers_every_steps, runtime.context_parallel)

    @torch.no_grad()
    def score(self, model: Any, device: torch.device) -> dict[str, float]:
        """Share of answers generated as by the original, and their mean log-likelihood in nats.

        Called on every process. All run the same number of passes, which are collective for a
        sharded model, so some repeat an example.
        """
        size, group, count = processes() // self.sharing, rank() // self.sharing, len(self.examples)
        sums = torch.zeros(count, 2, dtype=torch.float64)  # wrong tokens, nats
        model.eval()
        for number in range(group, -(-count // size) * size, size):
            example = self.examples[number % count]
            ids = list(example.input_ids)
            padding = -len(ids) % (2 * self.sharing) if self.sharing > 1 else 0
            input_ids = torch.tensor([ids + ids[-1:] * padding], device=device)
            labels = torch.full_like(input_ids, IGNORED)
            answer = slice(len(ids) - example.answer_length, len(ids))
            labels[:, answer] = input_ids[:, answer]
            output = model(
                input_ids=input_ids, labels=labels, num_items_in_batch=1, count_wrong=True
            )
            if number < count:
                sums[number] = torch.stack([output["wrong"], output["loss"]]).cpu()
        model.train()
        if processes() > 1:
            sums = sums.to(device)
            dist.all_reduce(sums)
        wrong, nats = sums.cpu().T
        return {
            "answers": (wrong == 0).double().mean().item(),
            "answer_log_likelihood": -nats.mean().item(),
        }
