"""The input files a recipe names: which they are, and whether they can be meant."""

from __future__ import annotations

import glob
import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

from bosch.errors import UserError
from pipeline.partial import unless_invalid
from stages.configs import EvaluateConfig, PrepareConfig, SourceConfig

_PARQUET_MAGIC = b"PAR1"


def list_files(pattern: str) -> list[Path]:
    """Files that a path, a folder (with everything below it) or a glob names, sorted.

    Hidden files and folders are left out.
    """
    path = Path(pattern)
    if path.is_dir():
        return sorted(_below(path))
    if path.is_file():
        return [path]
    found: set[Path] = set()
    for match in glob.glob(pattern, recursive=True):
        hit = Path(match)
        found.update(_below(hit) if hit.is_dir() else [hit])
    return sorted(found)


def _below(folder: Path) -> list[Path]:
    found = []
    for directory, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        found += [Path(directory, name) for name in names if not name.startswith(".")]
    return found


def common_folder(pattern: str) -> Path:
    """The folder that names of `list_files(pattern)` are told apart below."""
    path = Path(pattern)
    if path.is_dir():
        return path
    parts = path.parts[: next(
        (i for i, part in enumerate(path.parts) if glob.has_magic(part)), len(path.parts) - 1
    )]  # fmt: skip
    return Path(*parts)


def check_source(where: str, kind: str, pattern: str) -> None:
    """Raise UserError when a source names no file, only empty files, or a cut Parquet file."""
    files = list_files(pattern)
    if not files:
        raise UserError(f"{where}: {pattern} names no file; expected a file, a folder or a glob")
    if not any(file.stat().st_size for file in files):
        raise UserError(f"{where}: the corpus at {pattern} is empty")
    if kind == "parquet":
        for file in files:
            if file.suffix == ".parquet":
                _check_parquet(where, file)
    if kind == "mds" and not any(file.name == "index.json" for file in files):
        raise UserError(f"{where}: there is no index.json below {pattern}; expected MDS shards")


def _check_parquet(where: str, file: Path) -> None:
    size = file.stat().st_size
    with file.open("rb") as stream:
        start = stream.read(4)
        stream.seek(max(size - 8, 0))
        tail = stream.read(8)
    if size < 12 or start != _PARQUET_MAGIC or tail[4:] != _PARQUET_MAGIC:
        raise UserError(f"{where}: {file} is no whole Parquet file (cut short or of another kind)")
    if int.from_bytes(tail[:4], "little") > size - 12:
        raise UserError(f"{where}: {file} is a damaged Parquet file (its footer does not fit)")


def check_folder(where: str, folder: str) -> None:
    """Raise UserError when a folder of prose is missing or holds no text."""
    if not Path(folder).is_dir():
        raise UserError(f"{where}: there is no folder {folder}")
    files: Sequence[Path] = list_files(folder)
    if not any(file.stat().st_size for file in files):
        raise UserError(f"{where}: {folder} holds no text")


def missing_inputs(prepare: PrepareConfig, evaluate: EvaluateConfig | None) -> Iterator[str]:
    """Sources and folders of prose that are not there, or not what they should be."""
    for check in (_sources(prepare), _calibration_prose(prepare), _needle_prose(evaluate)):
        yield from unless_invalid(check)


def _sources(prepare: PrepareConfig) -> Iterator[str]:
    for index, source in enumerate(prepare.sources):
        yield from unless_invalid(_source_files(f"prepare.sources.{index}.path", source))


def _source_files(where: str, source: SourceConfig) -> Iterator[str]:
    if source.path:
        yield from _caught(partial(check_source, where, source.kind, source.path))


def _calibration_prose(prepare: PrepareConfig) -> Iterator[str]:
    yield from _prose("prepare.calibration.essay_dir", prepare.calibration.essay_dir)


def _needle_prose(evaluate: EvaluateConfig | None) -> Iterator[str]:
    if evaluate is not None and evaluate.needle is not None:
        yield from _prose("evaluate.needle.essay_dir", evaluate.needle.essay_dir)


def _prose(where: str, folder: str | None) -> Iterator[str]:
    if folder is not None:
        yield from _caught(partial(check_folder, where, folder))


def _caught(check: Callable[[], None]) -> Iterator[str]:
    try:
        check()
    except UserError as fault:
        yield str(fault)
    except OSError as error:
        yield f"{error.filename}: cannot be read: {error.strerror}"
