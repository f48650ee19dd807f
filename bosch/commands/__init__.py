"""The commands of `bosch`: every module here and in `pipeline/commands` that has a `COMMAND`.

Such a module, or the module `command` of a package, has `COMMAND = Command("what it does", …)`,
`run` and, if it has options, `add_options(parser)`.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import errno
import importlib
import json
import os
import pkgutil
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

PROGRAM = "bosch"
# The beginning of a module's command in its source.
_COMMAND = re.compile(r'^COMMAND = \w+\(\s*("[^"\n]*")', re.MULTILINE)


@dataclass(frozen=True)
class Command:
    """Description of a command, without its options: `run(options)` returns the exit status.

    `json`: with `--json` it prints one JSON value for programs, and nothing else.
    """

    help: str
    json: bool = False

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Add the options that all commands of this kind have."""
        if self.json:
            parser.add_argument("--json", action="store_true", help="print JSON, for programs")


def find_command(name: str, packages: Sequence[ModuleType]) -> ModuleType | None:
    """The module of a command; None for an unknown name."""
    for package in packages:
        if name in command_help([package]):
            module = next(
                entry for entry in pkgutil.iter_modules(package.__path__) if entry.name == name
            )
            path = f"{package.__name__}.{name}{'.command' if module.ispkg else ''}"
            return importlib.import_module(path)
    return None


def command_help(packages: Sequence[ModuleType]) -> dict[str, str]:
    """Descriptions of all commands by name, read from the source, since importing takes seconds."""
    descriptions = {}
    for package in packages:
        for module in pkgutil.iter_modules(package.__path__):
            file = Path(package.__path__[0], module.name, "command.py")
            if not module.ispkg:
                file = file.parent.with_suffix(".py")
            source = file.read_text(encoding="utf-8") if file.is_file() else ""
            if match := _COMMAND.search(source):
                descriptions[module.name] = str(ast.literal_eval(match[1]))
    return dict(sorted(descriptions.items()))


def all_commands(packages: Sequence[ModuleType]) -> Iterator[tuple[str, ModuleType]]:
    """Name and module of every command, by name; imports all of them."""
    for name in command_help(packages):
        module = find_command(name, packages)
        assert module is not None
        yield name, module


def add_arguments(parser: argparse.ArgumentParser, module: ModuleType) -> argparse.ArgumentParser:
    """The parser with the options and arguments of a command."""
    if hasattr(module, "add_options"):
        module.add_options(parser)
    module.COMMAND.add_arguments(parser)
    return parser


def command_parser(name: str, module: ModuleType) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(f"{PROGRAM} {name}", description=module.COMMAND.help)
    return add_arguments(parser, module)


def typed_path_fault(error: OSError, arguments: Sequence[str]) -> str | None:
    """A message if the system refused a path of the command line; else None."""
    if error.filename is None and error.errno == errno.ENOENT:
        return "the current directory was removed; change to one that is there"
    names = (error.filename, error.filename2)  # numbers, if a descriptor was refused
    refused = {Path(os.fsdecode(name)) for name in names if isinstance(name, str | bytes | Path)}
    if error.errno in (errno.ENAMETOOLONG, errno.EACCES):  # also if a folder above it was refused
        refused |= {parent for path in refused for parent in path.parents if parent.name}
    matches = []  # (how many folders above the argument's path, argument)
    for argument in arguments:
        option, _, value = argument.partition("=")
        path = Path(value if option.startswith("--") and value else argument)
        paths = [path, *(parent for parent in path.parents if parent.name)]
        matches += [(n, argument) for n, place in enumerate(paths) if place in refused]
    if not matches:
        return None
    _, nearest = min(matches, key=lambda match: match[0])
    return f"{nearest}: {error.strerror}; name another file or folder"


def print_json(value: Any) -> None:
    """Print a command's result as JSON."""
    print(json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False))


@contextmanager
def text_to_stderr(redirect: bool) -> Iterator[None]:
    """Redirect printed text to the error stream, so that the output is only JSON."""
    with contextlib.redirect_stdout(sys.stderr) if redirect else contextlib.nullcontext():
        yield


def listing(packages: Sequence[ModuleType]) -> str:
    """A line for each command."""
    return "\n".join(f"{name:<12}{text}" for name, text in command_help(packages).items())
