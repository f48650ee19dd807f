from __future__ import annotations

import itertools
import json
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from bosch.errors import LostRankError, RunError, UserError
from bosch.heads import HeadMask, HeadMaskFile
from bosch.model.loading import load_model
from bosch.model.materialize import materialize, materialize_front
from bosch.model.search_mode import prepare_for_search
from bosch.objective.calibration import CalibrationSet
from bosch.objective.objective import Objective
from bosch.search.runs import run_method
from bosch.window import Window
from data_prep.documents.calibration import CalibrationNeedles
from stages.context import ModelConfig, Runtime, StageConfig
from stages.evaluate import models, rivals, selected, suite
from stages.evaluate import run as evaluate
from stages.evaluate.answers import EvaluatedModel
from stages.evaluate.scores import Scores, named_budget, read_samples
from stages.evaluate.stage import EvaluateConfig
from stages.kv_budgets import share_names
from stages.original import run as original
from stages.prepare import run as prepare
from stages.prepare.stage import PrepareConfig
from stages.search.stage import SearchConfig
from tests.front_case import nested_front
from tests.peak_memory import TensorBytes
from tests.tiny_data import save_tiny_model

SECTION = EvaluateConfig(
    needle={
        "tasks": ["niah_single_1", "niah_multikey_2"],
        "lengths": [400, 440],
        "samples": 3,
        "max_new_tokens": 4,
    }
)


@pytest.fixture(scope="module")
def stages(tmp_path_factory):
    """A tiny model, its prepared data, and checkpoints that are copies of it."""
    folder = tmp_path_factory.mktemp("evaluate")
    model = save_tiny_model(folder / "model")
    section = PrepareConfig(
        sequence_length=128,
        train_tokens=128,
        sources=[{"name": "library", "kind": "python_docs"}],
        calibration={"examples": 2, "length": 420},
    )
    (folder / "prepare").mkdir()
    prepare.run(_config(section, model), {}, folder / "prepare")
    for tokens in (1000, 900):
        save_tiny_model(folder / "train" / "checkpoints" / f"tokens-{tokens}", seed=tokens)
    mask = HeadMask.from_swa_kv_heads([[0, 1], [1]], 2)
    hybrid = materialize(load_model(model, dtype="float32"), mask, Window(32, 1))
    hybrid.save_pretrained(folder / "materialize" / "model")
    file = HeadMaskFile.of(mask, Window(32, 1), model="model", method="bosch", swa_ratio=0.75)
    file.save(folder / "materialize" / "model" / "head_mask.json")
    (folder / "original").mkdir()
    original.run(_config(SECTION, model), {}, folder / "original")
    return folder


def _config(section, model: Path, **runtime) -> StageConfig:
    model_config = ModelConfig(path=str(model), dtype="float32")
    return StageConfig(section, model_config, seed=5, runtime=Runtime(**runtime))


def _inputs(folder: Path) -> dict[str, Path]:
    return {name: folder / name for name in ("prepare", "materialize", "train", "original")}


@pytest.fixture(scope="module")
def evaluated(stages):
    work = stages / "evaluate"
    work.mkdir()
    summary = evaluate.run(_config(SECTION, stages / "model"), _inputs(stages), work)
    return summary, work


def test_scores_have_the_documented_form(evaluated):
    summary, work = evaluated
    scores = json.loads((work / "scores.json").read_text())
    assert list(scores["checkpoints"]) == ["original", "hybrid", "tokens-900", "tokens-1000"]
    assert scores["corpus"]["name"].startswith("pydoc topics")
    for name, suites in scores["checkpoints"].items():
        table = suites["needle"]
        assert set(table) == {
            "average", "low", "high", "standard_error", "niah_single_1", "niah_multikey_2",
            "by_length", *(["against_original"] if name != "original" else []),
        }  # fmt: skip
        assert table["low"] < table["high"]
        assert table["niah_single_1"]["400"]["samples"] == 3
        assert set(table["by_length"]) == {"400", "440"}
        assert summary[name]["needle"] == table["average"]


def test_the_original_model_is_scored_without_mask_and_data_of_the_recipe(stages, evaluated):
    scores = Scores.read(stages / "original")
    assert list(scores.checkpoints) == ["original"]
    evaluation = Scores.read(evaluated[1])
    assert evaluation.checkpoints["original"] == scores.checkpoints["original"]
    assert evaluation.corpus == scores.corpus


def test_every_answer_is_kept_and_no_two_models_answer_alike(stages, evaluated):
    lines = [*read_samples(stages / "original"), *read_samples(evaluated[1])]
    assert len(lines) == 4 * 2 * 2 * 3
    assert len({(r["checkpoint"], r["task"], r["length"], r["index"]) for r in lines}) == len(lines)
    outputs = {
        tuple(r["output"] for r in lines if r["checkpoint"] == name)
        for name in ("original", "hybrid", "tokens-900", "tokens-1000")
    }
    assert len(outputs) == 4
    assert not (evaluated[1] / "answers").exists()


