"""Trains like `tests.training_case`; beside each checkpoint, its weights by other means.

python -m tests.checked_checkpoints CASE WORK '{"runtime": {...}}' leaves in WORK, for each
checkpoint, `expected-<tokens>`, gathered by torch or DeepSpeed as a whole and written by
transformers, and the number of files that each rank wrote: `files-<tokens>.<rank>`.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from stages.train.checkpoint import CheckpointWriter
from stages.train.loop import Loop
from tests.training_case import main


def checked_checkpoint(self: Loop, tokens: int, averaged: list[int]) -> None:
    """Both, and the counts."""
    if self.runtime.sharding == "deepspeed":
        state = self.model._zero3_consolidated_16bit_state_dict()
    else:
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        state = get_model_state_dict(self.model, options=options)
    work_dir = self.restarts.directory.parent
    if self.accelerator.is_main_process:
        state.pop("lm_head.weight")  # tied
        self.unwrapped.save_pretrained(work_dir / f"expected-{tokens}", state_dict=state)
    written.clear()
    write(self, tokens, averaged)
    (work_dir / f"files-{tokens}.{dist.get_rank()}").write_text(str(len(written)))


def counted_group(self: CheckpointWriter, *args: Any) -> None:
    """Count it."""
    written.append(args)
    group(self, *args)


if __name__ == "__main__":
    written: list[Any] = []
    write, group = Loop.write_checkpoint, CheckpointWriter.write_group
    Loop.write_checkpoint = checked_checkpoint  # type: ignore[method-assign]
    CheckpointWriter.write_group = counted_group  # type: ignore[method-assign]
    main()
