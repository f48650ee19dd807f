"""Train a model that must compose heads: chains of look-ups, and lists copied behind a look-up.

    python -m recipes.study.make_composition_model --layers 8 --kv-heads 8 --output DIR

A Llama whose text is symbols. Facts `a b ;` form chains a b c d, lists are `a b c d ;`, all in
random order; then questions: `a Q1` asks for the list after its key a, `a Q2` and `a Q3` for the
result of two and three look-ups from a. Q3 needs a head for each of three look-ups, one layer above
the other; Q1 needs a look-up and heads that copy.

Such circuits do not form in minutes from random weights. Heads that look back one token, look up
and copy are therefore initialised, each kind in two layers, with strengths that differ;
all others are random. Then everything is trained, while random heads and layers see only the
latest tokens, so that others must be able to replace them. Everything is seeded.

Also writes the study's questions, `calibration.jsonl` (token ids; the last `answer_length` of them
are the answer), `training.json` and `training_log.jsonl`.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from recipes.quickstart.small_qwen3 import LocalHeads, rate_scale, token_losses, update

SEED = 13
SYMBOLS, KINDS = 96, 3
BEGIN, STOP, FIRST_QUESTION, FIRST_SYMBOL = 0, 1, 2, 2 + KINDS
VOCABULARY = FIRST_SYMBOL + SYMBOLS
WORDS = ("<s>", ";", *(f"Q{i + 1}" for i in range(KINDS)), *(f"s{i}" for i in range(SYMBOLS)))
CHAINS, CHAIN, LISTS, LIST = 12, 4, 12, 4
LENGTH, QUESTIONS = 208, 10
BATCH, RATE, WARMUP_STEPS, DECAY_STEPS = 8, 1e-3, 30, 100
LOCAL_HEADS, LOCAL_LAYERS = 0.25, 0.1
EXAMPLES = 256

# Subspaces of the residual stream: the token, the token before it, the results of one and of two
# look-ups, the answer, and flags.
WIDTH, SUBSPACE, HEAD = 128, 24, 32
TOKEN, BEFORE, HOP_1, HOP_2, ANSWER = (slice(SUBSPACE * i, SUBSPACE * (i + 1)) for i in range(5))
FLAGS = SUBSPACE * 5
IS_ANY, IS_BEGIN, IS_STOP, IS_QUESTION = FLAGS, FLAGS + 1, FLAGS + 2, FLAGS + 3
# Rotary frequencies of a head's pairs fall from 1; from FIRST_SLOW on the pairs hardly turn within
# a sequence.
THETA = 1e7
FIRST_SLOW = 6


def facts_and_questions(rng: Random) -> tuple[list[int], list[tuple[list[int], list[int]]]]:
    """The facts of one sequence, and every (question, answer) that can be asked about them."""
    symbols = rng.sample(range(FIRST_SYMBOL, VOCABULARY), CHAINS * CHAIN + LISTS * LIST)
    facts, pairs = [], []
    for i in range(0, CHAINS * CHAIN, CHAIN):
        chain = symbols[i : i + CHAIN]
        facts += [[*pair, STOP] for pair in pairwise(chain)]
        for hops in (2, 3):
            for start in range(CHAIN - hops):
                question = [chain[start], FIRST_QUESTION + hops - 1]
                pairs.append((question, [chain[start + hops]]))
    for i in range(CHAINS * CHAIN, len(symbols), LIST):
        row = symbols[i : i + LIST]
        facts.append([*row, STOP])
        pairs.append(([row[0], FIRST_QUESTION], row[1:]))
    rng.shuffle(facts)
    return [BEGIN, *(symbol for fact in facts for symbol in fact)], pairs


def training_batch(step: int) -> tuple[Tensor, Tensor]:
    """Ids [B, T], and which of them are answers."""
    rng = Random(f"{SEED}-{step}")
    ids = torch.full((BATCH, LENGTH), STOP)
    is_answer = torch.zeros(BATCH, LENGTH, dtype=torch.bool)
    for row in range(BATCH):
        text, pairs = facts_and_questions(rng)
        marks = [False] * len(text)
        for question, answer in rng.sample(pairs, QUESTIONS):
            text += [*question, *answer, STOP]
            marks += [False] * len(question) + [True] * len(answer) + [False]
        ids[row, : len(text)] = torch.tensor(text[:LENGTH])
        is_answer[row, : len(marks)] = torch.tensor(marks[:LENGTH])
    return ids, is_answer


def examples(count: int = EXAMPLES) -> list[dict[str, Any]]:
    """Questions for calibration and held-out sets, kinds in turn, one for each text.

    A larger `count` begins with the same questions.
    """
    rng, records = Random(f"{SEED}-study"), []
    for number in range(count):
        text, pairs = facts_and_questions(rng)
        kind = FIRST_QUESTION + number % KINDS
        question, answer = rng.choice([pair for pair in pairs if pair[0][1] == kind])
        ids = [*text, *question, *answer]
        records.append({"input_ids": ids, "answer_length": len(answer)})
    return records


def fresh_model(layers: int, kv_heads: int) -> LlamaForCausalLM:
    """Random weights, with the heads initialised that composition needs."""
    torch.manual_seed(SEED)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=WIDTH, intermediate_size=64, num_hidden_layers=layers,
        num_attention_heads=kv_heads, num_key_value_heads=kv_heads, head_dim=HEAD,
        max_position_embeddings=256, tie_word_embeddings=False, initializer_range=0.02,
        rope_parameters={"rope_type": "default", "rope_theta": THETA},
        bos_token_id=BEGIN, eos_token_id=STOP, pad_token_id=STOP,
    )  # fmt: skip
    model = LlamaForCausalLM._from_config(config, attn_implementation="eager")
    Circuits(model).initialise()
    return model.train()


class Circuits:
    """Writes the heads that look back, look up and copy into a model's weights."""

    def __init__(self, model: LlamaForCausalLM) -> None:
        self.model = model
        self.layers = [layer.self_attn for layer in model.model.layers]
        self.free = [list(range(model.config.num_key_value_heads)) for _ in self.layers]
        self.slow = list(range(FIRST_SLOW, HEAD // 2 - 1))
        self.slow += [i + HEAD // 2 for i in self.slow]
        self.flag = HEAD // 2 - 1  # the slowest pair

    @torch.no_grad()
    def initialise(self) -> None:
        """Each kind of head in two layers, one strong and one weaker head in each."""
        embedding = self.model.model.embed_tokens.weight
        embedding[:, :FLAGS].zero_()
        embedding[:, TOKEN] = nn.functional.normalize(torch.randn(VOCABULARY, SUBSPACE), dim=1) * 4
        embedding[:, FLAGS:].zero_()
        embedding[:, IS_ANY] = 2
        embedding[BEGIN, IS_BEGIN] = 2
        embedding[STOP, IS_STOP] = 2
        for kind in range(KINDS):
            embedding[FIRST_QUESTION + kind, IS_QUESTION + kind] = 2
        self.model.lm_head.weight[:, ANSWER] = embedding[:, TOKEN] / 4
        questions = list(range(KINDS))
        last = len(self.layers) - 1
        hops = [
            (1, (BEFORE, (HOP_1, ANSWER), questions, 1.0)),
            (1 + last * 2 // 7, (HOP_1, (HOP_2, ANSWER), questions[1:], 2.5)),
            (1 + last * 4 // 7, (HOP_2, (ANSWER,), questions[2:], 6.0)),
        ]
        self._look_back(0)
        self._look_back(0)
        for first, (query, results, kinds, scale) in hops:
            for layer in (first, first + 1):
                for strength in (1.0, 0.7):
                    self._look_up(layer, query, results, kinds, scale * strength)
        for layer in (2, last * 5 // 7):
            for strength in (1.0, 0.7):
                self._look_up(layer, TOKEN, (ANSWER,), None, strength)

    def _rows(self, layer: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Rows of q, k, v and columns of o of a head that has no purpose yet, scaled to a tenth."""
        head, attention = self.free[layer].pop(0), self.layers[layer]
        rows = slice(head * HEAD, head * HEAD + HEAD)
        weights = [getattr(attention, f"{name}_proj").weight[rows] for name in "qkv"]
        weights.append(attention.o_proj.weight[:, rows])
        for weight in weights:
            weight.mul_(0.1)
        return weights[0], weights[1], weights[2], weights[3]

    def _look_back(self, layer: int) -> None:
        """Initialise a head that attends to the token before and writes it to BEFORE."""
        query, key, value, output = self._rows(layer)
        rates = THETA ** (-torch.arange(0, HEAD, 2) / HEAD)
        fast = rates > 0.02
        key[: HEAD // 2, IS_ANY] += 6.0 * fast
        # A query turned back by one position.
        query[: HEAD // 2, IS_ANY] += 6.0 * fast * torch.cos(rates)
        query[HEAD // 2 :, IS_ANY] -= 6.0 * fast * torch.sin(rates)
        value[:SUBSPACE, TOKEN] += torch.eye(SUBSPACE)
        output[BEFORE, :SUBSPACE] += torch.eye(SUBSPACE) * 0.2

    def _look_up(
        self, layer: int, source: slice, results: tuple[slice, ...], kinds: list[int] | None,
        scale: float,
    ) -> None:  # fmt: skip
        """Initialise a head that finds the token after the one in `source`.

        It works at the questions `kinds`, or for None everywhere else; otherwise it attends to the
        first token.
        """
        query, key, value, output = self._rows(layer)
        projection = torch.linalg.qr(torch.randn(SUBSPACE, SUBSPACE))[0][: len(self.slow)]
        query[self.slow, source] += 3.0 * projection
        key[self.slow, BEFORE] += 3.0 * projection
        rest = 6.0
        key[self.flag, IS_BEGIN] += rest
        key[self.flag, IS_STOP : IS_QUESTION + KINDS] -= rest
        if kinds is None:
            query[self.flag, IS_ANY] += rest / 4
        else:
            query[self.flag, IS_ANY] += rest
            query[self.flag, [IS_QUESTION + kind for kind in kinds]] -= 0.75 * rest
        value[:SUBSPACE, TOKEN] += torch.eye(SUBSPACE)
        for result in results:
            output[result, :SUBSPACE] += torch.eye(SUBSPACE) * (
                0.3 * scale if result is ANSWER else 0.2
            )


@torch.no_grad()
def exact_match(model: LlamaForCausalLM, records: list[dict[str, Any]], kind: int) -> float:
    """Share of the questions of one kind whose answer tokens are all the model's first choice."""
    of_kind = [
        r for r in records if r["input_ids"][-r["answer_length"] - 1] == FIRST_QUESTION + kind
    ]
    right = 0
    for record in of_kind:
        ids, length = torch.tensor([record["input_ids"]]), record["answer_length"]
        choice = model(input_ids=ids, use_cache=False).logits[0].argmax(-1)
        right += bool((choice[-length - 1 : -1] == ids[0, -length:]).all())
    return right / len(of_kind)


def write_tokenizer(output: Path) -> None:
    """Write a tokenizer with a word for each symbol."""
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, ";"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token=";", pad_token=";", unk_token=";"
    ).save_pretrained(output)


def train(output: Path, layers: int, kv_heads: int, steps: int) -> None:
    output.mkdir(parents=True, exist_ok=True)
    write_tokenizer(output)
    records = examples()
    with (output / "calibration.jsonl").open("w") as file:
        file.writelines(json.dumps(record) + "\n" for record in records)
    model = fresh_model(layers, kv_heads)
    print(f"{model.num_parameters():,} parameters", flush=True)
    local = LocalHeads(model)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=RATE, betas=(0.9, 0.98), weight_decay=0.02, fused=True
    )
    began = time.process_time()

    def scores() -> list[float]:
        local.draw(1, LENGTH, 0.0, 0.0, torch.Generator())
        return [round(exact_match(model, records[:60], kind), 3) for kind in range(KINDS)]

    with (output / "training_log.jsonl").open("w") as log:
        for step in range(steps):
            rate = RATE * rate_scale(step, steps, WARMUP_STEPS, DECAY_STEPS)
            ids, is_answer = training_batch(step)
            generator = torch.Generator().manual_seed(step)
            local.draw(BATCH, LENGTH, LOCAL_HEADS, LOCAL_LAYERS, generator)
            losses = token_losses(model, ids, is_mixed=False)
            is_answer = is_answer[:, 1:]
            loss = losses[is_answer].mean()
            (loss + 0.02 * losses.mean()).backward()
            update(model, optimizer, rate, loss.item(), step)
            if step % 10 == 0 or step == steps - 1:
                line: dict[str, Any] = {"step": step, "answers": round(loss.item(), 4)}
                line["minutes"] = round((time.process_time() - began) / 60, 2)
                if step % 50 == 0 or step == steps - 1:
                    line["exact"] = scores()
                log.write(json.dumps(line) + "\n")
                log.flush()
                print(line, flush=True)
    model.to(torch.bfloat16).save_pretrained(output)
    details = {
        "seed": SEED, "layers": layers, "kv_heads": kv_heads, "steps": steps, "rate": RATE,
        "batch_tokens": BATCH * LENGTH, "local_heads": LOCAL_HEADS, "local_layers": LOCAL_LAYERS,
        "cpu_minutes": round((time.process_time() - began) / 60, 1),
        "torch": torch.__version__, "python": platform.python_version(),
    }  # fmt: skip
    (output / "training.json").write_text(json.dumps(details, indent=1) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--steps", type=int, default=240)
    arguments = parser.parse_args()
    train(arguments.output, arguments.layers, arguments.kv_heads, arguments.steps)
