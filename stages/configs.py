"""Typed configuration of every stage: what a recipe may say, with its defaults and its limits.

The types check each field by itself; what must hold between fields stands in pipeline/checks.py.

Nothing here imports torch, so that `python -m pipeline status` stays instant. Everything in these
sections changes results and is part of the stage's key; what does not stands in `Runtime`.
"""

from __future__ import annotations

import re
from typing import Annotated, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

# Lengths and batches are powers of two (32k = 32,768; a 2M-token batch = 64 x 32,768), token
# budgets are decimal (2.5B = 2,500,000,000): the paper counts both ways, and with both 2.5B tokens
# in batches of 2M are 1,192 steps.
_SUFFIX = {"k": 1024, "m": 1024**2, "b": 10**9}
_FILE_SIZE = re.compile(r"^\s*([0-9]+(?:\.[0-9]+)?)\s*[KMGTkmgt][bB]\s*$")
_Value = TypeVar("_Value", int, float)
_COUNT = re.compile(r"^\s*([0-9][0-9_,]*(?:\.[0-9]+)?)\s*([kKmMbB]?)\s*$")


def parse_count(value: object) -> object:
    """An integer from 32768, "32k", "2M" or "2.5B"; what is no string is left to pydantic."""
    if isinstance(value, bool):
        raise ValueError(f"expected a whole number, found {str(value).lower()}")
    if not isinstance(value, str):
        return value
    match = _COUNT.match(value)
    if not match:
        raise ValueError(f"'{value}' is not a count: write an integer, or one like 32k, 2M, 2.5B")
    number = float(match[1].replace("_", "").replace(",", ""))
    number *= _SUFFIX[match[2].lower()] if match[2] else 1
    if abs(number - round(number)) > 1e-6:
        raise ValueError(f"'{value}' is not a whole number")
    return round(number)


def parse_number(value: object) -> object:
    """A float that YAML 1.1 read as a string (`1e-5`)."""
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            raise ValueError(f"'{value}' is not a number") from None
    return value


def file_size(value: str) -> str:
    """A size in bytes as transformers writes it: a number and KB, MB, GB or TB."""
    match = _FILE_SIZE.match(value)
    if not match or not float(match[1]):
        raise ValueError(f"'{value}' is not a file size like 5GB or 500MB")
    return value


def rising(values: list[_Value]) -> list[_Value]:
    """The values, which must rise and not repeat."""
    if values != sorted(set(values)):
        raise ValueError("the values must rise and not repeat")
    return values


Count = Annotated[int, BeforeValidator(parse_count), Field(gt=0)]
CountOrAuto = Annotated[int, Field(gt=0)] | Literal["auto"]
Number = Annotated[float, BeforeValidator(parse_number)]
Ratio = Annotated[float, BeforeValidator(parse_number), Field(ge=0, le=1)]

NeedleTask = Literal[
    "niah_single_1",
    "niah_single_2",
    "niah_single_3",
    "niah_multikey_1",
    "niah_multikey_2",
    "niah_multikey_3",
]


