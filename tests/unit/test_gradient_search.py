"""Searches by gradients: budgets, known optima, early ends, resuming, and the gradients."""

from __future__ import annotations

import itertools
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from bosch.errors import UserError
from bosch.masks import HeadMask
from bosch.score.evaluation_log import (
    Evaluation,
    GateGradient,
)
from bosch.score.objective import Objective
from bosch.search.evaluator import SHARES, Evaluator
from bosch.search.gradient_search import GradientSearch, Move, RunningMean, bosch_plus
from bosch.search.runs import find_mask
from bosch.search.settings import SearchSettings, plus_budget
from bosch.window import Window
from studies.landscapes import RATIO, landscape
from tests.hybrid_case import KV_HEADS, LAYERS, of_choices, random_mask
from tests.search_case import WINDOW, evaluator_of, mask_of_key, searchable


class Layered:
    """A small model: sliding units cost their weight, and two of a kind more than their sum.

    Gradients are those of its log-likelihood plus `noise`.
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

    def evaluate(self, mask):
        self.evaluated.append(mask.key)
        sliding = (~mask.is_full).reshape(-1).astype(float)
        lost = float(self.costs @ sliding + sliding @ self.pairs @ sliding)
        score = max(0, round((1 - lost) * 16)) / 16
        return Evaluation(score, -lost)

    def gate_gradient(self, mask, share=0, shares=1):
        sliding = (~mask.is_full).reshape(-1).astype(float)
        gradient = self.costs + (self.pairs + self.pairs.T) @ sliding + self.noise
        passes = self.gradient_passes(share, shares)
        return GateGradient(gradient.reshape(mask.is_full.shape).tolist(), 0.0, passes)

    def gradient_passes(self, share=0, shares=1):
        return 1.0


def exact(scorer, ratio, budget=100, log=None):
    evaluator = evaluator_of(scorer) if log is None else Evaluator(scorer, log)
    return bosch_plus(evaluator, SearchSettings(ratio, budget_per_layer=budget)), evaluator


class Shared(Layered):
    """Each share of the examples has gradients of its own."""

    def gate_gradient(self, mask, share=0, shares=1):
        exact = super().gate_gradient(mask, share, shares)
        own = np.random.default_rng(share).normal(size=mask.is_full.shape) / mask.is_full.size
        return replace(exact, values=(np.array(exact.values) + own).tolist())


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("method", ["bosch", "bosch_plus"])
def test_evaluations_in_the_log_do_not_change_the_search(tmp_path, method, seed):
    """Neither after a stop, even within a line, nor with all masks measured before."""
    path = tmp_path / "evaluations.jsonl"

    def search():
        scorer = Shared(3, 4, seed)
        evaluator = evaluator_of(scorer, path)
        result = find_mask(method, evaluator, SearchSettings(0.5, budget_per_layer=60))
        return result, evaluator, scorer.evaluated

    whole, evaluator, evaluated = search()
    lines = path.read_text().splitlines(keepends=True)
    assert (method == "bosch") != any("gradient" in line for line in lines)
    for count in [*range(1, len(lines), 3), len(lines)]:
        path.write_text("".join(lines[:count]) + [*lines, ""][count][:20])
        again, resumed, rest = search()
        assert (again, resumed.trace) == (whole, evaluator.trace)
        assert resumed.costs() == pytest.approx(evaluator.costs())
        assert sorted(path.read_text().splitlines(keepends=True)) == sorted(lines)
        assert len(rest) <= len(lines) - count and rest == evaluated[len(evaluated) - len(rest) :]


class Costly(Layered):
    """The cost of its gradients differs by share: 3.2 passes in all."""

    def __init__(self, layers, heads, seed, shares):
        super().__init__(layers, heads, seed, noise=0.1)
        costs = np.random.default_rng(seed).uniform(0.5, 1.5, shares)
        self.passes = 3.2 * costs / costs.sum()

    def gradient_passes(self, share=0, shares=1):
        return float(self.passes[share % len(self.passes)])


@pytest.mark.parametrize("shares", [1, 3, 8])
def test_a_search_by_gradients_spends_no_more_than_its_budget(shares):
    for seed, budget, layers in itertools.product(range(10), (1, 8, 16, 40), (3, 12)):
        evaluator = evaluator_of(Costly(layers, 4, seed, shares))
        options = SearchSettings(0.9, budget_per_layer=budget)
        if plus_budget(options, layers) < 4.2 and shares == 1:  # a gradient of 3.2, and a mask
            with pytest.raises(UserError, match=r"search\.budget_per_layer: .* costs 4\.2 passes"):
                find_mask("bosch_plus", evaluator, options)
            continue
        find_mask("bosch_plus", evaluator, options)
        masks = evaluator.costs()["evaluations"] - 2  # without the anchors
        assert masks + evaluator.passes_of_gradients <= plus_budget(options, layers) + 1e-9


@pytest.mark.parametrize(
    ("name", "units", "seeds", "most"),
    [
        # With gradients at the two corners alone the regret on these is 0.15 to 0.9.
        ("redundant", 320, [3], 0.1), ("pairs", 320, [3], 0.1), ("chains", 320, [3], 0.1),
        ("traps", 320, [3], 0.1),
        # The passes suffice for one mask only.
        ("redundant", 48, range(100, 106), 0.15),
        # Each gradient alone is off by a fifth: with only the last one the regret is 0.077.
        ("pairs", 48, range(64), 0.065),
        # With one start the regret is 0.5 on xor, or on traps, chains and layers.
        ("thresholds", 512, [11], 0.35), ("one_of_two", 512, [11], 0.05), ("xor", 512, [11], 0.2),
        ("either", 512, [11], 0.2), ("layers", 512, [11], 0.05), ("heavy", 512, [11], 0.05),
        ("by_layer", 512, [11], 0.06), ("traps", 512, [11], 0.1), ("chains", 512, [11], 0.08),
    ],
)  # fmt: skip
def test_searches_find_good_masks_despite_interactions(name, units, seeds, most):
    """Within the passes of a budget per layer of 4, plus the anchors."""
    regrets, options = [], SearchSettings(RATIO, budget_per_layer=4)
    for seed in seeds:
        scorer = landscape(name, units, seed)
        evaluator = evaluator_of(scorer)
        regrets.append(scorer.regret(bosch_plus(evaluator, options).mask))
        passes = 2 + plus_budget(options, scorer.num_layers)
        assert evaluator.costs()["full_forward_equivalents"] <= passes
    assert np.mean(regrets) < most


def test_every_start_is_used():
    evaluator = evaluator_of(landscape("xor", 128, 1))
    bosch_plus(evaluator, SearchSettings(RATIO, budget_per_layer=200))
    starts, moves = (
        {point.subproblem for point in evaluator.trace if point.phase == phase}
        for phase in ("start", "swaps")
    )
    assert starts == {"gates", "elimination", "layers", "mean"}
    assert moves == {"exchange", "swap"}


class Summed(Shared):
    """Records the sum of the gradients before each mask."""

    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.total, self.before = 0.0, {}

    def evaluate(self, mask):
        self.before.setdefault(mask.key, self.total)
        return super().evaluate(mask)

    def gate_gradient(self, mask, share=0, shares=1):
        gradient = super().gate_gradient(mask, share, shares)
        self.total = self.total + np.array(gradient.values)
        return gradient


def test_one_start_has_the_units_of_greatest_mean_value():
    """Of the gradients before the first start was measured."""
    scorer = Summed(8, 8, 0)
    _, evaluator = exact(scorer, 0.75)
    first, mean = (
        next(point.mask for point in evaluator.trace if point.subproblem == name)
        for name in ("elimination", "mean")
    )
    worth, full = scorer.before[first], mask_of_key(mean).is_full
    assert worth[full].min() > worth[~full].max()


def test_one_start_has_the_layers_of_greatest_value():
    """19 full units: all of the best two layers, and the best three of the next one."""
    scorer = Shared(8, 8, 0)
    _, evaluator = exact(scorer, 0.7)
    [key] = [point.mask for point in evaluator.trace if point.subproblem == "layers"]
    worth = np.array(scorer.gate_gradient(HeadMask.all_full(8, 8)).values)
    first, second, third = worth.sum(axis=1).argsort()[:-4:-1]
    expected = np.zeros((8, 8), dtype=bool)
    expected[[first, second]] = True
    expected[third, worth[third].argsort()[-3:]] = True
    assert (mask_of_key(key).is_full == expected).all()


class Flat:
    """Masks that score alike; the first of 4 x 4 units have a higher value than the others."""

    num_layers, num_key_value_heads, quantum = 4, 4, 0.25

    def evaluate(self, mask):
        return Evaluation(1.0 if mask.num_sliding == 0 else 0.5 * (mask.num_sliding < 16), -1.0)

    def gate_gradient(self, mask, share=0, shares=1):
        return GateGradient(np.arange(16, 0, -1.0).reshape(4, 4).tolist(), 0.0, 0.0)

    def gradient_passes(self, share=0, shares=1):
        return 0.0


def test_a_search_ends_after_all_swaps_if_none_wins():
    """Of each start, though the budget is larger."""
    _, evaluator = exact(Flat(), 13 / 16, budget=2000)
    starts = [p.mask for p in evaluator.trace if p.phase == "start"]
    seen = {p.mask: mask_of_key(p.mask).is_full for p in evaluator.trace}
    for start in starts:
        assert sum((full != seen[start]).sum() == 2 for full in seen.values()) == 39


def test_an_elimination_has_as_many_steps_as_the_root_of_its_units():
    """Of 48 units 46 slide in seven steps, with one gradient before each if gradients are free."""
    scorer, gradients = Layered(6, 8, 0), []
    scorer.gradient_passes = lambda share=0, shares=1: 0.0
    evaluator = evaluator_of(scorer)
    evaluator.watch = lambda one: gradients.append(one.costs()["gradients"])
    bosch_plus(evaluator, SearchSettings(0.958, budget_per_layer=16))
    assert gradients[:3] == [0, 0, 7]  # the anchors, and the mask of the elimination


SIZES = (2 * WINDOW, WINDOW, 3)


def blended_attention(module, query, key, value, attention_mask, scaling, **kwargs):
    """Attention under every choice, weighted by the module's shares [HKV, 1 + windows]."""
    key, value = (x.repeat_interleave(2, dim=1) for x in (key, value))
    scores = query @ key.transpose(2, 3) * scaling
    slots = torch.arange(query.shape[2])
    distance = slots[:, None] - slots
    blended = 0.0
    for share, size in zip(module.shares.unbind(1), (len(slots), *SIZES), strict=True):
        hidden = (distance < 0) | (distance >= size)
        output = scores.masked_fill(hidden, float("-inf")).softmax(dim=-1) @ value
        blended = blended + share.repeat_interleave(2)[:, None, None] * output
    return blended.transpose(1, 2), None


