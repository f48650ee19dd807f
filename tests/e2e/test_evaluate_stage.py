from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from bosch.errors import RunError
from bosch.heads import HeadMask
from bosch.modeling import load_model, materialize
from data_prep.haystacks import make_sample
from stages import evaluate, prepare
from stages.configs import EvaluateConfig, ModelConfig, PrepareConfig, Runtime
from stages.context import StageConfig
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
def made(tmp_path_factory):
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
    hybrid = materialize(load_model(model, dtype="float32"), mask, window_size=32, sinks=1)
    hybrid.save_pretrained(folder / "materialize" / "model")
    return folder


def _config(section, model: Path, **runtime) -> StageConfig:
    model_config = ModelConfig(path=str(model), dtype="float32")
    return StageConfig(section, model_config, seed=5, runtime=Runtime(**runtime))


def _inputs(folder: Path) -> dict[str, Path]:
    return {name: folder / name for name in ("prepare", "materialize", "train")}


@pytest.fixture(scope="module")
def evaluated(made):
    work = made / "evaluate"
    work.mkdir()
    summary = evaluate.run(_config(SECTION, made / "model"), _inputs(made), work)
    return summary, work


def test_scores_have_the_promised_form(evaluated):
    summary, work = evaluated
    scores = json.loads((work / "scores.json").read_text())
    assert list(scores["checkpoints"]) == ["original", "hybrid", "tokens-900", "tokens-1000"]
    assert scores["corpus"]["name"].startswith("pydoc topics")
    for name, suites in scores["checkpoints"].items():
        table = suites["needle"]
        assert set(table) == {
            "average", "standard_error", "niah_single_1", "niah_multikey_2", "by_length",
        }  # fmt: skip
        assert table["niah_single_1"]["400"]["samples"] == 3
        assert set(table["by_length"]) == {"400", "440"}
        assert summary[name]["needle"] == table["average"]


def test_models_are_told_apart(evaluated):
    """The hybrid and the checkpoints write something other than the original."""
    lines = [json.loads(line) for line in (evaluated[1] / "samples.jsonl").read_text().splitlines()]
    by_name = {name: [] for name in ("original", "hybrid", "tokens-900", "tokens-1000")}
    for record in lines:
        by_name[record["checkpoint"]].append(record["output"])
    assert len({tuple(outputs) for outputs in by_name.values()}) == 4


def test_every_sample_is_kept(evaluated):
    lines = [json.loads(line) for line in (evaluated[1] / "samples.jsonl").read_text().splitlines()]
    assert len(lines) == 4 * 2 * 2 * 3
    assert len({(r["checkpoint"], r["task"], r["length"], r["index"]) for r in lines}) == len(lines)
    assert not (evaluated[1] / "answers").exists()


def test_killed_run_goes_on(made, evaluated, tmp_path, monkeypatch):
    """A second attempt asks only what is missing and ends with the same scores."""
    from stages.evaluating import needle_suite

    real, batches = needle_suite.generate, []

    def failing(*args):
        for batch in real(*args):
            if len(batches) == 9:
                raise KeyboardInterrupt
            batches.append(len(batch))
            yield batch

    config = _config(SECTION, made / "model", eval_batch_size=2)
    monkeypatch.setattr(needle_suite, "generate", failing)
    with pytest.raises(KeyboardInterrupt):
        evaluate.run(config, _inputs(made), tmp_path)
    torn = next((tmp_path / "answers" / "original").glob("*440.rank0.jsonl"))
    torn.write_bytes(torn.read_bytes()[:-20])
    asked = []

    def counting(*args):
        asked.append(len(args[2]))
        return real(*args)

    monkeypatch.setattr(needle_suite, "generate", counting)
    evaluate.run(config, _inputs(made), tmp_path)
    # One record was torn: it is asked again, and nothing else that was answered.
    assert sum(asked) == 4 * 2 * 2 * 3 - sum(batches) + 1
    assert (tmp_path / "scores.json").read_text() == (evaluated[1] / "scores.json").read_text()
    outputs = [
        [json.loads(line)["output"] for line in (work / "samples.jsonl").read_text().splitlines()]
        for work in (tmp_path, evaluated[1])
    ]
    assert outputs[0] == outputs[1]


def test_finished_run_does_nothing(made, evaluated, monkeypatch):
    monkeypatch.setattr(evaluate, "_load", lambda *args: pytest.fail("loaded a model"))
    assert (
        evaluate.run(_config(SECTION, made / "model"), _inputs(made), evaluated[1]) == evaluated[0]
    )


def test_overlap_with_the_calibration_set_is_refused(made, tmp_path):
    from transformers import AutoTokenizer

    from data_prep.essays import haystack_words

    tokenizer = AutoTokenizer.from_pretrained(made / "model")
    sample = make_sample(
        "niah_multikey_2", 400, tokenizer, "evaluation", 5, 1, 4, haystack_words(None)
    )
    inputs = _inputs(made)
    inputs["prepare"] = tmp_path / "prepare"
    (tmp_path / "prepare" / "calibration").mkdir(parents=True)
    (tmp_path / "prepare" / "tokenizer").symlink_to(made / "prepare" / "tokenizer")
    record = {"needles": sample.needles[-1:], "prompt_sha256": ""}
    (tmp_path / "prepare" / "calibration" / "needles.jsonl").write_text(json.dumps(record))
    (tmp_path / "work").mkdir()
    with pytest.raises(RunError, match="niah_multikey_2 1 shares the needle"):
        evaluate.run(_config(SECTION, made / "model"), inputs, tmp_path / "work")


def test_the_original_is_asked_once_for_all_recipes(made, evaluated, tmp_path, monkeypatch):
    """Another hybrid finds the original's answers; more samples ask the original for the rest."""
    loaded = []

    def noting(config, name, path, device):
        loaded.append(name)
        return real(config, name, path, device)

    real = evaluate._load
    monkeypatch.setattr(evaluate, "_load", noting)
    inputs = {name: made / name for name in ("prepare", "materialize")}

    def scores(name, section=SECTION, **runtime):
        (tmp_path / name).mkdir()
        config = _config(section, made / "model", **runtime)
        evaluate.run(replace(config, shared=tmp_path / "shared"), inputs, tmp_path / name)
        return json.loads((tmp_path / name / "scores.json").read_text())["checkpoints"]

    alone = json.loads((evaluated[1] / "scores.json").read_text())["checkpoints"]
    first = scores("first")
    assert loaded == ["original", "hybrid"]
    again = scores("again")
    assert loaded == ["original", "hybrid", "hybrid"]
    for found in (first, again):
        assert found == {name: alone[name] for name in ("original", "hybrid")}
    few = SECTION.model_dump()
    few["needle"] |= {"samples": 2, "lengths": [440]}
    assert scores("few", EvaluateConfig.model_validate(few))["original"]["needle"]["average"] >= 0
    assert loaded[3:] == ["hybrid"]
    few["needle"]["samples"] = 4
    scores("more", EvaluateConfig.model_validate(few))
    assert loaded[4:] == ["original", "hybrid"]
    few["needle"]["max_new_tokens"] = 3
    scores("shorter", EvaluateConfig.model_validate(few))
    assert loaded[6:] == ["original", "hybrid"]
