"""The head mask: which KV heads keep full attention and which become sliding-window attention.

L layers, HKV key/value heads per layer. With grouped-query attention the unit of decision is the
KV head together with the query heads that share it (BOSCH §2.1). Needs numpy only, so that a
mask can be read, compared and written without loading torch.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from bosch.errors import UserError
from bosch.files import CONFIG_LIMITS, load_json, write_json
from bosch.window import Window

_FORMAT = 1
_MOST_HEADS = 10_000  # a layer; no model is near it


@dataclass(frozen=True, eq=False)
class HeadMask:
    """z of the paper: `is_full[l, h]` is True where KV head h of layer l keeps full attention.

    The array is copied and made read-only; masks compare and hash by their content.
    Raises ValueError when `is_full` is not a non-empty boolean matrix.
    """

    is_full: npt.NDArray[np.bool_]  # [L, HKV]

    def __post_init__(self) -> None:
        bits = np.array(self.is_full, copy=True)
        if bits.ndim != 2 or bits.size == 0:
            raise ValueError(f"a head mask is a non-empty [L, HKV] matrix, got shape {bits.shape}")
        if bits.dtype != np.bool_:
            if not np.isin(bits, (0, 1)).all():
                raise ValueError("a head mask holds True/False or 1/0 only")
            bits = bits.astype(np.bool_)
        bits.setflags(write=False)
        object.__setattr__(self, "is_full", bits)

    @classmethod
    def all_full(cls, num_layers: int, num_key_value_heads: int) -> HeadMask:
        """The original model: every head full."""
        return cls(np.ones((num_layers, num_key_value_heads), dtype=np.bool_))

    @classmethod
    def all_sliding(cls, num_layers: int, num_key_value_heads: int) -> HeadMask:
        """Every head sliding."""
        return cls(np.zeros((num_layers, num_key_value_heads), dtype=np.bool_))

    @classmethod
    def from_swa_kv_heads(
        cls, swa_kv_heads: Sequence[Iterable[int]], num_key_value_heads: int
    ) -> HeadMask:
        """From the indices of the sliding KV heads of each layer.

        Raises ValueError when an index is repeated or outside 0 .. num_key_value_heads - 1.
        """
        bits = np.ones((len(swa_kv_heads), num_key_value_heads), dtype=np.bool_)
        for layer, heads in enumerate(swa_kv_heads):
            indices = list(heads)
            if len(set(indices)) != len(indices):
                raise ValueError(f"layer {layer} names a KV head twice: {indices}")
            for head in indices:
                if not 0 <= head < num_key_value_heads:
                    raise ValueError(
                        f"layer {layer} names KV head {head}, "
                        f"the model has heads 0 to {num_key_value_heads - 1}"
                    )
                bits[layer, head] = False
        return cls(bits)

    @property
    def num_layers(self) -> int:
        return int(self.is_full.shape[0])

    @property
    def num_key_value_heads(self) -> int:
        return int(self.is_full.shape[1])

    @property
    def swa_kv_heads(self) -> list[list[int]]:
        """Indices of the sliding KV heads of each layer, ascending."""
        return [np.flatnonzero(~row).tolist() for row in self.is_full]

    @property
    def num_sliding(self) -> int:
        """Number of sliding KV heads in the whole model."""
        return int((~self.is_full).sum())

    @property
    def full_kv_heads_per_layer(self) -> list[int]:
        """Number of full KV heads of each layer."""
        return [int(n) for n in self.is_full.sum(axis=1)]

    @property
    def swa_ratio(self) -> float:
        """rho(z): share of sliding KV heads."""
        return float(1.0 - self.is_full.mean())

    @cached_property
    def key(self) -> str:
        """Short name of the mask, the same in every process: shape and bits, `6x8:ff00...`."""
        bits = np.packbits(self.is_full.reshape(-1)).tobytes().hex()
        return f"{self.num_layers}x{self.num_key_value_heads}:{bits}"

    @classmethod
    def from_key(cls, key: str) -> HeadMask:
        """The mask whose `key` this is; raises ValueError when it is not one."""
        try:
            shape, _, bits = key.partition(":")
            num_layers, heads = (int(n) for n in shape.split("x"))
            packed = np.frombuffer(bytes.fromhex(bits), dtype=np.uint8)
            flat = np.unpackbits(packed)[: num_layers * heads]
            mask = cls(flat.reshape(num_layers, heads).astype(np.bool_))
        except ValueError:
            raise ValueError(f"'{key}' is not the key of a head mask") from None
        if mask.key != key:
            raise ValueError(f"'{key}' is not the key of a head mask")
        return mask

    def with_layer(self, layer: int, row: npt.ArrayLike) -> HeadMask:
        """A copy whose layer `layer` is `row` [HKV], True for full."""
        bits = self.is_full.copy()
        bits[layer] = np.asarray(row, dtype=np.bool_)
        return HeadMask(bits)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, HeadMask) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)

    def __repr__(self) -> str:
        return f"HeadMask({self.key}, swa_ratio={self.swa_ratio:.4g})"


@dataclass(frozen=True)
class HeadMaskFile:
    """`head_mask.json`: a head mask with its model, window and search."""

    model: str
    method: str
    swa_ratio: float
    window_size: int
    sinks: int
    num_layers: int
    num_key_value_heads: int
    swa_kv_heads: list[list[int]]
    score: float | None = None
    seed: int | None = None
    format: int = field(default=_FORMAT)

    @classmethod
    def of(
        cls,
        mask: HeadMask,
        window: Window,
        *,
        model: str,
        method: str,
        swa_ratio: float,
        score: float | None = None,
        seed: int | None = None,
    ) -> HeadMaskFile:
        """The file of `mask`, with the model and the search that it comes from."""
        return cls(
            model,
            method,
            swa_ratio,
            window.size,
            window.sinks,
            mask.num_layers,
            mask.num_key_value_heads,
            mask.swa_kv_heads,
            score,
            seed,
        )

    @property
    def window(self) -> Window:
        return Window(self.window_size, self.sinks)

    @property
    def mask(self) -> HeadMask:
        return HeadMask.from_swa_kv_heads(self.swa_kv_heads, self.num_key_value_heads)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write as JSON, complete or not at all."""
        fields = asdict(self)
        content = {"format": fields.pop("format"), **fields}
        write_json(Path(path), content)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> HeadMaskFile:
        """Read and check; raises UserError when the file is missing, damaged or too new."""
        try:
            content = load_json(Path(path), CONFIG_LIMITS)
        except OSError as error:
            raise UserError(f"{path}: cannot read the head mask ({error.strerror})") from error
        except ValueError as error:
            raise UserError(
                f"{path}: the head mask is not valid JSON ({error}); make it again"
            ) from error
        return _checked_file(content, path)


