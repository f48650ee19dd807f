"""Typed configuration of every stage: what a recipe may say, with its defaults and its limits.

The types check each field by itself; what must hold between fields stands in
pipeline/recipe/checks.py.

Nothing here imports torch, so that `python -m pipeline status` stays instant. Everything in these
sections changes results and is part of the stage's key; what does not stands in `Runtime`.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from bosch.search.methods import METHODS, MethodName
from bosch.search.settings import SearchSettings, SolverName
from bosch.window import Window
from data_prep.longbench import TASKS as LONGBENCH
from data_prep.ruler_tasks import NEW_TOKENS
from stages.fields import (
    MOST,
    BatchSize,
    Bytes,
    Count,
    Flag,
    Line,
    Number,
    PathText,
    ProcessesOrAuto,
    Ratio,
    Section,
    different,
    file_size,
    parse_number,
    regular_expression,
    rising,
)

NeedleTask = Literal[
    "niah_single_1",
    "niah_single_2",
    "niah_single_3",
    "niah_multikey_1",
    "niah_multikey_2",
    "niah_multikey_3",
]


RulerTask = Literal[
    NeedleTask, "niah_multivalue", "niah_multiquery", "vt", "cwe", "fwe", "qa_1", "qa_2"
]


def unsearched(names: list[MethodName]) -> list[MethodName]:
    """The methods, which must be layer rules and rankings: they measure no score."""
    for name in names:
        if METHODS[name].kind not in ("layer rule", "ranking"):
            known = ", ".join(n for n in METHODS if METHODS[n].kind in ("layer rule", "ranking"))
            raise ValueError(f"{name} is neither a rule nor a ranking: choose from {known}")
    return names


class ModelConfig(Section):
    """The pretrained model that is made hybrid."""

    path: PathText = Field(description="Directory of the base model, or its name on the hub.")
    revision: Line | None = Field(None, description="Hub revision; ignored for a directory.")
    dtype: Literal["float32", "bfloat16", "float16"] = Field(
        "bfloat16", description="Precision of the model in search and evaluation."
    )
    trust_remote_code: Flag = Field(
        False, description="Whether code that comes with the model may be run."
    )


class FilterConfig(Section):
    """Which documents of a source are used. Bounds include their ends."""

    min_characters: Count | None = Field(None, description="Fewest characters of a document.")
    max_characters: Count | None = Field(None, description="Most characters of a document.")
    min_tokens: Count | None = Field(None, description="Fewest tokens of a document.")
    max_tokens: Count | None = Field(None, description="Most tokens of a document.")
    matches: dict[str, Annotated[str, AfterValidator(regular_expression)]] = Field(
        default={},
        description=(
            "Fields of a record, each with a regular expression (Python's) that its value must "
            "hold; a record without the field is left out."
        ),
    )


class SourceConfig(Section):
    """One source of training documents."""

    name: Line = Field(description="Name in statistics and logs.")
    kind: Literal["text", "jsonl", "parquet", "mds", "huggingface", "python_docs", "retrieval"] = (
        Field(
            description=(
                "text, jsonl, parquet, mds: files below `path`. huggingface: a dataset of the hub, "
                "streamed. python_docs: the standard library's "
                "source and pydoc's topics. retrieval: synthetic key-value and needle documents."
            )
        )
    )
    path: PathText | None = Field(
        None,
        description=(
            "File, folder or glob, needed by the file kinds; huggingface: name on the hub, or a "
            "directory with a dataset's files."
        ),
    )
    text_field: Line = Field("text", description="Field of a record that holds the text.")
    subset: Line | None = Field(None, description="huggingface: the dataset's configuration.")
    split: Line = Field("train", description="huggingface: split to read.")
    revision: Line | None = Field(
        None, description="huggingface: commit of the dataset on the hub, all 40 digits."
    )
    tokenizer: PathText | None = Field(
        None, description="mds: tokenizer the shards were written with, to detokenise them."
    )
    weight: Annotated[float, BeforeValidator(parse_number), Field(gt=0)] = Field(
        1.0, description="Share of the training tokens, relative to the other sources."
    )
    filters: FilterConfig = FilterConfig()


class CalibrationConfig(Section):
    """The set D on which S(z) is measured (BOSCH 3.3, B.4)."""

    tasks: Annotated[list[NeedleTask], AfterValidator(different)] = Field(
        default=["niah_single_2", "niah_multikey_1"],
        min_length=1,
        description="Needle tasks, in turn.",
    )
    examples: Count = Field(64, description="Number of examples.")
    length: Count = Field(32768, description="Tokens of an example, answer included.")
    essay_dir: PathText | None = Field(
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

    method: MethodName = Field(
        "bosch",
        description="How the head mask is found. "
        + "; ".join(f"{name}: {method.about}" for name, method in METHODS.items())
        + ".",
    )
    swa_ratio: Ratio = Field(description="Share of KV heads that become sliding (rho).")
    window_size: Count = Field(1024, description="Keys a sliding head sees, itself included (W).")
    sinks: int = Field(
        0, ge=0, le=MOST, description="First tokens a sliding head always sees besides."
    )
    solver: SolverName = Field(
        SearchSettings.solver,
        description=(
            "Optimiser where a sub-problem is too large for brute force. nomad stays on the budget "
            "by decoding; nomad_penalty sees the penalty of Eq. 5 instead, as published."
        ),
    )
    budget_per_layer: Count = Field(
        SearchSettings.budget_per_layer, description="Evaluations per layer (kappa)."
    )
    alpha: Number = Field(
        SearchSettings.alpha, gt=0, description="Weight of the budget penalty (Eq. 5)."
    )
    gamma: Number = Field(
        SearchSettings.gamma, ge=0, description="Head room of the upper anchor (Eq. 2)."
    )
    buckets: Annotated[list[Ratio], AfterValidator(rising)] = Field(
        default=list(SearchSettings.buckets), min_length=2, description="Ratios a layer can get."
    )
    max_group_variables: Count = Field(
        SearchSettings.max_group_variables, description="Largest joint sub-problem in Algorithm 3."
    )
    seed: int | None = Field(
        None, ge=0, lt=2**31, description="Seed of the search alone; default: the recipe's seed."
    )
    strict: bool = Field(
        SearchSettings.strict,
        description=(
            "Whether bosch and its ablations follow the paper to the letter: ties are broken by "
            "index, and the last phase's mask is the result. By default log-likelihoods break ties "
            "and the best mask on budget that was measured is the result."
        ),
    )
    race: Flag = Field(
        SearchSettings.race,
        description=(
            "Whether bosch ends an evaluation as soon as its mask can no longer win; bosch_plus "
            "always does."
        ),
    )

    mask: PathText | None = Field(
        None, description="File with the head mask that method given takes, see docs/format.md."
    )

    head_granularity: Count = Field(
        SearchSettings.head_granularity,
        description=(
            "The full KV heads of each layer are a multiple of it (g): 2 for a hybrid served on "
            "two tensor-parallel ranks, see docs/serving.md."
        ),
    )

    def settings(self, seed: int) -> SearchSettings:
        """The library's settings, field by field; `seed` counts where the section has none."""
        values = {field.name: getattr(self, field.name) for field in fields(SearchSettings)}
        values["buckets"] = tuple(self.buckets)
        values["seed"] = seed if self.seed is None else self.seed
        return SearchSettings(**values)

    @property
    def window(self) -> Window:
        """Window of the sliding heads."""
        return Window(self.window_size, self.sinks)


