"""Methods on a real model, judged after the same training (BOSCH 3.3, on any recipe's model).

    launch/torchrun.sh recipes/smollm2_135m.yaml prepare.train_tokens=256k \\
        prepare.sequence_length=1k --until prepare
    python -m studies.real_model recipes/smollm2_135m.yaml prepare.calibration.length=512 \\
        --ratios 0.75 --seeds 8 --data runs/smollm2_135m/prepare/train --rows rows.jsonl

Each row of the file is one method at one ratio and seed: its mask, the passes that found it, and
what the hybrid is worth before and after a few steps towards the original's predictions. A seed
gives the calibration examples and the order of the training sequences, the same for all methods.
The last sequences are held out: the KL divergence to the original and the loss above its own, over
their second halves, and the share of needle questions answered as the original does, of the tasks
that the calibration has and of `--unseen` ones. Rows that the file has are not measured again.

Prints tables in Markdown: means over seeds, differences to the first method with the interval of
`bosch.analysis.intervals.student`, and Jaccard distances between the sets of sliding heads (BOSCH
4.2).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import load_from_disk
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from bosch.masks import HeadMask
from bosch.model.search_mode import apply_head_mask
from bosch.score.evaluation_log import EvaluationLog
from studies.selectors import mean_distance
from studies.studied_model import StudiedModel, command, mean_difference, options, table

RATE = 3e-4
HELD_OUT_SEQUENCES = 4
_FROM = 256  # first token whose prediction is trained: earlier ones see every key of the original
_CHUNK = 448  # rows of logits at a time
COLUMNS = ("score", "unseen", "kl", "loss")


class TrainedModel(StudiedModel):
    """A recipe's model whose hybrids are trained and measured on packed sequences."""

    def __init__(
        self, recipe: str, changes: Sequence[str], held_out: int, data: Path, unseen: str
    ) -> None:
        super().__init__(recipe, changes, held_out)
        self.unseen = self.questions("evaluation", held_out, 0, [unseen])
        rows = load_from_disk(str(data))
        self.sequences = [torch.tensor(row["input_ids"]) for row in rows]
        self._weights = {name: w.clone() for name, w in self.model.state_dict().items()}
        self._head = self.model.get_output_embeddings().weight.detach().clone()
        self._teachers: dict[int, Tensor] = {}
        self._seed, self._log = 0, EvaluationLog(None, self.calibration.context)
        self._untrained: dict[HeadMask, dict[str, float]] = {}

    def restore(self) -> None:
        """Give the model its own weights again, with every head full."""
        self.model.load_state_dict(self._weights)
        apply_head_mask(self.model, HeadMask.all_full(*self.shape))

    def _states(self, number: int) -> Tensor:
        """States before the output head of a sequence's trained tokens: [T - 256, C]."""
        ids = self.sequences[number][None].to(self.model.device)
        return self.model.get_decoder()(input_ids=ids, use_cache=False).last_hidden_state[0, _FROM:]

    @torch.no_grad()
    def remember(self, numbers: Sequence[int]) -> None:
        """Keep the original's states on these sequences; the model must have its own weights."""
        for number in numbers:
            if number not in self._teachers:
                self._teachers[number] = self._states(number).clone()

    def _divergence(self, number: int, states: Tensor, begin: int = 0) -> Tensor:
        """KL of the original's predictions from those of `states`, in nats a token."""

        def part(student: Tensor, teacher: Tensor) -> Tensor:
            own = functional.log_softmax(self.model.get_output_embeddings()(student), -1)
            target = functional.log_softmax(teacher @ self._head.T, -1)
            return (target.exp() * (target - own)).sum()

        teacher = self._teachers[number]
        total = states.new_zeros(())
        for first in range(begin, len(states), _CHUNK):
            rows = slice(first, first + _CHUNK)
            total = total + checkpoint(part, states[rows], teacher[rows], use_reentrant=False)
        return total / (len(states) - begin)

    @torch.no_grad()
    def worth(self, mask: HeadMask) -> dict[str, float]:
        """`COLUMNS` of the hybrid with the model's present weights."""
        self.model.eval()
        apply_head_mask(self.model, mask)
        divergence, loss = [], []
        for number in range(-HELD_OUT_SEQUENCES, 0):
            states, ids = self._states(number), self.sequences[number].to(self.model.device)
            half = len(ids) // 2
            begin, targets = half - _FROM, ids[half + 1 :]
            divergence.append(self._divergence(number, states, begin).item())
            own = self.model.get_output_embeddings()(states[begin:-1])
            original = self._teachers[number][begin:-1] @ self._head.T
            losses = (functional.cross_entropy(x, targets) for x in (own, original))
            loss.append(next(losses).item() - next(losses).item())
        scores = (self.held_out.evaluate(mask).score, self.unseen.evaluate(mask).score)
        values = (*scores, float(np.mean(divergence)), float(np.mean(loss)))
        return dict(zip(COLUMNS, values, strict=True))

    def train(self, mask: HeadMask, batches: Sequence[Sequence[int]]) -> list[float]:
        """A step of AdamW on each batch of sequences; returns the KL of each."""
        apply_head_mask(self.model, mask)
        self.model.train().requires_grad_(True)
        optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.1
        )
        trace = []
        for step, batch in enumerate(batches):
            for group in optimizer.param_groups:
                group["lr"] = RATE * min(1.0, (step + 1) / 2)
            total = 0.0
            for number in batch:
                loss = self._divergence(number, self._states(number)) / len(batch)
                loss.backward()
                total += loss.item()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            trace.append(total)
        self.model.eval().requires_grad_(False)
        return trace

    def row(
        self, method: str, ratio: float, seed: int, budget: int, batches: Sequence[Sequence[int]]
    ) -> dict[str, Any]:
        """One row of the file."""
        self.restore()
        if seed != self._seed:  # the masks of all methods of a seed are measured once
            self.calibrate(seed)
            self._seed, self._log = seed, EvaluationLog(None, self.calibration.context)
        self.remember([*range(-HELD_OUT_SEQUENCES, 0), *(n for batch in batches for n in batch)])
        run = self.search(method, ratio, seed, self._log, budget_per_layer=budget)
        if run.mask not in self._untrained:  # the held-out questions and text have no seed
            self._untrained[run.mask] = self.worth(run.mask)
        trace = self.train(run.mask, batches)
        return {
            "method": method, "ratio": ratio, "seed": seed, "windows": run.mask.windows,
            "passes": run.costs["full_forward_equivalents"],
            "untrained": self._untrained[run.mask], "steps": trace, "trained": self.worth(run.mask),
        }  # fmt: skip


