"""The training loop: data, forward, backward, clip, step, log, save.

accelerate's `Accelerator` spreads the model over the processes (`parallel.py`); the rest of a step
is here.
"""

from __future__ import annotations

import logging
import math
import signal
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from accelerate import Accelerator
from torch import Tensor
from torch.autograd.graph import save_on_cpu
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerAction, profile, tensorboard_trace_handler
from torch.profiler import schedule as profiler_schedule

from bosch.errors import RunError
from bosch.hybrid import layouts_of
from bosch.ranks import limit_collectives
from bosch.this_process import STOP_SIGNALS
from stages.context import Runtime
from stages.formats import format_bytes
from stages.published import TENSORBOARD
from stages.train.answers import Answers
from stages.train.checkpoint import CheckpointWriter
from stages.train.data import Batch, Collate, PackedSequences
from stages.train.loss import IGNORED
from stages.train.metrics import MetricsLog, Stopwatch, peak_flops, peak_memory
from stages.train.parallel import sharding_layout
from stages.train.schedule import Schedule
from stages.train.stage import METRICS, TrainConfig
from stages.train.storage import RestartPoints, disk_errors, loading, restart_step

logger = logging.getLogger(__name__)

_ADVICE = "a lower train.learning_rate or a longer train.warmup_ratio may help"


