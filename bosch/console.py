"""The program `bosch`: in a checkout every command, where the library is alone those of its own."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from bosch import commands
from bosch.commands import (
    PROGRAM,
    command_help,
    command_parser,
    find_command,
    listing,
    typed_path_fault,
)
from bosch.errors import RunError, UserError, printable
from bosch.version import VERSION

CHECKOUT = Path(__file__).resolve().parents[1] / "pipeline" / "__main__.py"
_NEEDS = (
    "needs the checkout, of which only the library is installed here: clone the repository and "
    "run launch/setup.sh"
)


def main() -> int:
    """What the installed program does; of a checkout it becomes the pipeline's command line."""
    if CHECKOUT.is_file():
        # The pipeline says itself from where it imports, and what its processes are.
        os.execv(sys.executable, [sys.executable, str(CHECKOUT), *sys.argv[1:]])
    return library_main(sys.argv[1:])


def library_main(arguments: Sequence[str]) -> int:
    """Run a command of the library and return its exit status."""
    name = arguments[0] if arguments else "--help"
    if name == "--version":
        print(f"{PROGRAM} {VERSION}")
        return 0
    if name in ("-h", "--help"):
        print(f"usage: {PROGRAM} COMMAND ...\n\n{listing([commands])}\n\n"
              f"Every other command, such as run, {_NEEDS}.")  # fmt: skip
        return 0
    module = find_command(name, [commands])
    try:
        if module is None:
            own = ", ".join(command_help([commands]))
            raise UserError(f"{name}: {_NEEDS}; the library's own commands are {own}")
        status = int(module.run(command_parser(name, module).parse_args(arguments[1:])))
        print(end="", flush=True)
        return status
    except UserError as fault:
        print(printable(f"error: {fault}"), file=sys.stderr)
        return 2
    except RunError as failure:
        print(printable(f"error: {failure}"), file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        message = typed_path_fault(error, arguments[1:])
        if message is None:
            raise
        print(printable(f"error: {message}"), file=sys.stderr)
        return 2
