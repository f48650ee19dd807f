"""Trains like `tests.training_case` and writes the most bytes of tensors each rank held at once.

python -m tests.peak_training CASE WORK '{"train": {...}, "runtime": {...}}'
"""

from __future__ import annotations

import os
from typing import Any

from stages.train.loop import Loop
from tests.peak_memory import TensorBytes
from tests.training_case import main

if __name__ == "__main__":
    counted: list[TensorBytes] = []
    passes, write = Loop.forward_backward, Loop.write_checkpoint

    def forward_backward(self: Loop, *args: Any) -> float:
        if not counted:
            counted.append(TensorBytes())
            counted[0].__enter__()
        return passes(self, *args)

    def write_checkpoint(self: Loop, *args: Any) -> None:
        # At the end of the last step: what is copied for the files is no memory of a GPU.
        counted[0].__exit__(None, None, None)
        write(self, *args)

    Loop.forward_backward = forward_backward  # type: ignore[method-assign]
    Loop.write_checkpoint = write_checkpoint  # type: ignore[method-assign]
    work_dir = main()
    (work_dir / f"peak.{os.environ.get('RANK', '0')}.json").write_text(str(counted[0].peak))
