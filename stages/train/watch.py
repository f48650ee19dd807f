"""A needle score while training: the share of a few samples whose answer tokens are all right."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from data_prep.documents.calibration import forced_records
from data_prep.documents.tokenizer import TokenizerSpec, load_tokenizer
from data_prep.text import haystack_words
from stages.context import StageConfig
from stages.prepare.stage import TOKENIZER, PrepareConfig
from stages.train.loss import IGNORED
from stages.train.stage import TrainConfig

_SEED_OFFSET = 1_000_003  # other samples than the search's, from needles training does not see


class NeedleWatch:
    """Scores a model in training by one pass over each sample, the answer given (BOSCH Eq. 4)."""

    def __init__(self, samples: Sequence[tuple[list[int], int]], every: int) -> None:
        """`samples`: token ids, the last so many of which are the answer."""
        self._samples = samples
        self._every = every

    def is_due(self, step: int, last_step: int) -> bool:
        """Whether step `step` (from 1) ends with a score; the last one does."""
        return step % self._every == 0 or step == last_step

    @torch.no_grad()
    def score(self, model: Any, device: torch.device) -> float:
        """The share in [0, 1]; called on every process; each runs its share of the samples.

        All run equally many, since a sharded model's passes are collective.
        """
        rank, size = 0, 1
        if dist.is_initialized():
            rank, size = dist.get_rank(), dist.get_world_size()
        correct = torch.zeros(1, dtype=torch.float64)
        was_training = model.training
        model.eval()
        for first in range(0, len(self._samples), size):
            number = first + rank
            ids, answer_length = self._samples[number % len(self._samples)]
            input_ids = torch.tensor([ids], device=device)
            labels = torch.full_like(input_ids, IGNORED)
            labels[:, -answer_length:] = input_ids[:, -answer_length:]
            wrong = model(input_ids=input_ids, labels=labels, count_mistakes=True)["mistakes"]
            correct += number < len(self._samples) and not wrong.item()
        model.train(was_training)
        if size > 1:
            correct = correct.to(device)
            dist.all_reduce(correct)
        return correct.item() / len(self._samples)


def make_needle_watch(config: StageConfig[TrainConfig], prepared: Path) -> NeedleWatch | None:
    """The watch that the recipe's runtime section describes; None where it describes none.

    Raises:
        UserError: the essay folder is missing or damaged.
    """
    every = config.runtime.needle_every_steps
    if every is None:
        return None
    calibration = config.upstream_section(PrepareConfig).calibration
    tokenizer = load_tokenizer(
        TokenizerSpec(str(prepared / TOKENIZER), None, config.model.trust_remote_code)
    )
    records = forced_records(
        calibration.tasks,
        config.runtime.needle_samples,
        calibration.length,
        "calibration",
        config.seed + _SEED_OFFSET,
        tokenizer,
        haystack_words(calibration.essay_dir),
    )
    return NeedleWatch([record for _, record in records], every)
