"""`bosch export FORMAT MODEL_DIR OUT`: a hybrid for engines that do not know `bosch`."""

from __future__ import annotations

import argparse
import importlib
from pathlib import Path

from bosch.commands import Command

COMMAND = Command("write a hybrid for engines that do not know bosch")
FORMATS = {"layer_types": "bosch.engines.layer_types", "onnx": "bosch.engines.onnx"}


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "format",
        choices=list(FORMATS),
        help="layer_types: a plain checkpoint of a hybrid whose layers are whole; "
        "onnx: ONNX Runtime GenAI, any mask without sinks",
    )
    parser.add_argument("model", type=Path, metavar="MODEL_DIR", help="a hybrid model")
    parser.add_argument("output", type=Path, metavar="OUT", help="the new directory")


def run(options: argparse.Namespace) -> int:
    """Export and print the directory; raises UserError where the format cannot hold the model."""
    # Imported here, since it loads transformers.
    print(importlib.import_module(FORMATS[options.format]).export(options.model, options.output))
    return 0
