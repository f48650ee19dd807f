"""MRCR's samples for the suite of prompts; a task for each count of needles."""

from __future__ import annotations

import hashlib
import logging
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from bosch.errors import UserError
from data_prep.documents.records import read_rows
from data_prep.tasks import mrcr
from data_prep.text import encode_answer
from stages.evaluate.chat import ChatTemplate
from stages.evaluate.prompt_sections import MrcrEvaluation
from stages.evaluate.prompt_suite import PromptSample

logger = logging.getLogger(__name__)

# More than any tokenizer's tokens have on average.
_CHARACTERS_PER_TOKEN = 16


def samples(
    section: MrcrEvaluation, tokenizer: Any, seed: int, chat: ChatTemplate | None
) -> list[PromptSample]:
    """The samples of each length: conversation and answer take at most this length in tokens.

    Upstream counts those of another tokenizer, so its bins hold other samples.

    Raises UserError when a file is not in the public layout.
    """
    chosen, counts = [], Counter[tuple[int, int]]()
    most = _CHARACTERS_PER_TOKEN * max(section.lengths)
    for sample in read_samples(section.data_files, most):
        open_lengths = [
            length
            for length in section.lengths
            if section.samples is None or counts[sample.needles, length] < section.samples
        ]
        if not open_lengths:
            continue
        text = mrcr.plain_text(sample.turns) if chat is None else chat.text(sample.turns)
        answer = len(encode_answer(tokenizer, sample.answer))
        tokens = len(encode_answer(tokenizer, text)) + answer
        for length in open_lengths:
            if not length / 2 < tokens <= length:
                continue
            counts[sample.needles, length] += 1
            chosen.append(
                PromptSample(
                    task=f"{sample.needles} needles",
                    length=length,
                    turns=partial(getattr, sample, "turns"),
                    answers=(sample.answer,),
                    new_tokens=answer,
                    score=partial(mrcr.score, answer=sample.answer, prefix=sample.prefix),
                    plain=mrcr.plain_text,
                )
            )
    return chosen


def read_samples(files: Iterable[Path], most_characters: int) -> Iterator[mrcr.MrcrSample]:
    """The samples of the files with no more characters than that, in order, equal rows once.

    Raises UserError when a file or a row of it is not in the public layout.
    """
    seen, repeated = set[bytes](), Counter[Path]()
    for path in files:
        for number, row in enumerate(read_rows(path, mrcr.FIELDS)):
            try:
                if len(row["prompt"]) > most_characters:
                    continue
                sample = mrcr.sample_of(row)
            except (KeyError, TypeError, ValueError) as error:
                reason = f"lacks {error}" if isinstance(error, KeyError) else str(error)
                raise UserError(
                    f"{path}, row {number}: not in MRCR's layout ({reason}); its fields are "
                    f"{', '.join(mrcr.FIELDS)}"
                ) from None
            content = hashlib.sha256(repr(sample).encode()).digest()
            if content in seen:
                repeated[path] += 1
                continue
            seen.add(content)
            yield sample
    for path, rows in repeated.items():
        # Counted again, they would make the score look more certain than it is.
        logger.warning("%s: left out %d that equal an earlier row of MRCR's data", path, rows)
