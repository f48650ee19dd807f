"""Loads a model under FSDP and writes what its rank held at most, and what it keeps.

python -m tests.measured_load CASE WORK '{}' leaves `load.<rank>.json`: the number of parameters,
and in bytes of resident memory since the load began, the peak and what is kept.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from pathlib import Path

from stages.train.run import build_trainer
from stages.train.sharded_load import shard_and_fill
from stages.train.storage import RestartPoints
from stages.train.trainable import saved_name
from tests.training_case import stage_config


def _resident(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(field)).split()[1])


if __name__ == "__main__":
    case, work_dir = Path(sys.argv[1]), Path(sys.argv[2])
    config = stage_config(runtime={"sharding": "fsdp", "micro_batch_size": 1})
    inputs = {name: case / name for name in ("prepare", "materialize")}
    trainer = build_trainer(config, inputs, work_dir, RestartPoints(work_dir, config.section))
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins again
    before = _resident("VmRSS")
    shard_and_fill(trainer.accelerator, trainer.model, trainer.read_weights(), saved_name)
    gc.collect()
    held = {"peak": _resident("VmHWM") - before, "kept": _resident("VmRSS") - before}
    held["parameters"] = sum(parameter.numel() for parameter in trainer.model.parameters())
    (work_dir / f"load.{os.environ['RANK']}.json").write_text(json.dumps(held))
