"""Stages that run, stages that do not run, and the stated reasons. All in this process."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch.distributed as dist

from bosch.errors import DamagedWorkError, LostRankError, RunError, StoppedError, UserError
from bosch.files import write_json
from bosch.this_process import heeded, name_processes
from pipeline.recipe.load import load_recipe
from pipeline.recipe.stage_list import STAGES
from pipeline.run import failures, first_node, heartbeat, worker
from pipeline.run.graph import document_key, resolve
from pipeline.run.heartbeat import Heartbeat
from pipeline.run.locks import hold
from pipeline.run.runner import Runner, RunOptions, checkout_commit
from pipeline.run.status import differences, inspect
from pipeline.run.store import Store
from pipeline.run.worker import execute
from stages.context import StageConfig
from stages.published import Manifest
from stages.stage import LoadedRecipe, World
from tests import fake_stages
from tests.pipeline_case import Case, fake_table, in_process, lose, runner

# The stages that the recipe asks for.
NAMES = ["prepare", "search", "materialize", "original", "train", "evaluate", "report"]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Case:
    """A case whose stages have run, for tests that change nothing in it."""
    case = Case(tmp_path_factory.mktemp("finished") / "case")
    runner(case).run()
    return case


def load(case: Case, *overrides: str, distributed: bool = False, **world: int) -> LoadedRecipe:
    loaded = load_recipe(case.file, overrides, env={}, stages=fake_table(distributed))
    return replace(loaded, world=World(**world))


def launching(case: Case, launcher: Any, *overrides: str, **options: Any) -> Runner:
    """A runner that starts stages with `launch`."""
    current = runner(case, *overrides, **options)
    current.launcher = launcher
    return current


def fail(case: Case, stage: str, *overrides: str, **options: Any) -> None:
    """Run until the named stage fails."""
    with pytest.MonkeyPatch.context() as patch, pytest.raises(RunError, match="the loss diverged"):
        patch.setenv("FAKE_FAIL", f"{stage}=run")
        runner(case, *overrides, **options).run()


def states(case: Case, *overrides: str, **options: Any) -> dict[str, str]:
    return {state.node.name: str(state) for state in runner(case, *overrides, **options).states()}


def to_run(case: Case, *overrides: str, **options: Any) -> list[str]:
    return [name for name, text in states(case, *overrides, **options).items() if text != "cached"]


def published(case: Case, stage: str, file: str = "manifest.json") -> dict[str, Any]:
    return json.loads((case.output(stage) / file).read_text())


def test_a_run_publishes_every_stage_and_a_second_does_nothing(case: Case) -> None:
    assert states(case) == dict.fromkeys(NAMES, "to run (never made)")
    assert runner(case).run() == 7
    assert states(case) == dict.fromkeys(NAMES, "cached")
    case.output("train").unlink()
    assert runner(case).run() == 0
    for name in NAMES:
        assert case.output(name).is_symlink()
        assert case.calls(name) == 1
    output = published(case, "report", "output.json")
    assert set(output["inputs"]) == set(NAMES[:-1])
    assert output["section"]["title"] == "tiny"
    assert json.loads((case.runs / "tiny" / "recipe.json").read_text())["seed"] == 0
    output = published(case, "train", "output.json")
    assert set(output["inputs"]) == {"prepare", "materialize"}
    assert output["upstream"] == ["materialize", "prepare", "search"]
    # The page shows sections by name: `original` has the section evaluate.
    report = json.loads((case.output("report") / "output.json").read_text())
    assert set(report["upstream"]) < set(case.content) | {"materialize"}
    manifest = published(case, "train")
    assert manifest["config"]["batch_tokens"] == 512
    assert manifest["summary"] == {"stage": "train", "rank": 0}
    upstream = {name: case.output(name).resolve().name for name in ("prepare", "materialize")}
    assert manifest["upstream"] == upstream
    assert (manifest["recipe"], manifest["runtime"]["processes"]) == ("tiny", 1)
    assert manifest["version"] == next(stage.version for stage in STAGES if stage.name == "train")
    assert "torch" in manifest["packages"]
    assert {"created", "seconds", "git_commit", "python", "host"} <= manifest.keys()


def test_a_stage_gets_its_config_inputs_and_folder(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    configs: dict[str, StageConfig[Any]] = {}
    run = fake_stages.run

    def note(config: StageConfig[Any], *paths: Any) -> dict[str, Any]:
        configs[type(config.section).__name__] = config
        return run(config, *paths)

    monkeypatch.setattr(fake_stages, "run", note)
    current = runner(case, "seed=7")
    current.run()
    search, nodes = configs["SearchConfig"], {node.name: node for node in current.nodes}
    document = nodes["search"].document or {}
    assert search.shared == current.store.shared("search")
    assert search.model_identity == document_key(document["model"])
    assert search.other_stages == tuple(stage.name for stage in STAGES if stage.name != "search")
    assert str(case.model / "model.safetensors") in search.stamps
    recipe = current.loaded.recipe
    assert (search.seed, search.model, search.runtime) == (7, recipe.model, recipe.runtime)
    assert configs["EvaluateConfig"].shared == current.store.shared("evaluate")
    assert configs["ReportConfig"].model_identity is None


def test_a_manifest_has_the_number_of_gpus_of_its_stage(case: Case) -> None:
    # In the fake table only train may run on several processes, if asked.
    loaded = load(case, distributed=True, nodes=2, processes_per_node=8, gpus=8)
    assert loaded.world.used_gpus == 16
    assert World(processes_per_node=4, gpus=8).used_gpus == 4
    assert World(processes_per_node=4).used_gpus == 0
    Runner(loaded, RunOptions(until="train"), in_process).run()
    manifests = [published(case, name) for name in ("prepare", "materialize", "train")]
    found = [(manifest["processes"], manifest["gpus"]) for manifest in manifests]
    assert found == [(1, 0), (1, 1), (16, 16)]


def test_a_manifest_says_whether_the_checkout_differs_from_its_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def git(*arguments: str) -> str:
        own = ["-c", "user.name=n", "-c", "user.email=e", "-c", "commit.gpgsign=false"]
        command = ["git", *own, *arguments]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    monkeypatch.setattr("pipeline.run.runner.ROOT", tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    commit = checkout_commit.__wrapped__
    assert commit() is None
    git("init", "-q")
    (tmp_path / "code.py").write_text("1")
    git("add", ".")
    git("commit", "-qm", "x")
    (tmp_path / "notes").touch()  # not a part of the checkout
    assert commit() == git("rev-parse", "HEAD")
    (tmp_path / "code.py").write_text("2")
    assert commit() == git("rev-parse", "HEAD") + "+"
    monkeypatch.setenv("PATH", "")
    assert commit() is None


@pytest.mark.parametrize(
    ("override", "first", "reason"),
    [
        ("search.swa_ratio=0.75", "search", "search.swa_ratio changed 0.5 → 0.75"),
        ("search.buckets=[0,0.5,1]", "search", "search.buckets changed [0.0, 0.25, 0.5, 0.75"),
        ("seed=7", "prepare", "seed changed 0 → 7"),
        ("train.total_tokens=1k", "train", "train.total_tokens changed 2048 → 1024"),
        ("model.dtype=float32", "search", "model.dtype changed bfloat16 → float32"),
        ("materialize.dtype=float32", "materialize", "materialize.dtype changed bfloat16"),
        ("evaluate.needle.samples=3", "original", "evaluate.needle.samples changed 2 → 3"),
        ("report.title=New", "report", "report.title changed tiny → New"),
        ("prepare.sources.0.weight=2", "prepare", "prepare.sources.0.weight changed 1 → 2"),
    ],
)
def test_a_changed_field_reruns_its_stage_and_the_stages_after_it(
    finished: Case, override: str, first: str, reason: str
) -> None:
    shown = states(finished, override)
    assert shown[first].startswith(f"to run ({reason}")
    follows = NAMES[NAMES.index(first) :]
    if not override.startswith(("seed", "model", "evaluate")):
        follows = [name for name in follows if name != "original"]
    if override.startswith("evaluate"):
        follows.remove("train")
    assert [name for name in NAMES if shown[name] != "cached"] == follows


def test_status_shows_three_changes_and_counts_the_others(finished: Case) -> None:
    changes = [f"train.{name}" for name in (
        "learning_rate=1e-4", "weight_decay=0.2", "warmup_ratio=0.5", "total_tokens=1k"
    )]  # fmt: skip
    shown = states(finished, *changes)["train"]
    assert shown.count("changed") == 3 and shown.endswith("; and 1 more)")


def test_runtime_is_in_no_key(finished: Case) -> None:
    changes = [f"runtime.{setting}" for setting in ("eval_batch_size=1", "log_level=debug")]
    assert to_run(finished, *changes, "runtime.data_workers=2") == []


def test_changed_inputs_are_found_by_content(case: Case) -> None:
    runner(case).run()
    (case.corpus / "a.txt").write_text("some TEXT")
    shown = states(case)
    assert shown["prepare"] == "to run (prepare.sources.0.path: a.txt has other content)"
    assert shown["search"] == "to run (input prepare changed)"
    assert shown["report"].startswith("to run (inputs prepare, search, ")
    (case.corpus / "a.txt").write_text("some text")
    os.utime(case.corpus / "a.txt", (1, 1))
    assert to_run(case) == []
    (case.corpus / "b.txt").write_text("more")
    assert states(case)["prepare"] == "to run (prepare.sources.0.path: b.txt is new)"
    (case.corpus / "b.txt").unlink()
    case.corpus.rename(case.folder / "elsewhere")
    assert to_run(case, f"prepare.sources.0.path={case.folder / 'elsewhere'}") == []


def test_a_changed_stage_version_reruns_it(finished: Case) -> None:
    first = runner(finished)
    raised = tuple(
        replace(stage, version=stage.version + (stage.name == "train"))
        for stage in first.loaded.stages
    )
    again = Runner(replace(first.loaded, stages=raised), RunOptions(), in_process)
    shown = {state.node.name: str(state) for state in again.states()}
    before = next(stage.version for stage in STAGES if stage.name == "train")
    change = f"version {before} → {before + 1}"
    assert shown["train"] == f"to run (the code of train changed: {change})"


def test_a_stopped_forced_run_resumes_with_the_same_command(case: Case) -> None:
    """A scheduler repeats the command at every time limit; finished stages are kept."""
    runner(case).run()
    for name, calls, train in (
        ("train", [2, 1], "to run (--force; resumes what was begun)"),
        ("evaluate", [1, 2], "cached"),
    ):
        fail(case, name, force=("train",))
        assert states(case, force=("train",))["train"] == train
        assert runner(case, force=("train",)).run() == (3 if name == "train" else 2)
        assert [case.calls("train"), case.calls("evaluate")] == calls
    assert states(case, force=("train",))["train"] == "to run (--force)"
    # A forced run that another run finished is over.
    fail(case, "report", force=("train",))
    runner(case).run()
    assert runner(case, force=("train",)).run() == 3


def test_an_output_is_made_again_if_a_rebuilt_input_differs(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Training on a GPU ends with other weights each time; scores must be those of one of them."""
    runner(case).run()

    def damage(name: str) -> None:
        (case.output(name) / "output.json").write_text("damaged")

    damage("train")
    assert runner(case).run() == 1  # equal, bit for bit
    (case.output("train") / "stage.log").write_text("other times")
    assert runner(case).run() == 1
    monkeypatch.setenv("FAKE_ROUNDING", "other")
    damage("train")
    assert to_run(case) == ["train"]  # its new content is not known yet
    assert runner(case).run() == 3
    assert to_run(case) == []
    # After a stop in between, the run continues from there.
    monkeypatch.setenv("FAKE_ROUNDING", "a third")
    assert runner(case, force=("train",), until="train").run() == 1
    assert states(case)["evaluate"] == ("to run (input train was made again, and is not as it was)")
    with pytest.raises(UserError, match="--from report: the earlier stage evaluate is not there"):
        runner(case, start="report").run()
    fail(case, "evaluate")
    assert runner(case).run() == 2
    assert [case.calls("train"), case.calls("evaluate")] == [1, 2]


