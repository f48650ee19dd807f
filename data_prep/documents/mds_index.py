"""The index of a folder of MosaicML's MDS shards: files, sizes, hashes and columns."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from bosch.errors import UserError

INDEX = "index.json"
# Columns of token ids, as llm-foundry and others name them.
_TOKENS = ("input_ids", "tokens")
_TEXT = "text"  # the default of text_field


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True)


def _inside(name: str) -> str:
    """A file name in the index's folder."""
    if Path(name).is_absolute() or ".." in Path(name).parts:
        raise ValueError(f"{name} leads out of the folder")
    return name


class ShardFile(_Model):
    """A file of a shard, plain or compressed."""

    basename: Annotated[str, AfterValidator(_inside)]
    size: int = Field(alias="bytes")
    hashes: dict[str, str] = {}


class Shard(_Model):
    """A shard and the encodings of its columns; `column_sizes` is None for variable sizes."""

    version: Literal[2]
    format: Literal["mds"]
    raw_data: ShardFile
    zip_data: ShardFile | None
    compression: str | None
    samples: int
    column_names: list[str]
    column_encodings: list[str]
    column_sizes: list[int | None]

    def file(self, folder: Path) -> tuple[Path, ShardFile]:
        """The shard's file in the index's folder, and what the index says of it.

        Raises UserError if the shard has no file, or one that is compressed other than by zstd.
        """
        for entry in filter(None, (self.raw_data, self.zip_data)):
            path = folder / entry.basename
            if path.is_file():
                if entry is self.zip_data and not (self.compression or "").startswith("zstd"):
                    raise UserError(f"{path}: compressed with {self.compression}, not with zstd")
                return path, entry
        raise UserError(f"{path}: this shard is in {INDEX} but not in the folder; get it again")

    def document_column(self, where: str, text_field: str) -> str:
        """The column with the documents: `text_field`, by default also a column of tokens.

        Raises UserError if there is none.
        """
        for name in (text_field, *(_TOKENS if text_field == _TEXT else ())):
            if name in self.column_names:
                return name
        names = ", ".join(self.column_names)[:200]
        raise UserError(f"{where}: no column `{text_field}` (there is {names}); set text_field")

    def is_text(self, column: str) -> bool:
        """Whether a column holds texts rather than tokens."""
        return self.column_encodings[self.column_names.index(column)] == "str"


class _Index(BaseModel):
    shards: list[Shard]


def read_index(path: Path) -> list[Shard]:
    """The shards of an index, in order; raises UserError if it is none of version 2."""
    try:
        return _Index.model_validate_json(path.read_bytes()).shards
    except ValidationError as error:
        fault = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(map(str, fault["loc"]))
        reason = f"{place}: {fault['msg']}"
        raise UserError(f"{path}: not an index of MDS shards, version 2 ({reason})") from None
