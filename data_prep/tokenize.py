"""Parallel tokenising of a source's parts into shards on disk, kept over a restart.

A shard is an Arrow file with one row per document: `input_ids` (list of int32, the closing
end-of-text token included) and `text_bytes`. It is renamed into place when it is whole; which
shards exist does not change what the others hold.
"""

from __future__ import annotations

import itertools
import json
import logging
import multiprocessing
import os
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from bosch.errors import RunError, UserError
from bosch.progress import Progress
from data_prep.sources import Part, Source, list_parts, read_part

logger = logging.getLogger(__name__)

_BATCH_CHARACTERS = 2**20
_SCHEMA = pa.schema([("input_ids", pa.list_(pa.int32())), ("text_bytes", pa.int64())])


@dataclass(frozen=True)
class TokenizerSpec:
    """How a tokenizer is loaded, in any process."""

    path: str
    revision: str | None = None
    trust_remote_code: bool = False


@lru_cache(maxsize=4)
def load_tokenizer(spec: TokenizerSpec) -> Any:
    """The tokenizer of a model directory or hub name.

    Raises:
        UserError: it is missing or damaged.
    """
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(
            spec.path, revision=spec.revision, trust_remote_code=spec.trust_remote_code
        )
    except Exception as error:
        _check_files(spec)
        reason = " ".join(str(error).split())
        raise UserError(f"{spec.path}: no tokenizer could be loaded from here ({reason})") from None


def _check_files(spec: TokenizerSpec) -> None:
    """Raise UserError for a file of a model directory that keeps its tokenizer from loading."""
    folder = Path(spec.path)
    for file in sorted(folder.glob("*.json")):
        try:
            json.loads(file.read_text(encoding="utf-8"))
        except ValueError as error:
            raise UserError(f"{file}: damaged, not JSON ({error}); get the model again") from None
    if (folder / "config.json").is_file():
        from bosch.modeling import load_config

        load_config(spec.path, trust_remote_code=spec.trust_remote_code)


@dataclass(frozen=True)
class Encoder:
    """What a worker needs to tokenise documents; small and quick to load in a new process.

    `backend` is the tokenizer in the JSON form of the tokenizers library. It is None for a
    tokenizer that is not made with that library and is loaded with transformers from `spec`.
    """

    spec: TokenizerSpec
    backend: str | None
    end: int | None

    @classmethod
    def load(cls, spec: TokenizerSpec) -> Encoder:
        """The encoder of a model's tokenizer; raises UserError as `load_tokenizer` does."""
        tokenizer = load_tokenizer(spec)
        backend = tokenizer.backend_tokenizer.to_str() if tokenizer.is_fast else None
        return cls(spec, backend, tokenizer.eos_token_id)

    def __call__(self, texts: list[str]) -> list[list[int]]:
        """Token ids of whole documents, each closed by the end-of-text token if there is one.

        A special token's name inside a text is text.
        """
        if self.backend is not None:
            encodings = _backend(self.backend).encode_batch_fast(texts, add_special_tokens=False)
            encoded = [encoding.ids for encoding in encodings]
        else:
            encoded = load_tokenizer(self.spec)(
                texts, add_special_tokens=False, split_special_tokens=True, verbose=False
            )["input_ids"]
        end = [] if self.end is None else [self.end]
        return [ids + end for ids in encoded]


@lru_cache(maxsize=2)
def _backend(serialised: str) -> Any:
    from tokenizers import Tokenizer

    backend = Tokenizer.from_str(serialised)
    backend.no_truncation()
    backend.no_padding()
    backend.encode_special_tokens = True
    return backend


