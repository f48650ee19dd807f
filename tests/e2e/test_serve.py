"""transformers' server, as its own command, serves a hybrid model to OpenAI's client."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bosch.model.materialize import materialize
from bosch.window import Window
from tests.hybrid_case import random_mask, small_model
from tests.model_server import running
from tests.tiny_data import tiny_tokenizer

pytestmark = pytest.mark.skipif(
    not all(importlib.util.find_spec(name) for name in ("openai", "fastapi", "uvicorn")),
    reason="the extra 'serve' is not installed",
)

WINDOW, NEW_TOKENS = 7, 16
PROMPT = "A statement that raises an exception is one of the simple statements of the language."


@contextlib.contextmanager
def _server(model: Path, work: Path) -> Iterator[str]:
    """`transformers serve` for `model` on the loopback; its address."""
    command = [str(Path(sys.executable).with_name("transformers")), "serve", str(model)]
    options = ["--trust-remote-code", "--device", "cpu", "--host", "127.0.0.1", "--port"]
    environment = dict(os.environ, HF_MODULES_CACHE=str(work / "cache"), OMP_NUM_THREADS="1")
    with running(
        lambda port: [*command, *options, port], work / "server.log", cwd=work, env=environment
    ) as address:
        yield address


def _greedy(model: Any, tokenizer: Any) -> str:
    inputs = tokenizer(PROMPT, return_tensors="pt")
    generated = model.generate(**inputs, max_new_tokens=NEW_TOKENS, do_sample=False)
    return str(
        tokenizer.decode(generated[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    )


def test_the_client_gets_the_greedy_text_of_the_hybrid(tmp_path: Path) -> None:
    import openai  # takes a second, which every process that collects tests would spend

    model, tokenizer = small_model(vocab_size=512), tiny_tokenizer()
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    hybrid = materialize(model, random_mask(Window(WINDOW)))
    expected = _greedy(hybrid, tokenizer)
    assert expected != _greedy(model, tokenizer), "the window must matter"
    folder = tmp_path / "model"
    hybrid.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    request = {"model": str(folder), "max_tokens": NEW_TOKENS, "temperature": 0}
    with _server(folder, tmp_path) as address:
        client = openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0)
        completion = client.completions.create(prompt=PROMPT, **request)
        messages = [{"role": "user", "content": PROMPT}]
        chat = client.chat.completions.create(messages=messages, **request)
        stream = client.chat.completions.create(messages=messages, stream=True, **request)
        streamed = "".join(part.choices[0].delta.content or "" for part in stream if part.choices)
    assert completion.choices[0].text == expected
    assert chat.choices[0].message.content == expected
    assert streamed == expected.rstrip("\ufffd")  # a stream drops an incomplete last character