class MaterializeConfig(Section):
    """The deployable model: weights permuted so that full heads come first."""

    dtype: Literal["float32", "bfloat16", "float16"] = Field(
        "bfloat16", description="Precision of the saved weights."
    )
    max_shard_size: Annotated[str, AfterValidator(file_size)] = Field(
        "5GB", description="Largest safetensors file."
    )


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


class NeedleEvaluation(Section):
    """RULER (NVIDIA/RULER at commit c3f5e3b)."""

    tasks: Annotated[list[RulerTask], AfterValidator(different)] = Field(
        default=[
            "niah_single_1",
            "niah_single_2",
            "niah_single_3",
            "niah_multikey_1",
            "niah_multikey_2",
            "niah_multikey_3",
        ],
        min_length=1,
        description="Tasks; the average is their unweighted mean.",
    )
    lengths: Annotated[list[Count], AfterValidator(different)] = Field(
        default=[4096, 8192, 16384, 32768],
        min_length=1,
        description="Tokens of a sample, generated ones included.",
    )
    samples: Count = Field(500, description="Samples per task and length.")
    max_new_tokens: Count | None = Field(
        None,
        description="Tokens generated, counted inside the length; default: RULER's for each task.",
    )
    yarn: dict[Count, Annotated[float, BeforeValidator(parse_number), Field(gt=1, le=1024)]] = (
        Field(
            default={},
            description=(
                "Lengths at which RoPE is stretched by YaRN, each with its factor, like "
                "{64k: 2, 128k: 4}; for all models, in evaluation alone."
            ),
        )
    )
    essay_dir: PathText | None = Field(
        None, description="Folder of prose for essay haystacks; default: pydoc's topics."
    )
    data_dir: PathText | None = Field(
        None,
        description=(
            "Folder with the files that RULER downloads: squad.json (qa_1), hotpotqa.json (qa_2), "
            "english_words.json (cwe, where a length needs more words than there are)."
        ),
    )

    def new_tokens(self, task: str) -> int:
        """Tokens that a model may generate in a task."""
        return NEW_TOKENS[task] if self.max_new_tokens is None else self.max_new_tokens

    def yarn_factor(self, length: int) -> float | None:
        """Factor by which RoPE is stretched at this length."""
        return self.yarn.get(length)