def _checked_file(content: object, path: str | os.PathLike[str]) -> HeadMaskFile:
    if not isinstance(content, dict):
        raise UserError(f"{path}: expected a JSON object with a head mask")
    if content.get("format") != _FORMAT:
        raise UserError(
            f"{path}: format is {content.get('format')!r}, this version reads format {_FORMAT}"
        )
    types: dict[str, type | tuple[type, ...]] = {
        "model": str,
        "method": str,
        "swa_ratio": (int, float),
        "window_size": int,
        "sinks": int,
        "num_layers": int,
        "num_key_value_heads": int,
        "swa_kv_heads": list,
        "score": (int, float, type(None)),
        "seed": (int, type(None)),
    }
    for name, expected in types.items():
        optional = name in ("score", "seed")
        if name not in content and not optional:
            raise UserError(f"{path}: the field {name} is missing")
        value = content.get(name)
        if not isinstance(value, expected) or isinstance(value, bool):
            raise UserError(f"{path}: {name} has an unexpected value {value!r}")
        if isinstance(value, float) and not math.isfinite(value):
            raise UserError(f"{path}: {name} is {value}, expected a finite number")
    ratio, heads = content["swa_ratio"], content["num_key_value_heads"]
    if not 0 <= ratio <= 1:
        raise UserError(f"{path}: swa_ratio is {ratio}, expected a share from 0 to 1")
    if not 1 <= heads <= _MOST_HEADS:
        raise UserError(f"{path}: num_key_value_heads is {heads}; that is no model")
    rows = content["swa_kv_heads"]
    if not all(isinstance(row, list) and all(type(h) is int for h in row) for row in rows):
        raise UserError(f"{path}: swa_kv_heads must hold one list of head indices per layer")
    if len(rows) != content["num_layers"]:
        raise UserError(
            f"{path}: swa_kv_heads has {len(rows)} layers, num_layers says {content['num_layers']}"
        )
    fields: dict[str, Any] = {name: content.get(name) for name in types}
    loaded = HeadMaskFile(**fields)
    try:
        _ = loaded.mask, loaded.window
    except ValueError as error:
        raise UserError(f"{path}: {error}") from error
    return loaded
