"""bosch_plus: budgets, the optimum of separable scores, early ends, resuming; gates' gradients."""

from __future__ import annotations

import itertools
from dataclasses import replace
from unittest.mock import ANY

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from bosch.budget import swa_budget
from bosch.errors import RunError
from bosch.heads import HeadMask
from bosch.objective.evaluation_log import (
    Evaluation,
    EvaluationContext,
    EvaluationLog,
    GateGradient,
)
from bosch.objective.objective import Objective
from bosch.search.bosch import bosch
from bosch.search.bosch_plus import bosch_plus
from bosch.search.evaluator import Evaluator
from bosch.search.methods import METHODS, plus_budget
from bosch.search.runs import find_mask
from bosch.search.settings import SearchSettings
from bosch.window import Window
from tests.benchmarks.landscapes import RATIO, landscape
from tests.hybrid_case import KV_HEADS, LAYERS, random_mask
from tests.search_case import WINDOW, searchable

FULL = HeadMask.all_full(LAYERS, KV_HEADS)
CONTEXT = EvaluationContext("data", "model", 16, 0)


class Layered:
    """A small model: sliding units cost their weight, and two of a kind more than their sum.

    Its gradients are those of its log-likelihood, with `noise` on top.
    """

    def __init__(self, layers, heads, seed, noise=0.0):
        rng = np.random.default_rng(seed)
        self.num_layers, self.num_key_value_heads = layers, heads
        self.quantum = 1 / 16
        self.costs = rng.exponential(size=layers * heads) ** 2
        self.costs /= self.costs.sum()
        self.pairs = np.triu(rng.exponential(size=(layers * heads,) * 2), 1) / (layers * heads) ** 2
        self.noise = noise * rng.normal(size=layers * heads)
        self.evaluated: list[str] = []
        self.ended_early = 0

    def evaluate(self, mask, shared_layers=0, *, can_win=None):
        self.evaluated.append(mask.key)
        sliding = (~mask.is_full).reshape(-1).astype(float)
        lost = float(self.costs @ sliding + sliding @ self.pairs @ sliding)
        score = max(0, round((1 - lost) * 16)) / 16
        bound = Evaluation(min(1.0, score + 1 / 16), -0.9 * lost, is_bound=True)
        if can_win is not None and not can_win(bound.score, bound.log_likelihood):
            self.ended_early += 1
            return bound
        return Evaluation(score, -lost)

    def gate_gradient(self, mask, share=0, shares=1):
        sliding = (~mask.is_full).reshape(-1).astype(float)
        gradient = self.costs + (self.pairs + self.pairs.T) @ sliding + self.noise
        passes = self.gradient_passes(share, shares)
        return GateGradient(gradient.reshape(mask.is_full.shape).tolist(), 0.0, passes)

    def gradient_passes(self, share=0, shares=1):
        return 1.0


def exact(scorer, ratio, budget=100, log=None):
    evaluator = Evaluator(scorer, EvaluationLog(None, CONTEXT) if log is None else log)
    return bosch_plus(evaluator, SearchSettings(ratio, budget_per_layer=budget)), evaluator


@given(
    layers=st.integers(1, 6),
    heads=st.integers(1, 6),
    ratio=st.one_of(st.sampled_from([0.0, 0.25, 0.5, 0.75, 0.875, 1.0]), st.floats(0, 1)),
    seed=st.integers(0, 50),
    budget=st.integers(1, 40),
    noise=st.sampled_from([0.0, 0.3]),
)
@settings(max_examples=80, deadline=None)
def test_every_mask_is_on_budget_and_no_more_are_measured_than_allowed(
    layers, heads, ratio, seed, budget, noise
):
    scorer = Layered(layers, heads, seed, noise)
    result, evaluator = exact(scorer, ratio, budget)
    quota = swa_budget(layers * heads, ratio)
    assert (~result.mask.is_full).sum() == quota
    for point in evaluator.trace:
        sliding = (~HeadMask.from_key(point.mask).is_full).sum()
        assert sliding == quota or point.phase == "anchors"
    options = SearchSettings(ratio, budget_per_layer=budget)
    limit = METHODS["bosch_plus"].most_evaluations(options, layers, heads)
    assert len(scorer.evaluated) <= len(evaluator.trace) <= limit
    assert result.evaluation == evaluator.log.get(result.mask)
    assert not result.evaluation.is_bound


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("ratio", [0.25, 0.5, 0.75, 0.875])
def test_it_is_no_worse_than_the_published_search_for_less(seed, ratio):
    scorer = Layered(6, 8, seed, noise=0.001)
    plus, ours = exact(scorer, ratio)
    published = Evaluator(Layered(6, 8, seed), EvaluationLog(None, CONTEXT))
    options = SearchSettings(ratio, "one_plus_one", seed=seed)
    theirs = bosch(published, options)
    assert plus.evaluation.log_likelihood >= theirs.evaluation.log_likelihood
    assert len(ours.trace) + 3.5 * ours.costs()["gradients"] / 4 <= 60 + 4
    assert len(published.trace) > 2 * len(ours.trace)
    assert scorer.ended_early == sum(point.is_bound for point in ours.trace)


