"""Conversations: which tokens training learns, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from datasets import load_from_disk

from bosch.errors import UserError
from data_prep.documents.encoding import encode_conversation
from data_prep.documents.sources import Conversation
from data_prep.documents.tokenizer import TokenizerSpec
from stages.context import ModelConfig, Runtime, StageConfig
from stages.prepare.run import write_training_data
from stages.prepare.stage import PrepareConfig
from stages.train.data import collate
from tests.tiny_data import save_tiny_model, tiny_tokenizer

_LOOP = "{% for m in messages %}"
CHATML = (
    _LOOP + "{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
# A turn is closed by the mark of the next role.
ROLES = (
    _LOOP + "{{ '<|' + m.role + '|>' + m.content }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
# An empty thought is put before the last answer.
THINKS = CHATML.replace(
    "m.content + '<",
    "(('<think>\\n\\n</think>\\n\\n' if loop.last and m.role == 'assistant' else '')"
    " + m.content) + '<",
)
MARKED = (
    _LOOP + "{{ '<|im_start|>' + m.role + '\\n' }}{% if m.role == 'assistant' %}{% generation %}"
    "{{ m.content + '<|im_end|>' }}{% endgeneration %}{% else %}{{ m.content + '<|im_end|>' }}"
    "{% endif %}{% endfor %}"
)
SPECIAL = ["<|im_start|>", "<|im_end|>", "<|user|>", "<|assistant|>"]
TALK = [
    {"role": "user", "content": "One?"}, {"role": "assistant", "content": "two three"},
    {"role": "user", "content": "Four?"}, {"role": "assistant", "content": "five"},
]  # fmt: skip


def chat_tokenizer(template: str) -> Any:
    tokenizer = tiny_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": SPECIAL})
    tokenizer.chat_template = template
    return tokenizer


def learnt(template: str, messages: list[dict[str, str]] = TALK) -> list[str]:
    """The text of each run of learnt tokens."""
    tokenizer = chat_tokenizer(template)
    signed = encode_conversation(tokenizer, Conversation(messages, "a"), True)
    ids = np.where(signed < 0, ~signed, signed).tolist()
    rendered = tokenizer.apply_chat_template(messages, tokenize=False)
    assert tokenizer.decode(ids) == rendered + "<|end|>"
    borders = [*(np.flatnonzero(np.diff(signed >= 0)) + 1).tolist(), len(ids)]
    parts = np.split(np.arange(len(ids)), borders[:-1])
    return [tokenizer.decode([ids[i] for i in part]) for part in parts if signed[part[0]] >= 0]


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (CHATML, ["two three<|im_end|>", "five<|im_end|>"]),
        (MARKED, ["two three<|im_end|>", "five<|im_end|>"]),
        (ROLES, ["two three<|user|>", "five<|end|>"]),
    ],
)
def test_answers_are_learnt_with_the_token_that_ends_their_turn(
    template: str, expected: list[str]
) -> None:
    assert learnt(template) == expected
    signed = encode_conversation(chat_tokenizer(template), Conversation(TALK, "a"), False)
    assert (signed >= 0).all()


def test_an_empty_thought_of_the_template_is_given() -> None:
    assert learnt(THINKS, TALK[:2]) == ["two three<|im_end|>"]
    with pytest.raises(UserError, match="a: the tokens up to message 2 change"):
        learnt(THINKS)


def test_labels_are_stored_with_the_packed_data(tmp_path: Path) -> None:
    model = save_tiny_model(tmp_path / "model")
    tokenizer = chat_tokenizer(CHATML)
    tokenizer.save_pretrained(model)
    settings = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(settings | {"vocab_size": 600}))
    records: list[dict[str, Any]] = [
        {"messages": TALK}, {"prompt": "One?", "completion": "six"}, {"messages": TALK[:1]},
    ]  # fmt: skip
    file = tmp_path / "a.jsonl"

    def prepare(lines: list[dict[str, Any]], folder: str) -> Any:
        file.write_text("".join(json.dumps(record) + "\n" for record in lines))
        source = {"name": "a", "kind": "jsonl", "path": str(file), "loss": "completion"}
        section = PrepareConfig(sequence_length=16, train_tokens=160, sources=[source])
        config = StageConfig(section, ModelConfig(path=str(model)), 0, Runtime(data_workers=1))
        write_training_data(config, TokenizerSpec(str(model)), tmp_path / folder)
        return load_from_disk(str(tmp_path / folder / "train")).with_format("numpy")

    rows = list(prepare(records[:2], "two"))
    batch = collate(rows)
    ids, labels = (batch[name].flatten() for name in ("input_ids", "labels"))
    kept = labels >= 0
    assert (labels[kept] == ids[kept]).all() and set(labels[~kept].tolist()) == {-100}
    text = tokenizer.decode(labels[kept].tolist())
    assert set(text.split("<|im_end|>")) >= {"two three", "five", "six"}
    for bad, said in ((records[2], "no answer of the assistant"), ({"text": "x"}, "no messages")):
        with pytest.raises(UserError, match=rf"a\.jsonl, line 2: {said}"):
            prepare([records[0], bad], said[:5])
