"""RULER's samples on disk, made once for a tokenizer, length and seed, and extended on demand.

A folder holds ids.bin (the prompts' concatenated token ids, int32) and samples.jsonl: a line about
the fit of the haystack's size, then a line for each sample with the hash of its ids.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import operator
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from bosch.errors import RunError, UserError
from bosch.files import canonical_json, exists, file_digest, make_folder
from bosch.journal import Journal
from data_prep.tasks.needles import Needle
from data_prep.tasks.ruler import Corpus, Sample, ruler_task
from data_prep.tasks.tables import DATA_FILES
from data_prep.tasks.words import sentences_identity, words_identity
from data_prep.text import TokenCounter, essay_identity

logger = logging.getLogger(__name__)

# Characters of a prompt's end that are stored with its answer.
TAIL_CHARACTERS = 300
# Fields of samples.jsonl: of the first line, and of a sample's.
_HEAD = {"fit", "size"}
_FIELDS = {
    "index", "tokens", "ids_sha256", "sizes", "answers", "tail", "prefix", "needles",
    "prompt_sha256",
}  # fmt: skip


@dataclass(frozen=True)
class StoredSample:
    """A prompt to continue, its correct answers, and its needles.

    The prompt ends with `prefix`, the beginning of the answer; `prompt_sha256` is the hash of the
    text without it. `tail` is the end of the text.
    """

    task: str
    index: int
    ids: np.ndarray  # [T] int32
    answers: list[str]
    tail: str
    prefix: str
    needles: list[Needle]
    prompt_sha256: str


@dataclass(frozen=True)
class SampleFolder:
    """The samples of a task at a length, in a folder of their own."""

    root: Path
    task: str
    length: int
    new_tokens: int
    seed: int
    corpus: Corpus
    tokenizer: Any

    @property
    def identity(self) -> dict[str, Any]:
        """All that the samples depend on."""
        name, folder = DATA_FILES.get(self.task), self.corpus.data_dir
        file = folder / name if name is not None and folder is not None else None
        return {
            "task": self.task,
            "length": self.length,
            "new_tokens": self.new_tokens,
            "seed": self.seed,
            "tokenizer": tokenizer_digest(self.tokenizer),
            "words": words_identity(),
            "sentences": sentences_identity(),
            "essay": essay_identity(None, self.corpus.essay)["sha256"],
            "data": file_digest(file) if file is not None and file.is_file() else None,
        }

    @property
    def path(self) -> Path:
        digest = hashlib.sha256(canonical_json(self.identity).encode()).hexdigest()
        return self.root / f"{self.task}-{self.length}-{digest[:16]}"

    def make(self, count: int, advance: Callable[[], None] = lambda: None) -> None:
        """Make at least `count` samples on disk; calls `advance` for each new one.

        Raises UserError if the task does not fit, or a required file is missing or damaged.
        """
        folder = self.path
        make_folder(folder)
        with (folder / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            journal, ids_file = Journal(folder / "samples.jsonl"), folder / "ids.bin"
            head, records = _intact_samples(journal, ids_file)
            if len(records) >= count:
                return
            counter = TokenCounter(self.tokenizer)
            try:
                task = ruler_task(
                    self.task, self.corpus, self.seed, self.length, self.new_tokens, counter
                )
                if head is None:
                    journal.append({"fit": task.fit(), "size": task.size})
                else:
                    task.size = head["size"]
                    task.replay(head["fit"], [record["sizes"] for record in records])
                with ids_file.open("ab") as file:
                    file.truncate(4 * sum(record["tokens"] for record in records))
                    for index in range(len(records), count):
                        sample = task.sample(index)
                        file.write(np.asarray(sample.ids, np.int32).tobytes())
                        file.flush()
                        os.fsync(file.fileno())
                        journal.append(_record(index, sample))
                        advance()
            except UserError as fault:
                raise UserError(f"{self.task} at {self.length:,} tokens: {fault}") from None

    def read(self, indices: range) -> Iterator[StoredSample]:
        """The samples of these indices, which must exist."""
        folder = self.path
        records = Journal(folder / "samples.jsonl").read_new(_line)[1:]
        starts = np.cumsum([0, *(record.get("tokens", 0) for record in records)])
        ids = np.memmap(folder / "ids.bin", np.int32, mode="r")
        for index in indices:
            record = records[index] if index < len(records) else {}
            own_ids = np.array(ids[slice(*starts[index : index + 2])])
            if record.get("index") != index or _digest(own_ids) != record["ids_sha256"]:
                raise RunError(
                    f"{folder}: sample {index} is damaged; run the same command again, which makes "
                    "it again"
                )
            yield StoredSample(
                self.task,
                index,
                own_ids,
                record["answers"],
                record["tail"],
                record["prefix"],
                [(key, value) for key, value in record["needles"]],
                record["prompt_sha256"],
            )


def _intact_samples(journal: Journal, ids_file: Path) -> tuple[Any, list[dict[str, Any]]]:
    """The fit of the size (or None) and the samples before the first damaged one.

    Removes the damaged sample and later ones from the journal.
    """
    entries = journal.read_new(_line)
    head = entries[0] if entries and "fit" in entries[0] else None
    records: list[dict[str, Any]] = []
    start = 0
    ids = np.fromfile(ids_file, np.int32) if exists(ids_file) else np.empty(0, np.int32)
    for record in entries[1:] if head is not None else []:
        own_ids = ids[start : start + record.get("tokens", 0)]
        if record.get("index") != len(records) or _digest(own_ids) != record["ids_sha256"]:
            logger.warning("%s: damaged from sample %d on; made again", ids_file, len(records))
            break
        start += record["tokens"]
        records.append(record)
    if journal.damaged or len(entries) > len(records) + (head is not None):
        journal.replace(([head] if head is not None else []) + records)
    return head, records


def _line(entry: dict[str, Any]) -> dict[str, Any]:
    """Check an entry; raises KeyError for a missing field, TypeError for a wrong count."""
    missing = _HEAD - entry.keys() if "fit" in entry else _FIELDS - entry.keys()
    if missing:
        raise KeyError(*missing)
    operator.index(entry["size"] if "fit" in entry else entry["tokens"])
    return entry


def _digest(ids: np.ndarray) -> str:
    return hashlib.sha256(ids.tobytes()).hexdigest()


def _record(index: int, sample: Sample) -> dict[str, Any]:
    draft = sample.draft
    return {
        "index": index,
        "tokens": len(sample.ids),
        "ids_sha256": _digest(np.asarray(sample.ids, np.int32)),
        "sizes": sample.sizes,
        "answers": draft.answers,
        "tail": draft.text[-TAIL_CHARACTERS:],
        "prefix": draft.prefix,
        "needles": draft.needles,
        "prompt_sha256": hashlib.sha256(draft.prompt.encode()).hexdigest(),
    }


@lru_cache(maxsize=4)
def tokenizer_digest(tokenizer: Any) -> str:
    """SHA-256 of all that decides how a text is tokenised."""
    if tokenizer.is_fast:
        content = tokenizer.backend_tokenizer.to_str()
    else:
        content = canonical_json({"class": type(tokenizer).__name__, **tokenizer.get_vocab()})
    return hashlib.sha256(content.encode()).hexdigest()
