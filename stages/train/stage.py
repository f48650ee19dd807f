"""Stage train: continual pretraining of the hybrid."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from bosch.errors import RunError
from bosch.journal import Journal
from bosch.model.families import mixes_documents, split_fault
from stages.context import Runtime
from stages.faults import Fault
from stages.fields import Count, Flag, Number, Ratio, Section, rising
from stages.prepare.stage import PrepareConfig
from stages.published import RUN_AGAIN, Record, WorkSummary
from stages.search.stage import SearchConfig, backend_faults, window_faults
from stages.stage import LoadedRecipe, Stage, position_faults


class TrainConfig(Section):
    """Continual pretraining of the hybrid model (BOSCH B.5)."""

    total_tokens: Count = 2_500_000_000
    """Tokens to train on."""
    batch_tokens: Count = 2 * 1024**2
    """Tokens of one optimiser step."""
    learning_rate: Number = Field(1e-5, gt=0)
    """Peak learning rate."""
    warmup_ratio: Ratio = 0.1
    """Share of steps with rising learning rate."""
    schedule: Literal["cosine", "wsd"] = "cosine"
    """How the learning rate falls after the warm-up: half a cosine; or not at all until the last
    decay_ratio of the steps, in which it falls linearly (warm-up, stable, decay)."""
    decay_ratio: Ratio = 0.1
    """Share of steps with a falling learning rate, with wsd."""
    min_lr_ratio: Ratio = 0.0
    """Final learning rate over the peak."""
    adam_beta1: Number = Field(0.9, ge=0, lt=1)
    """AdamW's decay of the mean."""
    adam_beta2: Number = Field(0.95, ge=0, lt=1)
    """AdamW's decay of the variance."""
    weight_decay: Number = Field(0.1, ge=0)
    """AdamW's decoupled weight decay."""
    max_grad_norm: Number = Field(1.0, gt=0)
    """Gradients are clipped to this norm."""
    checkpoint_tokens: Annotated[list[Count], AfterValidator(rising)] = Field(
        default=[700_000_000, 1_300_000_000, 2_000_000_000, 2_500_000_000]
    )
    """Token counts after which a loadable checkpoint is kept; the end of the run always is."""
    mixed_precision: Literal["no", "bf16"] = "bf16"
    """Autocast precision."""
    document_masking: Flag = False
    """Whether attention stops at the documents' borders."""
    liger: Flag = False
    """Liger's kernels, on a GPU; refused where they are not installed, or leave norms or MLPs of
    the model as they are."""
    teacher: Literal["none", "original"] = "none"
    """Distillation: with original the loss is the KL divergence to the full-attention model of the
    same weights, which is kept in memory too, in place of the cross-entropy."""

    @property
    def optimizer_steps(self) -> int:
        """Optimiser steps: whole batches only (2.5B tokens of 2M make 1,192)."""
        return self.total_tokens // self.batch_tokens

    @property
    def checkpoint_steps(self) -> dict[int, int]:
        """The step at whose end each requested count is reached, always including the last step.

        Counts after the last whole step belong to the last step: 2.5B tokens in steps of 2M end at
        2,499,805,184 (1,192 steps, as in the paper).
        """
        last_step = max(self.optimizer_steps, 1)
        steps = {
            tokens: min((tokens + self.batch_tokens - 1) // self.batch_tokens, last_step)
            for tokens in self.checkpoint_tokens
        }
        if last_step not in steps.values():
            steps[self.total_tokens] = last_step
        return steps

    @property
    def loss_in_words(self) -> str:
        """What the loss in the metrics is; empty for the cross-entropy."""
        return "" if self.teacher == "none" else "KL divergence from the original"


# Families of which Liger 0.8 does not replace all norms and MLPs; of some it depends on the version
# of transformers. Training looks at the model itself.
LEFT_BY_LIGER = (
    "gemma4", "gemma4_text", "gpt_oss", "hunyuan_v1_dense", "hunyuan_v1_moe", "nemotron", "olmo2",
    "olmo3", "qwen3_5_moe", "qwen3_5_moe_text",
)  # fmt: skip

CHECKPOINTS = "checkpoints"
METRICS = "metrics.jsonl"
_CHECKPOINT = re.compile(r"tokens-(\d+)")


def checkpoint_name(tokens: int) -> str:
    """Name of the checkpoint after `tokens` training tokens: of its folder and in scores.json."""
    return f"tokens-{tokens}"


def checkpoint_tokens(name: str) -> int | None:
    """Training tokens of the checkpoint called `name`; None for a name of another form."""
    match = _CHECKPOINT.fullmatch(name)
    return int(match[1]) if match else None


class TrainingSummary(WorkSummary):
    """train/summary.json: totals of a training run; `final_loss` in nats per token."""

    final_loss: float | None
    tokens: int
    steps: int
    seconds: float
    processes: int
    sharding: str
    checkpoints: dict[Annotated[str, Field(pattern=rf"^{_CHECKPOINT.pattern}$")], int]


def checkpoint_folders(train: Path) -> dict[str, Path]:
    """The checkpoints of a finished training by name, in the order of training."""
    names = sorted(
        TrainingSummary.read(train).checkpoints, key=lambda name: checkpoint_tokens(name) or 0
    )
    return {name: train / CHECKPOINTS / name for name in names}


class TrainingStep(Record):
    """A line of train/metrics.jsonl; `tokens` and `seconds` count from the start of training.

    Loss and norm are None if not finite. `tokens_per_second` and `mfu` leave out the
    `checkpoint_seconds` since the step before. `memory`: peak bytes of the first process.
    `answers`: the share of the search's examples that the hybrid answers as the original does,
    with their `answer_log_likelihood` in nats (`runtime.answers_every_steps`).
    """

    step: int
    tokens: int
    loss: float | None
    learning_rate: float
    grad_norm: float | None
    seconds: float
    tokens_per_second: float | None = None
    mfu: float | None = None
    memory: int | None = None
    data_seconds: float | None = None
    checkpoint_seconds: float | None = None
    seconds_left: float | None = None
    answers: float | None = None
    answer_log_likelihood: float | None = None


def read_metrics(train: Path) -> list[TrainingStep]:
    journal = Journal(train / METRICS)
    steps = journal.read_new(TrainingStep.model_validate)
    if journal.damaged or not steps:
        raise RunError(f"{journal.path}: missing or damaged; {RUN_AGAIN}")
    return steps


def _faults(loaded: LoadedRecipe) -> Iterator[Fault]:
    recipe, train = loaded.recipe, loaded.recipe[TrainConfig]
    length = recipe[PrepareConfig].sequence_length
    yield from window_faults(recipe[SearchConfig], "prepare.sequence_length", length)
    yield from position_faults(loaded, "prepare.sequence_length", length)
    yield from _token_faults(loaded, train)
    if recipe.runtime.sharding == "deepspeed":
        yield from _deepspeed_faults(train, recipe.runtime)
    if recipe.runtime.context_parallel > 1:
        yield from _split_faults(loaded)
    yield from _model_faults(loaded, train)
    yield from backend_faults(loaded, _needs(loaded, train))


def batch_faults(
    train: TrainConfig, runtime: Runtime, sequence_length: int, world_size: int
) -> Iterator[Fault]:
    """Faults of batches that do not split evenly over the processes, or exceed the run."""
    sharing = runtime.context_parallel
    if world_size % sharing:
        yield Fault(
            "runtime.context_parallel",
            f"{sharing} does not divide the {world_size} process(es) (runtime.processes)",
        )
        return
    if sharing > 1 and sequence_length % (2 * sharing):
        yield Fault(
            "runtime.context_parallel",
            f"{sharing} processes hold two chunks of a sequence each, and "
            f"prepare.sequence_length = {sequence_length:,} is no multiple of {2 * sharing}",
        )
    uneven = world_size > 1 and world_size % runtime.replicas > 0
    if runtime.replicas > 1 and (runtime.sharding != "fsdp" or sharing > 1 or uneven):
        yield Fault(
            "runtime.replicas",
            f"{runtime.replicas} needs runtime.sharding = fsdp, runtime.context_parallel = 1 and a "
            f"number of processes that it divides, not {world_size}",
        )
    if train.optimizer_steps == 0:
        yield Fault(
            "train.total_tokens",
            f"{train.total_tokens:,} is less than one batch "
            f"(train.batch_tokens = {train.batch_tokens:,})",
        )
    if train.batch_tokens % sequence_length:
        yield Fault(
            "train.batch_tokens",
            f"{train.batch_tokens:,} is no multiple of "
            f"prepare.sequence_length = {sequence_length:,}",
        )
        return
    sequences = train.batch_tokens // sequence_length
    micro = 1 if runtime.micro_batch_size == "auto" else runtime.micro_batch_size
    if sequences % (micro * world_size // sharing):
        shared = f", {sharing} for each sequence" if sharing > 1 else ""
        yield Fault(
            "train.batch_tokens",
            f"a batch of {sequences} sequences cannot be divided into micro batches of {micro} "
            f"(runtime.micro_batch_size) on {world_size} process(es) (runtime.processes){shared}",
        )


def usable_processes(
    train: TrainConfig, runtime: Runtime, sequence_length: int, processes: int, nodes: int = 1
) -> int:
    """The most of each node's `processes` that a batch can be divided over; all if there are none.

    So a batch of one sequence is trained on by one of two processes.
    """
    for count in range(processes, 0, -1):
        if not any(batch_faults(train, runtime, sequence_length, nodes * count)):
            return count
    return processes


def training_processes(loaded: LoadedRecipe) -> int:
    """The number of processes on each node that train."""
    recipe, world = loaded.recipe, loaded.world
    return usable_processes(
        recipe[TrainConfig], recipe.runtime, recipe[PrepareConfig].sequence_length,
        world.processes_per_node, world.nodes,
    )  # fmt: skip


def _token_faults(loaded: LoadedRecipe, train: TrainConfig) -> Iterator[Fault]:
    prepare, runtime = loaded.recipe[PrepareConfig], loaded.recipe.runtime
    size = loaded.world.nodes * training_processes(loaded)
    if size == 1:  # the run is only planned; a real one would fail at its start
        size = runtime.context_parallel
    yield from batch_faults(train, runtime, prepare.sequence_length, size)
    tokens = train.optimizer_steps * train.batch_tokens
    if prepare.train_tokens < tokens:
        yield Fault(
            "prepare.train_tokens",
            f"{prepare.train_tokens:,} is less than the {tokens:,} tokens that training reads "
            "(train.total_tokens in whole batches)",
        )
    if max(train.checkpoint_tokens, default=0) > train.total_tokens:
        yield Fault(
            "train.checkpoint_tokens",
            f"ends at {train.checkpoint_tokens[-1]:,}, after "
            f"train.total_tokens = {train.total_tokens:,}",
        )


def _deepspeed_faults(train: TrainConfig, runtime: Runtime) -> Iterator[Fault]:
    """Settings that DeepSpeed, which holds weights and updates them itself, does not support."""
    unsupported = {
        "train.teacher": train.teacher != "none",
        "runtime.context_parallel": runtime.context_parallel > 1,
    }
    for field, is_set in unsupported.items():
        if is_set:
            yield Fault(
                field, "it does not run under runtime.sharding = deepspeed; set fsdp or none"
            )


def _split_faults(loaded: LoadedRecipe) -> Iterator[Fault]:
    fault = split_fault(loaded.info.loaded) if loaded.info is not None else None
    if fault is not None:
        yield Fault("runtime.context_parallel", f"the model cannot be split: {fault}; set 1")


def _model_faults(loaded: LoadedRecipe, train: TrainConfig) -> Iterator[Fault]:
    """Models whose loss would be another than the recipe asks for."""
    if loaded.info is None:
        return
    if loaded.info.config.get("output_router_logits"):
        yield Fault(
            "model.path",
            "the model's config.json has output_router_logits = true, and training has no loss of "
            "the router; set it to false",
        )
    family = str(loaded.info.config.get("model_type"))
    if train.liger and family in LEFT_BY_LIGER:
        yield Fault("train.liger", f"Liger leaves norms or MLPs of {family} as they are; set false")
    if train.document_masking and mixes_documents(loaded.info.loaded):
        yield Fault(
            "train.document_masking",
            "the model's attention does not stop at documents' borders; set false",
        )


def _needs(loaded: LoadedRecipe, train: TrainConfig) -> dict[str, str]:
    """What training needs of an attention backend, with the reasons."""
    runtime, needs = loaded.recipe.runtime, dict[str, str]()
    if runtime.checkpointing == "attention":
        needs["saved_outputs"] = "runtime.checkpointing = attention saves its outputs"
    if runtime.context_parallel > 1:
        needs["chunks"] = f"runtime.context_parallel = {runtime.context_parallel} splits them"
    if train.mixed_precision == "no":
        needs["float32"] = "train.mixed_precision = no trains in float32"
    if loaded.info is not None and (dropout := loaded.info.config.get("attention_dropout")):
        needs["dropout"] = f"the model's config.json asks for {dropout}"
    return needs


STAGE = Stage(
    "train",
    "stages.train.run:run",
    TrainConfig,
    field=Field(None, description="Continual pretraining; left out, nothing is trained."),
    needs=("prepare", "search", "materialize"),
    # Also checks the evaluation before days of training.
    after=("original",),
    distributed=True,
    processes=training_processes,
    checks=_faults,
    cost="stages.train.cost:cost",
)
