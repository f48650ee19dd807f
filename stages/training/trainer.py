"""transformers' Trainer, taught this project's schedule, log and files."""

from __future__ import annotations

import math
import shutil
import warnings
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import DistributedType
from safetensors.torch import load_model, save_model
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import PrinterCallback, ProgressCallback

from bosch.errors import RunError
from stages.configs import Runtime, TrainConfig
from stages.model_card import say_trained
from stages.training.metrics import MetricsLog
from stages.training.parallel import check_sharding_runs, sharding_arguments, world_size
from stages.training.schedule import Schedule
from stages.training.storage import (
    RestartPoints,
    check_layout,
    copy_companions,
    disk_errors,
    replace_directory,
)

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
        if arguments.bf16:  # its default also rounds the loss to bf16
            arguments.fsdp_plugin_args["mixed_precision_policy"] = {
                "param_dtype": torch.bfloat16,
                "reduce_dtype": torch.float32,
                "output_dtype": torch.float32,
            }
        if arguments.use_cpu:  # only the type of device is checked; gloo does what is needed
            arguments.distributed_state.distributed_type = DistributedType.MULTI_GPU
    if runtime.sharding == "deepspeed" and arguments.use_cpu:
        import deepspeed

        warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
        # Its shared-memory collectives would be compiled first; a compiler that was killed leaves a
        # lock behind on which every later run waits for ever. gloo needs none of it.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False)
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
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.schedule = schedule
        self.runtime = runtime
        self._restarts = restarts
        self._checkpoint_writer = checkpoint_writer
        self.metrics_log = metrics_log
        for callback in (PrinterCallback, ProgressCallback):
            self.remove_callback(callback)
        self.add_callback(_SaveWhenDue(schedule, runtime.save_every_steps))

    @property
    def layout(self) -> dict[str, object]:
        """What a restart point must share with the run that resumes from it."""
        return {"sharding": self.runtime.sharding, "processes": self.args.world_size}

    def create_scheduler(
        self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None
    ) -> torch.optim.lr_scheduler.LRScheduler:
        self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(
            optimizer or self.optimizer, self.schedule.learning_rate_factor
        )
        self._created_lr_scheduler = True
        return self.lr_scheduler

    def _prepare_for_training(self, *args: Any, **kwargs: Any) -> Any:
        prepared = super()._prepare_for_training(*args, **kwargs)
        check_sharding_runs(prepared[0], self.runtime)
        return prepared

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: torch.device) -> int | None:
        # As a Python number, since FSDP would round a tensor argument to bf16.
        count = super()._get_num_items_in_batch(batch_samples, device)
        return None if count is None else int(count)

    def floating_point_ops(self, inputs: dict[str, Any]) -> int:
        return 0  # unused here, and the count costs a walk over all parameters per forward pass

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Record a step; every process gets the same numbers.

        Raises:
            RunError: loss or gradient norm is no longer a finite number.
        """
        if "loss" not in logs:
            return
        step = self.state.global_step
        for name in ("loss", "grad_norm"):
            if not math.isfinite(logs[name]):
                raise RunError(
                    f"training diverged: {name} is {logs[name]} at step {step} "
                    f"({step * self.schedule.batch_tokens:,} tokens); "
                    "a lower train.learning_rate or a longer train.warmup_ratio may help"
                )
        if self.metrics_log is not None:
            with disk_errors("metrics.jsonl", self._restarts.directory.parent):
                self.metrics_log.write(
                    step, logs["loss"], logs["learning_rate"], float(logs["grad_norm"])
                )

    def _save_checkpoint(self, model: torch.nn.Module, trial: Any) -> None:
        """Write the checkpoints of this step, then, if one is due, the restart point.

        In this order a run killed in between takes the step again and rewrites both.
        """
        step = self.state.global_step
        for tokens, at_step in self.schedule.checkpoint_steps.items():
            if at_step == step:
                self._checkpoint_writer.write(tokens, self._full_state_dict(), self)
        if step % self.runtime.save_every_steps or step == self.schedule.steps:
            return
        with disk_errors("a restart point", self._restarts.directory):
            super()._save_checkpoint(model, trial)
        self.accelerator.wait_for_everyone()
        if self.args.should_save:
            written = self._restarts.writing / f"checkpoint-{step}"
            with disk_errors("a restart point", self._restarts.directory):
                self._restarts.publish(written, step, self.layout)
        self.accelerator.wait_for_everyone()

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
        check_layout(Path(resume_from_checkpoint), self.layout)
        if self.is_fsdp_enabled:
            super()._load_from_checkpoint(resume_from_checkpoint, model)
        else:
            load_model(self.model, str(Path(resume_from_checkpoint) / _WEIGHTS), strict=True)

    def _full_state_dict(self) -> dict[str, torch.Tensor]:
        """All weights on the first process; a collective call when the model is sharded."""
        if self.is_fsdp_enabled or self.is_deepspeed_enabled:
            return self.accelerator.get_state_dict(self.model_wrapped)
        return self.model.state_dict()


class CheckpointWriter:
    """Writes `checkpoints/tokens-<n>`: a directory like the one training started from."""

    def __init__(
        self, work_dir: Path, model_dir: Path, dtype: torch.dtype, max_shard_size: str
    ) -> None:
        self._directory = work_dir / "checkpoints"
        self._model_dir = model_dir
        self._dtype = dtype
        self._max_shard_size = max_shard_size

    def write(self, tokens: int, state: dict[str, torch.Tensor], trainer: Trainer) -> None:
        """Save `state` in the starting model's precision; only the first process writes."""
        if not trainer.args.should_save:
            return
        writing = self._directory / "writing"
        with disk_errors(f"checkpoint tokens-{tokens}", self._directory.parent):
            shutil.rmtree(writing, ignore_errors=True)
            writing.mkdir(parents=True)
            model = trainer.accelerator.unwrap_model(trainer.model)
            saved = {
                name: value.detach().to(self._dtype) if value.is_floating_point() else value
                for name, value in state.items()
                if name not in model.all_tied_weights_keys  # converted apart, they would be two
            }
            model.save_pretrained(writing, state_dict=saved, max_shard_size=self._max_shard_size)
            copy_companions(self._model_dir, writing)
            say_trained(writing, tokens)
            replace_directory(writing, self._directory / f"tokens-{tokens}")


class _SaveWhenDue(TrainerCallback):  # type: ignore[misc]
    def __init__(self, schedule: Schedule, save_every_steps: int) -> None:
        self._checkpoints = set(schedule.checkpoint_steps.values())
        self._every = save_every_steps

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        step = state.global_step
        control.should_save = step % self._every == 0 or step in self._checkpoints
