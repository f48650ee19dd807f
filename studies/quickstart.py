"""Claims about the quickstart, asserted over three seeds.

    python -m studies.quickstart FOLDER [SEED ...]

Runs the recipe as it is with each seed (finished stages in FOLDER are used), prints a row per seed
and fails unless in each of them the rule loses at least 10 points, the search's hybrid is ahead of
the rule's by more than the 95 % interval of their paired difference, before training and after the
same tokens, training brings back at least 80 % of what it loses by more than its interval and makes
its loss in text smaller, which then is from token 16 on at no position more than 0.1 nats above the
original's (fewer tokens of a document say little), and the cache is a quarter at most.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

from pipeline.recipe.load import ROOT
from stages.evaluate.scores import HYBRID, ORIGINAL, SuiteScores
from stages.report.decision import gain
from stages.report.results import Model, Results, load_results

RECIPE, RULE = "recipes/quickstart.yaml", "intr"
SEEDS = [42, 43, 44]
MIN_LOSS, MIN_RECOVERY, LARGEST_CACHE, LARGEST_LOSS = 10.0, 0.8, 0.25, 0.1
FIRST = 16


def run_recipe(folder: Path, seed: int) -> Results:
    """The recipe's results with a seed."""
    root = folder / f"seed-{seed}"
    command = ["launch/torchrun.sh", RECIPE, f"seed={seed}", f"runtime.output_root={root}"]
    subprocess.run(command, cwd=ROOT, check=True)
    report = json.loads((root / "quickstart" / "report" / "manifest.json").read_text())
    return load_results(
        {
            name: root / "store" / name.partition("@")[0] / key
            for name, key in report["upstream"].items()
        }
    )


def faults(results: Results) -> list[str]:
    """The claims that the results do not show."""
    untrained, final = Model(HYBRID), final_model(results)
    original = _needle(results, Model(ORIGINAL)).average
    score = _needle(results, untrained)
    sentences = []
    if original - _needle(results, Model(HYBRID, RULE)).average < MIN_LOSS:
        sentences.append(f"{RULE} loses less than {MIN_LOSS:g} points")
    for model in (untrained, final):
        found = gain(results, model._replace(branch=RULE))
        if found is None or found[1].difference_low <= 0:
            sentences.append(f"the search is not ahead of {RULE} by more than the interval")
    recovered = _needle(results, final).average - score.average
    against, lost = score.against_original, original - score.average
    if against is not None and against.difference_high < 0 and recovered < MIN_RECOVERY * lost:
        sentences.append(f"training brings back less than {MIN_RECOVERY:.0%}")
    worst = worst_loss(results, final)
    if worst >= worst_loss(results, untrained):
        sentences.append("training does not make the loss in text smaller")
    if worst > LARGEST_LOSS:
        sentences.append(f"the trained hybrid's loss is more than {LARGEST_LOSS:g} nats higher")
    if results.main.caches(2048).share > LARGEST_CACHE:
        sentences.append(f"the cache at 2,048 tokens is more than {LARGEST_CACHE:g}")
    return sentences


def final_model(results: Results) -> Model:
    """The recipe's checkpoint with the most training."""
    return max((one for one in results.models if not one.branch), key=lambda one: one.tokens)


def worst_loss(results: Results, model: Model) -> float:
    """The largest difference of loss by position from the original's, from token FIRST on."""
    table = results.positions(model)
    assert table is not None and table.difference is not None
    bins = zip(table.edges[:-1], table.difference, strict=True)
    return max(one.mean for first, one in bins if first >= FIRST)


def _needle(results: Results, model: Model) -> SuiteScores:
    return results.tables(model)["ruler"]


def row(seed: int, results: Results) -> str:
    """The scores of a seed as a row of the table."""
    cells = [f"{one.label} {_needle(results, one).average:.1f}" for one in results.models]
    losses = (worst_loss(results, one) for one in (Model(HYBRID), final_model(results)))
    cells.append("{:+.3f} → {:+.3f} nats".format(*losses))
    seconds = sum(manifest.seconds for manifest in results.manifests.values())
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
