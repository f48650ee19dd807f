"""`python -m pipeline study NAME RECIPE`: one of the studies of a recipe's model."""

from __future__ import annotations

import argparse
import importlib
import shlex
from pathlib import Path

from pipeline.commands import options as shared_options
from pipeline.commands.paths import typed_path
from pipeline.commands.study.options import StudyOptions
from pipeline.recipe.load import ROOT
from stages.recipe import LoadedRecipe

STUDIES = ("optimality", "cost", "stability", "turnover", "granularity")
_DOCS = ROOT / "docs" / "notes" / "study"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of a study."""
    parser.add_argument("study", choices=STUDIES, help="what to find out")
    shared_options.add_options(parser, StudyOptions)


def run(loaded: LoadedRecipe, arguments: argparse.Namespace) -> int:
    """Write NAME.json, NAME.md and plots into the folder of results.

    Finished work is kept there in results.jsonl for all studies: one that was stopped continues,
    and one that needs the searches of another has them at once. Raises UserError for an option,
    model, calibration set or size that cannot be studied.
    """
    options = shared_options.read_options(StudyOptions, arguments, "study")
    folder = Path(options.output or loaded.output_root / loaded.recipe.name / "study")
    command = shlex.join(["python", "-m", "pipeline", *arguments.arguments])
    # By name, as stages are: torch is loaded after the options are checked.
    page = importlib.import_module("pipeline.commands.study.page")
    studied_model = importlib.import_module("pipeline.commands.study.studied_model")
    study = importlib.import_module(f"pipeline.commands.study.{arguments.study}").study
    result = study(studied_model.StudiedModel(loaded.recipe, options, folder))
    docs = _DOCS / loaded.recipe.name if options.docs else None
    file = page.publish(result, folder, command, docs)
    print(f"study: {typed_path(file)}")
    return 0
