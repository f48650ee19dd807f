"""The lines of its files."""

from __future__ import annotations

from functools import partial
from typing import Any

from stages.evaluate.chat import ChatTemplate
from stages.evaluate.prompt_suite import PromptSample
from stages.evaluate.prompts import PromptEvaluation


def samples(
    section: PromptEvaluation, tokenizer: Any, seed: int, chat: ChatTemplate | None
) -> list[PromptSample]:
    """A sample of each line; every length has the same ones."""
    lines = [line for path in section.data_files for line in path.read_text().splitlines()]
    return [
        PromptSample(
            task="last word",
            length=length,
            turns=partial(list, [{"role": "user", "content": line.rpartition(" ")[0]}]),
            answers=(line.rpartition(" ")[2],),
            new_tokens=section.new_tokens,
            score=lambda output: float("e" in output),
        )
        for length in section.lengths
        for line in lines[: section.samples]
    ]
