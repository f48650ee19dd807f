"""Start ranks as torchrun does, forked from a process that has imported what training needs.

A new Python spends most of a small training on imports; a forked one starts at once.
"""

from __future__ import annotations

import functools
import gc
import importlib
import inspect
import json
import math
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from multiprocessing import connection, forkserver
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from pipeline.run import launch

_getmodule = inspect.getmodule

ROOT = Path(__file__).resolve().parents[1]
_PRELOAD = [
    "tests.fork_server",
    "stages.prepare.run", "stages.search.run", "stages.materialize.run", "stages.train.run",
    "stages.train.answers", "stages.evaluate.run", "stages.report.page", "tests.training_case",
    # The imports of training and torchrun at their start.
    "transformers.models.qwen3.modeling_qwen3", "torch.utils.tensorboard",
    "deepspeed.runtime.zero.muon.muon_optimizer", "torch.distributed.run",
]  # fmt: skip
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(_PRELOAD)
_CPU_ALONE = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
_STARTING = threading.Lock()
_TIMEOUT, _TIMEOUT_AFTER_A_LOSS = 600.0, 60.0  # seconds


def run_module(
    module: str,
    arguments: list[str],
    ranks: int = 1,
    environment: dict[str, str] | None = None,
    per_node: int | None = None,
) -> subprocess.CompletedProcess[str]:
    """`python -m MODULE ARGUMENTS` on `ranks` ranks with gloo; the first bad status and all output.

    Of MODULE:FUNCTION the function is called with the arguments, which are in sys.argv as well.
    A rank whose partner died has a minute to end by itself. `per_node`: ranks of one node.
    """
    _start_server()
    environments = [{**os.environ, **_CPU_ALONE, **(environment or {})} for _ in range(ranks)]
    store = None
    if ranks > 1:
        from torch.distributed import TCPStore

        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        node = per_node or ranks
        for rank, one in enumerate(environments):
            one |= {
                "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "RANK": str(rank),
                "WORLD_SIZE": str(ranks), "LOCAL_RANK": str(rank % node),
                "LOCAL_WORLD_SIZE": str(node), "TORCHELASTIC_USE_AGENT_STORE": "True",
                "TORCHELASTIC_RESTART_COUNT": "0",
            }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        outputs = [Path(folder, str(rank)) for rank in range(ranks)]
        processes = [
            _CONTEXT.Process(target=_run, args=(module, arguments, one, str(output)))
            for one, output in zip(environments, outputs, strict=True)
        ]
        for process in processes:
            process.start()
        _wait(processes)
        text = "".join(output.read_text(errors="replace") for output in outputs)
    status = next((process.exitcode for process in processes if process.exitcode), 0)
    del store
    return subprocess.CompletedProcess([module, *arguments], status or 0, text, text)


def on_ranks(ranks: int, function: str, *arguments: str) -> str:
    """What `MODULE:FUNCTION` prints on the ranks of a gloo group; it must fail on none."""
    done = run_module(f"{__name__}:in_group", [function, *arguments], ranks)
    assert done.returncode == 0, done.stdout
    return done.stdout


