"""Algorithms 1 to 3 and the ablations on synthetic scores: budgets, order, reuse, ties."""

from __future__ import annotations

import math
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bosch.budget import swa_budget
from bosch.masks import HeadMask
from bosch.rankings import layer_rules
from bosch.score.evaluation_log import Evaluation
from bosch.search.ablations import b_layer, b_multi, b_single
from bosch.search.bosch import (
    assign_ratios,
    bosch,
    head_selection,
    layer_drops,
    layer_importance,
    layer_weights,
    ratio_groups,
)
from bosch.search.groups import layer_groups, max_layers_per_group
from bosch.search.loss import Anchors, Loss
from bosch.search.settings import SearchSettings
from tests.hybrid_case import sliding_heads
from tests.search_case import Additive, evaluator_of, mask_of_key, random_costs


def full_layers(mask):
    return [i for i, row in enumerate(mask) if row.any()]


def test_layer_rules_keep_the_layers_that_their_names_say():
    assert full_layers(layer_rules.bme(12, 4, 0.5)) == [0, 1, 5, 6, 10, 11]
    assert full_layers(layer_rules.bme(8, 4, 0.75)) == [0, 7]
    assert full_layers(layer_rules.intr(8, 4, 0.75)) == [2, 6]
    assert full_layers(layer_rules.intr(8, 4, 0.5)) == [1, 3, 5, 7]
    # The rest, less than a layer, goes to the first heads of the next layer.
    assert sliding_heads(layer_rules.intr(4, 4, 0.625)) == [[0, 1, 2, 3], [], [0, 1, 2, 3], [2, 3]]
    assert sliding_heads(layer_rules.bme(6, 4, 0.75))[0] == []
    assert sliding_heads(layer_rules.bme(6, 4, 0.75))[5] == [2, 3]
    first, second = (layer_rules.rand(16, 4, 0.5, seed=seed) for seed in (1, 2))
    assert (first != second).any()


@given(
    st.lists(st.floats(0, 1), min_size=1, max_size=48),
    st.integers(1, 16),
    st.floats(0, 1),
    st.lists(st.floats(0, 1), min_size=2, max_size=7, unique=True).map(sorted),
)
@settings(max_examples=300, deadline=None)
def test_ratios_meet_the_budget_for_any_scores(scores, heads, ratio, buckets):
    drops = layer_drops(scores, 1.0, 1.0)
    budget = swa_budget(len(scores) * heads, ratio)
    result = assign_ratios(drops, heads, budget, buckets)
    assert sum(result.quotas) == budget
    assert all(0 <= quota <= heads for quota in result.quotas)
    assert all(0 <= weight <= 1 for weight in result.weights)


FIVE = (0.0, 0.25, 0.5, 0.75, 1.0)
DROPS = [0.2, 0.0, 0.6, 0.05, 0.1]  # Five layers of 8 units, of which layer 2 hurts most.


@pytest.mark.parametrize(
    ("drops", "buckets", "budget", "hardest_first", "quotas"),
    [
        (DROPS, FIVE, 20, [2, 0, 4, 3, 1], [2, 8, 0, 6, 4]),  # the start is on budget
        # The easiest layers rise by one bucket each.
        (DROPS, FIVE, 24, [2, 0, 4, 3, 1], [2, 8, 0, 8, 6]),
        (DROPS, FIVE, 16, [2, 0, 4, 3, 1], [0, 8, 0, 6, 2]),  # the hardest layers fall
        # If no bucket step fits, single units move: to the easiest layers, or from the hardest.
        ([0.3, 0.2, 0.1], (0.0, 1.0), 11, [0, 1, 2], [1, 2, 8]),
        ([0.3, 0.2, 0.1], (0.5, 1.0), 14, [0, 1, 2], [3, 3, 8]),
    ],
)
def test_ratios_worked_out_by_hand(drops, buckets, budget, hardest_first, quotas):
    result = assign_ratios(np.array(drops), 8, budget, buckets)
    assert (result.hardest_first, result.quotas) == (hardest_first, quotas)


def test_drops_are_each_layers_own_contribution():
    best = [0.5, 0.6, 0.9]
    assert layer_drops(best, 1.0, 1.0) == pytest.approx([0.1, 0.3, 0.1])
    assert layer_drops(best, 1.0, 0.5) == pytest.approx([0.2, 0.6, 0.2])


