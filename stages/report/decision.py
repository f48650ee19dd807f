"""Which model to ship: the verdict and the sentences at the head of the report."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple

from bosch.analysis.intervals import LEVEL, holm
from stages.evaluate.scores import HYBRID, ORIGINAL, BinLoss, PairedComparison
from stages.evaluate.tables import against
from stages.formats import (
    format_bytes,
    format_length,
    format_seconds,
    format_share,
    interval,
    signed,
)
from stages.materialize.stage import MODEL
from stages.report.results import Model, Results
from stages.train.stage import CHECKPOINTS

# From the best to the worst.
Verdict = Literal["ship", "a small loss", "not decided", "do not ship"]
_VERDICTS: dict[Verdict, str] = {
    "ship": "Ship the {}, within the margin of {:g} points.",
    "a small loss": "A significant loss within the margin of {1:g} points, the {0}.",
    "not decided": "Not decided, the {}; the margin is {:g} points, more samples may decide.",
    "do not ship": "Do not ship the {}, beyond the margin of {:g} points.",
}


class Decision(NamedTuple):
    """The verdict on a hybrid, compared with the original over `tasks` tasks and lengths."""

    verdict: Verdict
    model: Model
    tasks: int
    against: PairedComparison

    @property
    def folder(self) -> str:
        """The model's place in the run's folder."""
        if self.model.name == HYBRID:
            return f"materialize/{MODEL}"
        return f"train/{CHECKPOINTS}/{self.model.name}"


def overall(
    results: Results, model: Model, other: Model | None = None
) -> tuple[int, PairedComparison] | None:
    """Number of tasks and lengths of all suites, and the model compared with another model.

    The other is by default its original. Every task at every length of which they have all samples
    in common weighs the same; None if there is none.
    """
    scores = results.samples(model)
    base = results.samples(other or Model(ORIGINAL, model.branch))
    common = [place for place in scores if scores[place].keys() == base.get(place, {}).keys()]
    if not common:
        return None
    pairs = [([*scores[at].values()], [base[at][sample] for sample in scores[at]]) for at in common]
    return len(common), PairedComparison.model_validate(against(pairs))


def decide(results: Results, margin: float) -> Decision | None:
    """The verdict on the best of the recipe's hybrid and its checkpoints; None without scores.

    A model may ship if the whole 95 % interval of its loss of points against the original lies
    within `margin`, and may not if the whole interval lies beyond; else it is not decided. A loss
    within the margin is small if its interval excludes 0. Among models with the best verdict the
    best has the highest score, and among equals the lowest loss at the last positions, and then the
    least training. Models that lack tasks or samples of others are left out.
    """
    original = results.samples(Model(ORIGINAL))
    if not any(any(scores.values()) for scores in original.values()):
        return None
    models = [model for model in results.models if model.is_hybrid and not model.branch]
    counts = {model: sum(map(len, results.samples(model).values())) for model in models}
    whole = [model for model in models if counts[model] == max(counts.values())]
    decisions = [
        Decision(verdict_of(found[1], margin), model, *found)
        for model in whole
        if (found := overall(results, model)) is not None
    ]

    def quality(one: Decision) -> tuple[int, float, float, int]:
        last, rank = last_loss(results, one.model), -list(_VERDICTS).index(one.verdict)
        gained = round(one.against.difference, 9)
        return rank, gained, -last.mean if last else 0.0, -one.model.tokens

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


def sentences(results: Results, margin: float) -> list[str]:
    """The verdict with its reason, the gain over branches, cache, speed and cost."""
    decision = decide(results, margin)
    verdict = "Not decided: there are no scores of a hybrid and of an original above 0."
    if decision is not None:
        tasks = "1 task" if decision.tasks == 1 else f"{decision.tasks} tasks and lengths"
        found = f"{decision.model.label.lower()}: {points(decision.against)} points against the "
        found += f"original over {tasks} ({decision.against.samples:,} samples)"
        verdict = _VERDICTS[decision.verdict].format(found, margin)
    failed = [
        f"{Model(name, branch).label} could not be evaluated: {why}."
        for branch, own in results.branches.items()
        for name, why in own.scores.failed_models.items()
    ]
    gpu_hours = sum(manifest.gpu_hours for manifest in results.manifests.values())
    seconds = sum(manifest.seconds for manifest in results.manifests.values())
    on_cpu = f"{format_seconds(seconds)} without a GPU"
    cost = f"{gpu_hours:,.2f} GPU hours" if gpu_hours else on_cpu
    return [
        verdict, *failed, *_over_branches(results), _cache(results), *_speed(results),
        f"The run took {cost}.",
    ]  # fmt: skip


def gain(results: Results, model: Model) -> tuple[int, PairedComparison] | None:
    """The recipe's hybrid compared with a branch's after the same training; None if it has none."""
    if not model.branch or model.name == ORIGINAL:
        return None
    own = (other for other in results.models if other.is_hybrid and not other.branch)
    ours = [other for other in own if other.tokens == model.tokens]
    return overall(results, ours[0], model) if ours else None


def _over_branches(results: Results) -> Iterator[str]:
    """The recipe's hybrid against those of branches, before training and after all of it."""
    for tokens in sorted({0, max((model.tokens for model in results.models), default=0)}):
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
    tokens = results.lengths[-1]
    caches = results.main.caches(tokens)
    served = "which vLLM does not serve"
    if caches.vllm_share is not None:
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
        if (over := point.over_original) is not None:
            yield (
                f"Prefill runs at {over.prefill_tokens_per_second:.2f} and decoding at "
                f"{over.decode_tokens_per_second:.2f} times the original's speed at "
                f"{format_length(point.length)}."
            )
            return
