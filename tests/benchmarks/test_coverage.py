"""Coverage of every interval: 5 to 500 samples, scores of 0 to 1, five documents or more.

    pytest tests/benchmarks/test_coverage.py -s

Every 95 % interval must hold the true value in at least 93 % of the draws, less three standard
errors of the simulation.
"""

from __future__ import annotations

import itertools
import math

import pytest

from tests.benchmarks import coverage

pytestmark = pytest.mark.slow

COUNTS = (5, 12, 48, 120, 500)
COUNTS_OF_DOCUMENTS = (5, 6, 10, 12, 30, 60, 100, 200)
MEANS = (0.0, 0.01, 0.05, 0.1, 0.3, 0.5, 0.8, 0.95, 0.99, 1.0)
DRAWS = 2000


def min_coverage(draws: int) -> float:
    return 0.93 - 3 * math.sqrt(0.93 * 0.07 / draws)


@pytest.mark.parametrize("kind", coverage.SCORES)
def test_shares(kind: str) -> None:
    found = {
        (mean, count): coverage.score_coverage([mean], [count], kind, DRAWS)
        for mean, count in itertools.product(MEANS, COUNTS)
    }
    worst = min(found, key=lambda case: found[case])
    print(f"\n{kind}: least coverage {found[worst]:.3f} at score {worst[0]}, {worst[1]} samples")
    assert found[worst] >= min_coverage(DRAWS)


@pytest.mark.parametrize(
    "counts", [[5] * 4, [12] * 8, [5, 500], [500] * 13, [120, 500, 250], [30, 60, 400]], ids=str
)
def test_averages(counts: list[int]) -> None:
    cases = [[0.99] * len(counts), [0.5] * len(counts), [0.998] * len(counts)]
    cases.append([(1.0, 0.6, 0.95)[i % 3] for i in range(len(counts))])
    found = [coverage.score_coverage(truths, counts, "right or wrong", DRAWS) for truths in cases]
    print(f"\n{counts}: least coverage {min(found):.3f}")
    assert min(found) >= min_coverage(DRAWS)


@pytest.mark.parametrize("kind", coverage.LOSSES)
def test_documents(kind: str) -> None:
    found = {count: coverage.loss_coverage(kind, count, DRAWS) for count in COUNTS_OF_DOCUMENTS}
    print(f"\n{kind}: " + ", ".join(f"{n} documents {value:.3f}" for n, value in found.items()))
    assert min(found.values()) >= min_coverage(DRAWS)


@pytest.mark.parametrize("alpha", coverage.HEAVY_TAILS)
def test_differences_of_heavy_tailed_losses(alpha: float) -> None:
    found = {n: coverage.heavy_tail_coverage(alpha, n, DRAWS) for n in COUNTS_OF_DOCUMENTS}
    print(f"\nPareto, alpha {alpha}: " + ", ".join(f"{n}: {pair}" for n, pair in found.items()))
    assert min(difference for _, difference in found.values()) >= min_coverage(DRAWS)


@pytest.mark.parametrize(
    "scores",
    [(0.9, 0.8), (0.97, 0.97), (0.05, 0.1), (0.1, 0.05), (0.3, 0.02), (0.2, 0.9), (0.9, 0.2),
     (0.999, 0.99), (1.0, 1.0), (0.0, 1.0), (0.02, 0.02)], ids=str,
)  # fmt: skip
def test_comparisons(scores: tuple[float, float]) -> None:
    draws = 400
    for (count, subtasks), noise in itertools.product(
        ((5, 1), (12, 1), (12, 4), (48, 1), (200, 4), (500, 1)), (0.02, 0.3, 1.0)
    ):
        results = coverage.comparisons(scores, noise, subtasks, count, draws)
        difference, ratio, rejected = coverage.comparison_coverage(results, scores)
        print(
            f"{scores}, {subtasks} x {count}, noise {noise}: {difference:.3f}, {ratio}, {rejected}"
        )
        assert difference >= min_coverage(draws)
        assert ratio is None or ratio >= min_coverage(draws)
        if scores[0] == scores[1]:
            assert rejected <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / draws)


@pytest.mark.parametrize("seeds", [2, 3, 5, 8])
@pytest.mark.parametrize("examples", [8, 48])
def test_seeds(seeds: int, examples: int) -> None:
    found = coverage.seed_coverage(0.5, seeds, examples, DRAWS)
    skewed = coverage.seed_coverage(0.5, seeds, examples, DRAWS, is_skewed=True)
    print(f"\n{seeds} seeds, {examples} examples: {found[0]:.3f}, differences {found[1]:.3f}")
    print(f"of skewed losses: {skewed[0]:.3f}, {skewed[1]:.3f}")
    assert min(*found, *skewed) >= min_coverage(DRAWS)


@pytest.mark.parametrize("seeds", [1, 2, 3, 8])
@pytest.mark.parametrize(
    ("scores", "spread"),
    [((0.5, 0.5), 0.0), ((0.5, 0.5), 0.03), ((0.9, 0.8), 0.0), ((0.97, 0.97), 0.0),
     ((0.02, 0.02), 0.0), ((1.0, 1.0), 0.0), ((0.6, 0.1), 0.03)], ids=str,
)  # fmt: skip
def test_methods(scores: tuple[float, float], spread: float, seeds: int) -> None:
    if seeds == 1 and spread:
        pytest.skip("with one seed the interval is for that seed's score, not the method's")
    draws = 400
    for count in COUNTS:
        mean, difference, rejected = coverage.method_coverage(scores, seeds, count, spread, draws)
        print(
            f"{scores}, {seeds} seeds x {count}, spread {spread}: {mean}, {difference}, {rejected}"
        )
        assert min(mean, difference) >= min_coverage(draws)
        if scores[0] == scores[1]:
            assert rejected <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / draws)