def test_rivals_are_scored_with_the_masks_of_their_methods(stages, tmp_path):
    """With the search's ratio and window; their masks are kept."""
    section = SECTION.model_copy(update={"rivals": ["intr", "dcam"], "windows": [32, 512]})
    search = SearchConfig(method="bosch", swa_ratio=0.75, window_size=32, sinks=1)
    config = replace(
        _config(section, stages / "model"),
        upstream={"search": search},
        model_identity="m" * 64,
        shared=tmp_path / "shared",
    )
    work = tmp_path / "work"
    work.mkdir()
    evaluate.run(config, _inputs(stages), work)
    scores = Scores.read(work)
    windows = ["window-512", "intr-window-512", "dcam-window-512"]
    assert list(scores.checkpoints)[:7] == ["original", "intr", "dcam", *windows, "hybrid"]
    model = load_model(stages / "model", dtype="float32")
    prepare_for_search(model)
    objective = Objective(
        model, CalibrationSet.load(stages / "prepare" / "calibration"), Window(32, 1)
    )
    for method in ("intr", "dcam"):
        file = HeadMaskFile.load(work / "rivals" / f"{method}.json")
        assert file.mask == run_method(method, objective, search.settings(5)).mask
    outputs = {
        name: [r["output"] for r in read_samples(work) if r["checkpoint"] == name]
        for name in scores.checkpoints
        if name != "original"
    }
    # The materialized hybrid happens to have the rule's mask.
    assert HeadMaskFile.load(work / "rivals" / "intr.json").mask.swa_kv_heads == [[0, 1], [1]]
    assert outputs["intr"] == outputs["hybrid"]
    # A window longer than the samples gives the original model.
    answers = [r["output"] for r in read_samples(stages / "original")]
    assert outputs["intr"] != answers
    assert [outputs[name] for name in windows] == [answers] * 3
    # Another run reuses the answers.
    again = tmp_path / "again"
    again.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(models, "materialize", lambda *_: pytest.fail("answered again"))
        evaluate.run(config, {**_inputs(stages)}, again)
    assert Scores.read(again).checkpoints["dcam"] == scores.checkpoints["dcam"]


def test_a_lost_rank_is_reported_wherever_ranks_wait(stages, tmp_path, monkeypatch):
    """At the masks of rivals, and at the answers."""

    class Two:
        is_main_process, process_index, num_processes = True, 0, 2
        device = torch.device("cpu")

        def wait_for_everyone(self):
            broken()

    def broken(*_, **__):
        raise RuntimeError("[gloo/transport/tcp/pair.cc:537] Read error [127.0.0.1]:1. GLHF!")

    searched = HeadMaskFile.load(stages / "materialize/model/head_mask.json")
    for module in (models, rivals):
        monkeypatch.setattr(module, "process_state", lambda _: Two())
    monkeypatch.setattr(rivals, "broadcast_object_list", broken)
    # The process group exists at first, and is gone when the other ranks are asked.
    joined = itertools.cycle([True, False])
    monkeypatch.setattr("bosch.ranks.dist.is_initialized", lambda: next(joined))
    for methods in ([], ["intr"]):
        config = _config(SECTION.model_copy(update={"rivals": methods}), stages / "model")
        if methods:
            (tmp_path / "rivals").mkdir()
            (tmp_path / "rivals/intr.json").write_text("{}")
            monkeypatch.setattr(HeadMaskFile, "load", lambda _: searched)
        with pytest.raises(LostRankError, match="another process of this run does not answer"):
            evaluate.run(config, _inputs(stages), tmp_path)


def test_a_killed_run_resumes_to_the_same_bytes(stages, evaluated, tmp_path, monkeypatch):
    """A second attempt computes only missing answers and ends with the same scores."""
    real, batches = suite.generate, []

    def failing(*args, **kwargs):
        for batch in real(*args, **kwargs):
            if len(batches) == 5:
                raise KeyboardInterrupt
            batches.append(len(batch))
            yield batch

    config = _config(SECTION, stages / "model", eval_batch_size=2)
    monkeypatch.setattr(suite, "generate", failing)
    with pytest.raises(KeyboardInterrupt):
        evaluate.run(config, _inputs(stages), tmp_path)
    torn = next((tmp_path / "answers").glob("*/*-440-*.rank0.jsonl"))
    torn.write_bytes(torn.read_bytes()[:-20])
    questions = []

    def counting(*args, **kwargs):
        questions.append(len(args[2]))
        return real(*args, **kwargs)

    monkeypatch.setattr(suite, "generate", counting)
    evaluate.run(config, _inputs(stages), tmp_path)
    # One record was torn: only its sample is asked again.
    assert sum(questions) == 3 * 2 * 2 * 3 - sum(batches) + 1
    assert (tmp_path / "scores.json").read_text() == (evaluated[1] / "scores.json").read_text()
    assert list(read_samples(tmp_path)) == list(read_samples(evaluated[1]))


