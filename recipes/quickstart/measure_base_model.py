"""Measure the quickstart's base model and write its model card.

    python -m recipes.quickstart.measure_base_model recipes/quickstart/base_model

Exact match on fresh needle questions with full and with all-sliding attention, the cost of making
each single KV head sliding, the spread over random masks, and the loss on held-out Python text. The
questions come from the evaluation seed space: neither training nor calibration holds their needles.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from transformers import AutoTokenizer

from bosch.calibration import CalibrationSet
from bosch.heads import HeadMask
from bosch.modeling import load_model, prepare_for_search
from bosch.objective import Objective
from bosch.progress import progress
from data_prep.essays import haystack_words
from data_prep.needles import forced_ids, make_sample
from recipes.quickstart.make_base_model import python_text

TASKS = ("niah_single_1", "niah_single_2", "niah_multikey_1", "niah_multikey_2")
WINDOW, SEED = 128, 2026
CONTEXT, SAMPLES = 2048, 200
SEARCH_LENGTH, SEARCH_SAMPLES, RANDOM_MASKS = 512, 24, 50
TEXT_LENGTH = 1024


@dataclass(frozen=True)
class Measures:
    """Everything the model card states; rates are shares of exact matches."""

    full: float
    sliding: float
    by_task: dict[str, float]
    search_full: float
    single_head: list[list[float]]
    whole_layer: list[float]
    only_layer: list[float]
    random_masks: list[float]
    text_loss: float
    text_bits_per_byte: float
    unigram_loss: float


def questions(tokenizer: Any, tasks: Sequence[str], length: int, count: int) -> CalibrationSet:
    """Teacher-forced needle questions of at most `length` tokens, tasks in turn."""
    words = haystack_words(None)
    records = []
    for index in range(count):
        sample = make_sample(
            tasks[index % len(tasks)],
            length,
            tokenizer,
            "evaluation",
            SEED,
            index,
            max_new_tokens=16,
            essay_words=words,
        )
        prompt, answer = forced_ids(sample, tokenizer)
        records.append((prompt + answer, len(answer)))
    return CalibrationSet.from_records(records)


def needle_measures(model: Any, tokenizer: Any) -> dict[str, Any]:
    """Scores of the full, the all-sliding, every one-head and random half-sliding masks."""
    config = model.config
    layers, heads = config.num_hidden_layers, config.num_key_value_heads
    prepare_for_search(model)
    all_full, all_sliding = HeadMask.all_full(layers, heads), HeadMask.all_sliding(layers, heads)
    per_task = SAMPLES // len(TASKS)
    sets = {task: questions(tokenizer, [task], CONTEXT, per_task) for task in TASKS}
    scores = {}
    for name, mask in (("full", all_full), ("sliding", all_sliding)):
        for task, examples in sets.items():
            objective = Objective(model, examples, WINDOW)
            scores[name, task] = objective.evaluate(mask).score
            print(f"{name} {task}: {scores[name, task]:.3f}", flush=True)
    objective = Objective(model, questions(tokenizer, TASKS, SEARCH_LENGTH, SEARCH_SAMPLES), WINDOW)
    single = [[0.0] * heads for _ in range(layers)]
    rng = np.random.default_rng(SEED)
    random_scores = []
    whole, only = [], []
    with progress(layers * (heads + 2) + RANDOM_MASKS, "masks", "masks") as bar:
        for layer in range(layers):
            for head in range(heads):
                row = np.arange(heads) != head
                single[layer][head] = objective.evaluate(all_full.with_layer(layer, row)).score
                bar.update()
            none, every = np.zeros(heads, dtype=bool), np.ones(heads, dtype=bool)
            whole.append(objective.evaluate(all_full.with_layer(layer, none)).score)
            only.append(objective.evaluate(all_sliding.with_layer(layer, every)).score)
            bar.update(2)
        for _ in range(RANDOM_MASKS):
            bits = rng.permutation(np.arange(layers * heads) % 2 == 0).reshape(layers, heads)
            random_scores.append(objective.evaluate(HeadMask(bits)).score)
            bar.update()
    return {
        "full": float(np.mean([scores["full", task] for task in TASKS])),
        "sliding": float(np.mean([scores["sliding", task] for task in TASKS])),
        "by_task": {task: scores["full", task] for task in TASKS},
        "search_full": objective.evaluate(all_full).score,
        "single_head": single,
        "whole_layer": whole,
        "only_layer": only,
        "random_masks": random_scores,
    }


@torch.inference_mode()
def text_measures(model: Any, tokenizer: Any) -> dict[str, float]:
    """Loss on documents that were kept out of training, beside that of token frequencies alone."""
    training, held_out = python_text()
    encode = tokenizer.backend_tokenizer.encode_batch
    counts = np.ones(model.config.vocab_size)
    for encoding in encode(training[:200]):
        counts += np.bincount(encoding.ids, minlength=len(counts))
    frequencies = torch.tensor(np.log(counts / counts.sum()))
    text = "".join(held_out)
    ids = torch.tensor([token for e in encode(held_out) for token in e.ids])
    rows = ids[: len(ids) // TEXT_LENGTH * TEXT_LENGTH].view(-1, TEXT_LENGTH)[:100]
    loss = 0.0
    for row in rows.split(4):
        logits = model(input_ids=row, use_cache=False).logits[:, :-1].float()
        loss += torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), row[:, 1:].flatten(), reduction="sum"
        ).item()
    loss /= rows[:, 1:].numel()
    bytes_per_token = len(text.encode()) / len(ids)
    return {
        "text_loss": loss,
        "text_bits_per_byte": float(loss / np.log(2) / bytes_per_token),
        "unigram_loss": -frequencies[rows[:, 1:]].mean().item(),
    }


def draw_curve(folder: Path) -> None:
    """Losses over training steps, from the log, as `training_curve.png`."""
    lines = [json.loads(line) for line in (folder / "training_log.jsonl").open()]
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


def model_card(folder: Path, measures: Measures) -> str:
    """The model card: what the model is, how it was made, what was measured."""
    training = json.loads((folder / "training.json").read_text())
    config = json.loads((folder / "config.json").read_text())
    drops = (measures.search_full - np.array(measures.single_head)) * 100
    quantiles = np.percentile(measures.random_masks, [0, 10, 25, 50, 75, 90, 100])
    rows = "\n".join(
        f"| {layer} | " + " | ".join(f"{drop:.0f}" for drop in row) + " |"
        for layer, row in enumerate(drops)
    )
    heads = range(config["num_key_value_heads"])
    phases = "\n".join(
        f"| {p['steps']} | {p['batch_tokens']:,} | {p['length']:,} | {p['text']:.0%} "
        f"| {p['drop']:.0%} | {p['layer_drop']:.0%} |"
        for p in training["phases"]
    )
    tasks = "\n".join(f"| {task} | {score:.3f} |" for task, score in measures.by_task.items())
    return f"""---