class HarnessEvaluation(Section):
    """Tasks of lm-evaluation-harness (the extra eval): LongBench v1, GSM8K and many others."""

    tasks: Annotated[list[Line], AfterValidator(different)] = Field(
        min_length=1,
        description=(
            "Names of tasks, groups and tags as lm-eval has them, like gsm8k, mmlu, hellaswag; "
            "longbench stands for the 21 tasks of LongBench v1."
        ),
    )
    data_dir: PathText | None = Field(
        None,
        description=(
            "Folder with local data: longbench/<task>.jsonl, and <task>/<split>.jsonl for others, "
            "also for each task of a group (mmlu_anatomy/test.jsonl)."
        ),
    )
    hub: Flag = Field(
        True, description="Whether data that data_dir does not hold is fetched from the hub."
    )
    samples: Count | None = Field(
        None, description="Documents per task, from its first on; default: all."
    )
    num_fewshot: int | None = Field(
        None, ge=0, le=1000, description="Worked examples in a prompt; default: the task's own."
    )
    max_length: Count = Field(
        31500,
        description="LongBench: tokens of a prompt, of which the first and last half are kept.",
    )

    @property
    def task_names(self) -> list[str]:
        """The tasks, LongBench's one by one."""
        every = {"longbench": [f"longbench_{task}" for task in LONGBENCH]}
        return list(dict.fromkeys(one for name in self.tasks for one in every.get(name, [name])))


class PositionEvaluation(Section):
    """Loss by position in held-out long documents."""

    length: Count = Field(32768, ge=2, description="Tokens of a document that are read.")
    documents: Count = Field(32, description="Documents, the first that are long enough.")
    path: PathText | None = Field(
        None,
        description=(
            "Folder of .txt or .md files that are no training data; default: the source files of "
            "transformers' models, the longest first."
        ),
    )


