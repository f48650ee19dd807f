"""What the quickstart shows, asserted over three seeds.

    python -m tests.benchmarks.quickstart FOLDER [SEED ...]

Runs the recipe as it is with each seed (6 minutes each on two cores; finished stages in FOLDER are
used), prints a row per seed and fails unless in each of them the rule loses at least 10 points, the
search's untrained hybrid is ahead of every rival by more than the 95 % interval and loses something
itself, training brings back at least 80 % of that loss, and the cache is a quarter at most.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from pipeline.recipe.load import ROOT
from stages.evaluate.scores import HYBRID, ORIGINAL, Scores, SuiteScores
from stages.report.results import Results, load_results

RECIPE = "recipes/quickstart.yaml"
SEEDS = [42, 43, 44]
LEAST_LOSS, LEAST_RECOVERY, LARGEST_CACHE = 10.0, 0.8, 0.25
STAGES = ("prepare", "search", "materialize", "train", "original", "evaluate")


def run_recipe(folder: Path, seed: int) -> Results:
    """The recipe's results with a seed."""
    root = folder / f"seed-{seed}"
    command = ["launch/torchrun.sh", RECIPE, f"seed={seed}", f"runtime.output_root={root}"]
    subprocess.run(command, cwd=ROOT, check=True)
    output = root / "quickstart"
    return load_results({stage: (output / stage).resolve() for stage in STAGES})


def faults(results: Results) -> list[str]:
    """What the results do not show."""
    scores = results.scores
    assert scores is not None and results.trained is not None
    original = _needle(scores, ORIGINAL)
    untrained, trained = _needle(scores, HYBRID), results.trained.suite
    lost = original.average - untrained.average
    sentences = []
    for rival in results.rivals:
        if original.average - rival.average < LEAST_LOSS:
            sentences.append(f"{rival.name} loses less than {LEAST_LOSS:g} points")
        if not _above(untrained, rival.suite):
            sentences.append(f"the search is not ahead of {rival.name} by more than the interval")
    against = untrained.against_original
    if against is None or against.difference_high >= 0:
        sentences.append("the untrained hybrid loses nothing that is more than its interval")
    elif trained.average - untrained.average < LEAST_RECOVERY * lost:
        sentences.append(f"training brings back less than {LEAST_RECOVERY:.0%}")
    if results.cache.dynamic(2048) > LARGEST_CACHE * results.cache.original(2048):
        sentences.append(f"the cache at 2,048 tokens is more than {LARGEST_CACHE:g}")
    return sentences


def _above(first: SuiteScores, second: SuiteScores) -> bool:
    """Whether the scores' 95 % intervals are apart, the first's above."""
    assert first.low is not None and second.high is not None
    return first.low > second.high


def _needle(scores: Scores, name: str) -> SuiteScores:
    return scores.checkpoints[name]["needle"]


def row(seed: int, results: Results) -> str:
    """The scores of a seed as a row of the table."""
    models = [*(results.needle or [])[:1], *results.rivals, *(results.needle or [])[1:]]
    cells = [f"{model.name} {model.average:.1f}" for model in models]
    seconds = sum(value for _, value in results.stage_seconds)
    return f"| {seed} | {' | '.join(cells)} | {seconds:.0f} s |"


def main(folder: Path, seeds: list[int]) -> int:
    """Print the table; the exit status is 1 where a seed does not show what it should."""
    failed: dict[int, list[str]] = {}
    rows = []
    for seed in seeds:
        results = run_recipe(folder, seed)
        rows.append(row(seed, results))
        if sentences := faults(results):
            failed[seed] = sentences
    print("\n".join(rows))
    print(json.dumps(failed) if failed else "every seed shows it")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), [int(seed) for seed in sys.argv[2:]] or SEEDS))
