"""The evaluations of a search in their order."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TracePoint:
    """One evaluation in the order of the search; `best_score` is the best of its sub-problem."""

    phase: str
    step: int
    subproblem: str
    score: float
    log_likelihood: float
    best_score: float
    mask: str


def subproblem_key(phase: str, subproblem: str) -> tuple[str, str]:
    """Phase and sub-problem within which masks compete; those of `bosch_plus` are one."""
    return ("swaps", "") if phase in ("start", "swaps") else (phase, subproblem)