def test_a_finished_run_does_nothing(stages, evaluated, monkeypatch):
    monkeypatch.setattr(models, "load_evaluated", lambda *args: pytest.fail("loaded a model"))
    assert (
        evaluate.run(_config(SECTION, stages / "model"), _inputs(stages), evaluated[1])
        == evaluated[0]
    )


def test_samples_are_checked_against_the_calibration_set(stages, tmp_path, monkeypatch):
    def refuse(needles, sample):
        assert needles.pairs and needles.prompts
        raise RunError("shares a needle")

    monkeypatch.setattr(CalibrationNeedles, "check", refuse)
    with pytest.raises(RunError, match="shares a needle"):
        evaluate.run(_config(SECTION, stages / "model"), _inputs(stages), tmp_path)


def test_a_hybrid_has_the_recipes_backend_and_needs_the_memory_of_one_model(stages) -> None:
    file = HeadMaskFile.load(stages / "materialize" / "model" / "head_mask.json")
    config = _config(SECTION, stages / "model", attention="eager")
    one = EvaluatedModel("hybrid", config.model, mask=file)
    with TensorBytes() as held:
        hybrid = models.load_evaluated(config, one, torch.device("cpu"))
    weights = [weight.nbytes for weight in hybrid.state_dict().values()]
    assert held.peak - held.before < sum(weights) + 2 * max(weights)
    hybrid(torch.ones(1, 2, dtype=int), output_attentions=True)  # refused unless eager


def test_a_directory_is_scored_at_the_budgets_in_the_recipe(stages, tmp_path, monkeypatch):
    """The chosen one under the model's own name, the others by their share of the KV slots."""
    front = nested_front(2, 2, [Window(32, 1)], points=3, context=400, chosen=1)
    slots = [point.kv_slots for point in front.points]
    base = load_model(stages / "model", dtype="float32")
    for folder in ("materialize/model", "train/checkpoints/tokens-1000"):
        hybrid = materialize_front(base, front)
        hybrid.save_pretrained(tmp_path / folder)
    HeadMaskFile.of(
        front.mask(1), front.windows, model="model", method="bosch", swa_ratio=0.75
    ).save(tmp_path / "materialize" / "model" / "head_mask.json")
    inputs = _inputs(stages) | {name: tmp_path / name for name in ("materialize", "train")}
    needle = {**SECTION.needle.model_dump(), "tasks": ["niah_single_1"], "samples": 1}
    section = EvaluateConfig(needle=needle, budgets=[0.4, slots[2]])
    shares = share_names(slots, 2 * 2 * 400)
    (tmp_path / "work").mkdir()
    load, in_memory = models.load_evaluated, []

    def noting_load(*args):
        in_memory.append(args[1].name)
        return load(*args)

    monkeypatch.setattr(models, "load_evaluated", noting_load)
    evaluate.run(_config(section, stages / "model"), inputs, tmp_path / "work")
    assert in_memory == ["hybrid", "tokens-1000"]  # one load for all budgets of a directory
    scored = Scores.read(tmp_path / "work")
    assert [name for name in scored.checkpoints if name != "original"] == [
        f"{name}{more}" for name in ("hybrid", "tokens-1000") for more in ("", f" @ {shares[2]}")
    ]
    assert scored.last_trained == "tokens-1000"
    assert {name: named_budget(name) for name in scored.checkpoints} == {
        "original": None, "hybrid": None, "tokens-1000": None,
        f"hybrid @ {shares[2]}": ("hybrid", shares[2]),
        f"tokens-1000 @ {shares[2]}": ("tokens-1000", shares[2]),
    }  # fmt: skip
    model = ModelConfig(path=str(tmp_path / "materialize" / "model"), dtype="float32")
    every = evaluate.at_other_budgets(
        EvaluatedModel("hybrid", model, "abc"), EvaluateConfig(budgets="all")
    )
    assert [(model.kv_budget, model.identity) for model in every] == [
        (slots[0], f"abc-{slots[0]}"), (slots[2], f"abc-{slots[2]}"),
    ]  # fmt: skip
    config = _config(section, stages / "model")
    for one in every:
        loaded = models.load_evaluated(config, one, torch.device("cpu"))
        assert loaded.kv_budget == one.kv_budget
    # The command evaluate scores the budgets of a directory, too.
    hybrid = tmp_path / "materialize" / "model"
    shutil.copytree(stages / "prepare" / "tokenizer", hybrid, dirs_exist_ok=True)
    monkeypatch.setattr(
        selected, "evaluate_models", lambda _, found, *__, **___: SimpleNamespace(content=found)
    )
    (tmp_path / "models.json").write_text(json.dumps({"models": {"one": "abc"}}))
    asked = selected.run(config, {"one": hybrid}, tmp_path)
    assert [(model.name, model.identity) for model in asked] == [
        ("original", None), ("one", "abc"), (f"one @ {shares[2]}", f"abc-{slots[2]}"),
    ]  # fmt: skip
    with pytest.raises(UserError, match="a single head layout"):
        single = model.model_copy(update={"path": str(stages / "materialize" / "model")})
        evaluate.at_other_budgets(EvaluatedModel("hybrid", single), EvaluateConfig(budgets="all"))
