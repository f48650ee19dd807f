"""Command line: `bosch COMMAND …`, or `python -m pipeline COMMAND …`.

Commands are the modules in `bosch/commands` and `pipeline/commands`; a module is imported when its
command is used.

Exit status: 0 done, 1 a failure, 2 invalid input, 130 stopped by Ctrl-C, 75 asked to stop (SIGTERM,
SIGUSR1, SIGHUP): a scheduler may queue the command again.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import bosch.commands
import pipeline.commands
from bosch.commands import (
    PROGRAM,
    all_commands,
    command_help,
    command_parser,
    find_command,
    listing,
    typed_path_fault,
)
from bosch.errors import RunError, StoppedError, UserError, is_disk_full, printable
from bosch.this_process import STOP_SIGNALS
from bosch.version import VERSION
from pipeline.commands import RecipeCommand
from pipeline.recipe.load import load_recipe
from pipeline.recipe.stage_list import STAGES
from pipeline.run import failures, log
from pipeline.run.failures import ignore_stops
from stages.stage import Stage

_PACKAGES = (bosch.commands, pipeline.commands)


def commands() -> Mapping[str, ModuleType]:
    """Every command by name; imports all of them."""
    return dict(all_commands(_PACKAGES))


def main(arguments: Sequence[str] | None = None, stages: Sequence[Stage[Any]] = STAGES) -> int:
    """Run one command and return its exit status; no traceback reaches the user."""
    try:
        return _run(arguments, stages)
    except (KeyboardInterrupt, failures.Terminated) as second:  # while the first stop is handled
        return _stopped(second.__context__ or second)


def _run(arguments: Sequence[str] | None, stages: Sequence[Stage[Any]]) -> int:
    for number in STOP_SIGNALS:
        signal.signal(number, _terminated)
    log.show_any_character()
    log.silence_imports()
    root: Path | None = None
    try:
        typed = sys.argv[1:] if arguments is None else arguments
        if not typed:
            print(listing(_PACKAGES))
            return _flushed(0)
        options = _parse(typed)
        module = options.module
        command = module.COMMAND
        if not isinstance(command, RecipeCommand):
            return _flushed(module.run(options))
        without: Any = dict.fromkeys(command.without, False)
        loaded = load_recipe(options.recipe, options.overrides, stages=stages, **without)
        root = loaded.output_root
        log.configure(loaded.recipe.runtime.log_level)
        return _flushed(module.run(loaded, options))
    except UserError as fault:
        return _say(f"error: {fault}", 2)
    except RunError as failure:
        return _say(f"error: {failure}", 1)
    except (KeyboardInterrupt, StoppedError, failures.Terminated) as stop:
        return _stopped(stop)
    except BrokenPipeError:
        # The reader of the output has closed it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:
        if is_disk_full(error):
            try:
                print(end="", flush=True)
            except OSError:  # the output is full; the interpreter would flush it again
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return _say(f"error: {failures.no_space(error, root)}", 1)
        if isinstance(error, OSError) and root is not None and _concerns(error, root):
            reason = f"{error.strerror}: {error.filename2 or error.filename}"
            return _say(f"error: runtime.output_root: {root} cannot be used ({reason})", 2)
        if isinstance(error, OSError) and (message := typed_path_fault(error, typed[1:])):
            return _say(f"error: {message}", 2)
        return _say(f"error: {failures.unexpected(error, _log_file(root))}", 1)


def _flushed(status: int) -> int:
    """The status, after flushing all output: the interpreter would not report a failure of it."""
    print(end="", flush=True)
    return int(status)


def _terminated(signum: int, frame: object) -> None:
    if signum == signal.SIGHUP:  # a closing terminal sends it twice
        signal.signal(signum, signal.SIG_IGN)
    raise failures.Terminated


def _concerns(error: OSError, root: Path) -> bool:
    """Whether an error is about the output root, a folder above or a path below it."""
    path = Path(str(error.filename2 or error.filename))
    return root == path or root in path.parents or path in root.parents


def _stopped(stop: BaseException) -> int:
    """Report a stop; ignores further signals, which would change the exit status."""
    ignore_stops()
    message, status = str(stop) or "stopped", failures.REQUEUE_STATUS
    if isinstance(stop, KeyboardInterrupt):
        message, status = "stopped", 130
    forced = any(argument.startswith("--force") for argument in sys.argv)
    command = "the same command" + (" without --force" if forced else "")
    return _say(f"{message}; {command} resumes from here", status)


def _say(message: str, status: int) -> int:
    print(printable(message), file=sys.stderr, flush=True)
    return status


def _log_file(root: Path | None) -> Path:
    """The file for the traceback of an unexpected failure."""
    name = f"bosch-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.log"
    if root is not None and os.access(root, os.W_OK):
        return root / "logs" / name
    # A new folder, in which nobody can have placed a link.
    return Path(tempfile.mkdtemp(prefix="bosch-")) / name


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The command and its options; overrides may stand before, between and after options."""
    name = arguments[0]
    module = None if name.startswith("-") else find_command(name, _PACKAGES)
    if module is not None:
        options = argparse.Namespace(module=module, arguments=list(arguments))
        return command_parser(name, module).parse_intermixed_args(arguments[1:], options)
    parser = argparse.ArgumentParser(
        PROGRAM,
        description="Makes a hybrid of full and sliding attention heads out of a language model.",
        epilog=listing(_PACKAGES),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"{PROGRAM} {VERSION}")
    parser.add_argument(
        "command", choices=command_help(_PACKAGES), help="what to do; each has its own --help"
    )
    parser.add_argument("arguments", nargs="...", metavar="RECIPE [key.path=value ...] [options]")
    return parser.parse_args(arguments)
