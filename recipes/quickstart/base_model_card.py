"""Write the model card of the quickstart's base model from what was measured and logged.

    python -m recipes.quickstart.base_model_card recipes/quickstart/base_model

`recipes.quickstart.measure_base_model` leaves measures.json and calls this; by itself it writes the
card again without measuring. Every sentence with a number in it is made from the files.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from recipes.quickstart.make_base_model import PHASES, learning_rate

TITLE = """\
---
license: apache-2.0
library_name: transformers
pipeline_tag: text-generation
---

# Quickstart base model
"""


@dataclass(frozen=True)
class Measures:
    """Everything measured; rates are shares of exact matches.

    `full`, `sliding` and `by_task` are on `samples` questions of up to `context` tokens, the other
    rates on `search_samples` questions of `search_length` tokens.
    """

    window: int
    context: int
    samples: int
    search_length: int
    search_samples: int
    full: float
    sliding: float
    by_task: dict[str, float]
    search_full: float
    search_sliding: float
    single_head: list[list[float]]
    whole_layer: list[float]
    only_layer: list[float]
    random_masks: list[float]
    text_loss: float
    text_bits_per_byte: float
    unigram_loss: float

    @property
    def retrieving_layers(self) -> list[int]:
        """Layers that by themselves get at least half of the way from all sliding to all full."""
        enough = (self.search_full + self.search_sliding) / 2
        return [layer for layer, score in enumerate(self.only_layer) if score >= enough]


def model_card(folder: Path, measures: Measures) -> str:
    """The model card: what the model is, how it was made, what was measured."""
    config = json.loads((folder / "config.json").read_text())
    training = json.loads((folder / "training.json").read_text())
    log = read_log(folder)
    parts = [
        TITLE + _what_it_is(config, measures),
        "## How it was made\n\n" + _how_it_was_made(training, log),
        "## Exact match on needle questions\n\n" + _exact_match(measures),
        "## Cost of making one KV head sliding\n\n" + _single_heads(measures),
        "## Where retrieval is\n\n" + _layers(measures),
        f"## {len(measures.random_masks)} random masks, half of the KV heads sliding\n\n"
        + _random_masks(measures),
        "## Held-out standard-library text\n\n" + _text(measures),
    ]
    return "\n".join(parts)


def read_log(folder: Path) -> list[dict[str, Any]]:
    """The training log's lines."""
    return [json.loads(line) for line in (folder / "training_log.jsonl").open()]


def _what_it_is(config: dict[str, Any], measures: Measures) -> str:
    return f"""
A Qwen3 of {config["num_hidden_layers"]} layers ({config["hidden_size"]} wide,
{config["num_attention_heads"]} query and {config["num_key_value_heads"]} KV heads of
{config["head_dim"]}, tied embeddings, {config["vocab_size"]} byte-level BPE tokens with single
digits, context {measures.context:,}), trained from nothing to read Python's standard library and to
find needles in it. It is the smallest model on which the whole pipeline means something; it is of
no other use.
"""


def _how_it_was_made(training: dict[str, Any], log: Sequence[dict[str, Any]]) -> str:
    planned = sum(phase.steps for phase in PHASES)
    others = sum(
        line["step"] >= planned or abs(line["rate"] - learning_rate(int(line["step"]))) > 1e-5
        for line in log
    )
    schedule = (
        "The log's learning rates are those of the script."
        if not others
        else f"{others} of {len(log)} learning rates in the log are others than the script's: "
        "the schedule was changed while it ran, and the log tells what happened."
    )
    columns = [name for name, value in training["phases"][0].items() if not isinstance(value, list)]
    phases = [[_setting(name, phase[name]) for name in columns] for phase in training["phases"]]
    return f"""\
    python -m recipes.quickstart.make_base_model --output recipes/quickstart/base_model
    python -m recipes.quickstart.measure_base_model recipes/quickstart/base_model

Seed {training["seed"]}, {training["steps"]:,} steps, {training["cpu_minutes"]:.0f} CPU minutes
(torch {training["torch"]}, Python {training["python"]}); every tenth step is in
`training_log.jsonl`. {schedule}
Text: source files of the standard library and pydoc's topics, one document in fifty held out.
Retrieval: the synthetic documents of `data_prep/retrieval.py`. The phases, as `Phase` in
`make_base_model.py` explains them:

{_table([name.replace("_", " ") for name in columns], phases)}
![Losses over training steps](training_curve.png)
"""


