"""MRCR (openai/mrcr; task of arXiv:2409.12640): repeat one of several answers to equal requests.

A conversation holds 2, 4 or 8 requests of the same wording; the model repeats the i-th answer after
a random string. The data is read in its public layout, Parquet or JSONL with the same fields.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from difflib import SequenceMatcher
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from bosch.errors import UserError
from data_prep.documents.records import read_rows
from data_prep.text import encode_answer
from stages.evaluate.chat import ChatTemplate, prompt_of
from stages.evaluate.prompt_suite import PromptSample
from stages.evaluate.suites.mrcr import Mrcr

logger = logging.getLogger(__name__)

FIELDS = ("prompt", "answer", "random_string_to_prepend", "n_needles")
_MAX_NEEDLES = 1000  # the published data has at most 8


class MrcrSample(NamedTuple):
    """A conversation that ends with the question, its answer, and the answer's prefix."""

    needles: int
    turns: list[dict[str, str]]
    answer: str
    prefix: str


def sample_of(row: Mapping[str, Any]) -> MrcrSample:
    """The sample of a row; raises KeyError, TypeError or ValueError for an invalid row."""
    prompt, answer, prefix, needles = (row[name] for name in FIELDS)
    if not isinstance(prompt, str):
        raise ValueError("prompt is no text that holds JSON")
    turns = [{"role": turn["role"], "content": turn["content"]} for turn in json.loads(prompt)]
    # Without one of these every output would have the same score.
    if not turns or not all(isinstance(text, str) and text for text in (answer, prefix)):
        raise ValueError("a conversation, its answer and the string before it must not be empty")
    texts = [text for turn in turns for text in turn.values()]
    "".join([answer, prefix, *texts]).encode()  # raises unless all are valid texts
    if type(needles) is not int or not 0 < needles < _MAX_NEEDLES:
        raise ValueError(f"n_needles is {needles!r:.60}")
    return MrcrSample(needles, turns, answer, prefix)


def plain_text(turns: list[dict[str, str]]) -> str:
    """The conversation up to the answer, for a model without a chat template."""
    spoken = [f"{turn['role'].capitalize()}: {turn['content']}" for turn in turns]
    return "\n\n".join([*spoken, "Assistant:"])


def score(output: str, answer: str, prefix: str) -> float:
    """Ratio of difflib's SequenceMatcher for output and answer after the random string.

    0 if the stripped output does not begin with the string.
    """
    output = output.strip()
    if not output.startswith(prefix):
        return 0.0
    return SequenceMatcher(None, output.removeprefix(prefix), answer.removeprefix(prefix)).ratio()


# No tokenizer's average is higher.
_CHARACTERS_PER_TOKEN = 16


def samples(
    section: Mrcr, tokenizer: Any, seed: int, chat: ChatTemplate | None
) -> Iterator[PromptSample]:
    """The samples of each length, the limit of the tokens of conversation and answer.

    Upstream counts with another tokenizer, so its bins hold other samples. Raises UserError
    when a file is not in the public layout.
    """
    counts = Counter[tuple[int, int]]()
    most_characters = _CHARACTERS_PER_TOKEN * max(section.lengths)
    for sample in read_samples(section.data_files, most_characters):
        open_lengths = [
            length
            for length in section.lengths
            if section.samples is None or counts[sample.needles, length] < section.samples
        ]
        if not open_lengths:
            continue
        answer = len(encode_answer(tokenizer, sample.answer))
        tokens = len(prompt_of(tokenizer, sample.turns, chat, plain_text)[1]) + answer
        for length in open_lengths:
            if not length / 2 < tokens <= length:
                continue
            counts[sample.needles, length] += 1
            yield PromptSample(
                f"{sample.needles} needles",
                length,
                turns=partial(getattr, sample, "turns"),
                answers=(sample.answer,),
                new_tokens=answer,
                plain=plain_text,
                score=partial(score, answer=sample.answer, prefix=sample.prefix),
            )


def read_samples(files: Iterable[Path], most_characters: int) -> Iterator[MrcrSample]:
    """The samples with at most `most_characters`, in order, without repeated rows.

    Raises UserError when a file or a row of it is not in the public layout.
    """
    digests, repeated = set[bytes](), Counter[Path]()
    for path in files:
        for number, row in enumerate(read_rows(path, FIELDS)):
            try:
                if len(row["prompt"]) > most_characters:
                    continue
                sample = sample_of(row)
            except (KeyError, TypeError, ValueError) as error:
                reason = f"lacks {error}" if isinstance(error, KeyError) else str(error)
                raise UserError(
                    f"{path}, row {number}: not in MRCR's layout ({reason}); its fields are "
                    f"{', '.join(FIELDS)}"
                ) from None
            digest = hashlib.sha256(repr(sample).encode()).digest()
            if digest in digests:
                repeated[path] += 1
                continue
            digests.add(digest)
            yield sample
    for path, rows in repeated.items():
        # Repeated rows would make the score look more certain than it is.
        logger.warning("%s: left out %d that equal an earlier row of MRCR's data", path, rows)