def run_order(
    order: dict[str, Any], ranks: int = 1, environment: dict[str, str] | None = None
) -> int:
    """Run a stage on `ranks` ranks, as `pipeline.run.launch` does, and return the exit status."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "order.json")
        file.write_text(json.dumps(order))
        arguments = ["--process", "pipeline.run.worker", str(file)]
        done = run_module("pipeline", arguments, ranks, environment)
        print(done.stdout, *(reason.read_text() for reason in Path(folder).glob("failure.*.json")))
        return done.returncode


class Forked:
    """The command line in a process group of its own; its stages and their ranks are forked.

    What it prints is in `output`, its errors in a file of that name and `.errors`.
    """

    def __init__(
        self, arguments: list[str], output: Path, module: str = "pipeline", **environment: str
    ) -> None:
        _start_server()
        inherited = {key: v for key, v in os.environ.items() if not key.startswith("FAKE_")}
        environment = {**inherited, **_CPU_ALONE, **environment}
        self._files = [output, output.with_name(f"{output.name}.errors")]
        files = [str(file) for file in self._files]
        self._process = _CONTEXT.Process(
            target=_run_pipeline, args=(module, arguments, environment, *files)
        )
        self._process.start()
        self.pid = self._process.pid

    def done(self, seconds: float | None = 120) -> subprocess.CompletedProcess[str]:
        """Wait for its end, which is asserted, and return its status and what it has printed."""
        status = self.wait(seconds)
        assert status is not None
        return subprocess.CompletedProcess([], status, *(f.read_text() for f in self._files))

    def wait(self, seconds: float | None = 120) -> int | None:
        """Its exit status, negative after a signal; None if it runs longer than the limit."""
        self._process.join(seconds)
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)


def _run_pipeline(
    module: str, arguments: list[str], environment: dict[str, str], output: str, errors: str
) -> None:
    from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

    os.setsid()
    launch.subprocess = SimpleNamespace(  # type: ignore[assignment]
        Popen=_ForkedProcess, TimeoutExpired=subprocess.TimeoutExpired
    )
    subprocess_handler.Popen = _ForkedProcess  # type: ignore[attr-defined]
    # torchrun's rendezvous would take seconds to import all this. A stage needs it, for the hashes
    # of datasets.
    inspect.getmodule = lambda *_: None  # type: ignore[assignment]
    os.register_at_fork(after_in_child=lambda: setattr(inspect, "getmodule", _getmodule))
    _run(module, arguments, environment, output, errors)


class _ForkedProcess:
    """The part of Popen that `pipeline.run.launch` and torchrun use, for a forked process."""

    def __init__(
        self, args: Sequence[str], env: dict[str, str], start_new_session: bool = False, **_: Any
    ) -> None:
        self.pid = os.fork()
        self._status: int | None = None
        if not self.pid:
            status = 1
            try:
                if start_new_session:
                    os.setsid()
                os.environ.clear()
                os.environ.update(env)
                sys.argv = [arg for arg in args[1:] if arg != "-u"]
                runpy.run_path(sys.argv[0], run_name="__main__")
                status = 0
            except SystemExit as end:
                status = end.code if isinstance(end.code, int) else 1
            finally:
                os._exit(status)

    def wait(self, timeout: float | None = None) -> int:
        end = math.inf if timeout is None else time.monotonic() + timeout
        while timeout is not None and self.poll() is None:
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired([], timeout)
            time.sleep(0.02)
        if self._status is None:
            self._status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self._status

    def poll(self) -> int | None:
        if self._status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self._status = os.waitstatus_to_exitcode(status) if pid else None
        return self._status

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)


def _start_server() -> None:
    """Starts in the thread that asks first, because the environment changes later."""
    with _STARTING:
        _start_once()


@functools.cache
def _start_once() -> None:
    before = dict(os.environ)
    os.environ.update(_CPU_ALONE)
    try:
        forkserver.ensure_running()
    finally:
        os.environ.clear()
        os.environ.update(before)


def _run(
    module: str,
    arguments: list[str],
    environment: dict[str, str],
    output: str,
    errors: str | None = None,
) -> None:
    gc.freeze()  # the server's imports are frozen: a collection would copy their pages
    os.fsync = os.fstat  # as in tests/conftest.py
    descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(descriptor, 1)
    os.dup2(os.open(errors, os.O_WRONLY | os.O_CREAT | os.O_TRUNC) if errors else descriptor, 2)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(ROOT)
    sys.argv = [module, *arguments]
    if ":" in module:
        _named(module)(*arguments)
    else:
        runpy.run_module(module, run_name="__main__", alter_sys=True)


def in_group(function: str, *arguments: str) -> None:
    """On one rank: join a gloo group of all, and call `MODULE:FUNCTION`."""
    from torch import distributed as dist

    dist.init_process_group("gloo")
    _named(function)(*arguments)
    dist.destroy_process_group()


def _named(function: str) -> Any:
    name, _, member = function.partition(":")
    return getattr(importlib.import_module(name), member)


def _wait(processes: list[multiprocessing.context.ForkServerProcess]) -> None:
    end = time.monotonic() + _TIMEOUT
    while running := [process for process in processes if process.is_alive()]:
        if any(process.exitcode for process in processes):
            end = min(end, time.monotonic() + _TIMEOUT_AFTER_A_LOSS)
        left = end - time.monotonic()
        if left <= 0:
            for process in running:
                process.kill()
        connection.wait([process.sentinel for process in running], max(left, 0.1))
    for process in processes:
        process.join()
