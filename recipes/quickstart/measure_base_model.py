"""Measure the quickstart's base model; write measures.json, the source of its README's figures.

    python -m recipes.quickstart.measure_base_model recipes/quickstart/base_model

Measures right answers to needle questions with full attention, how many of them all-sliding
attention reproduces, the cost of making each KV head sliding, the spread over random masks, and the
loss on held-out Python text. The
questions come from the evaluation seed space, which shares no needle with training or calibration.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoTokenizer

from bosch.masks import HeadMask
from bosch.model.loading import load_model
from bosch.model.search_mode import prepare_for_search
from bosch.progress import progress
from bosch.score.calibration import CalibrationSet
from bosch.score.objective import Objective
from bosch.window import Window
from data_prep.documents.calibration import needle_prompts
from data_prep.text import haystack_words
from recipes.quickstart.training_rows import python_text
from stages.evaluate.chat import ChatConfig
from stages.evaluate.lm import LanguageModel
from stages.search.examples import answered

TASKS = ("niah_single_1", "niah_single_2", "niah_multikey_1", "niah_multikey_2")
WINDOW, SEED = 128, 2026
CONTEXT, SAMPLES = 2048, 200
SEARCH_LENGTH, SEARCH_SAMPLES, RANDOM_MASKS = 512, 24, 50
TEXT_LENGTH = 1024


def questions(model: Any, tokenizer: Any, tasks: Sequence[str], length: int, count: int) -> Any:
    """Needle questions of at most `length` tokens, alternating between tasks, with the right
    answers of the model, which has full attention; and the share that it answers right."""
    prompts = needle_prompts(
        tasks, count, length, lambda task: 16, "evaluation", SEED, tokenizer, haystack_words(None)
    )
    lm = LanguageModel(model, tokenizer, ChatConfig(), 1)
    records = answered(lm, list(prompts))
    examples = [(record["input_ids"], record["answer_length"]) for record in records]
    return CalibrationSet.from_records(examples), len(records) / count


def needle_measures(model: Any, tokenizer: Any) -> dict[str, Any]:
    """Scores of the full and the all-sliding mask, with the masks of `mask_measures`."""
    layers, heads = model.config.num_hidden_layers, model.config.num_key_value_heads
    window = Window(WINDOW)
    all_full = HeadMask.all_full(layers, heads)
    all_sliding = HeadMask.all_sliding(layers, heads, window)
    count = SAMPLES // len(TASKS)
    asked = {task: questions(model, tokenizer, [task], CONTEXT, count) for task in TASKS}
    searched, _ = questions(model, tokenizer, TASKS, SEARCH_LENGTH, SEARCH_SAMPLES)
    prepare_for_search(model)
    full: dict[str, float] = {}
    sliding: dict[str, float] = {}
    for task, (examples, right) in asked.items():
        full[task] = right
        sliding[task] = right * Objective(model, examples, window).evaluate(all_sliding).score
        print(f"{task}: full {full[task]:.3f}, sliding {sliding[task]:.3f}", flush=True)
    objective = Objective(model, searched, window)
    return {
        "full": float(np.mean(list(full.values()))),
        "sliding": float(np.mean(list(sliding.values()))),
        "by_task": full,
        "search_full": objective.evaluate(all_full).score,
        "search_sliding": objective.evaluate(all_sliding).score,
        **mask_measures(objective),
    }


def mask_measures(objective: Objective) -> dict[str, Any]:
    """Scores with one head sliding, one layer sliding, one layer full, and half at random."""
    layers, heads = objective.shape
    number, layer_of = np.arange(layers * heads).reshape(layers, heads), np.arange(layers)[:, None]
    rng = np.random.default_rng(SEED)
    halves = [
        rng.permutation(np.arange(layers * heads) % 2 == 0).reshape(layers, heads)
        for _ in range(RANDOM_MASKS)
    ]
    masks = {
        "single_head": [number != head for head in range(layers * heads)],
        "whole_layer": [np.repeat(layer_of != layer, heads, 1) for layer in range(layers)],
        "only_layer": [np.repeat(layer_of == layer, heads, 1) for layer in range(layers)],
        "random_masks": halves,
    }
    scores: dict[str, Any] = {name: [] for name in masks}
    with progress(sum(map(len, masks.values())), "masks", "masks") as bar:
        for name, masks_of_kind in masks.items():
            for is_full in masks_of_kind:
                mask = HeadMask.of(is_full, objective.window)
                scores[name].append(objective.evaluate(mask).score)
                bar.update()
    scores["single_head"] = np.reshape(scores["single_head"], (layers, heads)).tolist()
    return scores


@torch.inference_mode()
def text_measures(model: Any, tokenizer: Any) -> dict[str, float]:
    """Loss of the model and of a unigram model on held-out documents."""
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


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", type=Path)
    folder = parser.parse_args().model
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = load_model(folder, dtype="float32")
    text = text_measures(model, tokenizer)
    print(text, flush=True)
    sizes = {
        "window": WINDOW,
        "context": CONTEXT,
        "samples": SAMPLES,
        "search_length": SEARCH_LENGTH,
        "search_samples": SEARCH_SAMPLES,
    }
    measures = {**sizes, **needle_measures(model, tokenizer), **text}
    (folder / "measures.json").write_text(json.dumps(measures, indent=1) + "\n")


if __name__ == "__main__":
    main()
