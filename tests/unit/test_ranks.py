"""S(z) over several ranks, simulated by threads: equal bits, and equal failures on all of them."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from threading import Barrier

import pytest
import torch
import torch.distributed as dist

from bosch import ranks
from bosch.errors import LostRankError, RunError
from bosch.masks import HeadMask
from bosch.ranks import Ranks
from bosch.score.batches import batches_of_rank
from bosch.score.objective import Objective
from bosch.window import Window
from tests.hybrid_case import KV_HEADS, LAYERS, random_mask
from tests.search_case import WINDOW, searchable

FULL = HeadMask.all_full(LAYERS, KV_HEADS)
MASKS = [
    FULL,
    random_mask(Window(WINDOW)),
    HeadMask((*random_mask(Window(WINDOW)).windows[:2], (0,) * KV_HEADS)),
    HeadMask((*random_mask(Window(WINDOW)).windows[:2], (WINDOW,) * KV_HEADS)),
]


@dataclass
class Meeting:
    """Collects values of all threads and gives each the sum."""

    size: int
    evaluations: dict[int, list[torch.Tensor]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.barrier = Barrier(self.size, timeout=60)


class ThreadRanks(Ranks):
    def __init__(self, rank: int, meeting: Meeting) -> None:
        super().__init__(rank, meeting.size)
        object.__setattr__(self, "meeting", meeting)

    def merge(self, *parts):
        self.meeting.evaluations[self.rank] = list(parts)
        self.meeting.barrier.wait()
        order = sorted(self.meeting.evaluations, reverse=True)
        merged = [
            sum(several)
            for several in zip(*(self.meeting.evaluations[r] for r in order), strict=True)
        ]
        self.meeting.barrier.wait()
        return merged


def on_ranks(size, work, batch_size=2):
    """The result or exception of `work(objective, rank)` on each rank."""
    meeting = Meeting(size)

    def play(rank):
        model, calibration = searchables[rank]
        objective = Objective(
            model, calibration, Window(WINDOW), batch_size=batch_size,
            ranks=ThreadRanks(rank, meeting),
        )  # fmt: skip
        try:
            return work(objective, rank)
        except RunError as error:
            return str(error)

    searchables = [searchable(examples=7) for _ in range(size)]
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(play, range(size)))


def evaluated(objective, rank):
    return [objective.evaluate(mask) for mask in MASKS]


@pytest.mark.parametrize("size", [2, 6])
def test_any_number_of_ranks_gives_the_same_bits(size):
    (alone,) = on_ranks(1, evaluated)
    everywhere = on_ranks(size, evaluated)
    for evaluations in everywhere:
        assert evaluations == everywhere[0]
        for ours, theirs in zip(evaluations, alone, strict=True):
            assert (ours.score, ours.log_likelihood) == (theirs.score, theirs.log_likelihood)
            assert ours.full_forward_equivalents == theirs.full_forward_equivalents
    assert len({e.log_likelihood for e in alone}) == len(MASKS)


def test_nan_on_one_rank_fails_on_all():
    def broken(objective, rank):
        objective.evaluate(FULL)
        if rank == 1:
            with torch.no_grad():
                objective.model.get_decoder().norm.weight[0] = float("nan")
        return objective.evaluate(random_mask(Window(WINDOW)))

    assert all("not finite" in message for message in on_ranks(2, broken))


def test_ranks_that_measure_different_masks_fail():
    message = on_ranks(
        2, lambda objective, rank: objective.evaluate(random_mask(Window(WINDOW), rank))
    )
    assert all("different head masks" in text for text in message)


@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_each_batch_has_one_rank_and_ranks_have_similar_numbers_of_batches(size):
    parts = [[10, 20, 30, 40, 50, 20], [10, 9, 8, 20], [5]]
    shares = [batches_of_rank(parts, Ranks(rank, size)) for rank in range(size)]
    sizes = [batch for batches in parts for batch in batches]
    assert sorted(i for share in shares for i in share) == list(range(len(sizes)))
    work = [sum(sizes[i] for i in share) for share in shares]
    assert max(work) - min(work) <= 2 * max(sizes)
    first = 0
    for batches in parts:  # gradients need one: no rank has two while another has none
        own = [sum(first <= i < first + len(batches) for i in share) for share in shares]
        assert max(own) - min(own) <= 1
        first += len(batches)


def test_a_lost_connection_is_told_from_other_errors(monkeypatch):
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    for reason, kind, message in (
        ("Broken pipe", LostRankError, r"^another process of this run does not answer \(Broken"),
        ("wrong shapes", RuntimeError, "^wrong shapes$"),
    ):
        with pytest.raises(kind, match=message), ranks.partners_alive():
            raise RuntimeError(reason)