def test_an_output_that_another_run_has_rebuilt_meanwhile_is_used(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two runs that find a changed input, only the first trains again."""
    runner(case).run()
    monkeypatch.setenv("FAKE_ROUNDING", "other")
    runner(case, force=("search",), until="search").run()
    second = runner(case, wait=True)
    found = second.states()
    assert [state.node.name for state in found if state.afresh] == [
        "materialize", "train", "evaluate", "report",
    ]  # fmt: skip
    runner(case).run()
    monkeypatch.setattr(second, "states", lambda: found)
    monkeypatch.setattr(second, "launcher", None)
    second.run()
    assert to_run(case) == []


def test_complete_work_left_by_a_crash_is_checked_against_the_current_inputs(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner(case).run()
    place = case.output("train").resolve()
    place.rename(case.runs / "work" / "train" / place.name)
    monkeypatch.setenv("FAKE_ROUNDING", "other")
    runner(case, force=("search",), until="search").run()
    runner(case).run()
    assert published(case, "train", "output.json")["rounding"] == "other"
    assert to_run(case) == []


def test_two_recipes_share_equal_stages(case: Case) -> None:
    runner(case).run()
    prepared = case.output("prepare").resolve()
    other = case.folder / "other.yaml"
    other.write_text(case.file.read_text())
    loaded = load_recipe(other, ["search.swa_ratio=0.75"], env={}, stages=fake_table())
    assert Runner(loaded, RunOptions(), in_process).run() == 5
    assert (case.runs / "other" / "prepare").resolve() == prepared
    assert (case.runs / "other" / "original").resolve() == case.output("original").resolve()
    assert to_run(case) == []


def test_until_from_and_force_choose_the_stages(
    case: Case, capsys: pytest.CaptureFixture[str]
) -> None:
    assert runner(case, until="search").run() == 2
    assert to_run(case) == NAMES[2:]
    with pytest.raises(UserError, match="--from train: the earlier stage materialize is not there"):
        runner(case, start="train").run()
    # Training does not need the original's scores.
    assert runner(case, until="materialize").run() == 1
    assert runner(case, start="train", until="train").run() == 1
    assert "1 of 1 stage to run: train" in capsys.readouterr().out
    assert runner(case, start="materialize").run() == 3
    assert states(case, force=("train",))["train"] == "to run (--force)"
    assert states(case, force=("train",))["report"] == "to run (input train is made again)"
    before = case.output("search").resolve().stat().st_ino
    assert runner(case, force=("train",)).run() == 3
    assert case.output("search").resolve().stat().st_ino == before
    assert case.calls("train") == 1
    assert runner(case, force=("search",), until="search").run() == 1
    for wrong, expected in (
        ({"until": "serach"}, "did you mean search?"),
        ({"until": "prepare", "start": "train"}, "no stage left"),
        ({"until": "prepare", "force": ("train",)}, "leave this stage out"),
    ):
        with pytest.raises(UserError, match=expected):
            runner(case, **wrong)
    with pytest.raises(UserError, match="--force works on one node only"):
        Runner(load(case, nodes=2), RunOptions(force=("train",)), in_process)


def test_recipes_without_train_and_evaluate(case: Case) -> None:
    assert runner(case, "train=null").run() == 6
    inputs = published(case, "evaluate", "output.json")["inputs"]
    assert set(inputs) == {"prepare", "materialize", "original"}
    assert runner(case, "train=null", "evaluate=null").run() == 1
    assert not case.output("evaluate").is_symlink()


def test_damaged_outputs_are_set_aside_and_rebuilt(case: Case) -> None:
    runner(case).run()
    file = case.output("search") / "output.json"
    good = file.read_text()
    file.write_text(good.replace("0.5", "0.6"))
    damaged = "to run (its output is damaged: output.json has other content)"
    assert states(case)["search"] == damaged
    assert to_run(case) == ["search"]
    assert runner(case).run() == 1
    assert file.read_text() == good
    assert len(list((case.runs / "damaged" / "search").iterdir())) == 1
    (case.output("report") / "manifest.json").unlink()
    assert runner(case).run() == 1
    assert to_run(case) == []


def test_files_added_to_an_output_are_moved_out_and_nothing_is_rebuilt(case: Case) -> None:
    runner(case).run()
    added = case.output("materialize") / "model.safetensors"
    added.touch()
    damaged = "to run (its output is damaged: model.safetensors was added to it)"
    assert states(case)["materialize"] == damaged
    with pytest.raises(UserError, match=r"was added to it\); leave --from out"):
        runner(case, start="train").run()
    assert runner(case).run() == 1
    assert not added.exists()
    [aside] = (case.runs / "damaged" / "materialize").iterdir()
    assert aside.suffix == ".added"
    assert to_run(case) == []


def test_an_input_damaged_during_a_run_is_not_read(case: Case) -> None:
    def adding(order: Mapping[str, Any], world: World) -> dict[str, Any]:
        if order["stage"] == "materialize":
            (case.output("prepare") / "added").touch()
        return execute(order)

    with pytest.raises(RunError, match=r"train: its input prepare is damaged \(added was added"):
        launching(case, adding).run()
    assert runner(case).run() == 4  # prepare (added file moved out), and unmade stages


def test_other_nodes_wait_until_a_damaged_output_is_rebuilt(case: Case) -> None:
    runner(case, until="prepare").run()
    file = case.output("prepare") / "output.json"
    good = file.read_text()
    file.write_text(good.replace("0", "1"))
    timer = threading.Timer(1.0, file.write_text, [good])
    timer.start()
    Runner(load(case, nodes=2, node_rank=1), RunOptions(until="prepare"), in_process).run()
    assert timer.finished.is_set() and file.read_text() == good


def test_a_stage_restarts_after_it_set_damaged_work_aside(
    case: Case, caplog: pytest.LogCaptureFixture
) -> None:
    starts = []

    def damaged(order: Mapping[str, Any], world: World) -> dict[str, Any]:
        starts.append(order["stage"])
        if starts.count("train") == 1 and order["stage"] == "train":
            raise DamagedWorkError("train: the restart point step-4 cannot be loaded")
        return execute(order)

    assert launching(case, damaged).run() == 7
    assert starts.count("train") == 2
    assert "step-4 cannot be loaded; starting again without it" in caplog.text
    starts.clear()
    (case.output("train") / "manifest.json").unlink()
    with pytest.raises(RunError, match="step-4 cannot be loaded; the same command continues"):
        on_node(case, 0, damaged, distributed=True).run()


def test_a_deleted_output_is_made_again(case: Case) -> None:
    runner(case).run()
    shutil.rmtree(case.output("materialize").resolve())
    assert states(case)["materialize"] == "to run (its output is gone)"
    assert to_run(case) == ["materialize"]
    assert runner(case).run() == 1
    shutil.rmtree(case.runs / "store")
    assert runner(case).run() == 7


def test_input_hashes_are_saved_before_the_first_stage_ends(case: Case) -> None:
    """So `status` need not read large files again during a run."""
    for path in (case.corpus / "a.txt", case.model / "tokenizer.json"):
        os.utime(path, (1, 1))
    fail(case, "prepare")
    hasher = Store(case.runs).hasher(budget_bytes=0)
    assert resolve(load(case), hasher)[0].key is not None


def test_a_failure_is_reported_and_its_work_kept(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also on a full disk, where the note of the failure cannot be written either."""

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Store, "fail", full)
        fail(case, "search")
    fail(case, "search")
    shown = states(case)
    assert shown["prepare"] == "cached"
    assert shown["search"] == "failed (the loss diverged)"
    assert runner(case).run() == 6
    assert case.calls("search") == 3
    assert to_run(case) == []