license: apache-2.0
library_name: transformers
pipeline_tag: text-generation
---

# Quickstart base model

A Qwen3 of {config["num_hidden_layers"]} layers ({config["hidden_size"]} wide,
{config["num_attention_heads"]} query and {config["num_key_value_heads"]} KV heads of
{config["head_dim"]}, tied embeddings, {config["vocab_size"]} byte-level BPE tokens with single
digits, context {CONTEXT:,}), trained from nothing to read Python's standard library and to find
needles in it. It is the smallest model on which the whole pipeline means something; it is of no
other use.

## How it was made

    python -m recipes.quickstart.make_base_model --output recipes/quickstart/base_model
    python -m recipes.quickstart.measure_base_model recipes/quickstart/base_model

Seed {training["seed"]}, {training["steps"]} steps, {training["cpu_minutes"]:.0f} CPU minutes
(two cores, torch {training["torch"]}, Python {training["python"]}); every tenth step is in
`training_log.jsonl`. The schedule was settled while it ran, between saves: where the log's rate is
another than the script's, the log tells what happened. Text: source files of the standard library
and pydoc's topics, one document in fifty held out. Retrieval: the synthetic documents of
`data_prep/retrieval.py`. Silenced KV heads spread retrieval over heads, though not over layers.

| steps | tokens a step | length | text | KV heads silenced | layers silenced |
|---|---|---|---|---|---|
{phases}

![Losses over training steps](training_curve.png)

## Exact match on needle questions

{SAMPLES} fresh questions of up to {CONTEXT:,} tokens, every answer token the model's first choice:

| attention | exact match |
|---|---|
| full | **{measures.full:.3f}** |
| all sliding, W = {WINDOW} | **{measures.sliding:.3f}** |

| task, full attention | exact match |
|---|---|
{tasks}

## Cost of making one KV head sliding

Points of exact match lost on {SEARCH_SAMPLES} questions of {SEARCH_LENGTH} tokens
(full attention: {measures.search_full:.3f}); the dearest head costs {drops.max():.0f} points.

| layer | {" | ".join(f"head {head}" for head in heads)} |
|---|{"---|" * len(heads)}
{rows}

## Where retrieval is

Exact match on the same questions when one whole layer slides, and when all others do:

| | {" | ".join(f"layer {layer}" for layer in range(len(drops)))} |
|---|{"---|" * len(drops)}
| this layer sliding | {" | ".join(f"{score:.2f}" for score in measures.whole_layer)} |
| only this layer full | {" | ".join(f"{score:.2f}" for score in measures.only_layer)} |

## {RANDOM_MASKS} random masks, half of the KV heads sliding

| | least | 10 % | 25 % | median | 75 % | 90 % | most | standard deviation |
|---|---|---|---|---|---|---|---|---|
| exact match | {" | ".join(f"{q:.2f}" for q in quantiles)} | {np.std(measures.random_masks):.2f} |

## Held-out standard-library text

| | nats per token |
|---|---|
| this model | {measures.text_loss:.3f} ({measures.text_bits_per_byte:.2f} bits per byte) |
| token frequencies alone | {measures.unigram_loss:.3f} |
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", type=Path)
    folder = parser.parse_args().model
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = load_model(folder, dtype="float32")
    text = text_measures(model, tokenizer)
    print(text, flush=True)
    measures = Measures(**needle_measures(model, tokenizer), **text)
    (folder / "measures.json").write_text(json.dumps(asdict(measures), indent=1) + "\n")
    draw_curve(folder)
    (folder / "README.md").write_text(model_card(folder, measures))


if __name__ == "__main__":
    main()
