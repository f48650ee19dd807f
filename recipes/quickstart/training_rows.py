"""Training data of the small models in this folder and in `recipes/study`.

Plain text is the standard library's source and pydoc's topics; retrieval documents come from
`data_prep.documents.retrieval`; copies repeat a block of random tokens. B rows, T tokens.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Callable
from pathlib import Path
from random import Random

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from data_prep.documents.retrieval import Document, Segment, retrieval_document
from data_prep.text import pydoc_topics

SEED = 7
VOCABULARY = 2048
FIRST_ANSWER_WEIGHT, ANSWER_WEIGHT, PROMPT_WEIGHT = 10.0, 5.0, 0.2

Row = tuple[list[int], list[float]]


def python_text() -> tuple[list[str], list[str]]:
    """Source files and help topics of this Python, as (training, held-out) documents."""
    root = Path(sysconfig.get_paths()["stdlib"])
    skipped = {"site-packages", "test", "tests", "idlelib", "lib2to3", "turtledemo"}
    files = sorted(
        path
        for path in root.rglob("*.py")
        if not skipped & set(path.relative_to(root).parts)
        and not path.name.startswith("_sysconfig")
    )
    documents = [path.read_text(encoding="utf-8", errors="ignore") for path in files]
    documents += pydoc_topics().values()
    documents = [text for text in documents if len(text) > 200]
    Random(SEED).shuffle(documents)
    held_out = len(documents) // 50
    return documents[held_out:], documents[:held_out]


def train_tokenizer(documents: list[str], prose: list[str]) -> PreTrainedTokenizerFast:
    """Byte-level BPE with single digits, on a sample of text and retrieval documents."""
    rng = Random(SEED)
    sample = documents[:250] + [
        "".join(s.text for s in retrieval_document(rng, 3000, prose)) for _ in range(250)
    ]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    end = "<|endoftext|>"
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[end],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(sample, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=end, pad_token=end, model_max_length=2048
    )


class Rows:
    """Makes batches of token rows with a loss weight for every token."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerFast, text: list[str], prose: list[str]
    ) -> None:
        self.encode = tokenizer.backend_tokenizer.encode
        self.prose = prose
        self.digits = [self.encode(digit).ids[0] for digit in "0123456789"]
        encoded = tokenizer.backend_tokenizer.encode_batch(text)
        self.text = np.concatenate([np.array([*e.ids, 0], dtype=np.int32) for e in encoded])

    def document(self, document: Document) -> Row:
        """Ids and loss weights of a document; each answer is tokenised apart from its context."""
        ids: list[int] = []
        weights: list[float] = []
        plain: list[str] = []

        def flush() -> None:
            pieces = self.encode("".join(plain)).ids
            ids.extend(pieces)
            weights.extend([PROMPT_WEIGHT] * len(pieces))
            plain.clear()

        for segment in [*document, Segment("")]:
            if segment.is_answer:
                flush()
                pieces = self.encode(segment.text).ids
                ids.extend(pieces)
                # An empty answer gets no weight: a repeated span may end after its first word.
                weights.extend([FIRST_ANSWER_WEIGHT, *[ANSWER_WEIGHT] * len(pieces)][: len(pieces)])
            else:
                plain.append(segment.text)
        flush()
        return [*ids, 0], [*weights, 0.1]

    def fitting(self, rng: Random, room: int, kinds: tuple[float, ...]) -> Row:
        """A retrieval document that mostly fills `room` tokens, else 30 to 100 % of them."""
        tokens = room if rng.random() < 0.7 else rng.uniform(0.3, 1.0) * room
        seed = rng.random()
        characters = 3.0 * tokens

        def draw() -> Row:
            size = max(60, int(characters))
            return self.document(retrieval_document(Random(seed), size, self.prose, kinds))

        for _ in range(2):  # the number of characters per token depends on the document
            characters *= 0.97 * tokens / len(draw()[0])
        return draw()

    def copies(self, rng: Random, length: int) -> Row:
        """A block of random tokens, repeated: the quickest way to train heads that copy."""
        period = rng.randint(4, length // 2)
        alphabet = self.digits if rng.random() < 0.2 else range(VOCABULARY)
        block = [rng.choice(alphabet) for _ in range(period)]
        row = (block * (length // period + 1))[:length]
        return row, [0.0] * period + [ANSWER_WEIGHT] * (length - period)

    def batch(
        self,
        rng: Random,
        count: int,
        length: int,
        text: float,
        copies: float,
        document: Callable[[Random, int], Row],
    ) -> tuple[Tensor, Tensor]:
        """Ids and weights, each [B, T], of `count` rows of `length` tokens.

        A row is plain text or copies with the probabilities `text` and `copies`. Any other row is
        filled with calls of `document`, which gets the number of tokens still free.
        """
        rows: list[Row] = []
        for _ in range(count):
            draw = rng.random()
            if draw < text:
                start = rng.randrange(len(self.text) - length)
                rows.append((self.text[start : start + length].tolist(), [1.0] * length))
            elif draw < text + copies:
                rows.append(self.copies(rng, length))
            else:
                ids: list[int] = []
                weights: list[float] = []
                while len(ids) < length:
                    more, more_weights = document(rng, length - len(ids))
                    ids, weights = ids + more, weights + more_weights
                rows.append((ids[:length], weights[:length]))
        return torch.tensor([ids for ids, _ in rows]), torch.tensor([row for _, row in rows])
