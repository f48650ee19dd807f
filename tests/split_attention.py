"""Compares attention of sequences split over the ranks with that of one process; prints its name.

python -m tests.split_attention
"""

from __future__ import annotations

import itertools
import os

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from bosch.attention import (
    AttentionCall,
    AttentionContext,
    HeadLayout,
    LogitTransform,
    hybrid_attention,
)
from bosch.attention.context_parallel import Communicator, SplitPass, split_attention
from bosch.context_split import ContextSplit
from bosch.window import Window
from tests import fake_flash

ROWS, CHUNK, DIM, Q_PER_KV = 2, 24, 8, 2
CPU = torch.device("cpu")
# KV heads by window: less than a chunk, more than several, the whole sequence, two of them; one.
WINDOWS: list[list[int | None]] = [
    [None, 7, 7], [None, 60, 7], [1, None, 1], [25, 24, None], [1000, None, None], [7, 7], [None],
]  # fmt: skip


def _documents(length: int) -> Tensor:
    """Of one row many borders, some close together; of the other one."""
    begins = torch.zeros(ROWS, length, dtype=torch.long)
    generator = torch.Generator().manual_seed(0)
    begins[0, torch.randperm(length, generator=generator)[:9]] = 1
    begins[0, 20:22] = begins[1, length // 2 + 5] = 1
    begins[:, 0] = 0
    return begins.cumsum(-1)


def compare(
    windows: list[int | None],
    sinks: int,
    packed: bool,
    backend: str,
    communicator: Communicator,
) -> None:
    """Outputs and all gradients, and the bytes against the formula."""
    size, rank = communicator.ranks, communicator.rank
    length = 2 * size * CHUNK
    split = ContextSplit(length, size)
    kinds = [None if window is None else Window(window, sinks) for window in windows]
    layout = HeadLayout.search(kinds)
    generator = torch.Generator().manual_seed(1)
    heads = len(windows)
    shapes = [(ROWS, heads * Q_PER_KV, length, DIM), (ROWS, heads, length, DIM)]
    query, key, value = (
        torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()
        for shape in (shapes[0], shapes[1], shapes[1])
    )
    weight = torch.randn(ROWS, length, heads * Q_PER_KV, DIM, generator=generator).double()
    document = _documents(length) if packed else None
    context = AttentionContext(length, 0, document=document)
    states = [query, key, value]
    whole = hybrid_attention(*states, layout, context, backend="eager")
    own = torch.cat([torch.arange(c * CHUNK, (c + 1) * CHUNK) for c in split.chunks_of(rank)])
    own_states = [x.detach()[:, :, own].requires_grad_() for x in states]
    communicator.sent_bytes = 0
    current = SplitPass(split, ROWS, document, communicator, CPU)
    call = AttentionCall(*own_states, layout, context, LogitTransform(DIM**-0.5), backend)
    out = split_attention(call, current)
    sent = [communicator.sent_bytes]
    grads = torch.autograd.grad((out * weight[:, own]).sum(), own_states)
    expected = torch.autograd.grad((whole * weight).sum(), states)
    sent.append(communicator.sent_bytes - sent[0])
    pairs = [(out, whole[:, own])]
    pairs += [(ours, theirs[:, :, own]) for ours, theirs in zip(grads, expected, strict=True)]
    name = f"{windows} sinks {sinks} packed {packed} {backend} on {size}"
    for ours, theirs in pairs:
        torch.testing.assert_close(ours, theirs, atol=1e-9, rtol=1e-9, msg=lambda m: f"{name}: {m}")
    totals = torch.tensor(sent)
    dist.all_reduce(totals)
    formula = sum(split.traffic(kind) for kind in kinds) * ROWS * 2 * DIM * 8
    # Other documents' sinks are near, or are not those that another chunk has here.
    room = ROWS * heads * sinks * 2 * size * 2 * DIM * 8 if packed else 0
    assert all(formula - room <= total <= formula + room for total in totals), (name, totals)


def main() -> None:
    """Every case on these ranks."""
    fake_flash.install(pytest.MonkeyPatch())
    dist.init_process_group("gloo")
    communicator = Communicator(dist.group.WORLD)
    for windows, (sinks, packed) in itertools.product(WINDOWS, ((0, False), (3, True))):
        compare(windows, sinks, packed, "sdpa", communicator)
    for sinks, packed in ((3, False), (0, True)):
        compare([None, 60, 7], sinks, packed, "sdpa", communicator)
    compare([None, 7, 7], 3, True, "eager", communicator)
    for packed in (False, True):
        compare([None, 60, 7], 0, packed, "flash", communicator)
        compare([None, 60, 7], 3 * packed, packed, "flex", communicator)
    print(f"rank {os.environ['RANK']} agrees")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
