"""What `python -m pipeline evaluate` evaluates, and its table; models are not loaded here."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from bosch.errors import UserError
from bosch.files import file_hashes
from pipeline.commands import evaluate
from pipeline.commands.tables import Table
from pipeline.recipe.load import load_recipe
from pipeline.recipe.processes import World
from pipeline.run.runner import Choice, Runner
from pipeline.run.store import Store
from stages.artifacts import SelectedScores, write_samples
from stages.evaluate.tables import suite_table
from tests.pipeline_case import Case, fake_table

RIGHT = {"original": 19, "hybrid": 10, "tokens-8": 18, "tokens-16": 19}


class Launches:
    """Stands for the processes of an evaluation; keeps the orders."""

    def __init__(self) -> None:
        self.orders: list[Mapping[str, Any]] = []

    def __call__(self, order: Mapping[str, Any], world: World) -> dict[str, Any]:
        self.orders.append(order)
        work = Path(order["work_dir"])
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
        return {}

    missing: Mapping[str, Any] = {}


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Launches:
    launches = Launches()
    monkeypatch.setattr(
        evaluate, "Runner", lambda loaded, choice, stages: Runner(loaded, choice, stages, launches)
    )
    return launches


@pytest.fixture
def case(tmp_path: Path) -> Case:
    return Case(tmp_path)


def run(case: Case, **options: Any) -> int:
    chosen = argparse.Namespace(**({"checkpoints": None, "model": [], "watch": False} | options))
    return evaluate.run(load_recipe(case.file, (), env={}), chosen, fake_table())


def _publish(case: Case, stage: str, *names: str, finished: bool = True) -> Path:
    """Model directories where a stage has them, below its work directory while it runs."""
    runner = Runner(load_recipe(case.file, (), env={}), Choice(), fake_table())
    key = str(next(node.key for node in runner.nodes if node.name == stage))
    place = runner.store.published(stage, key) if finished else runner.store.work(stage, key)
    for name in names:
        (place / name).mkdir(parents=True, exist_ok=True)
        (place / name / "config.json").write_text("{}")
    return place


def test_nothing_to_evaluate_is_said(case: Case, launches: Launches) -> None:
    with pytest.raises(UserError, match="there is no model to evaluate yet"):
        run(case)
    _publish(case, "materialize", "model")
    with pytest.raises(UserError, match="tokens-8: not there yet; there is hybrid"):
        run(case, checkpoints=["tokens-8"])
    with pytest.raises(UserError, match="not a model directory"):
        run(case, model=[str(case.file)])
    assert launches.orders == []


def test_checkpoints_of_a_running_training(
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
    assert "? 90.0 (68.3–98.8)" in text  # 20 samples do not tell 18 from 19, but 10 from 19
    assert "| 50.0 (27.2–72.8)" in text
    assert "| 50.0 (27.2–72.8)" in text
    assert "niah_single_1" in capsys.readouterr().out
    assert json.loads((place / "scores.json").read_text())["checkpoints"]["hybrid"]


def test_a_choice_from_what_is_evaluated_starts_no_process(case: Case, launches: Launches) -> None:
    _publish(case, "materialize", "model")
    train = _publish(case, "train", "checkpoints/tokens-8", "checkpoints/tokens-16", finished=False)
    assert run(case) == 0
    whole = _result(launches)
    assert run(case, checkpoints=["tokens-16"]) == 0
    assert len(launches.orders) == 1
    part = _result(launches)
    assert list(part["checkpoints"]) == ["original", "tokens-16"]
    assert part["checkpoints"].items() <= whole["checkpoints"].items()
    samples = (_place(launches) / "samples.jsonl").read_text().splitlines()
    assert [json.loads(line)["checkpoint"] for line in samples] == ["original", "tokens-16"]
    # Other weights at the same place are another model.
    (train / "checkpoints/tokens-16/config.json").write_text('{"changed": true}')
    assert run(case, checkpoints=["tokens-16"]) == 0
    assert len(launches.orders) == 2
    assert run(case, checkpoints=["hybrid"]) == 0
    assert len(launches.orders) == 2


def _place(launches: Launches) -> Path:
    return next(Path(launches.orders[0]["work_dir"]).parents[2].glob("*/evaluation"))


def _result(launches: Launches) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((_place(launches) / "scores.json").read_text())
    return content


def test_a_table_in_a_log_is_not_cut(capsys: pytest.CaptureFixture[str]) -> None:
    names = [f"tokens-{number}000000000" for number in range(1, 9)]
    rows = [["niah_single_1 at 4k", *["? 90.0 (68.3–98.8)"] * len(names)]]
    Table.of_rows("needle", ["task", *names], rows).print()
    out = capsys.readouterr().out
    assert "…" not in out and out.count("? 90.0 (68.3–98.8)") == len(names)


def test_what_is_finished_starts_no_process(case: Case, launches: Launches) -> None:
    folder = _publish(case, "materialize", "model") / "model"
    assert run(case) == run(case) == 0
    assert len(launches.orders) == 1
    # A damaged result, and another model at the same place, are evaluated.
    (Path(launches.orders[0]["work_dir"]) / "scores.json").write_text("{")
    assert run(case) == 0
    assert len(launches.orders) == 2
    (folder / "config.json").write_text('{"changed": true}')
    assert run(case) == 0
    assert len(launches.orders) == 3


def test_a_task_without_a_score_shows_in_the_exit_status(
    case: Case, launches: Launches, capsys: pytest.CaptureFixture[str]
) -> None:
    _publish(case, "materialize", "model")
    launches.missing = {"harness": {"gsm8k": "its data could not be read"}}
    assert run(case) == 1
    assert "gsm8k has no score: its data could not be read" in capsys.readouterr().out


def test_watch_evaluates_what_appears_and_ends_with_the_training(
    case: Case, launches: Launches, monkeypatch: pytest.MonkeyPatch
) -> None:
    _publish(case, "materialize", "model")
    steps = iter(["checkpoints/tokens-8", "end"])

    def sleep(seconds: float) -> None:
        step = next(steps)
        if step == "end":
            place = _publish(case, "train", "checkpoints/tokens-8")
            (place / "manifest.json").write_text('{"format": 2}')
        else:
            _publish(case, "train", step, finished=False)

    monkeypatch.setattr(evaluate.time, "sleep", sleep)
    monkeypatch.setattr(Store, "manifest", _manifest)
    assert run(case, watch=True) == 0
    assert [list(order["inputs"]) for order in launches.orders] == [
        ["hybrid"], ["hybrid", "tokens-8"],
    ]  # fmt: skip
    with pytest.raises(UserError, match="leave --model out"):
        run(case, watch=True, model=["somewhere"])


def _manifest(store: Store, stage: str, key: str) -> dict[str, Any] | None:
    """Those of real stages say more; here the file's presence is enough."""
    return {} if (store.published(stage, key) / "manifest.json").exists() else None
