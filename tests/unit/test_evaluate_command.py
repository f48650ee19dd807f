"""Models that `bosch evaluate` scores, and its table. No models are loaded here."""

from __future__ import annotations

import argparse
import json
import os
import shutil
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from bosch.errors import RunError, UserError
from bosch.files import file_digest, file_hashes
from pipeline.cli import main
from pipeline.commands import evaluate, evaluation
from pipeline.recipe.load import load_recipe
from pipeline.run.locks import hold
from pipeline.run.runner import Runner, RunOptions
from stages.context import ModelConfig
from stages.evaluate.answers import TaskGroup, content_identity
from stages.evaluate.scores import SelectedScores, write_samples
from stages.evaluate.tables import suite_table
from stages.pages.tables import Table
from stages.stage import World
from tests.pipeline_case import Case, fake_table, write_safetensors

RIGHT = {"original": 19, "hybrid": 10, "tokens-8": 18, "tokens-16": 19}


class Launches:
    """Records the evaluations that would be started."""

    def __init__(self) -> None:
        self.orders: list[Mapping[str, Any]] = []

    def __call__(self, order: Mapping[str, Any], world: World) -> dict[str, Any]:
        self.orders.append(order)
        work = Path(order["work_dir"])
        assert not (work / "scores.json").exists(), "what an earlier try left"
        names = ["original", *order["inputs"]]
        subtasks = {
            name: {("niah_single_1", 4096): [1.0] * RIGHT[name] + [0.0] * (20 - RIGHT[name])}
            for name in names
        }
        checkpoints = {
            name: {"needle": suite_table(subtasks[name], subtasks["original"])} for name in names
        }
        write_samples(work, ({"checkpoint": name} for name in names))
        hashes = file_hashes(work, ["samples.jsonl"])
        content = {"checkpoints": checkpoints, "missing": self.missing, "sha256": hashes}
        SelectedScores.model_validate(content).write(work)
        self.during()
        return {}

    missing: Mapping[str, Any] = {}

    def during(self) -> object:
        """Called while an evaluation runs."""


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Launches:
    launches = Launches()
    monkeypatch.setattr(
        evaluate, "Runner", lambda loaded, options: Runner(loaded, options, launches)
    )
    return launches


def run(case: Case, env: Mapping[str, str] | None = None, **options: Any) -> int:
    chosen = argparse.Namespace(**({"checkpoints": None, "model": [], "watch": False} | options))
    return evaluate.run(load_recipe(case.file, (), env=env or {}, stages=fake_table()), chosen)


def _publish(case: Case, stage: str, *names: str, finished: bool = True) -> Path:
    """Model directories where a stage has them: in its work directory while it runs."""
    runner = Runner(load_recipe(case.file, (), env={}, stages=fake_table()), RunOptions())
    node = next(node for node in runner.nodes if node.name == stage)
    place = runner.store.work(stage, str(node.key))
    for name in names:
        (place / name).mkdir(parents=True, exist_ok=True)
        (place / name / "config.json").write_text("{}")
    assert node.document is not None
    return runner.store.publish(stage, node.document, {}, runner.hasher) if finished else place


def test_missing_models_are_named_and_the_others_are_evaluated(
    case: Case, launches: Launches, capsys: pytest.CaptureFixture[str]
) -> None:
    _publish(case, "materialize", "model")
    _publish(case, "train", "checkpoints/tokens-8", finished=False)
    assert run(case, checkpoints=["tokens-1024", "tokens-8", "typo"]) == 1
    assert capsys.readouterr().out.splitlines()[-2:] == [
        "--checkpoints typo: the recipe makes no such checkpoint; it makes hybrid, tokens-1024, "
        "tokens-2048",
        "--checkpoints tokens-1024: not there yet; there is hybrid, tokens-8",
    ]
    place = _model(case, case.folder / "tokens-16")
    assert run(case, model=[str(case.file), str(place), "~nobody-here/x"]) == 1
    lines = capsys.readouterr().out.splitlines()[-2:]
    assert lines[0] == f"--model {case.file}: not a model directory, it has no config.json"
    assert "there is no user" in lines[1]
    assert [list(order["inputs"]) for order in launches.orders] == [["tokens-8"], ["tokens-16"]]


