"""Starts the processes of a stage, and ends them when the run ends."""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import psutil

from bosch.errors import LostRankError, StoppedError
from bosch.files import read_json, write_json
from bosch.hardware import cpu_cores
from bosch.this_process import killed_by_kernel
from pipeline.recipe.load import ROOT
from pipeline.recipe.processes import without_other_processes
from pipeline.run import failures, log, worker
from pipeline.run.worker import PARENT
from stages.stage import World

# A function that runs the stage in an order, on the given processes, and returns its summary.
Launcher = Callable[[Mapping[str, Any], World], dict[str, Any]]

# Starts a module of the checkout without the current directory in its path.
PROCESS = (str(ROOT / "pipeline" / "__main__.py"), "--process")
# Environment variable with the work directory, inherited by all children of a stage.
_WORK_DIR_VARIABLE = "BOSCH_WORK_DIR"
GRACE_SECONDS = 10.0


def preload(modules: Iterable[str], world: World, log_level: str) -> bool:
    """Import modules here, so that forks of this process need not; whether `launch` may fork.

    On CPUs, importing torch and transformers takes longer than many a stage of a small model. Not
    with GPUs or several processes, nor on other systems than Linux, nor if this process has
    threads: a fork would lack them.
    """
    if world.size > 1 or world.gpus or sys.platform != "linux":
        return False
    if psutil.Process().num_threads() > 1:
        return False
    os.environ.update(stage_environment(world, ""))
    log.silence_imports(log_level)
    for module in modules:
        with contextlib.suppress(Exception):  # its stage imports it again, and reports it
            importlib.import_module(module)
    return True


def launch(order: Mapping[str, Any], world: World, fork: bool = False) -> dict[str, Any]:
    """Run a stage in its own processes, so that its memory is freed when it ends.

    A single process is started directly, or as a fork of this one, several with torchrun. Raises
    UserError or RunError with the stage's message, LostRankError if a process was lost, and
    StoppedError after a stop signal.
    """
    with tempfile.TemporaryDirectory(prefix="bosch-") as folder:
        control = Path(folder)
        write_json(control / "order.json", order)
        command = [*PROCESS, "pipeline.run.worker", str(control / "order.json")]
        if world.size > 1:
            torchrun = [*PROCESS, "pipeline.run.torchrun", *torchrun_options(world)]
            command = [*torchrun, f"--log-dir={control}", *command]
        env = stage_environment(world, str(order["work_dir"]))
        stopping, killed_before = False, killed_by_kernel() or 0
        # A branch may have more processes than the recipe, for which `preload` answered.
        is_fork = fork and world.size == 1
        with run_child([sys.executable, *command], env, is_fork) as child:
            try:
                status = child.wait()
            except failures.Terminated:
                # The stage may take its time to save its work; a second signal ends it.
                child.send_signal(signal.SIGUSR1)
                stopping, status = True, child.wait()
        if status == 0 and not stopping:
            summary = read_json(control / "summary.json")
            return summary if isinstance(summary, dict) else {}
        error = failure_of(control, status, order, (killed_by_kernel() or 0) > killed_before)
        if stopping and isinstance(error, LostRankError):
            raise StoppedError(f"{order['stage']}: stopped")
        raise error


def torchrun_options(world: World) -> list[str]:
    """torchrun's options; on a single node with a free port."""
    options = [f"--nproc-per-node={world.processes_per_node}", "--max-restarts=0"]
    if world.nodes == 1:
        return [*options, "--standalone", "--nnodes=1"]
    return [
        *options,
        f"--nnodes={world.nodes}",
        f"--node-rank={world.node_rank}",
        f"--master-addr={world.master_addr}",
        f"--master-port={world.master_port}",
    ]


