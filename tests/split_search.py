"""Measures head masks with sequences split over the ranks and in one process; prints its name.

python -m tests.split_search FAMILY …
"""

from __future__ import annotations

import os
import sys
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from bosch.budget import LayerHeads
from bosch.context_split import ContextSplit
from bosch.heads import HeadMask
from bosch.model.context_parallel import ContextParallel
from bosch.model.families import decoder_layers
from bosch.model.search_mode import mask_shape, prepare_for_search
from bosch.objective.calibration import CalibrationSet
from bosch.objective.objective import Objective
from bosch.ranks import Ranks
from bosch.window import Window
from tests.hybrid_case import small_model, tokens

MENU = (Window(9, 2), Window(5, 2))
LENGTHS = (40, 33, 37, 21, 45)


def masks(layers: int, heads: int) -> list[tuple[HeadMask, int]]:
    """Masks of this menu, each with the layers that the next ones share."""
    generator = np.random.default_rng(0)
    choices, tops = generator.integers(0, 3, (layers, heads)), generator.integers(0, 3, (4, heads))
    drawn = [(HeadMask.all_full(layers, heads), 0)]
    for top in tops:
        choices[-1] = top
        drawn.append((HeadMask.of_choices(choices), layers - 1))
    return drawn


def compare(family: str, split: ContextParallel) -> None:
    """Scores, log-likelihoods and gradients, with and without reuse of earlier passes."""
    model: Any = small_model(family)
    prepare_for_search(model)
    data = CalibrationSet.from_records((tokens(1, n, seed=n)[0].tolist(), 2) for n in LENGTHS)
    ranks = Ranks(shard=split.communicator.rank, shards=split.ranks)
    alone = Objective(model, data, MENU, batch_size=2, reuse_bytes=0)
    for reuse in (0, 1 << 26):
        shared = Objective(
            model, data, MENU, batch_size=2, ranks=ranks, split=split, reuse_bytes=reuse
        )
        for mask, layers in masks(*alone.shape):
            ours, theirs = shared.evaluate(mask, layers), alone.evaluate(mask)
            assert ours.score == theirs.score, family
            assert abs(ours.log_likelihood - theirs.log_likelihood) < 1e-6, family
        assert shared.savings()["layer_inputs"] == (shared.cache.peak_bytes > 0) == (reuse > 0)
        mask = masks(*alone.shape)[1][0]
        for ours, theirs in (
            (shared.gate_gradient(mask), alone.gate_gradient(mask)),
            (shared.window_gradient(mask), alone.window_gradient(mask)),
        ):
            np.testing.assert_allclose(ours.values, theirs.values, atol=1e-6, rtol=1e-5)


def count_bytes(split: ContextParallel) -> None:
    """Of a pass and of a gradient, against the formula, all ranks together."""
    model: Any = small_model("qwen3")
    prepare_for_search(model)
    length = 48
    data = CalibrationSet.from_records([(tokens(1, length)[0].tolist(), 1)])
    ranks = Ranks(shard=split.communicator.rank, shards=split.ranks)
    objective = Objective(model, data, MENU, ranks=ranks, split=split, reuse_bytes=0)
    layers, heads = mask_shape(model.config)
    mask = masks(layers, heads)[1][0]
    kinds, per_head = ContextSplit(length, split.ranks), 2 * decoder_layers(model.config).head_dim
    objective.evaluate(mask)

    def sent(rows: list[LayerHeads]) -> int:
        return (
            4
            * per_head
            * sum(count * kinds.traffic(window) for row in rows for window, count in row.items())
        )

    every = [dict.fromkeys((None, *MENU), heads)] * layers
    # Activations are computed again; what the first layer is sent has no gradient.
    for run, expected in (
        (lambda: objective.evaluate(mask), sent(mask.heads_per_layer(MENU))),
        (lambda: objective.gate_gradient(mask), 2 * sent(every) + sent(every[1:])),
    ):
        split.communicator.sent_bytes = 0
        run()
        total = torch.tensor(split.communicator.sent_bytes)
        dist.all_reduce(total)
        # Beside them the states at the answer, or the gradients of the gates.
        assert expected < total <= 1.05 * expected, (int(total), expected)


def main() -> None:
    """Every family that is named."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    split = ContextParallel(dist.group.WORLD)
    for family in sys.argv[1:]:
        compare(family, split)
    count_bytes(split)
    print(f"rank {os.environ['RANK']} agrees")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
