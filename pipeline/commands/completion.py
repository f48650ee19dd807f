"""`bosch completion SHELL`: a script that completes commands, options and files in a shell."""

from __future__ import annotations

import argparse
from pathlib import Path

import shtab

import bosch.commands
import pipeline.commands
from bosch.commands import PROGRAM, Command, add_arguments, all_commands

COMMAND = Command("print a script that completes commands, options and files in a shell")
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
    choices = parser.add_subparsers()
    for name, module in all_commands((bosch.commands, pipeline.commands)):
        command = choices.add_parser(name, help=module.COMMAND.help)
        for action in add_arguments(command, module)._actions:
            if action.type is Path or action.metavar in _PATHS:
                action.complete = shtab.FILE  # type: ignore[attr-defined]
    print(shtab.complete(parser, options.shell))
    return 0