class Section(BaseModel):
    """A part of a recipe: unknown keys are refused, values do not change after loading."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class ModelConfig(Section):
    """The pretrained model that is made hybrid."""

    path: str = Field(description="Directory of the base model, or its name on the hub.")
    revision: str | None = Field(None, description="Hub revision; ignored for a directory.")
    dtype: Literal["float32", "bfloat16", "float16"] = Field(
        "bfloat16", description="Precision of the model in search and evaluation."
    )
    trust_remote_code: bool = Field(
        False, description="Whether code that comes with the model may be run."
    )


class SourceConfig(Section):
    """One source of training documents."""

    name: str = Field(description="Name in statistics and logs.")
    kind: Literal["text", "jsonl", "parquet", "mds", "python_docs", "retrieval"] = Field(
        description=(
            "text, jsonl, parquet, mds: files below `path`. python_docs: the standard library's "
            "source and pydoc's topics. retrieval: synthetic key-value and needle documents."
        )
    )
    path: str | None = Field(None, description="File, folder or glob; needed by the file kinds.")
    text_field: str = Field("text", description="Field of a jsonl or parquet record with the text.")
    tokenizer: str | None = Field(
        None, description="mds: tokenizer the shards were written with, to detokenise them."
    )
    weight: Annotated[float, BeforeValidator(parse_number), Field(gt=0)] = Field(
        1.0, description="Share of the training tokens, relative to the other sources."
    )


class CalibrationConfig(Section):
    """The set D on which S(z) is measured (BOSCH 3.3, B.4)."""

    tasks: list[NeedleTask] = Field(
        default=["niah_single_2", "niah_multikey_1"],
        min_length=1,
        description="Needle tasks, in turn.",
    )
    examples: Count = Field(64, description="Number of examples.")
    length: Count = Field(32768, description="Tokens of an example, answer included.")
    questions_per_haystack: Annotated[int, Field(gt=0, le=40)] = Field(
        1, description="Examples that ask about one haystack, computed once for all of them."
    )
    essay_dir: str | None = Field(
        None, description="Folder of prose for essay haystacks; default: pydoc's topics."
    )


class PrepareConfig(Section):
    """Training data and calibration set."""

    sequence_length: Count = Field(32768, description="Tokens of a packed training sequence.")
    train_tokens: Count = Field(description="Tokens to prepare; at least what training reads.")
    sources: list[SourceConfig] = Field(min_length=1, description="Where documents come from.")
    calibration: CalibrationConfig = CalibrationConfig()


class SearchConfig(Section):
    """Which KV heads become sliding-window attention (BOSCH Algorithms 1 to 3)."""

    method: Literal[
        "bosch", "bosch_plus", "b_single", "b_multi", "b_layer",
        "rand", "bme", "intr",
        "dcam", "apl", "proxy", "qada", "razor", "fisher",
    ] = Field(
        "bosch",
        description=(
            "How the head mask is found: bosch searches as published; bosch_plus spends a tenth "
            "of its evaluations, on swaps that gradients propose; b_single, b_multi and b_layer "
            "are bosch's first stage's own masks, by layers, groups of layers and whole layers; "
            "rand, bme and intr choose layers by their place; the others rank the heads once."
        ),
    )  # fmt: skip
    swa_ratio: Ratio = Field(description="Share of KV heads that become sliding (rho).")
    window_size: Count = Field(1024, description="Keys a sliding head sees, itself included (W).")
    sinks: int = Field(0, ge=0, description="First tokens a sliding head always sees besides.")
    solver: Literal["nomad", "nomad_penalty", "one_plus_one"] = Field(
        "nomad",
        description=(
            "Optimiser where a sub-problem is too large for brute force. nomad stays on the budget "
            "by decoding; nomad_penalty sees the penalty of Eq. 5 instead, as published."
        ),
    )
    budget_per_layer: Count = Field(100, description="Evaluations per layer (kappa).")
    alpha: Number = Field(100.0, gt=0, description="Weight of the budget penalty (Eq. 5).")
    gamma: Number = Field(0.2, ge=0, description="Head room of the upper anchor (Eq. 2).")
    buckets: Annotated[list[Ratio], AfterValidator(rising)] = Field(
        default=[0.0, 0.25, 0.5, 0.75, 1.0], min_length=2, description="Ratios a layer can get."
    )
    max_group_variables: Count = Field(50, description="Largest joint sub-problem in stage 3.")
    seed: int | None = Field(
        None, ge=0, lt=2**31, description="Seed of the search alone; default: the recipe's seed."
    )
    tie_break: Literal["none", "log_likelihood"] = Field(
        "none",
        description="Whether masks of equal score are told apart by the answer's log-likelihood.",
    )
    race: bool = Field(
        False,
        description=(
            "Whether bosch ends an evaluation as soon as its mask can no longer win; bosch_plus "
            "always does."
        ),
    )


class MaterializeConfig(Section):
    """The deployable model: weights permuted so that full heads come first."""

    dtype: Literal["float32", "bfloat16", "float16"] = Field(
        "bfloat16", description="Precision of the saved weights."
    )
    max_shard_size: Annotated[str, AfterValidator(file_size)] = Field(
        "5GB", description="Largest safetensors file."
    )


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
    document_masking: bool = Field(
        False, description="Whether attention stops at the documents' borders."
    )
    liger: bool = Field(False, description="Liger kernels (GPU only; refused elsewhere).")


class NeedleEvaluation(Section):
    """RULER needle tasks (spec of NVIDIA/RULER)."""

    tasks: list[NeedleTask] = Field(
        default=[
            "niah_single_1",
            "niah_single_2",
            "niah_single_3",
            "niah_multikey_1",
            "niah_multikey_2",
            "niah_multikey_3",
        ],
        min_length=1,
        description="Needle tasks; the average is their unweighted mean.",
    )
    lengths: list[Count] = Field(
        default=[4096, 8192, 16384, 32768],
        min_length=1,
        description="Tokens of a sample, generated ones included.",
    )
    samples: Count = Field(500, description="Samples per task and length.")
    max_new_tokens: Count = Field(128, description="Tokens generated, counted inside the length.")
    essay_dir: str | None = Field(
        None, description="Folder of prose for essay haystacks; default: pydoc's topics."
    )


class EvaluateConfig(Section):
    """Scores of the original, the untrained hybrid and every checkpoint."""

    needle: NeedleEvaluation | None = NeedleEvaluation()


class ReportConfig(Section):
    """The HTML page."""

    title: str | None = Field(None, description="Heading of the page; default: the recipe's name.")


class Runtime(Section):
    """What does not change results and is no part of any key."""

    output_root: str = Field("runs", description="Folder of the store and of runs/<recipe name>.")
    attention: Literal["auto", "eager", "sdpa", "flex", "flash"] = Field(
        "auto", description="Attention backend; auto is sdpa, flex and flash are to be asked for."
    )
    processes: CountOrAuto = Field(
        "auto", description="Processes per node of a distributed stage: auto is one per GPU, or 1."
    )
    search_parallel: Literal["data", "tensor"] = Field(
        "data",
        description=(
            "How the search uses its processes: data deals batches to them, each with the whole "
            "model; tensor shards one model over the processes of a node."
        ),
    )
    data_workers: CountOrAuto = Field("auto", description="Tokenising processes.")
    micro_batch_size: CountOrAuto = Field(
        "auto", description="Sequences per forward pass and process in training; auto: 1 on a GPU."
    )
    eval_batch_size: int = Field(8, gt=0, description="Examples per forward pass outside training.")
    sharding: Literal["none", "fsdp", "deepspeed"] = Field(
        "none", description="How training shards the model over processes."
    )
    gradient_checkpointing: bool = Field(False, description="Recompute activations in training.")
    save_every_steps: int = Field(
        100, gt=0, description="Steps between the restart points of training."
    )
    log_level: Literal["debug", "info", "warning"] = Field(
        "info", description="Least severity that is logged."
    )