def test_checkpoints_of_a_running_training_are_found(
    case: Case, launches: Launches, capsys: pytest.CaptureFixture[str]
) -> None:
    _publish(case, "materialize", "model")
    _publish(case, "train", "checkpoints/tokens-8", "checkpoints/tokens-16", finished=False)
    assert run(case) == 0
    [order] = launches.orders
    assert list(order["inputs"]) == ["hybrid", "tokens-8", "tokens-16"]
    assert order["function"] == "stages.evaluate.selected:run" and order["model_identity"]
    place = _place(launches)
    assert {path.name for path in place.iterdir()} == {"scores.json", "samples.jsonl", "table.md"}
    text = (place / "table.md").read_text()
    # 20 samples show no difference between 18 and 19, but one between 10 and 19.
    assert "? 90.0 (68.3–98.8)" in text
    assert "| 50.0 (27.2–72.8)" in text
    assert "niah_single_1" in capsys.readouterr().out
    assert json.loads((place / "scores.json").read_text())["checkpoints"]["hybrid"]


def test_evaluating_again_starts_no_process(
    case: Case, launches: Launches, monkeypatch: pytest.MonkeyPatch
) -> None:
    _publish(case, "materialize", "model")
    train = _publish(case, "train", "checkpoints/tokens-8", "checkpoints/tokens-16", finished=False)
    assert run(case) == run(case) == 0
    assert len(launches.orders) == 1
    assert run(case, checkpoints=["tokens-16"]) == run(case, checkpoints=["tokens-16"]) == 0
    assert len(launches.orders) == 2
    scores = json.loads((_place(launches) / "scores.json").read_text())
    assert list(scores["checkpoints"]) == ["original", "tokens-16"]
    # Other weights at the same path are another model.
    (train / "checkpoints/tokens-16/config.json").write_text('{"changed": true}')
    assert run(case, checkpoints=["tokens-16"]) == 0
    assert len(launches.orders) == 3
    # A damaged result is made again.
    (Path(launches.orders[2]["work_dir"]) / "scores.json").write_text("{")
    assert run(case, checkpoints=["tokens-16"]) == 0
    assert len(launches.orders) == 4
    # Other samples give other scores.
    case.content["evaluate"]["needle"]["samples"] = 3
    case.save()
    assert run(case, checkpoints=["tokens-16"]) == 0
    assert len({order["work_dir"] for order in launches.orders}) == 4 == len(launches.orders) - 1


