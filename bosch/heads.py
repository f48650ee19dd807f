"""The head mask: which KV heads keep full attention, and the windows of the others.

L layers, HKV key/value heads per layer. The unit of decision is the KV head with the query heads
that share it (BOSCH §2.1). Needs numpy only, so that masks are read without loading torch.
"""

from __future__ import annotations

import operator
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from bosch.errors import UserError
from bosch.files import load_user_json, write_json
from bosch.window import MAX_WINDOWS, Window, Windows, kv_slots, rising_menu, window_menu

FORMATS = (1, 2)
_LARGEST = 2**63


@dataclass(frozen=True, eq=False)
class HeadMask:
    """z of the paper: `is_full[l, h]` is True where KV head h of layer l keeps full attention.

    `choices[l, h]` is 0 for a full head and k for the k-th window of the menu (the list of
    windows), counted from the widest down; with one window it is 1 where a head slides. The
    arrays are copied and made read-only; masks compare and hash by their content.
    Raises ValueError when `is_full` is not a non-empty boolean matrix.
    """

    is_full: npt.NDArray[np.bool_]  # [L, HKV]
    choices: npt.NDArray[np.uint8] = field(init=False)  # [L, HKV]

    def __post_init__(self) -> None:
        bits = np.array(self.is_full, copy=True)
        if bits.ndim != 2 or bits.size == 0:
            raise ValueError(f"a head mask is a non-empty [L, HKV] matrix, got shape {bits.shape}")
        if bits.dtype != np.bool_:
            if not np.isin(bits, (0, 1)).all():
                raise ValueError("a head mask holds True/False or 1/0 only")
            bits = bits.astype(np.bool_)
        self._set(bits, (~bits).astype(np.uint8))

    def _set(self, is_full: npt.NDArray[np.bool_], choices: npt.NDArray[np.uint8]) -> None:
        for name, array in (("is_full", is_full), ("choices", choices)):
            array.setflags(write=False)
            object.__setattr__(self, name, array)

    @classmethod
    def of_choices(cls, choices: npt.ArrayLike) -> HeadMask:
        """Mask with these `choices` [L, HKV]; raises ValueError outside 0 .. 15."""
        array = np.array(choices)
        if array.dtype.kind not in "iu" or not ((array >= 0) & (array <= MAX_WINDOWS)).all():
            raise ValueError(f"a choice is full (0) or one of at most {MAX_WINDOWS} windows")
        mask = cls(array == 0)
        mask._set(array == 0, array.astype(np.uint8))
        return mask

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
        """Mask with these sliding KV heads by layer; ValueError for a repeated or unknown one."""
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
    def num_windows(self) -> int:
        """The fewest windows that a menu for this mask needs."""
        return int(self.choices.max())

    @property
    def full_kv_heads_per_layer(self) -> list[int]:
        """Number of full KV heads of each layer."""
        return [int(n) for n in self.is_full.sum(axis=1)]

    @property
    def swa_ratio(self) -> float:
        """rho(z): share of sliding KV heads."""
        return float(1.0 - self.is_full.mean())

    def windows_per_layer(self, windows: Windows) -> list[list[Window | None]]:
        """The window of each head by layer, None if full; ValueError if the menu has too few."""
        menu = window_menu(windows)
        if self.num_windows > len(menu):
            raise ValueError(f"the mask has {self.num_windows} windows, the menu {len(menu)}")
        kinds = (None, *menu)
        return [[kinds[choice] for choice in row] for row in self.choices.tolist()]

    def head_order(self) -> list[list[int]]:
        """KV heads by layer, from full to the narrowest window, else in the base model's order."""
        return self.choices.argsort(axis=1, kind="stable").tolist()

    def heads_per_layer(self, windows: Windows) -> list[dict[Window | None, int]]:
        """How many heads of each layer are full (None) and have each window, the widest first."""
        kinds = (None, *window_menu(windows))
        rows = self.windows_per_layer(windows)
        return [{kind: row.count(kind) for kind in kinds} for row in rows]

    def kv_slots(self, windows: Windows, tokens: int) -> int:
        """KV slots (heads x cached tokens) after `tokens` tokens, the unit of a slot budget."""
        return kv_slots(self.heads_per_layer(windows), tokens)

    @cached_property
    def key(self) -> str:
        """Short name of the mask, the same in every process: shape and bits, `6x8:ff00...`.

        With several windows: shape, number of windows and a digit for each head, `6x8/3:0120...`.
        """
        shape = f"{self.num_layers}x{self.num_key_value_heads}"
        if self.num_windows > 1:
            digits = "".join(f"{choice:x}" for choice in self.choices.reshape(-1))
            return f"{shape}/{self.num_windows}:{digits}"
        bits = np.packbits(self.is_full.reshape(-1)).tobytes().hex()
        return f"{shape}:{bits}"

    @classmethod
    def from_key(cls, key: str) -> HeadMask:
        """The mask with this `key`; raises ValueError when it is not a key."""
        try:
            shape, _, digits = key.partition(":")
            shape, several, _ = shape.partition("/")
            num_layers, heads = (int(n) for n in shape.split("x"))
            if several:
                choices = np.array([int(digit, 16) for digit in digits])
                mask = cls.of_choices(choices.reshape(num_layers, heads))
            else:
                packed = np.frombuffer(bytes.fromhex(digits), dtype=np.uint8)
                flat = np.unpackbits(packed)[: num_layers * heads]
                mask = cls(flat.reshape(num_layers, heads).astype(np.bool_))
        except ValueError:
            raise ValueError(f"'{key}' is not the key of a head mask") from None
        if mask.key != key:
            raise ValueError(f"'{key}' is not the key of a head mask")
        return mask

    def with_layer(self, layer: int, row: npt.ArrayLike) -> HeadMask:
        """A copy with `row` [HKV] as layer `layer`: True is full, False has the widest window."""
        choices = self.choices.copy()
        choices[layer] = ~np.asarray(row, dtype=np.bool_)
        return HeadMask.of_choices(choices)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, HeadMask) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)

    def __repr__(self) -> str:
        return f"HeadMask({self.key}, swa_ratio={self.swa_ratio:.4g})"


