"""`head_mask.json` and `front.json`: the masks that a search found."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from bosch.errors import UserError
from bosch.files import load_user_json, write_json
from bosch.masks import HeadMask

FORMAT = 1
_NONE, _NUMBER = type(None), (int, float)
_MASK_TYPES = {"windows": (list,), "sinks": (int,)}


@dataclass(frozen=True)
class HeadMaskFile:
    """`head_mask.json`: a head mask, its model, and the search that found it."""

    mask: HeadMask
    model: str
    method: str
    score: float | None = None
    seed: int | None = None

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write as JSON, atomically."""
        content = {"format": FORMAT, "model": self.model, "method": self.method}
        content |= {**self.mask.content, "score": self.score, "seed": self.seed}
        write_json(Path(path), content)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> HeadMaskFile:
        """Read and check a file; raises UserError when it is missing or damaged."""
        content = load_user_json(path, "make it again, or name another head_mask.json")
        try:
            if isinstance(content, dict) and "points" in content:
                raise ValueError("holds a front; take a run's materialize/model/head_mask.json")
            values = _typed(content, {
                "format": (int,), "model": (str,), "method": (str,), **_MASK_TYPES,
                "score": (*_NUMBER, _NONE), "seed": (int, _NONE),
            })  # fmt: skip
            _check_format(values.pop("format"))
            return cls(HeadMask(values.pop("windows"), values.pop("sinks")), **values)
        except ValueError as error:
            raise UserError(f"{path}: {error}") from error


@dataclass(frozen=True)
class HeldOut:
    """A score on held-out examples, with one-sided 95 % limits."""

    score: float
    low: float
    high: float


@dataclass(frozen=True)
class FrontPoint:
    """A head mask of a front, its cost and its score.

    `kv_slots` are heads x cached tokens at the front's context, `bytes` is the cache in `generate`,
    if known. `score` is on the search's examples, `held_out` on others. `passes` are the full
    passes that the search had spent when it measured the point.
    """

    mask: HeadMask
    kv_slots: int
    bytes: int | None
    score: float
    held_out: HeldOut | None
    passes: float


@dataclass(frozen=True)
class Front:
    """`front.json`: the points of a search in order of their KV slots at `context` tokens.

    Raises ValueError if there are none, or they are not in order.
    """

    context: int
    points: tuple[FrontPoint, ...]

    def __post_init__(self) -> None:
        if not self.points:
            raise ValueError("a front has at least one point")
        for index, point in enumerate(self.points):
            if point.kv_slots != point.mask.kv_slots(self.context):
                raise ValueError(f"points[{index}]: kv_slots is not that of its windows")
        if any(a.kv_slots >= b.kv_slots for a, b in pairwise(self.points)):
            raise ValueError("points must be in order of kv_slots")

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write as JSON, atomically."""
        points = [
            {"windows": point.mask.content["windows"], **asdict(point)} for point in self.points
        ]
        for point in points:
            del point["mask"]
        sinks = max(point.mask.sinks for point in self.points)
        content = {"format": FORMAT, "context": self.context, "sinks": sinks, "points": points}
        write_json(Path(path), content)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Front:
        """Read and check a file; raises UserError when it is missing or damaged."""
        content = load_user_json(path, "search again")
        try:
            types = {"format": (int,), "context": (int,), "sinks": (int,), "points": (list,)}
            values = _typed(content, types)
            _check_format(values["format"])
            points = (_point(entry, values["sinks"]) for entry in values["points"])
            return cls(values["context"], tuple(points))
        except ValueError as error:
            raise UserError(f"{path}: {error}") from error


def _point(entry: object, sinks: int) -> FrontPoint:
    values = _typed(entry, {
        "windows": (list,), "kv_slots": (int,), "bytes": (int, _NONE), "score": _NUMBER,
        "held_out": (dict, _NONE), "passes": _NUMBER,
    })  # fmt: skip
    held_out = values.pop("held_out")
    if held_out is not None:
        held_out = HeldOut(**_typed(held_out, dict.fromkeys(("score", "low", "high"), _NUMBER)))
    return FrontPoint(HeadMask(values.pop("windows"), sinks), held_out=held_out, **values)


def _check_format(number: int) -> None:
    if number != FORMAT:
        raise ValueError(f"format is {number}, this version reads format {FORMAT}")


def _typed(content: object, types: Mapping[str, tuple[type, ...]]) -> dict[str, Any]:
    """The fields named in `types`; ValueError where one is missing or of another type."""
    if not isinstance(content, dict):
        raise ValueError("expected a JSON object")
    for name, expected in types.items():
        if name not in content:
            raise ValueError(f"the field {name} is missing")
        if type(content[name]) not in expected:
            raise ValueError(f"{name} has an unexpected value {content[name]!r:.60}")
    return {name: content[name] for name in types}
