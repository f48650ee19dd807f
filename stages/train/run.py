"""Continual pretraining of the hybrid model (BOSCH B.5) through transformers' Trainer.

Started on every process with the same work directory; torchrun's variables say how many there are.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bosch.errors import StoppedError
from bosch.files import file_hashes
from bosch.ranks import limit_collectives, partners_alive
from stages.context import StageConfig
from stages.materialize.stage import MODEL, MaterializeConfig
from stages.prepare.stage import PACKED_DATA
from stages.train.checkpoint import CheckpointWriter
from stages.train.data import PackedSequences, collate, collate_documents
from stages.train.distillation import TeacherLoss, load_teacher
from stages.train.metrics import MetricsLog, check_wandb
from stages.train.model import attention_backend, load_for_training, saved_dtype, saved_weights
from stages.train.parallel import check_sharding_possible, layout, leave, world_size
from stages.train.schedule import make_schedule
from stages.train.stage import METRICS, TrainConfig, TrainingSummary, checkpoint_name
from stages.train.storage import RestartPoints, check_layout, restart_step
from stages.train.trainer import PretrainingTrainer, training_arguments
from stages.train.watch import make_needle_watch

logger = logging.getLogger(__name__)


def run(
    config: StageConfig[TrainConfig], inputs: Mapping[str, Path], work_dir: Path
) -> dict[str, Any]:
    """Train `inputs["materialize"]/model` on `inputs["prepare"]/train`; resumes in `work_dir`.

    Leaves checkpoints/tokens-<n>, metrics.jsonl, tensorboard/ and summary.json, and returns the
    summary: final_loss (nats per token), tokens, steps, seconds, processes, checkpoints.

    Raises:
        UserError: batch, data, sharding and machine do not fit together.
        RunError: the loss diverged, or the disk refused.
        LostRankError: another process ended; it says which.
    """
    if TrainingSummary.finished(work_dir) is None:
        _train(config, inputs, work_dir)
    else:  # killed after its summary, perhaps before the restart points were removed
        RestartPoints(work_dir, config.section).remove()
    return TrainingSummary.read(work_dir).content


def _train(config: StageConfig[TrainConfig], inputs: Mapping[str, Path], work_dir: Path) -> None:
    check_sharding_possible(config.runtime)
    check_wandb(config.runtime)
    restarts = RestartPoints(work_dir, config.section)
    newest = restarts.newest()
    if newest is not None:
        check_layout(newest, layout(config.runtime))
    trainer, point = build_trainer(config, inputs, work_dir, restarts)
    if point is not None:
        logger.info("resuming from %s", point.name)
    try:
        with trainer.timer.signals(), partners_alive():
            trainer.train(resume_from_checkpoint=str(point) if point else None)
    finally:
        if trainer.metrics_log is not None:
            trainer.metrics_log.close()
    limit_collectives(config.runtime.timeout_minutes)
    step = trainer.state.global_step
    if step < trainer.schedule.steps:
        raise StoppedError(
            f"training stopped after step {step} of {trainer.schedule.steps}, with a restart point"
        )
    if trainer.metrics_log is not None:
        _write_summary(trainer, trainer.metrics_log, work_dir, restarts)
        restarts.remove()
    with partners_alive():
        trainer.accelerator.wait_for_everyone()
    leave()


def build_trainer(
    config: StageConfig[TrainConfig],
    inputs: Mapping[str, Path],
    work_dir: Path,
    restarts: RestartPoints,
) -> tuple[PretrainingTrainer, Path | None]:
    """Data, model and trainer, ready to start or to resume, and the point to resume from."""
    import torch

    train, runtime = config.section, config.runtime
    data = PackedSequences(inputs["prepare"] / PACKED_DATA)
    schedule = make_schedule(
        train, runtime, data.sequence_length, world_size(), torch.cuda.is_available()
    )
    data.arrange(schedule, config.seed)
    arguments = training_arguments(train, runtime, schedule, config.seed, restarts.writing)
    if arguments.should_save:
        (work_dir / TrainingSummary.FILE).unlink(missing_ok=True)
        restarts.clean()
    arguments.distributed_state.wait_for_everyone()

    model_dir = inputs["materialize"] / MODEL
    with partners_alive():
        point = restarts.latest()
    materialize = config.upstream_section(MaterializeConfig)

    def read_weights() -> dict[str, torch.Tensor]:
        return saved_weights(model_dir, config.model) if arguments.process_index == 0 else {}

    backend = attention_backend(model_dir, config.model, train, runtime)
    distillation = None
    if train.teacher == "original":
        teacher = load_teacher(model_dir, config.model, train, runtime, arguments.device, backend)
        distillation = TeacherLoss(teacher, train.teacher_weight, train.teacher_tokens)
    trainer = PretrainingTrainer(
        model=load_for_training(
            model_dir,
            config.model,
            train,
            runtime,
            config.seed,
            distillation,
            backend,
            arguments.device,
        ),
        args=arguments,
        train_dataset=data,
        data_collator=collate_documents if train.document_masking else collate,
        schedule=schedule,
        runtime=runtime,
        train=train,
        restarts=restarts,
        distillation=distillation,
        needles=make_needle_watch(config, inputs["prepare"]),
        read_weights=read_weights,
        checkpoint_writer=CheckpointWriter(
            work_dir, model_dir, saved_dtype(model_dir), materialize.max_shard_size
        ),
        metrics_log=(
            MetricsLog(
                work_dir, schedule, restart_step(point) if point else 0, runtime.wandb_project
            )
            if arguments.should_save
            else None
        ),
    )
    return trainer, point


def _write_summary(
    trainer: PretrainingTrainer, metrics_log: MetricsLog, work_dir: Path, restarts: RestartPoints
) -> None:
    """Write summary.json last: with it, the work directory is finished."""
    schedule = trainer.schedule
    TrainingSummary(
        final_loss=metrics_log.final_loss,
        tokens=schedule.tokens,
        steps=schedule.steps,
        seconds=round(metrics_log.seconds, 3),
        processes=trainer.args.world_size,
        sharding=trainer.runtime.sharding,
        checkpoints={checkpoint_name(n): step for n, step in schedule.checkpoint_steps.items()},
        sha256=restarts.checkpoint_hashes() | file_hashes(work_dir, [METRICS]),
    ).write(work_dir)
