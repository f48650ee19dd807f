"""`bosch completion SHELL`: completes commands, options, files, stages, methods and keys."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import shtab

import bosch.commands
import pipeline.commands
from bosch.commands import PROGRAM, Command, add_arguments, all_commands
from bosch.search.methods import METHODS
from pipeline.recipe.faults import known_paths
from pipeline.recipe.stage_list import STAGES
from stages.stage import recipe_type

COMMAND = Command("print a script that completes commands, stages, methods and keys in a shell")
# Options whose values are paths, though their type is text: some may also be names on the hub.
_PATHS = ("DIR", "FILE", "MODEL_DIR", "PATH", "RECIPE")


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "shell",
        choices=shtab.SUPPORTED_SHELLS,
        help='your shell; bash: "bosch completion bash > ~/.bosch.bash", '
        'and "source ~/.bosch.bash" in ~/.bashrc',
    )


def run(options: argparse.Namespace) -> int:
    parser = argparse.ArgumentParser(PROGRAM)
    parser.add_argument("--version", action="store_true", help="print the version")
    keys = [f"{key}=" for key in known_paths(recipe_type(STAGES))]
    words = {"STAGE": [stage.name for stage in STAGES], "key.path=value": [*keys, *METHODS]}
    names = {kind: f"_bosch_words_{number}" for number, kind in enumerate(words)}
    choices = parser.add_subparsers()
    for name, module in all_commands((bosch.commands, pipeline.commands)):
        command = choices.add_parser(name, help=module.COMMAND.help)
        for action in add_arguments(command, module)._actions:
            if action.type is Path or action.metavar in _PATHS:
                action.complete = shtab.FILE  # type: ignore[attr-defined]
            elif (kind := str(action.metavar)) in words:
                listed = {"bash": names[kind], "zsh": f"({' '.join(words[kind])})"}
                action.complete = listed  # type: ignore[attr-defined]
    functions = (
        f"{name}() {{ compgen -W '{' '.join(words[kind])}' -- $1; }}\n"
        for kind, name in names.items()
    )
    preamble: Any = {"bash": "".join(functions)}  # shtab declares a text
    print(shtab.complete(parser, options.shell, preamble=preamble))
    return 0