def test_an_interrupted_stage_resumes_in_its_work_directory(case: Case) -> None:
    def killed(order: Mapping[str, Any], world: World) -> dict[str, Any]:
        if order["stage"] == "search":
            (Path(order["work_dir"]) / "calls.0.txt").write_text("called\n")
            raise KeyboardInterrupt
        return execute(order)

    with pytest.raises(KeyboardInterrupt):
        launching(case, killed).run()
    assert states(case)["search"] == "to run (never made; resumes what was begun)"
    runner(case).run()
    assert case.calls("search") == 2
    assert published(case, "search")["attempts"] == 2


def test_every_attempt_counts_its_own_gpus(case: Case) -> None:
    """Eight for an hour, then two: not ten hours on two."""

    def killed(order: Mapping[str, Any], world: World) -> dict[str, Any]:
        if order["stage"] == "train":
            raise KeyboardInterrupt
        return execute(order)

    def on(gpus: int, launcher: Any) -> Runner:
        loaded = load(case, distributed=True, processes_per_node=gpus, gpus=gpus)
        return Runner(loaded, RunOptions(until="train"), launcher)

    with pytest.raises(KeyboardInterrupt):
        on(8, killed).run()
    (notes,) = (case.runs / "work" / "train").glob("*.state.json")
    attempt = json.loads(notes.read_text())["attempts"][0]
    attempt |= {"started": attempt["started"] - 3600, "ended": attempt["started"]}
    notes.write_text(json.dumps({"attempts": [attempt]}))
    on(2, lambda order, world: execute(order)).run()
    manifest = Manifest.read(case.output("train"))
    assert (manifest.gpus, manifest.seconds) == (2, pytest.approx(3600, abs=60))
    assert manifest.gpu_hours == pytest.approx(8, abs=0.1)
    older = manifest.model_copy(update={"gpu_seconds": None, "seconds": 1800.0})
    assert older.gpu_hours == 1.0