def test_losing_evaluations_end_early():
    scorers = [Layered(6, 8, seed, noise=0.1) for seed in range(4)]
    for scorer in scorers:
        exact(scorer, 0.75)
    assert sum(scorer.ended_early for scorer in scorers) > 0


class Shared(Layered):
    """Every share of the examples has gradients of its own."""

    def gate_gradient(self, mask, share=0, shares=1):
        exact = super().gate_gradient(mask, share, shares)
        own = np.random.default_rng(share).normal(size=mask.is_full.shape) / mask.is_full.size
        return replace(exact, values=(np.array(exact.values) + own).tolist())


@pytest.mark.parametrize("seed", range(4))
def test_what_the_log_knows_does_not_change_the_search(tmp_path, seed):
    """Neither where a search was stopped, in a line, nor that all masks were measured before."""
    path = tmp_path / "evaluations.jsonl"
    whole, evaluator = exact(Shared(3, 4, seed), 0.5, log=EvaluationLog(path, CONTEXT))
    lines = path.read_text().splitlines(keepends=True)
    assert any("gradient" in line for line in lines)
    for count in range(1, len(lines) + 1):
        path.write_text("".join(lines[:count]) + [*lines, ""][count][:20])
        scorer = Shared(3, 4, seed)
        again, resumed = exact(scorer, 0.5, log=EvaluationLog(path, CONTEXT))
        assert again == whole
        assert resumed.trace == evaluator.trace
        assert sorted(path.read_text().splitlines(keepends=True)) == sorted(lines)
        assert len(scorer.evaluated) <= len(lines) - count


def test_a_resumed_search_orders_the_rounds_as_before(tmp_path):
    """Which examples a losing mask is measured on depends on the masks before it."""
    path = tmp_path / "evaluations.jsonl"
    model, calibration = searchable(examples=8)

    def search():
        objective = Objective(model, calibration, Window(WINDOW), batch_size=1)
        return exact(objective, 0.5, 120, EvaluationLog(path, objective.context))

    whole, evaluator = search()
    assert sum(point.is_bound for point in evaluator.trace[20:]) > 3
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:20]))
    again, resumed = search()
    assert again == replace(whole, evaluation=ANY, last_phase=ANY)
    assert resumed.trace == evaluator.trace


class Costly(Layered):
    """Its gradients cost more or less by share, in all 3.2 passes."""

    def __init__(self, layers, heads, seed, shares):
        super().__init__(layers, heads, seed, noise=0.1)
        costs = np.random.default_rng(seed).uniform(0.5, 1.5, shares)
        self.passes = 3.2 * costs / costs.sum()

    def gradient_passes(self, share=0, shares=1):
        return float(self.passes[share % len(self.passes)])


@pytest.mark.parametrize("method", ["bosch_plus", "learned_gates"])
@pytest.mark.parametrize("shares", [1, 3, 8])
def test_no_search_by_gradients_spends_more_than_its_budget(method, shares):
    for seed, budget, layers in itertools.product(range(10), (1, 8, 16, 40), (3, 12)):
        evaluator = Evaluator(Costly(layers, 4, seed, shares), EvaluationLog(None, CONTEXT))
        options = SearchSettings(0.9, budget_per_layer=budget)
        find_mask(method, evaluator, options)
        masks = evaluator.costs()["evaluations"] - 2  # but for the anchors
        assert masks + evaluator.gradient_passes <= plus_budget(options, layers) + 1e-9


def test_a_search_by_swaps_has_one_best_score():
    """A move whose evaluation ended early is no best, and what came before it still is."""
    ended_early = 0
    for seed in range(4):
        _, evaluator = exact(Layered(6, 8, seed, noise=0.1), 0.75)
        points = [p for p in evaluator.trace if p.phase in ("start", "swaps")]
        ended_early += sum(p.is_bound for p in points)
        best = 0.0
        for point in points:
            best = max(best, 0.0 if point.is_bound else point.score)
            assert point.best_score == best > 0
    assert ended_early > 0


