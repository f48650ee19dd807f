"""`bosch completion SHELL`: what makes a shell complete commands, options and files."""

from __future__ import annotations

import argparse

import shtab

import bosch.commands
import pipeline.commands
from bosch.commands import PROGRAM, Command, add_arguments, all_commands

COMMAND = Command("print what completes commands and options in a shell")
_FILES = ("RECIPE", "MODEL_DIR", "DIR", "SOURCE", "TARGET", "RUN")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the name of the shell."""
    parser.add_argument(
        "shell",
        choices=shtab.SUPPORTED_SHELLS,
        help='your shell, as in eval "$(bosch completion bash)" in ~/.bashrc',
    )


def run(options: argparse.Namespace) -> int:
    """Print the script."""
    parser = argparse.ArgumentParser(PROGRAM)
    parser.add_argument("--version", action="store_true", help="print the version")
    choices = parser.add_subparsers()
    for name, module in all_commands((bosch.commands, pipeline.commands)):
        command = choices.add_parser(name, help=module.COMMAND.help)
        for action in add_arguments(command, module)._actions:
            if action.metavar in _FILES:
                action.complete = shtab.FILE  # type: ignore[attr-defined]
    print(shtab.complete(parser, options.shell))
    return 0
