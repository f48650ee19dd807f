"""Which model to ship: the verdict and the sentences at the head of the report."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple

from bosch.analysis.intervals import LEVEL, deciding_samples, holm
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
from stages.report.results import Model, Results
from stages.report.stage import ReportConfig
from stages.train.stage import CHECKPOINTS

# From the best to the worst.
Verdict = Literal["ship", "a small loss", "not decided", "do not ship"]
_VERDICTS: tuple[Verdict, ...] = ("ship", "a small loss", "not decided", "do not ship")


class Decision(NamedTuple):
    """The verdict on a hybrid, compared with the original over `tasks` tasks and lengths.

    `needed`: the samples that would decide if the shares stay the same; None if more than ten
    thousand times as many. `folder` holds the model, in the run's folder.
    """

    verdict: Verdict
    model: Model
    tasks: int
    against: PairedComparison
    needed: int | None

    @property
    def folder(self) -> str:
        if self.model.name == HYBRID:
            return f"materialize/{MODEL}"
        return f"train/{CHECKPOINTS}/{self.model.name}"


def _pairs(
    results: Results, model: Model, other: Model
) -> tuple[list[list[float]], list[list[float]]]:
    """Scores of both models in each task and length of which they have all samples in common."""
    scores, base = results.samples(model), results.samples(other)
    common = [place for place in scores if scores[place].keys() == base.get(place, {}).keys()]
    return [[*scores[place].values()] for place in common], [
        [base[place][sample] for sample in scores[place]] for place in common
    ]


def overall(
    results: Results, model: Model, other: Model | None = None
) -> tuple[int, PairedComparison] | None:
    """Number of tasks and lengths of all suites, and the model compared with another model.

    The other is by default its original. Every task at every length weighs the same. None if they
    have no samples in common.
    """
    pairs = _pairs(results, model, other or Model(ORIGINAL, model.branch))
    if not pairs[0]:
        return None
    table = against(list(zip(*pairs, strict=True)))
    return len(pairs[0]), PairedComparison.model_validate(table)


def decide(results: Results, margin: float) -> Decision | None:
    """The verdict on the best of the recipe's hybrid and its checkpoints; None without scores.

    A model may ship if the whole 95 % interval of its loss of points against the original lies
    within `margin`, and may not if the whole interval lies beyond; else it is not decided. A loss
    within the margin is small if its interval excludes 0. Among models with the best verdict the
    best has the highest score, and among equals the lowest loss at the last positions, and then the
    least training. Models that lack tasks or samples of others are left out.
    """
    original = results.samples(Model(ORIGINAL))
    models = [model for model in results.models if model.is_hybrid and not model.branch]
    counts = {model: sum(map(len, results.samples(model).values())) for model in models}
    if not any(any(scores.values()) for scores in original.values()):
        return None
    decisions = []
    for model in models:
        found = overall(results, model)
        if found is not None and counts[model] == max(counts.values()):
            verdict = verdict_of(found[1], margin)
            needed = None
            if verdict == "not decided":
                pairs = _pairs(results, model, Model(ORIGINAL))
                needed = deciding_samples(*pairs, margin / 100)
            decisions.append(Decision(verdict, model, *found, needed))

    def quality(decision: Decision) -> tuple[int, float, float, int]:
        last = last_loss(results, decision.model)
        points = round(decision.against.difference, 9)
        rank = -_VERDICTS.index(decision.verdict)
        return rank, points, -last.mean if last else 0.0, -decision.model.tokens

    return max(decisions, key=quality, default=None)


def verdict_of(compared: PairedComparison, margin: float) -> Verdict:
    if compared.difference_low >= -margin:
        return "ship" if compared.difference_high >= 0 else "a small loss"
    return "do not ship" if compared.difference_high < -margin else "not decided"


def last_loss(results: Results, model: Model) -> BinLoss | None:
    """A model's loss less the original's at the last positions, in nats."""
    table = results.positions(model)
    return table.difference[-1] if table is not None and table.difference else None


def points(compared: PairedComparison) -> str:
    """A difference of scores with its interval."""
    ends = interval(compared.difference_low, compared.difference_high, 1)
    return f"{signed(compared.difference, 1)} {ends}"


def sentences(results: Results, section: ReportConfig) -> list[str]:
    """The verdict with its reason, the gain over branches, cache, speed and cost."""
    decision = decide(results, section.margin)
    failed = [
        f"{Model(name, branch).label} could not be evaluated: {why}."
        for branch, own in results.branches.items()
        for name, why in own.scores.failed_models.items()
    ]
    return [
        _verdict(decision, section.margin), *failed, *_over_branches(results), _cache(results),
        *_speed(results), _cost(results, section),
    ]  # fmt: skip


def _verdict(decision: Decision | None, margin: float) -> str:
    if decision is None:
        return "Not decided: there are no scores of a hybrid and of an original above 0."
    compared = decision.against
    tasks = "1 task" if decision.tasks == 1 else f"{decision.tasks} tasks and lengths"
    found = (
        f"{decision.model.label.lower()}: {points(compared)} points against the original "
        f"over {tasks} ({compared.samples:,} samples)"
    )
    if decision.verdict == "ship":
        return f"Ship the {found}, within the margin of {margin:g} points."
    if decision.verdict == "a small loss":
        return f"A significant loss within the margin of {margin:g} points, the {found}."
    if decision.verdict == "do not ship":
        return f"Do not ship the {found}, beyond the margin of {margin:g} points."
    more = "no number of samples would decide"
    if decision.needed is not None:
        more = f"about {_rounded_up(decision.needed):,} samples would decide"
    return f"Not decided, the {found}; for a margin of {margin:g} points {more}."


def _rounded_up(number: int) -> int:
    """To two digits."""
    unit = 10 ** max(0, len(str(number)) - 2)
    return -(-number // unit) * unit


def gain(results: Results, model: Model) -> tuple[int, PairedComparison] | None:
    """The recipe's hybrid compared with a branch's after the same training; None if it has none."""
    if not model.branch or model.is_original:
        return None
    own = (other for other in results.models if other.is_hybrid and not other.branch)
    ours = next((other for other in own if other.tokens == model.tokens), None)
    return None if ours is None else overall(results, ours, model)


def _over_branches(results: Results) -> Iterator[str]:
    """The recipe's hybrid against those of branches, before training and after all of it."""
    amounts = {model.tokens for model in results.models}
    for tokens in sorted({0, max(amounts, default=0)}):
        found = {m: gain(results, m) for m in results.models if m.tokens == tokens}
        compared = {model: outcome[1] for model, outcome in found.items() if outcome is not None}
        p_values = holm([one.p_value for one in compared.values()])
        texts = [
            f"{points(one)} against {model.branch} ({'' if p < LEVEL else 'not '}significant)"
            for (model, one), p in zip(compared.items(), p_values, strict=True)
        ]
        if texts:
            when = f"After {tokens:,} tokens of each" if tokens else "Before training"
            yield f"{when} the recipe's hybrid scores {', '.join(texts)}."


def _cache(results: Results) -> str:
    tokens = results.longest
    caches = results.main.caches(tokens)
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