class Halved:
    """Ends every pass half-way where it may, at half of the cost."""

    num_layers, num_key_value_heads, quantum = 2, 4, 0.25

    def evaluate(self, mask, shared_layers=0, *, can_win=None):
        if can_win is None:
            return Evaluation(0.25, -1.0)
        return Evaluation(0.5, -0.5, 0.0, 0.5, is_bound=True)


def test_every_pass_that_ended_early_is_paid_for(tmp_path):
    path = tmp_path / "evaluations.jsonl"
    mask = HeadMask.all_full(2, 4)

    def wins_at_first():
        """A sub-problem with this best would have to measure on, but the scorer has given up."""
        answers = iter([True, False])
        return lambda score, log_likelihood: next(answers)

    for _ in range(2):  # the second time as a resumed search
        evaluator = Evaluator(Halved(), EvaluationLog(path, CONTEXT))
        evaluator.evaluate(mask, "swaps", "swap", can_win=lambda *bounds: False)
        assert evaluator.costs()["full_forward_equivalents"] == 0.5
        evaluator.evaluate(mask, "swaps", "swap", can_win=lambda *bounds: False)
        assert evaluator.costs()["full_forward_equivalents"] == 0.5
        assert evaluator.evaluate(mask, "swaps", "kick", can_win=wins_at_first()).is_bound
        assert evaluator.costs()["full_forward_equivalents"] == 1.0
        assert not evaluator.evaluate(mask, "final", "final mask").is_bound
        assert evaluator.costs()["full_forward_equivalents"] == 2.0
        assert evaluator.costs()["evaluations"] == 1
    assert len(path.read_text().splitlines()) == 3


def test_gradients_of_another_model_are_not_used(tmp_path, caplog):
    path = tmp_path / "evaluations.jsonl"
    log = EvaluationLog(path, CONTEXT)
    log.append_gradient(FULL, "0/4", GateGradient([[1.0]]))
    assert EvaluationLog(path, CONTEXT).gradient(FULL, "0/4") == GateGradient([[1.0]])
    assert EvaluationLog(path, CONTEXT).gradient(FULL, "1/4") is None
    stranger = EvaluationLog(path, EvaluationContext("data", "another model", 16, 0))
    assert stranger.gradient(FULL, "0/4") is None
    assert "another model" in caplog.text


class Plain:
    """A scorer without gradients that cannot end an evaluation early."""

    def __init__(self, layered):
        self.num_layers, self.num_key_value_heads = layered.num_layers, layered.num_key_value_heads
        self.quantum, self.whole = layered.quantum, layered

    def evaluate(self, mask, shared_layers=0):
        return self.whole.evaluate(mask)


def test_a_scorer_without_gradients_is_searched_by_swaps_at_random():
    plain = Plain(Layered(6, 8, 1))
    result, evaluator = exact(plain, 0.5)
    assert any("no gradients" in note for note in evaluator.notes)
    assert len(plain.whole.evaluated) == 2 + 60
    started = next(point for point in evaluator.trace if point.phase == "start")
    assert result.evaluation.rank > (started.score, started.log_likelihood)


def test_a_losing_evaluation_may_not_end_early_where_the_scorer_cannot():
    options = SearchSettings(0.5, "one_plus_one", budget_per_layer=20, race=True)
    evaluator = Evaluator(Plain(Layered(3, 8, 1)), EvaluationLog(None, CONTEXT))
    assert not any(point.is_bound for point in evaluator.trace)
    assert bosch(evaluator, options).evaluation.score > 0


def test_it_tells_its_start_every_gradient_every_better_mask_and_what_is_left(caplog):
    name = "bosch.search.bosch_plus"
    caplog.set_level("INFO", logger=name)
    result, evaluator = exact(Layered(6, 8, 2, noise=0.05), 0.75)
    lines = [record.getMessage() for record in caplog.records if record.name == name]
    assert "12 of 48 units stay full, 60 passes to spend" in lines[0]
    assert sum("gradient" in line for line in lines) >= evaluator.costs()["gradients"]
    better = [line for line in lines if "best mask so far" in line]
    assert f"log-likelihood {result.evaluation.log_likelihood:.4f}" in better[-1]
    assert all("passes left" in line for line in lines[1:])


@pytest.mark.parametrize("name", ["redundant", "pairs", "chains", "traps"])
def test_its_start_survives_interactions(name):
    """Gradients at the two corners alone give a regret of 0.15 to 0.9 on these."""
    scorer = landscape(name, 320, 3)
    evaluator = Evaluator(scorer, EvaluationLog(None, CONTEXT))
    result = bosch_plus(evaluator, SearchSettings(RATIO, budget_per_layer=4))
    assert scorer.regret(result.mask) < 0.1
    assert evaluator.costs()["full_forward_equivalents"] <= 2 + 16 + 1