def test_a_stage_that_another_run_is_making_is_reported(case: Case) -> None:
    runner(case, until="prepare").run()
    current = runner(case)
    node = next(node for node in current.nodes if node.name == "search")
    with hold(current.store.lock("search", str(node.key)), "x", "tiny"):
        assert states(case)["search"].startswith(f"running (pid {os.getpid()} on ")
        with pytest.raises(
            RunError, match=rf"tiny: stage search is being made by pid {os.getpid()}"
        ):
            runner(case).run()
    assert runner(case).run() == 6


def test_links_of_stages_that_the_recipe_no_longer_has_are_removed(case: Case) -> None:
    runner(case).run()
    fail(case, "train", "search.swa_ratio=0.75")
    assert case.output("materialize").is_symlink()
    assert not case.output("train").is_symlink()
    assert not case.output("report").is_symlink()
    # The keys of the last run are still known, so the stated reasons are exact.
    shown = states(case, "search.swa_ratio=0.75", "evaluate.needle.samples=3")
    assert shown["evaluate"].startswith("to run (evaluate.needle.samples changed 2 → 3")
    fail(case, "search", "search.swa_ratio=0.25")
    assert not case.output("search").is_symlink()


def test_all_links_lead_to_the_same_run_even_if_its_stages_were_cached(case: Case) -> None:
    """Otherwise a model could be uploaded with another model's scores."""
    other = "search.swa_ratio=0.75"
    runner(case).run()
    runner(case, other, until="materialize").run()
    assert runner(case).run() == 0 and case.output("evaluate").is_symlink()
    assert runner(case, other, until="materialize").run() == 0
    assert case.output("prepare").is_symlink() and case.output("materialize").is_symlink()
    for name in ("train", "evaluate", "report"):
        assert not case.output(name).is_symlink()
    assert runner(case).run() == 0 and case.output("report").is_symlink()


