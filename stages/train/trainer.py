"""transformers' Trainer with this project's schedule, log and files."""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import DistributedType
from safetensors.torch import load_model, save_model
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.integrations.deepspeed import deepspeed_load_checkpoint
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_callback import PrinterCallback, ProgressCallback

from bosch.errors import RunError
from bosch.ranks import collectives_within, limit_collectives
from stages.context import Runtime
from stages.train.checkpoint import CheckpointWriter
from stages.train.decisions import Decision, RestartTimer, SpikeRule
from stages.train.distillation import TeacherLoss
from stages.train.metrics import (
    MetricsLog,
    Speed,
    Stopwatch,
    peak_flops,
    peak_memory,
    step_flops,
)
from stages.train.parallel import check_sharding_runs, layout, sharding_arguments, world_size
from stages.train.schedule import Schedule
from stages.train.sharded_load import shard_and_fill, shard_teacher
from stages.train.stage import METRICS, TrainConfig
from stages.train.storage import RestartPoints, disk_errors
from stages.train.trainable import first_adapters, saved_name
from stages.train.watch import NeedleWatch

logger = logging.getLogger(__name__)

_WEIGHTS = "model.safetensors"


def training_arguments(
    train: TrainConfig, runtime: Runtime, schedule: Schedule, seed: int, output_dir: Path
) -> TrainingArguments:
    """Arguments of the Trainer; building them joins the process group."""
    on_gpu = torch.cuda.is_available()
    arguments = TrainingArguments(
        output_dir=str(output_dir),
        max_steps=schedule.steps,
        per_device_train_batch_size=schedule.micro_batch_size,
        gradient_accumulation_steps=schedule.accumulation,
        learning_rate=train.learning_rate,
        adam_beta1=train.adam_beta1,
        adam_beta2=train.adam_beta2,
        weight_decay=train.weight_decay,
        max_grad_norm=train.max_grad_norm,
        bf16=train.mixed_precision == "bf16",
        seed=seed,
        use_cpu=not on_gpu,
        ddp_backend=("nccl" if on_gpu else "gloo") if world_size() > 1 else None,
        dataloader_num_workers=0,
        dataloader_pin_memory=on_gpu,
        train_sampling_strategy="sequential",
        remove_unused_columns=False,
        save_strategy="no",
        logging_steps=1,
        logging_nan_inf_filter=False,
        report_to="none",
        ddp_timeout=round(runtime.timeout_minutes * 60),
        disable_tqdm=True,
        log_level="warning",
        **sharding_arguments(runtime),
    )
    if arguments.n_gpu > 1:
        arguments._n_gpu = 1  # one process drives one GPU; never DataParallel
    _adapt_accelerate(arguments, runtime)
    return arguments


def _adapt_accelerate(arguments: TrainingArguments, runtime: Runtime) -> None:
    """What accelerate does otherwise: bf16 sums under FSDP, and no sharding over CPU processes."""
    if runtime.sharding == "fsdp":
        if arguments.bf16:
            # No output_dtype: it would apply to every layer, whose inputs are what gradient
            # checkpointing keeps. The loss is computed in float32 as it is.
            arguments.fsdp_plugin_args["mixed_precision_policy"] = MixedPrecisionPolicy(
                param_dtype=torch.bfloat16, reduce_dtype=torch.float32
            )
        if arguments.use_cpu:  # only the type of device is checked; gloo does what is needed
            arguments.distributed_state.distributed_type = DistributedType.MULTI_GPU
    if runtime.sharding == "deepspeed" and arguments.use_cpu:
        import deepspeed

        warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
        # Its shared-memory collectives would be compiled first; a compiler that was killed leaves a
        # lock behind on which every later run waits for ever. gloo needs none of it.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        deepspeed.init_distributed(
            dist_backend="gloo", auto_mpi_discovery=False, timeout=arguments.ddp_timeout_delta
        )
        arguments.distributed_state.distributed_type = DistributedType.DEEPSPEED


