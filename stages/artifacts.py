"""Published files of every stage: names, shapes, and readers that check them.

prepare/      train/, calibration/, tokenizer/, statistics.json
search/       head_mask.json, evaluations.jsonl, summary.json, tensorboard/, trace_*.svg
materialize/  model/, summary.json
train/        checkpoints/tokens-<n>/, metrics.jsonl, summary.json, tensorboard/
original/     scores.json, samples.jsonl
evaluate/     scores.json, samples.jsonl, rivals/<method>.json
report/       index.html, summary.json

A reader takes the stage's folder and raises RunError, naming file and field, for what is not as
promised; `head_mask.json` is read by bosch.heads.HeadMaskFile. Nothing here imports torch or numpy.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationError

from bosch.errors import RunError
from bosch.files import read_json, size_fault, write_json
from bosch.journal import Journal
from bosch.search.methods import METHODS

if TYPE_CHECKING:
    from typing import Self

logger = logging.getLogger(__name__)

STAGES = ("prepare", "search", "materialize", "original", "train", "evaluate")

PACKED_DATA, CALIBRATION, TOKENIZER = "train", "calibration", "tokenizer"
HEAD_MASK, EVALUATIONS = "head_mask.json", "evaluations.jsonl"
# Plots of a search by the quantity they show.
TRACES = {"score": "trace_score.svg", "log_likelihood": "trace_log_likelihood.svg"}
MODEL, CHECKPOINTS, TENSORBOARD = "model", "checkpoints", "tensorboard"
METRICS, SAMPLES, PAGE = "metrics.jsonl", "samples.jsonl", "index.html"

# Names of the models that are evaluated, beside checkpoint_name(tokens), window_name(size) and
# those of the rivals, which are their methods'.
ORIGINAL, HYBRID = "original", "hybrid"
_RUN_AGAIN = "run its stage again with --force"
_CHECKPOINT = re.compile(r"tokens-(\d+)")
_WINDOW = re.compile(r"(?:(\w+)-)?window-(\d+)")


def checkpoint_name(tokens: int) -> str:
    """Name of the checkpoint after `tokens` training tokens, as folder and in scores.json."""
    return f"tokens-{tokens}"


def checkpoint_tokens(name: str) -> int | None:
    """Training tokens of the checkpoint called `name`; None for a name of another form."""
    match = _CHECKPOINT.fullmatch(name)
    return int(match[1]) if match else None


def window_name(size: int, method: str | None = None) -> str:
    """Name of an untrained hybrid at another window: of the search's mask, or of a rival's."""
    return f"window-{size}" if method is None else f"{method}-window-{size}"


def named_window(name: str) -> tuple[str | None, int] | None:
    """Method (None: the search's) and window of `window_name`; None for a name of another form."""
    match = _WINDOW.fullmatch(name)
    return (match[1], int(match[2])) if match and match[1] in (None, *METHODS) else None


def checkpoint_folders(train: Path) -> dict[str, Path]:
    """The checkpoints below a train stage's folder by name, in the order of training."""
    folders = [path for path in (train / CHECKPOINTS).iterdir() if checkpoint_tokens(path.name)]
    folders.sort(key=lambda path: checkpoint_tokens(path.name) or 0)
    return {path.name: path for path in folders}


def _evaluated_name(name: str) -> str:
    formed = checkpoint_tokens(name) is not None or named_window(name) is not None
    if name not in (ORIGINAL, HYBRID, *METHODS) and not formed:
        raise ValueError(
            f"'{name}' is none of {ORIGINAL}, {HYBRID}, tokens-<n>, window-<n> and the methods"
        )
    return name


class Record(BaseModel):
    """A JSON object that a stage writes; fields beyond the promised ones are kept."""

    model_config = ConfigDict(extra="allow", frozen=True)

    @classmethod
    def check(cls, content: object, place: str) -> Self:
        """The record that `content` is. Raises RunError that names `place` and the field."""
        try:
            return cls.model_validate(content)
        except ValidationError as error:
            fault = error.errors()[0]
            field = "".join(f" {'.'.join(map(str, fault['loc']))}:" for _ in fault["loc"][:1])
            raise RunError(f"{place}:{field} {fault['msg']}; {_RUN_AGAIN}") from None


class Summary(Record):
    """A record that is a file of its own.

    Where a stage writes it last, `sizes` names all files of the work that is finished, with their
    sizes in bytes (`bosch.files.file_sizes`).
    """

    FILE: ClassVar[str] = "summary.json"

    sizes: dict[str, int] = {}

    @classmethod
    def read(cls, folder: Path) -> Self:
        """The record published in a stage's folder."""
        path = folder / cls.FILE
        content = read_json(path)
        if content is None:
            raise RunError(f"{path}: missing or damaged; {_RUN_AGAIN}")
        return cls.check(content, str(path))

    @classmethod
    def finished(cls, folder: Path) -> Self | None:
        """The record of finished work; None, with a warning, where it or a file of it is damaged.

        Also None where there is none yet.
        """
        if not (folder / cls.FILE).exists():
            return None
        try:
            record = cls.read(folder)
            fault = size_fault(folder, record.sizes)
        except RunError:
            fault = f"{cls.FILE} cannot be read"
        if fault is None:
            return record
        logger.warning("%s: damaged (%s); it is made anew", folder, fault)
        return None

    def write(self, folder: Path) -> None:
        """Write the record into a stage's work directory."""
        write_json(folder / self.FILE, self.content)

    @property
    def content(self) -> dict[str, Any]:
        """The record as its file holds it."""
        return self.model_dump(mode="json", exclude_unset=True)


class Manifest(Summary):
    """manifest.json, which the runner writes beside every stage's output.

    `gpus`: GPUs that the stage ran on; None where an older run did not say.
    """

    FILE = "manifest.json"

    key: str
    seconds: float
    created: str | None = None
    git_commit: str | None = None
    python: str | None = None
    processes: int | None = None
    gpus: int | None = None
    packages: dict[str, str] = {}

    @property
    def gpu_hours(self) -> float | None:
        """Hours of the stage times its GPUs; None where these are not known."""
        return None if self.gpus is None else self.seconds * self.gpus / 3600


class Statistics(Summary):
    """prepare/statistics.json: what the training data and the calibration set hold."""

    FILE = "statistics.json"

    documents: int
    tokens: int
    sequences: int
    bytes_per_token: float
    calibration: dict[str, Any]


class LayerImportance(Record):
    """Results of BOSCH Algorithms 1 and 2 for one layer."""

    layer: int
    best_score: float | None = None
    drop: float | None = None
    weight: float | None = None
    ratio: float | None = None


class TracePoint(Record):
    """One evaluation of a search; `is_bound`: it ended early and its values are bounds."""

    step: int
    phase: str
    subproblem: str
    score: float
    log_likelihood: float | None = None
    best_score: float | None = None
    is_bound: bool = False


class Anchors(Record):
    """Scores of the masks with every head sliding and with every head full."""

    all_sliding: float | None = None
    all_full: float | None = None


class SearchSummary(Summary):
    """search/summary.json: scores, path and cost of a search."""

    anchors: Anchors
    best_score: float
    best_log_likelihood: float
    evaluations: int
    model_seconds: float
    solver_seconds: float
    full_forward_equivalents: float
    naive_full_forward_equivalents: float
    gradients: int = 0
    layer_importance: list[LayerImportance]
    trace: list[TracePoint]
    notes: list[str]


class MaterializeSummary(Summary):
    """materialize/summary.json: size of the model and of its key/value cache, in bytes.

    `own_windows` and `state_bytes` are as in `CacheSize`.
    """

    parameters: int
    kv_cache_bytes_per_token_before: int
    kv_cache_bytes_per_token_after: int
    sliding_bytes_constant: int
    own_windows: list[dict[str, int]] = []
    state_bytes: int = 0


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


class Against(Record):
    """A model against the original on the same samples, in points; ends of 95 % intervals.

    `ratio` is the share of the original's score that is left, in percent; None where that is 0.
    `p_value` is that of the two answering equally well.
    """

    difference: float
    difference_low: float
    difference_high: float
    ratio: float | None = None
    ratio_low: float | None = None
    ratio_high: float | None = None
    p_value: float

    @property
    def is_distinguishable(self) -> bool:
        """Whether the samples tell the two models apart, at 5 %."""
        return self.p_value < 0.05


class MeanScore(Record):
    """A score in points of 100 with its 95 % interval, and the comparison with the original."""

    score: float
    low: float
    high: float
    against_original: Against | None = None


class TaskScore(MeanScore):
    """Score of one task at one length."""

    standard_error: float
    samples: int


class GroupScore(MeanScore):
    """Unweighted mean of the tasks of a benchmark that have a score, of all that it has."""

    tasks: list[str]
    of: int


class SuiteScores(Record):
    """Scores of one model in one suite, in points of 100; every other field is a task.

    `low` and `high` are the ends of the average's 95 % interval. `groups` holds averages over some
    of the tasks.
    """

    __pydantic_extra__: dict[str, dict[int, TaskScore]]

    average: float
    low: float | None = None
    high: float | None = None
    standard_error: float | None = None
    against_original: Against | None = None
    by_length: dict[int, MeanScore] = {}
    groups: dict[str, GroupScore] = {}

    @property
    def tasks(self) -> dict[str, dict[int, TaskScore]]:
        """Task by length (0: the task has none)."""
        return self.__pydantic_extra__

    @property
    def samples(self) -> int:
        """Samples of all tasks and lengths."""
        return sum(subtask.samples for by in self.tasks.values() for subtask in by.values())


class BinLoss(Record):
    """Mean over documents in one bin of positions, with its 95 % interval, nats per token."""

    mean: float
    low: float
    high: float


class PositionLoss(Record):
    """Loss by position: bin i is that of tokens `edges[i]` to `edges[i + 1]` (exclusive).

    `difference` is that to the original on the same documents.
    """

    edges: list[int]
    documents: int
    loss: list[BinLoss]
    difference: list[BinLoss] | None = None


class Scores(Summary):
    """scores.json: suites by evaluated model, and the prose of the haystacks.

    `missing` names tasks that have no score, with the reason, by suite.
    """

    FILE = "scores.json"

    checkpoints: dict[Annotated[str, AfterValidator(_evaluated_name)], dict[str, SuiteScores]]
    positions: dict[str, PositionLoss] = {}
    missing: dict[str, dict[str, str]] = {}
    corpus: dict[str, Any] | None = None

    @property
    def last_trained(self) -> str | None:
        """Name of the checkpoint with the most training tokens."""
        trained = [name for name in self.checkpoints if checkpoint_tokens(name) is not None]
        return max(trained, key=lambda name: checkpoint_tokens(name) or 0, default=None)

    @property
    def averages(self) -> dict[str, dict[str, float]]:
        """Average by model and suite."""
        return {
            name: {suite: scores.average for suite, scores in suites.items()}
            for name, suites in self.checkpoints.items()
        }


class SelectedScores(Scores):
    """scores.json of the command evaluate, in which models have names of any form."""

    checkpoints: dict[str, dict[str, SuiteScores]]  # type: ignore[assignment]


def read_metrics(train: Path) -> list[TrainingStep]:
    """Every logged training step."""
    journal = Journal(train / METRICS)
    steps = [TrainingStep.check(entry, str(journal.path)) for entry in journal.read_new()]
    if journal.damaged or not steps:
        raise RunError(f"{journal.path}: missing or damaged; {_RUN_AGAIN}")
    return steps


def read_samples(folder: Path) -> Iterator[dict[str, Any]]:
    """The answers below a stage's folder: checkpoint, suite, task, length, index, score, output."""
    with (folder / SAMPLES).open(encoding="utf-8") as file:
        yield from map(json.loads, file)


def write_samples(folder: Path, records: Iterable[Mapping[str, Any]]) -> None:
    """Write answers where `read_samples` reads them."""
    with (folder / SAMPLES).open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(record) + "\n" for record in records)
