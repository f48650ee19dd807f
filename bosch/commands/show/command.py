"""`bosch show MODEL`: which heads of a hybrid slide, and the bytes of its KV cache."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Iterable

from bosch.commands import Command, print_json
from bosch.model.cache_size import states_text

COMMAND = Command("say which heads of a hybrid model slide and what its KV cache holds", json=True)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL_DIR", help="directory, or name on the hub")


def run(options: argparse.Namespace) -> int:
    """Print layers and bytes; raises UserError for a model that is no hybrid."""
    # Imported here, since it loads transformers.
    record = importlib.import_module("bosch.commands.show.hybrid").hybrid_record(options.model)
    if options.json:
        print_json(record)
        return 0
    full, heads = record["full_kv_heads_per_layer"], record["key_value_heads_per_layer"]
    sinks = f" and {record['sinks']} sinks" if record["sinks"] else ""
    sliding = record.get("swa_kv_heads_per_layer", {})
    sizes = record.get("window_sizes") or [record["window_size"]]
    count, total = sum(full.values()), heads * len(full)
    others = f"; the others see {_joined(sizes)} tokens{sinks}" if count < total else ""
    print(f"{record['model']}: {record['model_type']}, {count} of {total} KV heads full{others}")
    print("full KV heads by layer:", ", ".join(f"{layer}: {n}" for layer, n in full.items()))
    if sliding:
        counts = (f"{layer}: {' + '.join(map(str, n))}" for layer, n in sliding.items())
        print(f"KV heads with {_joined(sizes)} tokens by layer:", ", ".join(counts))
    beside = states_text(record["layers_with_states"])
    for entry in record["cache_bytes"]:
        hybrid, original = (entry[name] / 2**20 for name in ("hybrid", "original"))
        print(
            f"{entry['tokens']:>9,} tokens: {hybrid:,.2f} MiB of KV cache instead of "
            f"{original:,.2f}{beside}"
        )
    return 0


def _joined(sizes: Iterable[int]) -> str:
    return " or ".join(f"{size:,}" for size in sizes)
