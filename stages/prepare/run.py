"""Training data and calibration prompts: tokenise, mix, pack; needle questions."""

from __future__ import annotations

import logging
import math
import resource
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from bosch.errors import UserError
from bosch.files import file_hashes, remove
from bosch.hardware import cpu_cores
from bosch.progress import progress
from data_prep.documents.calibration import write_calibration
from data_prep.documents.encoding import Encoder
from data_prep.documents.packing import DocumentStream, Packed, mix, pack, write_dataset
from data_prep.documents.sources import KINDS, BadRecord, Filters, Source, read_part
from data_prep.documents.tokenization import tokenise_source
from data_prep.documents.tokenizer import TokenizerSpec, load_tokenizer
from data_prep.text import essay_identity, haystack_words
from stages.context import StageConfig
from stages.faults import Fault
from stages.prepare.stage import (
    CALIBRATION,
    PACKED_DATA,
    TOKENIZER,
    PrepareConfig,
    SourceConfig,
    Statistics,
)
from stages.stage import LoadedRecipe

logger = logging.getLogger(__name__)

# Below this, starting processes takes longer than it saves.
_TOKENS_PER_WORKER = 10_000_000


def run(
    config: StageConfig[PrepareConfig], inputs: Mapping[str, Path], work_dir: Path
) -> dict[str, Any]:
    """Write train/, calibration/, tokenizer/ and statistics.json below `work_dir`.

    Tokenised shards stay in `work_dir`/tokens until everything is written, so that a killed run
    resumes where it stopped. Raises UserError, with file and place, when a source or the tokenizer
    is missing or damaged.
    """
    allow_open_files()
    statistics = Statistics.finished(work_dir)
    if statistics is None:
        model = config.model
        spec = TokenizerSpec(model.path, model.revision, model.trust_remote_code)
        tokenizer = load_tokenizer(spec)
        for source in config.section.sources:
            _read_first_document(source)
        asked = config.section.calibration
        words = haystack_words(asked.essay_dir)
        calibration = write_calibration(
            work_dir / CALIBRATION, tasks=asked.tasks, examples=asked.examples,
            length=asked.length, new_tokens=asked.new_tokens, seed=config.seed,
            tokenizer=tokenizer, essay_words=words,
        )  # fmt: skip
        calibration["corpus"] = essay_identity(asked.essay_dir, words)
        training_data = write_training_data(config, spec, work_dir)
        tokenizer.save_pretrained(work_dir / TOKENIZER)
        hashes = file_hashes(work_dir, [PACKED_DATA, CALIBRATION, TOKENIZER])
        statistics = Statistics(**training_data, calibration=calibration, sha256=hashes)
        statistics.write(work_dir)
    remove(work_dir / "tokens")
    return {
        **statistics.model_dump(include={"documents", "tokens", "sequences", "bytes_per_token"}),
        "calibration_examples": statistics.calibration["examples"],
    }


def allow_open_files() -> None:
    """Let this process open as many files as the system allows.

    The files of tokens stay open until they are packed: 2.5B tokens are some thousand files.
    """
    _, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    # macOS says unlimited, but allows no more than OPEN_MAX.
    limit = 10_240 if hard_limit == resource.RLIM_INFINITY else hard_limit
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard_limit))


def first_document_faults(loaded: LoadedRecipe) -> Iterator[Fault]:
    """Reasons why the tokenizer or the first document of a source cannot be read.

    What may be on the hub is not checked.
    """
    prepare, model = loaded.recipe[PrepareConfig], loaded.recipe.model
    folder = Path(model.path)
    if folder.is_dir() and not (folder / "tokenizer.json").exists():  # made from another form
        try:
            load_tokenizer(TokenizerSpec(model.path, None, model.trust_remote_code))
        except UserError as fault:
            yield Fault.of(fault, "model.path")
    for number, section in enumerate(prepare.sources):
        if section.path is None or KINDS[section.kind].is_remote(section.path):
            continue
        try:
            _read_first_document(section)
        except UserError as fault:
            yield Fault.of(fault, f"prepare.sources.{number}")


