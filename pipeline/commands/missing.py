"""Tasks and models without a score, as commands report them."""

from __future__ import annotations

from stages.evaluate.scores import Scores


def print_missing(scores: Scores) -> int:
    """Print what has no score, with the reason; the exit status, 1 where there is any."""
    for sentence in scores.missing_sentences():
        print(sentence)
    return 1 if scores.missing else 0
