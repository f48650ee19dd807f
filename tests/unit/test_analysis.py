"""Analyses of head masks, each against a plain restatement of its definition."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bosch.analysis.optimality import count_on_budget, masks_on_budget, standing
from bosch.analysis.stability import ranking_stability, spearman
from bosch.analysis.turnover import jaccard_distance, mean_distances, swapped, turnover
from bosch.budget import swa_budget
from bosch.heads import HeadMask
from bosch.objective.evaluation_log import Evaluation
from pipeline.commands.study.stability import importances
from pipeline.commands.study.studied_model import SearchOutcome

LAYERS, HEADS = 3, 4
rows = st.lists(st.booleans(), min_size=LAYERS * HEADS, max_size=LAYERS * HEADS)
values = st.lists(st.integers(-3, 3).map(float), min_size=2, max_size=8)


def mask_of(sliding: list[bool]) -> HeadMask:
    return HeadMask(~np.array(sliding).reshape(LAYERS, HEADS))


def units(mask: HeadMask) -> set[tuple[int, int]]:
    return {(layer, head) for layer, heads in enumerate(mask.swa_kv_heads) for head in heads}


@given(rows, rows, rows)
def test_jaccard_is_a_distance_of_sets(a: list[bool], b: list[bool], c: list[bool]) -> None:
    first, second, third = mask_of(a), mask_of(b), mask_of(c)
    union = units(first) | units(second)
    expected = 1 - len(units(first) & units(second)) / len(union) if union else 0.0
    assert jaccard_distance(first, second) == pytest.approx(expected)
    assert jaccard_distance(first, first) == 0.0
    around = jaccard_distance(first, third) + jaccard_distance(third, second)
    assert jaccard_distance(first, second) <= around + 1e-12


def test_masks_of_other_shape_or_several_windows_are_refused() -> None:
    small, large = HeadMask.all_sliding(2, 4), HeadMask.all_sliding(4, 2)
    for analysis in (jaccard_distance, turnover, lambda a, b: swapped(a, b, 0)):
        with pytest.raises(ValueError, match="shape"):
            analysis(small, large)
        several, plain = (HeadMask.of_choices([row]) for row in ([0, 1, 2, 2], [0, 0, 1, 1]))
        for pair in ((several, plain), (plain, several)):
            with pytest.raises(ValueError, match="several windows"):
                analysis(*pair)


def test_mean_distances_average_over_seeds() -> None:
    def sliding(*indices: int) -> HeadMask:
        return mask_of([i in indices for i in range(LAYERS * HEADS)])

    groups = {"a": [sliding(0, 1), sliding(1, 2)], "b": [sliding(0, 1)]}
    distances = mean_distances(groups)
    apart = 1 - 1 / 3
    assert distances == pytest.approx(np.array([[apart, apart / 2], [apart / 2, 0.0]]))
    with pytest.raises(ValueError, match="no mask"):
        mean_distances({"a": [], "b": [sliding(0)]})


@given(rows, rows)
def test_turnover_and_its_maximum_worked_out_by_hand(a: list[bool], b: list[bool]) -> None:
    small, large = sorted((mask_of(a), mask_of(b)), key=lambda mask: len(units(mask)))
    if not units(small):
        with pytest.raises(ValueError, match="no sliding head"):
            turnover(small, large)
        return
    result = turnover(small, large)
    lost = [unit for unit in units(small) if unit not in units(large)]
    assert result.share == pytest.approx(len(lost) / len(units(small)))
    assert 0.0 <= result.share <= result.maximum <= 1.0
    assert 0.0 <= result.normalised <= 1.0
    if result.maximum:
        assert result.share == pytest.approx(result.normalised * result.maximum)
    # The maximum is reached: the last heads slide at the smaller ratio, the first at the larger.
    order = list(product(range(LAYERS), range(HEADS)))
    far = mask_of([unit in order[-len(units(small)) :] for unit in order])
    near = mask_of([unit in order[: len(units(large))] for unit in order])
    assert turnover(far, near).share == pytest.approx(result.maximum)


def test_turnover_of_the_papers_ratios() -> None:
    """T_max between 0.5 and 0.75 is 0.5 (BOSCH §4.3); Table 3's 6 % and 36 % imply 1/6."""
    order = np.arange(64)
    masks = {ratio: HeadMask((order >= 64 * ratio).reshape(8, 8)) for ratio in (0.5, 0.75, 0.875)}
    assert turnover(masks[0.5], masks[0.75]).maximum == 0.5
    assert turnover(masks[0.75], masks[0.875]).maximum == pytest.approx(1 / 6)
    assert turnover(masks[0.5], masks[0.75]).share == 0.0
    with pytest.raises(ValueError, match="smaller ratio has 48"):
        turnover(masks[0.75], masks[0.5])
    with pytest.raises(ValueError, match="smaller ratio has more"):
        swapped(masks[0.75], masks[0.5], 0)


