"""Files that stages publish: typed JSON records, and the manifest of each output."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from bosch.errors import RunError
from bosch.files import canonical_json, exists, hash_fault, read_record, write_json

logger = logging.getLogger(__name__)


TENSORBOARD = "tensorboard"
RUN_AGAIN = "run its stage again with --force"


class Record(BaseModel):
    """A JSON object that a stage writes; unknown fields are kept."""

    model_config = ConfigDict(extra="allow", frozen=True)

    @classmethod
    def check(cls, content: object, place: str) -> Self:
        """`content` as a record. Raises RunError with `place` and the field."""
        try:
            return cls.model_validate(content)
        except ValidationError as error:
            fault = error.errors()[0]
            field = f" {'.'.join(map(str, fault['loc']))}:" if fault["loc"] else ""
            raise RunError(f"{place}:{field} {fault['msg']}; {RUN_AGAIN}") from None


class Summary(Record):
    """A record that is a file of its own."""

    FILE: ClassVar[str] = "summary.json"

    @classmethod
    def read(cls, folder: Path) -> Self:
        """The record in a stage's folder; raises RunError if it is missing or damaged."""
        path = folder / cls.FILE
        content = read_record(path)
        if content is None:
            raise RunError(f"{path}: missing or damaged; {RUN_AGAIN}")
        return cls.check(content, str(path))

    def write(self, folder: Path) -> None:
        write_json(folder / self.FILE, self.content)

    @property
    def content(self) -> dict[str, Any]:
        return self.model_dump(mode="json", exclude_unset=True)


class WorkSummary(Summary):
    """A summary that its stage writes last; `sha256` has the hashes of all files of the work."""

    sha256: dict[str, str] = Field(default={})

    @classmethod
    def finished(cls, folder: Path) -> Self | None:
        """The record of finished work; None if it is missing, or damaged (with a warning)."""
        if not exists(folder / cls.FILE):
            return None
        try:
            record = cls.read(folder)
            fault = hash_fault(folder, record.sha256) if record.sha256 else "it has no hashes"
        except RunError:
            fault = f"{cls.FILE} cannot be read"
        if fault is None:
            return record
        logger.warning("%s: damaged (%s); it is made again", folder, fault)
        return None


class Manifest(Summary):
    """manifest.json, which the runner writes beside every stage's output.

    `gpus` is the number of GPUs in the last attempt, `gpu_seconds` the sum over all attempts of
    seconds times GPUs. `summary` is the return value of the stage's function.
    """

    FILE = "manifest.json"

    key: str
    seconds: float
    created: str | None = None
    git_commit: str | None = None
    python: str | None = None
    processes: int | None = None
    gpus: int = 0
    gpu_seconds: float = 0.0
    packages: dict[str, str] = Field(default={})
    files: list[dict[str, Any]] = Field(default=[])
    summary: dict[str, Any] = Field(default={})

    @staticmethod
    def digest(content: Mapping[str, Any]) -> str:
        """Hash over the file without the field `sha256`, which holds this hash."""
        hashed = {name: value for name, value in content.items() if name != "sha256"}
        return hashlib.sha256(canonical_json(hashed).encode()).hexdigest()

    @property
    def hashes(self) -> dict[str, str]:
        return {str(file["path"]): str(file["sha256"]) for file in self.files}

    @property
    def gpu_hours(self) -> float:
        """Hours of the stage times its GPUs."""
        return self.gpu_seconds / 3600
