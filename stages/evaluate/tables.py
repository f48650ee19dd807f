"""Tables of scores.json from answers."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from bosch.analysis.intervals import Interval, compare, mean_score
from stages.evaluate.answers import TaskGroup

if TYPE_CHECKING:
    from lm_eval.config.group import AggMetricConfig

# Scores in [0, 1] of a model in a suite, by task and length, in the order of the samples.
SubtaskScores = Mapping[tuple[str, int], Sequence[float]]
# The same under each of the tasks' metrics, which have names like "acc,none".
MetricScores = Mapping[tuple[str, int], Mapping[str, Sequence[float]]]
# Scores that are averaged to one, and the original's scores on the same samples.
_Part = tuple[Sequence[float], Sequence[float] | None]


class SuiteAnswers(NamedTuple):
    """One model's answers in one suite for the tables, without their texts."""

    scores: SubtaskScores
    metrics: MetricScores
    losses: Sequence[Sequence[float]]  # by bins of positions, documents in order
    cut: Mapping[tuple[str, int], int]  # samples truncated at the beginning

    @classmethod
    def of(cls, records: Iterable[Mapping[str, Any]], model: str, suite: str) -> SuiteAnswers:
        """The answers among lines of samples.jsonl."""
        scores: dict[tuple[str, int], list[float]] = {}
        metrics: dict[tuple[str, int], dict[str, list[float]]] = {}
        losses: list[Sequence[float]] = []
        cut = Counter[tuple[str, int]]()
        for record in records:
            if (record["checkpoint"], record["suite"]) != (model, suite):
                continue
            if "score" not in record:
                losses.append(record["loss"])
                continue
            key = record["task"], record["length"]
            scores.setdefault(key, []).append(record["score"])
            if record.get("cut"):
                cut[key] += 1
            by_metric = metrics.setdefault(key, {})
            for metric, value in record.get("scores", {}).items():
                by_metric.setdefault(metric, []).append(value)
        return cls(scores, metrics, losses, cut)


def not_shares(subtasks: SubtaskScores) -> dict[str, str]:
    """Tasks with scores outside [0, 1], which intervals and averages need, with a reason."""
    return {
        task: "its score is not a share from 0 to 1 per document"
        for (task, _), scores in subtasks.items()
        if not _are_shares(scores)
    }


def suite_table(
    subtasks: SubtaskScores,
    original: SubtaskScores | None = None,
    groups: Mapping[str, TaskGroup] | None = None,
    metrics: MetricScores | None = None,
    original_metrics: MetricScores | None = None,
) -> dict[str, Any]:
    """A model's table in a suite: task by length, averages, 95 % intervals, all in percent.

    `average` is the unweighted mean over the subtasks, which count as independent; a group that the
    recipe names counts as one subtask if its score is a mean over documents. If the `original`
    model's scores on the same samples are given, every score is compared with them. A group has
    scores by its rules, over those of its tasks that have them.
    """
    base = original or {}
    parts = {key: (scores, base.get(key)) for key, scores in subtasks.items()}
    table: dict[str, Any] = {}
    for (task, length), part in parts.items():
        table.setdefault(task, {})[str(length)] = {
            **_mean_row([part]),
            "standard_error": _standard_error(part[0]),
            "samples": len(part[0]),
        }
    rows = {
        name: _group_row(group, parts, metrics or {}, original_metrics or {})
        for name, group in (groups or {}).items()
    }
    averaged = dict(parts)
    for name, (_, pooled) in rows.items():
        if groups and groups[name].is_named and pooled is not None:
            for key in [key for key in averaged if key[0] in groups[name].tasks]:
                del averaged[key]
            averaged[name, 0] = pooled
    average = _mean_row(list(averaged.values()))
    errors = [_standard_error(scores) for scores, _ in averaged.values()]
    return {
        "average": average.pop("score"),
        **average,
        "standard_error": sum(error**2 for error in errors) ** 0.5 / len(errors),
        **table,
        "by_length": {
            str(length): _mean_row([part for key, part in averaged.items() if key[1] == length])
            for length in sorted({length for _, length in averaged})
        },
        **({"groups": {name: row for name, (row, _) in rows.items() if row}} if rows else {}),
    }


def _group_row(
    group: TaskGroup,
    parts: Mapping[tuple[str, int], _Part],
    metrics: MetricScores,
    original: MetricScores,
) -> tuple[dict[str, Any], _Part | None]:
    """A group's row, empty without a score, and the pooled documents if its score is their mean."""
    keys = [key for key in metrics if key[0] in group.tasks and key in parts]
    scores: dict[str, dict[str, Any]] = {}
    first_pooled: _Part | None = None
    for rule in group.rules:
        for metric in _metric_names(rule, [metrics[key] for key in keys]):
            metric_keys = [key for key in keys if metric in metrics[key]]
            task_parts: list[_Part] = [
                (metrics[key][metric], original.get(key, {}).get(metric)) for key in metric_keys
            ]
            if not metric_keys or not all(_are_shares(values) for values, _ in task_parts):
                continue
            pooled = _pooled(task_parts) if rule.weight_by_size else None
            if not scores:
                first_pooled = pooled
            scores[metric] = {
                **_mean_row([pooled] if pooled is not None else task_parts),
                "tasks": [task for task, _ in metric_keys],
            }
    if not scores:
        return {}, None
    return {**next(iter(scores.values())), "of": len(group.tasks), "metrics": scores}, first_pooled


def _metric_names(rule: AggMetricConfig, tasks: Sequence[Mapping[str, Any]]) -> list[str]:
    """Names of a rule's metric under its filters, by default under all filters of the tasks."""
    if rule.filter_list is not None:
        return [f"{rule.metric},{name}" for name in rule.filter_list]
    start = f"{rule.metric},"
    return sorted({name for task in tasks for name in task if name.startswith(start)})


def _pooled(parts: Sequence[_Part]) -> _Part:
    """All documents of some tasks as one task, whose mean weighs tasks by size."""
    originals = [base for _, base in parts if base is not None]
    complete = len(originals) == len(parts)
    values = [value for part, _ in parts for value in part]
    return values, [value for base in originals for value in base] if complete else None


def _mean_row(parts: Sequence[_Part]) -> dict[str, Any]:
    """The unweighted mean of parts, and its comparison with the original's."""
    scores = [values for values, _ in parts]
    mean = mean_score([_mean(values) for values in scores], list(map(len, scores)))
    originals = [base for _, base in parts if base is not None]
    if [len(base) for base in originals] != [len(values) for values in scores]:
        return _points(mean)  # the original lacks answers to the same samples
    pairs = list(zip(scores, originals, strict=True))
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


def _are_shares(values: Sequence[float]) -> bool:
    return all(0 <= value <= 1 for value in values)


def _points(interval: Interval) -> dict[str, float]:
    # Ten decimals: 0.975 of 100 is 97.5.
    names = ("score", "low", "high")
    return {name: round(100 * value, 10) for name, value in zip(names, interval, strict=True)}


def _standard_error(scores: Sequence[float]) -> float:
    """Standard error of the mean in percent; 0 for a single score."""
    if len(scores) < 2:
        return 0.0
    mean = _mean(scores)
    squares = sum((score - mean) ** 2 for score in scores)
    return 100 * math.sqrt(squares / (len(scores) - 1) / len(scores))


def _mean(scores: Sequence[float]) -> float:
    return sum(scores) / len(scores)
