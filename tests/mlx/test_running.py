"""mlx-lm on the quickstart's hybrid: tokens, bytes of the cache, its commands and its server."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("mlx_lm")

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import torch
from mlx.utils import tree_flatten
from mlx_lm.convert import convert
from mlx_lm.generate import batch_generate, generate_step
from mlx_lm.models.cache import load_prompt_cache, make_prompt_cache, save_prompt_cache
from mlx_lm.tuner.trainer import grad_checkpoint
from mlx_lm.utils import load, load_model
from transformers import AutoTokenizer

from bosch.engines.mlx.models import register
from bosch.errors import UserError
from bosch.masks import HeadMask
from bosch.model.cache_size import CacheSize
from bosch.model.families import decoder_layers
from tests.model_server import running
from tests.vllm_case import (
    QUICKSTART,
    QUICKSTART_MASK,
    load_reference,
    random_prompts,
    save_hybrid,
    save_quickstart,
)

ROOT = Path(__file__).resolve().parents[2]
COMMAND = [sys.executable, "-m", "bosch.engines.mlx"]
_STEP = 256  # tokens by which mlx-lm's caches grow
_PATIENCE_SECONDS = 300

register()


@pytest.fixture(scope="module", params=[0, 4], ids=["no sinks", "4 sinks"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("quickstart") / "model"
    save_quickstart(path, request.param)
    return path


@pytest.fixture(scope="module")
def model(folder: Path) -> tuple[Any, Any]:
    return load(str(folder))


@pytest.fixture(scope="module")
def reference(folder: Path) -> Any:
    return load_reference(folder)


@pytest.fixture(scope="module")
def prompts(folder: Path) -> list[list[int]]:
    """Texts of this repository: below, at and far beyond the window of 128."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer((ROOT / "README.md").read_text(encoding="utf-8"))["input_ids"]
    lengths = (3, 64, 127, 128, 129, 132, 133, 300, 512, 513, 700)
    return [ids[7 * n : 7 * n + length] for n, length in enumerate(lengths)]


def assert_greedy(reference: Any, prompt: list[int], tokens: list[int]) -> None:
    """Each token is transformers' most likely one after those before it, as in `generate`."""
    with torch.inference_mode():
        logits = reference(torch.tensor([prompt + tokens]), use_cache=False).logits[0]
    assert logits[len(prompt) - 1 : -1].argmax(-1).tolist() == tokens, len(prompt)


def by_mlx(model: Any, prompt: list[int], tokens: int, **options: Any) -> list[int]:
    steps = generate_step(mx.array(prompt), model, max_tokens=tokens, **options)
    return [int(token) for token, _ in islice(steps, tokens)]


def text_after(model: Any, prompt: str, tokens: int) -> str:
    """The text after a prompt, from the tokens that are compared with transformers' above."""
    tokenizer = model[1]
    ids = by_mlx(model[0], tokenizer.encode(prompt), tokens)
    ends = [n for n, token in enumerate(ids) if token in tokenizer.eos_token_ids]
    return str(tokenizer.decode(ids[: ends[0] if ends else None]))


def streamed_after(model: Any, prompt: str, tokens: int) -> str:
    """`text_after` as mlx-lm's command and server give it: without a space at its beginning."""
    return text_after(model, prompt, tokens).removeprefix(" ")


def size_of(folder: Path, model: Any) -> CacheSize:
    mask = HeadMask(QUICKSTART_MASK.mask.windows, _sinks(folder))
    return CacheSize.of(mask.layers, decoder_layers(model.args.hybrid_config), 4, state_bytes=0)


def _sinks(folder: Path) -> int:
    return int(json.loads((folder / "config.json").read_text())["hybrid_attention"]["sinks"])


@pytest.mark.parametrize("step", [2048, 100])
def test_tokens_equal_those_of_generate(
    model: Any, reference: Any, prompts: list[list[int]], step: int
) -> None:
    for prompt in prompts:
        assert_greedy(reference, prompt, by_mlx(model[0], prompt, 12, prefill_step_size=step))


