"""Continual pretraining of the hybrid model (BOSCH B.5) through transformers' Trainer.

Started on every process with the same work directory; torchrun's variables say how many there are.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from stages.configs import MaterializeConfig, TrainConfig
from stages.context import StageConfig
from stages.output import write_json

if TYPE_CHECKING:
    from stages.training.metrics import MetricsLog
    from stages.training.trainer import PretrainingTrainer

VERSION = 2
logger = logging.getLogger(__name__)


def run(config: StageConfig, inputs: Mapping[str, Path], work_dir: Path) -> dict[str, Any]:
    """Train `inputs["materialize"]/model` on `inputs["prepare"]/train`; resumes in `work_dir`.

    Leaves checkpoints/tokens-<n>, metrics.jsonl, tensorboard/ and summary.json, and returns the
    summary: final_loss (nats per token), tokens, steps, seconds, processes, checkpoints.

    Raises:
        UserError: batch, data, sharding and machine do not fit together.
        RunError: the loss diverged, or the disk refused.
    """
    summary_file = work_dir / "summary.json"
    if not summary_file.exists():
        _train(config, inputs, work_dir, summary_file)
    return cast(dict[str, Any], json.loads(summary_file.read_text(encoding="utf-8")))


def _train(
    config: StageConfig, inputs: Mapping[str, Path], work_dir: Path, summary_file: Path
) -> None:
    from stages.training.parallel import check_sharding_possible, leave
    from stages.training.storage import RestartPoints

    check_sharding_possible(config.runtime)
    restarts = RestartPoints(work_dir)
    trainer = _build_trainer(config, inputs, work_dir, restarts)
    point = restarts.latest()
    if point is not None:
        logger.info("resuming from %s", point.name)
    try:
        trainer.train(resume_from_checkpoint=str(point) if point else None)
    finally:
        if trainer.metrics_log is not None:
            trainer.metrics_log.close()
    if trainer.metrics_log is not None:
        _write_summary(trainer, trainer.metrics_log, summary_file)
        restarts.remove()
    trainer.accelerator.wait_for_everyone()
    leave()


def _build_trainer(
    config: StageConfig, inputs: Mapping[str, Path], work_dir: Path, restarts: Any
) -> PretrainingTrainer:
    """Data, model and trainer, ready to start or to resume."""
    import torch

    from stages.training.data import PackedSequences, collate, collate_documents
    from stages.training.metrics import MetricsLog
    from stages.training.model import load_for_training, saved_dtype
    from stages.training.parallel import world_size
    from stages.training.schedule import make_schedule
    from stages.training.storage import restart_step
    from stages.training.trainer import CheckpointWriter, PretrainingTrainer, training_arguments

    train, runtime = cast(TrainConfig, config.section), config.runtime
    data = PackedSequences(inputs["prepare"] / "train")
    schedule = make_schedule(
        train, runtime, data.sequence_length, world_size(), torch.cuda.is_available()
    )
    data.arrange(schedule, config.seed)
    arguments = training_arguments(train, runtime, schedule, config.seed, restarts.writing)
    if arguments.should_save:
        restarts.clean()
    arguments.distributed_state.wait_for_everyone()

    model_dir = inputs["materialize"] / "model"
    point = restarts.latest()
    materialize = cast(MaterializeConfig, config.upstream["materialize"])
    return PretrainingTrainer(
        model=load_for_training(model_dir, config.model, train, runtime),
        args=arguments,
        train_dataset=data,
        data_collator=collate_documents if train.document_masking else collate,
        schedule=schedule,
        runtime=runtime,
        restarts=restarts,
        checkpoint_writer=CheckpointWriter(
            work_dir, model_dir, saved_dtype(model_dir), materialize.max_shard_size
        ),
        metrics_log=(
            MetricsLog(work_dir, schedule, restart_step(point) if point else 0)
            if arguments.should_save
            else None
        ),
    )


def _write_summary(
    trainer: PretrainingTrainer, metrics_log: MetricsLog, summary_file: Path
) -> None:
    """Write summary.json last: with it, the work directory is finished."""
    schedule = trainer.schedule
    summary = {
        "final_loss": metrics_log.records[-1]["loss"],
        "tokens": schedule.tokens,
        "steps": schedule.steps,
        "seconds": round(metrics_log.seconds, 3),
        "processes": trainer.args.world_size,
        "sharding": trainer.runtime.sharding,
        "checkpoints": {f"tokens-{n}": step for n, step in schedule.checkpoint_steps.items()},
    }
    write_json(summary_file, summary)