def test_equal_drops_give_weights_of_one_half_and_outliers_are_clipped():
    assert layer_weights(np.zeros(5)).tolist() == [0.5] * 5
    # Of 41 values the percentiles are the second and the second but last.
    drops = np.append(np.arange(40.0), 1000.0)
    assert layer_weights(drops) == pytest.approx(np.clip((drops - 1) / 38, 0, 1))


def test_rows_of_layers_have_their_drop_and_their_final_sliding_units():
    costs = random_costs(3, 4, 5, exponent=2)
    scorer = Additive(costs, lambda mask: 0.8 - 0.5 * costs[~mask.is_full].sum())
    # Three units of each layer are two too many; the two hardest layers get them back.
    evaluator = evaluator_of(scorer)
    result = b_single(evaluator, SearchSettings(0.55, budget_per_layer=6))
    cheapest = np.sort(costs, axis=1)[:, :3].sum(axis=1)
    lost, drops = np.cumsum(cheapest[::-1])[::-1], 0.5 * cheapest / 0.8
    expected = {
        "layer": range(3),
        "best_score": 0.8 - 0.5 * lost,
        "best_log_likelihood": -lost,
        "drop": drops,
        "weight": layer_weights(drops),
        "ratio": np.where(drops > drops.min(), 0.5, 0.75),
    }
    for name, values in expected.items():
        assert [row[name] for row in result.layers] == pytest.approx(list(values)), name
    assert result.mask.is_full.sum(1).tolist() == [4 * (1 - row["ratio"]) for row in result.layers]
    assert not any("last phase" in note for note in evaluator.notes)


def test_algorithm_one_is_exact_on_an_additive_score():
    """With 4 heads and rho = 0.5 every layer is enumerated, so the mask is known."""
    costs = random_costs(3, 4, 5, exponent=2)
    oracle = Additive(costs)
    options = SearchSettings(0.5, budget_per_layer=6)
    importance = layer_importance(evaluator_of(oracle), options, Loss(Anchors(0.0, 1.0)))
    cheapest = [sorted(np.argsort(row)[:2].tolist()) for row in costs]
    assert sliding_heads(importance.mask) == cheapest
    expected = 1.0
    for layer in (2, 1, 0):
        expected -= sum(sorted(costs[layer])[:2])
        assert importance.best_scores[layer] == pytest.approx(expected)
    changed = [mask_of_key(key).is_full.all(axis=1).argmin() for key in oracle.calls]
    assert changed == [2] * 6 + [1] * 6 + [0] * 6


def test_algorithm_three_searches_groups_jointly_from_all_full():
    costs = random_costs(4, 3, 8, exponent=2)
    oracle = Additive(costs)
    options = SearchSettings(0.5, budget_per_layer=10)
    mask = head_selection(evaluator_of(oracle), options, Loss(Anchors(0.0, 1.0)), [3, 1, 0, 1])
    assert sliding_heads(mask)[0] == [0, 1, 2]
    assert sliding_heads(mask)[2] == []
    joint = np.concatenate([costs[1], costs[3]])
    chosen = min(combinations(range(6), 2), key=lambda pair: joint[list(pair)].sum())
    units = [(1 if i < 3 else 3, i % 3) for i in chosen]
    assert [(layer, h) for layer in (1, 3) for h in sliding_heads(mask)[layer]] == units
    assert len(oracle.calls) == math.comb(6, 2)


def test_groups_are_split_as_the_paper_does():
    assert max_layers_per_group(8, 50) == 4
    assert max_layers_per_group(4, 50) == 8
    assert layer_groups(28, 4) == [list(range(i, i + 4)) for i in range(0, 28, 4)]
    assert [len(group) for group in layer_groups(9, 4)] == [3, 3, 3]
    groups = ratio_groups([4] * 6 + [8] * 9 + [0, 2], 8, 50)
    assert [(len(layers), quota) for layers, quota in groups] == [(9, 8), (3, 4), (3, 4), (1, 2)]
    assert [quota for _, quota in groups] == sorted((q for _, q in groups), reverse=True)


