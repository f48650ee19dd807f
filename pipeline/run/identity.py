"""Identity of the base model: what of it changes a stage's results."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bosch.weight_files import weight_files
from data_prep.documents.source_files import tokenizer_files
from stages.inputs import Hasher
from stages.recipe import LoadedRecipe


def model_identity(loaded: LoadedRecipe, hasher: Hasher) -> dict[str, Any]:
    """The base model: the hashes of what is read of it, or its hub name and commit; and how."""
    model, directory = loaded.recipe.model, _directory(loaded)
    how = {"dtype": model.dtype, "trust_remote_code": model.trust_remote_code}
    if directory is None:
        return {**_hub_identity(loaded), **how}
    names = {"config.json", *weight_files(directory), *tokenizer_files(directory)}
    names |= {name for name in ("generation_config.json",) if (directory / name).is_file()}
    names |= set(_code_files(directory))
    return {**_hashes(directory, names, hasher), **how}


def tokenizer_identity(loaded: LoadedRecipe, hasher: Hasher) -> dict[str, Any]:
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


def _hashes(directory: Path, names: set[str], hasher: Hasher) -> dict[str, Any]:
    return {name: hasher.sha256(directory / name) for name in sorted(names)}