@dataclass
class Loop:
    """Trains by a `Schedule`, and writes restart points and checkpoints; every process has one.

    `model` and `optimizer` are prepared by the accelerator. Only the first process has a
    `metrics_log`. `step` counts from 1: the current step or, between steps, the last one.
    """

    accelerator: Accelerator
    model: Any
    optimizer: Any
    data: PackedSequences
    collate: Collate
    schedule: Schedule
    train: TrainConfig
    runtime: Runtime
    seed: int
    restarts: RestartPoints
    checkpoint_writer: CheckpointWriter
    metrics_log: MetricsLog | None
    answers: Answers | None
    flops: float  # of a step
    planned_memory: float  # bytes of this process at the peak, as `plan` computes them
    step: int = 0

    def __post_init__(self) -> None:
        self.timer = RestartTimer(self.runtime, self.accelerator.device)
        self.stopwatch = Stopwatch()
        self._peak_flops = peak_flops(self.accelerator.num_processes)

    def run(self) -> None:
        """Take the remaining steps, or those until a signal stops training."""
        first, stop = self.step + 1, False
        self.model.train()
        self.stopwatch.read()  # loading is not part of the first step
        if self.metrics_log is not None:
            self.metrics_log.begin()
        self._make_moments()
        profiler = self.profiler(first)
        profiler.start()
        while self.step < self.schedule.steps and not stop:
            self.step += 1
            self.start_step()
            batches, predicted = self.read()
            loss = self.forward_backward(batches, predicted)
            norm = self.clip()
            self.update(loss, norm)
            limit_collectives(self.runtime.collective_timeout_minutes)  # all have compiled now
            is_due, stop = self.timer.decide(self.step)
            self.log(loss, norm, self.score())
            self.save(is_due)
            profiler.step()
            if self.step == first + 1 and self.metrics_log is not None:
                logger.info(
                    "peak memory in two steps: %s (on a CPU of the whole process), planned: %s",
                    format_bytes(peak_memory()), format_bytes(self.planned_memory),
                )  # fmt: skip
        profiler.stop()
        self.restarts.wait()

    def profiler(self, first: int) -> Any:
        """torch's profiler for runtime.profile_steps, when step `first` is the next one."""
        begin, end = self.runtime.profile_steps or (0, 0)
        if begin < first:
            return profile(schedule=lambda number: ProfilerAction.NONE)
        folder = self.restarts.directory.parent / TENSORBOARD
        rank = f"rank-{self.accelerator.process_index}"
        wait = begin - first
        return profile(
            schedule=profiler_schedule(wait=wait, warmup=0, active=end - begin + 1, repeat=1),
            on_trace_ready=tensorboard_trace_handler(str(folder), rank, use_gzip=True),
        )

    def start_step(self) -> None:
        """Set learning rate and random seed, which are not in restart points.

        They depend on the step's number only, the seed also on the process.
        """
        for group in self.optimizer.param_groups:
            group["lr"] = self.learning_rate
        entropy = [self.seed, self.step, self.accelerator.process_index]
        torch.manual_seed(int(np.random.SeedSequence(entropy).generate_state(1)[0]))

    @property
    def learning_rate(self) -> float:
        return self.train.learning_rate * self.schedule.learning_rate_factor(self.step - 1)

    def read(self) -> tuple[list[Batch], int]:
        """This process's micro-batches of the step, and the tokens all of them predict together.

        Micro-batches go to the processes in turn, so a step reads the same sequences with any
        number of processes. Processes that share sequences read the same micro-batch.
        """
        schedule, size = self.schedule, self.schedule.micro_batch_size
        sharing = self.runtime.context_parallel
        replicas = self.accelerator.num_processes // sharing
        with self.stopwatch.timed("data"):
            batches = []
            for number in range(schedule.accumulation):
                index = number * replicas + self.accelerator.process_index // sharing
                start = (self.step - 1) * schedule.sequences + index * size
                rows = [self.data[row] for row in range(start, start + size)]
                batch = self.collate(rows)
                device = self.accelerator.device
                batches.append({name: value.to(device) for name, value in batch.items()})
            predicted = sum((batch["labels"][:, 1:] != IGNORED).sum() for batch in batches)
            # A number, since FSDP would round a tensor among the model's inputs to bf16.
            return batches, int(self.accelerator.gather(predicted).sum()) // sharing

    def forward_backward(self, batches: list[Batch], predicted: int) -> float:
        """Add up gradients and return the loss in nats per predicted token.

        DeepSpeed also clips and updates the weights here.
        """
        total = torch.zeros((), device=self.accelerator.device)
        layouts = layouts_of(self.unwrapped)
        # The backward pass divides by the number of processes and, in accelerate, of micro-batches.
        divisor = self.accelerator.num_processes * self.schedule.accumulation
        for batch in batches:
            with self.accelerator.accumulate(self.model):
                with self.offload_activations():
                    loss = self.loss_of(batch, predicted)
                self.accelerator.backward(loss * divisor)
            total += loss.detach()
        # Checkpointing recomputes attention with the current layout, which must not have changed.
        assert layouts_of(self.unwrapped) == layouts, "the layout changed within a step"
        return float(self.accelerator.gather(total).sum())

    def offload_activations(self) -> AbstractContextManager[Any]:
        """With runtime.offload_activations, save tensors for the backward pass in host memory.

        With recomputation these are the inputs of layers. The offloading of transformers pins
        memory, which needs a GPU.
        """
        if not self.runtime.offload_activations:
            return nullcontext()
        return save_on_cpu(pin_memory=self.accelerator.device.type == "cuda")

    def loss_of(self, batch: Batch, predicted: int) -> Tensor:
        """The loss of a micro-batch over the tokens that the whole step predicts."""
        return self.model(**batch, num_items_in_batch=predicted)["loss"]

    def clip(self) -> float:
        """Clip the gradients and return their global norm before clipping."""
        limit = self.train.max_grad_norm
        norm: Any = self.accelerator.clip_grad_norm_(self.model.parameters(), limit)
        return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)

    def update(self, loss: float, norm: float) -> None:
        """Update the weights; raises RunError if the loss or the gradient's norm is not finite."""
        for name, value in (("loss", loss), ("grad_norm", norm)):
            if not math.isfinite(value):
                tokens = self.step * self.schedule.batch_tokens
                raise RunError(
                    f"training diverged: {name} is {value} at step {self.step} ({tokens:,} "
                    f"tokens); {_ADVICE}"
                )
        self.optimizer.step()
        self.optimizer.zero_grad()

    def score(self) -> dict[str, float]:
        """Scores of the search's examples, where they are due."""
        if self.answers is None:
            return {}
        if self.step % self.answers.every and self.step < self.schedule.steps:
            return {}
        with self.stopwatch.timed("answers"):
            return self.answers.score(self.model, self.accelerator.device)

    def log(self, loss: float, norm: float, scores: dict[str, float]) -> None:
        """Write the step's line of the metrics."""
        seconds, by_name = self.stopwatch.read()
        if self.metrics_log is None:
            return
        checkpoints = by_name.get("checkpoint", 0.0)
        seconds = max(seconds - checkpoints - by_name.get("answers", 0.0), 1e-9)
        peak = self._peak_flops  # None if unknown
        with disk_errors(METRICS, self.restarts.directory.parent):
            self.metrics_log.write(
                self.step, loss, norm, learning_rate=self.learning_rate, **scores,
                tokens_per_second=round(self.schedule.batch_tokens / seconds, 1),
                mfu=self.flops / seconds / peak if peak else None,
                memory=peak_memory(),
                data_seconds=round(by_name.get("data", 0.0), 3),
                checkpoint_seconds=round(checkpoints, 3),
            )  # fmt: skip

    def save(self, is_due: bool) -> None:
        """Write the checkpoints of this step, then, if it `is_due`, begin a restart point.

        In this order a run killed in between repeats the step and rewrites both.
        """
        runtime, is_last = self.runtime, self.step == self.schedule.steps
        limit_collectives(runtime.timeout_minutes)
        with self.stopwatch.timed("checkpoint"):
            for tokens, at_step in self.schedule.checkpoint_steps.items():
                if at_step == self.step:
                    self.write_checkpoint(tokens)
            self.restarts.check()
            if is_due and not is_last:
                # Without sharding all processes have the same weights; the first one writes them.
                writes = runtime.sharding != "none" or self.accelerator.is_main_process
                state = self.state() if writes else {}
                self.restarts.save(
                    state, self.step, sharding_layout(runtime), runtime.timeout_minutes
                )
        limit_collectives(runtime.collective_timeout_minutes)

    def write_checkpoint(self, tokens: int) -> None:
        """Write the checkpoint `tokens-<tokens>`."""
        # DeepSpeed keeps small parameters unsharded between steps, and expects this afterwards.
        sharded = self.model.optimizer if self.runtime.sharding == "deepspeed" else None
        if sharded is not None:
            sharded.checkpoint_event_prologue()
        trained = self.step * self.schedule.batch_tokens
        self.checkpoint_writer.write(tokens, self.unwrapped, trained)
        if sharded is not None:
            sharded.checkpoint_event_epilogue()

    @property
    def unwrapped(self) -> Any:
        return self.accelerator.unwrap_model(self.model)

    def state(self) -> dict[str, Any]:
        """The state of a restart point without the step: weights and moments by parameter name.

        With DeepSpeed these are this process's shards, under a key with its rank.
        """
        if self.runtime.sharding == "deepspeed":
            optimizer_state = self.model.optimizer.state_dict()
            adamw_state = optimizer_state["optimizer_state_dict"]
            if not adamw_state["state"]:  # AdamW has none before the first step
                adamw_state["state"] = {
                    number: {
                        "step": torch.zeros((), device=part.device),
                        "exp_avg": torch.zeros_like(part),
                        "exp_avg_sq": torch.zeros_like(part),
                    }
                    for number, part in enumerate(optimizer_state["fp32_flat_groups"])
                }
            return {f"process-{self.accelerator.process_index}": optimizer_state}
        self._make_moments()
        model, optimizer = get_state_dict(self.model, self.optimizer.optimizer)
        return {"model": model, "optimizer": optimizer}

    def _make_moments(self) -> None:
        """Create the moments of every parameter, which loading a restart point expects.

        AdamW has none before the first step, and for parameters without gradient none afterwards.
        """
        moments = self.optimizer.optimizer.state
        if self.runtime.sharding == "deepspeed" or moments:
            return
        get_state_dict(self.model, self.optimizer.optimizer)
        for parameter_state in moments.values():  # undo the step that get_state_dict counted
            parameter_state["step"].zero_()

    def resume(self, point: Path) -> None:
        with loading(point):
            state = self.state()
            dcp.load(state, checkpoint_id=point)
            if self.runtime.sharding == "deepspeed":
                sharded, size = self.model.optimizer, self.accelerator.num_processes
                sharded.checkpoint_event_prologue()
                local_state = state[f"process-{self.accelerator.process_index}"]
                sharded.load_state_dict([local_state] * size)  # it uses the element of this process
                sharded.checkpoint_event_epilogue()
            else:
                set_state_dict(
                    self.model,
                    self.optimizer.optimizer,
                    model_state_dict=state["model"],
                    optim_state_dict=state["optimizer"],
                )
        self.step = restart_step(point)


