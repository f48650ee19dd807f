"""`bosch measure MODEL_DIR`."""

from __future__ import annotations

import argparse
import hashlib
import importlib
import os
from pathlib import Path

from pydantic import ValidationError

from bosch.commands import Command, print_json, text_to_stderr
from bosch.errors import UserError
from pipeline.recipe.faults import field_faults
from pipeline.recipe.load import listing
from pipeline.run import log
from stages.faults import Fault
from stages.measure.stage import MeasureSettings

COMMAND = Command("measure speed and memory of a model beside its hybrids", json=True)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL_DIR", help="an original or a hybrid model")
    parser.add_argument(
        "--output", metavar="DIR", help="default: runs/measure/<name>-<hash of its path>"
    )
    texts = {
        name: text[0].lower() + text[1:].rstrip(".")
        for name, text in MeasureSettings.descriptions().items()
    }
    for name, field in MeasureSettings.model_fields.items():
        if field.annotation is bool:
            parser.add_argument(_option(name), action="store_true", default=None, help=texts[name])
        else:
            values = field.default if isinstance(field.default, list) else [field.default]
            default = f"default: {','.join(map(str, values))}"
            parser.add_argument(_option(name), metavar="…", help=f"{texts[name]} ({default})")


def run(arguments: argparse.Namespace) -> int:
    """Measure and print the folder of the results."""
    log.configure("info")
    settings = _settings(arguments)
    output = arguments.output or default_output(arguments.model)
    # Imported here, since it loads torch.
    measurement = importlib.import_module("stages.measure.measurement")
    with text_to_stderr(arguments.json):
        report = measurement.measure(arguments.model, settings, Path(output))
    if arguments.json:
        print_json(report)
        return 0
    print(f"the figures are in {output}/efficiency.json, its picture beside it")
    return 0


def default_output(model: str) -> Path:
    """A folder for each model, with a hash, since every hybrid's directory is called model."""
    folder = Path(os.path.realpath(model))
    digest = hashlib.sha256(str(folder).encode()).hexdigest()[:8]
    return Path("runs", "measure", f"{folder.name}-{digest}")


def _settings(arguments: argparse.Namespace) -> MeasureSettings:
    """The options of the command line or defaults; raises UserError that lists all faulty ones."""
    values = {name: getattr(arguments, name) for name in MeasureSettings.model_fields}
    values = {name: value for name, value in values.items() if value is not None}
    try:
        # Values of the command line are text.
        return MeasureSettings.model_validate(values, strict=False)
    except ValidationError as error:
        faults = [
            Fault(_option(fault.path.partition(".")[0]), fault.text)
            for fault in field_faults(MeasureSettings, error)
        ]
        raise UserError(listing("measure", faults)) from None


def _option(field: str) -> str:
    return "--" + field.replace("_", "-")
