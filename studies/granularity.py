"""What larger units of choice cost in score, and what they save in vLLM.

    python -m studies.granularity recipes/study/composition_8x8.yaml --ratios 0.5,0.75,0.875 \\
        --held-out 64 --examples recipes/study/composition_8x8/calibration.jsonl

With `search.head_granularity` g a search chooses g heads of a layer together, and vLLM needs fewer
modules and cache groups for the mask. For each ratio and granularity, down to whole layers, prints
in Markdown: score and log-likelihood on the calibration examples and on questions held out, modules
and groups, and the bytes of a request in vLLM relative to single heads. A seed gives the
calibration examples. Ends are those of `bosch.analysis.intervals.student`, over seeds, of the
difference to single heads.
"""

from __future__ import annotations

from statistics import mean

from bosch.engines.vllm.plan import gpu_plan
from bosch.masks import HeadMask
from studies.studied_model import StudiedModel, command, mean_difference, options, table

TOKENS = 32 * 1024


def served(mask: HeadMask) -> tuple[int, int, int]:
    """Modules, groups, and KV slots that vLLM reserves for a request of `TOKENS`."""
    rows = [{w or None: row.count(w) for w in set(row)} for row in mask.windows]
    plan, request = gpu_plan(rows, None, TOKENS)
    pool = plan.pool(request)
    return plan.kinds.total(), pool.groups, pool.reserved


def main() -> None:
    parser = options(__doc__, "0.75")
    parser.set_defaults(methods=("bosch_plus",), seeds=8)
    chosen = parser.parse_args()
    print(f"# Units of choice\n\n{command('studies.granularity')}")
    found: dict[tuple[str, float, int], list[tuple[float, ...]]] = {}
    model = StudiedModel(chosen.recipe, chosen.changes, chosen.held_out, chosen.examples)
    heads = model.shape[1]
    sizes = [size for size in range(1, heads + 1) if heads % size == 0]
    for seed in range(chosen.seeds):
        model.calibrate(seed)
        for method in chosen.methods:
            for ratio in chosen.ratios:
                for size in sizes:
                    run = model.search(
                        method, ratio, seed,
                        budget_per_layer=chosen.budget, head_granularity=size,
                    )  # fmt: skip
                    evaluation = run.result.evaluation
                    row = (
                        *evaluation.rank, *model.held_out_score(run.mask), *served(run.mask),
                    )  # fmt: skip
                    found.setdefault((method, ratio, size), []).append(row)
    header = [
        "method", "ρ", "heads of a unit", "score", "log-likelihood", "held out",
        "held-out log-likelihood", "less single heads'", "modules", "groups", "bytes",
    ]  # fmt: skip
    rows: list[list[object]] = []
    for (method, ratio, size), runs in found.items():
        single = found[method, ratio, 1]
        above = [own[3] - other[3] for own, other in zip(runs, single, strict=True)]
        means = [mean(column) for column in zip(*runs, strict=True)]
        share = mean(own[6] / other[6] for own, other in zip(runs, single, strict=True))
        units = "a layer" if size == heads else str(size)
        counts = map(round, means[4:6])
        rows.append([method, ratio, units, *means[:4], mean_difference(above), *counts, share])
    print(table(header, rows))


if __name__ == "__main__":
    main()