class RestartTimer:
    """Decides when a restart point is due (steps, minutes), and when a signal stops training."""

    def __init__(self, runtime: Runtime, device: torch.device) -> None:
        self._every = runtime.save_every_steps
        self._seconds = runtime.save_every_minutes * 60
        self._device = device
        self._last = time.monotonic()
        self._signalled = False

    @contextmanager
    def signals(self) -> Iterator[None]:
        """In this block SIGTERM, SIGUSR1 and SIGHUP stop training at the end of a step."""
        before = {number: signal.signal(number, self._receive) for number in STOP_SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _receive(self, number: int, frame: Any) -> None:
        self._signalled = True

    def decide(self, step: int) -> tuple[bool, bool]:
        """Whether a restart point is due at the end of step `step`, and whether training stops.

        All processes call it and get the same answer; a signal to one of them is enough.
        """
        late = time.monotonic() - self._last >= self._seconds
        flags = torch.tensor([late, self._signalled], dtype=torch.int32)
        if dist.is_initialized() and dist.get_world_size() > 1:
            flags = flags.to(self._device)
            dist.all_reduce(flags, op=dist.ReduceOp.MAX)
        late, stop = (bool(flag) for flag in flags.tolist())
        is_due = late or stop or step % self._every == 0
        if is_due:
            self._last = time.monotonic()
        return is_due, stop
