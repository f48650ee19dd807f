"""Conversations in the words of the tokenizer's chat template, and which tokens are learnt.

Token ids are signed: `~id`, which is negative, stands for a token that is given and not learnt.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from bosch.errors import UserError

Messages = list[dict[str, Any]]
_MARK = re.compile(r"\{%-?\s*generation\b")
_EMPTY_THOUGHT = re.compile(r"\s*<think>\s*</think>\s*")


@dataclass(frozen=True)
class Conversation:
    """A document of messages, and where it is in its source."""

    messages: Messages
    place: Callable[[], str]


def messages_of(record: Mapping[str, Any], field: str) -> Messages | None:
    """The messages in `field` or `messages` of a record, or its `prompt` and `completion`."""
    for name in (field, "messages"):
        if isinstance(record.get(name), list):
            return record[name]
    prompt, completion = record.get("prompt"), record.get("completion")
    if prompt is None or completion is None:
        return None
    return [*_turns("user", prompt), *_turns("assistant", completion)]


def _turns(role: str, value: Any) -> Messages:
    return [{"role": role, "content": value}] if isinstance(value, str) else list(value)


def encode_conversation(
    tokenizer: Any, messages: Messages, answers_only: bool
) -> tuple[np.ndarray, int]:
    """Signed token ids [tokens] int32, with the end-of-text token, and bytes of the text.

    With `answers_only` the answers are learnt, each with the token that ends its turn. Raises
    ValueError if there is none, or the template renders earlier turns otherwise than before.
    """
    if tokenizer.chat_template is None:
        raise UserError(f"{tokenizer.name_or_path}: the tokenizer has no chat template")
    ids: list[int] = tokenizer.apply_chat_template(messages, return_dict=False)
    size = len(tokenizer.decode(ids).encode())
    learnt, is_open = [True] * len(ids), True
    if answers_only and _MARK.search(tokenizer.chat_template):
        marked = tokenizer.apply_chat_template(
            messages, return_dict=True, return_assistant_tokens_mask=True
        )
        learnt, is_open = list(map(bool, marked["assistant_masks"])), False
    elif answers_only:
        learnt, is_open = _derived(tokenizer, messages, ids)
    if not any(learnt):
        raise ValueError("no answer of the assistant to learn")
    if tokenizer.eos_token_id is not None and ids[-1] != tokenizer.eos_token_id:
        ids, learnt = [*ids, tokenizer.eos_token_id], [*learnt, is_open]
    signed = np.array(ids, np.int32)
    return np.where(learnt, signed, ~signed), size


def _derived(tokenizer: Any, messages: Messages, ids: list[int]) -> tuple[list[bool], bool]:
    """Which of `ids` are learnt, and whether the last one is of an answer without an end."""
    learnt, is_open = [False] * len(ids), False
    ends = {number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    for number, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before, upto = (
            tokenizer.apply_chat_template(part, return_dict=False, add_generation_prompt=prompts)
            for part, prompts in ((messages[:number], True), (messages[: number + 1], False))
        )
        if upto[: len(before)] != before or ids[: len(upto)] != upto:
            raise ValueError(
                f"the tokens up to message {number + 1} change with what the chat template puts "
                "after them; make a record of each answer, or mark the answers in the template "
                "({% generation %})"
            )
        begin = len(before) + _given(tokenizer, upto[len(before) :], message)
        special = [place for place in range(begin, len(upto)) if upto[place] in ends]
        end = special[-1] + 1 if special else len(upto)
        is_open = not special or bool(tokenizer.decode(upto[end:]).strip())
        if is_open:  # the next role's mark ends the turn
            end = min(len(upto) + 1, len(ids))
        learnt[begin:end] = [True] * (end - begin)
    return learnt, is_open and learnt[-1]


def _given(tokenizer: Any, answer: list[int], message: Mapping[str, Any]) -> int:
    """The number of tokens of an empty thought that the template puts before an answer."""
    found = _EMPTY_THOUGHT.match(tokenizer.decode(answer))
    if found is None or str(message.get("content")).lstrip().startswith("<think>"):
        return 0
    sizes = (len(tokenizer.decode(answer[:count])) for count in range(1, len(answer) + 1))
    return next(count for count, size in enumerate(sizes, 1) if size >= found.end())