def _setting(name: str, value: float) -> str:
    """A number of a phase: a count, a learning rate, or a share."""
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:g}" if name == "rate" else f"{value:.0%}"


def _exact_match(measures: Measures) -> str:
    attention = [
        ["full", f"**{measures.full:.3f}**"],
        [f"all sliding, W = {measures.window}", f"**{measures.sliding:.3f}**"],
    ]
    tasks = [[task, f"{score:.3f}"] for task, score in measures.by_task.items()]
    return f"""\
{measures.samples} fresh questions of up to {measures.context:,} tokens, every answer token the
model's first choice:

{_table(["attention", "exact match"], attention)}
{_table(["task, full attention", "exact match"], tasks)}"""


def _single_heads(measures: Measures) -> str:
    drops = (measures.search_full - np.array(measures.single_head)) * 100
    heads = [f"head {head}" for head in range(drops.shape[1])]
    rows = [[str(layer), *(f"{drop:.0f}" for drop in row)] for layer, row in enumerate(drops)]
    return f"""\
Points of exact match lost on {measures.search_samples} questions of {measures.search_length} tokens
(full attention: {measures.search_full:.3f}); the dearest head costs {drops.max():.0f} points.

{_table(["layer", *heads], rows)}"""


def _layers(measures: Measures) -> str:
    layers = range(len(measures.only_layer))
    rows = [
        ["this layer sliding", *(f"{score:.2f}" for score in measures.whole_layer)],
        ["only this layer full", *(f"{score:.2f}" for score in measures.only_layer)],
    ]
    found = measures.retrieving_layers
    named = f" ({', '.join(map(str, found))})" if found else ""
    lost = [(measures.search_full - score) * 100 for score in measures.whole_layer]
    return f"""\
Exact match on the same questions when one whole layer slides, and when all others do. {len(found)}
of {len(layers)} layers{named} can retrieve: with every other layer sliding, each of them gets at
least half of the way from all sliding ({measures.search_sliding:.2f}) to all full
({measures.search_full:.2f}). The dearest layer, {int(np.argmax(lost))}, costs
{max(lost):.0f} points.

{_table(["", *(f"layer {layer}" for layer in layers)], rows)}"""


def _random_masks(measures: Measures) -> str:
    quantiles = np.percentile(measures.random_masks, [0, 10, 25, 50, 75, 90, 100])
    header = ["", "least", "10 %", "25 %", "median", "75 %", "90 %", "most", "standard deviation"]
    values = [*quantiles, np.std(measures.random_masks)]
    return _table(header, [["exact match", *(f"{value:.2f}" for value in values)]])


def _text(measures: Measures) -> str:
    bits = f"({measures.text_bits_per_byte:.2f} bits per byte)"
    rows = [
        ["this model", f"{measures.text_loss:.3f} {bits}"],
        ["token frequencies alone", f"{measures.unigram_loss:.3f}"],
    ]
    return _table(["", "nats per token"], rows)


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [f"| {' | '.join(line)} |\n".replace("|  |", "| |") for line in (header, *rows)]
    return "".join([lines[0], f"|{'---|' * len(header)}\n", *lines[1:]])


def draw_curve(folder: Path) -> None:
    """Losses over training steps, from the log, as `training_curve.png`."""
    lines = read_log(folder)
    figure = Figure(figsize=(7, 3.2), layout="constrained")
    axis = figure.subplots()
    labels = {"first": "first token of an answer", "rest": "rest of an answer", "text": "text"}
    for name, label in labels.items():
        axis.plot([x["step"] for x in lines], [x[name] for x in lines], label=label, linewidth=1)
    for before, after in itertools.pairwise(lines):
        if before["length"] != after["length"]:
            axis.axvline(after["step"], color="grey", linewidth=0.7, linestyle=":")
            label = f"{after['length']} tokens"
            axis.text(after["step"], 7.5, label, fontsize=7, va="top", ha="right", rotation=90)
    axis.set(xlabel="step", ylabel="loss (nats per token)", ylim=(0, 7.7))
    figure.legend(loc="outside upper center", ncols=3, frameon=False, fontsize=8)
    figure.savefig(folder / "training_curve.png", dpi=110)


def write_card(folder: Path) -> None:
    """README.md and training_curve.png, from measures.json, training.json and the log."""
    measures = Measures(**json.loads((folder / "measures.json").read_text()))
    draw_curve(folder)
    (folder / "README.md").write_text(model_card(folder, measures))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", type=Path)
    write_card(parser.parse_args().model)
