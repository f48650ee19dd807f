"""A base model's shape and the completeness of its files, without torch.

Only the headers of safetensors files are read.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from huggingface_hub import constants

from bosch.errors import UserError
from bosch.files import check_hub_cache, load_user_json
from bosch.model.untrusted import config_faults, model_file_faults
from bosch.weight_files import INDEX, weight_faults
from data_prep.source_files import tokenizer_files
from stages.faults import Fault, collected
from stages.inputs import is_hub_name
from stages.stage import ModelInfo

# Configurations of published models, without weights: `_name_or_path` is the name on the hub.
SHAPES = Path(__file__).resolve().parents[2] / "recipes" / "shapes"
_PATH = "model.path"


def read_model(
    path: str,
    revision: str | None,
    root: Path,
    *,
    fetch: bool,
    files: bool = True,
    family: bool = True,
) -> tuple[ModelInfo | None, list[Fault]]:
    """Find and check a base model: returns its facts, if known, and all faults.

    Without `fetch`, a hub model that is not on this machine has the shape in recipes/shapes for its
    name; if there is none, or config.json cannot be read, the facts are None. Without `files`, a
    directory needs neither weights nor tokenizer. Without `family`, the check whether transformers
    can make the model hybrid is skipped.
    """
    directory, faults = Path(path), list[Fault]()
    info = None
    with collected(faults, _PATH):
        if directory.is_dir():
            faults += file_faults(directory) if files else ()
            info = ModelInfo(_read_config(directory), directory)
        elif directory.exists():
            raise UserError(f"{path} is a file; expected a model directory")
        elif not is_hub_name(path, root):
            raise UserError(
                f"there is no directory {path}; expected a model directory or a hub name like "
                "Qwen/Qwen3-1.7B"
            )
        else:
            info = _read_hub_model(path, revision, fetch) or _published_shape(path)
    if info is not None:
        faults += _shape_faults(info, family)
    return info, faults


def _shape_faults(info: ModelInfo, family: bool) -> list[Fault]:
    """Faults of a config.json that does not describe a supported decoder."""
    faults: list[Fault] = []
    for name in ("layers", "hidden_size", "max_positions"):
        with collected(faults, _PATH):
            getattr(info, name)
    with collected(faults, _PATH):
        info.check_sizes()
    if family and not faults:
        with collected(faults, _PATH):
            info.check_family()
    return faults


def _read_hub_model(name: str, revision: str | None, fetch: bool) -> ModelInfo | None:
    snapshot = cached_snapshot(name, revision)
    config = snapshot / "config.json" if snapshot is not None else None
    if config is None or not config.is_file():
        if not fetch:
            return None
        from huggingface_hub import hf_hub_download

        try:
            config = Path(hf_hub_download(name, "config.json", revision=revision))
        except Exception as error:
            check_hub_cache(error)
            reason = " ".join(str(error).split())[:200]
            raise UserError(
                f"{name} is neither a directory nor a model that could be fetched from the hub "
                f"({type(error).__name__}: {reason})"
            ) from None
    return ModelInfo(_read_config(config.parent), commit=config.parent.name)


def _published_shape(name: str) -> ModelInfo | None:
    """The config.json in recipes/shapes for the hub name `name`."""
    for path in sorted(SHAPES.glob("*/config.json")):
        if _read_json(path).get("_name_or_path") == name:
            return ModelInfo(_read_config(path.parent))
    return None


def cached_snapshot(name: str, revision: str | None) -> Path | None:
    """Folder of a repository, or of some of its files, in this machine's hub cache."""
    folder = Path(constants.HF_HUB_CACHE) / f"models--{name.replace('/', '--')}"
    reference = folder / "refs" / (revision or "main")
    commit = reference.read_text().strip() if reference.is_file() else str(revision or "main")
    snapshot = folder / "snapshots" / commit
    return snapshot if snapshot.is_dir() else None


def has_tokenizer(directory: Path) -> bool:
    """Whether a directory has tokenizer files besides the configuration."""
    return any(name for name in tokenizer_files(directory) if "config" not in name)


def _read_config(directory: Path) -> dict[str, Any]:
    path = directory / "config.json"
    if not path.is_file():
        raise UserError(f"{directory} has no config.json, so it is no model directory")
    content = _read_json(path)
    for fault in config_faults(content):
        raise UserError(f"{path}: {fault}")
    if not isinstance(content.get("model_type"), str):
        raise UserError(f"{path} names no model_type")
    if content.get("hybrid_attention"):
        raise UserError(f"{directory} is a hybrid model already; expected its full-attention base")
    return content


def _read_json(path: Path) -> dict[str, Any]:
    value = load_user_json(path, "get the model again")
    if not isinstance(value, dict):
        raise UserError(f"{path} is damaged: expected a JSON object")
    return value


def file_faults(directory: Path) -> Iterator[Fault]:
    """A missing tokenizer, missing or damaged weights, and JSON that names code."""
    if not has_tokenizer(directory):
        yield Fault(_PATH, f"{directory} has no tokenizer files (tokenizer.json)")
    for text in (
        *weight_faults(directory),
        *model_file_faults(directory, {"config.json", INDEX}),
    ):
        yield Fault(_PATH, text)
