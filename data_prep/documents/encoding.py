"""Token ids of documents and of conversations.

Those of a conversation are signed: `~id`, which is negative, stands for a token that is given and
not learnt.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from bosch.errors import UserError
from data_prep.documents.sources import Conversation, Messages, Tokens

# Characters that are encoded at once: the tokenizers library needs more than 100 bytes for each.
WINDOW = 2**17
_BEFORE_BLANK = re.compile(r".*\S(?= \S)", re.DOTALL)
_MARK = re.compile(r"\{%-?\s*generation\b")
_EMPTY_THOUGHT = re.compile(r"\s*<think>\s*</think>\s*")


def encode(tokenizer: Any, text: str) -> np.ndarray:
    """Token ids [tokens] int32 of a document and the end-of-text token, if there is one.

    The text of a special token is ordinary text. A long document is cut before blanks between
    words, where tokenizers begin a token.
    """
    encoded = tokenizer(
        [*_pieces(text)], add_special_tokens=False, split_special_tokens=True,
        return_attention_mask=False, return_token_type_ids=False, verbose=False,
    )["input_ids"]  # fmt: skip
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    return np.concatenate([np.array(ids, np.int32) for ids in (*encoded, end)])


def _pieces(text: str) -> Iterator[str]:
    begin = 0
    while len(text) - begin > WINDOW:
        cut = _BEFORE_BLANK.match(text, begin, begin + WINDOW)
        end = cut.end() if cut else begin + WINDOW
        yield text[begin:end]
        begin = end
    yield text[begin:]


def decode(tokenizer: Any, tokens: Tokens) -> str:
    """The text of another model's tokens; raises UserError for a token it does not know."""
    for token in (int(tokens.ids.min()), int(tokens.ids.max())) if tokens.ids.size else ():
        if not 0 <= token < len(tokenizer):
            raise UserError(
                f"{tokens.place}: token {token} is not in the vocabulary of "
                f"{tokenizer.name_or_path}; name the tokenizer the shards were written with"
            )
    return tokenizer.decode(
        tokens.ids.tolist(), skip_special_tokens=True, clean_up_tokenization_spaces=False
    )


def encode_conversation(
    tokenizer: Any, conversation: Conversation, answers_only: bool
) -> np.ndarray:
    """Signed token ids [tokens] int32, with the end-of-text token.

    With `answers_only` the answers are learnt, each with the token that ends its turn. Raises
    UserError, with the record's place, if there is none, or the template fails or renders earlier
    turns otherwise than before.
    """
    if tokenizer.chat_template is None:
        raise UserError(f"{tokenizer.name_or_path}: the tokenizer has no chat template")
    try:
        return _rendered(tokenizer, conversation.messages, answers_only)
    except Exception as error:  # of the template
        reason = " ".join(str(error).split())
        raise UserError(f"{conversation.place}: {reason}") from None


def _rendered(tokenizer: Any, messages: Messages, answers_only: bool) -> np.ndarray:
    ids: list[int] = tokenizer.apply_chat_template(messages, return_dict=False)
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
    return np.where(learnt, signed, ~signed)


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
