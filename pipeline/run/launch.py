"""Starts the processes of a stage, and ends them when the run ends."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from bosch.errors import (
    DamagedWorkError,
    DiskFullError,
    LostRankError,
    RunError,
    StoppedError,
    UserError,
)
from bosch.files import almost_full, read_json, write_json
from bosch.hardware import cpu_cores
from bosch.this_process import killed_by_kernel
from pipeline.recipe.load import ROOT
from pipeline.recipe.processes import without_other_processes
from pipeline.run import failures, log
from pipeline.run.worker import PARENT
from stages.stage import World

# A function that runs the stage in an order, on the given processes, and returns its summary.
Launcher = Callable[[Mapping[str, Any], World], dict[str, Any]]

# Starts a module of the checkout without the current directory in its path.
PROCESS = (str(ROOT / "pipeline" / "__main__.py"), "--process")
# Environment variable with the work directory, inherited by all children of a stage.
_WORK_DIR_VARIABLE = "BOSCH_WORK_DIR"
GRACE_SECONDS = 10.0
# Kinds of failures with their own reason; if several ranks failed, the first is reported.
_KINDS: dict[str, type[UserError | RunError]] = {
    "user": UserError,
    "damaged": DamagedWorkError,
    "disk": DiskFullError,
    "run": RunError,
    "unexpected": RunError,
}
_RESUMES = "the same command resumes from here"
# Signals caused by a process's own actions.
_CRASHES = (signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE)


def launch(order: Mapping[str, Any], world: World) -> dict[str, Any]:
    """Run a stage in its own processes, so that its memory is freed when it ends.

    A single process is started directly, several with torchrun. Raises UserError or RunError with
    the stage's message, and LostRankError if a process was lost.
    """
    with _control_folder(Path(order["work_dir"]), world.node_rank) as control:
        write_json(control / "order.json", order)
        worker = [*PROCESS, "pipeline.run.worker", str(control / "order.json")]
        torchrun = [*PROCESS, "pipeline.run.elastic", *torchrun_options(world)]
        torchrun.append(f"--log-dir={control}")
        command = [sys.executable, *(worker if world.size == 1 else torchrun + worker)]
        env = stage_environment(world, str(order["work_dir"]))
        killed_before = killed_by_kernel()
        with run_command(command, env) as child:
            try:
                status = child.wait()
            except failures.Terminated:
                # The stage may take its time to save its work; a second signal ends it.
                child.send_signal(signal.SIGUSR1)
                if child.wait() != failures.REQUEUE_STATUS:
                    raise
                status = failures.REQUEUE_STATUS
        if status == failures.REQUEUE_STATUS:
            raise StoppedError(f"{order['stage']}: stopped, its work is saved")
        if status == 0 and world.node_rank > 0:
            return {}
        summary = read_json(control / "summary.json")
        if status == 0 and isinstance(summary, dict):
            return summary
        memory_ran_out = (killed_by_kernel() or 0) > (killed_before or 0)
        raise failure_of(control, status, order, world, memory_ran_out)


@contextlib.contextmanager
def _control_folder(work_dir: Path, node_rank: int) -> Iterator[Path]:
    """An empty folder for order and results, beside the work directory, during the block."""
    folder = work_dir.with_name(f"{work_dir.name}.control-{node_rank}")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


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


@contextlib.contextmanager
def run_command(command: list[str], env: Mapping[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    """Run a command during the block; none of its processes outlives the block."""
    child = subprocess.Popen(command, env=dict(env))
    try:
        yield child
    finally:
        if child.poll() is None:
            child.send_signal(signal.SIGTERM)
            try:
                child.wait(GRACE_SECONDS)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()
        end_leftovers(env[_WORK_DIR_VARIABLE])


def end_leftovers(mark: str) -> int:
    """Kill leftover processes of a stage that has ended; returns their number.

    A killed stage leaves its forked helpers (tokenising, data loading). They inherited `mark`, the
    work directory, in a variable. Processes in other PID namespaces are ignored, since a container
    may use the same path for another folder. Does nothing without /proc.
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
    control: Path, status: int, order: Mapping[str, Any], world: World, memory_ran_out: bool
) -> UserError | RunError:
    """Why a stage failed: a rank's own message, or else the meaning of its exit status."""
    failed = map(read_json, sorted(control.glob("failure.*.json"))[::-1])
    messages = {entry["kind"]: str(entry["message"]) for entry in failed if isinstance(entry, dict)}
    name, work_dir = order["stage"], Path(order["work_dir"])
    number = -status if status < 0 else status - 128
    signalled = number > 0 and number in signal.valid_signals()
    for kind, error in _KINDS.items():
        # Libraries raise their own errors when another process was killed.
        if kind in messages and not (signalled and kind == "unexpected"):
            return error(f"{name}: {messages[kind].removeprefix(f'{name}: ')}")
    if status == failures.DISK_FULL_STATUS or almost_full(work_dir):
        return DiskFullError(f"{name}: {failures.disk_full_message(work_dir)}")
    # The status may be that of a frozen process that torchrun has killed.
    for kind in ("frozen", *(["lost"] if status == failures.LOST_RANK_STATUS else [])):
        if kind in messages:
            return LostRankError(f"{name}: {messages[kind]}; {_RESUMES}")
    ended = read_json(control / failures.ENDED)
    rank = ended["rank"] if isinstance(ended, dict) else 0
    process = f"process {rank}" if isinstance(ended, dict) else "its launcher"
    process = process if world.size > 1 else "its process"
    log_file = log.stage_log(work_dir, rank)
    if not signalled:
        reason = f"ended with status {status} without a reason in {log_file}"
        return RunError(f"{name}: {process} {reason}")
    signal_name = f"signal {number}, {signal.Signals(number).name}"
    if number == signal.SIGKILL and memory_ran_out:
        return RunError(
            f"{name}: the kernel killed {process} because memory ran out; make "
            "runtime.eval_batch_size or runtime.micro_batch_size smaller"
        )
    if number in _CRASHES:
        hung = ", or NCCL gave up on one that hangs, after runtime.collective_timeout_minutes"
        return LostRankError(
            f"{name}: {process} crashed ({signal_name}): a fault of a library or a device"
            f"{hung if world.size > 1 else ''}; see its output above and {log_file}; {_RESUMES}"
        )
    return LostRankError(
        f"{name}: {process} was ended ({signal_name}) by a person, a job scheduler or the system, "
        f"see their logs on this machine; {_RESUMES}"
    )