@dataclass(frozen=True)
class HeadMaskFile:
    """`head_mask.json`: a head mask with its model, windows and search.

    It is written in format 2 with several windows, and in format 1 with one.
    """

    model: str
    method: str
    swa_ratio: float
    mask: HeadMask
    windows: tuple[Window, ...]
    score: float | None = None
    seed: int | None = None

    @classmethod
    def of(
        cls,
        mask: HeadMask,
        windows: Windows,
        *,
        model: str,
        method: str,
        swa_ratio: float,
        score: float | None = None,
        seed: int | None = None,
    ) -> HeadMaskFile:
        """The file of `mask`; ValueError if `windows` are too few."""
        mask.windows_per_layer(windows)
        return cls(  # as Python's numbers: JSON cannot hold numpy's
            model, method, float(swa_ratio), mask, window_menu(windows),
            None if score is None else float(score), None if seed is None else operator.index(seed),
        )  # fmt: skip

    @property
    def window_size(self) -> int:
        """Size of the widest window, without sinks."""
        return self.windows[0].size

    @property
    def sinks(self) -> int:
        return self.windows[0].sinks

    @property
    def num_layers(self) -> int:
        return self.mask.num_layers

    @property
    def num_key_value_heads(self) -> int:
        return self.mask.num_key_value_heads

    @property
    def content(self) -> dict[str, Any]:
        """The JSON object."""
        mask, several = self.mask, len(self.windows) > 1
        sizes: dict[str, Any] = {"window_size": self.window_size}
        heads: list[Any] = mask.swa_kv_heads
        if several:
            sizes = {"window_sizes": [window.size for window in self.windows[::-1]]}
            choices = range(len(self.windows), 0, -1)
            heads = [[np.flatnonzero(row == k).tolist() for k in choices] for row in mask.choices]
        return {
            "format": 2 if several else 1,
            "model": self.model,
            "method": self.method,
            "swa_ratio": self.swa_ratio,
            **sizes,
            "sinks": self.sinks,
            "num_layers": mask.num_layers,
            "num_key_value_heads": mask.num_key_value_heads,
            "swa_kv_heads": heads,
            "score": self.score,
            "seed": self.seed,
        }

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write as JSON, atomically."""
        write_json(Path(path), self.content)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> HeadMaskFile:
        """Read and check a file; raises UserError when it is missing, damaged or too new."""
        advice = "make it again, or name another head_mask.json"
        content = load_user_json(path, advice)
        try:
            return _file_of(content)
        except ValueError as error:
            raise UserError(f"{path}: {error}") from error


_NONE, _NUMBER = type(None), (int, float)
FieldTypes = dict[str, tuple[type, ...]]


def typed_fields(content: dict[str, Any], types: FieldTypes, where: str = "") -> dict[str, Any]:
    """The fields named in `types`; raises ValueError where one is missing or of another type."""
    for name, expected in types.items():
        if name not in content and _NONE not in expected:
            raise ValueError(f"{where}the field {name} is missing")
        value = content.get(name)
        if not isinstance(value, expected) or isinstance(value, bool):
            raise ValueError(f"{where}{name} has an unexpected value {value!r:.60}")
        if isinstance(value, int | float) and not abs(value) < _LARGEST:
            raise ValueError(f"{where}{name} is {value}, expected a finite number below 2^63")
    return {name: content.get(name) for name in types}


def _file_of(content: object) -> HeadMaskFile:
    """The file in a JSON value; raises ValueError if it holds no valid head mask."""
    if not isinstance(content, dict):
        raise ValueError("expected a JSON object with a head mask")
    if "swa_kv_heads" not in content:
        content_kind = "a front of masks" if "points" in content else "no head mask"
        raise ValueError(
            f"holds {content_kind}; expected a file with swa_kv_heads, such as a run's "
            "materialize/model/head_mask.json"
        )
    number = content.get("format")
    if number not in FORMATS or type(number) is not int:
        known = ", ".join(map(str, FORMATS))
        raise ValueError(f"format is {number!r:.60}, this version reads formats {known}")
    several = number == 2
    size: FieldTypes = {"window_sizes": (list,)} if several else {"window_size": (int,)}
    values = typed_fields(content, {
        "model": (str,), "method": (str,), "swa_ratio": _NUMBER, **size, "sinks": (int,),
        "num_layers": (int,), "num_key_value_heads": (int,), "swa_kv_heads": (list,),
        "score": (*_NUMBER, _NONE), "seed": (int, _NONE),
    })  # fmt: skip
    ratio, heads = values["swa_ratio"], values["num_key_value_heads"]
    if not 0 <= ratio <= 1:
        raise ValueError(f"swa_ratio is {ratio}, expected a share from 0 to 1")
    if heads < 1:
        raise ValueError(f"num_key_value_heads is {heads}, expected at least one")
    rows = _heads_by_window(values)
    sizes = values["window_sizes"] if several else [values["window_size"]]
    menu = rising_menu(sizes, values["sinks"])
    sliding = HeadMask.from_swa_kv_heads([chain(*row) for row in rows], heads)
    choices = (~sliding.is_full).astype(np.uint8)
    for layer, row in enumerate(rows):
        for choice, window_heads in zip(range(len(menu), 0, -1), row, strict=True):
            choices[layer, window_heads] = choice
    return HeadMaskFile(
        values["model"],
        values["method"],
        ratio,
        HeadMask.of_choices(choices),
        menu,
        values["score"],
        values["seed"],
    )


def _heads_by_window(values: Mapping[str, Any]) -> list[list[list[int]]]:
    """`swa_kv_heads` as KV heads by layer and window; raises ValueError where it is malformed."""
    rows: list[Any] = values["swa_kv_heads"]
    if "window_sizes" in values:
        windows = len(values["window_sizes"])
        expected = f"for each layer a list of head indices for each of {windows} windows"
        if windows > MAX_WINDOWS:
            raise ValueError(
                f"window_sizes has {windows:,} windows, a mask has at most {MAX_WINDOWS}"
            )
    else:
        windows, expected = 1, "one list of head indices per layer"
        rows = [[row] for row in rows]
    for row in rows:
        lists = row if isinstance(row, list) and len(row) == windows else [None]
        if not all(isinstance(heads, list) and {*map(type, heads)} <= {int} for heads in lists):
            raise ValueError(f"swa_kv_heads must hold {expected}")
    if len(rows) != values["num_layers"]:
        raise ValueError(
            f"swa_kv_heads has {len(rows)} layers, num_layers says {values['num_layers']}"
        )
    return rows