class EvaluateConfig(Section):
    """Scores of the original, the untrained hybrid and every checkpoint."""

    needle: NeedleEvaluation | None = NeedleEvaluation()
    harness: HarnessEvaluation | None = None
    positions: PositionEvaluation | None = None
    rivals: Annotated[list[MethodName], AfterValidator(different), AfterValidator(unsearched)] = (
        Field(
            default=[],
            description=(
                "Layer rules and rankings to compare the search with: their untrained hybrids, at "
                "its ratio and window, answer the same samples."
            ),
        )
    )

    windows: Annotated[list[Count], AfterValidator(different)] = Field(
        default=[],
        description=(
            "Window sizes at which the search's mask and those of the rivals are scored too, "
            "untrained, like [256, 512, 2k, 4k]; the search's own is the hybrid's."
        ),
    )

    @property
    def suites(self) -> dict[str, Section | None]:
        """The sections of the suites by name, None where the recipe leaves one out."""
        return {"needle": self.needle, "harness": self.harness, "positions": self.positions}


class ReportConfig(Section):
    """The HTML page."""

    title: Line | None = Field(None, description="Heading of the page; default: the recipe's name.")
    gpu_hour_price: Number | None = Field(
        None,
        ge=0,
        description="Price of an hour of one GPU, to state costs; default: GPU hours alone.",
    )
    currency: Line = Field("USD", description="What the price is in.")


class Runtime(Section):
    """What does not change results and is no part of any key."""

    output_root: PathText = Field(
        "runs", description="Folder of the store and of runs/<recipe name>."
    )
    attention: Literal["auto", "eager", "sdpa", "flex", "flash", "varlen"] = Field(
        "auto",
        description=(
            "Attention backend. auto: sdpa, but in training on a GPU the first of flash "
            "(flash-attn), varlen (torch's own) and flex that is installed and has what the model "
            "needs; the log says which."
        ),
    )
    processes: ProcessesOrAuto = Field(
        "auto", description="Processes per node of a distributed stage: auto is one per GPU, or 1."
    )
    search_parallel: Literal["data", "tensor"] = Field(
        "data",
        description=(
            "How the search uses its processes: data deals batches to them, each with the whole "
            "model; tensor shards one model over the processes of a node."
        ),
    )
    reuse_memory: Literal["auto"] | Bytes = Field(
        "auto",
        description=(
            "Memory per process for what the passes of a search leave to later ones, like 40GB; "
            "auto is what is free beside a pass."
        ),
    )
    data_workers: ProcessesOrAuto = Field("auto", description="Tokenising processes.")
    micro_batch_size: BatchSize | Literal["auto"] = Field(
        "auto", description="Sequences per forward pass and process in training; auto: 1 on a GPU."
    )
    eval_batch_size: BatchSize = Field(8, description="Examples per forward pass outside training.")
    sharding: Literal["none", "fsdp", "deepspeed"] = Field(
        "none", description="How training shards the model over processes."
    )
    gradient_checkpointing: Flag = Field(False, description="Recompute activations in training.")
    save_every_steps: int = Field(
        100, gt=0, le=MOST, description="Steps between the restart points of training."
    )
    save_every_minutes: Number = Field(
        30,
        gt=0,
        description="Minutes after which training writes a restart point at the next step's end.",
    )
    needle_every_steps: Count | None = Field(
        None,
        description=(
            "Steps of training between needle scores on a few samples of prepare.calibration's "
            "tasks and length, made for this alone; default: none."
        ),
    )
    needle_samples: Annotated[int, Field(gt=0, le=10_000)] = Field(
        16, description="Samples of such a score: the share whose answer tokens are all right."
    )
    wandb_project: Line | None = Field(
        None, description="Project at Weights & Biases to which training sends its metrics too."
    )
    timeout_minutes: Number = Field(
        360,
        gt=0,
        description=(
            "Longest wait of a process for work that others do by themselves: loading, saving, "
            "samples of the evaluation."
        ),
    )
    collective_timeout_minutes: Number = Field(
        15,
        gt=0,
        description=(
            "Longest wait of a process for the others in a step of training or a pass of the "
            "search, which all of them do; after it, one that hangs counts as lost."
        ),
    )
    log_level: Literal["debug", "info", "warning"] = Field(
        "info", description="Least severity that is logged."
    )
