"""Solvers on synthetic losses: budgets, determinism, optimality against enumeration."""

from __future__ import annotations

import math
from itertools import combinations
from typing import Any
from unittest.mock import Mock

import numpy as np
import PyNomad
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bosch.score.evaluation_log import Evaluation
from bosch.search import solvers
from bosch.search.loss import Anchors, Loss
from bosch.search.solvers import Problem, brute_force, nomad, one_plus_one, solve
from bosch.search.solvers.nomad import completed
from bosch.search.solvers.problem import Value

LOSS = Loss(Anchors(0.0, 1.0))
SOLVERS = ("nomad", "nomad_penalty", "one_plus_one")


class Additive:
    """Score falls by a weight for each sliding unit; remembers what it was asked."""

    def __init__(self, size: int, seed: int = 0, levels: int | None = None) -> None:
        weights = np.random.default_rng(seed).random(size)
        self.weights = weights / weights.sum()
        self.levels = levels
        self.calls: list[bytes] = []

    def __call__(self, bits: np.ndarray) -> Evaluation:
        self.calls.append(bits.tobytes())
        score = 1.0 - float(self.weights[bits].sum())
        if self.levels:
            score = math.floor(score * self.levels) / self.levels
        return Evaluation(score, -float(self.weights[bits].sum()))


def problem(
    size: int, quota: int, budget: int, measure: Additive, loss: Loss | None = LOSS, **options: Any
) -> Problem:
    return Problem(size, quota, budget, measure, loss, **options)


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize(("size", "quota", "budget"), [(8, 4, 25), (24, 18, 75), (32, 16, 60)])
def test_the_budget_is_spent_exactly_and_no_candidate_is_measured_twice(
    solver, size, quota, budget
):
    measure = Additive(size)
    task = problem(size, quota, budget, measure)
    best = solve(task, solver, seed=3)
    assert best.bits.sum() == quota
    assert len(measure.calls) == len(set(measure.calls)) == task.spent <= budget
    if solver in ("nomad", "one_plus_one"):
        assert task.spent == budget


@pytest.mark.parametrize("solver", SOLVERS)
def test_the_same_seed_gives_the_same_candidates(solver):
    runs = [Additive(16), Additive(16), Additive(16)]
    for measure, seed in zip(runs, (7, 7, 8), strict=True):
        solve(problem(16, 8, 40, measure), solver, seed=seed)
    assert runs[0].calls == runs[1].calls
    assert runs[0].calls != runs[2].calls


@given(st.integers(1, 8), st.data(), st.integers(0, 99))
@settings(max_examples=30, deadline=None)
def test_brute_force_is_used_if_the_budget_suffices_and_finds_the_optimum(size, data, seed):
    quota = data.draw(st.integers(0, size))
    measure = Additive(size, seed)
    task = problem(size, quota, math.comb(size, quota), measure)
    best = solve(task, "nomad", seed)
    lowest = min(sum(measure.weights[list(c)]) for c in combinations(range(size), quota))
    assert best.evaluation.score == pytest.approx(1.0 - lowest)
    assert task.spent == math.comb(size, quota)


@pytest.mark.parametrize(
    ("solver", "size", "used"),
    [
        ("nomad", 50, "nomad"), ("nomad_penalty", 50, "nomad"), ("nomad", 51, "one_plus_one"),
        ("one_plus_one", 50, "one_plus_one"), ("one_plus_one", 4, "brute_force"),
    ],
)  # fmt: skip
def test_a_sub_problems_size_and_settings_choose_its_solver(solver, size, used, monkeypatch):
    names = ("nomad", "one_plus_one", "brute_force")
    mocks = {name: Mock(wraps=getattr(solvers, name)) for name in names}
    for name, mock in mocks.items():
        monkeypatch.setattr(solvers, name, mock)
    solve(problem(size, 2, 6, Additive(size)), solver, 0)
    assert [name for name, mock in mocks.items() if mock.called] == [used]


def test_searches_find_better_candidates_than_random_draws():
    rng = np.random.default_rng(0)
    for solver in (nomad, one_plus_one):
        better = 0
        for seed in range(5):
            measure = Additive(32, seed)
            task = problem(32, 16, 100, measure)
            solver(task, seed)
            draws = [1 - measure.weights[rng.permutation(32)[:16]].sum() for _ in range(100)]
            better += task.result().evaluation.score > max(draws)
        assert better >= 4


def test_a_search_moves_to_candidates_of_equal_loss():
    measure = Additive(32, levels=1)
    one_plus_one(problem(32, 16, 100, measure), 0)
    first, last = (np.frombuffer(measure.calls[index], dtype=bool) for index in (0, -1))
    assert (first != last).sum() > 10  # a swap changes two units, two swaps four


