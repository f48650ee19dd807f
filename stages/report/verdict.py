"""Paired differences between hybrid and original on the same samples of every suite."""

from __future__ import annotations

from typing import Literal, NamedTuple

from stages.evaluate.scores import HYBRID, PairedComparison, SuiteScores
from stages.evaluate.suites import suite_title
from stages.formats import format_length, interval, signed
from stages.report.results import NEEDLE, Results, label_of

# Percent; with a wider interval the difference is stated instead of the ratio.
_WIDEST_RATIO = 100.0


class Difference(NamedTuple):
    """A model minus the original; without an interval `low` and `high` are None.

    `against` is the comparison of scores; None for a loss.
    """

    name: str
    unit: Literal["points", "nats"]
    mean: float
    low: float | None
    high: float | None
    against: PairedComparison | None = None

    @classmethod
    def of_scores(cls, name: str, against: PairedComparison) -> Difference:
        ends = against.difference_low, against.difference_high
        return cls(name, "points", against.difference, *ends, against)

    @property
    def text(self) -> str:
        """The difference with its interval."""
        digits = 1 if self.unit == "points" else 2
        mean = signed(self.mean, digits)
        if self.low is None or self.high is None:
            return f"{mean} [too few]"
        return f"{mean} {interval(self.low, self.high, digits)}"

    @property
    def is_significant(self) -> bool:
        """Whether the interval excludes 0."""
        return self.low is not None and self.high is not None and not self.low <= 0 <= self.high


def final_model(results: Results) -> str:
    """The checkpoint with the most training, or the untrained hybrid."""
    return results.scores.last_trained or HYBRID


def differences(results: Results, model: str) -> list[Difference]:
    """Paired differences of each suite's average and of the loss at the last positions."""
    rows = [
        Difference.of_scores(suite_title(name), suite.against_original)
        for name, suite in results.scores.checkpoints.get(model, {}).items()
        if suite.against_original is not None
    ]
    table = results.scores.positions.get(model)
    if table is not None and table.difference:
        last_bin = table.difference[-1]
        first, end = table.edges[-2:]
        name = f"Loss at tokens {first:,} to {end - 1:,}"
        rows.append(Difference(name, "nats", last_bin.mean, last_bin.low, last_bin.high))
    return rows


def verdict(results: Results) -> str | None:
    """Sentences on the hybrid's differences to the original; None without scores."""
    model = final_model(results)
    suites = results.scores.checkpoints.get(model, {})
    failure = results.scores.failed_models.get(model)
    if failure is not None:
        return f"{label_of(model)}: no scores, because it could not be evaluated: {failure}."
    sentences = []
    needle = suites.get(NEEDLE)
    if needle is not None:
        sentences += _needle_sentence(results, needle, kind_of(model))
    for row in differences(results, model):
        if row.against is None:
            note = "" if row.is_significant else "; the documents do not decide whether it differs"
            if row.low is None:
                note = "; the documents are too few to tell"
            sentences.append(f"{row.name}: {row.text} nats against the original{note}.")
        elif row.name != suite_title(NEEDLE):
            end = _undecided_note(row.against)
            sentences.append(f"{row.name}: {row.text} points against the original{end}.")
    return " ".join(sentences) or None


def _needle_sentence(results: Results, needle: SuiteScores, name: str) -> list[str]:
    """A sentence on the needle score at the longest length."""
    length = max(needle.by_length)
    against, cache = needle.by_length[length].against_original, results.cache
    if against is None:
        return []
    share = cache.dynamic(length) / cache.original(length)
    ratio, low, high = against.ratio, against.ratio_low, against.ratio_high
    if ratio is None or low is None or high is None or high - low > _WIDEST_RATIO:
        points = Difference.of_scores("", against)
        outcome = f"scores {points.text} points against the original"
    else:
        outcome = f"keeps {ratio:.1f} % [{low:.1f}, {high:.1f}] of the original's score"
    return [
        f"At {format_length(length)} the {name} hybrid {outcome} with {share:.2f} of its KV cache"
        f"{_undecided_note(against)}."
    ]


def _undecided_note(against: PairedComparison) -> str:
    """The end of a sentence on an undecided comparison."""
    if against.relation != "undecided":
        return ""
    if against.visible_loss is None:
        return f"; {against.samples:,} samples are too few to tell the two apart"
    return (
        f"; {against.samples:,} samples do not decide whether it differs: they would show a loss "
        f"of {against.visible_loss:.1f} points"
    )


def kind_of(model: str) -> str:
    return "untrained" if model == HYBRID else "trained"