@dataclass(frozen=True)
class Block:
    """Tokenised documents: document i is `ids[offsets[i] : offsets[i + 1]]`. Memory-mapped."""

    ids: np.ndarray  # [tokens] int32
    offsets: np.ndarray  # [documents + 1] int32

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
    """Tokenise parts in their drawn order until there are more than `tokens` tokens or parts end.

    Shards lie in `folder`; those already there are used as they are. The result does not depend on
    `workers`.

    Raises:
        UserError: a file of the source is damaged, or the source holds no text at all.
        RunError: a worker process died.
    """
    folder.mkdir(parents=True, exist_ok=True)
    parts = list_parts(source, seed, sequence_length)
    work = partial(_tokenise_part, source=source, encoder=encoder)
    jobs = ((part, folder / f"part-{index:06d}.arrow") for index, part in enumerate(parts))
    blocks: list[Block] = []
    text_bytes, total = 0, 0
    results = _in_order(work, jobs, workers)
    try:
        for path in results:
            found, part_bytes = read_shard(path)
            blocks += found
            text_bytes += part_bytes
            added = sum(block.tokens for block in found)
            bar.update(min(added, max(tokens - total, 0)), note=source.name)
            total += added
            if total > tokens:
                break
    except BrokenProcessPool:
        raise RunError(
            f"source {source.name}: a tokenising process died, perhaps for want of memory; "
            "lower runtime.data_workers and run again"
        ) from None
    finally:
        results.close()
    if total == 0:
        raise UserError(f"source {source.name}: its files hold no text (path {source.path})")
    return TokenisedSource(source, blocks, text_bytes)


def _in_order(
    work: Any, jobs: Iterable[tuple[Part, Path]], workers: int
) -> Generator[Path, None, None]:
    """Results of `work` in the order of `jobs`, a few of which are under way at any time."""
    if workers <= 1:
        yield from (work(job) for job in jobs)
        return
    # Forking is unsafe once torch or the tokenizers library has started threads.
    context = multiprocessing.get_context("spawn")
    jobs = iter(jobs)
    with ProcessPoolExecutor(workers, mp_context=context, initializer=_quiet_worker) as pool:
        running: deque[Future[Path]] = deque(
            pool.submit(work, job) for job in itertools.islice(jobs, 2 * workers)
        )
        try:
            while running:
                yield running.popleft().result()
                running.extend(pool.submit(work, job) for job in itertools.islice(jobs, 1))
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def _quiet_worker() -> None:
    """One thread per process: the processes are the parallelism."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"


def _tokenise_part(job: tuple[Part, Path], *, source: Source, encoder: Encoder) -> Path:
    """Write the part's shard unless it is there; returns its path."""
    part, path = job
    if path.exists():
        return path
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    with pa.OSFile(str(temporary), "wb") as sink, pa.ipc.new_file(sink, _SCHEMA) as writer:
        for texts in _batches(read_part(part, source)):
            writer.write_batch(_record_batch(encoder(texts), texts))
    os.replace(temporary, path)
    return path


def _batches(texts: Iterable[str]) -> Iterator[list[str]]:
    """Texts in groups of bounded size, empty ones left out."""
    group: list[str] = []
    size = 0
    for text in texts:
        if not text:
            continue
        group.append(text)
        size += len(text)
        if size >= _BATCH_CHARACTERS:
            yield group
            group, size = [], 0
    if group:
        yield group


def _record_batch(documents: list[list[int]], texts: list[str]) -> pa.RecordBatch:
    lengths = np.fromiter((len(ids) for ids in documents), np.int64, len(documents))
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    flat = np.fromiter(itertools.chain.from_iterable(documents), np.int32, int(offsets[-1]))
    column = pa.ListArray.from_arrays(pa.array(offsets), pa.array(flat))
    text_bytes = pa.array([len(text.encode()) for text in texts], pa.int64())
    return pa.RecordBatch.from_arrays([column, text_bytes], schema=_SCHEMA)


def read_shard(path: Path) -> tuple[list[Block], int]:
    """The shard's blocks, memory-mapped, and the bytes of its text."""
    reader = pa.ipc.open_file(pa.memory_map(str(path)))
    blocks, text_bytes = [], 0
    for index in range(reader.num_record_batches):
        ids, sizes = reader.get_batch(index).columns
        blocks.append(Block(ids.values.to_numpy(), ids.offsets.to_numpy()))
        text_bytes += int(sizes.to_numpy().sum())
    return blocks, text_bytes
