"""The sections train and evaluate: steps, batches, learning rate, checkpoints and presets."""

from __future__ import annotations

from pathlib import Path

import pytest

from bosch.errors import UserError
from pipeline.recipe.load import load_recipe
from stages.context import Runtime
from stages.evaluate.scores import suite_title
from stages.evaluate.stage import EvaluateConfig
from stages.train.schedule import Schedule, make_schedule
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


def schedule(world_size: int = 1, on_gpu: bool = False, **fields: object) -> Schedule:
    runtime = Runtime(micro_batch_size=fields.pop("micro_batch_size", "auto"))
    length = fields.pop("sequence_length", 32)
    values = {"total_tokens": 1280, "batch_tokens": 128, "checkpoint_tokens": [], **fields}
    return make_schedule(TrainConfig(**values), runtime, length, world_size, on_gpu)


def test_the_paper_has_1192_steps_of_64_sequences() -> None:
    paper = make_schedule(TrainConfig(), Runtime(), 32768, 16, on_gpu=True)
    assert (paper.steps, paper.sequences) == (1192, 64)
    assert (paper.micro_batch_size, paper.accumulation) == (1, 4)
    assert paper.warmup_steps == 120
    assert paper.checkpoint_steps == {
        700_000_000: 334, 1_300_000_000: 620, 2_000_000_000: 954, 2_500_000_000: 1192,
    }  # fmt: skip


def test_processes_that_share_a_sequence_count_as_one() -> None:
    """Four of eight processes share each sequence: two groups with 32 sequences each."""
    shared = make_schedule(TrainConfig(), Runtime(context_parallel=4), 32768, 8, on_gpu=True)
    assert (shared.sequences, shared.micro_batch_size, shared.accumulation) == (64, 1, 32)


def test_a_batch_that_does_not_divide_is_refused() -> None:
    with pytest.raises(UserError, match=r"4 sequences cannot be divided .* on 3 process"):
        schedule(world_size=3)


@pytest.mark.parametrize(("sequences", "micro"), [(8, 4), (6, 3), (5, 1), (3, 3)])
def test_a_pass_on_a_cpu_has_at_most_2048_tokens(sequences: int, micro: int) -> None:
    """Four sequences, or fewer so that the number divides the batch."""
    tokens = sequences * 512
    options = {"sequence_length": 512, "batch_tokens": tokens, "total_tokens": tokens}
    assert schedule(**options).micro_batch_size == micro
    assert schedule(on_gpu=True, **options).micro_batch_size == 1


@pytest.mark.parametrize(
    ("ratio", "steps", "warm"),
    [
        (0.1, 1, 1), (0.1, 11, 2), (1.0, 10, 10), (0.0, 10, 0),
        (0.07, 100, 7), (0.28, 100, 28),  # slightly more in floats
    ],
)  # fmt: skip
def test_warm_up_is_its_share_of_the_steps_rounded_up(ratio: float, steps: int, warm: int) -> None:
    assert schedule(total_tokens=128 * steps, warmup_ratio=ratio).warmup_steps == warm


def test_the_learning_rate_is_a_cosine_between_peak_and_minimum() -> None:
    planned = schedule(total_tokens=128 * 11, warmup_ratio=2 / 11, min_lr_ratio=0.2)
    assert planned.learning_rate_factor(6) == pytest.approx(0.6)  # half way: the mean of 1 and 0.2
    assert planned.learning_rate_factor(0) == 0.5


def test_wsd_stays_at_the_peak_until_the_last_steps() -> None:
    """20 steps: two of warm-up, 14 at the peak, and four that fall by fifths of 0.8."""
    planned = schedule(
        total_tokens=128 * 20, warmup_ratio=0.1, min_lr_ratio=0.2, schedule="wsd", decay_ratio=0.2
    )
    factors = [planned.learning_rate_factor(step) for step in range(20)]
    assert factors == pytest.approx([0.5, *[1.0] * 15, 0.84, 0.68, 0.52, 0.36])
