"""Stage prepare: training data and calibration set."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field

from bosch.errors import UserError
from data_prep.documents.sources import KINDS, SourceKind
from data_prep.source_files import class_of_config, tokenizer_files
from data_prep.tasks.tables import NEW_TOKENS, PROMPTS_PER_EXAMPLE, NeedleTask
from stages.cost import Cost, Devices
from stages.evaluate.stage import EvaluateConfig
from stages.faults import Fault
from stages.fields import Count, Line, Number, PathText, Section, different, regular_expression
from stages.formats import format_hours
from stages.inputs import Hasher, Input, hashed_files, is_hub_name, prose, python_identity
from stages.published import WorkSummary
from stages.stage import LoadedRecipe, Recipe, Stage, position_faults

# Tokens a core tokenises in a second, with a fast tokenizer on prose and code.
_TOKENS_PER_CORE_SECOND = 250_000
_COMMIT = re.compile(r"[0-9a-f]{40}")


def _files_identity(source: SourceConfig, path: str | None, hasher: Hasher) -> dict[str, Any]:
    """Content hashes of a source's files, or the Python its documents come from."""
    kind = KINDS[source.kind]
    if path is None:
        return python_identity()
    if kind.is_remote(path):
        return {"dataset": path}  # its subset, split and commit are in the recipe
    files = kind.files(f"source {source.name}", path)
    return hashed_files(path, kind.identity_files(files), hasher)


def _check_documents(source: SourceConfig, path: str) -> None:
    kind = KINDS[source.kind]
    if not kind.is_remote(path) and not any(f.stat().st_size for f in kind.files("", path)):
        raise UserError(f"the corpus at {path} is empty")


def _is_dataset(source: SourceConfig, text: str, root: Path) -> bool:
    return KINDS[source.kind].is_dataset and is_hub_name(text, root)


def _tokenizer_identity(
    source: SourceConfig, path: str | None, hasher: Hasher
) -> dict[str, Any] | None:
    """Identity of the tokenizer that wrote the shards: its content hash, or its name on the hub."""
    if path is None:
        return None
    folder = Path(path)
    if not folder.is_dir():
        return {"hub": path}
    hashes = {name: hasher.sha256(folder / name) for name in tokenizer_files(folder)}
    return hashes | class_of_config(folder)


class FilterConfig(Section):
    """Which documents of a source are used. Bounds include their ends."""

    min_characters: Count | None = None
    """Minimum characters of a document."""
    max_characters: Count | None = None
    """Maximum characters of a document."""
    min_tokens: Count | None = None
    """Minimum tokens of a document."""
    max_tokens: Count | None = None
    """Maximum tokens of a document."""
    matches: dict[str, Annotated[str, AfterValidator(regular_expression)]] = Field(default={})
    """Fields of a record, each with a regular expression (Python's) that its value must contain;
    records without the field are left out."""


class SourceConfig(Section):
    """One source of training documents."""

    name: Line
    """Name in statistics and logs."""
    kind: SourceKind = Field(
        description="; ".join(f"{name}: {kind.about}" for name, kind in KINDS.items()) + "."
    )
    path: Annotated[
        PathText | None, Input(_files_identity, _check_documents, _is_dataset, is_pattern=True)
    ] = None
    """File, folder or glob, needed by the file kinds; huggingface: name on the hub, or a directory
    with a dataset's files."""
    text_field: Line = "text"
    """Field of a record, or column of a table, that holds the text, or a list of messages; for mds
    also a column of token ids (by default input_ids or tokens, where there is no text)."""
    subset: Line | None = None
    """huggingface: the dataset's configuration."""
    split: Line = "train"
    """huggingface: split to read."""
    revision: Line | None = None
    """huggingface: commit of the dataset on the hub, all 40 hexadecimal digits."""
    tokenizer: Annotated[
        PathText | None, Input(_tokenizer_identity, lambda *_: None, lambda *_: True)
    ] = None
    """mds with tokens: tokenizer the shards were written with, to detokenise them."""
    weight: Number = Field(1.0, gt=0)
    """Share of the training tokens, relative to the other sources."""
    loss: Literal["all", "completion"] = "all"
    """completion: of records with `messages`, or `prompt` and `completion`, training learns the
    assistant's answers alone; all: every token."""
    filters: FilterConfig = FilterConfig()


