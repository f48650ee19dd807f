"""What identifies the things outside a recipe that change its results: files, models, Python."""

from __future__ import annotations

import hashlib
import platform
from pathlib import Path
from typing import Any

from pipeline.files import canonical_json
from pipeline.hashing import FileHasher
from pipeline.inputs import common_folder, list_files
from pipeline.modelinfo import TOKENIZER_FILES
from pipeline.recipe import LoadedRecipe
from stages.configs import SourceConfig

# What a model directory's behaviour can depend on; cards, logs and pictures are left out.
_MODEL_SUFFIXES = (".json", ".safetensors", ".txt", ".model", ".jinja", ".py")


def model_identity(loaded: LoadedRecipe, hasher: FileHasher) -> dict[str, Any]:
    """The base model: its files' hashes, or its hub name and commit; and how it is read."""
    model = loaded.recipe.model
    how = {"dtype": model.dtype, "trust_remote_code": model.trust_remote_code}
    return {**_model_files(loaded, hasher, _MODEL_SUFFIXES), **how}


def tokenizer_identity(loaded: LoadedRecipe, hasher: FileHasher) -> dict[str, Any]:
    """The base model's tokenizer: data does not have to be prepared again for other weights."""
    return _model_files(loaded, hasher, TOKENIZER_FILES)


def _model_files(
    loaded: LoadedRecipe, hasher: FileHasher, endings: tuple[str, ...]
) -> dict[str, Any]:
    info, model = loaded.info, loaded.recipe.model
    if info is None or info.directory is None:
        commit = info.commit if info is not None else None
        return {"hub": model.path, "commit": commit or model.revision}
    names = [path for path in sorted(info.directory.iterdir()) if path.name.endswith(endings)]
    return {path.name: hasher.sha256(path) for path in names if path.is_file()}


def source_identity(source: SourceConfig, hasher: FileHasher) -> dict[str, Any]:
    """A source of documents: its files by content, or the Python its documents come from."""
    if source.kind == "python_docs":
        return python_identity()
    if source.path is None:
        return {}
    identity = _files(source.path, hasher)
    if source.tokenizer is not None and Path(source.tokenizer).is_dir():
        folder = Path(source.tokenizer)
        files = [path for path in sorted(folder.iterdir()) if path.name in TOKENIZER_FILES]
        identity["tokenizer"] = {path.name: hasher.sha256(path) for path in files}
    return identity


def essay_identity(folder: str | None, hasher: FileHasher) -> dict[str, Any]:
    """Prose for haystacks: a folder by content, or the Python whose pydoc topics are used."""
    return python_identity() if folder is None else _files(folder, hasher)


def python_identity() -> dict[str, Any]:
    """The Python whose standard library serves as text."""
    return {"python": f"{platform.python_implementation()} {platform.python_version()}"}


def _files(pattern: str, hasher: FileHasher) -> dict[str, Any]:
    """Names and hashes of all files; a long list is folded into one hash."""
    base = common_folder(pattern)
    files = {path.relative_to(base).as_posix(): hasher.sha256(path) for path in list_files(pattern)}
    if len(files) <= 32:
        return {"files": files}
    folded = hashlib.sha256(canonical_json(files).encode()).hexdigest()
    return {"files": len(files), "sha256": folded}
