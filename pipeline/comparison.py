"""What a comparison of methods found: its cells, its tables and the files it leaves."""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from bosch.errors import RunError
from pipeline.files import read_json, write_json, write_text
from pipeline.runner import Runner

# Rows of BOSCH Tables 1 and 2. Methods that are named in no group are not the paper's.
_GROUPS: dict[str, dict[str, str]] = {
    "Layer-level heuristics": {"rand": "RAND", "bme": "BME", "intr": "INTR"},
    "Head-level static methods": {
        "dcam": "DCAM", "apl": "APL", "proxy": "Proxy", "qada": "QAdA", "razor": "Razor",
        "fisher": "Fisher",
    },
    "BOSCH and its ablations": {
        "bosch": "BOSCH", "b_single": "B-single", "b_multi": "B-multi", "b_layer": "B-layer",
    },
}  # fmt: skip
_OTHERS = "Not in the paper"
_LABELS = {name: label for group in _GROUPS.values() for name, label in group.items()}
_LABELS["bosch_plus"] = "BOSCH+"
_CHECKPOINT = re.compile(r"tokens-(\d+)")

Models = Literal["untrained", "trained"]


@dataclass(frozen=True)
class Cell:
    """One method at one ratio, and its search's seed; `own_seed`: it is the recipe's."""

    method: str
    ratio: float
    seed: int
    own_seed: bool

    @property
    def folder(self) -> str:
        """Name of the cell's folder of links."""
        return f"{self.method}-{self.ratio:g}" + ("" if self.own_seed else f"-seed-{self.seed}")

    @staticmethod
    def order(method: str) -> tuple[int, str]:
        """Place of a method in the tables."""
        known = list(_LABELS)
        return (known.index(method), "") if method in known else (len(known), method)

    def __str__(self) -> str:
        seed = "" if self.own_seed else f", seed {self.seed}"
        return f"{label_of(self.method)} at {self.ratio:g}{seed}"


@dataclass(frozen=True)
class Score:
    """Average of a suite in points of 100."""

    average: float
    standard_error: float | None


@dataclass(frozen=True)
class Result:
    """What the stages of a cell published."""

    keys: Mapping[str, str]
    calibration_score: float
    calibration_log_likelihood: float
    costs: Mapping[str, float]
    notes: Sequence[str]
    original: Mapping[str, Score]
    untrained: Mapping[str, Score]
    trained: Mapping[str, Score]
    trained_tokens: int | None


@dataclass(frozen=True)
class Comparison:
    """All cells of a comparison and the results there are so far."""

    recipe: str
    model: str
    folder: Path
    cells: tuple[Cell, ...]
    with_training: bool
    results: Mapping[Cell, Result] = field(default_factory=dict)

    @property
    def ratios(self) -> list[float]:
        return sorted({cell.ratio for cell in self.cells})

    @property
    def methods(self) -> list[str]:
        """In the order of the tables."""
        return list(dict.fromkeys(cell.method for cell in self.cells))

    def values(self, method: str, ratio: float, models: Models, suite: str) -> list[float]:
        """Averages of all seeds of one method at one ratio."""
        found = []
        for cell, result in self.results.items():
            if (cell.method, cell.ratio) == (method, ratio):
                scores: Mapping[str, Score] = getattr(result, models)
                found += [scores[suite].average] if suite in scores else []
        return found

    @property
    def originals(self) -> Mapping[str, Score]:
        """The original model's scores: the same in every cell."""
        return next((result.original for result in self.results.values()), {})


@dataclass(frozen=True)
class Row:
    """A row of a table: a text for each ratio. `best` and `second` are column numbers."""

    label: str
    texts: list[str]
    best: frozenset[int] = frozenset()
    second: frozenset[int] = frozenset()


@dataclass(frozen=True)
class ScoreTable:
    """A table in the layout of the paper: groups of methods by ratio."""

    title: str
    ratios: list[float]
    original: Row
    groups: dict[str, list[Row]]


def label_of(method: str) -> str:
    """A method's name in the tables."""
    return _LABELS.get(method, method)


