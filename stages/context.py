"""A stage's configuration at run time: its section of the recipe and the shared settings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Generic, Literal, TypeVar

from pydantic import AfterValidator, Field

from bosch.backends import BackendName
from stages.fields import (
    MOST,
    BatchSize,
    Count,
    Flag,
    Line,
    Minutes,
    PathText,
    ProcessesOrAuto,
    Section,
    rising,
)
from stages.inputs import Input, is_hub_name


class ModelConfig(Section):
    """The pretrained model that is made hybrid."""

    path: Annotated[PathText, Input(is_name=lambda _, text, root: is_hub_name(text, root))]
    """Directory of the base model, or its name on the hub."""
    revision: Line | None = None
    """Hub revision; ignored for a directory."""
    dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    """Precision of the model in search and evaluation."""
    trust_remote_code: Flag = False
    """Whether the model's own code may be run."""

    @property
    def loading(self) -> dict[str, Any]:
        """Keyword arguments for `load_model`."""
        return {name: getattr(self, name) for name in ("revision", "dtype", "trust_remote_code")}


class Runtime(Section):
    """Settings that change no results; no stage's key contains them."""

    output_root: Annotated[PathText, Input()] = "runs"
    """Folder of the store and of runs/<recipe name>."""
    attention: BackendName = "auto"
    """Attention backend. auto: sdpa, but in training on a GPU the fastest that is installed and has
    what the model needs; the log says which."""
    hardware: Line | None = None
    """What `bosch plan` plans for, like h100x16; default: this machine's GPUs or cores."""
    processes: ProcessesOrAuto = "auto"
    """Processes per node of a distributed stage: auto is one per GPU, or 1."""
    device_map: Literal["none", "auto"] = "none"
    """auto: search, materialize, original and evaluate run in one process per node, which spreads
    the model's layers over its GPUs; for a model that one GPU does not hold."""
    data_workers: ProcessesOrAuto = "auto"
    """Tokenising processes."""
    micro_batch_size: BatchSize | Literal["auto"] = "auto"
    """Sequences per forward pass and process in training; auto: 1 on a GPU."""
    eval_batch_size: BatchSize = 8
    """Examples per forward pass outside training."""
    sharding: Literal["none", "fsdp", "deepspeed"] = "none"
    """How training shards the model over processes."""
    replicas: Annotated[int, Field(gt=0, le=1024)] = 1
    """Copies of the model, each of which fsdp shards over its part of the processes, adjacent in
    rank (HSDP): the number of nodes, to gather weights within a node only."""
    context_parallel: Annotated[int, Field(gt=0, le=1024)] = 1
    """Processes that share each sequence in training: full heads gather all its keys and values,
    sliding heads only those within their windows."""
    checkpointing: Literal["auto", "none", "attention", "full"] = "auto"
    """What training recomputes instead of keeping it: nothing, all of a layer except the outputs of
    its attention kernels, or all of it. auto is full, or none where that takes at most 60 % of the
    device by formula."""
    offload_activations: Flag = False
    """Keep the layers' inputs in host memory between forward and backward pass."""
    profile_steps: (
        Annotated[list[Count], Field(min_length=2, max_length=2), AfterValidator(rising)] | None
    ) = None
    """First and last step that torch's profiler records, beside tensorboard's figures."""
    save_every_steps: int = Field(100, gt=0, le=MOST)
    """Steps between the restart points of training."""
    save_every_minutes: Minutes = 30
    """Minutes after which training writes a restart point at the next step's end."""
    answers_every_steps: Count | None = None
    """Steps of training between scores of the search's examples: the share of answers that the
    hybrid generates as the original does, and their log-likelihood; default: none."""
    timeout_minutes: Minutes = 360
    """Longest wait of a process for separate work of other processes, and of other nodes for a
    stage of the first one: loading, saving, samples of the evaluation."""
    collective_timeout_minutes: Minutes = 15
    """Longest wait for other processes in a step of training or a pass of the search, which all do
    together; then a process counts as lost."""
    log_level: Literal["debug", "info", "warning"] = "info"
    """Lowest severity that is logged."""

    def place(self, device: Any) -> Any:
        """Where a stage that does not train loads its model: `device`, or all GPUs."""
        return device if self.device_map == "none" else self.device_map


AnySection = TypeVar("AnySection", bound=Section)
OwnSection = TypeVar("OwnSection", bound=Section, covariant=True)


@dataclass(frozen=True)
class StageConfig(Generic[OwnSection]):
    """Resolved configuration of one stage.

    `section` is the stage's section of the recipe; `upstream` holds the sections of the stages it
    depends on, by recipe key. `runtime` is not part of the stage's key.
    """

    section: OwnSection
    model: ModelConfig
    seed: int
    runtime: Runtime
    upstream: Mapping[str, Section] = field(default_factory=dict)

    def upstream_section(self, kind: type[AnySection]) -> AnySection:
        """The upstream section of type `kind`; raises StopIteration if there is none."""
        return next(section for section in self.upstream.values() if isinstance(section, kind))
