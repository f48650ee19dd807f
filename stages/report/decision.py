"""The checkpoint to ship, with its losses over all suites and its gains."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from bosch.analysis import intervals
from bosch.search.methods import METHODS
from stages.evaluate.scores import HYBRID, MARGIN, ORIGINAL, PairedComparison, named_rival, power
from stages.evaluate.tables import against
from stages.formats import (
    format_bytes,
    format_length,
    format_money,
    format_seconds,
    format_share,
    interval,
    signed,
)
from stages.measure.stage import Point
from stages.report.results import Results, SampleScores, label_of
from stages.report.stage import ReportConfig
from stages.train.stage import checkpoint_name, checkpoint_tokens


class Choice(NamedTuple):
    """The model to ship, with the reason; `best` has the highest score."""

    model: str
    reason: str
    best: str


def choose(results: Results) -> Choice | None:
    """The earliest of the untrained hybrid and its checkpoints that is as good as the best.

    The best has the highest mean over all tasks and lengths and, among equals, the lowest loss at
    the last positions. Another model is as good if the 95 % interval of its paired difference to
    the best stays above -`MARGIN` points, and its loss is within the best's interval; so with few
    samples the best is chosen. None without scores.
    """
    models = sorted(
        (name for name in results.samples if name == HYBRID or checkpoint_tokens(name) is not None),
        key=lambda name: checkpoint_tokens(name) or 0,
    )
    subtasks = {name: results.samples[name] for name in models}
    if not models:
        return None
    # Models without one of the suites, or with fewer samples, are left out.
    largest = max(subtasks.values(), key=lambda scores: sum(map(len, scores.values())))
    complete = [name for name in models if _layout(subtasks[name]) == _layout(largest)]
    if len(complete) == 1:
        scored = "scores" if len(models) == 1 else "scores in all tasks"
        return Choice(complete[0], f"the only one with {scored}", complete[0])
    models = complete
    means = {name: round(_mean(subtasks[name]), 9) for name in models}
    losses = {name: _last_loss(results, name) for name in models}
    best = max(models, key=lambda name: (means[name], -losses[name][0]))
    best_scores = list(subtasks[best].values())
    exceeds_loss = False
    for name in models[: models.index(best)]:
        difference = intervals.compare(list(subtasks[name].values()), best_scores).difference
        if 100 * difference.low <= -MARGIN:
            continue
        if losses[name][0] > losses[best][1]:
            exceeds_loss = True
            continue
        mean, low, high = (100 * value for value in difference)
        reason = (
            f"the earliest shown to be within {MARGIN:g} points of the best, the "
            f"{label_of(best).lower()}: {signed(mean, 1)} {interval(low, high, 1)}"
        )
        return Choice(name, reason, best)
    ties = [name for name in models if means[name] == means[best]]
    if len(ties) == 1:
        reason = "the highest score"
    elif len({losses[name][0] for name in ties}) == 1:
        reason = f"{len(ties)} have the highest score, it is the earliest"
    else:
        reason = f"{len(ties)} have the highest score, it has the lowest loss at the last positions"
    if exceeds_loss:
        reason += f"; those within {MARGIN:g} points of it before lose more at the last positions"
    elif models[0] != best and len(ties) == 1:
        reason += f"; no earlier one is shown to be within {MARGIN:g} points of it"
    return Choice(best, reason, best)


def _last_loss(results: Results, model: str) -> tuple[float, float]:
    """A model's loss (nats) at the last positions, and the upper end of its interval.

    0 and infinity if not measured; models of one run read the same documents.
    """
    table = results.scores.positions.get(model)
    if table is None or not table.difference:
        return 0.0, math.inf
    last_bin = table.difference[-1]
    return last_bin.mean, math.inf if last_bin.high is None else last_bin.high


def overall(
    results: Results, model: str, baseline: str = ORIGINAL
) -> tuple[int, PairedComparison] | None:
    """Number of tasks and lengths of all suites, and the model compared with another model.

    Every task at every length weighs the same. None if they have no samples in common.
    """
    scores, base = results.samples.get(model, {}), results.samples.get(baseline, {})
    common = [key for key in scores if len(scores[key]) == len(base.get(key, ()))]
    if not common:
        return None
    table = against([(scores[key], base[key]) for key in common])
    return len(common), PairedComparison.model_validate(table)


def comparisons(results: Results) -> str | None:
    """Sentences on the search's gain over rivals."""
    return " ".join(_over_rivals(results)) or None


def _over_rivals(results: Results) -> Iterator[str]:
    """The search's hybrid minus each rival on the same samples, after equal training."""
    names = [rival.name for rival in results.rivals]  # by needle score
    for name in dict.fromkeys([*names, *results.samples]):
        trained = named_rival(name)
        if name not in METHODS and trained is None:
            continue
        model = HYBRID if trained is None else checkpoint_name(trained[1])
        outcome = overall(results, model, name)
        if outcome is not None:
            when = "before training" if trained is None else f"after {trained[1]:,} tokens of both"
            yield (
                f"The search's heads score {_points(outcome[1])} against those of "
                f"{METHODS[name if trained is None else trained[0]].label} {when}."
            )