def read_result(runner: Runner) -> Result:
    """What a cell's stages published; raises RunError where it cannot be read."""
    folders = {
        node.name: runner.store.published(node.name, str(node.key))
        for node in runner.nodes
        if node.name in runner.chosen
    }
    search = read_json(folders["search"] / "summary.json")
    scores = read_json(folders["evaluate"] / "scores.json")
    if not isinstance(search, dict) or not isinstance(scores, dict):
        raise RunError(f"{runner.name}: the published results cannot be read; run it again")
    models = {name: _suites(suites) for name, suites in scores["checkpoints"].items()}
    tokens = [int(found[1]) for name in models if (found := _CHECKPOINT.fullmatch(name))]
    names = ("evaluations", "full_forward_equivalents", "model_seconds", "solver_seconds")
    return Result(
        keys={name: folder.name for name, folder in folders.items()},
        calibration_score=search["best_score"],
        calibration_log_likelihood=search["best_log_likelihood"],
        costs={name: search[name] for name in (*names, *_reused(search))},
        notes=search["notes"],
        original=models["original"],
        untrained=models["hybrid"],
        trained=models[f"tokens-{max(tokens)}"] if tokens else {},
        trained_tokens=max(tokens, default=None),
    )


def _reused(search: Mapping[str, Any]) -> list[str]:
    return [name for name in search if name.startswith("reused_")]


def _suites(suites: Mapping[str, Any]) -> dict[str, Score]:
    return {
        name: Score(table["average"], table.get("standard_error"))
        for name, table in suites.items()
        if isinstance(table, dict) and "average" in table
    }


def tables(comparison: Comparison) -> Iterator[ScoreTable]:
    """Table 1, untrained hybrids, and with training Table 2, the last checkpoints."""
    number = 0
    tokens = next((r.trained_tokens for r in comparison.results.values()), None)
    kinds: list[tuple[Models, str]] = [("untrained", "without training")]
    if comparison.with_training:
        kinds.append(("trained", f"after training on {tokens or 0:,} tokens"))
    for suite, original in comparison.originals.items():
        for models, words in kinds:
            number += 1
            yield _table(
                comparison, models, suite, original, f"Table {number}: {suite} average, {words}"
            )


def _table(
    comparison: Comparison, models: Models, suite: str, original: Score, title: str
) -> ScoreTable:
    means: list[dict[str, float]] = []
    for ratio in comparison.ratios:
        found = {m: comparison.values(m, ratio, models, suite) for m in comparison.methods}
        means.append({m: round(statistics.fmean(v), 1) for m, v in found.items() if v})
    groups: dict[str, list[Row]] = {}
    for method in comparison.methods:
        group = next((name for name, names in _GROUPS.items() if method in names), _OTHERS)
        texts = [
            _text(comparison.values(method, ratio, models, suite)) for ratio in comparison.ratios
        ]
        places = [_place(column, method) for column in means]
        row = Row(
            label_of(method),
            texts,
            frozenset(i for i, place in enumerate(places) if place == 0),
            frozenset(i for i, place in enumerate(places) if place == 1),
        )
        groups.setdefault(group, []).append(row)
    # The original model has no sliding head: its score stands in every column to compare with.
    own = Row("Original", [f"{original.average:.1f}"] * len(comparison.ratios))
    return ScoreTable(title, comparison.ratios, own, groups)


def _place(column: Mapping[str, float], method: str) -> int | None:
    """0 for the best of a column, 1 for the second best; equal scores share a place."""
    if method not in column or len(column) < 2:
        return None
    return sorted(set(column.values()), reverse=True).index(column[method])


def _text(values: Sequence[float]) -> str:
    if not values:
        return "–"
    mean = f"{statistics.fmean(values):.1f}"
    return f"{mean} ± {statistics.stdev(values):.1f}" if len(values) > 1 else mean


def write_comparison(comparison: Comparison, results: Mapping[Cell, Result]) -> None:
    """Write compare.json and compare.md, and with the last cell compare.png."""
    from pipeline.comparison_page import markdown
    from pipeline.comparison_plot import draw

    content = {
        "format": 1,
        "recipe": comparison.recipe,
        "model": comparison.model,
        "methods": comparison.methods,
        "ratios": comparison.ratios,
        "with_training": comparison.with_training,
        "complete": len(results) == len(comparison.cells),
        "cells": [
            {
                "method": cell.method,
                "ratio": cell.ratio,
                "seed": cell.seed,
                **(asdict(results[cell]) if cell in results else {}),
            }
            for cell in comparison.cells
        ],
    }
    known = Comparison(**{**comparison.__dict__, "results": dict(results)})
    json_file = comparison.folder / "compare.json"
    if read_json(json_file) == json.loads(json.dumps(content)):
        return
    write_text(comparison.folder / "compare.md", markdown(known))
    if content["complete"]:
        draw(known, comparison.folder / "compare.png")
    write_json(json_file, content)
