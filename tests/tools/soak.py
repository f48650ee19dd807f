"""Kill runs at random until time is up, and compare what they end with to undisturbed runs.

    python -m tests.tools.soak --kills 100 --minutes 60

A tiny recipe goes through all stages, in turn on one and on two processes. Killed are the whole
process group, the runner alone or one of its processes, by KILL, TERM or INT; then the same command
is given again. A run that is through is compared bit for bit with an undisturbed one. Prints a line
for each kill and each comparison, and exits 1 at the first difference, traceback, process that is
left running, or run that does not get through.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import yaml

from pipeline.run.failures import LOST_RANK_STATUS, REQUEUE_STATUS
from tests.tools.compare_runs import differences, run_results

ROOT = Path(__file__).resolve().parents[2]
NAME = "soak"
_MARK = "SOAK_RUN"  # in the environment of all processes of a run, its name
_SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)
_TARGETS = ("all", "the runner", "one process")
_END_SECONDS = 120.0
# Of a killed command, and of one that says why it stopped.
_STATUSES = {
    0, 1, REQUEUE_STATUS, LOST_RANK_STATUS, 130, 143,
    -signal.SIGKILL, -signal.SIGTERM, -signal.SIGINT,
}  # fmt: skip


class Wrong(Exception):
    """What must not happen has happened."""


def recipe(folder: Path, runs: Path, processes: int) -> dict[str, Any]:
    """All stages on the quickstart's model, as little of each as there can be."""
    return {
        "name": NAME,
        "model": {"path": str(ROOT / "recipes" / "quickstart" / "base_model"), "dtype": "float32"},
        "prepare": {
            "sequence_length": 64,
            "train_tokens": 4096,
            "sources": [
                {"name": "text", "kind": "text", "path": str(folder / "corpus")},
                {"name": "retrieval", "kind": "retrieval"},
            ],
            "calibration": {"length": 512, "examples": 4},
        },
        "search": {"swa_ratio": 0.5, "window_size": 32, "budget_per_layer": 4},
        "materialize": {"dtype": "float32"},
        "train": {
            "total_tokens": 2560,
            "batch_tokens": 256,
            "checkpoint_tokens": [1024],
            "mixed_precision": "no",
        },
        "evaluate": {
            "needle": {
                "tasks": ["niah_single_1", "niah_single_2"],
                "lengths": [512],
                "samples": 4,
                "max_new_tokens": 8,
            }
        },
        "runtime": {"output_root": str(runs), "processes": processes, "save_every_steps": 2},
    }


