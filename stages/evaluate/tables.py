"""Tables of scores.json from the lines of samples.jsonl."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from bosch.analysis.intervals import Interval, compare, mean_score, student
from stages.evaluate.scores import ORIGINAL, is_hybrid

Record = Mapping[str, Any]
# Names of suites.
RULER, LM_EVAL, POSITIONS = "ruler", "lm_eval", "positions"
_OTHER_SAMPLES = "the original answered other samples of it; run with --force original"
# One model's records of a task at a length, in the order of the samples.
Cells = dict[tuple[str, int], list[Record]]
# Scores that are averaged to one, and the original's scores on the same samples.
_Part = tuple[Sequence[float], Sequence[float] | None]


@dataclass(frozen=True)
class TaskGroup:
    """A group of lm-eval's, scored by the first of its rules.

    The metric has the names in `metrics`, one for each filter; the mean is over all documents
    (`by_size`) or over the tasks. `is_named`: the recipe names the group itself.
    """

    tasks: tuple[str, ...]
    metrics: tuple[str, ...]
    by_size: bool
    is_named: bool


def cells_of(records: Iterable[Record], suite: str) -> Cells:
    """A model's records in a suite, by task and length."""
    cells: Cells = {}
    for record in records:
        if record["suite"] == suite:
            cells.setdefault((record["task"], record["length"]), []).append(record)
    return cells


def score_tables(
    records: Mapping[str, Sequence[Record]],
    groups: Mapping[str, TaskGroup],
    missing: Mapping[str, Mapping[str, str]],
) -> dict[str, Any]:
    """The fields about scores and samples of scores.json, from all models' records.

    A task without a score for one model, or without the original's answers to the same prompts, is
    left out for all, so that averages compare.
    """
    absent = {suite: dict(tasks) for suite, tasks in missing.items()}
    suites = list(dict.fromkeys(one["suite"] for lines in records.values() for one in lines))
    checkpoints: dict[str, dict[str, Any]] = {model: {} for model in records}
    losses: dict[str, Any] = {}
    for suite in suites:
        cells = {model: cells_of(lines, suite) for model, lines in records.items()}
        base = cells.get(ORIGINAL)
        if suite == POSITIONS:
            losses = _loss_tables(cells)
            continue
        for found in cells.values():
            for (task, _), lines in found.items():
                if not all(0 <= one["score"] <= 1 for one in lines):
                    reason = "its score is not a share from 0 to 1 per document"
                    absent.setdefault(suite, {})[task] = reason
        for model, found in cells.items():
            # The original and other models answer the same samples, maybe in other templates.
            compared = base if is_hybrid(model) else None
            for task in _not_compared(found, compared):
                absent.setdefault(suite, {}).setdefault(task, _OTHER_SAMPLES)
        for model, found in cells.items():
            left = {k: lines for k, lines in found.items() if k[0] not in absent.get(suite, {})}
            if left:
                against_base = base if model != ORIGINAL else None
                checkpoints[model][suite] = suite_table(left, against_base, groups)
    return {
        "checkpoints": checkpoints,
        **({"positions": losses} if losses else {}),
        **({"missing": absent} if absent else {}),
    }


def _loss_tables(cells: Mapping[str, Cells]) -> dict[str, Any]:
    tables, original = {}, None
    for model, found in ((model, found) for model, found in cells.items() if found):
        [((_, length), lines)] = found.items()
        losses = [one["loss"] for one in lines]
        tables[model] = position_table(length, losses, original)
        original = losses if model == ORIGINAL else original
    return tables


def _not_compared(found: Cells, base: Cells | None) -> Iterator[str]:
    """The tasks of which the original, whose stage may have had other data, has other samples."""
    if base is not None:
        for key in {*found, *base}:
            own, other = ([one["prompt"] for one in cells.get(key, [])] for cells in (found, base))
            if own != other:
                yield key[0]