@given(rows, rows, st.integers(0, 5))
def test_a_swap_keeps_the_budget_and_includes_the_heads_that_turned_over(
    a: list[bool], b: list[bool], seed: int
) -> None:
    small, large = sorted((mask_of(a), mask_of(b)), key=lambda mask: len(units(mask)))
    result = swapped(small, large, seed)
    assert len(units(result)) == len(units(large))
    entered, left = units(result) - units(large), units(large) - units(result)
    assert entered == units(small) - units(large)
    assert len(left) == len(entered)
    assert result == swapped(small, large, seed)


def test_a_swap_draws_the_heads_that_make_room_at_random() -> None:
    """Also heads that slide at both ratios."""
    small = mask_of([i in (0, 1, 6) for i in range(12)])
    large = mask_of([i >= 6 for i in range(12)])
    results = {swapped(small, large, seed) for seed in range(20)}
    assert len(results) > 5
    assert {(1, 2) in units(result) for result in results} == {False, True}


def naive_rank(run: list[float], value: float) -> float:
    """1 + the number of smaller values + half of the other equal ones."""
    smaller = sum(1 for other in run if other < value)
    equal = sum(1 for other in run if other == value)
    return 1 + smaller + (equal - 1) / 2


@given(values, st.randoms(use_true_random=False))
def test_spearman_is_pearson_of_average_ranks(first: list[float], random: object) -> None:
    second = [float(random.randint(-3, 3)) for _ in first]  # type: ignore[attr-defined]
    rho = spearman(first, second)
    if len(set(first)) == 1 or len(set(second)) == 1:
        assert rho is None
        return
    ranks = [[naive_rank(run, value) for value in run] for run in (first, second)]
    assert rho == pytest.approx(np.corrcoef(ranks)[0, 1])
    assert spearman([3 * v + 1 for v in first], second) == pytest.approx(rho)
    assert spearman([-v for v in first], second) == pytest.approx(-rho)


def test_stability_counts_pairs_without_an_order() -> None:
    result = ranking_stability([[1.0, 2.0, 3.0], [1.0, 2.0, 2.0], [5.0, 5.0, 5.0]])
    assert result.undefined == 2
    assert result.correlations == [pytest.approx(np.sqrt(3) / 2)]
    assert result.tied == pytest.approx((0 + 2 / 3 + 1) / 3)
    assert spearman([1.0], [2.0]) is None  # a model of one layer
    assert ranking_stability([[1.0, 1.0], [1.0, 1.0]]).mean is None


@pytest.mark.parametrize("ratio", [0.0, 0.25, 0.4, 0.5, 0.75, 1.0])
def test_every_mask_on_budget_is_enumerated_once(ratio: float) -> None:
    masks = list(masks_on_budget(2, 4, ratio))
    every = [HeadMask(np.array(bits).reshape(2, 4)) for bits in product((True, False), repeat=8)]
    expected = {mask for mask in every if int((~mask.is_full).sum()) == swa_budget(8, ratio)}
    assert set(masks) == expected
    assert len(masks) == len(expected) == count_on_budget(2, 4, ratio)


@given(st.lists(st.integers(0, 4), min_size=15, max_size=15), st.integers(0, 14))
def test_standing_is_the_place_in_a_sorted_list(scores: list[int], place: int) -> None:
    masks = list(masks_on_budget(2, 3, 0.33))
    assert len(masks) == 15
    landscape = {
        mask: Evaluation(score / 4, score - index / 100)
        for index, (mask, score) in enumerate(zip(masks, scores, strict=True))
    }
    result = standing(masks[place], landscape)
    descending = sorted((e.score for e in landscape.values()), reverse=True)
    assert result.score_rank == 1 + descending.index(result.score)
    assert result.score_gap == pytest.approx(descending[0] - result.score)
    assert (result.best_by_score, result.masks) == (descending.count(descending[0]), 15)
    by_likelihood = sorted((e.log_likelihood for e in landscape.values()), reverse=True)
    assert result.log_likelihood_rank == 1 + by_likelihood.index(result.log_likelihood)
    assert result.log_likelihood_gap == pytest.approx(by_likelihood[0] - result.log_likelihood)
    with pytest.raises(ValueError, match="not one of the 15"):
        standing(HeadMask.all_full(2, 3), landscape)


def test_a_layers_importance_is_its_loss_after_the_layers_above() -> None:
    layers = [{"drop": d, "best_log_likelihood": b} for d, b in ((0.1, -3), (0.2, -2.5), (0, -2))]
    run = SearchOutcome(mask_of([False] * 12), 0.5, -3.0, {}, layers, full_log_likelihood=-1.0)
    assert importances(run, "score") == [0.1, 0.2, 0]
    assert importances(run, "log_likelihood") == [0.5, 0.5, 1.0]
