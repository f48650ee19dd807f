"""Greedy generation in batches of similar length."""

from __future__ import annotations

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

    `tail` is the end of its text; with `any_answer` one of the answers is enough.
    """

    index: int
    prompt_ids: np.ndarray  # [T] int32
    answers: list[str]
    tail: str = ""
    any_answer: bool = False


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
) -> Iterator[list[tuple[Question, str]]]:
    """`generate_ids` with the text of each answer."""
    for batch in generate_ids(model, tokenizer, questions, max_new_tokens, batch_size):
        yield [(question, decode(tokenizer, ids)) for question, ids in batch]


def generate_ids(
    model: Any,
    tokenizer: Any,
    questions: Sequence[Question],
    max_new_tokens: int,
    batch_size: int,
) -> Iterator[list[tuple[Question, torch.Tensor]]]:
    """Batches of questions with the ids generated for each; the longest prompts come first.

    A sequence ends at the model's end token, at `max_new_tokens`, or when it contains every answer
    to its question. Where RoPE depends on the longest row, each question is a batch of its own.
    Raises ModelError if a prompt with its answer exceeds the model's positions.
    """
    positions = max_positions(model.config)
    if rope_depends_on_length(model.config):
        batch_size = 1

    # Prompts of a batch differ little in length, so little is padded.
    order = sorted(questions, key=lambda q: (-len(q.prompt_ids), q.index))
    # The last token of an answer is never an input.
    longest = len(order[0].prompt_ids) if order else 0
    if positions is not None and longest + max_new_tokens - 1 > positions:
        raise ModelError(
            f"a prompt of {longest:,} tokens and an answer of {max_new_tokens:,} "
            f"are more than its {positions:,} positions"
        )
    for start in range(0, len(order), batch_size):
        batch = order[start : start + batch_size]
        answers = _generate_batch(model, tokenizer, batch, max_new_tokens)
        yield list(zip(batch, answers, strict=True))


@torch.inference_mode()
def _generate_batch(
    model: Any,
    tokenizer: Any,
    batch: Sequence[Question],
    max_new_tokens: int,
) -> list[torch.Tensor]:
    ends = _end_tokens(model)
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
    return [_without_end(row[length:], pad) for row in output]


def _without_end(ids: torch.Tensor, pad: int) -> torch.Tensor:
    """An answer [tokens] without the padding of its row."""
    content = (ids != pad).nonzero()
    return ids[: int(content[-1]) + 1 if len(content) else 0]


def _end_tokens(model: Any) -> list[int] | None:
    """Ids of the tokens that end a sequence, from the model's generation settings."""
    ends = model.generation_config.eos_token_id
    tokens = [ends] if isinstance(ends, int) else list(ends or ())
    if not all(isinstance(token, int) for token in tokens):
        raise ModelError(f"the eos_token_id of its generation settings is {ends!r:.60}")
    return tokens or None
