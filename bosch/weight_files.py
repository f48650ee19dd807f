"""Checks that a model directory has complete weights and no others; reads only headers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from bosch.errors import UserError
from bosch.files import load_user_json

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
# Other weights that transformers would read, and that no stage's key covers: adapters and shards.
_OTHER_WEIGHTS = ("adapter_config.json", "shard-[0-9]*-model-[0-9]*-of-[0-9]*.safetensors")


def weight_faults(directory: Path) -> Iterator[str]:
    """Messages for weight files that are missing, damaged, truncated or unexpected."""
    for pattern in _OTHER_WEIGHTS:
        for other in sorted(directory.glob(pattern))[:1]:
            yield (
                f"{other} is beside the model: transformers would load other weights by it; merge "
                "an adapter into the model, or move the file away"
            )
    try:
        names = weight_files(directory)
    except UserError as fault:
        yield str(fault)
        return
    for name in names:
        try:
            if name != INDEX:
                _check_safetensors(directory / name)
        except UserError as fault:
            yield str(fault)


def weight_files(directory: Path) -> list[str]:
    """Weight files and index, each once, even if missing; UserError for a bad or outside name."""
    index = directory / INDEX
    # If both exist, transformers reads the single file.
    single = [WEIGHTS] if (directory / WEIGHTS).is_file() or not index.is_file() else []
    if not index.is_file():
        return single
    content = load_user_json(index, "get the model again")
    weights = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(weights, dict):
        raise UserError(f"{index} is damaged: it has no weight_map")
    names = {name if isinstance(name, str) else repr(name) for name in weights.values()}
    for name in names:
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts or not path.name:
            raise UserError(f"{index} names the weights {name!r}, no file of its directory")
    return [*single, INDEX, *sorted(names.difference(single))]


def code_files(directory: Path) -> list[str]:
    """Names of the directory's Python files, also in subfolders, without hidden ones."""
    paths = (path for path in directory.rglob("*.py") if not path.is_dir())
    files = (path.relative_to(directory) for path in paths)
    return [path.as_posix() for path in files if not any(p.startswith(".") for p in path.parts)]


def _check_safetensors(path: Path) -> None:
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > size - 8:
                raise ValueError("its header is cut short")
            header = json.loads(file.read(length).decode())
        ends = [entry["data_offsets"][1] for key, entry in header.items() if key != "__metadata__"]
        expected = 8 + length + max(ends, default=0)
    except FileNotFoundError:
        raise UserError(f"the weights {path} are missing") from None
    except (OSError, ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        raise UserError(f"{path} is damaged ({error}); fetch the model again") from None
    if size != expected:
        raise UserError(
            f"{path} is damaged: {size:,} bytes, its header asks for {expected:,}; "
            "fetch the model again"
        )
