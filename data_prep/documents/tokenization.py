"""Parallel tokenisation of a source's parts into shards on disk, which survive a restart.

A shard is a folder with `ids.int32`, the concatenated token ids of its documents (`~id` for those
that are not learnt), and
`documents.npy`, for each document [tokens, UTF-8 bytes of its text]. Tokens include the closing
end-of-text token; both are 0 for a document that the filters leave out. `skipped.json` says what is
wrong with the records that were skipped. The folder is renamed into place when it is complete. A
shard's content does not depend on other shards.
"""

from __future__ import annotations

import itertools
import logging
import multiprocessing
import os
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

import numpy as np

from bosch import files
from bosch.errors import RunError, UserError
from bosch.progress import Progress
from bosch.this_process import die_with_parent
from data_prep.documents.encoding import WINDOW, Encoder
from data_prep.documents.sources import (
    BadRecord,
    Conversation,
    Filters,
    Part,
    Source,
    list_parts,
    read_part,
)

logger = logging.getLogger(__name__)

_IDS = "ids.int32"
_DOCUMENTS = "documents.npy"
_SKIPPED = "skipped.json"
# A system call per document would cost as much as reading it.
_BUFFER_BYTES = 2**20
# A text; a conversation's token ids and the bytes of its text; None if a filter leaves it out.
_Document: TypeAlias = str | tuple[np.ndarray, int] | None


@dataclass(frozen=True)
class Block:
    """Tokenised documents: document i is `ids[offsets[i] : offsets[i + 1]]`. Memory-mapped."""

    ids: np.ndarray  # [tokens] int32
    offsets: np.ndarray  # [documents + 1] int64
    left_out: int = 0  # number of documents that the source's filters leave out
    skipped: Sequence[str] = ()  # what is wrong with each bad record

    @property
    def documents(self) -> int:
        return len(self.offsets) - 1

    @property
    def tokens(self) -> int:
        return int(self.offsets[-1] - self.offsets[0])


@dataclass(frozen=True)
class TokenisedSource:
    """All blocks of one source and the UTF-8 bytes of their text."""

    source: Source
    blocks: list[Block]
    text_bytes: int

    @property
    def documents(self) -> int:
        return sum(block.documents for block in self.blocks)

    @property
    def tokens(self) -> int:
        return sum(block.tokens for block in self.blocks)

    @property
    def left_out(self) -> int:
        return sum(block.left_out for block in self.blocks)

    @property
    def skipped(self) -> int:
        return sum(len(block.skipped) for block in self.blocks)

    @property
    def bytes_per_token(self) -> float:
        return self.text_bytes / self.tokens


def tokenise_source(
    source: Source,
    encoder: Encoder,
    folder: Path,
    *,
    tokens: int,
    seed: int,
    sequence_length: int,
    workers: int,
    bar: Progress,
) -> TokenisedSource:
    """Tokenise parts in random order until there are more than `tokens` tokens, or all parts.

    Shards are written to `folder`; complete ones there are reused. The result does not depend on
    `workers`.

    Raises UserError if a file of the source is damaged or the source has no text, and RunError if a
    worker process died.
    """
    folder.mkdir(parents=True, exist_ok=True)
    parts = list_parts(source, seed, sequence_length)
    work = partial(_tokenise_part, source=source, encoder=encoder)
    jobs = ((part, folder / f"part-{index:06d}") for index, part in enumerate(parts))
    blocks: list[Block] = []
    text_bytes, total = 0, 0
    skipped: list[str] = []
    results = in_order(work, jobs, workers)
    try:
        for path in results:
            block, part_bytes = read_shard(path)
            blocks.append(block)
            skipped += block.skipped
            if len(skipped) > source.skip_bad_records:
                raise _too_many(source, skipped[source.skip_bad_records])
            text_bytes += part_bytes
            bar.update(min(block.tokens, max(tokens - total, 0)), note=source.name)
            total += block.tokens
            if total > tokens:
                break
    except BrokenProcessPool:
        raise RunError(
            f"source {source.name}: a tokenising process died, perhaps out of memory; "
            "lower runtime.data_workers and run again"
        ) from None
    finally:
        results.close()
    if total == 0:
        if left_out := sum(block.left_out for block in blocks):
            raise UserError(f"source {source.name}: its filters leave out all {left_out} documents")
        raise UserError(f"source {source.name}: its files hold no text (path {source.path})")
    if skipped:
        logger.warning(
            "source %s: skipped %s bad records, the first: %s", source.name, f"{len(skipped):,}",
            skipped[0],
        )  # fmt: skip
    return TokenisedSource(source, blocks, text_bytes)


def _too_many(source: Source, fault: str) -> UserError:
    limit = source.skip_bad_records
    which = f" (bad record {limit + 1:,}; skip_bad_records is {limit:,})" if limit else ""
    return UserError(fault + which)


