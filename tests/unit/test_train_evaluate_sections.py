"""The sections train and evaluate: steps, checkpoints, metrics and presets."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.recipe.load import load_recipe
from stages.context import Runtime
from stages.evaluate.scores import suite_title
from stages.evaluate.stage import EvaluateConfig
from stages.train.stage import (
    TrainConfig,
    TrainingSummary,
    batch_faults,
    checkpoint_folders,
    checkpoint_name,
    checkpoint_tokens,
)
from tests.pipeline_case import Case


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    """4,096 prepared tokens in sequences of 128, batches of 512; 1,024 positions."""
    return Case(tmp_path_factory.mktemp("sections") / "case")


@pytest.mark.parametrize(
    ("runtime", "length", "processes", "said"),
    [
        ({}, 128, 4, None),
        ({}, 128, 3, "a batch of 4 sequences cannot be divided into micro batches of 1"),
        ({"micro_batch_size": 2}, 128, 2, None),
        ({"micro_batch_size": 2}, 128, 4, "micro batches of 2"),
        ({"context_parallel": 2}, 128, 8, None),
        ({"context_parallel": 2}, 128, 16, "on 16 process(es) (runtime.processes), 2 for each"),
        ({"context_parallel": 2, "micro_batch_size": 4}, 128, 2, None),
        ({"context_parallel": 3}, 128, 4, "3 does not divide the 4 process(es)"),
        ({"context_parallel": 4}, 8, 4, None),
        ({"context_parallel": 8}, 8, 8,
         "runtime.context_parallel: 8 processes hold two chunks of a sequence each, and "
         "prepare.sequence_length = 8 is no multiple of 16"),
        ({}, 512, 1, None),
        ({}, 1024, 1, "train.batch_tokens: 512 is no multiple of"),
    ],
)  # fmt: skip
def test_a_batch_that_does_not_divide_over_processes_is_refused(
    runtime: dict[str, object], length: int, processes: int, said: str | None
) -> None:
    train = TrainConfig(batch_tokens=512, total_tokens=2048)
    faults = list(batch_faults(train, Runtime(**runtime), length, processes))
    assert len(faults) == (said is not None)
    assert said is None or said in str(faults[0])


@pytest.mark.parametrize(
    ("total", "checkpoints", "steps"),
    [
        (1000, [250, 251, 700], {250: 3, 251: 3, 700: 7, 1000: 10}),
        (1050, [1000], {1000: 10}),  # the last half of a step is not made
        (1050, [900, 1050], {900: 9, 1050: 10}),
        (1050, [900, 1001], {900: 9, 1001: 10}),
        (1050, [], {1050: 10}),
        (50, [], {50: 1}),
        (1000, [1, 100, 101], {1: 1, 100: 1, 101: 2, 1000: 10}),
    ],
)
def test_steps_at_which_checkpoints_are_written(
    total: int, checkpoints: list[int], steps: dict[int, int]
) -> None:
    train = TrainConfig(batch_tokens=100, total_tokens=total, checkpoint_tokens=checkpoints)
    assert train.checkpoint_steps == steps and train.optimizer_steps == total // 100


def test_names_of_checkpoints_have_their_tokens() -> None:
    assert checkpoint_tokens(checkpoint_name(1000)) == 1000
    for name in ("tokens-", "tokens-1x", "hybrid", "x-tokens-1"):
        assert checkpoint_tokens(name) is None


def test_whole_checkpoints_are_evaluated_in_the_order_of_training(tmp_path: Path) -> None:
    """Whatever else is in their folder."""
    for name in ("tokens-1000", "tokens-900", "writing", "tokens-20000", "tokens-50"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    names = ["tokens-900", "tokens-1000", "tokens-20000"]
    TrainingSummary(
        final_loss=1.0, tokens=20000, steps=4, seconds=1.0, processes=1, sharding="none",
        checkpoints=dict.fromkeys(reversed(names), 1),
    ).write(tmp_path)  # fmt: skip
    expected = {name: tmp_path / "checkpoints" / name for name in names}
    assert list(checkpoint_folders(tmp_path).items()) == list(expected.items())


def test_presets_add_their_tasks(case: Case) -> None:
    changes = ["evaluate.presets=[short]", "evaluate.tasks=[gsm8k,qa_1,aime24]"]
    (case.folder / "squad.json").write_text("{}")
    changes.append(f"evaluate.ruler.data_dir={case.folder}")
    recipe = load_recipe(case.file, changes, env={}).recipe
    evaluate = recipe[EvaluateConfig]
    assert evaluate.ruler_tasks == ["qa_1"]
    lm_eval = ["gsm8k", "aime24", "mmlu", "ai2_arc", "hellaswag", "winogrande"]
    assert evaluate.lm_eval_tasks == lm_eval
    titles = [suite_title(name) for name in ("ruler", "lm_eval", "positions", "other")]
    assert titles == ["RULER", "Tasks of lm-eval", "Loss by position", "other"]
    whole = EvaluateConfig(tasks=["gsm8k", "ruler", "vt"]).completed(recipe)
    assert len(whole.ruler_tasks) == 13 and whole.tasks[:2] == ["gsm8k", "niah_single_1"]
