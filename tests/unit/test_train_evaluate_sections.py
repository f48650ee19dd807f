"""Accepted and refused values of a recipe's training and evaluation, in pairs."""

from __future__ import annotations

from pathlib import Path

import pytest

from bosch.errors import RunError, UserError
from bosch.journal import Journal
from pipeline.recipe.load import load_recipe, missing_inputs
from stages.context import Runtime
from stages.evaluate.stage import EvaluateConfig
from stages.evaluate.suites import suite_title
from stages.evaluate.suites.needle import missing_ruler_file
from stages.train.stage import (
    TrainConfig,
    TrainingSummary,
    batch_faults,
    checkpoint_folders,
    checkpoint_name,
    checkpoint_tokens,
    read_metrics,
)
from tests.pipeline_case import Case

TWO = {"NPROC_PER_NODE": "2"}
FRONT = ("search.method=front", "prepare.calibration.examples=8")
TASKS = "evaluate.harness={{tasks: {}}}"
DEEPSPEED = "runtime.sharding=deepspeed"


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    """4,096 prepared tokens in sequences of 128, batches of 512; 1,024 positions."""
    return Case(tmp_path_factory.mktemp("sections") / "case")


# The refused override, the field and value in the message, the nearest accepted override, and
# overrides for both.
REFUSED: dict[str, tuple[str, ...]] = {
    "a window of a sequence": (
        "search.window_size=128", "128 is not shorter than prepare.sequence_length = 128",
        "search.window_size=127",
    ),
    "a sequence beyond the positions": (
        "prepare.sequence_length=2k", "prepare.sequence_length: 2,048",
        "prepare.sequence_length=1k", "train.batch_tokens=2k",
    ),
    "fewer tokens than are read": (
        "train.total_tokens=4608", "prepare.train_tokens: 4,096 is less than the 4,608",
        "train.total_tokens=4607",
    ),
    "less than a batch": (
        "train.total_tokens=511", "train.total_tokens: 511", "train.total_tokens=512",
        "train.checkpoint_tokens=[]",
    ),
    "sequences kept from training": (
        "runtime.heldout_sequences=17", "runtime.heldout_every_steps: 17 sequences that training "
        "does not read need prepare.train_tokens = 4,224", "runtime.heldout_sequences=16",
        "runtime.heldout_every_steps=1",
    ),
    "a checkpoint behind the end": (
        "train.checkpoint_tokens=[2049]", "train.checkpoint_tokens: ends at 2,049",
        "train.checkpoint_tokens=[2048]",
    ),
    "checkpoints of one step": (
        "train.checkpoint_tokens=[513,1024]", "513 and 1,024 are reached by the same step",
        "train.checkpoint_tokens=[512,513]",
    ),
    "skipped steps in DeepSpeed": (
        DEEPSPEED, "skip cannot leave a step out", "runtime.sharding=fsdp", "train.bad_steps=skip",
    ),
    "frozen weights that DeepSpeed rounds": (
        "train.mixed_precision=bf16", "would be rounded to bf16 under", "train.mixed_precision=no",
        "train.freeze=attention_only", "materialize.dtype=float32", DEEPSPEED,
    ),
    "a weight of no teacher": (
        "train.teacher=none", "teacher_weight and teacher_tokens need", "train.teacher=original",
        "train.teacher_weight=0.5",
    ),
    "tokens of no teacher": (
        "train.teacher_tokens=0.5", "need a teacher; set original", "train.teacher_tokens=1.0",
    ),
    "a teacher in DeepSpeed": (
        "train.teacher=original", "train.teacher: it does not run under", "train.teacher=none",
        DEEPSPEED,
    ),
    "adapters in DeepSpeed": (
        DEEPSPEED, "train.lora: it does not run under", "runtime.sharding=fsdp", "train.lora={}",
    ),
    "inputs of layers that are kept": (
        "runtime.checkpointing=none", "runtime.checkpointing = none; set full, attention or auto",
        "runtime.checkpointing=auto", "runtime.offload_activations=true",
    ),
    "outputs that a backend does not give": (
        "runtime.checkpointing=attention", "runtime.checkpointing = attention saves its outputs; "
        "choose sdpa or flash or varlen", "runtime.checkpointing=full", "runtime.attention=flex",
    ),
    "float32 in flash": (
        "train.mixed_precision='no'", "train.mixed_precision = no trains in float32",
        "train.mixed_precision=bf16", "runtime.attention=flash",
    ),
    "a split sequence in DeepSpeed": (
        DEEPSPEED, "runtime.context_parallel: it does not run under runtime.sharding = deepspeed",
        "runtime.sharding=none", "runtime.context_parallel=2",
    ),
    "a split sequence, compiled": (
        "runtime.context_parallel=2", "runtime.context_parallel: layers that exchange",
        "runtime.context_parallel=1", "runtime.compile=true",
    ),
    "a split sequence in a backend": (
        "runtime.context_parallel=2", "varlen computes whole sequences only",
        "runtime.context_parallel=1", "runtime.attention=varlen",
    ),
    "no room for a prompt": (  # for the task with the longest answers
        "evaluate.needle={tasks: [vt, fwe], lengths: [50]}", "max_new_tokens: 50",
        "evaluate.needle={tasks: [vt, fwe], lengths: [51]}",
    ),
    "a length beyond the positions": (
        "evaluate.needle.lengths=[1025]", "evaluate.needle.lengths: 1,025 is more than the model's "
        "1,024 positions; set evaluate.needle.yarn, like {1025: 2}",
        "evaluate.needle.lengths=[1024]",
    ),
    "a stretch that is too short": (
        "evaluate.needle={lengths: [2049], yarn: {2049: 2}}", "evaluate.needle.yarn: 2,049 is more "
        "than 2 times the 1,024 that YaRN stretches; set evaluate.needle.yarn, like {2049: 3}",
        "evaluate.needle={lengths: [2048], yarn: {2048: 2}}",
    ),
    "a stretch of fewer positions": (
        "evaluate.needle={lengths: [1100], yarn: {1100: 2}, yarn_original_length: 512}",
        "1,100 is more than 2 times the 512 that YaRN stretches",
        "evaluate.needle={lengths: [1024], yarn: {1024: 2}, yarn_original_length: 512}",
    ),
    "a stretch of another length": (
        "evaluate.needle.yarn={600: 2}", "600 is not among evaluate.needle.lengths",
        "evaluate.needle.yarn={512: 2}",
    ),
    "positions beyond the model's": (
        "evaluate.positions.length=1025", "evaluate.positions.length: 1,025",
        "evaluate.positions.length=1024",
    ),
    "no task": ("evaluate.harness={}", "evaluate.harness.tasks: names", TASKS.format("[gsm8k]")),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_a_value_is_refused_and_its_neighbour_is_accepted(name: str, case: Case) -> None:
    refused, said, taken, *beside = REFUSED[name]
    fault = case.fault(*beside, refused)
    assert said in fault and "\n" not in fault
    load_recipe(case.file, [*beside, taken], env={})


def test_a_stretch_of_scaled_positions_and_a_folder_without_text_are_refused(
    tmp_path: Path,
) -> None:
    case = Case(tmp_path / "case")
    (tmp_path / "empty").mkdir()
    assert "/empty holds no text" in case.fault(f"evaluate.positions.path={tmp_path}/empty")
    case.change_config(rope_scaling={"rope_type": "linear", "factor": 2.0})
    fault = case.fault("evaluate.needle.yarn={512: 2}")
    assert fault.startswith("evaluate.needle.yarn: RoPE cannot be stretched: its config.json ")


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
    assert said is None or said in faults[0]


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


def test_metrics_are_read_completely_or_refused(tmp_path: Path) -> None:
    step = {
        "step": 1, "tokens": 5, "loss": 2.0, "learning_rate": 0.1, "grad_norm": 1.0, "seconds": 3.0
    }  # fmt: skip
    with pytest.raises(RunError, match=r"metrics\.jsonl: missing or damaged"):
        read_metrics(tmp_path)
    journal = Journal(tmp_path / "metrics.jsonl")
    journal.append(step, {**step, "step": 2})
    assert [record.step for record in read_metrics(tmp_path)] == [1, 2]
    journal.append({"step": 3})
    with pytest.raises(RunError, match="missing or damaged"):
        read_metrics(tmp_path)


@pytest.mark.parametrize(
    ("files", "task", "said"),
    [
        (None, "qa_1", "none is named"),
        ([], "qa_1", "qa_1 needs a folder with squad.json, as RULER downloads it; "),
        (["squad.json"], "qa_1", None),
        (["squad.json"], "qa_2", "qa_2 needs a folder with hotpotqa.json"),
        ([], "cwe", None),
        (None, "vt", None),
    ],
)
def test_files_that_a_task_needs_are_named(
    files: list[str] | None, task: str, said: str | None, tmp_path: Path
) -> None:
    for name in files or ():
        (tmp_path / name).touch()
    fault = missing_ruler_file(task, None if files is None else str(tmp_path))
    assert fault is None if said is None else fault is not None and said in fault


def test_missing_data_and_templates_of_an_evaluation_are_reported(case: Case) -> None:
    """Data of a task, and the tokenizer's template."""
    needle = "evaluate.needle.tasks=[vt,qa_2]"
    template = f"the tokenizer in {case.model} has no chat template; set it to false"
    for overrides, said in (
        ([needle], ["evaluate.needle.data_dir: qa_2 needs"]),
        (["evaluate.chat_template=true"], [f"evaluate.chat_template: {template}"]),
        ([], []),
        (["evaluate=null"], []),
    ):
        loaded = load_recipe(case.file, overrides, env={}, input_files=False)
        found = [fault for fault in missing_inputs(loaded) if fault.startswith("evaluate.")]
        assert len(found) == len(said)
        assert all(fault.startswith(start) for fault, start in zip(found, said, strict=True))


def test_a_length_without_room_for_a_chat_template_is_refused(tmp_path: Path) -> None:
    case = Case(tmp_path)
    (case.model / "chat_template.jinja").write_text("{{ messages[0].content }}")
    chat = "evaluate.chat_template=true"
    load_recipe(case.file, [chat, "evaluate.needle.lengths=[1022]"], env={})
    with pytest.raises(UserError, match="lengths: 1,024 leaves no room for"):
        load_recipe(case.file, [chat, "evaluate.needle.lengths=[1024]"], env={})
    stretched = "evaluate.needle={{lengths: [{}], yarn: {{{}: 2}}}}"
    load_recipe(case.file, [chat, stretched.format(1024, 1024)], env={})
    with pytest.raises(UserError, match=r"no room for .* in 2 times the 1,024 that YaRN stretches"):
        load_recipe(case.file, [chat, stretched.format(2048, 2048)], env={})


def test_presets_add_their_tasks(case: Case) -> None:
    changes = ["evaluate.presets=[short]", "evaluate.harness.tasks=[gsm8k,aime24]"]
    evaluate = load_recipe(case.file, changes, env={}).recipe[EvaluateConfig]
    assert evaluate.harness is not None
    assert evaluate.harness.tasks == [
        "gsm8k",
        "aime24",
        "mmlu",
        "ai2_arc",
        "hellaswag",
        "winogrande",
    ]
    titles = ["needle", "harness", "positions", "other"]
    assert [suite_title(name) for name in titles] == [
        "Needle", "Tasks of lm-eval", "Loss by position", "other",
    ]  # fmt: skip
