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
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from bosch import files
from bosch.errors import RunError, UserError
from bosch.progress import Progress
from bosch.this_process import die_with_parent
from data_prep.documents.conversations import Conversation
from data_prep.documents.filters import Filters
from data_prep.documents.sources import BadRecord, Part, Source, list_parts, read_part
from data_prep.documents.tokenizer import WINDOW, Encoder

logger = logging.getLogger(__name__)

_IDS = "ids.int32"
_DOCUMENTS = "documents.npy"
_SKIPPED = "skipped.json"
# A system call per document would cost as much as reading it.
_BUFFER_BYTES = 2**20


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
    encoder = replace(encoder, special_tokens=source.special_tokens)
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
    with files.replacing(path) as temporary:
        temporary.mkdir()
        with (temporary / _IDS).open("wb", buffering=_BUFFER_BYTES) as sink:
            skipped: list[str] = []
            documents = _encoded(part, source, encoder, skipped)
            lengths = _write_documents(documents, encoder, source.filters, sink)
            # An array, since a compressed file may have millions of documents.
            sizes = np.fromiter(lengths, np.dtype((np.int64, 2)))
        np.save(temporary / _DOCUMENTS, sizes)
        files.write_json(temporary / _SKIPPED, skipped)
    return path


class _Encoded(NamedTuple):
    """A conversation's signed token ids, and the bytes of its text."""

    ids: np.ndarray
    text_bytes: int


def _encoded(
    part: Part, source: Source, encoder: Encoder, skipped: list[str]
) -> Iterator[str | _Encoded | None]:
    """The part's documents, conversations as tokens; appends the faults of others to `skipped`.

    Raises UserError where a part alone has too many.
    """
    answers_only = source.loss == "completion"
    for document in read_part(part, source):
        if isinstance(document, Conversation):
            try:
                yield _Encoded(*encoder.conversation(document.messages, answers_only))
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
        else:
            yield document


_LEFT_OUT = (0, 0)


def _write_documents(
    documents: Iterable[str | _Encoded | None],
    encoder: Encoder,
    filters: Filters,
    sink: BinaryIO,
) -> Iterator[tuple[int, int]]:
    """Write every document's token ids; yields its tokens and the bytes of its text.

    Empty documents are skipped.
    """
    end = np.array([] if encoder.end is None else [encoder.end], np.int32)
    for group in _groups(documents, filters):
        if group is None:
            yield _LEFT_OUT
            continue
        if isinstance(group, _Encoded):
            allowed = filters.allow_tokens(len(group.ids))
            if allowed:
                sink.write(group.ids.data)
            yield (len(group.ids), group.text_bytes) if allowed else _LEFT_OUT
            continue
        is_long = len(group[0]) > WINDOW
        encoded = [np.concatenate([*encoder.long(group[0])])] if is_long else encoder(group)
        for text, ids in zip(group, encoded, strict=True):
            if filters.allow_tokens(len(ids)):
                sink.write(ids.data)
                sink.write(end.data)
                yield len(ids) + len(end), len(text) if text.isascii() else len(text.encode())
            else:
                yield _LEFT_OUT


def _groups(
    documents: Iterable[str | _Encoded | None], filters: Filters
) -> Iterator[list[str] | _Encoded | None]:
    """Documents in order: short ones in groups, a long one or a conversation alone.

    None stands for a document that is left out; it comes before the group in progress.
    """
    group: list[str] = []
    size = 0
    for document in documents:
        if document == "":
            continue
        is_alone = isinstance(document, _Encoded) or len(document or "") > WINDOW
        if group and (is_alone or size >= WINDOW):
            yield group
            group, size = [], 0
        if isinstance(document, _Encoded):
            yield document
        elif document is None or not filters.allow_text(document):
            yield None
        elif is_alone:
            yield [document]
        else:
            group.append(document)
            size += len(document)
    if group:
        yield group


def read_shard(path: Path) -> tuple[Block, int]:
    """The shard's documents, memory-mapped, and the UTF-8 bytes of their text."""
    tokens, text_bytes = np.load(path / _DOCUMENTS).T
    is_used = tokens > 0
    offsets = np.concatenate([[0], np.cumsum(tokens[is_used])])
    # A plain array over the map, since slicing a memmap costs ten times as much.
    ids = np.asarray(np.memmap(path / _IDS, np.int32, "r") if offsets[-1] else (), np.int32)
    skipped = files.read_json(path / _SKIPPED)
    return Block(ids, offsets, int((~is_used).sum()), skipped), int(text_bytes.sum())