def test_keys_do_not_depend_on_the_order_or_spelling_of_fields(case: Case) -> None:
    def keys(*overrides: str) -> list[str | None]:
        loaded = load_recipe(case.file, overrides, env={})
        return [node.key for node in resolve(loaded, runner(case).hasher)]

    plain = keys()
    case.content = dict(reversed(case.content.items()))
    case.save()
    assert keys("train.total_tokens=2k", "search.window_size='32'", "name=other") != plain
    assert keys("train.total_tokens=2k", "search.window_size='32'", "name=other")[:6] == plain[:6]
    assert keys() == plain
    assert len(set(plain)) == 7


def test_every_real_stage_comes_after_the_stages_it_needs() -> None:
    names = [stage.name for stage in STAGES]
    for index, stage in enumerate(STAGES):
        assert {*(stage.needs or ()), *stage.after} <= set(names[:index])
    # A faulty evaluation must be found before training: the original model answers the
    # same samples as the trained ones, of the same lengths.
    assert names.index("original") < names.index("train")


def test_searches_of_one_model_share_a_folder_unless_forced(case: Case) -> None:
    orders: list[Mapping[str, Any]] = []

    def noting(order: Mapping[str, Any], world: World) -> dict[str, Any]:
        orders.append(order)
        return execute(order)

    def shared_of(*overrides: str, **options: Any) -> Any:
        launching(case, noting, *overrides, until="search", **options).run()
        (shown,) = [order["shared"] for order in orders if order["stage"] == "search"]
        orders.clear()
        return shown

    first = shared_of()
    assert first == str(case.runs / "shared" / "search")
    assert shared_of("search.swa_ratio=0.75", "search.method=rand") == first
    assert shared_of(force=("search",)) is None
    assert shared_of(force=("prepare",)) is None


