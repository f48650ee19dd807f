"""Claims about the quickstart, asserted over three seeds.

    python -m studies.quickstart FOLDER [SEED ...]

Runs the recipe as it is with each seed (finished stages in FOLDER are used), prints a row per seed
and fails unless in each of them training brings back at least 80 % of what the hybrid loses by more
than its interval and makes its loss in text smaller, which then is from token 16 on at no position
more than 0.1 nats above the original's (fewer tokens of a document say little), and the cache is a
quarter at most.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

from pipeline.recipe.load import ROOT
from stages.evaluate.scores import HYBRID, ORIGINAL, Scores, SuiteScores
from stages.report.results import Results, load_results

RECIPE = "recipes/quickstart.yaml"
SEEDS = [42, 43, 44]
MIN_RECOVERY, LARGEST_CACHE, LARGEST_LOSS = 0.8, 0.25, 0.1
FIRST = 16
STAGES = (
    "prepare", "search", "materialize", "train", "original", "evaluate"
)  # fmt: skip


def run_recipe(folder: Path, seed: int) -> Results:
    """The recipe's results with a seed."""
    root = folder / f"seed-{seed}"
    command = ["launch/torchrun.sh", RECIPE, f"seed={seed}", f"runtime.output_root={root}"]
    subprocess.run(command, cwd=ROOT, check=True)
    output = root / "quickstart"
    return load_results({stage: (output / stage).resolve() for stage in STAGES})


def faults(results: Results) -> list[str]:
    """The claims that the results do not show."""
    scores, final = results.scores, final_model(results)
    original, trained = _needle(scores, ORIGINAL), _needle(scores, final)
    untrained = _needle(scores, HYBRID)
    lost = original.average - untrained.average
    sentences = []
    against = untrained.against_original
    recovered = trained.average - untrained.average
    if against.difference_high < 0 and recovered < MIN_RECOVERY * lost:
        sentences.append(f"training brings back less than {MIN_RECOVERY:.0%}")
    worst = worst_loss(results, final_model(results))
    if worst >= worst_loss(results, HYBRID):
        sentences.append("training does not make the loss in text smaller")
    if worst > LARGEST_LOSS:
        sentences.append(f"the trained hybrid's loss is more than {LARGEST_LOSS:g} nats higher")
    if results.cache.dynamic(2048) > LARGEST_CACHE * results.cache.original(2048):
        sentences.append(f"the cache at 2,048 tokens is more than {LARGEST_CACHE:g}")
    return sentences


def final_model(results: Results) -> str:
    """The checkpoint with the most training."""
    return results.scores.last_trained or HYBRID


def worst_loss(results: Results, model: str) -> float:
    """The largest difference of loss by position from the original's, from token FIRST on."""
    table = results.scores.positions[model]
    bins = zip(table.edges[:-1], table.difference, strict=True)
    return max(one.mean for first, one in bins if first >= FIRST)


def _needle(scores: Scores, name: str) -> SuiteScores:
    return scores.checkpoints[name]["needle"]


def row(seed: int, results: Results) -> str:
    """The scores of a seed as a row of the table."""
    cells = [f"{name} {_needle(results.scores, name).average:.1f}" for name in results.models]
    losses = (worst_loss(results, name) for name in (HYBRID, final_model(results)))
    cells.append("{:+.3f} → {:+.3f} nats".format(*losses))
    seconds = sum(results.stage_seconds.values())
    return f"| {seed} | {' | '.join(cells)} | {seconds:.0f} s |"


def main(folder: Path, seeds: list[int]) -> int:
    """Print the table; the exit status is 1 if a seed does not show every claim."""
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
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("seeds", type=int, nargs="*", default=SEEDS)
    options = parser.parse_args()
    sys.exit(main(options.folder, options.seeds))
