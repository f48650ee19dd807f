"""Tokenises a source in parallel, into files that survive a restart.

One process reads documents; blocks of them are tokenised by workers and appended, in order, to
`ids.int32`, the token ids (`~id` for those that are not learnt), and `lengths.int64`, the tokens of
each document with the closing end-of-text token. `blocks.jsonl` has the counts after each block: so
far the files are whole.
"""

from __future__ import annotations

import itertools
import logging
import multiprocessing
import os
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from bosch.errors import RunError, UserError
from bosch.files import sync
from bosch.journal import Journal
from bosch.progress import Progress
from bosch.this_process import die_with_parent
from data_prep.documents.encoding import decode, encode, encode_conversation
from data_prep.documents.sources import Conversation, Document, Source, Tokens, documents
from data_prep.documents.tokenizer import TokenizerSpec, load_tokenizer

logger = logging.getLogger(__name__)

BLOCK_CHARACTERS = 2**22  # at most


@dataclass(frozen=True)
class Tokenised:
    """A source's documents, of which number i is `ids[offsets[i] : offsets[i + 1]]`."""

    source: Source
    ids: np.ndarray  # [tokens] int32, memory-mapped
    offsets: np.ndarray  # [documents + 1] int64
    counts: Counter[str]  # of all blocks


def tokenise(
    source: Source, spec: TokenizerSpec, folder: Path, *, tokens: int, workers: int, bar: Progress
) -> Tokenised:
    """Tokenise documents until there are more than `tokens` tokens, or all of them.

    Continues after the blocks that are in `folder`. The result does not depend on `workers`.

    Raises UserError if a file of the source is damaged or the source has no text, and RunError if a
    worker process died.
    """
    folder.mkdir(parents=True, exist_ok=True)
    paths = folder / "ids.int32", folder / "lengths.int64"
    journal = Journal(folder / "blocks.jsonl")
    total = Counter(*journal.read_new(Counter[str])[-1:])
    bar.update(min(total["tokens"], tokens), note=source.name, free=True)
    for path, size in zip(paths, (4 * total["tokens"], 8 * total["documents"]), strict=True):
        with path.open("ab") as file:
            file.truncate(size)
    rest = itertools.islice(documents(source), total["records"], None)
    work = partial(tokenise_block, source=source, spec=spec)
    size = min(BLOCK_CHARACTERS, 8 * tokens)
    with closing(in_order(work, _blocks(rest, size), workers)) as blocks:
        while total["tokens"] <= tokens and (block := next(blocks, None)) is not None:
            *arrays, counts = block
            for path, values in zip(paths, arrays, strict=True):
                with path.open("ab") as file:
                    file.write(values.tobytes())
                sync(path)
            before = total["tokens"]
            total.update(counts)
            journal.append(total)
            bar.update(min(total["tokens"], tokens) - before, note=source.name)
    if not total["tokens"]:
        raise UserError(
            f"source {source.name}: no text is left (path {source.path}; its filters leave out "
            f"{total['left_out']} of {total['records']} documents)"
        )
    # A plain array over the map, since slicing a memmap costs ten times as much.
    ids = np.asarray(np.memmap(paths[0], np.int32, "r"))
    offsets = np.concatenate([[0], np.cumsum(np.fromfile(paths[1], np.int64))])
    return Tokenised(source, ids, offsets, total)


def _blocks(found: Iterable[Document], characters: int) -> Iterator[list[Document]]:
    block, size = list[Document](), 0
    for document in found:
        block.append(document)
        size += document.ids.nbytes if isinstance(document, Tokens) else len(str(document))
        if size >= characters:
            yield block
            block, size = [], 0
    if block:
        yield block


def in_order(
    work: Callable[[Any], Any], jobs: Iterable[Any], workers: int
) -> Generator[Any, None, None]:
    """Results of `work` in the order of `jobs`, with at most 2 jobs per worker in flight."""
    if workers <= 1:
        yield from map(work, jobs)
        return
    # Forking is unsafe once torch or the tokenizers library has started threads.
    context, jobs = multiprocessing.get_context("spawn"), iter(jobs)
    with ProcessPoolExecutor(workers, context, _begin_worker, (os.getpid(),)) as pool:
        running = deque(pool.submit(work, job) for job in itertools.islice(jobs, 2 * workers))
        try:
            while running:
                yield running.popleft().result()
                running.extend(pool.submit(work, job) for job in itertools.islice(jobs, 1))
        except BrokenProcessPool:
            raise RunError(
                "a tokenising process died, perhaps out of memory; lower runtime.data_workers and "
                "run again"
            ) from None
        finally:
            pool.shutdown(cancel_futures=True)


def _begin_worker(parent: int) -> None:
    """Set up a worker, which has a single thread and ends with the parent process."""
    die_with_parent(parent)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"


def tokenise_block(
    block: list[Document], *, source: Source, spec: TokenizerSpec
) -> tuple[np.ndarray, np.ndarray, Counter[str]]:
    """Token ids int32 of what the filters allow of a block, and each document's tokens int64.

    Counts are the records of the block, those that are left out, and documents and tokens.
    """
    tokenizer, bounds = load_tokenizer(spec), source.filters
    counts, parts = Counter(records=len(block)), list[np.ndarray]()
    for document in block:
        if isinstance(document, Tokens):
            document = decode(load_tokenizer(TokenizerSpec(document.tokenizer)), document)
        if document == "":
            continue
        ids = None
        if isinstance(document, Conversation):
            ids = encode_conversation(tokenizer, document, source.loss == "completion")
        elif document and bounds.min_characters <= len(document) <= bounds.max_characters:
            ids = encode(tokenizer, document)
        has_end = tokenizer.eos_token_id is not None
        if ids is not None and bounds.min_tokens <= len(ids) - has_end <= bounds.max_tokens:
            parts.append(ids)
        else:
            counts["left_out"] += 1
    lengths = np.array([len(part) for part in parts], np.int64)
    counts.update(documents=len(parts), tokens=int(lengths.sum()))
    return np.concatenate([np.empty(0, np.int32), *parts]), lengths, counts