def in_order(
    work: Any, jobs: Iterable[tuple[Part, Path]], workers: int
) -> Generator[Path, None, None]:
    """Results of `work` in the order of `jobs`, with at most 2 jobs per worker in flight."""
    if workers <= 1:
        yield from (work(job) for job in jobs)
        return
    # Forking is unsafe once torch or the tokenizers library has started threads.
    context = multiprocessing.get_context("spawn")
    jobs = iter(jobs)
    with ProcessPoolExecutor(
        workers, mp_context=context, initializer=_begin_worker, initargs=(os.getpid(),)
    ) as pool:
        running: deque[Future[Path]] = deque(
            pool.submit(work, job) for job in itertools.islice(jobs, 2 * workers)
        )
        try:
            while running:
                yield running.popleft().result()
                running.extend(pool.submit(work, job) for job in itertools.islice(jobs, 1))
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def _begin_worker(parent: int) -> None:
    """Set up a worker, which has a single thread and ends with the parent process."""
    die_with_parent(parent)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"


def _tokenise_part(job: tuple[Part, Path], *, source: Source, encoder: Encoder) -> Path:
    """Write the part's shard, unless it exists; returns its path."""
    part, path = job
    if files.exists(path):
        return path
    skipped: list[str] = []
    documents = _documents(part, source, encoder, skipped)
    with files.replacing(path) as temporary:
        temporary.mkdir()
        with (temporary / _IDS).open("wb", buffering=_BUFFER_BYTES) as sink:
            lengths = _write_documents(documents, encoder, source.filters, sink)
            # An array, since a compressed file may have millions of documents.
            sizes = np.fromiter(lengths, np.dtype((np.int64, 2)))
        np.save(temporary / _DOCUMENTS, sizes)
        files.write_json(temporary / _SKIPPED, skipped)
    return path


def _documents(
    part: Part, source: Source, encoder: Encoder, skipped: list[str]
) -> Iterator[_Document]:
    """The part's documents; appends the faults of bad records to `skipped`.

    Raises UserError where a part alone has too many.
    """
    for document in read_part(part, source):
        if isinstance(document, Conversation):
            try:
                yield encoder.conversation(document.messages, source.loss == "completion")
                continue
            except UserError:
                raise
            except Exception as error:  # of the template
                reason = " ".join(str(error).split())
                document = BadRecord(f"{document.place()}: {reason}")
        if isinstance(document, BadRecord):
            if len(skipped) == source.skip_bad_records:
                raise _too_many(source, document.fault)
            skipped.append(document.fault)
        elif document is None or (document and not source.filters.allow_text(document)):
            yield None
        elif document:
            yield document


def _batches(documents: Iterable[_Document]) -> Iterator[list[_Document]]:
    """Documents in order, in lists whose texts have about `WINDOW` characters."""
    batch: list[_Document] = []
    size = 0
    for document in documents:
        batch.append(document)
        size += len(document) if isinstance(document, str) else 1
        if size >= WINDOW:
            yield batch
            batch, size = [], 0
    yield batch


def _write_documents(
    documents: Iterable[_Document], encoder: Encoder, filters: Filters, sink: BinaryIO
) -> Iterator[tuple[int, int]]:
    """Write every document's token ids; yields its tokens and the bytes of its text."""
    end = np.array([] if encoder.end is None else [encoder.end], np.int32)
    for batch in _batches(documents):
        texts = [d for d in batch if isinstance(d, str) and len(d) <= WINDOW]
        encoded = iter(encoder(texts) if texts else ())
        for document in batch:
            if isinstance(document, tuple):
                (ids, text_bytes), closing = document, end[:0]  # it has its own
            elif document is not None:
                is_long = len(document) > WINDOW
                ids = np.concatenate([*encoder.long(document)]) if is_long else next(encoded)
                text_bytes = len(document if document.isascii() else document.encode())
                closing = end
            if document is None or not filters.allow_tokens(len(ids)):
                yield 0, 0
                continue
            sink.write(ids.data)
            sink.write(closing.data)
            yield len(ids) + len(closing), text_bytes


def read_shard(path: Path) -> tuple[Block, int]:
    """The shard's documents, memory-mapped, and the UTF-8 bytes of their text."""
    tokens, text_bytes = np.load(path / _DOCUMENTS).T
    is_used = tokens > 0
    offsets = np.concatenate([[0], np.cumsum(tokens[is_used])])
    # A plain array over the map, since slicing a memmap costs ten times as much.
    ids = np.asarray(np.memmap(path / _IDS, np.int32, "r") if offsets[-1] else (), np.int32)
    skipped = files.read_json(path / _SKIPPED)
    return Block(ids, offsets, int((~is_used).sum()), skipped), int(text_bytes.sum())
