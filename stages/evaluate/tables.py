"""From answers to scores.json and samples.jsonl."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from bosch.analysis.intervals import Interval, compare, mean_score, share
from bosch.errors import RunError
from data_prep.scoring import mean_and_error
from stages.evaluate.answers import AnswerFolder, Evaluated, Suite

# Scores in [0, 1] of a model in a suite, by task and length, in the order of the samples.
SubtaskScores = Mapping[tuple[str, int], Sequence[float]]


def suite_records(suite: Suite, model: Evaluated, folder: AnswerFolder) -> Iterator[dict[str, Any]]:
    """The model's answers in the order of subtask and index, as lines of samples.jsonl.

    Raises:
        RunError: answers are missing.
    """
    for subtask in suite.subtasks:
        answers, count = folder.read(model, subtask), suite.samples(subtask)
        absent = count - len(answers.keys() & set(range(count)))
        if absent:
            raise RunError(
                f"{model.name}: {subtask.task} at {subtask.length} lacks {absent} of {count} "
                "answers; run again to make up the rest"
            )
        head = {"checkpoint": model.name, "suite": suite.name}
        for index in range(count):
            yield {**head, "task": subtask.task, "length": subtask.length, **answers[index]}


def subtask_scores(records: Iterable[Mapping[str, Any]], model: str, suite: str) -> SubtaskScores:
    """Scores of one model in one suite among lines of samples.jsonl."""
    scores: dict[tuple[str, int], list[float]] = {}
    for record in records:
        if (record["checkpoint"], record["suite"]) == (model, suite):
            scores.setdefault((record["task"], record["length"]), []).append(record["score"])
    return scores


def suite_table(
    subtasks: SubtaskScores,
    original: SubtaskScores | None = None,
    groups: Mapping[str, Sequence[str]] | None = None,
) -> dict[str, Any]:
    """A model's table in a suite: task by length, averages, 95 % intervals, all in percent.

    `average` is the unweighted mean over the subtasks, which count as independent. With the
    `original` model's scores on the same samples every score is compared with its own. `groups`
    names all tasks of a benchmark: its average covers those among them that have scores.
    """
    intervals = {key: share(_mean(scores), len(scores)) for key, scores in subtasks.items()}
    errors = {key: mean_and_error(scores)[1] for key, scores in subtasks.items()}
    table: dict[str, Any] = {}
    for (task, length), interval in intervals.items():
        key = (task, length)
        table.setdefault(task, {})[str(length)] = {
            **_points(interval),
            "standard_error": errors[key],
            "samples": len(subtasks[key]),
            **_against(subtasks, original, [key]),
        }
    average = _over(intervals, subtasks, original, list(subtasks))
    return {
        "average": average.pop("score"),
        **average,
        "standard_error": sum(error**2 for error in errors.values()) ** 0.5 / len(errors),
        **table,
        "by_length": {
            str(length): _over(
                intervals, subtasks, original, [k for k in subtasks if k[1] == length]
            )
            for length in sorted({length for _, length in subtasks})
        },
        **({"groups": _groups(intervals, subtasks, original, groups)} if groups else {}),
    }


def _over(
    intervals: Mapping[tuple[str, int], Interval],
    subtasks: SubtaskScores,
    original: SubtaskScores | None,
    keys: Sequence[tuple[str, int]],
) -> dict[str, Any]:
    """The unweighted mean of some subtasks, and its comparison with the original's."""
    means, counts = [intervals[key].mean for key in keys], [len(subtasks[key]) for key in keys]
    mean = mean_score(means, counts)
    return {**_points(mean), **_against(subtasks, original, keys)}


def _groups(
    intervals: Mapping[tuple[str, int], Interval],
    subtasks: SubtaskScores,
    original: SubtaskScores | None,
    groups: Mapping[str, Sequence[str]],
) -> dict[str, Any]:
    table = {}
    for name, tasks in groups.items():
        keys = [key for key in subtasks if key[0] in tasks]
        if keys:
            table[name] = {
                **_over(intervals, subtasks, original, keys),
                "tasks": [task for task, _ in keys],
                "of": len(tasks),
            }
    return table


def _against(
    subtasks: SubtaskScores, original: SubtaskScores | None, keys: Sequence[tuple[str, int]]
) -> dict[str, Any]:
    """The comparison with the original over some subtasks; empty where it has not answered them."""
    if original is None or any(len(original.get(k, ())) != len(subtasks[k]) for k in keys):
        return {}
    result = compare([subtasks[key] for key in keys], [original[key] for key in keys])
    table: dict[str, Any] = {
        "p_value": result.p_value,
        "samples": sum(len(subtasks[key]) for key in keys),
        "visible_loss": None if result.visible_loss is None else 100 * result.visible_loss,
    }
    for name, interval in (("difference", result.difference), ("ratio", result.ratio)):
        if interval is not None:
            mean, low, high = (100 * value for value in interval)
            table |= {name: mean, f"{name}_low": low, f"{name}_high": high}
    return {"against_original": table}


def _points(interval: Interval) -> dict[str, float]:
    # Ten decimals: 0.975 of 100 is 97.5.
    names = ("score", "low", "high")
    return {name: round(100 * value, 10) for name, value in zip(names, interval, strict=True)}


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
