"""The input files that a recipe names, and faults of their paths."""

from __future__ import annotations

import glob
import importlib.util
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from bosch.errors import UserError
from bosch.files import NOT_REGULAR, irregular_entries, open_regular
from data_prep.ruler_tasks import DATA_FILES
from data_prep.source_files import files_below, is_local, source_files
from stages.evaluate.stage import EvaluateConfig, HarnessEvaluation
from stages.prepare.stage import PrepareConfig
from stages.versions import installed_versions

_PARQUET_MAGIC = b"PAR1"
_WORD = re.compile(r"[\w.+-]+")


def common_folder(pattern: str) -> Path:
    """The folder below which the names of a pattern's files are told apart."""
    path = Path(pattern).expanduser()
    if path.is_dir():
        return path
    names = path.parts[: next(
        (i for i, name in enumerate(path.parts) if glob.has_magic(name)), len(path.parts) - 1
    )]  # fmt: skip
    return Path(*names)


def check_source(where: str, kind: str, pattern: str) -> None:
    """Raise UserError when a source names no file, only empty files, or a cut Parquet file."""
    files = source_files(where, kind, pattern)
    if not any(file.stat().st_size for file in files):
        raise UserError(f"{where}: the corpus at {pattern} is empty")
    if kind == "parquet":
        for file in files:
            _check_parquet(where, file)


def _check_parquet(where: str, file: Path) -> None:
    size = file.stat().st_size
    with open_regular(file) as stream:
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
    if not any(file.stat().st_size for file in files_below(Path(folder))):
        raise UserError(f"{where}: {folder} holds no text")


def check_regular(where: str, folder: str) -> None:
    """Raise UserError when a folder of a tokenizer holds a pipe, socket or device."""
    for name in irregular_entries(Path(folder)):
        raise UserError(f"{where}: {Path(folder, name)} {NOT_REGULAR}; remove it")


def check_ruler_file(task: str, folder: str | None) -> None:
    """Raise UserError when the file that a task of RULER needs is missing."""
    name = DATA_FILES[task]
    if folder is None or not Path(folder, name).is_file():
        where = f"{folder} holds none" if folder is not None else "none is named"
        raise UserError(
            f"evaluate.needle.data_dir: {task} needs a folder with {name}, as RULER downloads it; "
            f"{where}"
        )


def check_harness(harness: HarnessEvaluation) -> None:
    """Raise UserError when lm-eval is not installed or the folder of its data is missing."""
    if not installed_versions(["lm-eval"]):
        raise UserError(
            "evaluate.harness: lm-evaluation-harness is not installed; "
            "pip install 'bosch-pipeline[eval]'"
        )
    if harness.data_dir is not None and not Path(harness.data_dir).is_dir():
        raise UserError(f"evaluate.harness.data_dir: there is no folder {harness.data_dir}")
    if harness.data_dir is not None:
        list(files_below(Path(harness.data_dir)))  # raises for what is no regular file


def unknown_tasks(harness: HarnessEvaluation) -> list[str]:
    """Tasks that no file of lm-eval names; reads all of its files where a name is in an odd place.

    A name that stands there as something else passes; the harness itself refuses it before
    training.
    """
    spec = importlib.util.find_spec("lm_eval")
    if spec is None or spec.origin is None:
        return []
    below = Path(spec.origin).parent / "tasks"
    unknown = set(harness.task_names)
    for folder in (*sorted({below / name.split("_")[0] for name in unknown}), below):
        for file in folder.rglob("*.yaml") if unknown else ():
            unknown -= set(_WORD.findall(file.read_text(encoding="utf-8", errors="replace")))
    return [name for name in harness.task_names if name in unknown]


def missing_inputs(prepare: PrepareConfig, evaluate: EvaluateConfig | None) -> Iterator[str]:
    """Sources and folders of prose that are not there, or not what they should be."""
    checks = [
        partial(check_source, f"prepare.sources.{index}.path", source.kind, source.path)
        for index, source in enumerate(prepare.sources)
        if source.path and (source.kind != "huggingface" or is_local(source.path))
    ]
    folders = {"prepare.calibration.essay_dir": prepare.calibration.essay_dir}
    if evaluate is not None and evaluate.needle is not None:
        folders["evaluate.needle.essay_dir"] = evaluate.needle.essay_dir
    if evaluate is not None and evaluate.positions is not None:
        folders["evaluate.positions.path"] = evaluate.positions.path
    checks += [partial(check_folder, where, folder) for where, folder in folders.items() if folder]
    if evaluate is not None and evaluate.needle is not None:
        checks += [
            partial(check_ruler_file, task, evaluate.needle.data_dir)
            for task in ("qa_1", "qa_2")
            if task in evaluate.needle.tasks
        ]
    if evaluate is not None and evaluate.harness is not None:
        checks.append(partial(check_harness, evaluate.harness))
    checks += [
        partial(check_regular, f"prepare.sources.{index}.tokenizer", source.tokenizer)
        for index, source in enumerate(prepare.sources)
        if source.tokenizer is not None and Path(source.tokenizer).is_dir()
    ]
    for check in checks:
        try:
            check()
        except UserError as fault:
            yield str(fault)
        except OSError as error:
            yield f"{error.filename}: cannot be read: {error.strerror}"