def test_the_cache_holds_the_bytes_of_the_formula(
    folder: Path, model: Any, prompts: list[list[int]]
) -> None:
    """That of a static cache, rounded up to whole steps, after one generated token."""
    size = size_of(folder, model[0])
    for prompt in prompts[-3:]:
        cache = make_prompt_cache(model[0])
        by_mlx(model[0], prompt, 8, prompt_cache=cache)
        tokens = cache[0].offset
        assert tokens >= len(prompt)
        held = sum(layer.nbytes for layer in cache)
        assert held == size.static(-(-tokens // _STEP) * _STEP)
        assert held < size.original(tokens) / 3


def test_quantised_caches_hold_full_heads_in_fewer_bits(
    folder: Path, model: Any, prompts: list[list[int]]
) -> None:
    caches: list[list[Any]] = [make_prompt_cache(model[0]) for _ in range(2)]
    options: dict[str, Any] = {"kv_bits": 8, "kv_group_size": 32, "quantized_kv_start": 0}
    for cache, own in zip(caches, ({}, options), strict=True):
        by_mlx(model[0], prompts[-1], 8, prompt_cache=cache, **own)
    size = size_of(folder, model[0])
    plain, quantised = (sum(layer.nbytes for layer in cache) for cache in caches)
    # 8 bits a number, and for 32 of them a scale and an offset in float32, instead of 32 bits.
    assert quantised == pytest.approx(
        size.sliding_bytes + (plain - size.sliding_bytes) * 10 / 32, rel=0.05
    )


def test_a_batch_gives_the_tokens_of_single_requests(
    folder: Path, model: Any, prompts: list[list[int]]
) -> None:
    some = prompts[1:8]
    if _sinks(folder):
        # mlx-lm's batched caches would drop the sinks; its server asks for this attribute.
        assert not any(hasattr(layer, "merge") for layer in make_prompt_cache(model[0]))
        with pytest.raises(ValueError, match="does not yet support batching"):
            batch_generate(*model, some, max_tokens=16)
        return
    texts = [model[1].decode(prompt) for prompt in some]
    answers = batch_generate(*model, [model[1].encode(text) for text in texts], max_tokens=16)
    assert answers.texts == [text_after(model, text, 16) for text in texts]


def test_generation_continues_from_a_saved_cache(
    tmp_path: Path, model: Any, reference: Any, prompts: list[list[int]]
) -> None:
    prompt, path = prompts[-1], str(tmp_path / "cache.safetensors")
    cache = make_prompt_cache(model[0])
    model[0](mx.array([prompt[:600]]), cache=cache)
    save_prompt_cache(path, cache)
    restored = load_prompt_cache(path)
    assert [type(layer) for layer in restored] == [type(layer) for layer in cache]
    assert_greedy(reference, prompt, by_mlx(model[0], prompt[600:], 12, prompt_cache=restored))


def test_converted_weights_can_be_run(
    folder: Path, tmp_path: Path, model: Any, prompts: list[list[int]]
) -> None:
    """Of 8 bits, which change logits by less than a hundredth of the largest."""
    out = tmp_path / "converted"
    convert(str(folder), str(out), quantize=True, q_bits=8, q_group_size=32)
    quantised, _ = load(str(out))
    weights = sum(path.stat().st_size for path in out.glob("*.safetensors"))
    assert weights < 0.35 * sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    tokens = mx.array([prompts[-1]])
    expected, logits = model[0](tokens), quantised(tokens)
    assert 0 < mx.abs(logits - expected).max() < 0.05 * mx.abs(expected).max()
    assert [len(layer.caches) for layer in quantised.make_cache()] == [
        len(layer.caches) for layer in model[0].make_cache()
    ]


def test_experts_are_converted_once(tmp_path: Path) -> None:
    """A hybrid joins experts and mlx-lm stacks them; its own format is not changed."""
    save_hybrid(tmp_path / "hybrid", "qwen3_moe", [1, 3, 2], 8)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(QUICKSTART / name, tmp_path / "hybrid" / name)
    outputs = []
    source = tmp_path / "hybrid"
    for n in range(2):
        target = tmp_path / f"mlx{n}"
        convert(str(source), str(target))
        outputs.append(load(str(target))[0](mx.array(random_prompts([40]))))
        source = target
    assert mx.array_equal(*outputs)


def test_the_command_prints_these_tokens(
    folder: Path, model: Any, prompts: list[list[int]]
) -> None:
    prompt = model[1].decode(prompts[7])
    done = subprocess.run(
        [*COMMAND, "generate", "--model", str(folder), "--prompt", prompt, "--max-tokens",
         "16", "--temp", "0", "--verbose", "False", "--ignore-chat-template"],
        cwd=ROOT, capture_output=True, text=True, timeout=_PATIENCE_SECONDS, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout == streamed_after(model, prompt, 16) + "\n"


@pytest.fixture(scope="module")
def address(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    command = [*COMMAND, "server", "--model", str(folder), "--port"]
    log = tmp_path_factory.mktemp("server") / "log"
    with running(lambda port: [*command, port], log, cwd=ROOT) as url:
        yield url


def test_the_server_answers_concurrent_clients(
    address: str, model: Any, prompts: list[list[int]]
) -> None:
    """Together without sinks, otherwise one after another; the tokens are the same."""
    texts = [model[1].decode(prompt) for prompt in prompts[2:8]]

    def ask(text: str) -> str:
        body = {"model": "default_model", "prompt": text, "max_tokens": 12, "temperature": 0}
        request = urllib.request.Request(
            f"{address}/v1/completions", json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )  # fmt: skip
        with urllib.request.urlopen(request, timeout=_PATIENCE_SECONDS) as answer:
            return str(json.load(answer)["choices"][0]["text"])

    with ThreadPoolExecutor(len(texts)) as pool:
        answers = list(pool.map(ask, texts))
    assert answers == [streamed_after(model, text, 12) for text in texts]


@pytest.mark.parametrize("length", [5, 40])
@pytest.mark.parametrize("checkpointed", [False, True])
def test_gradients_equal_those_of_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, length: int, checkpointed: bool
) -> None:
    """Within a window of 8 and beyond it; with checkpointing each layer is computed twice."""
    hybrid = save_hybrid(tmp_path, "qwen3", (4, 1, 3), 8)
    ids = torch.tensor(random_prompts([length, length]))
    logits = hybrid(input_ids=ids[:, :-1], use_cache=False).logits
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()).backward()
    model, _ = load_model(tmp_path)
    if checkpointed:
        kind = type(model.layers[0])
        monkeypatch.setattr(kind, "__call__", kind.__call__)  # mlx-lm replaces it for good
        grad_checkpoint(model.layers[0])

    def loss(model: Any, tokens: Any) -> Any:
        return nn.losses.cross_entropy(model(tokens[:, :-1]), tokens[:, 1:]).mean()

    gradients = dict(tree_flatten(nn.value_and_grad(model, loss)(model, mx.array(ids.numpy()))[1]))
    for name, parameter in hybrid.named_parameters():
        expected, found = parameter.grad, torch.from_numpy(np.array(gradients[name]))
        assert (found - expected).abs().max() < 1e-4 * expected.abs().max(), name


def test_faults_are_one_sentence(folder: Path, tmp_path: Path) -> None:
    """A damaged model, a draft, which no full window can take back, and a batch with sinks."""
    shutil.copytree(folder, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    config["hybrid_attention"]["windows"][0].append(7)
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    small = ["--prompt-tokens", "8", "--generation-tokens", "2", "--num-trials", "1"]
    for model, arguments, said in (
        (tmp_path / "model", ["generate", "--prompt", "x"], "hybrid_attention is damaged"),
        (folder, ["generate", "--draft-model", str(folder), "--prompt", "x", "--max-tokens", "4",
                  "--ignore-chat-template"], "error: --draft-model: "),
        (folder, ["benchmark", "--batch-size", "2", *small],
         "error: mlx-lm batches no hybrid with sinks" if _sinks(folder) else None),
    ):  # fmt: skip
        done = subprocess.run(
            [*COMMAND, *arguments, "--model", str(model)],
            cwd=ROOT, capture_output=True, text=True, timeout=_PATIENCE_SECONDS, check=False,
        )  # fmt: skip
        assert done.returncode == (2 if said else 0), done.stderr
        assert "Traceback" not in done.stderr
        assert said is None or said in done.stderr.splitlines()[-1]


def test_caches_of_another_model_are_refused(model: Any) -> None:
    with pytest.raises(UserError, match="caches of another one"):
        model[0](mx.array([[1, 2]]), cache=make_prompt_cache(model[0])[1:])
    other = make_prompt_cache(model[0])
    next(
        cache_layer for cache_layer in other[0].caches if hasattr(cache_layer, "max_size")
    ).max_size += 1
    with pytest.raises(UserError, match="caches of another one"):
        model[0](mx.array([[1, 2]]), cache=other)
    with pytest.raises(UserError, match="not shared among several machines"):
        model[0].shard()
