"""Command line: `python -m pipeline COMMAND RECIPE [key.path=value ...]`.

Commands are run, status, validate, plan, compare and study. Beside the recipes' commands,
`measure MODEL_DIR` measures speed and memory (pipeline/measure.py).

Exit status: 0 done, 2 the user's fault, 1 a failure, 130 and 143 stopped by Ctrl-C and SIGTERM.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

from bosch.errors import RunError, UserError
from pipeline import compare, log, measure, study
from pipeline.graph import STAGES, Stage, resolve
from pipeline.inputs import missing_inputs
from pipeline.recipe import LoadedRecipe, load_recipe
from pipeline.status import StageState, inspect
from pipeline.store import Store
from pipeline.worker import disk_full_sentence, is_disk_full
from stages.studying.options import STUDIES

# `status` reads at most so much of new input files; beyond it, it says that they are not hashed.
_STATUS_BUDGET = 64 * 1024**2


def main(arguments: Sequence[str] | None = None, stages: Sequence[Stage] = STAGES) -> int:
    """Run one command and return its exit status; no traceback reaches the user."""
    signal.signal(signal.SIGTERM, _terminated)
    options = _parse(sys.argv[1:] if arguments is None else arguments)
    root: Path | None = None
    try:
        if options.command == "measure":
            return measure.run(options)
        lean = options.command == "status"
        # A plan is made before the data is fetched; a study reads none of it.
        planned = options.command in ("plan", "study")
        loaded = load_recipe(
            options.recipe, options.overrides, fetch=not lean, input_files=not planned
        )
        root = loaded.output_root
        log.configure(loaded.recipe.runtime.log_level)
        return _COMMANDS[options.command](loaded, options, stages)
    except UserError as fault:
        return _say(f"error: {fault}", 2)
    except RunError as failure:
        return _say(f"error: {failure}", 1)
    except KeyboardInterrupt:
        return _say("stopped; the same command goes on from here", 130)
    except _Terminated:
        return _say("terminated; the same command goes on from here", 143)
    except BrokenPipeError:
        # The reader of our output is gone; there is nobody to tell.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:
        if isinstance(error, OSError) and root is not None and is_disk_full(error):
            return _say(f"error: {disk_full_sentence(root)}", 1)
        if isinstance(error, OSError) and root is not None and _refused(error, root):
            return _say(f"error: runtime.output_root: {root} cannot be written to", 2)
        return _say(_unexpected(error, root), 1)


class _Terminated(Exception):
    """SIGTERM arrived."""


def _terminated(signum: int, frame: object) -> None:
    raise _Terminated


def _refused(error: OSError, root: Path) -> bool:
    """Whether the output root, or something below it, may not be written by this user."""
    where = Path(str(error.filename))
    inside = root == where or root in where.parents or where in root.parents
    return error.errno in (errno.EACCES, errno.EPERM, errno.EROFS) and inside


def _say(message: str, status: int) -> int:
    print(message, file=sys.stderr, flush=True)
    return status


def _unexpected(error: Exception, root: Path | None) -> str:
    """One line for the user; the traceback goes into a log file."""
    reason = " ".join(str(error).split())[:300]
    line = f"error: unexpected {type(error).__name__}: {reason}"
    name = f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.log"
    for folder in (root / "logs" if root else None, Path(tempfile.gettempdir())):
        if folder is None:
            continue
        with contextlib.suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            file = folder / f"bosch-{name}"
            file.write_text("".join(traceback.format_exception(error)), encoding="utf-8")
            return f"{line}; the traceback is in {file}"
    return line


_HELP = {
    "run": "bring the stages of a recipe up to date",
    "status": "say for each stage whether it is cached, to run, running or failed, and why",
    "validate": "check a recipe, its model and its input files",
    "plan": "estimate what a run costs before it starts",
    "compare": compare.HELP,
    "study": "compare the search's methods on a recipe's model, see docs/study.md",
    "measure": measure.HELP,
}


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The command and its options; overrides may stand before, between and after options."""
    program = "python -m pipeline"
    if arguments and arguments[0] in _HELP:
        command = arguments[0]
        parser = argparse.ArgumentParser(f"{program} {command}", description=_HELP[command])
        _add_arguments(parser, command)
        given = argparse.Namespace(command=command, arguments=list(arguments))
        return parser.parse_intermixed_args(arguments[1:], given)
    parser = argparse.ArgumentParser(
        program,
        description="Makes a hybrid of full and sliding attention heads out of a language model.",
        epilog="\n".join(f"{name:<10}{text}" for name, text in _HELP.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("command", choices=list(_HELP), help="what to do; each has its own --help")
    parser.add_argument("arguments", nargs="...", metavar="RECIPE [key.path=value ...] [options]")
    return parser.parse_args(arguments)


def _add_arguments(parser: argparse.ArgumentParser, command: str) -> None:
    if command == "measure":
        measure.add_arguments(parser)
        return
    if command == "study":
        parser.add_argument("study", choices=STUDIES, help="what to find out")
    parser.add_argument("recipe", metavar="RECIPE", help="a YAML file, see recipes/")
    parser.add_argument(
        "overrides",
        metavar="key.path=value",
        nargs="*",
        help="replaces a value of the recipe, like search.swa_ratio=0.5",
    )
    if command == "run":
        _add_run_options(parser)
    if command == "compare":
        compare.add_options(parser)
    if command == "study":
        study.add_options(parser)
    if command == "plan":
        parser.add_argument(
            "--hardware",
            metavar="NAMExCOUNT",
            help="what to plan for, like h100x8, a100x16 or cpu (default: what is found here)",
        )


def _add_run_options(command: argparse.ArgumentParser) -> None:
    command.add_argument("--until", metavar="STAGE", help="stop after this stage")
    command.add_argument(
        "--from",
        dest="start",
        metavar="STAGE",
        help="leave earlier stages alone; they must be there",
    )
    command.add_argument(
        "--force",
        metavar="STAGE",
        action="append",
        default=[],
        help="make this stage and what needs it again; may be repeated",
    )
    command.add_argument("--dry-run", action="store_true", help="only say what would run, and why")
    command.add_argument(
        "--wait", action="store_true", help="wait for stages that another run is making"
    )


def _run(loaded: LoadedRecipe, options: argparse.Namespace, stages: Sequence[Stage]) -> int:
    from pipeline.runner import Choice, Runner

    choice = Choice(options.until, options.start, tuple(options.force), options.wait)
    runner = Runner(loaded, choice, stages)
    if options.dry_run:
        _print_states(
            loaded, [state for state in runner.states() if state.node.name in runner.chosen]
        )
        runner.hasher.save()
        return 0
    ran = runner.run()
    name, folder = loaded.recipe.name, _shown(loaded.output_root / loaded.recipe.name)
    if ran == 0:
        print(f"{name}: nothing to do; all {len(runner.chosen)} stages are up to date in {folder}")
    else:
        print(f"{name}: finished; the results are in {folder}")
    page = loaded.output_root / name / "report" / "index.html"
    if runner.chosen[-1] == "report" and page.exists():
        print(f"report: {_shown(page)}")
    return 0


def _status(loaded: LoadedRecipe, options: argparse.Namespace, stages: Sequence[Stage]) -> int:
    store = Store(loaded.output_root)
    hasher = store.hasher(_STATUS_BUDGET)
    nodes = resolve(loaded, hasher, stages)
    _print_states(loaded, inspect(nodes, store, hasher, loaded.recipe.name))
    if store.root.exists():
        with contextlib.suppress(OSError):
            hasher.save()
    return 0


def _validate(loaded: LoadedRecipe, options: argparse.Namespace, stages: Sequence[Stage]) -> int:
    names = [stage.name for stage in stages if getattr(loaded.recipe, stage.section) is not None]
    print(f"{loaded.file}: valid; its stages are {', '.join(names)}")
    return 0


def _plan(loaded: LoadedRecipe, options: argparse.Namespace, stages: Sequence[Stage]) -> int:
    from pipeline.plan import plan_lines

    print("\n".join(plan_lines(loaded, options.hardware)))
    for fault in missing_inputs(loaded.recipe.prepare, loaded.recipe.evaluate):
        print(f"before it can run: {fault}")
    return 0


def _compare(loaded: LoadedRecipe, options: argparse.Namespace, stages: Sequence[Stage]) -> int:
    comparison = compare.run_comparison(loaded, options, stages)
    if comparison.results:
        from pipeline.comparison_page import print_tables

        print_tables(comparison)
        print(f"compare: {_shown(comparison.folder / 'compare.md')}")
    return 0


def _study(loaded: LoadedRecipe, options: argparse.Namespace, stages: Sequence[Stage]) -> int:
    print(f"study: {_shown(study.run_study(loaded, options, options.arguments))}")
    return 0


_COMMANDS = {
    "run": _run,
    "status": _status,
    "validate": _validate,
    "plan": _plan,
    "compare": _compare,
    "study": _study,
}


def _print_states(loaded: LoadedRecipe, states: Sequence[StageState]) -> None:
    print(f"{loaded.recipe.name} ({loaded.file})")
    width = max(len(state.node.name) for state in states)
    for state in states:
        print(f"  {state.node.name:<{width}}  {state}")


def _shown(path: Path) -> str:
    """A path as one would type it here."""
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)