@pytest.mark.parametrize(("solver", "most"), [("nomad", 4), ("nomad_penalty", 10)])
def test_nomad_stops_if_it_proposes_nothing_new(solver, most, monkeypatch):
    """If all candidates have equal loss, few points are proposed per evaluation.

    NOMAD alone would propose a million. With the penalised loss most points are off budget.
    """
    calls = 0
    value = Problem.value

    def counted(self, bits):
        nonlocal calls
        calls += 1
        return value(self, bits)

    monkeypatch.setattr(Problem, "value", counted)
    task = problem(32, 24, 100, Additive(32, levels=1))
    solve(task, solver, 0)
    assert task.spent == task.budget
    assert calls < most * task.budget


def test_nomad_restarts_from_the_best_candidate(monkeypatch):
    task, optimize, from_best = problem(32, 16, 500, Additive(32)), PyNomad.optimize, []

    def recorded(ask, start, *options):
        if task.spent:
            from_best.append((np.array(start) == task.result().bits).all())
        return optimize(ask, start, *options)

    monkeypatch.setattr(PyNomad, "optimize", recorded)
    nomad(task, 0)
    assert len(from_best) >= 2 and all(from_best)


def test_an_error_of_the_model_ends_nomad():
    def fails(bits):
        raise KeyError("model")

    with pytest.raises(KeyError, match="model"):
        nomad(Problem(12, 6, 20, fails, LOSS), 0)


def test_off_budget_candidates_are_bounded_without_the_model():
    measure = Additive(8)
    task = problem(8, 4, 10, measure)
    on_budget = np.arange(8) < 4
    task.value(on_budget)
    off = np.arange(8) < 6
    bound = task.value(off)
    assert len(measure.calls) == 1
    truth = LOSS.value(measure(off).score, 6, 4, 8)
    assert task.best.value.loss <= bound.loss <= truth


def test_off_budget_candidates_that_could_win_are_measured(caplog):
    caplog.set_level("INFO", "bosch.search")
    weak = Loss(Anchors(0.0, 1.0), alpha=0.01)
    task = Problem(8, 4, 10, Additive(8), weak)
    task.value(np.arange(8) < 4)
    task.value(np.arange(8) < 3)
    assert task.spent == 2
    assert task.result().bits.sum() == 4
    task.report_off_budget()
    [said] = caplog.messages
    assert "best mask is off its budget (loss -0.6370)" in said
    # A candidate that is at best as good is not measured.
    task = Problem(8, 4, 10, lambda bits: Evaluation(1.0, 0.0), Loss(Anchors(0.0, 1.0), alpha=0.0))
    task.value(np.arange(8) < 4)
    task.value(np.arange(8) < 3)
    task.report_off_budget()
    assert task.spent == len(caplog.messages) == 1


def test_ties_are_broken_by_log_likelihood_without_the_published_loss():
    def run(loss):
        measure = Additive(8, 1, levels=1)
        task = problem(8, 3, 100, measure, loss, quantum=1.0)
        brute_force(task)
        assert task.on_plateau
        return task.result().bits, measure

    plain, measure = run(LOSS)
    assert plain.tolist() == [True] * 3 + [False] * 5
    alone = problem(4, 4, 9, Additive(4))
    brute_force(alone)
    assert not alone.on_plateau  # one candidate
    broken, _ = run(None)
    assert set(np.flatnonzero(broken)) == set(np.argsort(measure.weights)[:3])


@given(st.integers(0, 63), st.floats(-1e4, 0), st.floats(-1e4, 0))
def test_the_scalar_value_keeps_the_order_of_scores(hits, ll_low, ll_high):
    task = Problem(4, 2, 9, lambda bits: None, quantum=1 / 64)
    worse = Value(-hits / 64, -ll_low)
    better = Value(-(hits + 1) / 64, -ll_high)
    assert task.scalar(better) < task.scalar(worse)
    if ll_low + 1e-3 * (1 + abs(ll_low)) ** 2 < ll_high:
        assert task.scalar(Value(worse.loss, -ll_high)) < task.scalar(worse)


@given(st.integers(1, 12), st.data())
def test_completion_meets_the_quota_with_the_fewest_changes(size, data):
    bits = np.array(data.draw(st.lists(st.booleans(), min_size=size, max_size=size)))
    quota = data.draw(st.integers(0, size))
    order = np.array(data.draw(st.permutations(range(size))))
    done = completed(bits, quota, order)
    assert done.sum() == quota
    assert (done != bits).sum() == abs(int(bits.sum()) - quota)
