"""Steps, batches, learning rate and checkpoints, as arithmetic."""

from __future__ import annotations

import pytest

from bosch.errors import UserError
from stages.context import Runtime
from stages.train.schedule import Schedule, make_schedule
from stages.train.stage import TrainConfig


def schedule(world_size: int = 1, on_gpu: bool = False, **fields: object) -> Schedule:
    runtime = Runtime(micro_batch_size=fields.pop("micro_batch_size", "auto"))
    length = fields.pop("sequence_length", 32)
    values = {"total_tokens": 1280, "batch_tokens": 128, "checkpoint_tokens": [], **fields}
    return make_schedule(TrainConfig(**values), runtime, length, world_size, on_gpu)


def test_the_paper_has_1192_steps_of_64_sequences() -> None:
    paper = make_schedule(TrainConfig(), Runtime(), 32768, 16, on_gpu=True)
    assert (paper.steps, paper.sequences) == (1192, 64)
    assert (paper.micro_batch_size, paper.accumulation) == (1, 4)
    assert paper.warmup_steps == 120
    assert paper.checkpoint_steps == {
        700_000_000: 334, 1_300_000_000: 620, 2_000_000_000: 954, 2_500_000_000: 1192,
    }  # fmt: skip


def test_processes_that_share_a_sequence_count_as_one() -> None:
    """Four of eight processes share each sequence: two groups with 32 sequences each."""
    shared = make_schedule(TrainConfig(), Runtime(context_parallel=4), 32768, 8, on_gpu=True)
    assert (shared.sequences, shared.micro_batch_size, shared.accumulation) == (64, 1, 32)


def test_a_batch_that_does_not_divide_is_refused() -> None:
    with pytest.raises(UserError, match=r"4 sequences cannot be divided .* on 3 process"):
        schedule(world_size=3)


@pytest.mark.parametrize(("sequences", "micro"), [(8, 4), (6, 3), (5, 1), (3, 3)])
def test_a_pass_on_a_cpu_has_at_most_2048_tokens(sequences: int, micro: int) -> None:
    """Four sequences, or fewer so that the number divides the batch."""
    tokens = sequences * 512
    options = {"sequence_length": 512, "batch_tokens": tokens, "total_tokens": tokens}
    assert schedule(**options).micro_batch_size == micro
    assert schedule(on_gpu=True, **options).micro_batch_size == 1


@pytest.mark.parametrize(
    ("ratio", "steps", "warm"),
    [
        (0.1, 1, 1), (0.1, 11, 2), (1.0, 10, 10), (0.0, 10, 0),
        (0.07, 100, 7), (0.28, 100, 28),  # slightly more in floats
    ],
)  # fmt: skip
def test_warm_up_is_its_share_of_the_steps_rounded_up(ratio: float, steps: int, warm: int) -> None:
    assert schedule(total_tokens=128 * steps, warmup_ratio=ratio).warmup_steps == warm


def test_the_learning_rate_is_a_cosine_between_peak_and_minimum() -> None:
    planned = schedule(total_tokens=128 * 11, warmup_ratio=2 / 11, min_lr_ratio=0.2)
    assert planned.learning_rate_factor(6) == pytest.approx(0.6)  # half way: the mean of 1 and 0.2
    assert planned.learning_rate_factor(0) == 0.5


def test_wsd_stays_at_the_peak_until_the_last_steps() -> None:
    """20 steps: two of warm-up, 14 at the peak, and four that fall by fifths of 0.8."""
    planned = schedule(
        total_tokens=128 * 20, warmup_ratio=0.1, min_lr_ratio=0.2, schedule="wsd", decay_ratio=0.2
    )
    factors = [planned.learning_rate_factor(step) for step in range(20)]
    assert factors == pytest.approx([0.5, *[1.0] * 15, 0.84, 0.68, 0.52, 0.36])