def suite_table(
    cells: Cells, original: Cells | None = None, groups: Mapping[str, TaskGroup] | None = None
) -> dict[str, Any]:
    """A model's table in a suite: task by length, averages, 95 % intervals, all in percent.

    `average` is the unweighted mean over tasks and lengths, which count as independent; a group
    that the recipe names counts as one of them if its score is a mean over documents. If the
    `original` model's records are given, every score is compared with them.
    """
    base = original or {}
    parts = {key: _part(lines, base.get(key), "score") for key, lines in cells.items()}
    table: dict[str, Any] = {}
    for (task, length), part in parts.items():
        cut = sum(bool(one.get("cut")) for one in cells[task, length])
        table.setdefault(task, {})[str(length)] = {
            **_mean_row([part]), "samples": len(part[0]), **({"cut": cut} if cut else {})
        }  # fmt: skip
    averaged, rows = dict(parts), {}
    for name, group in (groups or {}).items():
        if own := _group_parts(group, cells, base):
            pooled = _pooled(list(own.values())) if group.by_size else None
            row = _mean_row([pooled] if pooled is not None else list(own.values()))
            rows[name] = {**row, "tasks": list(own), "of": len(group.tasks)}
            if group.is_named and pooled is not None:
                averaged = {k: part for k, part in averaged.items() if k[0] not in own}
                averaged[name, 0] = pooled
    average = _mean_row(list(averaged.values()))
    return {
        "average": average.pop("score"),
        **average,
        **table,
        "by_length": {
            str(length): _mean_row([part for key, part in averaged.items() if key[1] == length])
            for length in sorted({length for _, length in averaged})
        },
        **({"groups": rows} if rows else {}),
    }


def _part(lines: Sequence[Record], base: Sequence[Record] | None, metric: str) -> _Part:
    def values(some: Sequence[Record]) -> list[float]:
        return [one["score"] if metric == "score" else one["scores"][metric] for one in some]

    return values(lines), values(base) if base is not None else None


def _group_parts(group: TaskGroup, cells: Cells, base: Cells) -> dict[str, _Part]:
    """The scores of a group's tasks under its metric, of the tasks that have it as a share."""
    found = {}
    for task in group.tasks:
        lines, other = cells.get((task, 0), []), base.get((task, 0))
        for metric in group.metrics:
            values = [one["scores"].get(metric, -1) for one in lines]
            if values and all(0 <= value <= 1 for value in values):
                found[task] = _part(lines, other, metric)
                break
    return found


def _pooled(parts: Sequence[_Part]) -> _Part:
    """All documents of some tasks as one task, whose mean weighs tasks by size."""
    bases = [base for _, base in parts if base is not None]
    values = [value for part, _ in parts for value in part]
    whole = len(bases) == len(parts)
    return values, [value for base in bases for value in base] if whole else None


def _mean_row(parts: Sequence[_Part]) -> dict[str, Any]:
    """The unweighted mean of parts, and its comparison with the original's."""
    scores = [values for values, _ in parts]
    means = [sum(values) / len(values) for values in scores]
    mean = mean_score(means, list(map(len, scores)))
    bases = [base for _, base in parts if base is not None]
    if [len(base) for base in bases] != [len(values) for values in scores]:
        return _points(mean)  # the original lacks answers to the same samples
    pairs = list(zip(scores, bases, strict=True))
    return {**_points(mean), "against_original": against(pairs)}


def against(parts: Sequence[tuple[Sequence[float], Sequence[float]]]) -> dict[str, Any]:
    """The comparison of a model's scores with the original's; all parts weigh the same."""
    scores, originals = [model for model, _ in parts], [base for _, base in parts]
    result = compare(scores, originals)
    difference, low, high = (100 * value for value in result.difference)
    return {
        "p_value": result.p_value, "samples": sum(map(len, scores)),
        "difference": difference, "difference_low": low, "difference_high": high,
    }  # fmt: skip


def _points(interval: Interval) -> dict[str, float]:
    # Ten decimals: 0.975 of 100 is 97.5.
    names = ("score", "low", "high")
    return {name: round(100 * value, 10) for name, value in zip(names, interval, strict=True)}


def edges(length: int) -> list[int]:
    """Bounds of the bins of predicted positions: 1, 2, 4, … and `length`."""
    return [*(2**power for power in range(math.ceil(math.log2(length)))), length]


def position_table(
    length: int, answers: Sequence[Sequence[float]], original: Sequence[Sequence[float]] | None
) -> dict[str, Any]:
    """Mean loss of each bin, and its difference to the original's, with 95 % intervals.

    `answers` [documents, bins] in nats per token; the difference is over the same documents.
    Intervals are over documents; up to four have none.
    """
    values = np.asarray(answers)
    table: dict[str, Any] = {
        "edges": edges(length),
        "documents": len(values),
        "loss": _means(values),
    }
    if original is not None and len(original) == len(values):
        table["difference"] = _means(values - np.asarray(original))
    return table


def _means(values: np.ndarray) -> list[dict[str, float | None]]:
    return [student(column)._asdict() for column in values.T]
