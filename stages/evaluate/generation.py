"""Greedy generation in batches of similar length."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
)

from bosch.model.families import max_positions, rope_depends_on_length
from data_prep.tasks.needles import string_match
from stages.evaluate.answers import ModelError

_NAN_LOGITS = "its logits are no numbers (NaN)"


@dataclass(frozen=True)
class Question:
    """A prompt to continue and the answers to look for in the output.

    `tail` is the end of its text; with `any_answer` one of the answers is enough. `new_tokens`
    limits this question's output, if it is below the batch's limit.
    """

    index: int
    prompt_ids: np.ndarray  # [T] int32
    answers: list[str]
    tail: str = ""
    any_answer: bool = False
    new_tokens: int | None = None


class _AllAnswersGiven(StoppingCriteria):
    """Ends a sequence whose text holds every answer: more text cannot change its score."""

    def __init__(self, tokenizer: Any, questions: Sequence[Question], prompt_length: int) -> None:
        self._tokenizer, self._questions, self._start = tokenizer, questions, prompt_length
        self._done = [False] * len(questions)

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        for row, question in enumerate(self._questions):
            if question.answers and not self._done[row]:
                text = decode(self._tokenizer, input_ids[row, self._start :])
                self._done[row] = string_match(text, question.answers, question.any_answer) == 1.0
        return torch.tensor(self._done, device=input_ids.device)


class NanCheck(LogitsProcessor):  # type: ignore[misc]
    """Remembers whether a step had NaN logits, which greedy decoding would choose."""

    def __init__(self) -> None:
        self._has_nan: torch.Tensor | bool = False

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self._has_nan = scores.isnan().any() | self._has_nan
        return scores

    def check(self) -> None:
        if self._has_nan:
            raise ModelError(_NAN_LOGITS)


def refuse_nan(logits: torch.Tensor) -> None:
    """Raise ModelError for NaN logits."""
    if logits.isnan().any():
        raise ModelError(_NAN_LOGITS)


def decode(tokenizer: Any, ids: torch.Tensor) -> str:
    """Generated ids as text without special tokens."""
    return tokenizer.decode(
        ids.tolist(), skip_special_tokens=True, clean_up_tokenization_spaces=False
    )


def generate(
    model: Any,
    tokenizer: Any,
    questions: Sequence[Question],
    max_new_tokens: int,
    batch_size: int,
    *,
    stop_at_newline: bool = False,
    not_empty: bool = False,
) -> Iterator[list[tuple[Question, str]]]:
    """Batches of questions with the text generated for each; the longest prompts come first.

    A sequence ends at the model's end token, at `max_new_tokens`, or when it contains every answer
    to its question. With `stop_at_newline` it also ends at a line break; with `not_empty` it has at
    least one token. Where RoPE depends on the longest row, each question is a batch of its own.
    Raises ModelError if a prompt with its answer exceeds the model's positions.
    """
    positions = max_positions(model.config)
    if rope_depends_on_length(model.config):
        batch_size = 1

    def room(question: Question) -> int:
        """Most tokens of an answer within the positions; its last token is never an input."""
        return (positions or sys.maxsize) + 1 - len(question.prompt_ids)

    # Prompts of a batch differ little in length, so little is padded.
    order = sorted(questions, key=lambda q: (-len(q.prompt_ids), q.index))
    for question in order:
        limit = question.new_tokens or max_new_tokens
        if limit > room(question):
            raise ModelError(
                f"a prompt of {len(question.prompt_ids):,} tokens and an answer of {limit:,} are "
                f"more than its {positions:,} positions"
            )
    # An answer's limit depends on its question only, not on the other questions of the batch.
    short_of_room = [question for question in order if room(question) < max_new_tokens]
    with_room = order[len(short_of_room) :]
    batches = [[question] for question in short_of_room]
    batches += [with_room[at : at + batch_size] for at in range(0, len(with_room), batch_size)]
    for batch in batches:
        limit = min(max_new_tokens, room(batch[0]))
        texts = _generate_batch(model, tokenizer, batch, limit, stop_at_newline, not_empty)
        yield list(zip(batch, texts, strict=True))


@torch.inference_mode()
def _generate_batch(
    model: Any,
    tokenizer: Any,
    batch: Sequence[Question],
    max_new_tokens: int,
    stop_at_newline: bool,
    not_empty: bool,
) -> list[str]:
    ends = _end_tokens(model, tokenizer, stop_at_newline)
    pad = next((id for id in (tokenizer.pad_token_id, *(ends or ())) if id is not None), 0)
    length = max(len(question.prompt_ids) for question in batch)
    ids = torch.full((len(batch), length), pad, dtype=torch.long)  # [B, T]
    mask = torch.zeros_like(ids)
    for row, question in enumerate(batch):
        ids[row, length - len(question.prompt_ids) :] = torch.from_numpy(question.prompt_ids)
        mask[row, length - len(question.prompt_ids) :] = 1
    settings = GenerationConfig(
        do_sample=False,
        max_new_tokens=max_new_tokens,
        eos_token_id=ends,
        min_new_tokens=1 if not_empty else None,
        pad_token_id=pad,
        use_cache=True,
    )
    ids, mask = ids.to(model.device), mask.to(model.device)
    nan_check = NanCheck()
    saved, model.generation_config = model.generation_config, GenerationConfig()
    try:  # unset fields come from the model's generation_config.json
        output = model.generate(
            ids,
            attention_mask=mask,
            generation_config=settings,
            logits_processor=LogitsProcessorList([nan_check]),
            stopping_criteria=StoppingCriteriaList([_AllAnswersGiven(tokenizer, batch, length)]),
        )
    finally:
        model.generation_config = saved
    nan_check.check()
    return [decode(tokenizer, _without_end(row[length:], pad)) for row in output]


def _without_end(ids: torch.Tensor, pad: int) -> torch.Tensor:
    """An answer [tokens] without the padding of its row."""
    content = (ids != pad).nonzero()
    return ids[: int(content[-1]) + 1 if len(content) else 0]


def _end_tokens(model: Any, tokenizer: Any, stop_at_newline: bool) -> list[int] | None:
    """Ids of the tokens that end a sequence, from the model's generation settings."""
    ends = model.generation_config.eos_token_id
    tokens = [ends] if isinstance(ends, int) else list(ends or ())
    if not all(isinstance(token, int) for token in tokens):
        raise ModelError(f"the eos_token_id of its generation settings is {ends!r:.60}")
    if stop_at_newline:
        tokens.append(tokenizer.encode("\n", add_special_tokens=False)[-1])
    return tokens or None
