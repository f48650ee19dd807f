"""Training data and calibration prompts: tokenise, mix, pack; needle questions."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from bosch.errors import UserError
from bosch.files import file_hashes, remove
from bosch.hardware import cpu_cores
from bosch.progress import progress
from data_prep.documents.calibration import needle_prompts, write_calibration
from data_prep.documents.packing import DocumentStream, mix, pack, write_dataset
from data_prep.documents.sources import KINDS, Filters, Source, documents
from data_prep.documents.tokenization import tokenise
from data_prep.documents.tokenizer import TokenizerSpec, load_tokenizer
from data_prep.tasks.tables import PROMPTS_PER_EXAMPLE
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

    Token ids stay in `work_dir`/tokens until everything is written, so that a killed run
    resumes where it stopped. Raises UserError, with file and place, when a source or the tokenizer
    is missing or damaged.
    """
    statistics = Statistics.finished(work_dir)
    if statistics is None:
        model = config.model
        spec = TokenizerSpec(model.path, model.revision, model.trust_remote_code)
        tokenizer = load_tokenizer(spec)
        for source in config.section.sources:
            next(documents(_source(source)), None)  # before hours of others
        asked = config.section.calibration
        words = haystack_words(asked.essay_dir)
        count = PROMPTS_PER_EXAMPLE * asked.examples
        prompts = needle_prompts(
            asked.tasks, count, asked.length, asked.new_tokens, "calibration", config.seed,
            tokenizer, words,
        )  # fmt: skip
        write_calibration(work_dir / CALIBRATION, prompts, asked.examples)
        calibration = asked.model_dump(include={"tasks", "examples", "length"})
        calibration["corpus"] = essay_identity(asked.essay_dir, words)
        training_data = write_training_data(config, spec, work_dir)
        tokenizer.save_pretrained(work_dir / TOKENIZER)
        hashes = file_hashes(work_dir, [PACKED_DATA, CALIBRATION, TOKENIZER])
        statistics = Statistics(**training_data, calibration=calibration, sha256=hashes)
        statistics.write(work_dir)
    remove(work_dir / "tokens")
    return {
        **statistics.model_dump(include={"documents", "tokens", "sequences"}),
        "calibration_examples": statistics.calibration["examples"],
    }


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
            next(documents(_source(section)), None)
        except UserError as fault:
            yield Fault.of(fault, f"prepare.sources.{number}")


def write_training_data(
    config: StageConfig[PrepareConfig], spec: TokenizerSpec, work_dir: Path
) -> dict[str, Any]:
    """Tokenise as much of every source as its share needs, then mix and pack."""
    from transformers import AutoConfig

    section, length = config.section, config.section.sequence_length
    tokens = section.sequences * length
    fields = {"seed": config.seed, "sequence_length": length}
    sources = [_source(source, **fields) for source in section.sources]
    targets = [source.weight / sum(s.weight for s in sources) for source in sources]
    most = min(cpu_cores(), tokens // _TOKENS_PER_WORKER)
    workers = most if config.runtime.data_workers == "auto" else config.runtime.data_workers
    with progress(tokens, "tokenising", "tokens") as bar:
        streams = [
            DocumentStream(
                tokenise(
                    source, spec, work_dir / "tokens" / f"{number:02d}",
                    tokens=math.ceil(tokens * target), workers=workers, bar=bar,
                )
            )
            for number, (source, target) in enumerate(zip(sources, targets, strict=True))
        ]  # fmt: skip
    remove(work_dir / PACKED_DATA)
    with progress(section.sequences, "packing", "sequences") as bar:
        packed = pack(mix(streams, targets, tokens), length)
        with_labels = any(source.loss == "completion" for source in sources)
        most = write_dataset(work_dir / PACKED_DATA, packed, length, with_labels, bar)
    model = AutoConfig.from_pretrained(
        spec.path, revision=spec.revision, trust_remote_code=spec.trust_remote_code
    )
    if most >= (embeddings := model.get_text_config().vocab_size):
        raise UserError(
            f"{spec.path}: the tokenizer makes token {most} of some of the documents, and the "
            f"model has {embeddings:,} embeddings; resize them (resize_token_embeddings)"
        )
    statistics: dict[str, Any] = {}
    for source, target, stream in zip(sources, targets, streams, strict=True):
        share, counts = stream.tokens / tokens, stream.tokenised.counts
        statistics[source.name] = {
            "documents": stream.documents,
            "tokens": stream.tokens,
            "share": share,
            "target_share": target,
            "tokens_available": counts["tokens"],
            "epochs": stream.tokens / counts["tokens"],  # above 1 documents repeat
            "left_out": counts["left_out"],
        }
        if share < target / 2:  # the other sources' long documents used up the tokens
            logger.warning(
                "source %s has %.3g %% of the training data, and its weight asks for %.3g %%: "
                "documents are taken whole; raise prepare.train_tokens or set max_tokens for the "
                "other sources", source.name, 100 * share, 100 * target,
            )  # fmt: skip
    return {
        "documents": sum(stream.documents for stream in streams),
        "tokens": tokens,
        "sequences": section.sequences,
        "sequence_length": length,
        "sources": statistics,
    }


def _source(config: SourceConfig, **fields: Any) -> Source:
    filters = {name: value for name, value in config.filters if value is not None}
    return Source(**{**dict(config), **fields, "filters": Filters(**filters)})
