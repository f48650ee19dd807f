"""Loads a model for sharded training and writes what its rank held at most, and what it keeps.

python -m tests.measured_load CASE WORK '{"runtime": {"sharding": "fsdp"}}' leaves
`load.<rank>.json`: the number of parameters, and in bytes of resident memory since the load began,
the peak and what is kept. A weight that is freed is given back: it lies in a mapping of its own.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import sys
from pathlib import Path

import torch
from accelerate import Accelerator

from stages.measure.process import memory_meter
from stages.train import run
from stages.train.storage import RestartPoints
from tests.training_case import stage_config

_M_MMAP_THRESHOLD = -3  # of malloc.h


if __name__ == "__main__":
    # Without it glibc raises the threshold to the size of what was freed first, and pieces that
    # are kept hold together what was freed between them: as much as the shards themselves.
    ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, 2**18)
    case, work_dir = Path(sys.argv[1]), Path(sys.argv[2])
    config = stage_config(**json.loads(sys.argv[3]))
    inputs = {name: case / name for name in ("prepare", "materialize")}
    load = run.load_for_training

    def load_from_here(*args: object, **options: object) -> object:
        global before
        gc.collect()
        meter.restart()
        before = meter.now()
        return load(*args, **options)  # type: ignore[arg-type]

    meter, before = memory_meter(torch.device("cpu")), 0
    run.load_for_training = load_from_here  # type: ignore[assignment]
    # DeepSpeed's copies for its optimizer are no part of loading.
    Accelerator.prepare = lambda self, *parts: parts
    run.check_sharding_runs = lambda *parts: None  # type: ignore[assignment]
    loop = run.build_loop(config, inputs, work_dir, RestartPoints(work_dir, config.section))
    gc.collect()
    held = {"peak": meter.peak() - before, "kept": meter.now() - before}
    held["parameters"] = sum(getattr(p, "ds_numel", p.numel()) for p in loop.model.parameters())
    (work_dir / f"load.{os.environ['RANK']}.json").write_text(json.dumps(held))