@dataclass
class Soak:
    """One soak below `folder`."""

    folder: Path
    random: random.Random
    kills: int = 0
    runs: int = 0
    by: Counter[str] = field(default_factory=Counter)

    def start(self, runs: Path, processes: int) -> subprocess.Popen[bytes]:
        """The command line of a run, in a session of its own."""
        file = self.folder / f"{runs.name}.yaml"
        file.write_text(yaml.safe_dump(recipe(self.folder, runs, processes)))
        with (self.folder / f"{runs.name}.log").open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "pipeline", "run", str(file)],
                cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
                env={
                    **os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1",
                    _MARK: runs.name,
                },
            )  # fmt: skip

    def undisturbed(self, processes: int) -> tuple[Path, float]:
        """An uninterrupted run, and the seconds it took."""
        started = time.monotonic()
        runs = self.folder / f"undisturbed-{processes}"
        if self.start(runs, processes).wait() != 0:
            raise Wrong(f"the undisturbed run fails: {self.tail(runs)}")
        return runs / NAME, time.monotonic() - started

    def disturbed(self, processes: int, longest: float, most_kills: int, end: float) -> Path:
        """A run killed at random until it is through; in peace once time or kills are up."""
        self.runs += 1
        runs = self.folder / f"run-{self.runs}"
        while True:
            command = self.start(runs, processes)
            peace = self.kills >= most_kills or time.monotonic() > end
            try:
                status = command.wait(None if peace else self.random.uniform(0, longest))
            except subprocess.TimeoutExpired:
                status = self.kill(command, runs)
            self.check(runs, status)
            if status == 0:
                return runs / NAME
            if peace:
                raise Wrong(f"an uninterrupted run ends with {status}: {self.tail(runs)}")

    def kill(self, command: subprocess.Popen[bytes], runs: Path) -> int:
        """Kill one of the targets; returns the status that the command ends with."""
        target, number = self.random.choice(_TARGETS), self.random.choice(_SIGNALS)
        family = processes_of(runs)
        try:
            if target == "all":
                os.killpg(command.pid, number)
            else:
                others = [pid for pid in family if pid != command.pid]
                one = target == "one process" and others
                os.kill(self.random.choice(others) if one else command.pid, number)
        except ProcessLookupError:
            return command.wait(_END_SECONDS)
        self.kills += 1
        self.by[f"{target} {number.name}"] += 1
        print(f"kill {self.kills}: {target} by {number.name}", flush=True)
        try:
            return command.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            # A helper that ends by itself may leave the stage at work: not every kill ends a run.
            return command.wait()

    def check(self, runs: Path, status: int) -> None:
        """No traceback, no odd status, and soon no process of the run."""
        log = (self.folder / f"{runs.name}.log").read_text(errors="replace")
        for word in ("Traceback", "unexpected "):
            if word in log:
                raise Wrong(f"'{word}' in {runs.name}.log: {self.tail(runs)}")
        if status not in _STATUSES:
            raise Wrong(f"status {status}: {self.tail(runs)}")
        end = time.monotonic() + _END_SECONDS
        while left := processes_of(runs):
            if time.monotonic() > end:
                raise Wrong(f"processes {left} are left of {runs.name}")
            time.sleep(0.2)

    def tail(self, runs: Path) -> str:
        """The last lines of a run's log."""
        log = (self.folder / f"{runs.name}.log").read_text(errors="replace")
        return "\n" + "\n".join(log.splitlines()[-12:])


def processes_of(runs: Path) -> list[int]:
    """Processes of a run that are not dead yet, in whatever session they are."""
    return [
        process.pid
        for process in psutil.process_iter(["environ", "status"])
        if (process.info["environ"] or {}).get(_MARK) == runs.name
        and process.info["status"] != psutil.STATUS_ZOMBIE
    ]


def soak(folder: Path, kills: int, minutes: float, seed: int) -> Soak:
    """Kill and compare; raises Wrong."""
    state = Soak(folder, random.Random(seed))
    (folder / "corpus").mkdir(exist_ok=True)
    for number in range(4):
        (folder / "corpus" / f"{number}.txt").write_text(f"Text {number} of few words. " * 200)
    references = {processes: state.undisturbed(processes) for processes in (1, 2)}
    for processes, (_, seconds) in references.items():
        print(f"undisturbed on {processes} process(es): {seconds:.0f} s", flush=True)
    end = time.monotonic() + 60 * minutes
    while state.kills < kills and time.monotonic() < end:
        processes = 1 + state.runs % 2
        reference, seconds = references[processes]
        run = state.disturbed(processes, seconds / 2, kills, end)
        before, after = run_results(reference), run_results(run)
        lines = [line for name in before for line in differences(before[name], after[name])]
        if lines:
            raise Wrong(f"{run} differs from {reference}:\n" + "\n".join(lines[:10]))
        print(f"run {state.runs} on {processes} process(es) is equal", flush=True)
        shutil.rmtree(run.parent)
    return state


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kills", type=int, default=100, help="stop after so many kills")
    parser.add_argument("--minutes", type=float, default=60, help="stop killing after so long")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, help="where to work, kept; default: a temporary one")
    options = parser.parse_args()
    folder = options.folder or Path(tempfile.mkdtemp(prefix="bosch-soak-"))
    folder.mkdir(parents=True, exist_ok=True)
    try:
        state = soak(folder, options.kills, options.minutes, options.seed)
    except Wrong as wrong:
        print(f"WRONG: {wrong}\nthe files are in {folder}", file=sys.stderr)
        return 1
    if options.folder is None:
        shutil.rmtree(folder)
    kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(state.by.items()))
    print(f"{state.kills} kills in {state.runs} runs, all equal ({kinds})")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