def test_files_of_concurrent_evaluations_are_not_mixed(
    case: Case, launches: Launches, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, held = evaluation.write_text, []

    def noting_write(path: Path, text: str) -> None:
        held.append(path.name if list(case.runs.glob("locks/evaluation-tiny.json")) else "")
        write(path, text)

    monkeypatch.setattr(evaluation, "write_text", noting_write)
    _publish(case, "materialize", "model")
    assert run(case) == 0
    assert held == ["samples.jsonl", "table.md"] and not list(case.runs.glob("locks/*"))


def test_each_model_has_one_name_and_the_command_runs_on_one_node(
    case: Case, launches: Launches
) -> None:
    """A second node would wait for the lock of the first, which waits for its processes."""
    place = str(_model(case, case.folder / "tokens-16"))
    nodes = {"NNODES": "2", "MASTER_ADDR": "one", "MASTER_PORT": "1"}
    for env, options, said in (
        ({}, {"watch": True}, "--watch follows the recipe's training"),
        ({}, {"checkpoints": ["hybrid"]}, "--checkpoints names the recipe's models"),
        (nodes, {}, "^evaluate works on one node only; NNODES asks"),
    ):
        with pytest.raises(UserError, match=said):
            run(case, env, model=[place], **options)
    assert run(case, model=[place, f"{place}/"]) == 0
    assert [list(order["inputs"]) for order in launches.orders] == [["tokens-16"]]


def _place(launches: Launches) -> Path:
    return next(Path(launches.orders[0]["work_dir"]).parents[2].glob("*/evaluation"))


def test_a_table_in_a_log_is_not_cut(capsys: pytest.CaptureFixture[str]) -> None:
    names = [f"tokens-{number}000000000" for number in range(1, 9)]
    rows = [["niah_single_1 at 4k", *["? 90.0 (68.3–98.8)"] * len(names)]]
    Table.of_rows("needle", ["task", *names], rows).print()
    out = capsys.readouterr().out
    assert "…" not in out and out.count("? 90.0 (68.3–98.8)") == len(names)


def test_the_table_has_every_task_that_any_model_has_a_score_for() -> None:
    """Also if the first model lacks a task or a group."""
    group = {"all": TaskGroup(("one", "two"))}
    tables = {
        "a": {"harness": suite_table({("one", 0): [1.0, 0.0]})},
        "b": {"harness": suite_table({("one", 0): [1.0], ("two", 0): [0.0]}, groups=group)},
        "broken": {},
        "c": {"harness": suite_table({("one", 0): [1.0]}, groups=group)},
    }
    [table] = evaluate.score_tables(SelectedScores.model_validate({"checkpoints": tables}))
    text = table.markdown()
    assert "| two | – | 0.0 (" in text and "| all (2 of 2 tasks) | – | 50.0 (" in text
    assert "all (1 of 2 tasks)" not in text


def test_losses_by_position_have_their_own_table() -> None:
    bins = [{"mean": 6.5}, {"mean": 4.25, "low": 4.0, "high": 4.5}]
    loss = {"edges": [1, 512, 2048], "documents": 5, "loss": bins}
    content = {"checkpoints": {"original": {}}, "positions": {"original": loss, "hybrid": loss}}
    [table] = evaluate.score_tables(SelectedScores.model_validate(content))
    text = table.markdown()
    assert "loss by position, nats per token" in text and "| original | hybrid |" in text
    assert "| tokens 1 to 511 | 6.500 | 6.500 |" in text
    assert "| tokens 512 to 2,047 | 4.250 (4.000 to 4.500) | 4.250 (4.000 to 4.500) |" in text


@pytest.mark.parametrize("damaged", ["materialize", "train"])
@pytest.mark.parametrize("watch", [False, True])
def test_a_damaged_output_is_not_evaluated(
    case: Case, launches: Launches, damaged: str, watch: bool
) -> None:
    """Nor one with an added file, which transformers might prefer."""
    place = _publish(case, "materialize", "model")
    train = _publish(case, "train", "checkpoints/tokens-8")
    place = place / "model" if damaged == "materialize" else train / "checkpoints/tokens-8"
    (place / "adapter_config.json").write_text("{}")
    with pytest.raises(RunError, match=f"output of {damaged} is damaged .*run the recipe"):
        run(case, watch=watch)
    assert launches.orders == []


def test_a_task_without_a_score_gives_exit_status_1(
    case: Case, launches: Launches, capsys: pytest.CaptureFixture[str]
) -> None:
    _publish(case, "materialize", "model")
    launches.missing = {"harness": {"gsm8k": "its data could not be read"}}
    assert run(case) == 1
    assert "gsm8k has no score: its data could not be read" in capsys.readouterr().out
    # The missing data may exist by now.
    launches.missing = {}
    assert run(case) == 0
    assert len(launches.orders) == 2


def test_watch_evaluates_new_checkpoints_and_ends_with_the_training(
    case: Case, launches: Launches, monkeypatch: pytest.MonkeyPatch
) -> None:
    _publish(case, "materialize", "model")
    steps = iter(["checkpoints/tokens-8", "end"])

    def sleep(seconds: float) -> None:
        step = next(steps)
        if step == "end":
            _publish(case, "train", "checkpoints/tokens-8")
        else:
            _publish(case, "train", step, finished=False)

    monkeypatch.setattr(evaluate.time, "sleep", sleep)
    assert run(case, watch=True) == 0
    assert [list(order["inputs"]) for order in launches.orders] == [
        ["hybrid"], ["hybrid", "tokens-8"],
    ]  # fmt: skip


def test_watch_ends_after_the_requested_checkpoints(
    case: Case, launches: Launches, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(evaluate.time, "sleep")
    _publish(case, "materialize", "model")
    _publish(case, "train", "checkpoints/tokens-1024", finished=False)
    assert run(case, watch=True, checkpoints=["hybrid"]) == 0
    assert [list(order["inputs"]) for order in launches.orders] == [["hybrid"]]


@pytest.mark.parametrize(
    ("names", "published", "fault"),
    [
        (["tokens-typo"], (), "tokens-typo: the recipe makes no such checkpoint; it makes hybrid"),
        (["tokens-8"], (), "makes hybrid, tokens-1024, tokens-2048"),
        (None, (), "neither finished nor running"),
        (None, ("materialize",), "neither finished nor running"),
        (["tokens-1024"], ("materialize",), "neither finished nor running"),
        (["tokens-1024"], ("materialize", "train"), "tokens-1024: not there yet; there is hybrid"),
        (None, ("train",), "there is no model to evaluate yet"),
    ],
)
def test_watch_ends_if_no_checkpoint_can_appear(
    case: Case,
    launches: Launches,
    monkeypatch: pytest.MonkeyPatch,
    names: list[str] | None,
    published: tuple[str, ...],
    fault: str,
) -> None:
    polls: list[float] = []

    def sleep(seconds: float) -> None:
        polls.append(seconds)
        assert len(polls) < 20, "it would wait forever"

    monkeypatch.setattr(evaluate.time, "sleep", sleep)
    for stage in published:
        _publish(case, stage, "model" if stage == "materialize" else "checkpoints")
    with pytest.raises((UserError, RunError), match=fault):
        run(case, watch=True, checkpoints=names)


def test_watch_waits_while_a_stage_runs(
    case: Case, launches: Launches, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = Runner(load_recipe(case.file, (), env={}, stages=fake_table()), RunOptions())
    key = str(next(node.key for node in runner.nodes if node.name == "search"))
    polls: list[float] = []
    with ExitStack() as running:
        running.enter_context(hold(runner.store.lock("search", key), "the search", "tiny"))

        def sleep(seconds: float) -> None:
            polls.append(seconds)
            if len(polls) == 20:
                running.close()

        monkeypatch.setattr(evaluate.time, "sleep", sleep)
        with pytest.raises(RunError, match="neither finished nor running"):
            run(case, watch=True)
    assert 20 < len(polls) < 30


def _model(case: Case, place: Path, **config: Any) -> Path:
    shutil.copytree(case.model, place)
    content = json.loads((place / "config.json").read_text())
    (place / "config.json").write_text(json.dumps({**content, **config}))
    return place


def test_models_are_identified_by_their_content(
    case: Case, launches: Launches, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever their names are; a name that is a path leads nowhere."""
    monkeypatch.setitem(RIGHT, "model", 3)
    same_name = _model(case, case.folder / "original")
    monkeypatch.setitem(RIGHT, str(same_name), 5)
    assert run(case, model=[str(same_name)]) == 0
    assert list(launches.orders.pop()["inputs"]) == [str(same_name)]
    places = [_model(case, case.folder / name / "model", note=name) for name in "ab"]
    for place in places:
        monkeypatch.setitem(RIGHT, str(place), 5)
    assert run(case, model=[str(place) for place in places]) == 0
    [order] = launches.orders
    assert list(order["inputs"]) == [str(place) for place in places]
    stored = json.loads((Path(order["work_dir"]) / "models.json").read_text())["models"]
    assert len(set(stored.values())) == 2 and all(len(digest) == 64 for digest in stored.values())
    # The same weights, copied elsewhere and written again, are the same model.
    copy = case.folder / "copy/model"
    shutil.copytree(places[0], copy)
    assert run(case, model=[str(copy)]) == 0
    elsewhere = json.loads((Path(launches.orders[1]["work_dir"]) / "models.json").read_text())
    assert elsewhere["models"] == {"model": stored[str(places[0])]}
    # Damaged notes of another evaluation do not matter.
    notes = Path(launches.orders[0]["work_dir"]) / "models.json"
    for text in ("[]", json.dumps({"original": 1}), notes.read_text().replace("models", "nodels")):
        notes.write_text(text)
        assert run(case, model=[str(copy)]) == 0 and len(launches.orders) == 2
    # Other weights with the same size and time are another model.
    file = copy / "model.safetensors"
    stat = file.stat()
    write_safetensors(file, 7)
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert run(case, model=[str(copy)]) == 0 and len(launches.orders) == 3
    assert sorted(path.name for path in places[0].iterdir()) == [
        "config.json", "model.safetensors", "tokenizer.json",
    ]  # fmt: skip


def test_a_models_identity_covers_every_file_that_is_read_and_how_the_model_runs(
    tmp_path: Path,
) -> None:
    read = [
        "config.json", "tokenizer.json", "vocab.txt", "spiece.model", "qwen.tiktoken", "chat.jinja",
        "model.safetensors", "code/layer.py",
    ]  # fmt: skip
    (tmp_path / "code").mkdir()
    for name in [*read, "README.md"]:
        (tmp_path / name).write_text("")
    model = ModelConfig(path="m", dtype="float32")
    others = [model.model_copy(update={"dtype": "bfloat16"}),
              model.model_copy(update={"trust_remote_code": True})]  # fmt: skip
    found = {content_identity(tmp_path, one, file_digest) for one in (model, *others)}
    for name in [*read, "README.md"]:
        (tmp_path / name).write_text("other")
        found.add(content_identity(tmp_path, model, file_digest))
    assert len(found) == 3 + len(read)


@pytest.mark.parametrize("changed", ["model", "original"])
@pytest.mark.parametrize("is_restored", [False, True])
def test_answers_of_a_model_that_changed_meanwhile_are_discarded(
    case: Case, launches: Launches, monkeypatch: pytest.MonkeyPatch, changed: str, is_restored: bool
) -> None:
    for name in ("other", "same"):
        monkeypatch.setitem(RIGHT, name, 3)
    place, same = (_model(case, case.folder / name, note=name) for name in ("other", "same"))
    file = place / "model.safetensors" if changed == "model" else case.model / "model.safetensors"
    before = file.read_bytes()

    forgotten: list[tuple[Path, set[str]]] = []
    monkeypatch.setattr(evaluation, "forget_answers", lambda *asked: forgotten.append(asked))
    expected: set[str] = set()

    def write() -> None:
        assert str(file) in launches.orders[-1]["stamps"]
        models = json.loads((Path(launches.orders[0]["work_dir"]) / "models.json").read_text())
        own, base = models["models"], launches.orders[0]["model_identity"]
        expected.update({own["other"]} if changed == "model" else {*own.values(), base})
        write_safetensors(file, 7)
        if is_restored:
            file.write_bytes(before)

    launches.during = write
    named = f"--model {place}" if changed == "model" else str(file)
    with pytest.raises(RunError, match=f"^{named}: changed while it was evaluated"):
        run(case, model=[str(place), str(same)])
    assert not Path(launches.orders[0]["work_dir"]).exists()
    assert forgotten == [(case.runs / "shared" / "evaluate", expected)]


def test_checkpoints_that_training_publishes_meanwhile_are_found(
    case: Case, launches: Launches
) -> None:
    """They are evaluated at their new place, and their answers are kept."""
    _publish(case, "materialize", "model")
    _publish(case, "train", "checkpoints/tokens-8", finished=False)
    publish = iter([lambda: _publish(case, "train", "checkpoints/tokens-8")])
    launches.during = lambda: next(publish, lambda: None)()
    assert run(case, watch=True) == 0
    places = [Path(order["inputs"]["tokens-8"]) for order in launches.orders]
    assert len(places) == 2 and not places[0].exists() and places[1].exists()
    assert launches.orders[0]["work_dir"] == launches.orders[1]["work_dir"]


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (lambda p: (p / "tokenizer.json").unlink(), "has no tokenizer files"),
        (lambda p: (p / "model.safetensors").unlink(), "the weights .* are missing"),
        (lambda p: (p / "config.json").write_text("{"), "config.json"),
        (
            lambda p: (p / "config.json").write_text(
                (p / "config.json").read_text().replace("1024", "256")
            ),
            "evaluate.needle.lengths: 512 is more than the model's 256 positions",
        ),
    ],
)
def test_a_model_that_cannot_answer_the_samples_is_refused(
    case: Case, launches: Launches, change: Callable[[Path], object], fault: str
) -> None:
    place = _model(case, case.folder / "other")
    change(place)
    with pytest.raises(UserError, match=f"--model {place}: .*{fault}"):
        run(case, model=[str(place)])
    assert launches.orders == []


@pytest.mark.parametrize("place", ["~nobody-here/x", "x" * 300, "a/" * 2500, "loop", ""])
def test_a_path_that_does_not_exist_is_no_model(
    case: Case, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    (case.folder / "loop").symlink_to("loop")
    monkeypatch.chdir(case.folder)
    said = "not a model directory|there is no user|no path|expected a path"
    with pytest.raises(UserError, match=f"--model .*: .*({said})"):
        run(case, model=[place])


def test_an_override_after_checkpoints_is_not_taken_for_a_checkpoint(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["evaluate", "a.yaml", "--checkpoints", "hybrid", "evaluate.needle.samples=3"])
    assert "'evaluate.needle.samples=3' is an override" in capsys.readouterr().err
