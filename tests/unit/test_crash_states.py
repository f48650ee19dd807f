"""From every state that a power cut may leave, the same command resumes to the same result."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bosch import files
from bosch.journal import Journal
from pipeline.recipe.load import load_recipe
from pipeline.run.runner import Runner, RunOptions
from stages.context import ModelConfig, Runtime, StageConfig
from stages.prepare import run as prepare
from stages.prepare.stage import PrepareConfig
from stages.train.storage import RestartPoints, restart_step
from tests.crash_states import State, recorded
from tests.pipeline_case import Case, fake_table, in_process
from tests.tiny_data import save_tiny_model, tiny_tokenizer


def enough(states: list[State], least: int, every: int = 1) -> list[State]:
    assert len(states) >= least, "the recorder saw too little"
    return states[::every]


def test_publishing_loses_and_invents_nothing(tmp_path: Path) -> None:
    case = Case(tmp_path)

    def run() -> Runner:
        loaded = load_recipe(case.file, stages=fake_table())
        runner = Runner(loaded, RunOptions(until="search"), in_process)
        runner.run()
        return runner

    case.runs.mkdir()
    with recorded(case.runs) as states:
        run()
    results = {name: (case.output(name) / "output.json").read_bytes() for name in RUN}
    for state in enough(states, 50, every=3):
        state.restore(case.runs)
        runner = run()
        for name in RUN:
            assert (case.output(name) / "output.json").read_bytes() == results[name], str(state)
        for node in runner.nodes[:2]:
            key = str(node.key)
            assert runner.store.damage(node.name, key, runner.store.hasher()) is None, str(state)
        assert [s.state for s in runner.states()[:2]] == ["cached", "cached"], str(state)


RUN = ("prepare", "search")


def test_a_journal_keeps_all_acknowledged_entries(tmp_path: Path) -> None:
    folder = tmp_path / "journal"
    folder.mkdir()
    path, entries = folder / "lines.jsonl", [{"step": step} for step in range(4)]
    done = 0
    with recorded(folder, lambda: done) as states:
        for entry in entries:
            Journal(path).append(entry)
            done += 1
        Journal(path).replace(entries[:3])
        done = 3
    for state in enough(states, 12):
        state.restore(folder)
        journal = Journal(path)
        there = journal.read_new(dict)
        assert there == entries[: len(there)], str(state)
        assert len(there) >= min(state.progress, 3), str(state)
        journal.append(*entries[len(there) :])
        assert Journal(path).read_new(dict) == entries, str(state)


def test_a_saved_restart_point_exists_and_is_complete(tmp_path: Path) -> None:
    work = tmp_path / "work"
    work.mkdir()
    done = 0

    def save(step: int) -> None:
        points = RestartPoints(work)
        files.make_folder(points.directory)
        files.remove(points.writing)
        points.writing.mkdir(parents=True)
        (points.writing / "__0_0.distcp").write_text(f"state {step}" * 50)
        points.publish(step, {"sharding": "none", "processes": 1})

    with recorded(work, lambda: done) as states:
        for step in (1, 2, 3):
            save(step)
            done = step
    for state in enough(states, 30):
        state.restore(work)
        points = RestartPoints(work)
        point = points.latest()
        step = restart_step(point) if point is not None else 0
        assert step >= state.progress, str(state)
        if point is not None:
            assert (point / "__0_0.distcp").read_text() == f"state {step}" * 50, str(state)
        for later in range(step + 1, 4):
            save(later)
        latest = points.latest()
        assert latest is not None and restart_step(latest) == 3, str(state)


def test_prepared_data_is_complete_or_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prepare, "load_tokenizer", lambda spec: tiny_tokenizer())
    corpus = tmp_path / "corpus.txt"
    corpus.write_text("some words of a text that is long enough. " * 40)
    save_tiny_model(tmp_path / "model")
    content = {
        "sequence_length": 32,
        "train_tokens": 128,
        "sources": [{"name": "a", "kind": "text", "path": str(corpus)}],
        "calibration": {"length": 512, "examples": 1, "tasks": ["niah_single_1"]},
    }
    config = StageConfig(
        section=PrepareConfig.model_validate(content),
        model=ModelConfig(path=str(tmp_path / "model")),
        seed=0,
        runtime=Runtime(),
    )
    work = tmp_path / "work"
    work.mkdir()

    def result() -> dict[str, bytes]:
        return {
            str(path.relative_to(work)): path.read_bytes()
            for name in ("train", "calibration", "tokenizer", "statistics.json")
            for path in sorted([work / name, *(work / name).rglob("*")])
            if path.is_file()
        }

    with recorded(work) as states:
        summary = prepare.run(config, {}, work)
    expected = result()
    assert json.loads(expected["statistics.json"])["sha256"]
    for state in enough(states, 20, every=3):
        state.restore(work)
        assert prepare.run(config, {}, work) == summary, str(state)
        assert result() == expected, str(state)
