"""A tiny hybrid model and a data set to train on, and a way to train on them in other processes.

python -m tests.training_case CASE WORK '{"train": {...}, "runtime": {...}}'
"""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bosch.masks import HeadMask
from bosch.model.materialize import materialize
from bosch.window import Window
from stages.context import ModelConfig, Runtime, StageConfig
from stages.materialize.model_card import UNTRAINED
from stages.materialize.stage import MaterializeConfig
from stages.train.loop import Loop
from stages.train.run import run
from stages.train.stage import TrainConfig
from tests.hybrid_case import sliding_mask
from tests.rank_processes import run_module

ROOT = Path(__file__).resolve().parents[1]
VOCABULARY, SEQUENCE_LENGTH, SEQUENCES = 64, 32, 40
SPEED = ("tokens_per_second", "mfu", "memory", "data_seconds", "checkpoint_seconds", "seconds_left")
TRAIN = {
    "total_tokens": 10 * 4 * SEQUENCE_LENGTH,
    "batch_tokens": 4 * SEQUENCE_LENGTH,
    "learning_rate": 1e-2,
    "warmup_ratio": 0.2,
    "checkpoint_tokens": [3 * 4 * SEQUENCE_LENGTH, 10 * 4 * SEQUENCE_LENGTH],
    "mixed_precision": "no",
}

_HAS_DEEPSPEED = importlib.util.find_spec("deepspeed") is not None
DEEPSPEED = pytest.param(
    "deepspeed", marks=pytest.mark.skipif(not _HAS_DEEPSPEED, reason="deepspeed is not installed")
)


def make_case(
    directory: Path,
    dtype: str = "float32",
    hidden_size: int = 32,
) -> Path:
    """Write `prepare/train` (learnable token cycles) and `materialize/model` below `directory`."""
    import numpy as np
    import torch
    from datasets import Dataset
    from transformers import Qwen3Config, Qwen3ForCausalLM

    rng = np.random.default_rng(0)
    rows, lengths = [], []
    for _ in range(SEQUENCES):
        cut = int(rng.integers(8, SEQUENCE_LENGTH - 8))
        start, stride = rng.integers(0, VOCABULARY, 2), rng.integers(1, 4, 2)
        steps = np.arange(SEQUENCE_LENGTH)
        row = np.where(steps < cut, start[0] + stride[0] * steps, start[1] + stride[1] * steps)
        rows.append((row % VOCABULARY).astype(np.int32))
        lengths.append(np.array([cut, SEQUENCE_LENGTH - cut], dtype=np.int32))
    data = Dataset.from_dict({"input_ids": rows, "document_lengths": lengths})
    data.save_to_disk(str(directory / "prepare" / "train"))

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY, hidden_size=hidden_size, intermediate_size=2 * hidden_size,
        num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
        tie_word_embeddings=True, max_position_embeddings=128, bos_token_id=None, eos_token_id=0,
    )  # fmt: skip
    model_dir = directory / "materialize" / "model"
    base = Qwen3ForCausalLM(config).to(getattr(torch, dtype))
    mask = HeadMask(((6, 0), (6, 6)))
    hybrid = materialize(base, mask)
    hybrid.save_pretrained(model_dir)
    (model_dir / "tokenizer.json").write_text("{}", encoding="utf-8")
    (model_dir / "README.md").write_text(f"# Card\n\n{UNTRAINED}\n", encoding="utf-8")
    return directory


def write_random_case(
    directory: Path, base: Any, sliding: int, window: int, length: int, rows: int = 16
) -> Path:
    """Write random sequences of one document each, and a hybrid of `base`, as `make_case` does.

    `sliding` KV heads of each layer have the window.
    """
    import numpy as np
    from datasets import Dataset

    config = base.config
    ids = np.random.default_rng(0).integers(0, config.vocab_size, (rows, length)).astype(np.int32)
    data = Dataset.from_dict({"input_ids": list(ids), "document_lengths": [[length]] * rows})
    data.save_to_disk(str(directory / "prepare" / "train"))
    rows_of_heads = [list(range(sliding))] * config.num_hidden_layers
    mask = sliding_mask(rows_of_heads, config.num_key_value_heads, Window(window))
    materialize(base, mask).save_pretrained(directory / "materialize" / "model")
    return directory


def stage_config(
    train: dict[str, Any] | None = None,
    runtime: dict[str, Any] | None = None,
    seed: int = 7,
    max_shard_size: str = "5GB",
) -> StageConfig:
    """The small run, with changes."""
    return StageConfig(
        section=TrainConfig(**{**TRAIN, **(train or {})}),
        model=ModelConfig(path="unused"),
        seed=seed,
        runtime=Runtime(**{"micro_batch_size": 2, "save_every_steps": 2, **(runtime or {})}),
        upstream={"materialize": MaterializeConfig(max_shard_size=max_shard_size)},
    )


def train_here(case: Path, work_dir: Path, **changes: Any) -> dict[str, Any]:
    """Run the stage in this process."""
    inputs = {name: case / name for name in ("prepare", "search", "materialize")}
    work_dir.mkdir(parents=True, exist_ok=True)
    return run(stage_config(**changes), inputs, work_dir)


def train_in_processes(
    case: Path,
    work_dir: Path,
    processes: int = 1,
    kill_at_step: int | None = None,
    kill_rank: int = 0,
    module: str = "tests.training_case",
    per_node: int | None = None,
    **changes: Any,
) -> subprocess.CompletedProcess[str]:
    """Run the stage in one new process, or in several with gloo, all on one node by default."""
    environment = {}
    if kill_at_step is not None:
        environment = {"KILL_AT_STEP": str(kill_at_step), "KILL_RANK": str(kill_rank)}
    arguments = [str(case), str(work_dir), json.dumps(changes)]
    return run_module(module, arguments, processes, environment, per_node)


def metrics(work_dir: Path) -> list[dict[str, Any]]:
    """The records of metrics.jsonl, without speed and checksum, which no two runs share."""
    lines = (work_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    records = [json.loads(line) for line in lines]
    for record in records:
        assert record.pop("seconds") >= 0
        for name in (*SPEED, "crc32"):
            record.pop(name, None)
    return records


def _kill_self_at(step: int) -> None:
    """Die as by `kill -9` after the record of `step`, once the restart point before is written."""
    log = Loop.log

    def log_and_die(self: Loop, *args: Any) -> None:
        log(self, *args)
        if self.step == step:
            self.restarts.wait()
            os.kill(os.getpid(), signal.SIGKILL)

    Loop.log = log_and_die  # type: ignore[method-assign]


def main() -> Path:
    """Train as the command line and the environment say; returns the work directory."""
    logging.basicConfig(level=logging.INFO, stream=sys.stderr)
    if "KILL_AT_STEP" in os.environ and os.environ.get("RANK", "0") == os.environ["KILL_RANK"]:
        _kill_self_at(int(os.environ["KILL_AT_STEP"]))
    work_dir = Path(sys.argv[2])
    train_here(Path(sys.argv[1]), work_dir, **json.loads(sys.argv[3]))
    return work_dir


if __name__ == "__main__":
    main()
