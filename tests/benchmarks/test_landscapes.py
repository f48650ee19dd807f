"""Regret per pass of every search on synthetic landscapes; bosch_plus is best or tied on each.

    pytest tests/benchmarks/test_landscapes.py -s \
        [BOSCH_UNITS=48,320,1000 BOSCH_KAPPA=4,10,100 in the environment]

A regret of 0 is the optimum, 1 the mean of random masks on budget. At the same kappa bosch may
spend 2 kappa L evaluations, the searches of the whole mask kappa L, bosch_plus and learned gates
kappa L / 10; what measures units or layers one by one spends N or L whatever kappa is, and is
printed only. Passes are full-forward equivalents, anchors included; nothing is reused here.
`bosch` solves large sub-problems by (1+1), which costs less time here than NOMAD.
"""

from __future__ import annotations

import os
from functools import cache
from statistics import mean

import pytest

from bosch.search.runs import run_method
from bosch.search.settings import SearchSettings
from tests.benchmarks.landscapes import NAMES, RATIO, landscape

pytestmark = pytest.mark.slow

UNITS = [int(n) for n in os.environ.get("BOSCH_UNITS", "48,320").split(",")]
KAPPA = [int(n) for n in os.environ.get("BOSCH_KAPPA", "4,10").split(",")]
RIVALS = ("bosch", "one_plus_one", "learned_gates", "rand")
TIED = 0.03


@cache
def _regret_and_passes(method: str, name: str, units: int, kappa: int) -> tuple[float, float]:
    """Means over the seeds."""
    regrets, passes = [], []
    for seed in range(max(3, 768 // units)):  # small landscapes differ more from each other
        scorer = landscape(name, units, seed)
        settings = SearchSettings(RATIO, "one_plus_one", budget_per_layer=kappa, seed=seed)
        run = run_method(method, scorer, settings)
        regrets.append(scorer.regret(run.mask))
        passes.append(run.costs["full_forward_equivalents"])
    return mean(regrets), mean(passes)


@pytest.mark.parametrize("kappa", KAPPA)
@pytest.mark.parametrize("units", UNITS)
@pytest.mark.parametrize("name", NAMES)
def test_bosch_plus_is_best_or_tied(name: str, units: int, kappa: int) -> None:
    methods = ("bosch_plus", *RIVALS)
    results = {method: _regret_and_passes(method, name, units, kappa) for method in methods}
    for method, (regret, passes) in results.items():
        print(
            f"{name:10} {units:5} units, kappa {kappa:3}, {method:16} regret {regret:6.3f}, "
            f"{passes:7.0f} passes",
            flush=True,
        )
    assert results["bosch_plus"][0] <= min(results[rival][0] for rival in RIVALS) + TIED
