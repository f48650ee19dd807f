"""Mesh-adaptive direct search by NOMAD 4 (Audet et al. 2022), in short runs that stay on budget.

NOMAD moves binary variables one flip at a time. On the penalised loss almost every flip leaves the
budget, so by default its variables are decoded: a point with too many or too few sliding units is
completed to the quota along a random order of the units, and a flip becomes a swap.
`stay_on_budget=False` hands NOMAD the penalised loss of Eq. 5 itself. NOMAD counts points, this
module counts evaluations. A run ends after a few polls, before NOMAD revisits known points; the
next run starts from the best mask with a new order, until the budget is spent. Quadratic models are
off, since with 32 variables they cost over 0.2 s per evaluation.
"""

from __future__ import annotations

import contextlib
import io
import queue
import signal
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np

from bosch.search.solvers.problem import Bits, BudgetSpent, Problem, random_bits

MAX_NOMAD_VARIABLES = 50

_POINTS_PER_VARIABLE = 4
_FRUITLESS_RUNS = 20
_WORST = 1e20
# Upper bound of seeds, since NOMAD draws `seed` random numbers before it starts.
_SEEDS = 2**15
_PARAMETERS = [
    "BB_INPUT_TYPE * B",
    "BB_OUTPUT_TYPE OBJ",
    "DISPLAY_DEGREE 0",
    "DIRECTION_TYPE ORTHO N+1 NEG",
    "EVAL_QUEUE_SORT RANDOM",
    "QUAD_MODEL_SEARCH no",
]


def nomad(problem: Problem, seed: int, *, stay_on_budget: bool = True) -> None:
    """Spend the budget with NOMAD; `seed` determines all. Ends when several runs find nothing."""
    rng = np.random.default_rng(seed)
    start = random_bits(problem.size, problem.quota, rng)
    fruitless = 0
    while problem.left > 0 and fruitless < _FRUITLESS_RUNS:
        spent = problem.spent
        order = rng.permutation(problem.size) if stay_on_budget else None
        _Run(problem, order).optimise(start, seed=int(rng.integers(1, _SEEDS)))
        fruitless = fruitless + 1 if problem.spent == spent else 0
        start = problem.result().bits
        if fruitless >= 2:
            start = random_bits(problem.size, problem.quota, rng)


def completed(bits: Bits, quota: int, order: np.ndarray) -> Bits:
    """`bits` with the fewest changes, in the given order, after which `quota` of them are True."""
    excess = int(bits.sum()) - quota
    candidates = order[bits[order] == (excess > 0)]
    result = bits.copy()
    result[candidates[: abs(excess)]] = excess < 0
    return result


class _Run:
    """One call of NOMAD in its own thread, which asks for losses; the caller's thread answers.

    NOMAD calls back from inside an OpenMP region, where torch's kernels would run on one thread.
    Its callback must not raise either, since NOMAD swallows exceptions and continues.
    """

    def __init__(self, problem: Problem, order: np.ndarray | None) -> None:
        self.problem, self.order = problem, order
        self.failure: BaseException | None = None
        self.run_flag = 0
        self._points: queue.SimpleQueue[Bits | None] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[float] = queue.SimpleQueue()

    def optimise(self, start: Bits, seed: int) -> None:
        with _restored_interrupt(), contextlib.redirect_stdout(io.StringIO()):
            thread = threading.Thread(target=self._search, args=(start, seed), daemon=True)
            thread.start()
            while (bits := self._points.get()) is not None:
                self._answers.put(self._answer(bits))
            thread.join()
        if self.failure is not None:
            raise self.failure
        if self.run_flag == -5:
            raise KeyboardInterrupt

    def _search(self, start: Bits, seed: int) -> None:
        """NOMAD's thread."""
        try:
            import PyNomad

            size = self.problem.size
            points = _POINTS_PER_VARIABLE * size
            limits = [f"MAX_BB_EVAL {points}", f"MAX_EVAL {points}", f"SEED {seed}"]
            PyNomad.setSeed(0)  # NOMAD ignores a SEED equal to that of the last run
            result = PyNomad.optimize(
                self._ask,
                start.astype(float).tolist(),
                [0.0] * size,
                [1.0] * size,
                _PARAMETERS + limits,
            )
            self.run_flag = result["run_flag"]
        except BaseException as failure:
            self.failure = self.failure or failure
        finally:
            self._points.put(None)

    def _ask(self, point: Any) -> int:
        bits = np.array([point.get_coord(i) > 0.5 for i in range(self.problem.size)])
        self._points.put(bits)
        point.setBBO(repr(self._answers.get()).encode())
        return 1

    def _answer(self, bits: Bits) -> float:
        if self.failure is not None:
            return _WORST
        try:
            if self.order is not None:
                bits = completed(bits, self.problem.quota, self.order)
            return self.problem.scalar(self.problem.value(bits))
        except BudgetSpent:
            return _WORST
        except BaseException as failure:
            self.failure = failure
            return _WORST


@contextlib.contextmanager
def _restored_interrupt() -> Iterator[None]:
    """NOMAD takes over Ctrl-C; give it back to Python afterwards."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handler = signal.getsignal(signal.SIGINT)
    try:
        yield
    finally:
        if handler is not None:
            signal.signal(signal.SIGINT, handler)
