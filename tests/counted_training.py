"""Trains like `tests.training_case` and writes the bytes each rank sent a group: `sent.<rank>`.

python -m tests.counted_training CASE WORK '{"train": {...}, "runtime": {...}}'
"""

from __future__ import annotations

import os
from typing import Any

import torch.distributed as dist

from tests.training_case import main

_SENT = [0]


def _count() -> None:
    """Calls that name a group, as sharding's and the loop's do not: all but what stays here."""
    gather, exchange = dist.all_gather_single, dist.all_to_all_single

    def all_gather(out: Any, own: Any, group: Any = None, **kwargs: Any) -> Any:
        if group is not None:
            _SENT[0] += out.nbytes - own.nbytes
        return gather(out, own, group=group, **kwargs)

    def all_to_all(out: Any, own: Any, to_me: Any, of_me: Any, group: Any = None) -> Any:
        rows = sum(count for rank, count in enumerate(of_me) if rank != dist.get_rank(group))
        _SENT[0] += own.nbytes // max(1, len(own)) * rows
        return exchange(out, own, to_me, of_me, group=group)

    dist.all_gather_single, dist.all_to_all_single = all_gather, all_to_all


if __name__ == "__main__":
    _count()
    work_dir = main()
    (work_dir / f"sent.{os.environ.get('RANK', '0')}").write_text(str(_SENT[0]))
