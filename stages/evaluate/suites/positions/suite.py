"""Loss by position in long documents, which rises first where distant tokens are not seen."""

from __future__ import annotations

import hashlib
import importlib.util
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bosch.analysis.intervals import student
from bosch.errors import UserError
from bosch.objective.answers import answer_logits
from data_prep.tasks.samples import tokenizer_digest
from data_prep.text import encode_prompt, haystack_files, read_utf8
from stages.evaluate.answers import Subtask, digest_of
from stages.evaluate.generation import refuse_nan
from stages.evaluate.suite import Records, Suite
from stages.evaluate.suites.positions import PositionEvaluation
from stages.evaluate.tables import SuiteAnswers
from stages.versions import installed_versions

# Tokens whose logits over the vocabulary are held at once.
CHUNK = 1024


def edges(length: int) -> list[int]:
    """Bounds of the bins of predicted positions: 1, 2, 4, … and `length`."""
    return [*(2**power for power in range(math.ceil(math.log2(length)))), length]


@dataclass(kw_only=True)
class PositionSuite(Suite):
    """Long documents, and the loss of each by bins of positions."""

    section: PositionEvaluation
    _documents: list[np.ndarray] = field(default_factory=list)

    @property
    def subtasks(self) -> list[Subtask]:
        return [Subtask("perplexity", self.section.length, self._digest)]

    def samples(self, subtask: Subtask) -> int:
        return len(self._documents)

    def prepare(self) -> None:
        """Tokenise the first documents that are long enough, each once.

        Copies are skipped: they would narrow the interval without new information. Raises UserError
        when no document is long enough.
        """
        contents = set[bytes]()
        for text in documents(self.section.path, 8 * self.section.length + 1000):
            if len(self._documents) == self.section.documents:
                break
            # No tokenizer makes more than four tokens of a character on average.
            if 4 * len(text) < self.section.length:
                continue
            ids = encode_prompt(self.tokenizer, text)
            document = np.asarray(ids[: self.section.length], np.int32)
            if len(ids) >= self.section.length and document.tobytes() not in contents:
                contents.add(document.tobytes())
                self._documents.append(document)
        if not self._documents:
            raise UserError(
                f"evaluate.positions: no document has {self.section.length:,} tokens; "
                "lower the length or name a folder of longer ones as path"
            )

    def answer(self, subtask: Subtask, indices: Sequence[int], loaded: Any) -> Records:
        bounds = edges(self.section.length)
        for index in indices:
            losses = token_losses(loaded, self._documents[index])
            bins = [float(losses[a - 1 : b - 1].mean()) for a, b in itertools.pairwise(bounds)]
            yield [{"index": index, "loss": bins}]

    @property
    def texts(self) -> dict[str, Any]:
        path, name = self.section.path, "transformers"
        if path is None:
            path = f"models of {name} {installed_versions([name])[name]}"
        return {"long documents": path}

    def own_table(self, answers: SuiteAnswers, original: SuiteAnswers | None) -> dict[str, Any]:
        losses = original.losses if original is not None else None
        return position_table(self.section.length, answers.losses, losses)

    def note(self, subtask: Subtask) -> str:
        return "loss by position"

    @property
    def _digest(self) -> str:
        content = hashlib.sha256(b"".join(document.tobytes() for document in self._documents))
        return digest_of(
            {"documents": content.hexdigest(), "tokenizer": tokenizer_digest(self.tokenizer)}
        )


@torch.inference_mode()
def token_losses(model: Any, ids: np.ndarray) -> np.ndarray:
    """Cross-entropy of every token except the first, nats [T - 1]: one pass, logits in chunks.

    In one pass, because RoPE may depend on its length (`rope_depends_on_length`).
    """
    tokens = torch.from_numpy(ids.astype(np.int64)).to(model.device)
    states = model.get_decoder()(input_ids=tokens[None, :-1], use_cache=False).last_hidden_state[0]
    losses = []
    for some, targets in zip(states.split(CHUNK), tokens[1:].split(CHUNK), strict=True):
        logits = answer_logits(model, some)
        refuse_nan(logits)
        losses.append(torch.nn.functional.cross_entropy(logits, targets, reduction="none").cpu())
    return torch.cat(losses).numpy()


def position_table(
    length: int, answers: Sequence[Sequence[float]], original: Sequence[Sequence[float]] | None
) -> dict[str, Any]:
    """Mean loss of each bin, and its difference to the original's, with 95 % intervals.

    `answers` [documents, bins] in nats per token; the difference is over the same documents.
    Intervals are over documents; up to four have none.
    """
    values = np.asarray(answers)
    table: dict[str, Any] = {
        "edges": edges(length),
        "documents": len(values),
        "loss": _means(values),
    }
    if original is not None and len(original) == len(values):
        table["difference"] = _means(values - np.asarray(original))
    return table


def _means(values: np.ndarray) -> list[dict[str, float | None]]:
    return [student(column)._asdict() for column in values.T]


def documents(path: str | None, characters: int) -> Iterator[str]:
    """The first characters of the folder's texts by name, or of transformers' models.

    A model's code begins at its first class, longest files first: licence, warnings and imports
    before it are similar in all files.
    """
    if path is not None:
        for file in haystack_files(Path(path), "evaluate.positions.path", (".txt", ".md")):
            yield read_utf8(file)[:characters]
        return
    spec = importlib.util.find_spec("transformers")
    assert spec is not None and spec.origin is not None
    files = Path(spec.origin).parent.glob("models/*/modeling_*.py")
    for file in sorted(files, key=lambda file: (-file.stat().st_size, file.name)):
        text = file.read_text(encoding="utf-8")
        yield text[text.find("\nclass ") + 1 :][:characters]