def test_a_small_budget_is_kept_and_survives_redundancy():
    """Passes to spend: 4 besides the anchors; one mask more would exceed them."""
    regrets = []
    for seed in range(100, 106):
        scorer = landscape("redundant", 48, seed)
        evaluator = Evaluator(scorer, EvaluationLog(None, CONTEXT))
        result = bosch_plus(evaluator, SearchSettings(RATIO, budget_per_layer=4))
        assert evaluator.costs()["full_forward_equivalents"] <= 2 + 4
        regrets.append(scorer.regret(result.mask))
    assert np.mean(regrets) < 0.15


def test_its_start_averages_gradients_that_agree():
    """Each gradient alone is off by a fifth: a regret of 0.064 where only the last one counts."""
    regrets = []
    for seed in range(16):
        scorer = landscape("pairs", 48, seed)
        evaluator = Evaluator(scorer, EvaluationLog(None, CONTEXT))
        result = bosch_plus(evaluator, SearchSettings(RATIO, budget_per_layer=4))
        regrets.append(scorer.regret(result.mask))
    assert np.mean(regrets) < 0.045


class KnownOnBudget(Layered):
    """Additive; gradients tell the units' worth only where at most a quarter of them is full."""

    def gate_gradient(self, mask, share=0, shares=1):
        exact = super().gate_gradient(mask, share, shares)
        if mask.is_full.mean() <= 0.25:
            return exact
        noise = np.random.default_rng([share, int(mask.is_full.sum())]).random(mask.is_full.shape)
        return replace(exact, values=noise.tolist())


def test_a_start_learns_gates_at_masks_on_budget():
    """Without that start 0.17 of the log-likelihood is lost on average."""
    for seed in range(4):
        scorer = KnownOnBudget(8, 8, seed)
        scorer.pairs *= 0
        result, evaluator = exact(scorer, 0.75, budget=16)
        lost = scorer.costs[~result.mask.is_full.reshape(-1)].sum()
        assert lost - np.sort(scorer.costs)[:48].sum() < 0.01
        assert any(p.phase == "start" and p.subproblem == "gates" for p in evaluator.trace)


@pytest.mark.parametrize(("ratio", "learned"), [(0.958, False), (0.91, True)])
def test_no_gates_are_learned_for_fewer_than_four_full_units(ratio, learned):
    """2 and 4 of 48 units, with a budget that pays for both starts."""
    _, evaluator = exact(KnownOnBudget(6, 8, 0), ratio, budget=21)
    assert any(p.subproblem == "gates" for p in evaluator.trace) == learned


class Free(Layered):
    """Its gradients cost nothing."""

    def gradient_passes(self, share=0, shares=1):
        return 0.0


def test_an_elimination_has_as_many_steps_as_the_root_of_its_units():
    """Of 48 units 46 slide in seven steps, with one gradient before each if they are free."""
    scorer = Free(6, 8, 0)
    gradients = []
    evaluator = Evaluator(scorer, EvaluationLog(None, CONTEXT))
    evaluate = scorer.evaluate
    scorer.evaluate = lambda *args, **options: (
        gradients.append(evaluator.costs()["gradients"]),
        evaluate(*args, **options),
    )[1]
    bosch_plus(evaluator, SearchSettings(0.958, budget_per_layer=16))
    assert gradients[:3] == [0, 0, 7]  # the anchors, and the mask of the elimination


@pytest.mark.parametrize(
    ("name", "most"),
    [
        ("thresholds", 0.35), ("one_of_two", 0.05), ("xor", 0.2), ("either", 0.2),
        ("layers", 0.05), ("heavy", 0.05), ("by_layer", 0.06), ("traps", 0.1), ("chains", 0.08),
    ],
)  # fmt: skip
def test_two_starts_are_no_worse_than_either(name, most):
    """One start alone has a regret of 0.5 on xor, or on traps, chains and layers."""
    scorer = landscape(name, 512, 11)
    evaluator = Evaluator(scorer, EvaluationLog(None, CONTEXT))
    result = bosch_plus(evaluator, SearchSettings(RATIO, budget_per_layer=4))
    assert scorer.regret(result.mask) < most
    assert evaluator.costs()["full_forward_equivalents"] <= 2 + 26 + 1


