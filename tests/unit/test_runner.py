"""Stages that run, stages that do not run, and the stated reasons. All in this process."""

from __future__ import annotations

import errno
import json
import os
import shutil
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest

from bosch.errors import RunError, UserError
from pipeline.cli import main
from pipeline.recipe.load import load_recipe
from pipeline.recipe.stage_list import STAGES, in_order
from pipeline.run.graph import resolve
from pipeline.run.runner import Runner, RunOptions
from pipeline.run.status import differences, inspect
from pipeline.run.store import Store
from pipeline.run.worker import execute
from stages.published import Manifest
from stages.report import index
from stages.stage import LoadedRecipe, World, model_processes
from tests import fake_stages, own_stage
from tests.pipeline_case import Case, fake_table, in_process, runner

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
    assert set(output["inputs"]) == {"prepare", "search", "materialize"}
    assert output["upstream"] == ["materialize", "prepare", "search"]
    # The page shows sections by name: `original` has the section evaluate.
    report = json.loads((case.output("report") / "output.json").read_text())
    assert set(report["upstream"]) < set(case.content) | {"materialize"}
    manifest = published(case, "train")
    assert manifest["config"]["batch_tokens"] == 512
    assert manifest["summary"] == {"stage": "train", "rank": 0}
    needed = ("prepare", "search", "materialize")
    upstream = {name: case.output(name).resolve().name for name in needed}
    assert manifest["upstream"] == upstream
    assert (manifest["recipe"], manifest["runtime"]["processes"]) == ("tiny", 1)
    assert manifest["version"] == next(stage.version for stage in STAGES if stage.name == "train")
    assert "torch" in manifest["packages"]
    assert {"created", "seconds", "git_commit", "python", "host"} <= manifest.keys()


def test_a_manifest_has_the_number_of_gpus_of_its_stage(case: Case) -> None:
    # In the fake table only train may run on several processes, if asked.
    loaded = load(case, distributed=True, nodes=2, processes_per_node=8, gpus=8)
    assert loaded.world.used_gpus == 16
    assert World(processes_per_node=4, gpus=8).used_gpus == 4
    assert World(processes_per_node=4).used_gpus == 0
    Runner(loaded, RunOptions(until="train"), in_process).run()
    manifests = [published(case, name) for name in ("prepare", "materialize", "train")]
    found = [(manifest["processes"], manifest["gpus"]) for manifest in manifests]
    # A batch of 4 sequences: two of each node's GPUs can share it.
    assert found == [(1, 0), (1, 1), (4, 4)]


