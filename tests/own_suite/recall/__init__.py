"""A suite of one folder: lines of text files, of which the model is asked the last word."""

from __future__ import annotations

from stages.evaluate.prompts import PromptEvaluation


class Recall(PromptEvaluation):
    """The last word of a line."""

    title = "Recall"
    public_data = "any text"
    suffixes = (".txt",)
    published = 2
    new_tokens = 3


SUITE = Recall