def test_faults_of_later_stages_are_reported_before_the_first_stage_runs(case: Case) -> None:
    stages = [
        replace(stage, refusal="tests.fake_stages:refuse") if stage.name == "search" else stage
        for stage in fake_table()
    ]
    loaded = load_recipe(case.file, env={}, stages=stages)
    with pytest.raises(UserError, match="the GPUs are too small"):
        Runner(loaded, RunOptions(), in_process).run()
    assert not case.output("prepare").exists()
    assert Runner(loaded, RunOptions(until="prepare"), in_process).run() == 1
    runner(case, until="search").run()
    assert Runner(loaded, RunOptions(), in_process).run() == 5


def test_differences_between_two_key_documents_are_listed_in_order() -> None:
    """A hash is never shown, neither the old nor the new value."""
    one, other = 64 * "0", 64 * "1"
    old = {
        "config": {"gone": 1, "same": None, "value": None},
        "inputs": {"a": one, "b": "none", "c": one},
        "upstream": dict.fromkeys("abcdefgh", "1"),
    }
    new = {
        "config": {"same": None, "seed": None, "value": 2},
        "inputs": {"a": "none", "b": one, "c": other},
        "upstream": {"a": "1", "x": "1", "b": "2"},
    }
    assert list(differences(old, new)) == [
        "seed is new", "value changed nothing → 2", "gone is gone",
        *(f"{name} has other content" for name in "abc"),
        "input b changed", "input x is new",
        *(f"input {name} is no longer there" for name in "cdefgh"),
    ]  # fmt: skip


def on_node(case: Case, rank: int, launcher: Any = in_process, distributed: bool = False) -> Runner:
    loaded = load(case, distributed=distributed, nodes=2, node_rank=rank)
    return Runner(loaded, RunOptions(until="train"), launcher)


def failing(order: Mapping[str, Any], world: World) -> dict[str, Any]:
    raise LostRankError("search: node 1 is silent")


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first_node, "SILENT_SECONDS", 0.5)
    monkeypatch.setattr(first_node, "BEAT_SECONDS", 0.05)


