"""Train the model of the optimality study, small enough to evaluate every head mask on budget.

    python -m recipes.study.make_enumerable_model --output recipes/study/enumerable_model

A Qwen3 of 3 layers with 4 KV heads each, trained from scratch to find needles in 256 tokens, on the
text and the synthetic documents of the quickstart's base model; the tokenizer is the one in
`enumerable_model`. In training, random KV groups see only the latest eighth of a sequence, so that
several heads learn to retrieve and the choice of a head mask matters. Everything is seeded;
`training_log.jsonl` and `training.json` are written beside the weights.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random

import torch
from torch import Tensor
from transformers import AttentionInterface, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from data_prep.documents.retrieval import retrieval_document
from data_prep.text import haystack_words
from recipes.quickstart.small_qwen3 import (
    local_heads_attention,
    look_back_one,
    rate_scale,
    small_config,
    token_losses,
    update,
)
from recipes.quickstart.training_rows import Row, Rows, python_text

TOKENIZER = Path(__file__).parent / "enumerable_model"
SEED = 11
BATCH_TOKENS = 4096
LOCAL_REACH = 8  # a local head sees one in LOCAL_REACH of a sequence's tokens
WARMUP_STEPS, DECAY_STEPS = 100, 200


@dataclass(frozen=True)
class Stretch:
    """Training at one length; `local` is the share of KV groups that see only the latest tokens.

    A row that is neither `text` nor `copies` (shares) holds retrieval documents of `kinds`.
    """

    steps: int
    length: int
    rate: float
    text: float
    copies: float
    local: float
    kinds: tuple[float, float, float, float]  # list, needle, repeat, two hops


STRETCHES = (
    Stretch(400, 64, 3e-3, 0.1, 0.7, 0.0, (0.9, 0.0, 0.1, 0.0)),
    Stretch(300, 128, 3e-3, 0.1, 0.4, 0.15, (0.8, 0.1, 0.1, 0.0)),
    Stretch(900, 256, 3e-3, 0.05, 0.05, 0.25, (0.25, 0.75, 0.0, 0.0)),
)


def model_config() -> Qwen3Config:
    return small_config(
        width=128, feed_forward=256, layers=3, kv_heads=4, tokens=256, rope_theta=10_000.0
    )


def batch(rows: Rows, stretch: Stretch, step: int) -> tuple[Tensor, Tensor]:
    """Ids and loss weights, [B, T]: a function of the step alone."""

    def document(rng: Random, room: int) -> Row:
        characters = max(60, int(room * 2.2))
        return rows.document(retrieval_document(rng, characters, rows.prose, stretch.kinds))

    return rows.batch(
        Random(f"{SEED}-{step}"),
        BATCH_TOKENS // stretch.length,
        stretch.length,
        stretch.text,
        stretch.copies,
        document,
    )


def draw_reach(model: Qwen3ForCausalLM, rows: int, stretch: Stretch, step: int) -> None:
    """Which KV groups of which rows are local in this step."""
    generator = torch.Generator().manual_seed(step)
    groups = model.config.num_key_value_heads
    for layer in model.model.layers:
        local = torch.rand(rows, groups, generator=generator) < stretch.local
        layer.self_attn.reach = torch.where(local, stretch.length // LOCAL_REACH, stretch.length)


def fresh_model() -> Qwen3ForCausalLM:
    AttentionInterface.register("local_heads", local_heads_attention)
    torch.manual_seed(SEED)
    model = Qwen3ForCausalLM._from_config(model_config(), attn_implementation="local_heads")
    look_back_one(model, groups=2)
    return model.train()


def train(output: Path) -> None:
    output.mkdir(parents=True, exist_ok=True)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(TOKENIZER)
    tokenizer.save_pretrained(output)
    training_text, _ = python_text()
    rows = Rows(tokenizer, training_text, haystack_words(None))
    model = fresh_model()
    print(f"{model.num_parameters():,} parameters", flush=True)
    compiled = torch.compile(model, dynamic=False)
    optimizer = torch.optim.AdamW(
        model.parameters(), betas=(0.9, 0.98), weight_decay=0.02, fused=True
    )
    schedule = [stretch for stretch in STRETCHES for _ in range(stretch.steps)]
    began = time.process_time()
    with (output / "training_log.jsonl").open("w") as log:
        for step, stretch in enumerate(schedule):
            rate = stretch.rate * rate_scale(step, len(schedule), WARMUP_STEPS, DECAY_STEPS)
            ids, weights = batch(rows, stretch, step)
            draw_reach(model, len(ids), stretch, step)
            losses = token_losses(compiled, ids)
            weights = weights[:, 1:]
            loss = (losses * weights).sum() / weights.sum()
            loss.backward()
            update(model, optimizer, rate, loss.item(), step)
            if step % 10 == 9:
                line = {
                    "step": step + 1,
                    "length": stretch.length,
                    "rate": round(rate, 6),
                    "loss": round(loss.item(), 4),
                    "answers": round(losses[weights >= 5].mean().item(), 4),
                    "minutes": round((time.process_time() - began) / 60, 2),
                }
                log.write(json.dumps(line) + "\n")
                log.flush()
                print(line, flush=True)
    model.to(torch.bfloat16).save_pretrained(output)
    details = {
        "seed": SEED,
        "stretches": [asdict(stretch) for stretch in STRETCHES],
        "batch_tokens": BATCH_TOKENS,
        "cpu_minutes": round((time.process_time() - began) / 60, 1),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    (output / "training.json").write_text(json.dumps(details, indent=1) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output", type=Path, required=True)
    train(parser.parse_args().output)
