"""`bosch show MODEL`: which heads of a hybrid slide, and the bytes of its KV cache."""

from __future__ import annotations

import argparse
import importlib

from bosch.commands import Command, print_json
from bosch.masks import HeadMask
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
    mask = HeadMask(record["windows"], record["sinks"])
    sinks = f" and {mask.sinks} sinks" if mask.sinks else ""
    sizes = " or ".join(f"{window.size:,}" for window in mask.menu)
    total = mask.shape[0] * mask.shape[1]
    others = f"; the others see {sizes} tokens{sinks}" if sizes else ""
    print(
        f"{record['model']}: {record['model_type']}, {total - mask.num_sliding} of {total} KV "
        f"heads full{others}"
    )
    kinds = " + ".join(["full", *(f"{window.size:,}" for window in mask.menu)])
    rows = zip(record["layers"], mask.layers, strict=True)
    counts = (f"{layer}: {' + '.join(map(str, row.values()))}" for layer, row in rows)
    print(f"KV heads by layer ({kinds}):", ", ".join(counts))
    beside = states_text(record["layers_with_states"])
    for entry in record["cache_bytes"]:
        hybrid, original = (entry[name] / 2**20 for name in ("hybrid", "original"))
        print(
            f"{entry['tokens']:>9,} tokens: {hybrid:,.2f} MiB of KV cache instead of "
            f"{original:,.2f}{beside}"
        )
    return 0
