"""Training data and calibration set: tokenise, mix, pack; needle examples."""

from __future__ import annotations

import json
import logging
import math
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from stages.configs import PrepareConfig
from stages.context import StageConfig
from stages.output import write_json

logger = logging.getLogger(__name__)

VERSION = 1

# Below this, starting processes takes longer than they save.
_TOKENS_PER_WORKER = 10_000_000


def run(config: StageConfig, inputs: Mapping[str, Path], work_dir: Path) -> dict[str, Any]:
    """Write train/, calibration/, tokenizer/ and statistics.json below `work_dir`.

    Tokenised shards are kept in `work_dir`/tokens until everything is written, so that a killed run
    goes on where it was.

    Raises:
        UserError: a source or the tokenizer is missing or damaged; names file and place.
    """
    from data_prep.tokenize import TokenizerSpec, load_tokenizer

    section = config.section
    assert isinstance(section, PrepareConfig)
    statistics_file = work_dir / "statistics.json"
    if not statistics_file.exists():
        model = config.model
        spec = TokenizerSpec(model.path, model.revision, model.trust_remote_code)
        tokenizer = load_tokenizer(spec)
        calibration = _calibration(config, section, tokenizer, work_dir)
        statistics = _training_data(config, section, spec, work_dir)
        tokenizer.save_pretrained(work_dir / "tokenizer")
        write_json(statistics_file, {**statistics, "calibration": calibration})
    shutil.rmtree(work_dir / "tokens", ignore_errors=True)
    statistics = json.loads(statistics_file.read_text())
    return {
        **{key: statistics[key] for key in ("documents", "tokens", "sequences", "bytes_per_token")},
        "calibration_examples": statistics["calibration"]["examples"],
    }


def _calibration(
    config: StageConfig, section: PrepareConfig, tokenizer: Any, work_dir: Path
) -> dict[str, Any]:
    from data_prep.calibration import write_calibration
    from data_prep.essays import essay_identity, haystack_words

    wanted = section.calibration
    words = haystack_words(wanted.essay_dir)
    statistics = write_calibration(
        work_dir / "calibration",
        tasks=wanted.tasks,
        examples=wanted.examples,
        length=wanted.length,
        seed=config.seed,
        tokenizer=tokenizer,
        essay_words=words,
        questions_per_haystack=wanted.questions_per_haystack,
    )
    return {**statistics, "corpus": essay_identity(wanted.essay_dir, words)}


def _training_data(
    config: StageConfig, section: PrepareConfig, spec: Any, work_dir: Path
) -> dict[str, Any]:
    """Tokenise as much of every source as its share needs, then mix and pack."""
    from bosch.progress import progress
    from data_prep.mixture import DocumentStream, mix
    from data_prep.packing import pack, write_dataset
    from data_prep.sources import Source
    from data_prep.tokenize import Encoder, tokenise_source

    length = section.sequence_length
    sequences = math.ceil(section.train_tokens / length)
    tokens = sequences * length
    sources = [Source(**source.model_dump()) for source in section.sources]
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
                workers=_workers(config.runtime.data_workers, tokens),
                bar=bar,
            )
            for number, source in enumerate(sources)
        ]
    streams = [DocumentStream(t, config.seed, number) for number, t in enumerate(tokenised)]
    shutil.rmtree(work_dir / "train", ignore_errors=True)
    with progress(sequences, "packing", "sequences") as bar:
        packed = _counted(pack(mix(streams, weights, tokens), length), bar)
        write_dataset(work_dir / "train", packed, sequences, length)
    return {
        "documents": sum(stream.documents for stream in streams),
        "tokens": tokens,
        "sequences": sequences,
        "sequence_length": length,
        "bytes_per_token": _bytes_per_token(tokenised),
        "sources": {
            t.source.name: {
                "documents": stream.documents,
                "tokens": stream.tokens,
                "share": stream.tokens / tokens,
                "share_wanted": t.source.weight / sum(weights),
                "tokens_available": t.tokens,
                "epochs": stream.epochs,
                "bytes_per_token": _bytes_per_token([t]),
            }
            for t, stream in zip(tokenised, streams, strict=True)
        },
    }


def _counted(items: Iterator[Any], bar: Any) -> Iterator[Any]:
    for item in items:
        yield item
        bar.update()


def _bytes_per_token(tokenised: list[Any]) -> float:
    return float(sum(t.text_bytes for t in tokenised) / sum(t.tokens for t in tokenised))


def _workers(wanted: int | str, tokens: int) -> int:
    """Processes that tokenise; `auto` starts no more than the amount of text is worth."""
    if isinstance(wanted, int):
        return max(1, wanted)
    return max(1, min(len(os.sched_getaffinity(0)), tokens // _TOKENS_PER_WORKER))
