"""Stage train: continual pretraining of the hybrid."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from bosch.errors import RunError
from bosch.journal import Journal
from stages.evaluate.scores import _evaluated_name
from stages.fields import Count, Flag, Number, Ratio, Section, parse_number, rising
from stages.published import _RUN_AGAIN, Record, Summary


class LoraConfig(Section):
    """Adapters of low rank in the place of whole weights (LoRA, arXiv 2106.09685)."""

    rank: Annotated[int, Field(gt=0, le=65536)] = Field(16, description="Rank of an adapter (r).")
    alpha: Number = Field(32, gt=0, description="An adapter's output is scaled by alpha / rank.")


class TrainConfig(Section):
    """Continual pretraining of the hybrid model (BOSCH B.5)."""

    total_tokens: Count = Field(2_500_000_000, description="Tokens to train on.")
    batch_tokens: Count = Field(2 * 1024**2, description="Tokens of one optimiser step.")
    learning_rate: Number = Field(1e-5, gt=0, description="Peak learning rate.")
    warmup_ratio: Ratio = Field(0.1, description="Share of steps with rising learning rate.")
    min_lr_ratio: Ratio = Field(0.0, description="Final learning rate over the peak.")
    adam_beta1: Number = Field(0.9, ge=0, lt=1, description="AdamW's decay of the mean.")
    adam_beta2: Number = Field(0.95, ge=0, lt=1, description="AdamW's decay of the variance.")
    weight_decay: Number = Field(0.1, ge=0, description="AdamW's decoupled weight decay.")
    max_grad_norm: Number = Field(1.0, gt=0, description="Gradients are clipped to this norm.")
    checkpoint_tokens: Annotated[list[Count], AfterValidator(rising)] = Field(
        default=[700_000_000, 1_300_000_000, 2_000_000_000, 2_500_000_000],
        description=(
            "Token counts after which a loadable checkpoint is kept; the end of the run always is."
        ),
    )
    mixed_precision: Literal["no", "bf16"] = Field("bf16", description="Autocast precision.")
    document_masking: Flag = Field(
        False, description="Whether attention stops at the documents' borders."
    )
    liger: Flag = Field(False, description="Liger kernels (GPU only; refused elsewhere).")
    teacher: Literal["none", "original"] = Field(
        "none",
        description=(
            "Distillation: original adds the KL divergence to the full-attention model of the same "
            "weights, which is held in memory beside the hybrid."
        ),
    )
    teacher_weight: Ratio = Field(
        1.0, description="Share of the divergence in the loss; the rest is cross-entropy."
    )
    teacher_tokens: Annotated[float, BeforeValidator(parse_number), Field(gt=0, le=1)] = Field(
        1.0,
        description=(
            "Share of a sequence's tokens, those where the two models differ most, on which the "
            "divergence is taken."
        ),
    )
    freeze: Literal["none", "attention_only"] = Field(
        "none",
        description="What is trained: none is every weight, attention_only attention's alone.",
    )
    lora: LoraConfig | None = Field(
        None,
        description=(
            "Train adapters of the linear maps that `freeze` leaves to training, and no weight "
            "itself; checkpoints hold the sums. Default: train whole weights."
        ),
    )
    bad_steps: Literal["stop", "skip"] = Field(
        "stop",
        description=(
            "What training does at a step whose gradient is not finite or a spike: end with an "
            "error, or leave the step out and say so, at most 4 in a row and 9 of 100."
        ),
    )
    spike_factor: Annotated[float, BeforeValidator(parse_number), Field(gt=1)] | None = Field(
        None,
        description=(
            "How many times the median gradient norm of the last 100 steps makes a spike; default: "
            "only what is not finite is bad."
        ),
    )
    averaged_checkpoints: Annotated[int, Field(gt=1, le=1000)] | None = Field(
        None,
        description=(
            "How many of the last checkpoints the final one is the mean of; default: it holds the "
            "last step's weights."
        ),
    )


CHECKPOINTS = "checkpoints"
METRICS = "metrics.jsonl"
_CHECKPOINT = re.compile(r"tokens-(\d+)")


def checkpoint_name(tokens: int) -> str:
    """Name of the checkpoint after `tokens` training tokens, as folder and in scores.json."""
    return f"tokens-{tokens}"


def checkpoint_tokens(name: str) -> int | None:
    """Training tokens of the checkpoint called `name`; None for a name of another form."""
    match = _CHECKPOINT.fullmatch(name)
    return int(match[1]) if match else None


def checkpoint_folders(train: Path) -> dict[str, Path]:
    """The checkpoints below a train stage's folder by name, in the order of training."""
    folders = [path for path in (train / CHECKPOINTS).iterdir() if checkpoint_tokens(path.name)]
    folders.sort(key=lambda path: checkpoint_tokens(path.name) or 0)
    return {path.name: path for path in folders}


class TrainingSummary(Summary):
    """train/summary.json: totals of a training run; `final_loss` in nats per token."""

    final_loss: float | None
    tokens: int
    steps: int
    seconds: float
    processes: int
    sharding: str
    checkpoints: dict[Annotated[str, AfterValidator(_evaluated_name)], int]


class TrainingStep(Record):
    """A line of train/metrics.jsonl; `tokens` and `seconds` count from the start of training.

    A step that was `skipped` changed no weight; its loss and norm are None where not finite.
    `tokens_per_second` and `mfu` leave out the `checkpoint_seconds` since the step before and the
    time of needle scores. `memory`: most bytes the first process has held.
    """

    step: int
    tokens: int
    loss: float | None
    learning_rate: float
    grad_norm: float | None
    seconds: float
    skipped: bool = False
    tokens_per_second: float | None = None
    mfu: float | None = None
    memory: int | None = None
    data_seconds: float | None = None
    checkpoint_seconds: float | None = None
    needle_score: float | None = None


def read_metrics(train: Path) -> list[TrainingStep]:
    """Every logged training step."""
    journal = Journal(train / METRICS)
    steps = [TrainingStep.check(entry, str(journal.path)) for entry in journal.read_new()]
    if journal.damaged or not steps:
        raise RunError(f"{journal.path}: missing or damaged; {_RUN_AGAIN}")
    return steps
