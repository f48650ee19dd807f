"""Continual pretraining of the hybrid model (BOSCH B.5); its loop is in `loop.py`.

Started on every process with the same work directory; torchrun's variables hold their number.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

from bosch.errors import LostRankError, RunError, StoppedError
from bosch.files import file_hashes, remove
from bosch.model.configuration import hybrid_mask
from bosch.model.loading import load_config
from bosch.ranks import limit_collectives, partners_alive
from bosch.score.decoder_shape import DecoderShape
from bosch.this_process import world_size
from stages.context import StageConfig
from stages.materialize.stage import MODEL, MaterializeConfig
from stages.prepare.stage import PACKED_DATA
from stages.train import parallel
from stages.train.answers import Answers
from stages.train.checkpoint import CheckpointWriter
from stages.train.data import PackedSequences, collate, collate_documents
from stages.train.distillation import TeacherLoss, load_teacher
from stages.train.loop import Loop
from stages.train.memory import TrainingJob
from stages.train.metrics import MetricsLog, step_flops
from stages.train.model import (
    attention_backend,
    load_for_training,
    saved_dtype,
    saved_weights,
    shard_and_fill,
    shard_teacher,
)
from stages.train.schedule import make_schedule
from stages.train.stage import CHECKPOINTS, METRICS, TrainConfig, TrainingSummary, checkpoint_name
from stages.train.storage import RestartPoints, checkpoint_hashes, restart_step, wait
from stages.train.trainable import (
    make_optimizer,
    parameter_groups,
    untrained_parameters,
)

logger = logging.getLogger(__name__)


def run(
    config: StageConfig[TrainConfig], inputs: Mapping[str, Path], work_dir: Path
) -> dict[str, Any]:
    """Train `inputs["materialize"]/model` on `inputs["prepare"]/train`; resumes in `work_dir`.

    Writes checkpoints/tokens-<n>, metrics.jsonl, tensorboard/ and summary.json, and returns the
    summary: final_loss (nats per token), tokens, steps, seconds, processes, checkpoints. Raises
    UserError when batch, data, sharding and machine do not fit together; RunError when the loss
    diverged, or writing failed; LostRankError, with its rank, when another process ended.
    """
    if TrainingSummary.finished(work_dir) is None:
        _train(config, inputs, work_dir)
    else:  # killed after the summary, perhaps before removing the restart points
        RestartPoints(work_dir).remove()
    return TrainingSummary.read(work_dir).content


def _train(config: StageConfig[TrainConfig], inputs: Mapping[str, Path], work_dir: Path) -> None:
    config = replace(config, runtime=parallel.actual_sharding(config.runtime))
    restarts = RestartPoints(work_dir)
    restarts.check_layout(parallel.sharding_layout(config.runtime))
    loop = build_loop(config, inputs, work_dir, restarts)
    try:
        with loop.timer.signals(), partners_alive():
            loop.run()
    except LostRankError:  # a restart point needs all processes
        raise
    except RunError:  # all processes fail alike; write a restart point first
        restarts.wait()
        raise
    finally:
        if loop.metrics_log is not None:
            loop.metrics_log.close()
    limit_collectives(config.runtime.timeout_minutes)
    if loop.step < loop.schedule.steps:
        raise StoppedError(
            f"training stopped after step {loop.step} of {loop.schedule.steps}, with a restart "
            "point"
        )
    with partners_alive():
        checkpoints = checkpoint_hashes(work_dir)
        if loop.metrics_log is not None:
            _write_summary(loop, loop.metrics_log, work_dir, checkpoints)
            restarts.remove()
        wait()
    parallel.leave_process_group()


def build_loop(
    config: StageConfig[TrainConfig],
    inputs: Mapping[str, Path],
    work_dir: Path,
    restarts: RestartPoints,
) -> Loop:
    """A loop with data, model and optimizer, ready to start or resume."""
    train = config.section
    data = PackedSequences(inputs["prepare"] / PACKED_DATA, config.seed)
    schedule = make_schedule(
        train, config.runtime, data.sequence_length, world_size(), torch.cuda.is_available()
    )
    model_dir = inputs["materialize"] / MODEL
    # Before DeepSpeed is set up, which would shard the meta models used for counts and flags.
    untrained = untrained_parameters(model_dir, config.model.trust_remote_code)
    model_config = load_config(str(model_dir), trust_remote_code=config.model.trust_remote_code)
    flops = step_flops(model_config, schedule, train)
    shape = DecoderShape.of(model_config)
    accelerator = parallel.make_accelerator(train, config.runtime, schedule, shape.hidden)
    memory = TrainingJob(
        shape, train, config.runtime, schedule.sequence_length,
        hybrid_mask(model_config).layers, world_size(),
        torch.cuda.is_available(), parallel.least_memory(accelerator.device),
    ).memory()  # fmt: skip
    runtime = config.runtime.model_copy(update={"checkpointing": memory.checkpointing})
    logger.info("activations that are recomputed: %s", runtime.checkpointing)
    config = replace(config, runtime=runtime)
    if accelerator.is_main_process:
        remove(work_dir / TrainingSummary.FILE)
    with partners_alive():
        accelerator.wait_for_everyone()
        restarts.check_shared_disk()
        point = restarts.latest()
    model, optimizer = _prepared_model(config, model_dir, accelerator, untrained)
    metrics_log = None
    max_shard_size = config.upstream_section(MaterializeConfig).max_shard_size
    if accelerator.is_main_process:
        done_steps = restart_step(point) if point else 0
        metrics_log = MetricsLog(work_dir, schedule, done_steps)
    loop = Loop(
        accelerator=accelerator,
        model=model,
        optimizer=optimizer,
        data=data,
        collate=collate_documents if train.document_masking else collate,
        schedule=schedule,
        train=train,
        runtime=runtime,
        seed=config.seed,
        restarts=restarts,
        checkpoint_writer=CheckpointWriter(
            work_dir, model_dir, saved_dtype(model_dir), max_shard_size
        ),
        metrics_log=metrics_log,
        answers=Answers.of(runtime, inputs),
        flops=flops,
        planned_memory=memory.peak,
    )
    if point is not None:
        logger.info("resuming from %s", point.name)
        with partners_alive():
            loop.resume(point)
    return loop


def _prepared_model(
    config: StageConfig[TrainConfig],
    model_dir: Path,
    accelerator: Accelerator,
    untrained: Collection[str],
) -> tuple[Any, Any]:
    """The model and its optimizer, sharded over the processes."""
    train, runtime, device = config.section, config.runtime, accelerator.device

    def read_weights() -> dict[str, torch.Tensor]:
        return saved_weights(model_dir, config.model) if accelerator.is_main_process else {}

    backend = attention_backend(model_dir, config.model, train, runtime)
    context_parallel = parallel.make_context_parallel(runtime)
    distillation = None
    if train.teacher == "original":
        teacher = load_teacher(model_dir, config.model, train, runtime, device, backend)
        if context_parallel is not None:
            context_parallel.install(teacher)
        distillation = TeacherLoss(teacher)
    model: Any = load_for_training(
        model_dir, config.model, train, runtime, distillation=distillation, backend=backend,
        device=device, context_parallel=context_parallel, untrained=untrained,
    )  # fmt: skip
    if runtime.sharding == "fsdp":
        weights = read_weights()
        shard_and_fill(accelerator, model, weights)
        if distillation is not None:
            shard_teacher(accelerator, distillation.teacher, read_weights())
    model, optimizer = accelerator.prepare(model, make_optimizer(model, train))
    if runtime.sharding == "fsdp":
        # accelerate matches weights by data pointer, which is the same for all empty shards.
        groups = parameter_groups(model, train.weight_decay)
        for group, sharded in zip(optimizer.param_groups, groups, strict=True):
            group["params"] = sharded["params"]
    if context_parallel is not None:
        context_parallel.check(accelerator.unwrap_model(model))
    return model, optimizer


def _write_summary(
    loop: Loop, metrics_log: MetricsLog, work_dir: Path, checkpoints: dict[str, dict[str, str]]
) -> None:
    """Write summary.json, the last file of a finished work directory."""
    schedule, hashes = loop.schedule, file_hashes(work_dir, [METRICS])
    for name, files in checkpoints.items():
        hashes |= {f"{CHECKPOINTS}/{name}/{file}": digest for file, digest in files.items()}
    steps = {checkpoint_name(tokens): step for tokens, step in schedule.checkpoint_steps.items()}
    TrainingSummary(
        final_loss=metrics_log.final_loss,
        tokens=schedule.tokens,
        steps=schedule.steps,
        seconds=round(metrics_log.seconds, 3),
        processes=world_size(),
        sharding=loop.runtime.sharding,
        checkpoints={name: step for name, step in steps.items() if name in checkpoints},
        sha256=hashes,
    ).write(work_dir)
