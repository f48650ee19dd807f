"""Token ids of documents and of conversations.

Those of a conversation are signed: `~id`, which is negative, stands for a token that is given and
not learnt.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from bosch.errors import UserError
from data_prep.documents.sources import Messages
from data_prep.documents.tokenizer import TokenizerSpec, load_tokenizer

# Characters that are encoded at once.
WINDOW = 2**17
OVERLAP = 2**12
_MARK = re.compile(r"\{%-?\s*generation\b")
_EMPTY_THOUGHT = re.compile(r"\s*<think>\s*</think>\s*")


@dataclass(frozen=True)
class Encoder:
    """All that a worker needs to tokenise documents; quick to load in a new process.

    `backend` is the tokenizer in the tokenizers library's JSON form; None for a tokenizer that does
    not use that library, which transformers loads from `spec`. The text of a special token in a
    document is ordinary text.
    """

    spec: TokenizerSpec
    backend: str | None
    end: int | None

    @classmethod
    def load(cls, spec: TokenizerSpec) -> Encoder:
        """Load the encoder of a model's tokenizer; raises UserError as `load_tokenizer`."""
        tokenizer = load_tokenizer(spec)
        backend = tokenizer.backend_tokenizer.to_str() if tokenizer.is_fast else None
        return cls(spec, backend, tokenizer.eos_token_id)

    def __call__(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Token ids [tokens] int32 of whole documents."""
        if self.backend is not None:
            batch = _backend(self.backend).encode_batch_fast(texts, add_special_tokens=False)
            return [_int32(encoding.ids) for encoding in batch]
        encoded = load_tokenizer(self.spec)(
            list(texts), add_special_tokens=False,
            split_special_tokens=True, verbose=False,
        )["input_ids"]  # fmt: skip
        return [_int32(ids) for ids in encoded]

    def conversation(self, messages: Messages, answers_only: bool) -> tuple[np.ndarray, int]:
        """Signed token ids of a conversation, and the bytes of its text."""
        return encode_conversation(load_tokenizer(self.spec), messages, answers_only)

    def long(self, text: str) -> Iterator[np.ndarray]:
        """Token ids of a document of any size, as if it were encoded at once.

        The tokenizers library needs more than 100 bytes for a character. So windows of the text
        are encoded, which overlap and are joined where they agree on every token in the middle of
        the overlap. If they do not agree anywhere (in a long repetition of a few characters), the
        text is cut (docs/notes/deviations.md).
        """
        if self.backend is None:
            yield from self([text])
        else:
            yield from _encode_windows(_backend(self.backend), text)


@dataclass(frozen=True)
class _Window:
    """The tokens of a window of the text, with their places in the whole text."""

    ids: np.ndarray  # [tokens] int32
    spans: np.ndarray  # [tokens, 2] int64, in characters

    @classmethod
    def encode(cls, backend: Any, text: str, at: int) -> _Window:
        [encoding] = backend.encode_batch([text], add_special_tokens=False)
        spans = np.array(encoding.offsets, np.int64).reshape(-1, 2) + at
        return cls(_int32(encoding.ids), spans)

    def between(self, begin: int, end: int) -> tuple[int, int]:
        """Range of the tokens that begin in the characters [begin, end)."""
        start, stop = np.searchsorted(self.spans[:, 0], [begin, end])
        return int(start), int(stop)


def _encode_windows(backend: Any, text: str) -> Iterator[np.ndarray]:
    def encode(begin: int) -> _Window:
        return _Window.encode(backend, text[begin : begin + WINDOW], begin)

    begin, first = 0, 0  # where the window begins; its first token to emit
    window = encode(0)
    while len(text) > (end := begin + WINDOW):
        overlap = OVERLAP
        while overlap <= WINDOW // 2:
            begin = end - overlap
            following = encode(begin)
            cut = _agreement(window, following, begin, overlap)
            if cut is not None and cut[0] >= first:
                break
            overlap *= 2
        else:
            stop = window.between(end - OVERLAP, end - OVERLAP)[0]
            begin = int(window.spans[stop, 0]) if stop < len(window.ids) else end
            following, cut = encode(begin), (max(stop, first), 0)
        yield window.ids[first : cut[0]]
        window, first = following, cut[1]
    yield window.ids[first:]


def _agreement(
    first: _Window, second: _Window, begin: int, characters: int
) -> tuple[int, int] | None:
    """Where to join two windows that share `characters` from `begin`: next token of each.

    None unless they agree on every token in the middle half, since near its ends a window's tokens
    depend on text outside.
    """
    middle = begin + characters // 4, begin + characters - characters // 4
    start, stop = first.between(*middle)
    other_start, other_stop = second.between(*middle)
    agree = (
        stop > start
        and np.array_equal(first.ids[start:stop], second.ids[other_start:other_stop])
        and np.array_equal(first.spans[start:stop], second.spans[other_start:other_stop])
    )
    half = (stop - start) // 2
    return (start + half, other_start + half) if agree else None


def _int32(ids: list[int]) -> np.ndarray:
    # array converts a list of unsigned numbers four times as fast as numpy.
    return np.frombuffer(array("I", ids), np.int32)


@lru_cache(maxsize=2)
def _backend(serialised: str) -> Any:
    from tokenizers import Tokenizer

    backend = Tokenizer.from_str(serialised)
    backend.no_truncation()
    backend.no_padding()
    backend.encode_special_tokens = True  # as ordinary text
    # The post-processor adds special tokens, which documents do not need, and copies every token.
    backend.post_processor = None
    return backend


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
