"""Stage prepare: training data and calibration set."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from data_prep.ruler_tasks import NeedleTask
from stages.fields import (
    Count,
    Line,
    PathText,
    Section,
    different,
    parse_number,
    regular_expression,
)
from stages.published import Summary


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


PACKED_DATA = "train"
CALIBRATION = "calibration"
TOKENIZER = "tokenizer"


class Statistics(Summary):
    """prepare/statistics.json: what the training data and the calibration set hold."""

    FILE = "statistics.json"

    documents: int
    tokens: int
    sequences: int
    bytes_per_token: float
    calibration: dict[str, Any]
