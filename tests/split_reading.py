"""Compares prompts that the ranks read together with those that one process reads.

python -m tests.split_reading FAMILY …
"""

from __future__ import annotations

import os
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from bosch.model.cache import HybridCache, held_bytes
from bosch.model.materialize import materialize
from bosch.window import Window
from stages.context import Runtime
from stages.evaluate.generation import Question, generate
from stages.evaluate.shared_reading import SharedReading
from stages.evaluate.suites.positions.suite import token_losses
from tests.hybrid_case import mask_of, small_model, tokens

# Batches with padding and without; the last is shorter than its chunks with padding at the end.
LENGTHS = ((7, 41, 60), (52,), (33, 33), (6,))
TOKENIZER: Any = SimpleNamespace(
    pad_token_id=0, decode=lambda ids, **_: " ".join(map(str, ids)), encode=None
)


def compare(model: Any, shared: SharedReading, name: str) -> None:
    """Caches, bytes that they hold, generated tokens and losses of a model."""
    for lengths in LENGTHS:
        ids = torch.zeros(len(lengths), max(lengths), dtype=torch.long)
        for row, length in enumerate(lengths):
            ids[row, ids.shape[1] - length :] = tokens(1, length, seed=row)
        mask = (torch.arange(ids.shape[1]) >= ids.shape[1] - torch.tensor(lengths)[:, None]).long()
        positions = (mask.cumsum(1) - 1).clamp_min(0)  # as `generate` has them
        cache = shared.cache(model, ids, mask)
        expected = HybridCache.of(model)
        with torch.inference_mode():
            past = {"position_ids": positions[:, :-1], "past_key_values": expected}
            model(ids[:, :-1], attention_mask=mask[:, :-1], **past)
            assert (cache is not None) == shared.is_first
            if cache is not None:
                assert held_bytes(cache) == held_bytes(expected), name
                now = {"attention_mask": mask, "position_ids": positions[:, -1:]}
                logits = [
                    model(ids[:, -1:], past_key_values=one, **now).logits
                    for one in (cache, expected)
                ]
                torch.testing.assert_close(*logits, atol=1e-6, rtol=1e-5)
    for lengths in (*LENGTHS, (1,)):
        questions = [
            Question(n, np.asarray(tokens(1, length, seed=n)[0], np.int32), [])
            for n, length in enumerate(lengths)
        ]
        model.generation_config.eos_token_id = None
        ours, theirs = (
            list(generate(model, TOKENIZER, questions, 9, 3, shared=one)) for one in (shared, None)
        )
        assert ours == theirs, name
    document = np.asarray(tokens(1, 61)[0])
    losses = [token_losses(model, document, one) for one in (shared, None)]
    assert len(losses[0]) == 60
    np.testing.assert_allclose(*losses, atol=1e-6, rtol=1e-6, err_msg=name)


def main() -> None:
    """Every family that is named: its original, and hybrids with one window and with two."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    shared = SharedReading()
    for family in sys.argv[1:]:
        base = shared.load(lambda name=family: small_model(name), Runtime())
        compare(base, shared, family)
        for windows in (Window(5, 2), (Window(19, 3), Window(6, 3))):
            mask = mask_of(base.config)
            if isinstance(windows, tuple):
                choices = mask.choices * np.arange(1, 3).repeat(mask.num_key_value_heads // 2)
                mask = type(mask).of_choices(choices)
            compare(materialize(small_model(family), mask, windows), shared, f"{family} {windows}")
    print(f"rank {os.environ['RANK']} agrees")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