def test_subgroups_are_neighbours_and_the_deepest_is_searched_first():
    """While a subgroup is searched, the layers below it have not changed yet."""
    quotas = [1, 1, 1, 1, 1, 1, 2]
    subgroups = [[6], [4, 5], [2, 3], [0, 1]]
    assert [layers for layers, _ in ratio_groups(quotas, 3, 6)] == subgroups
    oracle = Additive(random_costs(7, 3, 2, exponent=2))
    options = SearchSettings(0.4, budget_per_layer=8, max_group_variables=6)
    head_selection(evaluator_of(oracle), options, Loss(Anchors(0.0, 1.0)), quotas)
    changed = [mask_of_key(key).is_full.all(axis=1).argmin() for key in oracle.calls]
    searched = [next(group for group in subgroups if layer in group) for layer in changed]
    assert searched == sorted(searched, reverse=True)
    assert [group for group in subgroups if group in searched] == subgroups


def test_layers_with_equal_scores_are_ranked_by_log_likelihood():
    """Only layer 4 lowers the score; of the others layer 1 lowers the log-likelihood."""
    hidden = np.full((5, 8), 1e-3)
    hidden[1] = 5.0

    def search(strict):
        oracle = Additive(hidden)
        oracle.evaluate = lambda mask: Evaluation(
            mask.is_full.any() * (1.0 if mask.is_full[4].all() else 0.5),
            -float(hidden[~mask.is_full].sum()),
        )
        evaluator = evaluator_of(oracle)
        options = SearchSettings(0.5, "one_plus_one", budget_per_layer=25, strict=strict)
        return bosch(evaluator, options), evaluator

    plain, evaluator = search(strict=True)
    assert not any("masks of equal score were ranked" in note for note in evaluator.notes)
    assert any("ranking is arbitrary" in note for note in evaluator.notes)
    assert any("choice of its heads is arbitrary" in note for note in evaluator.notes)
    broken, evaluator = search(strict=False)
    assert any("masks of equal score were ranked" in note for note in evaluator.notes)
    assert any("log-likelihoods rank them" in note for note in evaluator.notes)
    assert [row["ratio"] for row in broken.layers][1] == 0.25
    assert broken.evaluation.rank > plain.evaluation.rank


def test_the_top_layer_is_also_ranked_by_its_drop_from_the_originals_log_likelihood():
    """Layer 1 lowers the score; of the others layer 0 costs the answers more than the top one."""
    scorer = Additive([[3.0] * 2, [1.0] * 2, [0.5] * 2])
    scorer.evaluate = lambda mask: Evaluation(
        mask.is_full.any() * (1.0 if mask.is_full[1].all() else 0.5),
        -9.0 - float(scorer.costs[~mask.is_full].sum()),
    )
    result = bosch(evaluator_of(scorer), SearchSettings(0.5, buckets=(0.0, 0.5, 1.0)))
    assert [row["ratio"] for row in result.layers] == [0.5, 0.0, 1.0]


class OneHeadOfEachLayer(Additive):
    """Answers all examples if unit 0 of every layer is full, and none otherwise."""

    def evaluate(self, mask):
        missing = int((~mask.is_full[:, 0]).sum())
        return Evaluation(float(missing == 0), -float(missing))


def test_no_measured_mask_on_budget_is_better_than_the_result():
    """All layers are equal for Algorithm 1, so Algorithm 2 makes whole layers sliding."""
    settings_of = {
        strict: SearchSettings(0.75, "one_plus_one", strict=strict) for strict in (True, False)
    }
    evaluator = evaluator_of(OneHeadOfEachLayer(np.ones((5, 4))))
    published = bosch(evaluator, settings_of[True])
    assert published.evaluation.score == published.last_phase.score == 0.0
    _, best = evaluator.best_on_budget
    assert best.score == 1.0
    assert any("0.0000" in n and "1.0000" in n and "strict" in n for n in evaluator.notes)
    evaluator = evaluator_of(OneHeadOfEachLayer(np.ones((5, 4))))
    result = bosch(evaluator, settings_of[False])
    assert result.evaluation.score == 1.0
    assert [row["ratio"] for row in result.layers] == [0.75] * 5
    assert any("every layer gets the same ratio" in note for note in evaluator.notes)