def _read_first_document(section: SourceConfig) -> None:
    """Raise UserError if the source's first document cannot be read, or is a bad record."""
    source, kind = _source(section), KINDS[section.kind]
    part = next(iter(kind.parts(source) if kind.parts else ()), None)
    if part is None or (source.tokenizer and not Path(source.tokenizer).is_dir()):
        return
    document = next(read_part(part, source), None)
    if isinstance(document, BadRecord) and not source.skip_bad_records:
        raise UserError(document.fault)


def write_training_data(
    config: StageConfig[PrepareConfig], spec: TokenizerSpec, work_dir: Path
) -> dict[str, Any]:
    """Tokenise as much of every source as its share needs, then mix and pack."""
    section = config.section
    length = section.sequence_length
    sequences = section.sequences
    tokens = sequences * length
    sources = [_source(source) for source in section.sources]
    weights = [source.weight for source in sources]
    encoder = Encoder.load(spec)
    with progress(tokens, "tokenising", "tokens") as bar:
        tokenised = [
            tokenise_source(
                source,
                encoder,
                work_dir / "tokens" / f"{number:02d}",
                tokens=math.ceil(tokens * source.weight / sum(weights)),
                seed=config.seed,
                sequence_length=length,
                workers=worker_count(config.runtime.data_workers, tokens),
                bar=bar,
            )
            for number, source in enumerate(sources)
        ]
    streams = [DocumentStream(t, config.seed, number) for number, t in enumerate(tokenised)]
    remove(work_dir / PACKED_DATA)
    with progress(sequences, "packing", "sequences") as bar:
        packed = _checked(pack(mix(streams, weights, tokens), length), spec, bar)
        with_labels = any(source.loss == "completion" for source in sources)
        write_dataset(work_dir / PACKED_DATA, packed, sequences, length, with_labels)
    shares = {stream.name: stream.tokens / tokens for stream in streams}
    for source in sources:
        share, target = shares[source.name], source.weight / sum(weights)
        if share < target / 2:  # the other sources' long documents used up the tokens
            logger.warning(
                "source %s has %.3g %% of the training data, and its weight asks for %.3g %%: "
                "documents are taken whole; raise prepare.train_tokens or set max_tokens for the "
                "other sources", source.name, 100 * share, 100 * target,
            )  # fmt: skip
    return {
        "documents": sum(stream.documents for stream in streams),
        "tokens": tokens,
        "sequences": sequences,
        "sequence_length": length,
        # Counted as read: repeated sources count several times.
        "bytes_per_token": sum(shares[t.source.name] * t.bytes_per_token for t in tokenised),
        "sources": {
            t.source.name: {
                "documents": stream.documents,
                "tokens": stream.tokens,
                "share": shares[t.source.name],
                "target_share": t.source.weight / sum(weights),
                "tokens_available": t.tokens,
                "epochs": stream.epochs,
                "bytes_per_token": t.bytes_per_token,
                "left_out": t.left_out,
                "skipped": t.skipped,
            }
            for t, stream in zip(tokenised, streams, strict=True)
        },
    }


def _source(config: SourceConfig) -> Source:
    fields = {name: value for name, value in config if name != "filters"}
    return Source(**fields, filters=Filters(**dict(config.filters)))


def _checked(sequences: Iterator[Packed], spec: TokenizerSpec, bar: Any) -> Iterator[Packed]:
    """The sequences; raises UserError at a token for which the model has no embedding."""
    from transformers import AutoConfig

    model = AutoConfig.from_pretrained(
        spec.path, revision=spec.revision, trust_remote_code=spec.trust_remote_code
    )
    embeddings = model.get_text_config().vocab_size
    for sequence in sequences:
        token = int(sequence.input_ids.max())
        if token >= embeddings:
            raise UserError(
                f"{spec.path}: the tokenizer makes token {token} of some of the documents, and the "
                f"model has {embeddings:,} embeddings; resize them (resize_token_embeddings)"
            )
        yield sequence
        bar.update()


def worker_count(configured: int | str, tokens: int) -> int:
    """Processes that tokenise; `auto` starts fewer for little text."""
    if isinstance(configured, int):
        return max(1, configured)
    return max(1, min(cpu_cores(), tokens // _TOKENS_PER_WORKER))
