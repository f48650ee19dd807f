"""Command line: `bosch COMMAND …`, or `python -m pipeline COMMAND …`.

Commands are the modules in `bosch/commands` and `pipeline/commands`; a module is imported when its
command is used.

Exit status: 0 done, 2 invalid input, 1 a failure, 76 a process of a stage was killed or lost,
130 stopped by Ctrl-C. SIGTERM, SIGUSR1 and SIGHUP end with 75 when training has written a restart
point, else with 143.
"""

from __future__ import annotations

import argparse
import errno
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
from bosch.errors import LostRankError, RunError, StoppedError, UserError, printable
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
        options = _parse(sys.argv[1:] if arguments is None else arguments)
        module = options.module
        command = module.COMMAND
        if not isinstance(command, RecipeCommand):
            return _flushed(module.run(options))
        log.show_steps(options.verbose)
        loaded = load_recipe(
            options.recipe,
            options.overrides,
            fetch=command.fetch,
            input_files=command.input_files,
            model_files=command.model_files,
            model_family=command.model_family,
            stages=stages,
        )
        root = loaded.output_root
        log.configure(loaded.recipe.runtime.log_level)
        return _flushed(module.run(loaded, options))
    except UserError as fault:
        return _say(f"error: {fault}", 2)
    except LostRankError as lost:
        return _say(f"error: {lost}", failures.LOST_RANK_STATUS)
    except RunError as failure:
        return _say(f"error: {failure}", 1)
    except (KeyboardInterrupt, StoppedError, failures.Terminated) as stop:
        return _stopped(stop)
    except BrokenPipeError:
        # The reader of the output has closed it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:
        if (full := failures.no_space(error, root)) is not None:
            return _say(f"error: {full}", 1)
        if isinstance(error, OSError) and root is not None and _refused(error, root):
            reason = f"{error.strerror}: {error.filename}"
            return _say(f"error: runtime.output_root: {root} cannot be used ({reason})", 2)
        if isinstance(error, OSError) and root is not None and (path := _obstacle(error, root)):
            return _say(f"error: {path}: is in the way of the run's own files; move it away", 1)
        typed = sys.argv[1:] if arguments is None else arguments
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


def _refused(error: OSError, root: Path) -> bool:
    """Whether access to the output root, a folder above or a path below it was denied."""
    path = Path(str(error.filename))
    is_related = root == path or root in path.parents or path in root.parents
    return error.errno in (errno.EACCES, errno.EPERM, errno.EROFS) and is_related


def _obstacle(error: OSError, root: Path) -> Path | None:
    """A path below the output root that has the wrong kind (file or folder), or None."""
    if error.errno not in (errno.EEXIST, errno.EISDIR, errno.ENOTDIR, errno.ENOTEMPTY, errno.ELOOP):
        return None
    path = Path(str(error.filename2 or error.filename))
    if root not in path.parents:
        return None
    above = [parent for parent in reversed(path.parents) if root in parent.parents]
    return next((parent for parent in above if not parent.is_dir()), path)


def _stopped(stop: BaseException) -> int:
    """Report a stop; ignores further signals, which would change the exit status."""
    ignore_stops()
    message, status = "terminated", 143
    if isinstance(stop, KeyboardInterrupt):
        message, status = "stopped", 130
    elif isinstance(stop, StoppedError):
        message, status = str(stop), failures.REQUEUE_STATUS
    return _say(f"{message}; the same command resumes from here", status)


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
    name = arguments[0] if arguments else ""
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
