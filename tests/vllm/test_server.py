"""`vllm serve` on the quickstart's hybrid, asked through OpenAI's client."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from openai import OpenAI

from bosch.engines.vllm.plan import CPU_BLOCK_SIZE, Request, batch_tokens, engine_heads, module_plan
from tests.model_server import running
from tests.vllm_case import (
    QUICKSTART,
    QUICKSTART_MASK,
    load_reference,
    reference_logprobs,
    save_hybrid,
    save_quickstart,
)

ROOT = Path(__file__).resolve().parents[2]
_PATIENCE_SECONDS = 600


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("quickstart") / "model"
    save_quickstart(path)
    return path


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("server") / "log"
    return path


@pytest.fixture(scope="module")
def client(folder: Path, log: Path) -> Iterator[OpenAI]:
    """A server by the command of docs/guide/serving.md."""
    command = [str(Path(sys.executable).with_name("vllm")), "serve", str(folder), "--port"]
    options = ["--served-model-name", "hybrid", "--dtype", "float32", "--enforce-eager"]
    variables = {**os.environ, "VLLM_LOGGING_LEVEL": "INFO"}
    with running(lambda port: [*command, port, *options], log, env=variables) as address:
        yield OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0)


def test_completions_have_transformers_logprobs(client: OpenAI, folder: Path) -> None:
    """Of a text longer than the window of 128 tokens."""
    from transformers import AutoTokenizer

    text = (ROOT / "README.md").read_text(encoding="utf-8")[:1500]
    answer: Any = client.completions.create(
        model="hybrid", prompt=text, max_tokens=20, temperature=0, logprobs=0, echo=True
    )
    ids = AutoTokenizer.from_pretrained(folder)(text)["input_ids"]
    stated = answer.choices[0].logprobs.token_logprobs
    assert len(ids) > 200 and len(stated) == len(ids) + answer.usage.completion_tokens
    expected = reference_logprobs(load_reference(folder), ids)
    torch.testing.assert_close(
        torch.tensor(stated[1 : len(ids)]), torch.tensor(expected), rtol=0, atol=1e-4
    )


def test_the_cache_holds_what_the_plan_states(client: OpenAI, log: Path) -> None:
    """With the documented command, which sets only the memory of the cache."""
    config = json.loads((QUICKSTART / "config.json").read_text())
    length = config["max_position_embeddings"]
    in_flight = batch_tokens([window.size for window in QUICKSTART_MASK.mask.menu], 2048)
    request = Request(length, CPU_BLOCK_SIZE, in_flight)
    plan = module_plan(engine_heads(QUICKSTART_MASK.mask.layers), request)
    held = plan.request_bytes(request, 2 * config["head_dim"] * 4)
    line = re.search(r"CPU KV cache size: ([\d,]+) tokens", log.read_text())
    assert line is not None
    # The last block that fits is a part of a request.
    assert int(line[1].replace(",", "")) == pytest.approx(2**30 / held * length, rel=1e-4)


def test_a_refusal_is_one_sentence(tmp_path: Path) -> None:
    """Before an engine starts, and without a traceback."""
    save_hybrid(tmp_path, "qwen3", [1, 3, 2], 40, sinks=3)
    command = [str(Path(sys.executable).with_name("vllm")), "serve", str(tmp_path)]
    done = subprocess.run(
        [*command, "--dtype", "float32", "--skip-tokenizer-init"],
        capture_output=True, text=True, timeout=_PATIENCE_SECONDS, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert "Traceback" not in done.stderr + done.stdout
    assert done.stderr.splitlines()[-1].startswith("error: hybrid_attention.sinks is 3: ")