class CalibrationConfig(Section):
    """The set D on which S(z) is measured (BOSCH 3.3, B.4): questions that the original model
    answers right, with its own greedy answers."""

    tasks: Annotated[list[NeedleTask], AfterValidator(different)] = Field(
        default=["niah_single_2", "niah_multikey_1"], min_length=1
    )
    """Needle tasks, which alternate."""
    examples: Count = 64
    """Number of examples."""
    length: Count = 32768
    """Tokens of an example, including generated ones."""
    max_new_tokens: Count | None = None
    """Tokens generated, counted inside the length; default: evaluate.ruler's."""
    essay_dir: Annotated[PathText | None, prose()] = None
    """Folder of prose for essay haystacks; default: pydoc's topics."""

    def new_tokens(self, task: str) -> int:
        """Tokens that a model may generate in a task."""
        return NEW_TOKENS[task] if self.max_new_tokens is None else self.max_new_tokens


class PrepareConfig(Section):
    """Training data and calibration set."""

    sequence_length: Count = 32768
    """Tokens of a packed training sequence."""
    train_tokens: Count
    """Tokens to prepare; at least what training reads."""
    sources: list[SourceConfig] = Field(min_length=1)
    """Where documents come from."""
    calibration: CalibrationConfig = CalibrationConfig()

    def completed(self, recipe: Recipe) -> Self:
        """The section with calibration prompts as long as the evaluation's."""
        evaluate = recipe.get(EvaluateConfig)
        if evaluate is None or self.calibration.max_new_tokens is not None:
            return self
        changes = {"max_new_tokens": evaluate.ruler.max_new_tokens}
        return self.model_copy(update={"calibration": self.calibration.model_copy(update=changes)})

    @property
    def sequences(self) -> int:
        """Number of packed sequences: the fewest that hold `train_tokens`."""
        return math.ceil(self.train_tokens / self.sequence_length)


PACKED_DATA = "train"
CALIBRATION = "calibration"
TOKENIZER = "tokenizer"


class Statistics(WorkSummary):
    """prepare/statistics.json: sizes of the training data and the calibration set."""

    FILE = "statistics.json"

    documents: int
    tokens: int
    sequences: int
    calibration: dict[str, Any]


def _faults(loaded: LoadedRecipe) -> Iterator[Fault]:
    prepare = loaded.recipe[PrepareConfig]
    sources, length = prepare.sources, prepare.calibration.length
    yield from position_faults(loaded, "prepare.calibration.length", length)
    names = [source.name for source in sources]
    for name in sorted({name for name in names if names.count(name) > 1}):
        yield Fault("prepare.sources", f"the name '{name}' is used twice")
    for index, source in enumerate(sources):
        where, kind = f"prepare.sources.{index}", KINDS[source.kind]
        if kind.needs_path and not source.path:
            yield Fault(where, f"a source of kind {source.kind} needs a path")
        needing = {"filters.matches": source.filters.matches, "loss": source.loss == "completion"}
        for field in () if kind.has_fields else filter(needing.get, needing):
            yield Fault(f"{where}.{field}", f"a source of kind {source.kind} has no fields")
        on_hub = source.path is not None and kind.is_remote(source.path)
        if on_hub and not _COMMIT.fullmatch(source.revision or ""):
            yield Fault(
                f"{where}.revision",
                "expected the dataset's commit, 40 hexadecimal digits (on the hub under Files and "
                "versions, History), since a branch may change",
            )


def cost(loaded: LoadedRecipe, devices: Devices) -> Cost:
    """Tokens to prepare, in whole sequences, and the bytes of the data on disk.

    The tokens of all sources are kept until they are packed.
    """
    prepare = loaded.recipe[PrepareConfig]
    tokens = prepare.sequences * prepare.sequence_length
    note = f"{tokens:,} tokens, {format_hours(tokens / _TOKENS_PER_CORE_SECOND / 3600)} on a core"
    # An id takes 4 bytes in packed sequences, and about 6 characters in prompts.jsonl.
    packed = tokens * 4.0
    prompts = PROMPTS_PER_EXAMPLE * prepare.calibration.examples
    calibration = prompts * prepare.calibration.length * 6.0
    return Cost(0, 2 * packed + calibration, note, removed=packed)


STAGE = Stage(
    "prepare",
    "stages.prepare.run:run",
    PrepareConfig,
    field=Field(description="Training data and calibration set."),
    model="tokenizer",
    completed=PrepareConfig.completed,
    checks=_faults,
    slow_checks="stages.prepare.run:first_document_faults",
    cost="stages.prepare.stage:cost",
)