def test_gradients_are_derivatives_of_the_blend_of_all_choices():
    model, calibration = searchable(examples=3)
    objective = Objective(model, calibration, [Window(size) for size in SIZES], batch_size=2)
    choices = np.random.default_rng(3).integers(0, 4, (LAYERS, KV_HEADS))
    mask = of_choices(choices, objective.windows)
    plain, _ = searchable(examples=3)
    AttentionInterface.register("blended", blended_attention)
    AttentionMaskInterface.register("blended", lambda *args, **kwargs: None)
    plain.set_attn_implementation("blended")
    shares = torch.nn.functional.one_hot(torch.tensor(choices)).float().requires_grad_()
    for layer, share in zip(plain.get_decoder().layers, shares, strict=True):
        layer.self_attn.shares = share
    total = 0.0
    for example in calibration.examples:
        ids = torch.tensor([example.input_ids])
        logits = plain(input_ids=ids, use_cache=False).logits[0].log_softmax(-1)
        for position in range(ids.shape[1] - example.answer_length, ids.shape[1]):
            total = total + logits[position - 1, ids[0, position]]
    slopes = torch.autograd.grad(total / 3, shares)[0].numpy()
    close = {"rtol": 1e-3, "atol": 1e-4}
    ours = np.array(objective.window_gradient(mask).values)
    share = np.take_along_axis(slopes, choices[..., None], axis=2)
    np.testing.assert_allclose(ours, slopes - share, **close)
    ours = np.array(objective.gate_gradient(mask).values)
    np.testing.assert_allclose(ours, slopes[..., 0] - slopes[..., -1], **close)
    assert all(p.grad is None and p.requires_grad for p in model.parameters())
    assert np.abs(ours).max() > 0.01


