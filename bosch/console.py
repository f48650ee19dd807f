"""The program `bosch`: all commands in a checkout, otherwise only those of the library."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from bosch import commands
from bosch.errors import RunError, UserError, printable
from bosch.version import VERSION

_CHECKOUT = Path(__file__).resolve().parents[1]
_PIPELINE = _CHECKOUT / "pipeline" / "__main__.py"
_NEEDS = (
    "needs the checkout, of which only the library is installed here: clone the repository and "
    "run launch/setup.sh"
)


def main() -> int:
    """Run the installed program; in a checkout, run the pipeline's command line instead."""
    # In site-packages a package named pipeline belongs to another project.
    if _PIPELINE.is_file() and (_CHECKOUT / "launch" / "setup.sh").is_file():
        # Not imported here: the pipeline sets its import path before it loads anything.
        os.execv(sys.executable, [sys.executable, str(_PIPELINE), *sys.argv[1:]])
    return library_main(sys.argv[1:])


def library_main(arguments: Sequence[str]) -> int:
    """Run a command of the library and return its exit status."""
    try:
        status = _run(arguments)
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
        message = commands.typed_path_fault(error, arguments[1:])
        if message is None:
            raise
        print(printable(f"error: {message}"), file=sys.stderr)
        return 2


def _run(arguments: Sequence[str]) -> int:
    name = arguments[0] if arguments else "--help"
    if name == "--version":
        print(f"{commands.PROGRAM} {VERSION}")
        return 0
    if name in ("-h", "--help"):
        print(f"usage: {commands.PROGRAM} COMMAND ...\n\n{commands.listing([commands])}\n\n"
              f"Every other command, such as run, {_NEEDS}.")  # fmt: skip
        return 0
    module = commands.find_command(name, [commands])
    if module is None:
        names = ", ".join(commands.command_help([commands]))
        raise UserError(f"{name}: {_NEEDS}; the library's own commands are {names}")
    return int(module.run(commands.command_parser(name, module).parse_args(arguments[1:])))
