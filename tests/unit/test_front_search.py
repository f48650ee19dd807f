"""Search of a front: allotments, budgets, resuming, held-out examples, bad budgets."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from bosch.errors import UserError
from bosch.masks import HeadMask
from bosch.score.calibration import CalibrationSet
from bosch.score.evaluation_log import (
    Evaluation,
    EvaluationLog,
    GateGradient,
)
from bosch.score.objective import Objective
from bosch.search.allotment import allotted, slots_of
from bosch.search.bosch import SearchResult
from bosch.search.evaluator import Evaluator, SlotBudgets
from bosch.search.gradient_search import (
    GradientSearch,
    Point,
    Track,
    front_result,
    front_search,
)
from bosch.search.loss import Anchors
from bosch.search.methods import METHODS
from bosch.search.runs import find_mask
from bosch.search.settings import SearchSettings, front_budget
from bosch.window import Window
from tests.search_case import WINDOW, evaluator_of, mask_of_key, searchable
from tests.window_landscapes import TOKENS, Values, WindowLandscape

BUDGETS = (1500, 2500, 4000, 6000)


def test_an_allotment_has_nearly_the_best_value_of_all_layouts() -> None:
    rng = np.random.default_rng(1)
    costs = np.array([100.0, 15.0, 7.0])
    every = np.array(list(product(range(3), repeat=6))).reshape(-1, 2, 3)
    slots, shares = costs[every].sum(axis=(1, 2)), []
    for _ in range(20):
        values = rng.exponential(size=(2, 3, 1)) * np.array([1.0, 0.6, 0.0])
        values[..., 1] *= rng.uniform(size=(2, 3))
        budget = rng.uniform(42, 600)
        choices = allotted(values, costs, budget)
        assert slots_of(choices, costs) <= budget
        worth = [
            np.take_along_axis(values, one[..., None], axis=2).sum()
            for one in every[slots <= budget]
        ]
        own = np.take_along_axis(values, choices[..., None], axis=2).sum()
        shares.append(own / max(worth) if max(worth) > 0 else 1.0)
    assert min(shares) > 0.6 and np.mean(shares) > 0.96


def test_an_allotment_stays_within_its_bounds_and_spends_its_budget() -> None:
    costs, now = np.array([10.0, 1.0]), np.array([[0, 1, 0, 1]])
    values = np.stack([np.array([[4.0, 3.0, -2.0, -1.0]]), np.zeros((1, 4))], axis=2)
    assert allotted(values, costs, 22, widest=now).tolist() == [[0, 1, 0, 1]]
    assert allotted(values, costs, 13, widest=now).tolist() == [[0, 1, 1, 1]]
    assert allotted(values, costs, 31, narrowest=now).tolist() == [[0, 0, 0, 1]]
    assert allotted(values, costs, 22).tolist() == [[0, 0, 1, 1]]
    assert allotted(values, costs, 40).tolist() == [[0, 0, 0, 0]]  # spent to the last slot
    assert allotted(values, costs, 4).tolist() == [[1, 1, 1, 1]]
    alike = np.tile([4.0, 0.0], (1, 2, 1))  # at no price exactly one of them is full
    assert allotted(alike, costs, 11).sum() == 1
    assert allotted(alike, costs, 10.5).sum() == 2


def _search(
    costs: Iterable[float], budgets: Iterable[int], shape: tuple[int, int] = (3, 4), **more: Any
) -> GradientSearch:
    """A search with 100 passes of units whose choices cost so many slots."""
    evaluator: Any = SimpleNamespace(
        shape=shape, windows=[], held_out_passes=0.0, cost_of_mask=lambda mask: 1.0,
        cost_of_gradient=lambda part, parts: more.get("gradient", 0.5),
    )  # fmt: skip
    search = GradientSearch(evaluator, more.get("passes", 100), np.array([*costs]), [*budgets])
    vars(search)["mask"] = lambda choices: choices
    return search


def _track(choices: npt.NDArray[np.int64], slots: int = 0) -> Track:
    return Track("", slots, choices, Evaluation(0.0, 0.0, 0.0, 1.0), 0.0, np.zeros(choices.shape))


def test_a_step_changes_no_more_units_than_allowed_and_never_for_the_worse() -> None:
    """Half of the best candidates may grow; full units cannot grow, units cannot pass the menu."""
    rng, changed = np.random.default_rng(4), 0
    for _ in range(40):
        search = _search((20, 7, 3), [100])
        choices = rng.integers(0, 3, search.shape)
        values, pairs = rng.normal(size=(*search.shape, 3)), int(rng.integers(1, 5))
        slots = int(search.costs[choices].sum())
        step = search._changed(choices, values, slots, pairs)
        assert search.costs[step].sum() <= slots
        assert (step < choices).sum() <= pairs and (step > choices).sum() <= pairs
        gains = values - np.take_along_axis(values, choices[..., None], axis=2)
        best = np.where(np.arange(3) < choices[..., None], gains, -np.inf).max(axis=2)
        candidates = np.sort(best.reshape(-1))[::-1][: 2 * pairs]
        assert (best[step < choices] >= candidates.min()).all()
        changed += (step != choices).any()
    assert changed > 25


def test_a_step_with_one_window_exchanges_the_best_for_the_worst() -> None:
    """With all candidates drawn: units 4 and 5 for 0 and 1, but not 6 for 2."""
    search = _search((1, 0), [4], shape=(1, 8))
    search._rng = np.random.default_rng(1)
    choices = np.array([[0, 0, 0, 0, 1, 1, 1, 1]])
    worth = np.array([[1.0, 2, 6, 7, 5, 4, 3, 0]])
    values = np.stack([worth, np.zeros_like(worth)], axis=2)
    found = {tuple(np.flatnonzero(search._changed(choices, values, 4, 4)[0] == 0)) for _ in "aa"}
    assert found == {(2, 3, 4, 5)}


def test_units_of_a_failed_swap_come_last() -> None:
    """Of eight units that promise the same: four swaps, then all units have failed once."""
    search = _search((20, 3), [92], shape=(2, 4))
    track = _track(np.array([[0, 1, 0, 1], [1, 0, 1, 0]]), 92)
    values = np.stack([np.ones((2, 4)), np.zeros((2, 4))], axis=2)
    search._means[track.choices.tobytes()] = values, 1
    for swaps in range(1, 5):
        swapped = search._swapped(track)
        assert swapped is not None and (swapped != track.choices).sum() == 2
        assert track.failed.sum() == (track.failed > 0).sum() == 2 * swaps


def test_a_neighbours_layout_grows_or_shrinks_to_a_budget() -> None:
    rng = np.random.default_rng(3)
    for _ in range(20):
        own = rng.integers(0, 3, (3, 4))
        slots = int(np.array([20, 7, 3])[own].sum())
        search = _search((20, 7, 3), [max(slots - 30, 36), slots + 30])
        for point in search.points:
            point.tracks.append(_track(own, point.slots))
        search._means[own.tobytes()] = rng.normal(size=(3, 4, 3)), 1
        grown, shrunk = search._grown(1), search._shrunk(0)
        assert grown is not None and shrunk is not None
        assert (grown[1] <= own).all() and slots_of(grown[1], search.costs) <= slots + 30
        assert (shrunk[1] >= own).all()
        assert slots_of(shrunk[1], search.costs) <= search.points[0].slots
        assert search._shrunk(1) is None and search._grown(0) is None


@pytest.mark.parametrize(
    ("budgets", "counts"),
    [
        # Eight units of 10 slots when full and 2 when not: 16 for all, and 8 more for each.
        ([40, 47, 48, 55, 56], [4, 4, 5]),
        ([20, 30], []),
        ([48, 56, 64, 72, 80], [4, 5, 6, 7]),  # only the smallest four
    ],
)
def test_gates_are_learned_at_the_smallest_budgets_with_four_full_units(
    budgets: list[int], counts: list[int]
) -> None:
    search = _search((10, 2), budgets, shape=(2, 4))
    drawn: list[int] = []
    search.gradient = lambda choices: drawn.append(int((choices == 0).sum())) or np.ones((2, 4, 2))  # type: ignore[method-assign, func-returns-value]
    assert (search._gates() is None) == (not counts)
    if not counts:
        return
    search.learn(5)
    assert drawn[-5:] == (counts * 5)[:5]


@pytest.mark.parametrize(
    ("passes", "units", "gates"),
    # 35 % of the passes, for gradients of a half; at most a quarter of the units, and 64.
    [(100, 64, 16), (20, 64, 14), (6, 64, 4), (5, 64, 0), (100, 8, 4), (900, 1000, 64)],
)
def test_gates_get_their_share_of_the_passes(passes: int, units: int, gates: int) -> None:
    for budget, count in ((2 * units + 32, gates), (2 * units + 24, 0)):
        search, learned = _search((10, 2), [budget], (1, units), passes=passes), [0]
        vars(search)["learn"] = learned.append
        search._gates()
        assert learned[-1] == count


def search(
    scorer: Any, kappa: int = 40, path: Path | None = None, **budgets: Any
) -> tuple[SearchResult, Evaluator]:
    evaluator = evaluator_of(scorer, path)
    defaults = {"context": TOKENS, "slots": BUDGETS}
    evaluator.slot_budgets = SlotBudgets(**{**defaults, **budgets})
    return find_mask("front", evaluator, SearchSettings(0.5, budget_per_layer=kappa)), evaluator


@pytest.mark.parametrize("name", ["additive", "redundant", "chains", "one_of_two"])
def test_points_are_within_their_budgets_and_passes_within_the_bound(name: str) -> None:
    scorer = WindowLandscape(name, (2, 4), (16, 64))
    result, evaluator = search(scorer)
    front = result.front
    assert front is not None and front.context == TOKENS
    costs = evaluator.costs()
    options = SearchSettings(0.5, budget_per_layer=40)
    assert costs["full_forward_equivalents"] <= 2 + front_budget(options, 2)
    assert len(evaluator.trace) <= METHODS["front"].most_evaluations(options, 2, 4)
    masks = [point.mask for point in front.points]
    assert masks[0] == HeadMask.all_sliding(2, 4, Window(16))
    assert masks[-1] == HeadMask.all_full(2, 4)
    scores = [point.score for point in front.points]
    assert scores == sorted(scores)
    for point in front.points:
        evaluation = evaluator.log.get(point.mask)
        assert evaluation is not None and evaluation.score == point.score
    best = max(point.score for point in front.points[:-1])
    assert result.mask == next(point.mask for point in front.points if point.score == best)


def test_a_front_is_nearly_exact_if_units_are_additive() -> None:
    for seed in range(3):
        scorer = WindowLandscape("additive", (2, 4), (16, 64), seed)
        scorer._noise[:] = 1.0
        front = search(scorer, kappa=100)[0].front
        assert front is not None
        values, slots = scorer.value(scorer.layouts), scorer.slots(scorer.layouts)
        for budget in BUDGETS:
            found = max(
                float(scorer.value(scorer.choices(point.mask)))
                for point in front.points
                if point.kv_slots <= budget
            )
            assert found >= values[slots <= budget].max() - 0.04


def test_every_kind_of_move_is_made() -> None:
    """With budgets close to each other, so that neighbours help."""
    scorer = WindowLandscape("redundant", (4, 4), (16, 64))
    _, evaluator = search(scorer, kappa=200, slots=(1290, 1625, 2048, 2580, 4156, 6502))
    masks: dict[str, list[HeadMask]] = {}
    for point in evaluator.trace:
        masks.setdefault(point.subproblem, []).append(mask_of_key(point.mask))
    moves = {point.subproblem for point in evaluator.trace if point.phase == "swaps"}
    assert moves == {"exchange", "swap", "grown", "shrunk"}
    assert {*masks} - moves >= {"elimination", "gates", "mixed", "mean"}


class Saturated(WindowLandscape):
    """Two units together give all answers; gradients at layouts with both favour the others."""

    ANSWERING = (2, 9)

    def value(self, choices: npt.ArrayLike) -> Values:
        value: Values = (np.asarray(choices)[..., self.ANSWERING] == 0).all(axis=-1) * 1.0
        return value

    def window_gradient(self, mask: HeadMask, share: int = 0, shares: int = 1) -> GateGradient:
        choices = self.choices(mask)
        full = np.full(choices.size, 0.01)
        both = (choices[[*self.ANSWERING]] == 0).all()
        full[[*self.ANSWERING]] = -1.0 if both else 1.0
        changes = np.stack([full, np.zeros_like(full)], axis=1)
        own = np.take_along_axis(changes, choices[:, None], axis=1)
        values = (changes - own).reshape(*mask.is_full.shape, -1).tolist()
        return GateGradient(values, 0.0, self.gradient_passes(share, shares))


def test_larger_budgets_grow_from_a_stuck_layout() -> None:
    """Gradients mislead at good layouts but are right at a layout that fails."""
    scorer = Saturated("additive", (4, 4), (16,))
    budgets = (2500, 3500, 4500, 6500, 9000)
    found, _ = search(scorer, kappa=14, slots=budgets)
    assert found.front is not None and found.front.points[-2].score == 1.0


class Blind(WindowLandscape):
    """As `Saturated`, but gradients with many full units tell nothing: both first starts fail."""

    def evaluate(self, mask: HeadMask) -> Evaluation:
        evaluation = super().evaluate(mask)
        full = int(mask.is_full.sum())
        return Evaluation(0.0 if 5 <= full < 16 else evaluation.score, evaluation.log_likelihood)


def test_a_size_whose_starts_fail_does_not_feed_the_others() -> None:
    """With the middle sizes at 0, the smaller ones are still found from starts of their own."""
    scorer = Blind("additive", (4, 4), (16,))
    result, evaluator = search(scorer, kappa=60, slots=(2500, 4500, 6500, 9000))
    assert result.front is not None
    assert max(point.score for point in result.front.points[:-1]) > 0.2
    names = Counter(point.subproblem for point in evaluator.trace if point.phase == "start")
    assert {"gates", "elimination", "grown"} <= {*names}


@pytest.mark.parametrize(("name", "gates_win"), [("chains", False), ("xor", True)])
def test_the_start_that_wins_at_a_middle_size_comes_first_at_the_others(
    name: str, gates_win: bool
) -> None:
    evaluator = evaluator_of(WindowLandscape(name, (4, 4), (16,)))
    evaluator.slot_budgets = SlotBudgets(TOKENS, (5000, 6000, 7000))
    evaluator.anchors(0.5)
    search = front_search(evaluator, SearchSettings(0.5, budget_per_layer=60))
    vars(search)["_improve"] = lambda: None
    search.run()
    starts = [point.subproblem for point in evaluator.trace if point.phase == "start"]
    assert {*starts[:2]} == {"elimination", "gates"}
    assert {*starts[2:]} - {"grown"} <= {"gates" if gates_win else "elimination"}


def test_the_budget_with_the_largest_gap_to_the_next_moves_first() -> None:
    search = _at_start((_slots(1), _slots(2), _slots(3)))
    for number, score in enumerate((0.5, 0.5, 0.9)):
        _set(search, number, _slots(number + 1), _full(*range(number + 1)), score, number - 9.0)
    search._improve()
    first = next(point for point in search.evaluator.trace if point.phase == "swaps")
    assert mask_of_key(first.mask).num_sliding == 6


def test_a_stopped_search_ends_with_the_same_front(tmp_path: Path) -> None:
    path = tmp_path / "evaluations.jsonl"
    scorer = WindowLandscape("chains", (2, 4), (16, 64), 3)
    whole, _ = search(scorer, path=path)
    lines = path.read_text().splitlines(keepends=True)
    for count in (4, len(lines) // 2, len(lines) - 1):
        path.write_text("".join(lines[:count]) + lines[count][:20])
        again, _ = search(scorer, path=path)
        assert again == whole
        assert sorted(path.read_text().splitlines()) == sorted("".join(lines).splitlines())


def test_a_budget_too_small_for_one_gradient_is_refused() -> None:
    scorer: Any = WindowLandscape("additive", (2, 4), (16, 64))
    scorer.gradient_passes = lambda share=0, shares=1: 5.5
    with pytest.raises(UserError, match=r"one gradient costs 5\.5 passes over"):
        search(scorer, kappa=1)


@pytest.mark.parametrize("cost", [0.3, 0.5, 0.7])
def test_masks_of_little_cost_leave_room_for_a_gradient(cost: float) -> None:
    """There are no more masks than passes, however many points the passes would pay for."""
    scorer: Any = WindowLandscape("additive", (2, 4), (16, 64))
    scorer.mask_passes = lambda mask: cost
    result, evaluator = search(scorer, kappa=4, slots=_MANY)
    assert result.front is not None and result.front.points[-1].mask == HeadMask.all_full(2, 4)
    assert len(evaluator.trace) <= 2 + front_budget(SearchSettings(0.5, budget_per_layer=4), 2)
    assert any("6 passes pay for 5 of 7 points" in note for note in evaluator.notes)


def _at_start(slots: tuple[int, ...] = BUDGETS, kappa: int = 100) -> GradientSearch:
    """A search that has measured only the anchors."""
    scorer = WindowLandscape("additive", (2, 4), (16, 64), 1)
    evaluator = evaluator_of(scorer)
    evaluator.slot_budgets = SlotBudgets(TOKENS, slots)
    evaluator.anchors(0.5)
    return front_search(evaluator, SearchSettings(0.5, budget_per_layer=kappa))


def _full(*units: int) -> npt.NDArray[np.int64]:
    return np.where(np.isin(np.arange(8), units), 0, 2).reshape(2, 4)


def _set(
    search: GradientSearch, number: int, slots: int, choices: npt.NDArray[np.int64],
    *rank: float, passes: float = 0.0,
) -> Track:  # fmt: skip
    """Give a budget this layout with this score and log-likelihood."""
    track = Track("", slots, choices, Evaluation(*rank), passes, np.ones((2, 4)), 3)
    search.points[number : number + 1] = [Point(slots, {}, [track])]
    return track


def _slots(full_units: int) -> int:
    return full_units * TOKENS + (8 - full_units) * 15


# Eight units of 1,024 slots when full, else 63 or 15: 120 with all at the narrowest window, 168
# with one at the wider window.
_SPACED = [1290, 1625, 2048, 2580, 3251, 4096, 5161, 6502]
_MANY = tuple(range(1000, 8000, 1000))


@pytest.mark.parametrize(
    ("slots", "kappa", "budgets"),
    [
        ((), 100, _SPACED),
        ((130, 167, 168, 4000, 8191, 8192, 9000), 100, [168, 4000, 8191]),
        ((4000, 4000), 100, [4000]),
        # 9, 8 and 6 passes, of which two gradients cost 1.125.
        (_MANY, 30, [*_MANY]),
        (_MANY, 25, [1000, 2000, 3000, 5000, 6000, 7000]),
        (_MANY, 10, [1000, 3000, 5000, 7000]),
    ],
)
def test_budgets_of_the_points_are_requested_or_spaced(
    slots: tuple[int, ...], kappa: int, budgets: list[int]
) -> None:
    search = _at_start(slots, kappa)
    assert [point.slots for point in search.points] == budgets
    said = [f"pay for {len(budgets)} of 7 points" in note for note in search.evaluator.notes]
    assert said == [True] * (kappa < 30)


def test_a_better_layout_is_kept_at_every_budget_that_it_fits() -> None:
    """At a larger budget by its score alone."""
    search = _at_start((1129, 2138, 3147))
    ranks = [search.evaluator.scorer.evaluate(search.mask(_full(k))).rank for k in range(8)]
    best, worst = ranks.index(max(ranks)), ranks.index(min(ranks))
    choices, (score, likelihood) = _full(best), ranks[best]
    rows = [  # budget, score and log-likelihood before, and whether the layout is better
        (1128, 0.0, -1.0, False), (1129, score, likelihood - 0.1, True),
        (2138, score, likelihood - 0.1, False), (3147, score - 0.01, likelihood + 0.1, True),
    ]  # fmt: skip
    tracks = [_set(search, n, budget, _full(), *rank) for n, (budget, *rank, _) in enumerate(rows)]
    tries = [(1, choices, True), (1, choices, False), (0, choices, True)]
    tries += [(1, _full(worst), True), (1, _full(worst), False)]
    for number, tried, is_new in tries:
        point = search.points[number]
        # A layout too large for the smallest budget is proposed by no move.
        if slots_of(tried, search.costs) <= point.slots:
            assert search._measure(point, point.best, tried, "move") == is_new
    assert (search.evaluations, search.left) == (2, search.all_passes - 2)
    for track, (*_, is_better) in zip(tracks, rows, strict=True):
        assert (track.choices == (choices if is_better else _full())).all()
        assert (track.failed.any(), track.passes) == (not is_better, float(is_better))


@pytest.mark.parametrize(
    ("scores", "kept", "result"),
    [
        # Points that score less than a smaller one are left out; the smallest of the best wins.
        ([0.5, 0.4, 0.5, 0.9, 0.9], [1, 3, 4], 4),
        ([0.5, 0.4, 0.45, 0.3, 0.4], [1], 1),
        ([0.5, 0.5, 0.6, 0.6, 0.7], [1, 2, 3, 4, 5], 5),
    ],
)
def test_a_front_has_only_points_that_score_no_less_than_smaller_ones(
    scores: list[float], kept: list[int], result: int
) -> None:
    search = _at_start()
    for number, score in enumerate(scores, 1):
        # The last budget's layout has no more slots than the one before, if that scores as high.
        units = (1, 2, 3, 4) if scores[-2:] == [0.9, 0.9] and number == 5 else range(number)
        choices = _full(*units)
        _set(search, number - 1, _slots(number), choices, score, -number, passes=10.0 * number)
    found = front_result(search, Anchors(0.0, 1.0))
    assert found.front is not None
    assert [point.mask.is_full.sum() for point in found.front.points] == [0, *kept, 8]
    passes = [10.0 * (5 if scores[-2:] == [0.9, 0.9] and k == 4 else k) for k in kept]
    assert [point.passes for point in found.front.points] == [0.0, *passes, 0.0]
    assert found.mask.is_full.sum() == result
    poor = any(score < 0.5 for score in scores[3:])
    assert any("less than half" in note for note in search.evaluator.notes) == (poor and 5 in kept)


def test_a_window_too_wide_for_a_budget_becomes_a_narrower_one() -> None:
    search = _at_start((168, 2000))
    values = np.ones((2, 4, 3)).cumsum(axis=2)[..., ::-1]
    for number, window in ((0, 2), (1, 1)):
        layout = search.layout(values, search.points[number].slots, kind=1)
        assert slots_of(layout, search.costs) <= search.points[number].slots
        assert {*layout.flat} <= {0, window}


@pytest.mark.parametrize(
    ("budgets", "said"),
    [
        ({"slots": (119, 4000)}, "119 KV slots at 1,024 tokens are too few.*needs 120"),
        ({"context": 63}, "at 63 tokens each window must hold fewer"),
    ],
)
def test_budgets_below_the_smallest_window_and_windows_of_all_tokens_are_refused(
    budgets: dict[str, Any], said: str
) -> None:
    with pytest.raises(UserError, match=said):
        search(WindowLandscape("additive", (2, 4), (16, 64)), **budgets)


def test_points_are_scored_on_examples_that_the_search_does_not_use(tmp_path: Path) -> None:
    model, calibration = searchable(examples=8)
    used, held_out = calibration.split(4)
    assert held_out is not None and held_out.examples == calibration.examples[3::4]
    assert set(used.examples) | set(held_out.examples) == set(calibration.examples)
    windows = [Window(WINDOW), Window(3)]
    fronts = []
    for _ in range(2):  # the second search reads the log of the first
        objective = Objective(model, used, windows, batch_size=4, held_out=held_out)
        log = EvaluationLog(tmp_path / "evaluations.jsonl", objective.context)
        evaluator = Evaluator(objective, log)
        result = find_mask("front", evaluator, SearchSettings(0.5, budget_per_layer=8))
        fronts.append(result.front)
    assert fronts[0] == fronts[1] and evaluator.fresh_seconds == 0.0
    lines = map(json.loads, (tmp_path / "evaluations.jsonl").read_text().splitlines())
    work = [line.get("gradient") or line.get("held_out") or line for line in lines]
    costs = evaluator.costs()
    for cost, name in (("model_seconds", "seconds"), ("full_forward_equivalents",) * 2):
        assert costs[cost] == pytest.approx(sum(part[name] for part in work))
    alone = Objective(model, held_out, windows, batch_size=4)
    assert fronts[0] is not None and fronts[0].context == used.max_length
    for point in fronts[0].points:
        expected = alone.evaluate(point.mask).score
        assert point.held_out is not None and point.held_out.score == expected
        assert point.held_out.low <= expected <= point.held_out.high
    masks = [mask_of_key(key) for key in {point.mask for point in evaluator.trace}]
    whole = sum(map(objective.mask_passes, masks)) + evaluator.passes_of_gradients
    for mask in (point.mask for point in fronts[0].points):
        held = objective.evaluate_held_out(mask)
        passes = alone.whole_pass_operations(mask) / objective.full_pass_operations
        assert held.full_forward_equivalents == pytest.approx(passes)
        whole += passes
    assert costs["full_forward_equivalents"] == pytest.approx(whole)
    full = alone.evaluate(HeadMask.all_full(objective.num_layers, objective.num_key_value_heads))
    last = fronts[0].points[-1].held_out
    assert full.score == 1.0 and last is not None and last.low == pytest.approx(0.05**0.5)


@pytest.mark.parametrize("tasks", range(1, 9))
@pytest.mark.parametrize("every", [2, 4])
def test_held_out_examples_are_of_all_tasks(every: int, tasks: int) -> None:
    records = [([number, 1], 1, str(number % tasks)) for number in range(24 * tasks * every + 1)]
    whole = CalibrationSet.from_records(records)
    used, held_out = whole.split(every)
    assert held_out is not None
    assert sorted(one.input_ids[0] for one in used.examples + held_out.examples) == [
        *range(len(whole))
    ]
    assert set(Counter(example.task for example in held_out.examples).values()) == {24}
    if math.gcd(every, tasks) == 1:
        assert held_out.examples == whole.examples[every - 1 :: every]
    few = CalibrationSet.from_records(records[: every - 1])
    assert few.split(every) == (few, None)