@pytest.mark.parametrize(
    ("override", "first", "reason"),
    [
        ("search.swa_ratio=0.75", "search", "search.swa_ratio changed 0.5 → 0.75"),
        ("search.buckets=[0,0.5,1]", "search", "search.buckets changed [0.0, 0.25, 0.5, 0.75"),
        ("seed=7", "prepare", "seed changed 0 → 7"),
        ("train.total_tokens=1k", "train", "train.total_tokens changed 2048 → 1024"),
        ("model.dtype=float32", "search", "model.dtype changed bfloat16 → float32"),
        (
            "materialize.max_shard_size=4GB",
            "materialize",
            "materialize.max_shard_size changed 5GB → 4GB",
        ),
        ("evaluate.ruler.samples=3", "original", "evaluate.ruler.samples changed 2 → 3"),
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


def test_runtime_is_in_no_key(finished: Case) -> None:
    changes = [f"runtime.{setting}" for setting in ("eval_batch_size=1", "log_level=debug")]
    assert to_run(finished, *changes, "runtime.data_workers=2") == []


def test_changed_inputs_are_found_by_content(case: Case) -> None:
    runner(case).run()
    (case.corpus / "a.txt").write_text("some TEXT")
    shown = states(case)
    assert shown["prepare"] == "to run (prepare.sources.0.path: a.txt has other content)"
    assert shown["search"] == "to run (input prepare changed)"
    assert shown["report"].startswith("to run (input prepare changed; ")
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
        on(4, killed).run()
    (notes,) = (case.runs / "work" / "train").glob("*.state.json")
    attempt = json.loads(notes.read_text())["attempts"][0]
    attempt |= {"started": attempt["started"] - 3600, "ended": attempt["started"]}
    notes.write_text(json.dumps({"attempts": [attempt]}))
    on(2, lambda order, world: execute(order)).run()
    manifest = Manifest.read(case.output("train"))
    assert (manifest.gpus, manifest.seconds) == (2, pytest.approx(3600, abs=60))
    assert manifest.gpu_hours == pytest.approx(4, abs=0.1)


def test_links_of_stages_that_the_recipe_no_longer_has_are_removed(case: Case) -> None:
    runner(case).run()
    fail(case, "train", "search.swa_ratio=0.75")
    assert case.output("materialize").is_symlink()
    assert not case.output("train").is_symlink()
    assert not case.output("report").is_symlink()
    # The keys of the last run are still known, so the stated reasons are exact.
    shown = states(case, "search.swa_ratio=0.75", "evaluate.ruler.samples=3")
    assert shown["evaluate"].startswith("to run (evaluate.ruler.samples changed 2 → 3")
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
        "input x is new", "input b changed", *(f"input {name} is gone" for name in "cdefgh"),
    ]  # fmt: skip


def on_node(case: Case, rank: int, launcher: Any = in_process, distributed: bool = False) -> Runner:
    loaded = load(case, distributed=distributed, nodes=2, node_rank=rank)
    return Runner(loaded, RunOptions(until="train"), launcher)


def test_a_summary_with_nan_is_refused_in_the_stages_process(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:

    def refused(order: Mapping[str, Any], world: World) -> dict[str, Any]:
        with pytest.raises(ValueError, match="Out of range float values"):
            execute(order)
        raise RunError("refused")

    monkeypatch.setattr(fake_stages, "run", lambda *_: {"loss": float("nan")})
    with pytest.raises(RunError, match="refused"):
        Runner(load(case), RunOptions(), refused).run()


def test_an_output_too_large_to_hash_quickly_counts_as_complete(case: Case) -> None:
    current = runner(case, until="prepare")
    current.run()
    (case.runs / "store" / "hashes.json").unlink()
    store = Store(case.runs)
    (first, *_) = inspect(current.nodes, store, store.hasher(0), "tiny")
    assert (first.state, first.reason.partition(":")[0]) == ("cached", "not yet checked")


def test_a_forced_stage_is_made_again_and_resumes_without_force(case: Case) -> None:
    runner(case).run()
    assert states(case, force=("train",))["train"] == "to run (--force)"
    assert runner(case, force=("train",)).run() == 1  # its files are as before
    fail(case, "train", force=("train",))
    assert states(case)["train"] == "failed (the loss diverged)"
    assert runner(case).run() == 3
    assert case.calls("train") == 2
    for wrong, expected in (
        ({"until": "serach"}, "did you mean search?"),
        ({"until": "prepare", "start": "train"}, "no stage left"),
        ({"until": "prepare", "force": ("train",)}, "leave this stage out"),
    ):
        with pytest.raises(UserError, match=expected):
            runner(case, **wrong)
    with pytest.raises(UserError, match="--force works on one node only"):
        Runner(load(case, nodes=2), RunOptions(force=("train",)), in_process)


def test_until_and_from_choose_the_stages(case: Case, capsys: pytest.CaptureFixture[str]) -> None:
    assert runner(case, until="search").run() == 2
    with pytest.raises(UserError, match="--from train: the earlier stage materialize is not there"):
        runner(case, start="train").run()
    # Training does not need the original's scores.
    assert runner(case, until="materialize").run() == 1
    assert runner(case, start="train", until="train").run() == 1
    assert "1 of 1 stage to run: train" in capsys.readouterr().out
    assert runner(case, start="materialize").run() == 3


def test_an_output_is_made_again_if_a_rebuilt_input_differs(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Training on a GPU ends with other weights each time; scores must be those of one of them."""
    runner(case).run()

    def damage(name: str) -> None:
        (case.output(name) / "output.json").write_text("damaged")

    damage("train")
    assert runner(case).run() == 1  # equal, bit for bit
    monkeypatch.setenv("FAKE_ROUNDING", "other")
    damage("train")
    assert to_run(case) == ["train"]  # its new content is not known yet
    assert runner(case).run() == 3
    assert to_run(case) == []
    # After a stop in between, the run continues from there.
    monkeypatch.setenv("FAKE_ROUNDING", "a third")
    assert runner(case, force=("train",), until="train").run() == 1
    assert states(case)["evaluate"] == "to run (input train was made again, and is not as it was)"
    fail(case, "evaluate")
    assert runner(case).run() == 2
    assert case.calls("evaluate") == 2


def test_a_damaged_output_is_made_again_and_an_added_file_is_an_error(case: Case) -> None:
    runner(case).run()
    file = case.output("search") / "output.json"
    good = file.read_text()
    file.write_text(good.replace("0.5", "0.6"))
    damaged = "to run (its output is damaged: output.json has other content)"
    assert states(case)["search"] == damaged
    assert runner(case).run() == 1
    assert file.read_text() == good
    (case.output("report") / "manifest.json").unlink()
    assert runner(case).run() == 1
    added = case.output("materialize") / "model.safetensors"
    added.touch()
    with pytest.raises(RunError, match=r"model.safetensors was added to the output of materialize"):
        runner(case).run()
    added.unlink()
    assert to_run(case) == []


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
    assert states(case)["search"] == "failed (the loss diverged)"
    assert runner(case).run() == 6
    assert case.calls("search") == 3


def test_training_runs_on_the_processes_that_can_share_a_batch(
    case: Case, capsys: pytest.CaptureFixture[str]
) -> None:
    started: dict[str, int] = {}

    def launched(order: Mapping[str, Any], world: World) -> dict[str, Any]:
        started[order["stage"]] = world.size
        return execute(order)

    loaded = load(case, distributed=True, processes_per_node=3)
    sequences = loaded.recipe.train.batch_tokens // loaded.recipe.prepare.sequence_length
    assert sequences == 4
    Runner(loaded, RunOptions(until="train"), launched).run()
    assert started["train"] == 2 and started["search"] == 1
    assert "train: runs on 2 of 3 processes" in capsys.readouterr().out
    spread = load(case, "runtime.device_map=auto", distributed=True, processes_per_node=3)
    assert (model_processes(loaded), model_processes(spread)) == (3, 1)


def test_another_node_ends_if_the_first_one_fails_or_never_comes(case: Case) -> None:
    def break_down(order: Mapping[str, Any], world: World) -> dict[str, Any]:
        raise RunError("the loss diverged")

    follower = on_node(case, 1)
    with ThreadPoolExecutor(1) as pool:
        following = pool.submit(follower.run)
        time.sleep(0.2)
        with pytest.raises(RunError):
            on_node(case, 0, break_down).run()
        with pytest.raises(RunError, match="prepare: failed on the first node: the loss diverged"):
            following.result()
    loaded = load_recipe(case.file, ["runtime.timeout_minutes=0.01"], stages=fake_table())
    loaded = replace(loaded, world=World(nodes=2, node_rank=1))
    with pytest.raises(RunError, match=r"prepare: the first node has not made it in 0.01 minutes"):
        Runner(loaded, RunOptions(), in_process).run()


def test_it_may_read_all_stages_or_the_report_itself(
    case: Case, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A second stage that needs all, and one that needs the report, whose page is still named."""

    def with_page(*given: Any) -> dict[str, Any]:
        (given[2] / "index.html").write_text("page")
        return {}

    case.content["words"] = {"folder": str(case.corpus)}
    case.save()
    monkeypatch.setattr(own_stage, "with_page", with_page, raising=False)
    indexed: list[Any] = []
    monkeypatch.setattr(index, "write_index", indexed.append)
    table = [
        replace(stage, function="tests.own_stage:with_page") if stage.name == "report" else stage
        for stage in fake_table()
    ]
    digest = replace(own_stage.STAGE, name="digest", needs=None)
    send = replace(own_stage.STAGE, name="send", field=None, needs=("report",))
    stages = in_order([send, *table, digest])
    assert [stage.name for stage in stages][-3:] == ["digest", "report", "send"]
    loaded = load_recipe(case.file, env={}, stages=stages)
    assert Runner(loaded, RunOptions(), in_process).run() == 9
    summary = json.loads((case.output("digest") / "manifest.json").read_text())["summary"]
    read = {one.name for one in loaded.present} - {"digest", "report", "send"}
    assert set(summary["inputs"]) == read
    assert main(["run", str(case.file)], stages) == 0
    assert f"report: {case.output('report')}" in capsys.readouterr().out
    assert indexed == [case.runs]
    monkeypatch.setattr(os, "access", lambda *given: False)  # somebody else's results
    assert main(["run", str(case.file)], stages) == 0
    assert indexed == [case.runs]


def test_a_stage_that_needs_what_is_no_stage_is_refused() -> None:
    with pytest.raises(ValueError, match="stage words needs serach, which is no stage"):
        in_order([*fake_table(), replace(own_stage.STAGE, needs=("prepare", "serach"))])