def stage_environment(world: World, work_dir: str) -> dict[str, str]:
    env = {**without_other_processes(os.environ), PARENT: str(os.getpid()), "PYTHONUNBUFFERED": "1"}
    # Two nodes of a run can be on one host; each ends only its own processes.
    env[_WORK_DIR_VARIABLE] = f"{work_dir} node {world.node_rank}" if world.node_rank else work_dir
    # For processes that libraries start (Python 3.11 or later).
    env["PYTHONSAFEPATH"] = "1"
    # An empty entry would mean the current directory.
    inherited = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    env["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), *inherited)))
    threads = max(cpu_cores() // world.processes_per_node, 1)
    env.setdefault("OMP_NUM_THREADS", str(threads))
    env.setdefault("TOKENIZERS_PARALLELISM", "false")
    if not world.gpus:
        # Otherwise deepspeed warns in every process that it found none.
        env.setdefault("DS_ACCELERATOR", "cpu")
    if not sys.stderr.isatty():
        env.setdefault("TQDM_DISABLE", "1")
    return env


class _Child(Protocol):
    """A child process: what `subprocess.Popen` has."""

    def wait(self, timeout: float | None = None) -> int: ...
    def poll(self) -> int | None: ...
    def send_signal(self, number: int, /) -> None: ...
    def kill(self) -> None: ...


class _Fork:
    """A fork of this process that runs an order, with the methods of `subprocess.Popen`."""

    def __init__(self, order: str, env: Mapping[str, str]) -> None:
        fork = multiprocessing.get_context("fork")
        self._process = fork.Process(target=worker.run_forked, args=(order, env))
        self._process.start()

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if (status := self.poll()) is None:
            raise subprocess.TimeoutExpired("a stage", timeout or 0)
        return status

    def poll(self) -> int | None:
        return self._process.exitcode

    def send_signal(self, number: int, /) -> None:
        assert self._process.pid is not None
        os.kill(self._process.pid, number)

    def kill(self) -> None:
        self._process.kill()


@contextlib.contextmanager
def run_child(command: list[str], env: Mapping[str, str], fork: bool = False) -> Iterator[_Child]:
    """Run a command during the block; none of its processes outlives the block.

    With `fork` this process is forked to run the order, the command's last part.
    """
    child: _Child = _Fork(command[-1], env) if fork else subprocess.Popen(command, env=dict(env))
    try:
        yield child
    finally:
        if child.poll() is None:
            child.send_signal(signal.SIGINT)
            try:
                child.wait(GRACE_SECONDS)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()
        end_leftovers(env[_WORK_DIR_VARIABLE])


def end_leftovers(mark: str) -> int:
    """Kill leftover processes of a stage that has ended; returns their number.

    They inherited `mark`, the work directory, in a variable. Helpers that a stage has forked (to
    tokenise or load data) die with it (`pipeline.run.worker`). Processes in other PID namespaces
    are ignored, since a container may use the same path for another folder. Does nothing without
    /proc.
    """
    variable = f"{_WORK_DIR_VARIABLE}={mark}".encode()
    ended = 0
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            has_variable = variable in (folder / "environ").read_bytes().split(b"\0")
            if has_variable and (folder / "ns/pid").samefile("/proc/self/ns/pid"):
                os.kill(int(folder.name), signal.SIGKILL)
                ended += 1
        except OSError:
            continue
    return ended


def failure_of(
    control: Path, status: int, order: Mapping[str, Any], memory_ran_out: bool
) -> Exception:
    """Why a stage failed: a process's own message, or else how it ended."""
    name = order["stage"]
    found = [read_json(path) for path in sorted(control.glob("failure.*.json"))]
    entries = [entry for entry in found if isinstance(entry, dict)]
    entries = entries or [failures.ended("its process", status)]
    entry = next(entry for kind in failures.KINDS for entry in entries if entry["kind"] == kind)
    message = str(entry["message"]).removeprefix(f"{name}: ")
    if entry["kind"] == "killed" and memory_ran_out:
        message = (
            "the kernel killed a process because memory ran out; make runtime.eval_batch_size or "
            "runtime.micro_batch_size smaller"
        )
    return failures.KINDS[entry["kind"]](f"{name}: {message}")