def _points(result: PairedComparison) -> str:
    ends = interval(result.difference_low, result.difference_high, 1)
    return f"{signed(result.difference, 1)} points {ends}"


def _than_original(result: PairedComparison) -> str:
    ends = interval(result.difference_low, result.difference_high, 1)
    if round(result.difference, 1) == 0:
        return f"as the original does, within {ends} points,"
    direction = "less" if result.difference < 0 else "more"
    return f"{abs(result.difference):.1f} points {direction} than the original {ends}"


def headline(results: Results, section: ReportConfig) -> str | None:
    """The model to ship with the reason, its losses, cache and speed, and the run's cost.

    Ships nothing if the best is shown to lose more than `MARGIN` points. None without scores of
    the original and a hybrid.
    """
    choice = choose(results)
    outcome = overall(results, choice.model) if choice is not None else None
    if choice is None or outcome is None:
        return None
    if outcome[1].difference_high < -MARGIN and choice.best != choice.model:
        reason = (
            f"the highest score; the {label_of(choice.model).lower()}, shown to be within "
            f"{MARGIN:g} points of it, loses more than that against the original"
        )
        choice = Choice(choice.best, reason, choice.best)
        outcome = overall(results, choice.model) or outcome
    count, difference = outcome
    tasks = "its task" if count == 1 else f"all {count} tasks and lengths"
    parts = [_cache(results), *_speed(results.measured_points)]
    cost = f"{', '.join(parts)}, and {_cost(results, section)}."
    if not _original_answers(results):
        return (
            f"No advice: the original scores 0 over {tasks}, which does not show what a hybrid "
            f"loses. The {label_of(choice.model).lower()} {cost}"
        )
    advice = "Ship"
    if difference.difference_high < -MARGIN:
        advice = f"Ship none yet: even the best loses more than {MARGIN:g} points. It is"
    model = f"the {label_of(choice.model).lower()} ({choice.reason})"
    scores = f"it scores {_than_original(difference)} over {tasks}"
    return f"{advice} {model}: {scores} ({power(difference).removeprefix('; ')}), {cost}"


def _original_answers(results: Results) -> bool:
    """Whether the original scores above 0; otherwise no hybrid can lose."""
    return any(any(scores) for scores in results.samples[ORIGINAL].values())


def _cache(results: Results) -> str:
    lengths = [point.length for point in results.measured_points]
    lengths += [length for scores in results.needle for length in scores.suite.by_length]
    cache = results.cache
    if not any(lengths):
        before, after = format_bytes(cache.original_per_token), format_bytes(cache.per_token)
        return f"takes {after} of KV cache per token instead of {before}"
    longest = max(lengths)
    share = cache.dynamic(longest) / cache.original(longest)
    return f"takes {format_share(share)} of the original's KV cache at {format_length(longest)}"


def _speed(points: Sequence[Point]) -> Iterator[str]:
    """Measured speedup over the original, the longest length first."""
    if not points:
        yield "has no measured speed (section measure)"
    texts = []
    for point in reversed(points):
        at = f"at {format_length(point.length)}"
        if point.out_of_memory:
            yield f"was not measured {at} for want of memory"
            continue
        if point.over_original is None:
            yield f"runs {at}, where the original is out of memory"
            continue
        prefill = point.over_original.prefill_tokens_per_second
        decode = point.over_original.decode_tokens_per_second
        texts.append((prefill, decode, at))
    if texts:
        (prefill, decode, at), *shorter = texts
        text = (
            f"prefills at {prefill:.2f} and decodes at {decode:.2f} times the original's speed {at}"
        )
        if shorter:
            speeds = (f"{first:.2f} and {second:.2f} {place}" for first, second, place in shorter)
            text += f" ({'; '.join(speeds)})"
        yield text


def _cost(results: Results, section: ReportConfig) -> str:
    hours = results.total_gpu_hours
    if not hours:
        seconds = sum(seconds for _, seconds in results.stage_seconds)
        return f"the run took {format_seconds(seconds)} without a GPU"
    price = section.gpu_hour_price
    money = f" ({format_money(price * hours, section.currency)})" if price is not None else ""
    return f"the run took {hours:,.2f} GPU hours{money}"


def _layout(subtasks: SampleScores) -> list[tuple[tuple[str, str, int], int]]:
    """The tasks and lengths with their numbers of samples."""
    return [(key, len(scores)) for key, scores in subtasks.items()]


def _mean(subtasks: SampleScores) -> float:
    means = [sum(scores) / len(scores) for scores in subtasks.values()]
    return sum(means) / len(means)