@pytest.mark.parametrize("looked_before", [True, False])
def test_a_node_ends_if_the_first_node_failed_even_before_it_looked(
    case: Case, impatient: None, looked_before: bool
) -> None:
    follower = on_node(case, 1) if looked_before else None
    with pytest.raises(LostRankError):
        on_node(case, 0, failing).run()
    expected = (
        "prepare: the run failed on the first node: search: node 1 is silent"
        if looked_before
        else "prepare: the first node sent no heartbeat in .* .its last run failed: search: node"
    )
    with pytest.raises(LostRankError, match=expected):
        (follower or on_node(case, 1)).run()


def test_a_node_does_not_wait_for_an_absent_first_node(case: Case, impatient: None) -> None:
    with pytest.raises(LostRankError, match="the first node sent no heartbeat in"):
        on_node(case, 1).run()


def test_an_old_heartbeat_that_is_briefly_unreadable_is_no_sign_of_life(tmp_path: Path) -> None:
    file = tmp_path / "first_node.json"
    write_json(file, {"run": "1", "ended": "the disk is full", "lost": False})
    watcher, record = first_node.FirstNodeWatcher(file), file.read_text()
    for content in ("", record):
        file.write_text(content)
        assert watcher.fault() is None
    assert not watcher.alive


def test_a_node_does_not_wait_for_a_stage_that_the_first_node_skips(
    case: Case, impatient: None
) -> None:
    follower, leader = on_node(case, 1), on_node(case, 0)
    leader.chosen = ["prepare"]
    leader.run()
    with pytest.raises(RunError, match="search: the first node's run is over, without this stage"):
        follower.run()


def test_a_node_waits_while_the_first_node_is_alive(case: Case, impatient: None) -> None:
    follower = on_node(case, 1)

    def slowly(order: Mapping[str, Any], world: World) -> dict[str, Any]:
        time.sleep(0.8 * (order["stage"] == "prepare"))
        return execute(order)

    with ThreadPoolExecutor(1) as pool:
        leading = pool.submit(on_node(case, 0, slowly).run)
        assert follower.run() == leading.result() == 5