class PretrainingTrainer(Trainer):
    """Trains over a `Schedule`, writing restart points and checkpoints below `work_dir`.

    Every process runs one; only the first has a `metrics_log` and writes shared files.
    """

    def __init__(
        self,
        *args: Any,
        schedule: Schedule,
        runtime: Runtime,
        restarts: RestartPoints,
        checkpoint_writer: CheckpointWriter,
        metrics_log: MetricsLog | None,
        read_weights: Callable[[], dict[str, torch.Tensor]],
        train: TrainConfig,
        needles: NeedleWatch | None = None,
        distillation: TeacherLoss | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.schedule = schedule
        self.runtime = runtime
        self._restarts = restarts
        self.read_weights = read_weights
        self._checkpoint_writer = checkpoint_writer
        self.metrics_log = metrics_log
        self._train_config = train
        self._spikes = SpikeRule(train, schedule.steps)
        self._fault: str | None = None  # of the step under way
        self._distillation = distillation
        self._needles = needles
        self._needle_score: float | None = None
        self._stopwatch = Stopwatch()
        self._flops = step_flops(self.model.config, schedule, distilled=distillation is not None)
        self._peak_flops = peak_flops(self.args.world_size)
        for callback in (PrinterCallback, ProgressCallback):
            self.remove_callback(callback)
        self.timer = RestartTimer(runtime, self.args.device)
        self.decision = Decision(restart_point=False, stop=False)
        self.add_callback(_EndOfStep(self))

    def create_scheduler(
        self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None
    ) -> torch.optim.lr_scheduler.LRScheduler:
        self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(
            optimizer or self.optimizer, self.schedule.learning_rate_factor
        )
        self._created_lr_scheduler = True
        return self.lr_scheduler

    def train(self, resume_from_checkpoint: str | None = None, **kwargs: Any) -> Any:
        if resume_from_checkpoint is not None:
            with self._restarts.loading(Path(resume_from_checkpoint)):
                TrainerState.load_from_json(str(Path(resume_from_checkpoint) / TRAINER_STATE_NAME))
        return super().train(resume_from_checkpoint=resume_from_checkpoint, **kwargs)

    def _prepare_for_training(
        self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: str | None
    ) -> Any:
        if self.is_fsdp_enabled:
            weights = self.read_weights()
            if weights:
                weights |= first_adapters(self.model, self.args.seed)
            shard_and_fill(self.accelerator, self.model, weights, saved_name)
        if self._distillation is not None and self.is_fsdp_enabled:
            teacher = self._distillation.teacher
            shard_teacher(teacher, self.read_weights(), self.args.device)
        # What DeepSpeed's engine reads, the Trainer would read here without a word of ours.
        later = resume_from_checkpoint if self.is_deepspeed_enabled else None
        prepared = super()._prepare_for_training(
            max_steps, train_dataloader, None if later else resume_from_checkpoint
        )
        check_sharding_runs(prepared[0], self.runtime)
        if later is not None:
            with self._restarts.loading(Path(later)):
                deepspeed_load_checkpoint(
                    prepared[0], later, load_module_strict=not self._train_config.lora
                )
            self._load_optimizer_and_scheduler(later)
        return prepared

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: torch.device) -> int | None:
        # As a Python number, since FSDP would round a tensor argument to bf16.
        count = super()._get_num_items_in_batch(batch_samples, device)
        return None if count is None else int(count)

    def floating_point_ops(self, inputs: dict[str, Any]) -> int:
        return 0  # unused here, and the count costs a walk over all parameters per forward pass

    def _inner_training_loop(self, *args: Any, **kwargs: Any) -> Any:
        self._stopwatch.read()  # loading the model is no part of the first step
        return super()._inner_training_loop(*args, **kwargs)

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        with self._stopwatch.timed("data"):
            return super().get_batch_samples(*args, **kwargs)

    def _get_grad_norm(self, model: torch.nn.Module, grad_norm: Any = None) -> float:
        """Gradient norm of the step; where it is that of a bad step to be skipped, no gradients.

        Without gradients the optimizer changes neither weights nor its own state.
        """
        norm = super()._get_grad_norm(model, grad_norm=grad_norm)
        norm = float(norm.full_tensor() if isinstance(norm, DTensor) else norm)
        if not self._spikes.state:
            self._spikes.restore(self.state.log_history)
        self._fault = self._spikes.fault(norm)
        self.state.log_history = self._spikes.state
        if self._fault is not None and self._train_config.bad_steps == "skip":
            for parameter in model.parameters():
                parameter.grad = None
        return norm

    def watch_needles(self, step: int) -> None:
        """Score the samples if it is time; called on every process."""
        if self._needles is not None and self._needles.is_due(step, self.schedule.steps):
            with self._stopwatch.timed("needles"):
                self._needle_score = self._needles.score(self.model_wrapped, self.args.device)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Record a step; every process gets the same numbers.

        Raises:
            RunError: the step is a bad one, by train.spike_factor or since its loss or gradient
                norm is no longer a finite number, and is not skipped; or too many are.
        """
        if "loss" not in logs:
            return
        step = self.state.global_step
        skipped = self._fault is not None and self._train_config.bad_steps == "skip"
        fault = self._fault
        if not math.isfinite(logs["loss"]):
            fault = f"loss is {logs['loss']}"
        if fault is not None and not skipped:
            raise RunError(
                f"training diverged: {fault} at step {step} "
                f"({step * self.schedule.batch_tokens:,} tokens); "
                "a lower train.learning_rate or a longer train.warmup_ratio may help"
            )
        too_many = self._spikes.too_many() if skipped else None
        if too_many is not None:
            raise RunError(
                f"training diverged: {too_many} left out as bad (train.bad_steps = skip), the last "
                f"one step {step} of {self.schedule.steps} ({fault}); look for the first of them "
                f"in {METRICS}; a lower train.learning_rate or a longer train.warmup_ratio may help"
            )
        if skipped:  # else a NaN would stay in the sum that the Trainer keeps
            self._tr_loss = torch.zeros_like(self._tr_loss)
        seconds, spent = self._stopwatch.read()
        if self.metrics_log is None:
            return
        if skipped:
            logger.warning("step %d is left out: %s", step, fault)
        checkpoints = spent.get("checkpoint", 0.0)
        seconds = max(seconds - checkpoints - spent.get("needles", 0.0), 1e-9)
        speed = Speed(
            tokens_per_second=round(self.schedule.batch_tokens / seconds, 1),
            mfu=self._flops / seconds / self._peak_flops if self._peak_flops else None,
            memory=peak_memory(),
            data_seconds=round(spent.get("data", 0.0), 3),
            checkpoint_seconds=round(checkpoints, 3),
        )
        with disk_errors(METRICS, self._restarts.directory.parent):
            self.metrics_log.write(
                step, logs["loss"], logs["learning_rate"], float(logs["grad_norm"]),
                skipped=skipped, needle_score=self._needle_score, speed=speed,
            )  # fmt: skip
        self._needle_score = None

    def _save_checkpoint(self, model: torch.nn.Module, trial: Any) -> None:
        patience = collectives_within(
            self.runtime.timeout_minutes, afterwards=self.runtime.collective_timeout_minutes
        )
        with self._stopwatch.timed("checkpoint"), patience:
            self._save(model, trial)

    def _save(self, model: torch.nn.Module, trial: Any) -> None:
        """Write the checkpoints of this step, then, if one is due, the restart point.

        In this order a run killed in between takes the step again and rewrites both. Two restart
        points are on disk until the new one is complete.
        """
        step = self.state.global_step
        for tokens, at_step in self.schedule.checkpoint_steps.items():
            if at_step == step:
                averaged = self._averaged_with(tokens) if step == self.schedule.steps else []
                self.write_checkpoint(tokens, averaged)
                with disk_errors("a checkpoint's record", self._restarts.directory.parent):
                    self._restarts.record_checkpoint(tokens)
        if not self.decision.restart_point or step == self.schedule.steps:
            return
        if self.args.should_save:
            self._restarts.make_room()
        with disk_errors("a restart point", self._restarts.directory):
            super()._save_checkpoint(model, trial)
            written = self._restarts.writing / f"checkpoint-{step}"
            self._restarts.publish(written, step, layout(self.runtime))

    def write_checkpoint(self, tokens: int, averaged: list[int]) -> None:
        """Write `tokens-<tokens>`, averaged with those of the token counts `averaged`."""
        model = self.accelerator.unwrap_model(self.model)
        # DeepSpeed keeps small parameters whole between steps, and expects so after this.
        sharded = self.model_wrapped.optimizer if self.is_deepspeed_enabled else None
        if sharded is not None:
            sharded.checkpoint_event_prologue()
        self._checkpoint_writer.write(tokens, model, averaged, self._train_config.lora)
        if sharded is not None:
            sharded.checkpoint_event_epilogue()

    def _averaged_with(self, tokens: int) -> list[int]:
        """Token counts of the checkpoints with which the final one, of `tokens`, is averaged."""
        count = (self._train_config.averaged_checkpoints or 1) - 1
        earlier = sorted(n for n in self.schedule.checkpoint_steps if n < tokens)
        return earlier[len(earlier) - count :] if count else []

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Weights of a restart point, in float32 and under the module's own names.

        FSDP and DeepSpeed write their shards together with the optimiser's.
        """
        if self.is_fsdp_enabled or self.is_deepspeed_enabled or not self.args.should_save:
            return
        assert output_dir is not None
        Path(output_dir).mkdir(parents=True, exist_ok=True)
        save_model(self.model, str(Path(output_dir) / _WEIGHTS))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        with self._restarts.loading(Path(resume_from_checkpoint)):
            if self.is_fsdp_enabled:
                super()._load_from_checkpoint(resume_from_checkpoint, model)
            else:
                load_model(self.model, str(Path(resume_from_checkpoint) / _WEIGHTS), strict=True)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        with self._restarts.loading(Path(checkpoint or "")):
            super()._load_optimizer_and_scheduler(checkpoint)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        with self._restarts.loading(Path(checkpoint or "")):
            super()._load_rng_state(checkpoint)


class _EndOfStep(TrainerCallback):  # type: ignore[misc]
    """Has the Trainer save what is due, and stop where it was asked to."""

    def __init__(self, trainer: PretrainingTrainer) -> None:
        self._trainer = trainer
        self._running = False

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        step = state.global_step
        if not self._running:
            # From the first step on no process loads or compiles while the others wait.
            limit_collectives(self._trainer.runtime.collective_timeout_minutes)
            self._running = True
        self._trainer.watch_needles(step)
        checkpoints = self._trainer.schedule.checkpoint_steps.values()
        decision = self._trainer.decision = self._trainer.timer.decide(step)
        control.should_save = decision.restart_point or step in checkpoints
        control.should_training_stop |= decision.stop
