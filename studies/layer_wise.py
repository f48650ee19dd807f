"""Whether a hybrid recovers sooner if its attention is matched layer by layer first.

    launch/torchrun.sh recipes/quickstart.yaml --until materialize
    python -m studies.layer_wise recipes/quickstart.yaml runs/quickstart --rows rows.jsonl

A layer-wise step runs the original once, gives each layer with sliding heads the original's input,
and trains its attention towards the original's output there (RADLADS, arXiv 2505.03005; Attention
Editing, arXiv 2604.05688). All plans spend the same operations, in units of a pass over a sequence
forward: a step towards the original's predictions (logits) costs four, on the text alone three, a
layer-wise one what the original's layers and three times attention take. As in the stage `train`,
one optimizer and one schedule go through a plan: a cosine after two steps of warm-up, of which the
first is at a rate of 0.

Each row of the file is one plan and seed with its curve: operations spent, KL divergence to the
original and loss above its own, over the second halves of sequences that no plan trains on. Rows
that the file has are not made again. Prints means over seeds in Markdown: the share of operations
until 90 and 99 % of the lost loss are regained, and what is left at the end.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import load_from_disk
from torch import Tensor
from torch.nn import functional
from torch.optim import AdamW
from transformers import PreTrainedModel, get_cosine_schedule_with_warmup

from bosch.mask_files import HeadMaskFile
from bosch.masks import HeadMask
from bosch.model.interface import attention_modules
from bosch.model.loading import load_model
from bosch.model.search_mode import apply_head_mask, mask_shape, prepare_for_search
from pipeline.recipe.load import load_recipe
from studies.studied_model import command, table

# Plans: what is trained at last, and the share of operations that the layer-wise steps have before.
PLANS = {"logits": 0.0, "text": 0.0, "quarter layer-wise": 0.25}
HELD_OUT_SEQUENCES = 6
_WARM_STEPS = 2


class Comparison:
    """A recipe's model, the mask and the data of its run, and the original beside the hybrid."""

    def __init__(self, recipe: str, run: Path, rate: float, steps: int, every: int) -> None:
        self.model = load_recipe(recipe, []).recipe.model
        self.rate, self.steps, self.every = rate, steps, every
        self.mask = HeadMaskFile.load(run / "materialize" / "model" / "head_mask.json").mask
        rows = load_from_disk(str(run / "prepare" / "train"))
        sequences = [torch.tensor(row["input_ids"])[None] for row in rows]
        self.held_out = sequences[-HELD_OUT_SEQUENCES:]
        self.sequences = sequences[:-HELD_OUT_SEQUENCES]
        self.original = self._load().requires_grad_(False)
        apply_head_mask(self.original, HeadMask.all_full(*mask_shape(self.original.config)))
        self.targets = [self.predictions(self.original, ids) for ids in self.held_out]
        hybrid = self._load()
        apply_head_mask(hybrid, self.mask)
        self.untrained = self.worth(hybrid)
        attention = sum(p.numel() for m in attention_modules(self.original) for p in m.parameters())
        whole = sum(p.numel() for p in self.original.parameters())
        layers = sum(p.numel() for p in self.original.get_decoder().layers.parameters())
        self.costs = {"logits": 4.0, "text": 3.0, "layers": (layers + 3 * attention) / whole}

    def _load(self) -> PreTrainedModel:
        model = load_model(self.model.path, **self.model.loading)
        prepare_for_search(model, "auto")
        return model

    def kinds(self, plan: str) -> list[str]:
        """The kinds of the steps of a plan, of the operations of `steps` steps on logits."""
        last = "text" if plan == "text" else "logits"
        everything = self.steps * self.costs["logits"]
        first = int(PLANS[plan] * everything / self.costs["layers"])
        rest = int((everything - first * self.costs["layers"]) / self.costs[last])
        return ["layers"] * first + [last] * rest

    def curve(self, plan: str, seed: int) -> list[list[float]]:
        """Operations spent, KL and loss above the original's, at the start and as training goes."""
        hybrid = self._load()
        apply_head_mask(hybrid, self.mask)
        order = np.random.default_rng(seed).permutation(len(self.sequences))
        kinds, spent, points = self.kinds(plan), 0.0, [[0.0, *self.untrained]]
        optimizer = AdamW(hybrid.parameters(), self.rate, betas=(0.9, 0.95), weight_decay=0.1)
        schedule = get_cosine_schedule_with_warmup(optimizer, _WARM_STEPS, len(kinds))
        for number, kind in enumerate(kinds):
            self.loss(hybrid, kind, self.sequences[order[number % len(order)]]).backward()
            torch.nn.utils.clip_grad_norm_(hybrid.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            spent += self.costs[kind]
            if (number + 1) % self.every == 0 or number + 1 == len(kinds):
                points.append([spent, *self.worth(hybrid)])
        return points

    def loss(self, hybrid: PreTrainedModel, kind: str, ids: Tensor) -> Tensor:
        """The loss of a step on one sequence [1, T]."""
        if kind == "text":
            logits = hybrid(input_ids=ids, use_cache=False).logits
            return functional.cross_entropy(logits[0, :-1], ids[0, 1:])
        with torch.no_grad(), seen(self.original) as calls:
            target = self.original(input_ids=ids, use_cache=False).logits[0].log_softmax(-1)
        if kind == "logits":
            own = hybrid(input_ids=ids, use_cache=False).logits[0].log_softmax(-1)
            return (target.exp() * (target - own)).sum(-1).mean()
        losses = []
        for attention, row, (inputs, output) in zip(
            attention_modules(hybrid), self.mask.windows, calls, strict=True
        ):
            if any(row):
                own = attention(**inputs)[0]
                losses.append(((own - output) ** 2).sum() / (output**2).sum())
        return torch.stack(losses).sum()

    @staticmethod
    @torch.no_grad()
    def predictions(model: PreTrainedModel, ids: Tensor) -> Tensor:
        """Log-probabilities for the second half of a sequence [1, T]: [T / 2 - 1, vocabulary]."""
        logits = model(input_ids=ids, use_cache=False).logits
        return logits[0, ids.shape[1] // 2 : -1].log_softmax(-1)

    def worth(self, hybrid: PreTrainedModel) -> tuple[float, float]:
        """KL divergence to the original and loss above its own, in nats a token."""
        divergence, loss = [], []
        for ids, target in zip(self.held_out, self.targets, strict=True):
            own = self.predictions(hybrid, ids)
            divergence.append((target.exp() * (target - own)).sum(-1).mean().item())
            next_ids = ids[0, ids.shape[1] // 2 + 1 :, None]
            loss.append((target - own).gather(1, next_ids).mean().item())
        return float(np.mean(divergence)), float(np.mean(loss))


@contextmanager
def seen(model: PreTrainedModel) -> Iterator[list[tuple[dict[str, Any], Tensor]]]:
    """The arguments and the output of each attention module, in a pass of this block."""
    calls: list[tuple[dict[str, Any], Tensor]] = []
    hooks = [
        module.register_forward_hook(
            lambda module, args, kwargs, output: calls.append((kwargs, output[0])),
            with_kwargs=True,
        )
        for module in attention_modules(model)
    ]
    try:
        yield calls
    finally:
        for hook in hooks:
            hook.remove()


def until(curve: Sequence[Sequence[float]], share: float) -> float:
    """Share of a curve's operations until this share of the lost loss is regained; 1 if never."""
    least = (1 - share) * curve[0][2]
    return next((spent / curve[-1][0] for spent, _, loss in curve if loss <= least), 1.0)


def page(rows: Sequence[Mapping[str, Any]]) -> str:
    header = ["plan", "seeds", "until 90 %", "until 99 %", "KL", "loss", "loss, least", "most"]
    lines = []
    for plan in PLANS:
        curves = [row["curve"] for row in rows if row["plan"] == plan]
        if curves:
            ends = [curve[-1] for curve in curves]
            shares = [float(np.mean([until(curve, s) for curve in curves])) for s in (0.9, 0.99)]
            losses = [loss for _, _, loss in ends]
            kl = float(np.mean([kl for _, kl, _ in ends]))
            mean = float(np.mean(losses))
            lines.append([plan, len(curves), *shares, kl, mean, min(losses), max(losses)])
    return table(header, lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("recipe")
    parser.add_argument("run", type=Path, help="the folder of its run, with a hybrid")
    parser.add_argument("--rows", type=Path, required=True, help="the file of rows, added to")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rate", type=float, default=5e-4)
    parser.add_argument("--steps", type=int, default=32, help="sequences of the logits' plan")
    parser.add_argument("--every", type=int, default=4, help="steps between two measurements")
    chosen = parser.parse_args()
    lines = chosen.rows.read_text().splitlines() if chosen.rows.exists() else []
    rows = [json.loads(line) for line in lines]
    known = {(row["plan"], row["seed"]) for row in rows}
    comparison = None
    for seed in range(chosen.seeds):
        for plan in PLANS:
            if (plan, seed) in known:
                continue
            comparison = comparison or Comparison(
                chosen.recipe, chosen.run, chosen.rate, chosen.steps, chosen.every
            )
            rows.append({"plan": plan, "seed": seed, "curve": comparison.curve(plan, seed)})
            with chosen.rows.open("a") as file:
                file.write(json.dumps(rows[-1]) + "\n")
    print(f"# Attention matched layer by layer first\n\n{command('studies.layer_wise')}")
    print(page(rows))


if __name__ == "__main__":
    main()
