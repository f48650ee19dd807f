"""The front of a search: head masks for several budgets.

L layers, HKV key/value heads per layer, P points. Needs numpy only, as `bosch.heads`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from bosch.errors import UserError
from bosch.files import load_user_json, write_json
from bosch.heads import FieldTypes, HeadMask, typed_fields
from bosch.window import MAX_WINDOWS, Window, Windows, rising_menu, window_menu

FORMAT = 1
MAX_POINTS = 100

Layout = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class FrontPoint:
    """A head mask of the front with its cost and its score.

    `layout[l][h]` is the window of KV head h in layer l, in the base model's order, or 0 for a full
    head. `kv_slots` are heads x cached tokens at the front's context; `bytes` is the cache in an
    engine, None before `Front.priced`. `score` and `log_likelihood` are on the search's examples,
    `held_out_score` on others, with one-sided 95 % limits. `passes` are the full passes that the
    search had spent when it measured the point.
    """

    kv_slots: int
    bytes: int | None
    full_kv_heads: int
    layout: Layout
    score: float
    log_likelihood: float
    held_out_score: float | None
    held_out_low: float | None
    held_out_high: float | None
    passes: float

    @classmethod
    def of(
        cls,
        mask: HeadMask,
        windows: Windows,
        context: int,
        *,
        score: float,
        log_likelihood: float,
        held_out: tuple[float, float, float] | None = None,
        passes: float = 0.0,
    ) -> FrontPoint:
        """The point of `mask` at `context` tokens; `held_out` is (score, low, high)."""
        rows = mask.windows_per_layer(windows)
        held_out_score, low, high = held_out or (None, None, None)
        return cls(
            kv_slots=mask.kv_slots(windows, context), bytes=None,
            full_kv_heads=int(mask.is_full.sum()),
            layout=tuple(tuple(0 if w is None else w.size for w in row) for row in rows),
            score=score, log_likelihood=log_likelihood, held_out_score=held_out_score,
            held_out_low=low, held_out_high=high, passes=passes,
        )  # fmt: skip


@dataclass(frozen=True)
class Front:
    """`front.json`: the points of a search in order of KV slots.

    Caches are counted at `context` tokens. `window_sizes` is the menu in ascending order, `model`
    is as in `head_mask.json`, `chosen` the index of the point for the budget. Raises ValueError if
    a point has a window outside the menu or is out of order.
    """

    context: int
    model: str
    window_sizes: tuple[int, ...]
    sinks: int
    num_layers: int
    num_key_value_heads: int
    points: tuple[FrontPoint, ...]
    seed: int | None = None
    chosen: int | None = None

    def __post_init__(self) -> None:
        if not self.points:
            raise ValueError("a front has at least one point")
        if len(self.window_sizes) > MAX_WINDOWS:
            raise ValueError(
                f"window_sizes has {len(self.window_sizes):,} windows, a mask has at most "
                f"{MAX_WINDOWS}"
            )
        if self.context < 1:
            raise ValueError(f"context is {self.context}, expected at least one token")
        if self.chosen is not None and not 0 <= self.chosen < len(self.points):
            raise ValueError(f"chosen is {self.chosen}, there are {len(self.points)} points")
        for index, point in enumerate(self.points):
            self._check_layout(index, point)
        for index, point in enumerate(self.points):
            self._check_values(index, point)
        for index, (point, larger) in enumerate(pairwise(self.points)):
            if point.kv_slots >= larger.kv_slots:
                raise ValueError(
                    f"points[{index + 1}]: kv_slots is {larger.kv_slots:,}, no more than the "
                    f"{point.kv_slots:,} of the point before it"
                )

    def _check_layout(self, index: int, point: FrontPoint) -> None:
        shape = [len(row) for row in point.layout]
        if shape != [self.num_key_value_heads] * self.num_layers:
            raise ValueError(
                f"points[{index}]: layout must hold {self.num_layers} rows of "
                f"{self.num_key_value_heads} windows"
            )
        unknown = {size for row in point.layout for size in row} - {0, *self.window_sizes}
        if unknown:
            raise ValueError(
                f"points[{index}]: layout has the window {min(unknown)}, window_sizes are "
                f"{list(self.window_sizes)}"
            )

    def _check_values(self, index: int, point: FrontPoint) -> None:
        mask = self.mask(index)
        counts = {
            "kv_slots": mask.kv_slots(self.windows, self.context),
            "full_kv_heads": int(mask.is_full.sum()),
        }
        for name, count in counts.items():
            if getattr(point, name) != count:
                raise ValueError(
                    f"points[{index}]: {name} is {getattr(point, name):,}, its layout has {count:,}"
                )
        held_out = (point.held_out_low, point.held_out_score, point.held_out_high)
        bounds = [bound for bound in held_out if bound is not None]
        if bounds and (len(bounds) < 3 or not 0 <= bounds[0] <= bounds[1] <= bounds[2] <= 1):
            raise ValueError(
                f"points[{index}]: held_out_low, held_out_score and held_out_high are "
                f"{', '.join(map(str, held_out))}, expected shares in ascending "
                "order, or null for all"
            )

    @classmethod
    def of(
        cls,
        points: Sequence[FrontPoint],
        windows: Windows,
        context: int,
        *,
        model: str,
        seed: int | None = None,
    ) -> Front:
        """Make a front of `points` in any order; of equal KV slots the first point is kept."""
        menu = window_menu(windows)
        by_slots: dict[int, FrontPoint] = {}
        for point in points:
            by_slots.setdefault(point.kv_slots, point)
        return cls(
            context=context,
            model=model,
            window_sizes=tuple(window.size for window in menu[::-1]),
            sinks=menu[0].sinks,
            num_layers=len(points[0].layout),
            num_key_value_heads=len(points[0].layout[0]),
            points=tuple(by_slots[slots] for slots in sorted(by_slots)),
            seed=seed,
        )

    @cached_property
    def windows(self) -> tuple[Window, ...]:
        """The menu, the widest first."""
        return rising_menu(self.window_sizes, self.sinks)

    def mask(self, index: int) -> HeadMask:
        """The head mask of a point, with `windows` as menu."""
        return HeadMask.of_choices(self._choices[index])

    @cached_property
    def _choices(self) -> npt.NDArray[np.uint8]:
        """Choices of all points, [P, L, HKV]: 0 full, k the k-th window from the widest."""
        choice = {0: 0, **{window.size: k for k, window in enumerate(self.windows, 1)}}
        return np.array(
            [[[choice[size] for size in row] for row in point.layout] for point in self.points],
            dtype=np.uint8,
        )

    def priced(self, bytes_of: Callable[[HeadMask], int]) -> Front:
        """A copy with the `bytes` of each point computed from its mask."""
        points = (
            replace(point, bytes=int(bytes_of(self.mask(index))))
            for index, point in enumerate(self.points)
        )
        return replace(self, points=tuple(points))

    @property
    def content(self) -> dict[str, Any]:
        """The JSON object."""
        content = {"format": FORMAT} | {
            name: getattr(self, name) for name in _FRONT_TYPES if name != "points"
        }
        content["window_sizes"] = list(self.window_sizes)
        content["points"] = [
            asdict(point) | {"layout": [list(row) for row in point.layout]} for point in self.points
        ]
        return content | {"chosen": content.pop("chosen")}

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write as JSON, atomically."""
        write_json(Path(path), self.content)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Front:
        """Read and check a file; raises UserError when it is missing, damaged or too new."""
        content = load_user_json(path, "search again")
        try:
            return _from_content(content)
        except ValueError as error:
            raise UserError(f"{path}: {error}") from error