def test_the_best_mask_on_budget_has_the_best_score_then_log_likelihood():
    """Of equal ones it is the first."""
    evaluator = evaluator_of(Additive([[0.1, 0.2, 0.3, 0.1]], lambda mask: 0.5))
    evaluator.anchors(0.25)
    for unit in (1, 0, 2, 3):
        row = np.arange(4) != unit
        evaluator.evaluate(evaluator.mask(row), "swaps", "swap")
    assert sliding_heads(evaluator.best_on_budget[0]) == [[0]]


def test_a_better_mask_of_an_earlier_stage_is_returned():
    """Only the mask of Algorithm 1 scores, and the ratios of Algorithm 2 exclude it."""
    costs = np.array([[0.0, 0.1], [0.0, 0.2]])
    oracle = Additive(costs)
    algorithm_one = HeadMask(((1, 0), (1, 0)))
    plain = oracle.evaluate
    oracle.evaluate = lambda mask: Evaluation(0.98, 0.0) if mask == algorithm_one else plain(mask)
    evaluator = evaluator_of(oracle)
    result = bosch(evaluator, SearchSettings(0.5, buckets=(0.0, 1.0)))
    assert (result.mask, result.evaluation.score) == (algorithm_one, 0.98)
    assert result.last_phase.score < 0.98
    assert any("the latter is returned" in note for note in evaluator.notes)


def test_loss_worked_out_by_hand():
    loss = Loss(Anchors(0.1, 0.8), alpha=100.0, gamma=0.25)
    assert loss.score_range == pytest.approx(0.9)
    assert loss.value(0.55, 5, 4, 8) == pytest.approx(-0.5 + 100 / 64)
    assert loss.value(1.0, 4, 4, 8) == pytest.approx(-1.0)


def test_b_multi_searches_groups_of_layers_jointly_top_first():
    costs = np.full((5, 3), 0.05)
    costs[4, 1] = costs[2, 0] = costs[2, 2] = costs[0, 1] = costs[1, 2] = 0.01
    evaluator = evaluator_of(Additive(costs))
    # 8 variables hold two layers of three heads: groups of 1, 2 and 2 layers from the top.
    result = b_multi(evaluator, SearchSettings(1 / 3, budget_per_layer=10, max_group_variables=8))
    assert sliding_heads(result.mask) == [[1], [2], [0, 2], [], [1]]
    probes = [point for point in evaluator.trace if point.phase == "layer_importance"]
    assert [point.subproblem for point in probes] == ["layer 4"] * 3 + ["layers 2 to 3"] * 15 + [
        "layers 0 to 1"
    ] * 15
    assert not any("too many" in note for note in evaluator.notes)


def test_b_multi_spreads_a_groups_drop_over_its_layers():
    costs = random_costs(4, 2, 7)
    evaluator = evaluator_of(Additive(costs))
    result = b_multi(evaluator, SearchSettings(0.5, budget_per_layer=9, max_group_variables=4))
    drops = [row["drop"] for row in result.layers]
    assert drops[0] == drops[1] and drops[2] == drops[3]
    assert sum(drops) == pytest.approx(1.0 - result.evaluation.score)


def test_b_layer_makes_its_surplus_full_in_the_layer_that_gains_most():
    costs = np.full((4, 4), 0.01)
    costs[2] = [0.02, 0.05, 0.03, 0.02]
    evaluator = evaluator_of(Additive(costs))
    # 14 of 16 units: four whole layers hold two units too many.
    result = b_layer(evaluator, SearchSettings(0.875, budget_per_layer=4))
    assert sliding_heads(result.mask) == [[0, 1, 2, 3], [0, 1, 2, 3], [0, 3], [0, 1, 2, 3]]
    assert any("2 units too many" in note and "layer 2" in note for note in evaluator.notes)


def test_b_layer_makes_no_full_layer_full():
    """All layers tie, also layer 0, which is full, since without it no mask scores 1."""

    def score(mask):
        return float(mask.is_full[0].all())

    evaluator = evaluator_of(Additive(random_costs(3, 4, 0), score))
    result = b_layer(evaluator, SearchSettings(0.5, budget_per_layer=3, strict=True))
    assert [len(heads) for heads in sliding_heads(result.mask)] == [0, 2, 4]