@pytest.mark.parametrize("name", ["chains", "traps", "layers"])
def test_without_gradients_each_unit_is_measured_alone_where_the_budget_pays_for_it(name):
    whole = landscape(name, 48, 5)
    plain = Plain(whole)
    evaluator = Evaluator(plain, EvaluationLog(None, CONTEXT))
    result = bosch_plus(evaluator, SearchSettings(RATIO, budget_per_layer=100))
    costs = evaluator.costs()
    assert costs["evaluations"] <= 2 + 60
    alone = find_mask(
        "single_ablation", Evaluator(whole, EvaluationLog(None, CONTEXT)), SearchSettings(RATIO)
    )
    assert whole.regret(result.mask) <= whole.regret(alone.mask) + 1e-9
    few = Evaluator(Plain(whole), EvaluationLog(None, CONTEXT))
    bosch_plus(few, SearchSettings(RATIO, budget_per_layer=80))
    assert any(p.phase == "ablation" for p in evaluator.trace)
    assert not any(p.phase == "ablation" for p in few.trace)


@pytest.mark.parametrize(("kappa", "said"), [(4, True), (8, True), (10, True), (11, False)])
def test_budgets_that_are_the_same_are_said_to_be(kappa, said):
    """Four passes at least: with four layers up to 11 evaluations a layer."""
    _, evaluator = exact(Layered(4, 4, 0), 0.5, budget=kappa)
    assert any("every value up to 11" in note for note in evaluator.notes) == said


def blended_attention(module, query, key, value, attention_mask, scaling, **kwargs):
    """Both kinds of attention in full, mixed by the module's gates."""
    key, value = (x.repeat_interleave(2, dim=1) for x in (key, value))
    scores = query @ key.transpose(2, 3) * scaling
    slots = torch.arange(query.shape[2])
    distance = slots[:, None] - slots
    full, sliding = (
        scores.masked_fill(~visible, float("-inf")).softmax(dim=-1) @ value
        for visible in (distance >= 0, (distance >= 0) & (distance < WINDOW))
    )
    gate = module.gate.repeat_interleave(2)[:, None, None]
    return (gate * full + (1 - gate) * sliding).transpose(1, 2), None


def test_a_share_is_never_empty_however_few_the_examples():
    model, calibration = searchable(examples=3)
    objective = Objective(model, calibration, Window(WINDOW), batch_size=2)
    mask = random_mask(0)
    thirds = [objective.gate_gradient(mask, share, 8) for share in range(4)]
    assert thirds[3].values == thirds[0].values != thirds[1].values
    whole = objective.gate_gradient(mask)
    np.testing.assert_allclose(
        np.mean([third.values for third in thirds[:3]], axis=0), whole.values, atol=1e-5
    )
    assert sum(third.full_forward_equivalents for third in thirds[:3]) == pytest.approx(
        whole.full_forward_equivalents, rel=0.05
    )


def test_gradients_are_the_slopes_of_the_blend_of_both_kinds_of_heads():
    model, calibration = searchable(examples=3)
    objective = Objective(model, calibration, Window(WINDOW), batch_size=2)
    mask = random_mask(0)
    ours = [objective.gate_gradient(mask, share, 2) for share in (0, 1)]
    whole = np.array(objective.gate_gradient(mask).values)
    np.testing.assert_allclose(
        (2 * np.array(ours[0].values) + np.array(ours[1].values)) / 3, whole, rtol=1e-4, atol=1e-5
    )
    plain, _ = searchable(examples=3)
    AttentionInterface.register("blended", blended_attention)
    AttentionMaskInterface.register("blended", lambda *args, **kwargs: None)
    plain.set_attn_implementation("blended")
    gates = torch.tensor(mask.is_full, dtype=torch.float32, requires_grad=True)
    for layer, gate in zip(plain.get_decoder().layers, gates, strict=True):
        layer.self_attn.gate = gate
    total = 0.0
    for example in calibration.examples:
        ids = torch.tensor([example.input_ids])
        logits = plain(input_ids=ids, use_cache=False).logits[0].log_softmax(-1)
        for position in range(ids.shape[1] - example.answer_length, ids.shape[1]):
            total = total + logits[position - 1, ids[0, position]]
    (expected,) = torch.autograd.grad(total / 3, gates)
    np.testing.assert_allclose(whole, expected.numpy(), rtol=1e-3, atol=1e-4)
    assert all(p.grad is None and p.requires_grad for p in model.parameters())
    assert np.abs(whole).max() > 0.01


def test_gradients_that_are_not_finite_end_the_search():
    model, calibration = searchable(examples=2)
    objective = Objective(model, calibration, Window(WINDOW))
    objective.evaluate(FULL)
    with torch.no_grad():
        model.get_decoder().norm.weight[0] = float("nan")
    with pytest.raises(RunError, match="gradients are not finite"):
        objective.gate_gradient(FULL)
