"""`bosch measure MODEL_DIR`."""

from __future__ import annotations

import argparse
import hashlib
import importlib
import os
from pathlib import Path

from bosch.commands import Command, print_json, text_to_stderr
from pipeline.commands import options as shared_options
from pipeline.run import log
from stages.measure.stage import MeasureSettings

COMMAND = Command("measure speed and memory of a model beside its hybrids", json=True)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL_DIR", help="an original or a hybrid model")
    parser.add_argument(
        "--original",
        metavar="DIR",
        help="original of a hybrid MODEL_DIR (default: its own weights with every head full)",
    )
    parser.add_argument(
        "--output", metavar="DIR", help="default: runs/measure/<name>-<hash of its path>"
    )
    shared_options.add_options(parser, MeasureSettings)


def run(arguments: argparse.Namespace) -> int:
    """Measure and print the folder of the results."""
    log.configure("info")
    settings = shared_options.read_options(MeasureSettings, arguments, "measure")
    output = arguments.output or default_output(arguments.model)
    # Imported here, since it loads torch.
    measurement = importlib.import_module("stages.measure.measurement")
    with text_to_stderr(arguments.json):
        report = measurement.measure(arguments.model, arguments.original, settings, Path(output))
    if arguments.json:
        print_json(report)
        return 0
    print(f"the figures are in {output}/efficiency.json, its page and plots beside it")
    return 0


def default_output(model: str) -> Path:
    """A folder for each model, with a hash, since every hybrid's directory is called model."""
    folder = Path(os.path.realpath(model))
    digest = hashlib.sha256(str(folder).encode()).hexdigest()[:8]
    return Path("runs", "measure", f"{folder.name}-{digest}")
