"""Make the quickstart's base model: a small Qwen3 that reads Python and really retrieves.

    python -m recipes.quickstart.make_base_model --output recipes/quickstart/base_model

Trains a byte-level BPE tokenizer and the model on the standard library's source, pydoc's topics and
synthetic retrieval documents (data_prep/retrieval.py), in phases of growing sequence length.
Everything is seeded; a run that was stopped goes on from its last save. The log is kept as
`training_log.jsonl` in the output. `measure_base_model.py` writes the model card.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import sysconfig
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import (
    AttentionInterface,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from data_prep.retrieval import Document, Segment, retrieval_document

VOCABULARY = 2048
MICRO_BATCH_TOKENS = 2048  # what a core's cache holds: larger ones are slower
SEED = 7
LOCAL_REACH = (1 / 16, 1 / 4)  # of a sequence
FIRST_ANSWER_WEIGHT, ANSWER_WEIGHT, PROMPT_WEIGHT = 10.0, 5.0, 0.2


@dataclass(frozen=True)
class Phase:
    """A stretch of training.

    `text` and `copies` are shares of rows: plain text, and a block of random tokens over and over.
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
SPREAD_STEP = 800  # copying has formed, in one layer
WARMUP_STEPS, DECAY_STEPS = 150, 200


def python_text() -> tuple[list[str], list[str]]:
    """Source files and help topics of this Python, as (training, held-out) documents."""
    root = Path(sysconfig.get_paths()["stdlib"])
    skipped = {"site-packages", "test", "tests", "idlelib", "lib2to3", "turtledemo"}
    files = sorted(
        path
        for path in root.rglob("*.py")
        if not skipped & set(path.relative_to(root).parts)
        and not path.name.startswith("_sysconfig")
    )
    documents = [path.read_text(encoding="utf-8", errors="ignore") for path in files]
    import pydoc_data.topics

    documents += [text for _, text in sorted(pydoc_data.topics.topics.items())]
    documents = [text for text in documents if len(text) > 200]
    Random(SEED).shuffle(documents)
    held_out = len(documents) // 50
    return documents[held_out:], documents[:held_out]


def prose_words() -> list[str]:
    """The words of pydoc's topics, for haystacks."""
    import pydoc_data.topics

    return " ".join(text for _, text in sorted(pydoc_data.topics.topics.items())).split()


