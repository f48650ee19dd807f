"""Processor time of tokenising and packing against the tokenizers library's alone, and its memory.

    pytest -s tests/benchmarks/test_prepare_speed.py

The text is pydoc's topics twice, as JSONL records of 3,000 characters (0.9 MB), with byte-level
BPEs of 512 tokens (2 characters each) and of 8,192 (4.4, about as in large models); one worker with
one thread, like each worker of the stage. The library's part is `encode_batch_fast` over the same
texts in batches of the same size. Rounds of both alternate, and the best of 60 counts: the rounds
are short, because other work on the machine disturbs every long one. Peak memory is measured in a
process of its own, which tokenises one text file of 15 MB.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import pytest

from bosch.progress import Progress
from data_prep.documents.packing import DocumentStream, mix, pack, write_dataset
from data_prep.documents.sources import Source
from data_prep.documents.tokenization import tokenise_source
from data_prep.documents.tokenizer import WINDOW, Encoder, TokenizerSpec
from data_prep.text import pydoc_topics
from stages.measure.process import memory_meter
from tests.rank_processes import printed_bytes
from tests.tiny_data import tiny_tokenizer

pytestmark = pytest.mark.slow

_LENGTH = 4096


def _texts() -> list[str]:
    text = "\n".join(pydoc_topics().values()) * 2
    return [text[at : at + 3000] for at in range(0, len(text), 3000)]


def _encoder(vocabulary: int = 512) -> Encoder:
    tokenizer = tiny_tokenizer(vocabulary)
    return Encoder(TokenizerSpec(""), tokenizer.backend_tokenizer.to_str(), 0)


def _tokenise_and_pack(source: Source, encoder: Encoder, folder: Path) -> int:
    tokenised = tokenise_source(
        source,
        encoder,
        folder / "tokens",
        tokens=10**12,
        seed=0,
        sequence_length=_LENGTH,
        workers=1,
        bar=Progress(None, "test", "tokens"),
    )
    sequences = tokenised.tokens // _LENGTH
    documents = mix([DocumentStream(tokenised, 0, 0)], [1.0], sequences * _LENGTH)
    write_dataset(folder / "train", pack(documents, _LENGTH), sequences, _LENGTH)
    return tokenised.tokens


@pytest.mark.parametrize("vocabulary", [512, 8192])
def test_tokenising_and_packing_cost_little_more_than_encoding(
    vocabulary: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    texts = _texts()
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
    (tmp_path / "a.jsonl").write_text(lines)
    source = Source("s", "jsonl", str(tmp_path / "a.jsonl"))
    encoder, backend = _encoder(vocabulary), tiny_tokenizer(vocabulary).backend_tokenizer
    per_batch = max(1, WINDOW // 3000)
    batches = [texts[at : at + per_batch] for at in range(0, len(texts), per_batch)]
    _tokenise_and_pack(source, encoder, tmp_path / "warm")
    encoding, stage = [], []
    for number in range(60):
        started = time.process_time()
        for batch in batches:
            backend.encode_batch_fast(batch, add_special_tokens=False)
        encoding.append(time.process_time() - started)
        started = time.process_time()
        tokens = _tokenise_and_pack(source, encoder, tmp_path / f"{number}")
        stage.append(time.process_time() - started)
    ratio = min(encoding) / min(stage)
    print(
        f"\n{vocabulary} tokens, {sum(map(len, texts)) / tokens:.1f} characters each: "
        f"encode_batch_fast {tokens / min(encoding) / 1e6:.2f}, tokenise and pack "
        f"{tokens / min(stage) / 1e6:.2f} million tokens per second; ratio {ratio:.2f}"
    )
    assert ratio >= 0.9


def test_memory_does_not_grow_with_a_document(tmp_path: Path) -> None:
    peaks = {}
    for megabytes in (1, 15):
        file = tmp_path / f"{megabytes}.txt"
        text = "\n".join(pydoc_topics().values())
        file.write_text(text * (megabytes * 2**20 // len(text) + 1))
        peak = printed_bytes("test_prepare_speed", str(file), TOKENIZERS_PARALLELISM="false")
        peaks[megabytes] = peak / 2**20
    print(f"\nin MiB, for a document of 1 and of 15 MB: {peaks[1]:.0f}, {peaks[15]:.0f}")
    # The token ids of the additional 14 MB, 4 bytes each, are mapped files and may count.
    assert peaks[15] < peaks[1] + 100


def _measure(file: Path) -> int:
    """Peak memory of tokenising and packing a text file, less what was held before, in bytes."""
    import tempfile

    import torch

    encoder = _encoder()
    encoder(["warm"])
    # Not ru_maxrss, which includes the parent's peak.
    meter = memory_meter(torch.device("cpu"))
    before = meter.peak()
    with tempfile.TemporaryDirectory() as folder:
        _tokenise_and_pack(Source("s", "text", str(file)), encoder, Path(folder))
    return meter.peak() - before


if __name__ == "__main__":
    print(_measure(Path(sys.argv[1])))
