"""The paper's analyses of the chosen heads: overlap of methods, turnover, and the swap test.

    python -m studies.selectors recipes/quickstart.yaml --ratios 0.5,0.75,0.875

Prints a page in Markdown: Jaccard distances between the methods' sets of sliding heads at each
ratio (BOSCH 4.2, Figures 2 and 7), the turnover T of each method between adjacent ratios and T over
its maximum (4.3, Table 3), and the held-out score of the larger ratio's mask and of A', in which
random members made room for the heads that turned over (C.1, Table 5).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from bosch.masks import HeadMask
from studies.studied_model import StudiedModel, command, options, spread, table

DRAWS = 3  # of A', as in the paper


@dataclass(frozen=True)
class Turnover:
    """T and its maximum between the sliding sets of two ratios, as shares."""

    share: float
    maximum: float

    @property
    def normalised(self) -> float:
        """T over its maximum; 0 if the maximum is 0, because all heads slide."""
        return self.share / self.maximum if self.maximum else 0.0


def turnover(small: HeadMask, large: HeadMask) -> Turnover:
    """T = |A_s \\ A_l| / |A_s|; of A_s at most min(|A_s|, N - |A_l|) heads can be outside A_l.

    Between 0.75 and 0.875 the maximum is 1/6, as the paper's Table 3 implies.
    """
    a, b = _sliding(small), _sliding(large)
    count = int(a.sum())
    assert 0 < count <= b.sum(), "the first mask has the smaller ratio"
    return Turnover(int((a & ~b).sum()) / count, min(count, int((~b).sum())) / count)


def swapped(small: HeadMask, large: HeadMask, seed: int) -> HeadMask:
    """A'_l: random members of A_l make room for all of A_s \\ A_l."""
    a, b = _sliding(small), _sliding(large)
    entering, members = np.flatnonzero(a & ~b), np.flatnonzero(b)
    result = b.copy()
    result[np.random.default_rng(seed).choice(members, len(entering), replace=False)] = False
    result[entering] = True
    return HeadMask.of(~result.reshape(large.shape), large.menu[0])


def jaccard_distance(first: HeadMask, second: HeadMask) -> float:
    """1 - |A ∩ B| / |A ∪ B| of the sets of sliding heads; 0 if both are empty."""
    a, b = _sliding(first), _sliding(second)
    union = int((a | b).sum())
    return 1.0 - int((a & b).sum()) / union if union else 0.0


def mean_distance(first: Sequence[HeadMask], second: Sequence[HeadMask]) -> float:
    """The mean over all pairs of two methods' masks; of one method, over pairs of its seeds."""
    pairs = [
        (a, b) for i, a in enumerate(first) for j, b in enumerate(second)
        if first is not second or i < j
    ]  # fmt: skip
    return float(np.mean([jaccard_distance(a, b) for a, b in pairs])) if pairs else 0.0


def _sliding(mask: HeadMask) -> npt.NDArray[np.bool_]:
    return ~mask.is_full.reshape(-1)


def main() -> None:
    chosen = options(__doc__, "0.25,0.5,0.75,0.875").parse_args()
    model = StudiedModel(chosen.recipe, chosen.changes, chosen.held_out, chosen.examples)
    print(f"# Heads that the methods choose\n\n{command('studies.selectors')}")
    masks = {
        (method, ratio): [
            model.search(method, ratio, seed, budget_per_layer=chosen.budget).mask
            for seed in model.seeds_of(method, chosen.seeds)
        ]
        for ratio in chosen.ratios
        for method in chosen.methods
    }
    for ratio in chosen.ratios:
        print(f"## Jaccard distances at ρ = {ratio:g}\n")
        rows = [
            [a, *(mean_distance(masks[a, ratio], masks[b, ratio]) for b in chosen.methods)]
            for a in chosen.methods
        ]
        print(table(["method", *chosen.methods], rows), flush=True)
    rows = []
    for method in chosen.methods:
        for small, large in pairwise(chosen.ratios):
            pairs = list(zip(masks[method, small], masks[method, large], strict=True))
            found = [turnover(*pair) for pair in pairs]
            swaps = [swapped(*pair, seed=draw) for pair in pairs for draw in range(DRAWS)]
            rows.append([
                method, f"{small:g} → {large:g}",
                spread([one.share for one in found]), spread([one.normalised for one in found]),
                spread([model.held_out_score(large_mask)[0] for _, large_mask in pairs]),
                spread([model.held_out_score(mask)[0] for mask in swaps]),
            ])  # fmt: skip
    header = ("method", "ratios", "T", "T over its maximum", "held-out score", "score of A′")
    print("## Turnover and swap test\n\n" + table(header, rows))


if __name__ == "__main__":
    main()