def train_tokenizer(documents: list[str], prose: list[str]) -> PreTrainedTokenizerFast:
    """Byte-level BPE with single digits, on a sample of text and retrieval documents."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    rng = Random(SEED)
    sample = documents[:250] + [
        "".join(s.text for s in retrieval_document(rng, 3000, prose)) for _ in range(250)
    ]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    end = "<|endoftext|>"
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[end],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(sample, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=end, pad_token=end, model_max_length=2048
    )


def model_config() -> Qwen3Config:
    return Qwen3Config(
        initializer_range=0.06,
        vocab_size=VOCABULARY,
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=6,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=32,
        max_position_embeddings=2048,
        rope_parameters={"rope_type": "default", "rope_theta": 100_000.0},
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=0,
    )


@torch.no_grad()
def look_back_one(model: Qwen3ForCausalLM, groups: int = 4, gain: float = 1.5) -> None:
    """Start half of the first layer's KV groups as heads that attend to the previous token.

    Copying needs such heads below the ones that match, and neither is of use alone: from random
    weights a model this small sits on that plateau for thousands of steps. The embeddings get a
    common direction; queries and keys map it to a vector of high rotary frequencies, the query's
    turned back by one position.
    """
    config, embedding = model.config, model.model.embed_tokens.weight
    size = config.head_dim
    common = torch.randn(embedding.shape[1])
    common /= common.norm()
    embedding += common * embedding.norm(dim=1).mean()
    rate = config.rope_parameters["rope_theta"] ** (-torch.arange(0, size, 2) / size)
    key = torch.cat([(rate > 0.02).float(), torch.zeros(size // 2)])
    quarter_turn = torch.cat([-key[size // 2 :], key[: size // 2]])
    angle = -torch.cat([rate, rate])
    query = key * torch.cos(angle) + quarter_turn * torch.sin(angle)
    attention = model.model.layers[0].self_attn
    attention.q_norm.weight.fill_(gain)
    attention.k_norm.weight.fill_(gain)
    per_group = config.num_attention_heads // config.num_key_value_heads
    for weight, target, heads in (
        (attention.k_proj.weight, key, groups),
        (attention.q_proj.weight, query, groups * per_group),
    ):
        rows = weight[: heads * size]
        rows.mul_(0.3).add_(torch.outer(target, common).repeat(heads, 1))


@torch.no_grad()
def spread_retrieval(model: Qwen3ForCausalLM, source: int = 1, target: int = 3) -> None:
    """Swap the second half of two layers' KV groups, so that two layers can retrieve.

    Copying forms in the first layer that can, and while that one does the work no later layer
    learns to. Its heads do as well further up, for what they need stays in the residual stream;
    rows in which whole layers are local keep both layers able from then on.
    """
    config = model.config
    lower, upper = model.model.layers[source], model.model.layers[target]
    scale = lower.input_layernorm.weight / upper.input_layernorm.weight
    half = config.num_key_value_heads // 2 * config.head_dim
    per_group = config.num_attention_heads // config.num_key_value_heads
    for name, first in (("q_proj", half * per_group), ("k_proj", half), ("v_proj", half)):
        below, above = (getattr(layer.self_attn, name).weight[first:] for layer in (lower, upper))
        moved = below * scale
        below.copy_(above / scale)
        above.copy_(moved)
    below, above = (
        layer.self_attn.o_proj.weight[:, half * per_group :] for layer in (lower, upper)
    )
    moved = below.clone()
    below.copy_(above)
    above.copy_(moved)
    for norm in ("q_norm", "k_norm"):
        getattr(upper.self_attn, norm).weight.copy_(getattr(lower.self_attn, norm).weight)


class Rows:
    """Batches of token rows with a loss weight for every token."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerFast, text: list[str], prose: list[str]
    ) -> None:
        self.encode = tokenizer.backend_tokenizer.encode
        self.prose = prose
        self.digits = [self.encode(digit).ids[0] for digit in "0123456789"]
        encoded = tokenizer.backend_tokenizer.encode_batch(text)
        self.text = np.concatenate([np.array([*e.ids, 0], dtype=np.int32) for e in encoded])

    def document(self, document: Document) -> tuple[list[int], list[float]]:
        ids: list[int] = []
        weights: list[float] = []
        plain: list[str] = []

        def flush() -> None:
            pieces = self.encode("".join(plain)).ids
            ids.extend(pieces)
            weights.extend([PROMPT_WEIGHT] * len(pieces))
            plain.clear()

        for segment in [*document, Segment("")]:
            if segment.is_answer:
                flush()
                pieces = self.encode(segment.text).ids
                ids.extend(pieces)
                weights.extend([FIRST_ANSWER_WEIGHT] + [ANSWER_WEIGHT] * (len(pieces) - 1))
            else:
                plain.append(segment.text)
        flush()
        return [*ids, 0], [*weights, 0.1]

    def fitting(
        self, rng: Random, room: int, kinds: tuple[float, ...]
    ) -> tuple[list[int], list[float]]:
        """A retrieval document that mostly fills `room` tokens and at times leaves some."""
        tokens = room if rng.random() < 0.7 else rng.uniform(0.3, 1.0) * room
        seed = rng.random()
        characters = 3.0 * tokens
        for _ in range(2):  # how many characters a token has depends on the document
            drawn = retrieval_document(Random(seed), max(60, int(characters)), self.prose, kinds)
            ids, _ = self.document(drawn)
            characters *= 0.97 * tokens / len(ids)
        drawn = retrieval_document(Random(seed), max(60, int(characters)), self.prose, kinds)
        return self.document(drawn)

    def copies(self, rng: Random, length: int) -> tuple[list[int], list[float]]:
        """A block of random tokens, again and again: the quickest way to heads that copy."""
        period = rng.randint(4, length // 2)
        alphabet = self.digits if rng.random() < 0.2 else range(VOCABULARY)
        block = [rng.choice(alphabet) for _ in range(period)]
        row = (block * (length // period + 1))[:length]
        return row, [0.0] * period + [ANSWER_WEIGHT] * (length - period)

    def batch(self, phase: Phase, step: int) -> tuple[Tensor, Tensor]:
        """ids and weights, [B, T]: a function of the step alone, so that resuming is exact."""
        rng = Random(f"{SEED}-{step}")
        rows, weights = [], []
        for _ in range(phase.batch_tokens // phase.length):
            draw = rng.random()
            if draw < phase.text:
                start = rng.randrange(len(self.text) - phase.length)
                rows.append(self.text[start : start + phase.length].tolist())
                weights.append([1.0] * phase.length)
                continue
            if draw < phase.text + phase.copies:
                row, row_weights = self.copies(rng, phase.length)
                rows.append(row)
                weights.append(row_weights)
                continue
            ids: list[int] = []
            ws: list[float] = []
            while len(ids) < phase.length:
                more_ids, more_ws = self.fitting(rng, phase.length - len(ids), phase.kinds)
                ids += more_ids
                ws += more_ws
            rows.append(ids[: phase.length])
            weights.append(ws[: phase.length])
        return torch.tensor(rows), torch.tensor(weights)


class LocalHeads:
    """Lets random KV groups and whole layers of every row see only the latest tokens.

    Retrieval then cannot settle in one head or layer: whatever another one would have fetched, the
    rest must be able to fetch. What a local head loses is what a sliding-window head loses.
    """

    def __init__(self, model: Qwen3ForCausalLM) -> None:
        self.groups = model.config.num_key_value_heads
        self.layers = [layer.self_attn for layer in model.model.layers]
        AttentionInterface.register("local_heads", local_heads_attention)
        model.set_attn_implementation("local_heads")

    def draw(self, rows: int, phase: Phase, generator: torch.Generator) -> None:
        """New reaches for a batch of `rows` sequences."""
        least, most = (int(share * phase.length) for share in LOCAL_REACH)
        for layer in self.layers:
            local = torch.rand(rows, self.groups, generator=generator) < phase.local_heads
            local |= torch.rand(rows, 1, generator=generator) < phase.local_layers
            reach = torch.randint(least, most + 1, (rows, 1), generator=generator)
            layer.reach = torch.where(local, reach, phase.length)


def local_heads_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, _mask: None, **options: Any
) -> tuple[Tensor, None]:
    """Plain causal attention in which each row's KV groups reach back `module.reach` [B, HKV].

    Compiled, it trains twice as fast on a CPU as torch's own kernel.
    """
    groups = module.num_key_value_groups
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = query @ key.transpose(2, 3) * options["scaling"]
    position = torch.arange(query.shape[2])
    back = position[:, None] - position
    reach = module.reach.repeat_interleave(groups, 1)[:, :, None, None]
    # Added, not filled in: the backward pass then needs no mask.
    bias = torch.where((back < 0) | (back >= reach), -1e30, 0.0).to(scores.dtype)
    weights = (scores + bias).softmax(-1, dtype=torch.float32).to(query.dtype)
    return (weights @ value).transpose(1, 2), None


def learning_rate(step: int) -> float:
    """The phase's rate, after a warm-up, with a linear decay at the very end."""
    left = sum(phase.steps for phase in PHASES) - step
    scale = min(1.0, (step + 1) / WARMUP_STEPS, 0.02 + 0.98 * left / DECAY_STEPS)
    return phase_of(step).rate * scale


def token_losses(model: nn.Module, ids: Tensor) -> Tensor:
    """Cross-entropy of every next token, [B, T - 1]."""
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
    losses = nn.functional.cross_entropy(
        logits.float().flatten(0, 1), ids[:, 1:].flatten(), reduction="none"
    )
    return losses.view(len(ids), -1)


def step_gradients(
    model: nn.Module, local: LocalHeads, ids: Tensor, weights: Tensor, phase: Phase, step: int
) -> dict[str, float]:
    """Accumulate the gradients of the weighted loss; mean losses by kind of token."""
    weights = weights[:, 1:]
    generator = torch.Generator().manual_seed(step)
    rows = MICRO_BATCH_TOKENS // phase.length
    losses = []
    for part, part_weights in zip(ids.split(rows), weights.split(rows), strict=True):
        local.draw(len(part), phase, generator)
        loss = token_losses(model, part)
        ((loss * part_weights).sum() / weights.sum()).backward()
        losses.append(loss.detach())
    loss = torch.cat(losses)
    kinds = {"text": 1.0, "first": FIRST_ANSWER_WEIGHT, "rest": ANSWER_WEIGHT}
    parts = {name: loss[weights == kind].mean().item() for name, kind in kinds.items()}
    return {"loss": ((loss * weights).sum() / weights.sum()).item(), **parts}


def phase_of(step: int) -> Phase:
    for phase in PHASES:
        if step < phase.steps:
            return phase
        step -= phase.steps
    raise IndexError(step)


def steps() -> Iterator[tuple[int, Phase]]:
    for step in range(sum(phase.steps for phase in PHASES)):
        yield step, phase_of(step)


def train(output: Path) -> None:
    output.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(SEED)
    training_text, _ = python_text()
    prose = prose_words()
    if not (output / "tokenizer.json").exists():
        train_tokenizer(training_text, prose).save_pretrained(output)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(output)
    rows = Rows(tokenizer, training_text, prose)
    print(f"{len(rows.text):,} tokens of text", flush=True)

    model = Qwen3ForCausalLM._from_config(model_config(), attn_implementation="eager").train()
    look_back_one(model)
    print(f"{model.num_parameters():,} parameters", flush=True)
    decay = [p for p in model.parameters() if p.ndim > 1]
    rest = [p for p in model.parameters() if p.ndim == 1]
    optimizer = torch.optim.AdamW(
        [{"params": decay, "weight_decay": 0.05}, {"params": rest, "weight_decay": 0.0}],
        betas=(0.9, 0.98), eps=1e-8, fused=True,
    )  # fmt: skip
    start, minutes_before = 0, 0.0
    state_file = output / "training_state.pt"
    if state_file.exists():
        state = torch.load(state_file, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        start, minutes_before = state["step"], state["minutes"]
        print(f"going on at step {start}", flush=True)
    local = LocalHeads(model)
    compiled = torch.compile(model, dynamic=False)
    total = sum(phase.steps for phase in PHASES)
    log = (output / "training_log.jsonl").open("a")
    began = time.process_time()

    def minutes() -> float:
        """CPU minutes of all threads so far, earlier runs included."""
        return minutes_before + (time.process_time() - began) / 60

    for step, phase in steps():
        if step < start:
            continue
        if step == SPREAD_STEP:
            spread_retrieval(model)
        rate = learning_rate(step)
        for group in optimizer.param_groups:
            group["lr"] = rate
        ids, weights = rows.batch(phase, step)
        losses = step_gradients(compiled, local, ids, weights, phase, step)
        if not math.isfinite(losses["loss"]):
            raise SystemExit(f"the loss is {losses['loss']} at step {step}")
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % 10 == 0 or step == total - 1:
            line = {"step": step, "length": phase.length, "rate": rate, **losses}
            line |= {"norm": norm.item(), "minutes": minutes()}
            line = {name: round(value, 5) for name, value in line.items()}
            log.write(json.dumps(line) + "\n")
            log.flush()
            print(line, flush=True)
        if (step + 1) % 100 == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(
                state | {"step": step + 1, "minutes": minutes()}, state_file.with_suffix(".tmp")
            )
            state_file.with_suffix(".tmp").replace(state_file)
    model.to(torch.bfloat16).save_pretrained(output)
    details = {"seed": SEED, "phases": [asdict(phase) for phase in PHASES], "steps": total}
    details |= {"cpu_minutes": round(minutes(), 1)}
    details |= {"torch": torch.__version__, "python": platform.python_version()}
    (output / "training.json").write_text(json.dumps(details, indent=1) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, required=True)
    train(parser.parse_args().output)
