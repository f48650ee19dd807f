"""The commands of `bosch`: each is a module here or in `pipeline/commands`, and no list names it.

Such a module, or the module `command` of a package, has `COMMAND`, `add_options(parser)` and `run`.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import pkgutil
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any

PROGRAM = "bosch"


@dataclass(frozen=True)
class Command:
    """What a command is, beside its options: `run(options)` returns the exit status.

    `json`: with `--json` it prints one JSON value for programs, and nothing else.
    """

    help: str
    json: bool = False

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Add the options that all commands of this kind have."""
        if self.json:
            parser.add_argument("--json", action="store_true", help="print JSON, for programs")


def find_command(name: str, packages: Sequence[ModuleType]) -> ModuleType | None:
    """The module of a command; None where there is none of that name."""
    for package in packages:
        for found in pkgutil.iter_modules(package.__path__):
            if found.name == name:
                path = f"{package.__name__}.{name}{'.command' if found.ispkg else ''}"
                module = importlib.import_module(path)
                return module if hasattr(module, "COMMAND") else None
    return None


def all_commands(packages: Sequence[ModuleType]) -> Iterator[tuple[str, ModuleType]]:
    """Name and module of every command, by name."""
    names = {found.name for package in packages for found in pkgutil.iter_modules(package.__path__)}
    for name in sorted(names):
        module = find_command(name, packages)
        if module is not None:
            yield name, module


def add_arguments(parser: argparse.ArgumentParser, module: ModuleType) -> argparse.ArgumentParser:
    """The parser with the options and arguments of a command."""
    module.add_options(parser)
    module.COMMAND.add_arguments(parser)
    return parser


def command_parser(name: str, module: ModuleType) -> argparse.ArgumentParser:
    """The parser of one command."""
    parser = argparse.ArgumentParser(f"{PROGRAM} {name}", description=module.COMMAND.help)
    return add_arguments(parser, module)


def print_json(value: Any) -> None:
    """Print what a command says to programs."""
    print(json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False))


@contextmanager
def text_aside(aside: bool) -> Iterator[None]:
    """Send what is printed meanwhile to the error stream: the output is JSON alone."""
    with contextlib.redirect_stdout(sys.stderr) if aside else contextlib.nullcontext():
        yield


def listing(modules: Iterable[tuple[str, ModuleType]]) -> str:
    """A line for each command."""
    return "\n".join(f"{name:<12}{module.COMMAND.help}" for name, module in modules)
