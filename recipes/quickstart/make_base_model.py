"""Train the quickstart's base model: a small Qwen3 that models Python text and retrieves.

    python -m recipes.quickstart.make_base_model --output recipes/quickstart/base_model

Trains a byte-level BPE tokenizer and the model on the standard library's source, pydoc's topics and
synthetic documents (data_prep/documents/retrieval.py), in phases of growing sequence length.
Everything is seeded; a stopped run resumes from its last save. The output directory also gets the
log, `training_log.jsonl`. `measure_base_model.py` measures the model.
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
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from bosch.files import replacing
from data_prep.text import haystack_words
from recipes.quickstart.small_qwen3 import (
    LocalHeads,
    look_back_one,
    rate_scale,
    small_config,
    spread_retrieval,
    token_losses,
    update,
)
from recipes.quickstart.training_rows import (
    ANSWER_WEIGHT,
    FIRST_ANSWER_WEIGHT,
    SEED,
    Rows,
    python_text,
    train_tokenizer,
)

MICRO_BATCH_TOKENS = 2048  # fits into a core's cache; larger ones are slower


@dataclass(frozen=True)
class Phase:
    """Steps with the same settings.

    `text` and `copies` are shares of rows: plain text, and a repeated block of random tokens.
    The other rows hold retrieval documents. `local_heads` and `local_layers` are shares of KV
    groups and of whole layers that see only the latest tokens.
    """

    steps: int
    rate: float
    batch_tokens: int
    length: int
    text: float
    copies: float
    local_heads: float
    local_layers: float
    kinds: tuple[float, float, float, float]  # list, needle, repeat, two hops


PHASES = (
    Phase(300, 3e-3, 4096, 64, 0.20, 0.60, 0.0, 0.0, (0.90, 0.0, 0.10, 0.0)),
    Phase(300, 3e-3, 4096, 64, 0.0, 1.0, 0.0, 0.0, (0.90, 0.0, 0.10, 0.0)),
    Phase(200, 3e-3, 4096, 128, 0.15, 0.10, 0.0, 0.0, (0.90, 0.0, 0.10, 0.0)),
    Phase(400, 3e-3, 4096, 256, 0.25, 0.0, 0.05, 0.25, (0.60, 0.30, 0.10, 0.0)),
    Phase(300, 3e-3, 4096, 512, 0.35, 0.0, 0.10, 0.25, (0.40, 0.50, 0.05, 0.05)),
    Phase(100, 2e-3, 8192, 1024, 0.35, 0.0, 0.15, 0.20, (0.25, 0.65, 0.05, 0.05)),
    Phase(100, 2e-3, 8192, 2048, 0.25, 0.0, 0.15, 0.15, (0.05, 0.90, 0.0, 0.05)),
    Phase(220, 2e-3, 8192, 2048, 0.15, 0.0, 0.05, 0.10, (0.0, 1.0, 0.0, 0.0)),
)
SCHEDULE = [phase for phase in PHASES for _ in range(phase.steps)]  # one entry per step
SPREAD_STEP = 800  # by then copying has formed in one layer
WARMUP_STEPS, DECAY_STEPS = 150, 200


def model_config() -> Qwen3Config:
    return small_config(
        width=192, feed_forward=512, layers=6, kv_heads=8, tokens=2048, rope_theta=100_000.0
    )


def batch(rows: Rows, phase: Phase, step: int) -> tuple[Tensor, Tensor]:
    """Ids and weights, [B, T]: a function of the step alone, so that resuming is exact."""
    return rows.batch(
        Random(f"{SEED}-{step}"), phase.batch_tokens // phase.length, phase.length, phase.text,
        phase.copies, lambda rng, room: rows.fitting(rng, room, phase.kinds),
    )  # fmt: skip


def learning_rate(step: int) -> float:
    return SCHEDULE[step].rate * rate_scale(step, len(SCHEDULE), WARMUP_STEPS, DECAY_STEPS)


def step_gradients(
    model: nn.Module, local: LocalHeads, ids: Tensor, weights: Tensor, phase: Phase, step: int
) -> dict[str, float]:
    """Accumulate the gradients of the weighted loss; mean losses by kind of token."""
    weights = weights[:, 1:]
    generator = torch.Generator().manual_seed(step)
    rows = MICRO_BATCH_TOKENS // phase.length
    losses = []
    for chunk, chunk_weights in zip(ids.split(rows), weights.split(rows), strict=True):
        local.draw(len(chunk), phase.length, phase.local_heads, phase.local_layers, generator)
        loss = token_losses(model, chunk)
        ((loss * chunk_weights).sum() / weights.sum()).backward()
        losses.append(loss.detach())
    loss = torch.cat(losses)
    kinds = {"text": 1.0, "first": FIRST_ANSWER_WEIGHT, "rest": ANSWER_WEIGHT}
    means = {name: loss[weights == kind].mean().item() for name, kind in kinds.items()}
    return {"loss": ((loss * weights).sum() / weights.sum()).item(), **means}


def adam(model: nn.Module) -> torch.optim.AdamW:
    """AdamW with weight decay for matrices only."""
    decay = [p for p in model.parameters() if p.ndim > 1]
    rest = [p for p in model.parameters() if p.ndim == 1]
    return torch.optim.AdamW(
        [{"params": decay, "weight_decay": 0.05}, {"params": rest, "weight_decay": 0.0}],
        betas=(0.9, 0.98),
        eps=1e-8,
        fused=True,
    )


def train(output: Path) -> None:
    output.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(SEED)
    training_text, _ = python_text()
    prose = haystack_words(None)
    if not (output / "tokenizer.json").exists():
        train_tokenizer(training_text, prose).save_pretrained(output)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(output)
    rows = Rows(tokenizer, training_text, prose)
    print(f"{len(rows.text):,} tokens of text", flush=True)

    model = Qwen3ForCausalLM._from_config(model_config(), attn_implementation="eager").train()
    look_back_one(model)
    print(f"{model.num_parameters():,} parameters", flush=True)
    optimizer = adam(model)
    start, minutes_before = 0, 0.0
    state_file = output / "training_state.pt"
    if state_file.exists():
        state = torch.load(state_file, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        start, minutes_before = state["step"], state["minutes"]
        print(f"resuming at step {start}", flush=True)
    local = LocalHeads(model)
    compiled = torch.compile(model, dynamic=False)
    log = (output / "training_log.jsonl").open("a")
    began = time.process_time()

    def minutes() -> float:
        """CPU minutes of all threads so far, earlier runs included."""
        return minutes_before + (time.process_time() - began) / 60

    for step in range(start, len(SCHEDULE)):
        phase = SCHEDULE[step]
        if step == SPREAD_STEP:
            spread_retrieval(model)
        rate = learning_rate(step)
        ids, weights = batch(rows, phase, step)
        losses = step_gradients(compiled, local, ids, weights, phase, step)
        norm = update(model, optimizer, rate, losses["loss"], step)
        if step % 10 == 0 or step == len(SCHEDULE) - 1:
            line = {"step": step, "length": phase.length, "rate": rate, **losses}
            line |= {"norm": norm, "minutes": minutes()}
            line = {name: round(value, 5) for name, value in line.items()}
            log.write(json.dumps(line) + "\n")
            log.flush()
            print(line, flush=True)
        if (step + 1) % 100 == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            with replacing(state_file) as temporary:
                torch.save(state | {"step": step + 1, "minutes": minutes()}, temporary)
    model.to(torch.bfloat16).save_pretrained(output)
    details = {"seed": SEED, "phases": [asdict(phase) for phase in PHASES], "steps": len(SCHEDULE)}
    details |= {"cpu_minutes": round(minutes(), 1)}
    details |= {"torch": torch.__version__, "python": platform.python_version()}
    (output / "training.json").write_text(json.dumps(details, indent=1) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, required=True)
    train(parser.parse_args().output)
