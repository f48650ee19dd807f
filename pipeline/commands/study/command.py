"""`bosch study NAME RECIPE`: one of the studies of a recipe's model."""

from __future__ import annotations

import argparse
import importlib
import shlex
from dataclasses import replace
from pathlib import Path

from bosch.commands import PROGRAM
from bosch.errors import UserError
from pipeline.commands import RecipeCommand
from pipeline.commands import options as shared_options
from pipeline.commands.paths import typed_path
from pipeline.commands.study import StudyOptions
from pipeline.recipe.load import ROOT
from pipeline.recipe.processes import require_one_node
from stages.search.stage import SearchConfig
from stages.stage import LoadedRecipe
from stages.train.stage import TrainConfig

COMMAND = RecipeCommand(
    "compare the search's methods on a recipe's model, see docs/notes/study.md", input_files=False
)

STUDIES = ("optimality", "cost", "stability", "turnover", "granularity", "headbench")
_DOCS = ROOT / "docs" / "notes" / "study"

_ONE_WINDOW = "bosch"  # a method with one window
# Options that only one study reads, with that study.
_STUDIES = {"sizes": "stability", "granularities": "granularity", "with_training": "headbench"}


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("study", choices=STUDIES, help="what to find out")
    shared_options.add_options(parser, StudyOptions)


def run(loaded: LoadedRecipe, arguments: argparse.Namespace) -> int:
    """Write NAME.json, NAME.md and plots into the folder of results.

    results.jsonl there holds finished work of all studies, so a stopped study resumes and studies
    share searches. Raises UserError for an option, model, calibration set or size that cannot be
    studied.
    """
    options = shared_options.read_options(StudyOptions, arguments, "study")
    # Studies use one window, the widest in the recipe.
    search = loaded.recipe[SearchConfig].by_method(_ONE_WINDOW)
    recipe = loaded.recipe.model_copy(update={"search": search})
    require_one_node("study", loaded.world)
    for name in sorted(options.model_fields_set & _STUDIES.keys()):
        if arguments.study != _STUDIES[name]:
            option = f"--{name.replace('_', '-')}: study {_STUDIES[name]} uses it"
            raise UserError(f"{option}, {arguments.study} does not")
    if options.with_training and loaded.recipe.get(TrainConfig) is None:
        raise UserError("--with-training: the recipe has no section train")
    folder = Path(options.output or loaded.output_root / loaded.recipe.name / "study")
    command = shlex.join([PROGRAM, *arguments.arguments])
    # Imported here, since it loads torch.
    page = importlib.import_module("pipeline.commands.study.page")
    studied_model = importlib.import_module("pipeline.commands.study.studied_model")
    study = importlib.import_module(f"pipeline.commands.study.{arguments.study}").study
    result = study(studied_model.StudiedModel(replace(loaded, recipe=recipe), options, folder))
    docs = _DOCS / loaded.recipe.name if options.docs else None
    file = page.publish(result, folder, command, docs)
    print(f"study: {typed_path(file)}")
    return 0