def batches_of(sequences: int, seed: int, steps: int, size: int) -> list[list[int]]:
    """The batches of a seed: sequences that are not held out, none of them twice."""
    order = np.random.default_rng(seed).permutation(sequences - HELD_OUT_SEQUENCES)
    return order[: steps * size].reshape(steps, size).tolist()


def tables(rows: Sequence[Mapping[str, Any]], methods: Sequence[str]) -> str:
    """For each ratio the means of each method, and paired differences to the first one."""
    pages = []
    header = ["method", "seeds", "passes", *COLUMNS, *(f"{column} after" for column in COLUMNS)]
    for ratio in sorted({row["ratio"] for row in rows}):
        by_method: dict[str, dict[int, Mapping[str, Any]]] = {name: {} for name in methods}
        for row in rows:
            if row["ratio"] == ratio and row["method"] in by_method:
                by_method[row["method"]][row["seed"]] = row
        by_method = {name: by_seed for name, by_seed in by_method.items() if by_seed}
        means, differences = [], []
        first = next(iter(by_method.values()))
        for name, by_seed in by_method.items():
            worths = [[row[when] for row in by_seed.values()] for when in ("untrained", "trained")]
            passes = float(np.mean([row["passes"] for row in by_seed.values()]))
            values = [_mean(w[c] for w in worth) for worth in worths for c in COLUMNS]
            means.append([name, len(by_seed), passes, *values])
            pairs = [(by_seed[s]["trained"], first[s]["trained"]) for s in by_seed if s in first]
            if by_seed is not first and pairs:
                above = (
                    [own[c] - other[c] for own, other in pairs if None not in (own[c], other[c])]
                    for c in COLUMNS
                )
                differences.append([name, len(pairs), *map(mean_difference, above)])
        pages.append(f"## ρ = {ratio:g}\n\n{table(header, means)}")
        if differences:
            pages.append(
                f"After training, less {next(iter(by_method))}:\n\n"
                + table(["method", "seeds", *COLUMNS], differences)
            )
        masks = {
            name: [HeadMask(row["windows"]) for row in by_seed.values()]
            for name, by_seed in by_method.items()
        }
        distances = [
            [name, *(mean_distance(own, other) for other in masks.values())]
            for name, own in masks.items()
        ]
        pages.append(
            "Distances of the masks, of one method those between seeds:\n\n"
            + table(["", *masks], distances)
        )
    return "\n".join(pages)


def _mean(values: Iterable[float | None]) -> float:
    """The mean of the values that were measured; NaN if none was."""
    measured = [value for value in values if value is not None]
    return float(np.mean(measured)) if measured else float("nan")


def main() -> None:
    parser = options(__doc__, "0.75")
    parser.set_defaults(budget=8, seeds=8, held_out=16, methods=("razor", "bosch_plus", "intr"))
    parser.add_argument("--data", type=Path, required=True, help="packed sequences (prepare/train)")
    parser.add_argument("--rows", type=Path, required=True, help="the file of rows, added to")
    parser.add_argument("--unseen", default="niah_single_1", help="a task of no calibration")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--batch", type=int, default=2, help="sequences of a step")
    chosen = parser.parse_args()
    rows = (
        [json.loads(line) for line in chosen.rows.read_text().splitlines()]
        if chosen.rows.exists()
        else []
    )
    known = {(row["method"], row["ratio"], row["seed"]) for row in rows}
    wanted = [
        key for seed in range(chosen.seeds) for ratio in chosen.ratios for method in chosen.methods
        if (key := (method, ratio, seed)) not in known
    ]  # fmt: skip
    model = None
    for method, ratio, seed in wanted:
        model = model or TrainedModel(
            chosen.recipe, chosen.changes, chosen.held_out, chosen.data, chosen.unseen
        )
        batches = batches_of(len(model.sequences), seed, chosen.steps, chosen.batch)
        rows.append(model.row(method, ratio, seed, chosen.budget, batches))
        with chosen.rows.open("a") as file:
            file.write(json.dumps(rows[-1]) + "\n")
    print(f"# Hybrids before and after training\n\n{command('studies.real_model')}")
    print(tables(rows, chosen.methods))


if __name__ == "__main__":
    main()
