"""Which model to ship: the verdict and the sentences at the head of the report."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple

from bosch.analysis.intervals import deciding_samples
from stages.evaluate.scores import HYBRID, ORIGINAL, BinLoss, PairedComparison
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
from stages.materialize.stage import MODEL
from stages.report.results import Results, SampleScores, label_of, trained_tokens
from stages.report.stage import ReportConfig
from stages.train.stage import CHECKPOINTS

Verdict = Literal["ship", "do not ship", "not decided"]
_RANKS: dict[Verdict, int] = {"ship": 2, "not decided": 1, "do not ship": 0}


class Decision(NamedTuple):
    """The verdict on a hybrid, compared with the original over `tasks` tasks and lengths.

    `needed`: the samples that would decide if the shares stay the same; None if more than ten
    thousand times as many. `folder` holds the model, in the run's folder.
    """

    verdict: Verdict
    model: str
    tasks: int
    against: PairedComparison
    needed: int | None

    @property
    def folder(self) -> str:
        return (
            f"materialize/{MODEL}" if self.model == HYBRID else f"train/{CHECKPOINTS}/{self.model}"
        )


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


def decide(results: Results, margin: float) -> Decision | None:
    """The verdict on the best of the untrained hybrid and its checkpoints; None without scores.

    A model may ship if the whole 95 % interval of its loss of points against the original lies
    within `margin`, and may not if the whole interval lies beyond; else it is not decided. Among
    models with the best verdict the best has the highest score, and among equals the lowest loss at
    the last positions, and then the least training. Models that lack tasks or samples of others
    are left out.
    """
    original = results.samples.get(ORIGINAL, {})
    samples = {n: results.samples[n] for n in results.models if n in results.samples}
    names = [name for name in samples if name != ORIGINAL]
    if not names or not any(any(scores) for scores in original.values()):
        return None
    most = max(sum(map(len, samples[name].values())) for name in names)
    decisions = []
    for name in names:
        found = overall(results, name)
        if found is not None and sum(map(len, samples[name].values())) == most:
            verdict = verdict_of(found[1], margin)
            needed = None if verdict != "not decided" else _needed(samples[name], original, margin)
            decisions.append(Decision(verdict, name, *found, needed))

    def quality(decision: Decision) -> tuple[int, float, float, int]:
        last = last_loss(results, decision.model)
        tokens = trained_tokens(decision.model)
        points = round(decision.against.difference, 9)
        return _RANKS[decision.verdict], points, -last.mean if last else 0.0, -tokens

    return max(decisions, key=quality, default=None)


def verdict_of(compared: PairedComparison, margin: float) -> Verdict:
    if compared.difference_low >= -margin:
        return "ship"
    return "do not ship" if compared.difference_high < -margin else "not decided"


def _needed(scores: SampleScores, original: SampleScores, margin: float) -> int | None:
    common = [key for key in scores if len(scores[key]) == len(original.get(key, ()))]
    parts = [scores[key] for key in common], [original[key] for key in common]
    return deciding_samples(*parts, margin / 100)


def last_loss(results: Results, model: str) -> BinLoss | None:
    """A model's loss less the original's at the last positions, in nats."""
    table = results.scores.positions.get(model)
    return table.difference[-1] if table is not None and table.difference else None


def points(compared: PairedComparison) -> str:
    """A difference of scores with its interval."""
    ends = interval(compared.difference_low, compared.difference_high, 1)
    return f"{signed(compared.difference, 1)} {ends}"


def sentences(results: Results, section: ReportConfig) -> list[str]:
    """The verdict with its reason, cache, speed and cost."""
    decision = decide(results, section.margin)
    missing = results.scores.failed_models.items()
    failed = [f"{label_of(name)} could not be evaluated: {why}." for name, why in missing]
    return [
        _verdict(decision, section.margin), *failed, _cache(results),
        *_speed(results), _cost(results, section),
    ]  # fmt: skip


def _verdict(decision: Decision | None, margin: float) -> str:
    if decision is None:
        return "Not decided: there are no scores of a hybrid and of an original above 0."
    compared = decision.against
    tasks = "1 task" if decision.tasks == 1 else f"{decision.tasks} tasks and lengths"
    found = (
        f"the {label_of(decision.model).lower()}: {points(compared)} points against the original "
        f"over {tasks} ({compared.samples:,} samples)"
    )
    if decision.verdict == "ship":
        return f"Ship {found}, within the margin of {margin:g} points."
    if decision.verdict == "do not ship":
        return f"Do not ship {found}, beyond the margin of {margin:g} points."
    more = "no number of samples would decide"
    if decision.needed is not None:
        more = f"about {_rounded_up(decision.needed):,} samples would decide"
    return f"Not decided, {found}; for a margin of {margin:g} points {more}."


def _rounded_up(number: int) -> int:
    """To two digits."""
    unit = 10 ** max(0, len(str(number)) - 2)
    return -(-number // unit) * unit


def _cache(results: Results) -> str:
    tokens = max(results.lengths, default=results.config.max_positions or 32 * 1024)
    caches = results.caches(tokens)
    served = "which vLLM does not serve"
    if caches.vllm_share is not None and caches.vllm is not None:
        served = f"{format_share(round(caches.vllm_share, 3))} in vLLM on one GPU"
    return (
        f"KV cache of {format_length(tokens)} tokens against the original's: "
        f"{format_share(round(caches.share, 3))} in transformers' generate "
        f"({format_bytes(caches.hybrid)} of {format_bytes(caches.original)}), {served}."
    )


def _speed(results: Results) -> Iterator[str]:
    """Measured speedup over the original at the longest length where both ran."""
    if not results.measured_points:
        yield "Speed was not measured (section measure)."
    for point in reversed(results.measured_points):
        if point.over_original is not None:
            over = point.over_original
            yield (
                f"Prefill runs at {over.prefill_tokens_per_second:.2f} and decoding at "
                f"{over.decode_tokens_per_second:.2f} times the original's speed at "
                f"{format_length(point.length)}."
            )
            return


def _cost(results: Results, section: ReportConfig) -> str:
    hours, price = results.total_gpu_hours, section.gpu_hour_price
    if not hours:
        return f"The run took {format_seconds(sum(results.stage_seconds.values()))} without a GPU."
    money = f" ({format_money(price * hours, section.currency)})" if price is not None else ""
    return f"The run took {hours:,.2f} GPU hours{money}."
