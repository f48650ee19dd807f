"""MB of uncompressed shard that one core reads per second: verified, decompressed, decoded.

    pytest -s tests/benchmarks/test_mds_speed.py

Records are as ProLong's: 4,096 token ids (uint32) in 16 kB, two spans, a domain. One shard of
64 MB, processor time, the best of five, without detokenising.
"""

from __future__ import annotations

import hashlib
import json
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from data_prep.documents.mds import read_samples
from data_prep.documents.mds_index import read_index

pytestmark = pytest.mark.slow

_TOKENS = 4096
_RECORDS = 3900


def _array(values: np.ndarray) -> bytes:
    """Encode as ndarray:uint32: a byte for the number and the width of sizes, sizes, values."""
    return (
        bytes([values.ndim << 2 | 1]) + np.array(values.shape, "<u2").tobytes() + values.tobytes()
    )


def _record(rng: np.random.Generator) -> bytes:
    ids = rng.zipf(1.3, _TOKENS).clip(max=128_000).astype("<u4")
    spans = np.array([[0, 1000], [1000, _TOKENS]], "<u4")
    columns = [b"web", _array(spans), _array(ids)]
    sizes = np.array([len(column) for column in columns], "<u4").tobytes()
    return sizes + b"".join(columns)


def write_shard(folder: Path, *, compressed: bool) -> int:
    """Write one shard and its index; returns the number of uncompressed bytes."""
    rng = np.random.default_rng(0)
    records = [_record(rng) for _ in range(_RECORDS)]
    offsets = np.cumsum([4 * (_RECORDS + 2), *map(len, records)]).astype("<u4").tobytes()
    plain = np.uint32(_RECORDS).tobytes() + offsets + b"".join(records)
    names = {"raw_data": "shard.mds", "zip_data": "shard.mds.zstd"}
    forms = {"raw_data": plain, "zip_data": pa.compress(plain, codec="zstd", asbytes=True)}
    entry = {
        "version": 2,
        "format": "mds",
        "samples": _RECORDS,
        "compression": "zstd",
        "column_names": ["domain", "indices", "input_ids"],
        "column_encodings": ["str", "ndarray:uint32", "ndarray:uint32"],
        "column_sizes": [None] * 3,
    } | {
        form: {
            "basename": names[form],
            "bytes": len(data),
            "hashes": {"sha1": hashlib.sha1(data).hexdigest()},
        }
        for form, data in forms.items()
    }
    form = "zip_data" if compressed else "raw_data"
    (folder / names[form]).write_bytes(forms[form])
    (folder / "index.json").write_text(json.dumps({"version": 2, "shards": [entry]}))
    return len(plain)


@pytest.mark.parametrize("compressed", [True, False])
def test_shards_are_read_at_200_mb_per_second(tmp_path: Path, compressed: bool) -> None:
    size = write_shard(tmp_path, compressed=compressed)
    times = []
    for _ in range(5):
        started = time.process_time()
        [shard] = read_index(tmp_path / "index.json")
        tokens = sum(s["input_ids"].size for s in read_samples(tmp_path, shard))
        times.append(time.process_time() - started)
    assert tokens == _TOKENS * _RECORDS
    speed = size / 1e6 / min(times)
    print(f"\n{'zstd' if compressed else 'plain'}: {speed:,.0f} MB/s")
    assert speed >= 200
