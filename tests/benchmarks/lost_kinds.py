"""What brings a lost kind of question back without training: the heads that it was made with.

python -m tests.benchmarks.lost_kinds

Of composition_8x8 under the mask of `bosch_plus`, rho = 0.875, as `distillation_study` trains it:
scores of questions of one, two and three look-ups, with the mask and with heads full beside its
own. The model's third look-ups were initialised in heads 0 and 1 of layers 5 and 6.
"""

from __future__ import annotations

import torch

from bosch.heads import HeadMask
from bosch.model.search_mode import apply_head_mask
from recipes.study.make_composition_model import KINDS, exact_match, examples
from tests.benchmarks.distillation_study import QUESTIONS, WINDOW, searched

MORE_FULL = {
    "none": [],
    "one of the third look-up": [(5, 0)],
    "both of layer 5": [(5, 0), (5, 1)],
    "all four": [(5, 0), (5, 1), (6, 0), (6, 1)],
    "two that copy": [(5, 2), (5, 3)],
}


def main() -> None:
    torch.set_num_threads(1)
    model, mask = searched("composition_8x8", "bosch_plus")
    print(f"full heads by layer: {mask.is_full.sum(1).tolist()}")
    for name, heads in MORE_FULL.items():
        is_full = mask.is_full.copy()
        for layer, head in heads:
            is_full[layer, head] = True
        apply_head_mask(model, HeadMask(is_full), WINDOW)
        scores = [exact_match(model, examples()[-QUESTIONS:], kind) for kind in range(KINDS)]
        print(f"{name:<28} {'  '.join(f'{score:.2f}' for score in scores)}", flush=True)


if __name__ == "__main__":
    main()
