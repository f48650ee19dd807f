"""What can be known about a base model without torch: its shape, its files, whether they are whole.

Only config.json and the headers of the safetensors files are read.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from bosch.errors import UserError
from bosch.families import FAMILIES, SLIDING, check_searchable

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_HEADER_LIMIT = 100 * 1024**2
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "tokenizer.model",
    "spiece.model",
    "chat_template.jinja",
)


@dataclass(frozen=True)
class ModelInfo:
    """Shape of a decoder, and where its files are.

    `directory` is None for a hub model that is not on this machine in full; `commit` is the hub
    revision its config.json belongs to.
    """

    directory: Path | None
    commit: str | None
    config: Mapping[str, Any]

    def number(self, name: str, default: int | None = None) -> int:
        """An integer of config.json; raises UserError where it is missing or no integer."""
        value = self.config.get(name)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise UserError(
                f"model.path: config.json has {name} = {value!r}; expected a positive integer"
            )
        return value

    @property
    def layers(self) -> int:
        return self.number("num_hidden_layers")

    @property
    def attention_heads(self) -> int:
        return self.number("num_attention_heads")

    @property
    def key_value_heads(self) -> int:
        return self.number("num_key_value_heads", self.attention_heads)

    @property
    def hidden_size(self) -> int:
        return self.number("hidden_size")

    @property
    def head_dim(self) -> int:
        return self.number("head_dim", self.hidden_size // self.attention_heads)

    def check_heads(self) -> None:
        """Raise UserError when query heads do not share KV heads evenly."""
        if self.attention_heads % self.key_value_heads:
            raise UserError(
                f"model.path: config.json has {self.attention_heads} attention heads, "
                f"no multiple of its {self.key_value_heads} KV heads"
            )

    def check_family(self) -> None:
        """Raise UserError when the model is known to be none that can be searched."""
        check_searchable(_stored_config(self.config, self.layers))

    @property
    def max_positions(self) -> int | None:
        value = self.config.get("max_position_embeddings")
        return value if isinstance(value, int) else None


def is_hub_name(path: str, root: Path) -> bool:
    """Whether a model path that is no directory can be meant as a name on the hub."""
    if _HUB_NAME.fullmatch(path) is None:
        return False
    return not (root / path.partition("/")[0]).is_dir()


def read_model(
    path: str, revision: str | None, root: Path, *, fetch: bool
) -> tuple[ModelInfo | None, list[str]]:
    """Find and check a base model: what is known of it, and everything wrong with it.

    There is nothing known of a hub model that `fetch` does not allow to look up, nor of a directory
    whose config.json cannot be read.
    """
    directory = Path(path)
    if directory.is_dir():
        return _read_directory(directory)
    if directory.exists():
        return None, [f"model.path: {path} is a file; expected a model directory"]
    name = os.path.relpath(path, root) if directory.is_absolute() else path
    if not is_hub_name(name, root):
        return None, [
            f"model.path: there is no directory {path}; expected a model directory "
            "or a hub name like Qwen/Qwen3-1.7B"
        ]
    try:
        info = _read_hub_model(name, revision, fetch)
    except UserError as fault:
        return None, [str(fault)]
    return info, list(_shape_faults(info)) if info is not None else []


def _read_directory(directory: Path) -> tuple[ModelInfo | None, list[str]]:
    files = list(_file_faults(directory))
    try:
        info = ModelInfo(directory, None, _read_config(directory))
    except UserError as fault:
        return None, [str(fault), *files]
    return info, [*_shape_faults(info), *files]


def _shape_faults(info: ModelInfo) -> Iterator[str]:
    """What keeps config.json from being that of a decoder that can be searched."""
    found = False
    for read in (
        lambda: info.layers,
        lambda: info.hidden_size,
        lambda: info.head_dim,
        info.check_heads,
    ):
        try:
            read()
        except UserError as fault:
            found = True
            yield str(fault)
    if not found:
        try:
            info.check_family()
        except UserError as fault:
            yield str(fault)


def _stored_config(content: Mapping[str, Any], num_layers: int) -> Any:
    """config.json's `content` as `bosch.families` reads a config, without transformers.

    What its config class would fill in counts as absent, but for the kinds of the layers where the
    family alone says them. So that a model slides by itself may show only when it is loaded, and
    no other model is taken for one that does.
    """
    config = SimpleNamespace(**content)
    if content.get("layer_types") is None and content.get("sliding_window") is not None:
        family = FAMILIES.get(str(content.get("model_type")))
        every = None if family is None else family.full_every
        pattern = content.get("sliding_window_pattern")
        if every and type(pattern) is int:
            every = pattern
        if every is None:
            config.sliding_window = None
        else:
            config.layer_types = [
                SLIDING if not every or layer % every else "full_attention"
                for layer in range(1, num_layers + 1)
            ]
    return config


def _read_hub_model(name: str, revision: str | None, fetch: bool) -> ModelInfo | None:
    found = _cached_config(name, revision or "main")
    if found is None and fetch:
        from huggingface_hub import hf_hub_download

        try:
            found = Path(hf_hub_download(name, "config.json", revision=revision))
        except Exception as error:
            reason = " ".join(str(error).split())[:200]
            raise UserError(
                f"model.path: {name} is neither a directory nor a model that could be fetched "
                f"from the hub ({type(error).__name__}: {reason})"
            ) from None
    if found is None:
        return None
    return ModelInfo(None, found.parent.name, _read_config(found.parent))


def _cached_config(name: str, revision: str) -> Path | None:
    home = Path(os.environ.get("HF_HOME", "~/.cache/huggingface")).expanduser()
    cache = Path(os.environ.get("HF_HUB_CACHE", home / "hub")).expanduser()
    folder = cache / f"models--{name.replace('/', '--')}"
    reference = folder / "refs" / revision
    commit = reference.read_text().strip() if reference.is_file() else revision
    config = folder / "snapshots" / commit / "config.json"
    return config if config.is_file() else None


def _read_config(directory: Path) -> Mapping[str, Any]:
    path = directory / "config.json"
    if not path.is_file():
        raise UserError(f"model.path: {directory} has no config.json, so it is no model directory")
    config = _read_json(path)
    text = config.get("text_config")
    if isinstance(text, dict):
        config = {**config, **text, "model_type": config.get("model_type")}
    if not isinstance(config.get("model_type"), str):
        raise UserError(f"model.path: {path} names no model_type")
    if config.get("hybrid_attention"):
        raise UserError(
            f"model.path: {directory} is a hybrid model already; expected its full-attention base"
        )
    return config


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"model.path: {path} cannot be read as JSON ({reason})") from None
    if not isinstance(value, dict):
        raise UserError(f"model.path: {path} is damaged: expected a JSON object")
    return value


def _file_faults(directory: Path) -> Iterator[str]:
    """Tokenizer and weights that are missing or cut short; reads file headers only."""
    if not any((directory / name).is_file() for name in TOKENIZER_FILES if "config" not in name):
        yield f"model.path: {directory} has no tokenizer files (tokenizer.json)"
    try:
        names = _weight_files(directory)
    except UserError as fault:
        yield str(fault)
        return
    for name in names:
        try:
            _check_safetensors(directory / name)
        except UserError as fault:
            yield str(fault)


def _weight_files(directory: Path) -> list[str]:
    index = directory / "model.safetensors.index.json"
    if not index.is_file():
        return ["model.safetensors"]
    weights = _read_json(index).get("weight_map")
    if not isinstance(weights, dict):
        raise UserError(f"model.path: {index} is damaged: it has no weight_map")
    return sorted({str(name) for name in weights.values()})


def _check_safetensors(path: Path) -> None:
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(size - 8, _HEADER_LIMIT):
                raise ValueError("its header is cut short")
            header = json.loads(file.read(length))
        ends = [entry["data_offsets"][1] for key, entry in header.items() if key != "__metadata__"]
        expected = 8 + length + max(ends, default=0)
    except FileNotFoundError:
        raise UserError(f"model.path: the weights {path} are missing") from None
    except (OSError, ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        raise UserError(f"model.path: {path} is damaged ({error}); fetch the model again") from None
    if size != expected:
        raise UserError(
            f"model.path: {path} is damaged: {size:,} bytes, its header asks for {expected:,}; "
            "fetch the model again"
        )