def test_another_node_does_not_use_an_output_that_the_first_node_is_rebuilding(
    case: Case, impatient: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner(case).run()
    before = case.output("search").resolve().stat().st_ino
    monkeypatch.setenv("FAKE_ROUNDING", "other")
    runner(case, force=("prepare",), until="prepare").run()
    follower = on_node(case, 1)
    with ThreadPoolExecutor(1) as pool:
        following = pool.submit(follower.run)
        time.sleep(0.3)
        assert on_node(case, 0).run() == following.result() == 3
    assert case.output("search").resolve().stat().st_ino != before


def test_a_node_joins_only_distributed_stages(
    case: Case, impatient: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.run.runner.POLL_SECONDS", 0.02)
    joined: list[tuple[Mapping[str, Any], World]] = []
    is_joined = threading.Event()

    def join(order: Mapping[str, Any], world: World) -> dict[str, Any]:
        joined.append((order, world))
        is_joined.set()
        return {}

    def lead(order: Mapping[str, Any], world: World) -> dict[str, Any]:
        if order["stage"] == "train":
            assert is_joined.wait(10)
            time.sleep(0.1)  # long enough to be joined again
        return execute(order)

    follower = on_node(case, 1, join, distributed=True)
    with ThreadPoolExecutor(1) as pool:
        leading = pool.submit(on_node(case, 0, lead, distributed=True).run)
        assert follower.run() == leading.result() == 5
    ((order, world),) = joined
    node = next(node for node in follower.nodes if node.name == "train")
    assert order["work_dir"] == str(follower.store.work("train", str(node.key)))
    assert (order["stage"], world.nodes, world.node_rank) == ("train", 2, 1)
    assert order["stamps"]


def test_a_signal_in_a_destructor_still_ends_the_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python drops exceptions that a destructor or an import callback raises."""

    class Signals:
        def __del__(self) -> None:
            os.kill(os.getpid(), signal.SIGUSR1)

    monkeypatch.setattr(sys, "unraisablehook", worker.interrupt_again)
    signal.signal(signal.SIGUSR1, worker.interrupt)
    with pytest.raises(KeyboardInterrupt):
        Signals()
        time.sleep(1)


def test_a_process_that_is_ending_can_only_be_ended_by_sigkill() -> None:
    stops = heeded(signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
    failures.ignore_stops()
    assert heeded(*stops) == []


@pytest.mark.parametrize(
    ("ranks", "size", "per_node", "name"),
    [
        ([1, 5], None, None, "process 1, 5"),
        ([1, 3], "4", "4", "process 1, 3"),
        ([1, 5, 4], "8", "4", "node 0, 1 (process 1, 5, 4)"),
        ([4], "8", "4", "node 1 (process 4)"),
    ],
)
def test_processes_are_named_with_their_nodes_if_there_are_several(
    ranks: list[int], size: str | None, per_node: str | None, name: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    for variable, value in (("WORLD_SIZE", size), ("LOCAL_WORLD_SIZE", per_node)):
        monkeypatch.delenv(variable, raising=False)
        if value is not None:
            monkeypatch.setenv(variable, value)
    assert name_processes(ranks) == name


def test_a_process_that_has_finished_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", str(store.port))
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    lost: list[str] = []
    with heartbeat.heartbeats(1, lost.append):
        pass
    assert store.add("bosch/heartbeat/1", 0) >= heartbeat.ENDED and not lost


class _Checks:
    """A heartbeat's event that makes time pass, for 50 checks at most."""

    def __init__(self, heartbeat: Heartbeat, counts: Any) -> None:
        self.heartbeat, self.counts, self.passed = heartbeat, counts, 0

    def wait(self, seconds: float) -> bool:
        self.passed += 1
        *self.heartbeat._counts, self.heartbeat._exchanges = self.counts(self.passed)
        return self.passed > 50


@pytest.mark.parametrize(
    ("counts", "who"),
    [
        # Process 1 is frozen, 2 a little late; then the store is, which holds the counts.
        (lambda n: (n, 1, min(n, 10), n), "process 1 of this run"),
        (lambda n: (5, 5, 5, min(n, 3)), "the first node of this run, or its launcher,"),
        (lambda n: (1, n, 1, n), "process 0, 2 of this run"),
        # A finished process sends no heartbeat, nor does the store after its node has ended.
        (lambda n: (n, heartbeat.ENDED + 1, n, n), None),
        (lambda n: (heartbeat.ENDED, 5, 5, min(n, 3)), None),
    ],
)
def test_only_the_frozen_process_is_named(counts: Any, who: str | None) -> None:
    heart, said = object.__new__(Heartbeat), []
    heart._minutes, heart._interval, heart._on_lost = 1, 6, said.append
    heart._counts, heart._exchanges = [0, 0, 0], 0
    checks = _Checks(heart, counts)
    heart._ending = cast(Any, checks)
    heart._watch()
    assert [text.partition(" has sent no heartbeat for 1 minutes")[0] for text in said] == (
        [who] if who else []
    )
    # Ten checks take a minute, and the first has nothing to compare with.
    assert who is None or checks.passed == 11


@pytest.mark.parametrize(
    ("size", "error", "ended"),
    [("2", None, [1]), ("2", StoppedError("saved"), [1]), ("2", RunError("nan"), []),
     ("1", None, [])],
)  # fmt: skip
def test_a_failing_process_sends_no_more_heartbeats(
    size: str, error: Exception | None, ended: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    ends: list[int] = []
    started = SimpleNamespace(end=lambda: ends.append(1))
    monkeypatch.setattr(heartbeat, "Heartbeat", lambda minutes, lost: started)
    monkeypatch.setenv("WORLD_SIZE", size)
    with pytest.raises(type(error)) if error else nullcontext(), heartbeat.heartbeats(1, print):
        if error is not None:
            raise error
    assert ends == ended


def test_a_summary_with_nan_is_refused_in_the_stages_process(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:

    def refused(order: Mapping[str, Any], world: World) -> dict[str, Any]:
        with pytest.raises(ValueError, match="Out of range float values"):
            execute(order)
        raise RunError("refused")

    monkeypatch.setattr(fake_stages, "run", lambda *_: {"loss": float("nan")})
    with pytest.raises(RunError, match="refused"):
        launching(case, refused).run()


def test_an_output_too_large_to_hash_quickly_counts_as_complete(case: Case) -> None:
    current = runner(case, until="prepare")
    current.run()
    (case.runs / "store" / "hashes.json").unlink()
    store = Store(case.runs)
    (first, *_) = inspect(current.nodes, store, store.hasher(0), "tiny")
    assert (first.state, first.reason.partition(":")[0]) == ("cached", "not yet checked")


def test_an_output_that_is_briefly_unreadable_is_not_rebuilt(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    case.make(until="search")
    again = runner(case, until="search")
    folder = case.output("search").resolve()
    with monkeypatch.context() as patch, pytest.raises(OSError, match=os.strerror(errno.ESTALE)):
        lose(patch, folder)
        again.states()
    assert again.run() == 0
