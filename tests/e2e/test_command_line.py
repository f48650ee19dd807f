"""The command line as users meet it: exit status, sentences, no traceback, kill and resume."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from bosch.this_process import heeded
from pipeline.run.failures import REQUEUE_STATUS
from tests.pipeline_case import ROOT, Case, gone, wait_for


def imports_of(stderr: str) -> set[str]:
    """Top-level modules in the output of Python with PYTHONPROFILEIMPORTTIME."""
    lines = [line for line in stderr.splitlines() if line.startswith("import time:")]
    return {line.rpartition("|")[2].strip().partition(".")[0] for line in lines}


def test_run_and_status_and_a_second_run_with_nothing_to_do(case: Case) -> None:
    time.sleep(0.1)  # a hash is kept only if the file has not just changed
    assert "never made" in case.fork("run", "--dry-run").stdout
    assert not case.runs.exists()
    first = case.fork("run")
    assert first.returncode == 0, first.stderr
    assert "[2/7] search: to run (never made)" in first.stdout
    assert "stage search runs" in first.stdout
    second = case.call("run", PYTHONPROFILEIMPORTTIME="1")
    assert "pydantic" in imports_of(second.stderr) and "torch" not in imports_of(second.stderr)
    assert second.stdout.startswith("tiny: nothing to do; 7 stages are up to date")
    assert "nothing to do; 1 stage is up to" in case.fork("run", "--until", "prepare").stdout
    two_nodes = {"NNODES": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    dry = case.fork("run", "--dry-run", "search.swa_ratio=0.75", "--until", "search", **two_nodes)
    assert dry.stdout.splitlines()[1:] == [
        "  prepare  cached",
        "  search   to run (search.swa_ratio changed 0.5 → 0.75)",
    ]
    status = case.call("status", PYTHONPROFILEIMPORTTIME="1")
    assert not imports_of(status.stderr) & {"torch", "transformers", "numpy", "altair"}
    assert status.stdout.count("cached") == 7  # those of the recipe
    assert case.fork("validate").stdout.endswith("materialize, original, train, evaluate, report\n")
    assert (case.output("search") / "stage.log").exists()


def test_a_run_with_missing_scores_ends_with_1(case: Case) -> None:
    """In every run, even with nothing to do, so that a script notices; results are published."""
    missing = '{"lm_eval": {"gsm8k": "its data could not be read"}}'
    for environment in ({"FAKE_MISSING": missing}, {}):
        done = case.fork("run", **environment)
        assert done.returncode == 1
        assert "lm_eval: gsm8k has no score: its data could not be read" in done.stdout
    assert "nothing to do" in done.stdout
    assert case.fork("run", "--until", "train").returncode == 0


@pytest.mark.parametrize(
    ("kind", "status", "sentence"),
    [
        ("user", 2, "error: search: the corpus at x is empty; name another"),
        ("kill", 1, "error: search: its process was ended by SIGKILL"),
        ("bug", 1, "error: search: unexpected KeyError: 'boom'; the traceback is in "),
    ],
)
def test_a_failure_prints_one_sentence(case: Case, kind: str, status: int, sentence: str) -> None:
    done = case.fork("run", FAKE_FAIL=f"search={kind}")
    assert done.returncode == status
    assert sentence in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1 and "Traceback" not in done.stdout
    if "traceback" in sentence:
        log = done.stderr.strip().rpartition("the traceback is in ")[2]
        assert "tests/fake_stages.py" in Path(log).read_text()
    assert "search       failed (" in case.fork("status").stdout


def test_a_killed_run_resumes_with_the_same_command(case: Case) -> None:
    run = subprocess.Popen(
        case.command("run"), env=case.environment(FAKE_SLEEP="search=60"), stdout=subprocess.DEVNULL
    )
    worker = int(wait_for(case.folder / "search.0"))
    assert f"running (pid {run.pid} on " in case.fork("status").stdout
    second = case.fork("run")
    assert second.returncode == 1
    assert f"is being made by pid {run.pid}" in second.stderr
    run.kill()
    run.wait()
    assert gone(worker), "the stage's process outlived its runner"
    assert "search       to run (never made; resumes what was begun)" in case.fork("status").stdout
    done = case.fork("run")
    assert done.returncode == 0, done.stderr
    assert case.calls("search") == 2
    assert "stage search runs" in done.stdout and "stage prepare runs" not in done.stdout


@pytest.mark.parametrize(
    ("signum", "status"), [(signal.SIGHUP, REQUEUE_STATUS), (signal.SIGINT, 130)]
)
def test_stopping_ends_every_process(case: Case, signum: signal.Signals, status: int) -> None:
    run = case.start("run", FAKE_SLEEP="search=60")
    worker = int(wait_for(case.folder / "search.0"))
    run.send_signal(signum)
    done = run.done()
    assert done.returncode == status
    assert done.stderr.strip().splitlines()[-1].endswith("the same command resumes from here")
    assert gone(worker)


def test_a_stopped_stage_may_take_its_time_to_save(case: Case) -> None:
    case.make("original")
    run = case.start(
        "run", "runtime.processes=2", distributed=True, FAKE_SLEEP="train=60", FAKE_SAVE="train",
    )  # fmt: skip
    workers = [int(wait_for(case.folder / f"train.{rank}", 300)) for rank in (0, 1)]
    run.send_signal(signal.SIGTERM)
    done = run.done()
    assert done.returncode == REQUEUE_STATUS, done.stderr
    assert "train: stopped, its work is saved; the same command resumes from here" in done.stderr
    assert all(gone(worker) for worker in workers)


def test_a_process_under_nohup_does_not_heed_a_closing_terminal() -> None:
    for handler, expected in ((signal.SIG_DFL, [signal.SIGHUP]), (signal.SIG_IGN, [])):
        signal.signal(signal.SIGHUP, handler)  # reset by a fixture of every test
        assert heeded(signal.SIGHUP) == expected


@pytest.mark.parametrize(
    ("statuses", "restarts", "expected", "requeued"),
    [
        ([0, 0], "", 0, False),
        ([75, 75], "", 75, True),
        ([75], "100", 75, False),
        # srun kills the other node, which ends with 75 and would count as stopped.
        ([1, 75], "", 1, False),
    ],
)
def test_slurm_requeues_a_stopped_job_a_limited_number_of_times(
    tmp_path: Path, statuses: list[int], restarts: str, expected: int, requeued: bool
) -> None:
    """The `srun` here runs nodes in turn and, like Slurm's, ends with the highest status."""
    (tmp_path / "launch").mkdir()
    scripts = {
        "launch/setup.sh": "true",
        "launch/torchrun.sh": 'echo "$NODE_RANK $*" >> "$BOSCH_ROOT/nodes"; exit "$NODE_STATUS"',
        "srun": """shift 2; highest=0; node=0
for NODE_STATUS in $STATUSES; do
    export NODE_STATUS
    SLURM_NODEID=$node "$@" && status=0 || status=$?
    node=$((node + 1))
    [ $status -le $highest ] || highest=$status
done
exit $highest""",
        "scontrol": 'echo "$*" >> "$BOSCH_ROOT/scontrol.log"; echo node0',
    }
    for name, line in scripts.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{line}\n")
        (tmp_path / name).chmod(0o755)
    environment = {
        **os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "BOSCH_ROOT": str(tmp_path),
        "SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": str(len(statuses)),
        "SLURM_JOB_NODELIST": "node[0-1]", "SLURM_SUBMIT_DIR": str(tmp_path),
        "STATUSES": " ".join(map(str, statuses)), "SLURM_RESTART_COUNT": restarts,
    }  # fmt: skip
    done = subprocess.run(
        ["bash", ROOT / "launch/slurm.sh", "recipe.yaml", "seed=1 2"],
        env=environment, timeout=60, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert done.returncode == expected
    assert ("requeue 7" in (tmp_path / "scontrol.log").read_text()) == requeued
    assert ("was queued again" in done.stderr) == (not requeued and expected == 75)
    nodes = [f"{node} recipe.yaml seed=1 2" for node in range(len(statuses))]
    assert (tmp_path / "nodes").read_text().splitlines() == nodes
    assert not (tmp_path / "bosch-7.status").exists()


def test_processes_that_a_stage_left_behind_are_ended(case: Case) -> None:
    run = case.start("run", FAKE_SLEEP="search=60", FAKE_HELPER="search")
    wait_for(case.folder / "search.0")
    helper = int(wait_for(case.folder / "helper"))
    run.send_signal(signal.SIGKILL)
    run.wait()
    assert not gone(helper, seconds=0.5), "the helper ended by itself, so this test shows nothing"
    assert case.fork("run").returncode == 0
    assert gone(helper)


def test_launch_scripts_called_wrongly_end_with_2() -> None:
    torchrun = subprocess.run([ROOT / "launch/torchrun.sh"], capture_output=True, text=True)
    assert torchrun.returncode == 2
    assert "launch/torchrun.sh RECIPE" in torchrun.stderr
    setup = subprocess.run([ROOT / "launch/setup.sh", "x"], capture_output=True, text=True)
    assert setup.returncode == 2
    env = {key: value for key, value in os.environ.items() if not key.startswith("SLURM")}
    slurm = subprocess.run([ROOT / "launch/slurm.sh"], capture_output=True, text=True, env=env)
    assert slurm.returncode == 2


def test_an_invalid_number_of_requeues_is_refused_before_the_job(tmp_path: Path) -> None:
    (tmp_path / "launch").mkdir()
    (
        tmp_path / "launch/torchrun.sh"
    ).touch()  # by which the script recognises a checkout; it starts nothing here
    job = {"SLURM_JOB_ID": "7", "SLURM_SUBMIT_DIR": str(tmp_path), "BOSCH_REQUEUES": "3.5"}
    done = subprocess.run(
        ["bash", ROOT / "launch/slurm.sh", "recipe.yaml"],
        capture_output=True, text=True, env={**os.environ, **job},
    )  # fmt: skip
    assert done.returncode == 2
    assert done.stderr == "error: BOSCH_REQUEUES=3.5: expected a count of times\n"
