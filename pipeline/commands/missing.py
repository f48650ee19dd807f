"""Tasks without a score, as commands report them."""

from __future__ import annotations

from stages.evaluate.scores import Scores


def print_missing(scores: Scores) -> int:
    """Print each task that has no score, with the reason; the exit status, 1 where there is one."""
    for suite, tasks in scores.missing.items():
        for task, reason in tasks.items():
            print(f"{suite}: {task} has no score: {reason}")
    return 1 if scores.missing else 0
