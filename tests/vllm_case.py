"""Small hybrid models for CPU builds of engines, vLLM's first, and what transformers computes."""

from __future__ import annotations

import gc
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from bosch.mask_files import HeadMaskFile
from bosch.masks import HeadMask
from bosch.model.families import decoder_layers
from bosch.model.loading import load_model
from bosch.model.materialize import materialize
from bosch.window import Window
from tests.hybrid_case import KV_HEADS, VOCABULARY, small_model

# The CPU build has attention kernels for these head dimensions from 32 on.
SIZES = {"hidden_size": 256, "head_dim": 32}
BLOCK, BATCH_TOKENS = 32, 64
_RECIPES = Path(__file__).resolve().parents[1] / "recipes"
QUICKSTART = _RECIPES / "quickstart" / "base_model"
QUICKSTART_MASK = HeadMaskFile.load(_RECIPES / "masks" / "quickstart" / "bosch_plus-0.875.json")


def mask_of_counts(
    counts: Sequence[int], window: Window, heads: int = KV_HEADS, seed: int = 1
) -> HeadMask:
    """A random mask with `counts` full heads in each layer."""
    generator = np.random.default_rng(seed)
    rows = np.zeros((len(counts), heads), dtype=bool)
    for row, count in zip(rows, counts, strict=True):
        row[generator.permutation(heads)[:count]] = True
    return HeadMask.of(rows, window)


def save_hybrid(
    folder: Path,
    family: str,
    counts: Sequence[int],
    window: int,
    sinks: int = 0,
    **changes: Any,
) -> Any:
    """Save a random hybrid model of a family in float32 and return it."""
    model = small_model(family, **{**SIZES, **changes}).float()
    mask = mask_of_counts(counts, Window(window, sinks), decoder_layers(model.config).heads)
    hybrid = materialize(model, mask)
    hybrid.save_pretrained(folder)
    return hybrid


def save_menu_hybrid(folder: Path, family: str, sizes: Sequence[int]) -> HeadMask:
    """Save a hybrid with three windows; returns its mask, as read back from a file."""
    a, b, c = sizes
    mask = HeadMask(((0, a, b, c), (c, 0, b, b), (a, a, c, 0)))
    path = folder / "head_mask.json"
    HeadMaskFile(mask, "small", "given").save(path)
    mask = HeadMaskFile.load(path).mask
    model = small_model(family, **SIZES).float()
    materialize(model, mask).save_pretrained(folder)
    return mask


def save_quickstart(folder: Path, sinks: int = 0) -> None:
    """Save the quickstart's hybrid, with `sinks` sinks, and its tokenizer."""
    mask = HeadMask(QUICKSTART_MASK.mask.windows, sinks)
    base = load_model(QUICKSTART, dtype="float32")
    materialize(base, mask).save_pretrained(folder)
    for source in QUICKSTART.iterdir():
        if "token" in source.name or source.suffix == ".jinja":
            shutil.copyfile(source, folder / source.name)


def random_prompts(lengths: Sequence[int], seed: int = 0) -> list[list[int]]:
    """Prompts of random tokens."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, VOCABULARY, (n,), generator=generator).tolist() for n in lengths]


@contextmanager
def engine(folder: Path, **options: Any) -> Iterator[Any]:
    """vLLM on a model directory, in this process, and shut down afterwards."""
    from vllm import LLM
    from vllm.distributed import cleanup_dist_env_and_memory

    defaults = {
        "skip_tokenizer_init": True, "dtype": "float32", "enforce_eager": True,
        "max_model_len": 256, "max_num_batched_tokens": BATCH_TOKENS, "max_num_seqs": 8,
        "block_size": BLOCK,
    }  # fmt: skip
    llm = LLM(str(folder), **{**defaults, **options})
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        gc.collect()
        cleanup_dist_env_and_memory()


def generate(
    llm: Any, prompts: Sequence[list[int]], tokens: int, of_prompt: bool = True, **options: Any
) -> list[Any]:
    """Greedy outputs with log-probabilities of generated tokens and, if `of_prompt`, of the prompt.

    vLLM reuses no cached prefix for a request that asks for log-probabilities of its prompt.
    """
    from vllm import SamplingParams

    parameters = SamplingParams(
        temperature=0, max_tokens=tokens, logprobs=0, ignore_eos=True,
        prompt_logprobs=0 if of_prompt else None,
        detokenize=False,
    )  # fmt: skip
    requests = [{"prompt_token_ids": prompt} for prompt in prompts]
    return list(llm.generate(requests, parameters, use_tqdm=False, **options))


def load_reference(folder: Path) -> Any:
    """The model as transformers loads it."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def reference_logprobs(model: Any, ids: Sequence[int]) -> list[float]:
    """Log-probability of each token but the first, by transformers."""
    tokens = torch.tensor([list(ids)])
    with torch.inference_mode():
        logprobs = model(tokens, use_cache=False).logits[0].log_softmax(-1)
    return logprobs[:-1].gather(1, tokens[0, 1:, None])[:, 0].tolist()


def stated_logprobs(output: Any) -> list[float]:
    """vLLM's log-probability of each prompt token but the first, then of each generated one."""
    entries = [*(output.prompt_logprobs or [])[1:], *output.outputs[0].logprobs]
    return [next(iter(entry.values())).logprob for entry in entries]


def largest_difference(model: Any, prompt: list[int], output: Any) -> tuple[float, bool]:
    """Largest difference of vLLM's log-probabilities from transformers', and whether both agree.

    transformers reads the prompt and the generated tokens. The second value is True if each
    generated token is transformers' most likely one.
    """
    generated = list(output.outputs[0].token_ids)
    expected = reference_logprobs(model, [*prompt, *generated])
    stated = stated_logprobs(output)
    expected = expected[-len(stated) :]  # vLLM may state none of the prompt
    distance = max(abs(a - b) for a, b in zip(expected, stated, strict=True))
    with torch.inference_mode():
        logits = model(torch.tensor([[*prompt, *generated]]), use_cache=False).logits[0]
    best = logits[len(prompt) - 1 : -1].argmax(-1).tolist()
    return distance, best == generated
