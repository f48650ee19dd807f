"""The evaluate stage on a tiny model: its scores, what it reuses, how it resumes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from bosch.errors import LostRankError, RunError
from bosch.mask_files import HeadMaskFile
from bosch.masks import HeadMask
from bosch.model.loading import load_model
from bosch.model.materialize import materialize
from data_prep.documents.calibration import CalibrationNeedles
from stages.context import ModelConfig, Runtime, StageConfig
from stages.evaluate import models, suite
from stages.evaluate import run as evaluate
from stages.evaluate.answers import EvaluatedModel
from stages.evaluate.scores import Scores, read_samples
from stages.evaluate.stage import EvaluateConfig
from stages.original import run as original
from stages.prepare import run as prepare
from stages.prepare.stage import PrepareConfig
from stages.train.stage import TrainingSummary
from tests.peak_memory import TensorBytes
from tests.tiny_data import save_tiny_model

SECTION = EvaluateConfig(
    needle={
        "tasks": ["niah_single_1", "niah_multikey_2"],
        "lengths": [400, 512],
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
        calibration={"examples": 2, "length": 512},
    )
    (folder / "prepare").mkdir()
    prepare.run(_config(section, model), {}, folder / "prepare")
    (folder / "search").mkdir()
    records = [{"input_ids": [*range(3, 90 + n)], "answer_length": 2} for n in range(2)]
    (folder / "search" / "calibration.jsonl").write_text("\n".join(map(json.dumps, records)))
    for tokens in (1000, 900):
        save_tiny_model(folder / "train" / "checkpoints" / f"tokens-{tokens}", seed=tokens)
    TrainingSummary(
        final_loss=1.0, tokens=1000, steps=2, seconds=1.0, processes=1, sharding="none",
        checkpoints={"tokens-900": 1, "tokens-1000": 2},
    ).write(folder / "train")  # fmt: skip
    mask = HeadMask(((32, 32), (0, 32)), 1)
    hybrid = materialize(load_model(model, dtype="float32"), mask)
    hybrid.save_pretrained(folder / "materialize" / "model")
    file = HeadMaskFile(mask, "model", "bosch")
    file.save(folder / "materialize" / "model" / "head_mask.json")
    (folder / "original").mkdir()
    original.run(_config(SECTION, model), {}, folder / "original")
    return folder


def _config(section, model: Path, **runtime) -> StageConfig:
    model_config = ModelConfig(path=str(model), dtype="float32")
    return StageConfig(section, model_config, seed=5, runtime=Runtime(**runtime))


def _inputs(folder: Path) -> dict[str, Path]:
    names = ("prepare", "search", "materialize", "train", "original")
    return {name: folder / name for name in names}


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
        assert set(table["by_length"]) == {"400", "512"}
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


def test_a_lost_rank_is_reported_wherever_ranks_wait(stages, tmp_path, monkeypatch):
    class FirstOfTwo:
        is_main_process, process_index, num_processes = True, 0, 2
        device = torch.device("cpu")

        def wait_for_everyone(self):
            lose_connection()

    def lose_connection(*_, **__):
        raise RuntimeError("[gloo/transport/tcp/pair.cc:537] Read error [127.0.0.1]:1. GLHF!")

    monkeypatch.setattr(models, "process_state", lambda _: FirstOfTwo())
    monkeypatch.setattr("bosch.ranks.dist.is_initialized", lambda: True)
    with pytest.raises(LostRankError, match="another process of this run does not answer"):
        evaluate.run(_config(SECTION, stages / "model"), _inputs(stages), tmp_path)


def test_a_killed_run_resumes_to_the_same_bytes(stages, evaluated, tmp_path, monkeypatch):
    """A second attempt computes only missing answers and ends with the same scores."""
    generate, batch_sizes = suite.generate, []

    def killed_after_five_batches(*args, **kwargs):
        for batch in generate(*args, **kwargs):
            if len(batch_sizes) == 5:
                raise KeyboardInterrupt
            batch_sizes.append(len(batch))
            yield batch

    config = _config(SECTION, stages / "model", eval_batch_size=2)
    monkeypatch.setattr(suite, "generate", killed_after_five_batches)
    with pytest.raises(KeyboardInterrupt):
        evaluate.run(config, _inputs(stages), tmp_path)
    torn_file = next((tmp_path / "answers").glob("*/*-512-*.rank0.jsonl"))
    torn_file.write_bytes(torn_file.read_bytes()[:-20])
    question_counts = []

    def count_questions(*args, **kwargs):
        question_counts.append(len(args[2]))
        return generate(*args, **kwargs)

    monkeypatch.setattr(suite, "generate", count_questions)
    evaluate.run(config, _inputs(stages), tmp_path)
    # Of the stored answers only the torn one is generated again.
    assert sum(question_counts) == 3 * 2 * 2 * 3 - sum(batch_sizes) + 1
    assert (tmp_path / "scores.json").read_text() == (evaluated[1] / "scores.json").read_text()
    assert list(read_samples(tmp_path)) == list(read_samples(evaluated[1]))


def test_finished_work_loads_no_model(stages, evaluated, monkeypatch):
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
    config = _config(SECTION, stages / "model", attention="eager")
    model = config.model.model_copy(update={"path": str(stages / "materialize" / "model")})
    evaluated_model = EvaluatedModel("hybrid", model)
    with TensorBytes() as held:
        hybrid = models.load_evaluated(config, evaluated_model, torch.device("cpu"))
    weights = [weight.nbytes for weight in hybrid.state_dict().values()]
    assert held.peak - held.before < sum(weights) + 2 * max(weights)
    hybrid(torch.ones(1, 2, dtype=int), output_attentions=True)  # refused unless eager