_NUMBER = (int, float)
_NONE = type(None)
_FRONT_TYPES: FieldTypes = {
    "context": (int,),
    "model": (str,),
    "window_sizes": (list,),
    "sinks": (int,),
    "num_layers": (int,),
    "num_key_value_heads": (int,),
    "seed": (int, _NONE),
    "points": (list,),
    "chosen": (int, _NONE),
}
_POINT_TYPES: FieldTypes = {
    "kv_slots": (int,),
    "bytes": (int, _NONE),
    "full_kv_heads": (int,),
    "layout": (list,),
    "score": _NUMBER,
    "log_likelihood": _NUMBER,
    "held_out_score": (*_NUMBER, _NONE),
    "held_out_low": (*_NUMBER, _NONE),
    "held_out_high": (*_NUMBER, _NONE),
    "passes": _NUMBER,
}
assert [field.name for field in fields(FrontPoint)] == list(_POINT_TYPES)


def _from_content(content: object) -> Front:
    """The front in a JSON value; raises ValueError if it holds no valid front."""
    if not isinstance(content, dict):
        raise ValueError("expected a JSON object with a front")
    number = content.get("format")
    if number != FORMAT or type(number) is not int:
        raise ValueError(f"format is {number!r:.60}, this version reads format {FORMAT}")
    values = typed_fields(content, _FRONT_TYPES)
    layers, heads = values["num_layers"], values["num_key_value_heads"]
    if heads < 1 or layers < 1:
        raise ValueError(f"{layers:,} layers of {heads:,} KV heads; that is no model")
    if len(values["points"]) > MAX_POINTS:
        raise ValueError(f"{len(values['points']):,} points, a front has at most {MAX_POINTS:,}")
    sizes = values["window_sizes"]
    rising_menu(sizes, values["sinks"])
    points = []
    for index, entry in enumerate(values.pop("points")):
        where = f"points[{index}]"
        if not isinstance(entry, dict):
            raise ValueError(f"{where}: expected a JSON object")
        point = typed_fields(entry, _POINT_TYPES, f"{where}: ")
        rows = point.pop("layout")
        if not all(isinstance(row, list) and all(type(w) is int for w in row) for row in rows):
            raise ValueError(f"{where}: layout must hold one list of windows per layer")
        if not 0 <= point["score"] <= 1 or point["passes"] < 0 or (point["bytes"] or 0) < 0:
            raise ValueError(
                f"{where}: score is {point['score']}, passes {point['passes']} and bytes "
                f"{point['bytes']}; expected a share, and counts from 0"
            )
        layout = tuple(tuple(row) for row in rows)
        points.append(FrontPoint(layout=layout, **point))
    return Front(**{**values, "window_sizes": tuple(sizes)}, points=tuple(points))
