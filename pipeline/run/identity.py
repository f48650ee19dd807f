"""Identity of everything outside a recipe that changes its results: files, models, Python."""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from bosch.files import canonical_json
from bosch.weight_files import weight_files
from data_prep.mds_index import read_index
from data_prep.ruler_tasks import DATA_FILES
from data_prep.sentences import sentences_identity
from data_prep.source_files import files_below, is_local, source_files
from data_prep.words import words_identity
from pipeline.recipe.inputs import common_folder
from pipeline.recipe.model_shape import tokenizer_files
from pipeline.recipe.recipe import LoadedRecipe
from pipeline.run.hashing import FileHasher
from stages.evaluate.stage import HarnessEvaluation, NeedleEvaluation
from stages.licence import licence_of
from stages.prepare.stage import SourceConfig
from stages.versions import installed_versions


def model_identity(loaded: LoadedRecipe, hasher: FileHasher) -> dict[str, Any]:
    """The base model: the hashes of what is read of it, or its hub name and commit; and how."""
    model, directory = loaded.recipe.model, _directory(loaded)
    how = {"dtype": model.dtype, "trust_remote_code": model.trust_remote_code}
    if directory is None:
        return {**_hub_identity(loaded), **how}
    names = {"config.json", *weight_files(directory), *tokenizer_files(directory)}
    names |= {name for name in ("generation_config.json",) if (directory / name).is_file()}
    names |= set(_code_files(directory))
    return {**_hashes(directory, names, hasher), **how}


def tokenizer_identity(loaded: LoadedRecipe, hasher: FileHasher) -> dict[str, Any]:
    """The base model's tokenizer: data does not have to be prepared again for other weights."""
    directory = _directory(loaded)
    if directory is None:
        return _hub_identity(loaded)
    names = set(tokenizer_files(directory))
    if loaded.recipe.model.trust_remote_code:  # a tokenizer's code may import any of it
        names |= set(_code_files(directory))
    # Where the tokenizer's own files name no class, transformers takes that of the model's type.
    family = loaded.info.config.get("model_type") if loaded.info is not None else None
    return {**_hashes(directory, names, hasher), "model_type": family}


def licence_identity(loaded: LoadedRecipe) -> dict[str, str]:
    """Licence in the base model's card, which the hybrid's card repeats."""
    directory = _directory(loaded)
    return {} if directory is None else licence_of(directory / "README.md")


def _directory(loaded: LoadedRecipe) -> Path | None:
    return loaded.info.directory if loaded.info is not None else None


def _hub_identity(loaded: LoadedRecipe) -> dict[str, Any]:
    commit = loaded.info.commit if loaded.info is not None else None
    return {"hub": loaded.recipe.model.path, "commit": commit or loaded.recipe.model.revision}


def _code_files(directory: Path) -> list[str]:
    """Names of the directory's own code, in whatever folder below it."""
    paths = (path for path in directory.rglob("*.py") if not path.is_dir())
    files = (path.relative_to(directory) for path in paths)
    return [path.as_posix() for path in files if not any(p.startswith(".") for p in path.parts)]


def _hashes(directory: Path, names: set[str], hasher: FileHasher) -> dict[str, Any]:
    return {name: hasher.sha256(directory / name) for name in sorted(names)}


def source_identity(source: SourceConfig, hasher: FileHasher) -> dict[str, Any]:
    """A source of documents: its files by content, or the Python its documents come from.

    MDS shards whose hashes stand in their index are identified by the index: reading verifies them.
    """
    if source.path is None:
        return python_identity()
    if source.kind == "huggingface" and not is_local(source.path):
        return {"dataset": source.path}  # its subset, split and commit stand in the recipe
    files = source_files(f"source {source.name}", source.kind, source.path)
    if source.kind == "mds":
        files += [path for index in files for path in _shards_without_hash(index)]
    identity = _files(source.path, files, hasher)
    if source.tokenizer is not None and Path(source.tokenizer).is_dir():
        folder = Path(source.tokenizer)
        identity["tokenizer"] = _hashes(folder, set(tokenizer_files(folder)), hasher)
    return identity


def _shards_without_hash(index: Path) -> list[Path]:
    return [s.file(index.parent)[0] for s in read_index(index) if not s.is_hashed]


def essay_identity(folder: str | None, hasher: FileHasher) -> dict[str, Any]:
    """Prose for haystacks: a folder by content, or the Python whose pydoc topics are used."""
    if folder is None:
        return python_identity()
    return _files(folder, sorted(files_below(Path(folder))), hasher)


def ruler_identity(needle: NeedleEvaluation, hasher: FileHasher) -> dict[str, Any]:
    """What RULER's samples are made of: prose, words, what splits sentences, and its data files."""
    identity: dict[str, Any] = {
        "needle.essay_dir": essay_identity(needle.essay_dir, hasher),
        "needle.words": words_identity(),
        "needle.sentences": sentences_identity(),
    }
    files = [
        Path(needle.data_dir or "", name)
        for task, name in DATA_FILES.items()
        if task in needle.tasks and needle.data_dir is not None
    ]
    identity["needle.data_dir"] = {
        path.name: hasher.sha256(path) for path in files if path.is_file()
    }
    return identity


def harness_identity(harness: HarnessEvaluation, hasher: FileHasher) -> dict[str, Any]:
    """lm-evaluation-harness and its tasks' local data by content."""
    identity: dict[str, Any] = dict(installed_versions(["lm-eval"]))
    if harness.data_dir is not None and Path(harness.data_dir).is_dir():
        files = [path for path in files_below(Path(harness.data_dir)) if path.suffix == ".jsonl"]
        identity |= _files(harness.data_dir, sorted(files), hasher)
    return identity


def documents_identity(folder: str | None, hasher: FileHasher) -> dict[str, Any]:
    """Long documents: a folder by content, or the version of transformers."""
    if folder is None:
        return dict(installed_versions(["transformers"]))
    return essay_identity(folder, hasher)


def python_identity() -> dict[str, Any]:
    """The Python whose standard library serves as text."""
    return {"python": f"{platform.python_implementation()} {platform.python_version()}"}


def _files(pattern: str, files: Iterable[Path], hasher: FileHasher) -> dict[str, Any]:
    """Names and hashes of all files; a long list is folded into one hash."""
    base = common_folder(pattern)
    hashes = {path.relative_to(base).as_posix(): hasher.sha256(path) for path in files}
    if len(hashes) <= 32:
        return {"files": hashes}
    folded = hashlib.sha256(canonical_json(hashes).encode()).hexdigest()
    return {"files": len(hashes), "sha256": folded}