def test_gradients_over_shares_have_the_mean_of_one_over_all_examples():
    """Three examples make at most three shares: none is empty."""
    model, calibration = searchable(examples=3)
    objective, mask = (
        Objective(model, calibration, Window(WINDOW), batch_size=2),
        random_mask(Window(WINDOW)),
    )
    whole = objective.gate_gradient(mask)
    for shares, examples in ((2, [2, 1]), (8, [1, 1, 1])):
        parts = [objective.gate_gradient(mask, share, shares) for share in range(len(examples))]
        mean = np.average([part.values for part in parts], axis=0, weights=examples)
        np.testing.assert_allclose(mean, whole.values, rtol=1e-4, atol=1e-5)
    assert objective.gate_gradient(mask, 3, 8).values == parts[0].values != parts[1].values
    passes = sum(part.full_forward_equivalents for part in parts)
    assert passes == pytest.approx(whole.full_forward_equivalents, rel=0.05)


def test_values_are_the_mean_of_the_gradients_at_a_layout() -> None:
    """The n-th gradient gives every unit the value n; part s costs s + 1."""
    parts: list[int] = []

    def take(mask: Any, part: int, of: int) -> np.ndarray:
        parts.append(part)
        return np.full((1, 1, 2), float(len(parts)))

    evaluator: Any = SimpleNamespace(
        cost_of_gradient=lambda part, of: part + 1, window_values=take, shape=(1, 1),
        windows=[], held_out_passes=0.0,
    )  # fmt: skip
    search = GradientSearch(evaluator, 100, np.array([1.0, 0.0]), [1])
    vars(search)["mask"] = lambda choices: choices
    here, there = search.all_full, search.narrowest
    assert search.gradient_cost == SHARES
    assert (search.values_at(here, 3) == 2.0).all() and (search.values_at(here, 2) == 2.0).all()
    assert (search.values_at(there) == 4.0).all()
    assert (search.gradient(here) == (1 + 2 + 3 + 5) / 4).all()
    for _ in range(SHARES):
        search.gradient(there)
    assert parts == [*range(SHARES), *range(5)] and search.gradients == len(parts)
    assert search.left == 100 - sum(part + 1 for part in parts)


def test_a_moves_promise_is_its_wins_per_pass() -> None:
    assert Move(lambda number: None).promise == 0.5
    assert Move(lambda number: None, wins=2, passes=1.0).promise == 1.0
    assert Move(lambda number: None, passes=6.0).promise == 0.125


def test_a_running_mean_restarts_if_a_gradient_disagrees() -> None:
    """By more than half of the larger one."""
    running = RunningMean(3)
    gradients = ([4.0, 4.0, 0.0], [2.0, 1.9, 0.0], [6.0, 1.5, 0.0], [4.0, 1.1, 1.0])
    means = [running.add(np.array(gradient)).tolist() for gradient in gradients]
    assert means[:2] == [[4.0, 4.0, 0.0], [3.0, 1.9, 0.0]]
    assert np.allclose(means[2:], [[4.0, 1.7, 0.0], [4.0, 1.5, 1.0]])
