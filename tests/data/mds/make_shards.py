"""Made these shards with mosaicml-streaming 0.13: `python make_shards.py tests/data/mds`.

That library does not install beside transformers 5, so it needs an environment of its own. The
token ids are the bytes of the texts.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
from streaming.base.format.mds.writer import MDSWriter

TEXTS = ["First document. ", "Second one, a little longer. ", "Third: äöü €. "]


def packed(times: int) -> tuple[np.ndarray, list[tuple[int, int]]]:
    """The three texts, each repeated, as ids in one record, and where each lies in it."""
    pieces = [np.frombuffer((text * times).encode(), np.uint8) for text in TEXTS]
    ends = np.cumsum([len(piece) for piece in pieces]).tolist()
    return np.concatenate(pieces), list(zip([0, *ends[:-1]], ends, strict=True))


def main(folder: Path) -> None:
    """Write five small folders of shards, one for each form of columns that is read."""
    records = [packed(times) for times in range(1, 7)]
    packed_records = [
        {
            "domain": "d",
            "input_ids": ids.astype(np.uint32),
            "indices": np.array(spans, np.uint32),
            "length": len(ids),
        }
        for ids, spans in records
    ]
    columns = {"domain": "str", "input_ids": "ndarray:uint32", "length": "int"}
    write(folder / "plain", columns, None, [{k: r[k] for k in columns} for r in packed_records])
    write(folder / "packed_zstd", {**columns, "indices": "ndarray:uint32"}, "zstd", packed_records)
    dynamic_records = [
        {"input_ids": ids.astype(np.int32), "indices": spans} for ids, spans in records
    ]
    write(folder / "dynamic", {"input_ids": "ndarray", "indices": "json"}, None, dynamic_records)
    fixed_records = [
        {"input_ids": ids[:8].astype(np.int32), "token_count": np.uint16(8)} for ids, _ in records
    ]
    write(
        folder / "fixed",
        {"input_ids": "ndarray:int32:8", "token_count": "uint16"},
        None,
        fixed_records,
    )
    write(folder / "text", {"text": "str"}, "zstd:7", [{"text": text} for text in TEXTS])


def write(folder: Path, columns: dict, compression: str | None, records: list[dict]) -> None:
    """One folder of shards of at most 2,200 bytes."""
    options = {"compression": compression, "hashes": ["sha1"], "size_limit": 2200}
    with MDSWriter(out=str(folder), columns=columns, **options) as writer:
        for record in records:
            writer.write(record)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
