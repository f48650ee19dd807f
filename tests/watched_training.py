"""Trains like `tests.training_case` with a score of the samples in WORK/samples.json.

python -m tests.watched_training CASE WORK '{"runtime": {"needle_every_steps": 5}}'
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from stages.train import run as training
from stages.train.watch import NeedleWatch
from tests.training_case import train_here


def read_samples(work_dir: Path) -> list[tuple[list[int], int]]:
    return [(ids, answer) for ids, answer in json.loads((work_dir / "samples.json").read_text())]


if __name__ == "__main__":
    work_dir = Path(sys.argv[2])
    training.make_needle_watch = lambda config, prepared: NeedleWatch(
        read_samples(work_dir), config.runtime.needle_every_steps or 1
    )
    train_here(Path(sys.argv[1]), work_dir, **json.loads(sys.argv[3]))
