"""Groups and tags of lm-eval: all their tasks, each with its own prompts, files and scoring."""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lm_eval.tasks
import numpy as np
import pytest
import torch
from lm_eval.api.instance import Instance
from lm_eval.api.model import LM
from lm_eval.api.task import ConfigurableTask, TaskConfig
from lm_eval.tasks import TaskManager, _factory
from lm_eval.tasks._yaml_loader import load_yaml

from bosch.errors import RunError, UserError
from stages.evaluate.answers import Subtask
from stages.evaluate.chat import ChatTemplate
from stages.evaluate.suites.harness import HarnessEvaluation
from stages.evaluate.suites.harness import suite as harness_suite
from stages.evaluate.suites.harness import tasks as harness_tasks
from stages.evaluate.suites.harness.suite import HarnessSuite, is_cut, record_of
from stages.evaluate.suites.harness.tasks import (
    leaf_configs,
    load_tasks,
    read_records,
    refuse_unscorable,
)
from tests.folders import write_jsonl
from tests.tiny_data import tiny_tokenizer

FOLDERS = (
    "mmlu", "gpqa", "arc", "bbh", "leaderboard", "babilong", "minerva_math", "glue", "longbench",
    "blimp", "agieval", "wikitext", "humaneval", "mbpp", "gsm8k", "benchmarks", "hellaswag",
)  # fmt: skip
GROUPS = (
    "mmlu", "mmlu_stem", "gpqa", "ai2_arc", "bbh", "leaderboard", "babilong", "minerva_math",
    "glue", "longbench_e", "blimp", "agieval",
)  # fmt: skip


@pytest.fixture(scope="module")
def manager() -> TaskManager:
    below = Path(lm_eval.tasks.__file__).parent
    paths = [str(below / name) for name in FOLDERS]
    return TaskManager(include_path=paths, include_defaults=False)


class Stub(ConfigurableTask):
    """A task that records its settings and has two documents."""

    def __init__(self, config: dict[str, Any]) -> None:
        self._config = TaskConfig(**config)
        self.given = config

    @property
    def eval_docs(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return [{}, {}]

    def fewshot_docs(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return [{}] * 100

    def aggregation(self) -> dict[str, Any]:
        return {"acc": lambda values: sum(values) / len(values)}


@pytest.fixture
def stubs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tasks without data and without the packages that some tasks' functions need."""
    monkeypatch.setattr(_factory, "ConfigurableTask", Stub)
    monkeypatch.setattr(
        _factory, "load_yaml", lambda path, resolve_func: load_yaml(path, resolve_func=False)
    )


def suite_of(section: HarnessEvaluation, **given: Any) -> HarnessSuite:
    """The suite of a single process."""
    alone = {"tokenizer": None, "answers": None, "rank": 0, "world": 1, "batch_size": 1, **given}
    return HarnessSuite(name="harness", section=section, **alone)


def local(folder: Path, *tasks: str, **section: Any) -> HarnessEvaluation:
    """A section whose data is only in a local folder."""
    return HarnessEvaluation(tasks=[*tasks], data_dir=str(folder), hub=False, **section)


@pytest.mark.usefixtures("stubs")
@pytest.mark.parametrize("name", GROUPS)
def test_a_group_expands_to_lm_evals_tasks(manager: TaskManager, name: str) -> None:
    theirs = manager.load([name])
    ours = load_tasks(manager, name, HarnessEvaluation(tasks=[name]))
    assert len(theirs["tasks"]) > 1
    assert ours.tasks.keys() == theirs["tasks"].keys() == leaf_configs(manager, name).keys()
    assert ours.missing == {}
    for one, task in theirs["tasks"].items():
        assert ours.tasks[one].given == task.given
    scored = {n: g for n, g in theirs.get("groups", {}).items() if g.has_aggregation}
    assert ours.groups.keys() == scored.keys()
    for one, group in scored.items():
        assert set(ours.groups[one].tasks) == {task.task_name for task in group.get_all_tasks()}
        assert ours.groups[one].is_named == (one == name)


@pytest.mark.usefixtures("stubs")
def test_settings_in_the_recipe_reach_every_task(manager: TaskManager) -> None:
    loaded = load_tasks(manager, "bbh", HarnessEvaluation(tasks=["bbh"], num_fewshot=1))
    assert {task.given["num_fewshot"] for task in loaded.tasks.values()} == {1}
    # lm-eval's own builder is back in its place.
    assert "_build_task" not in vars(manager._factory)


def logged(kind: str, **values: float) -> dict[str, Any]:
    """lm-eval's log entry for a document under one filter."""
    more = {"arguments": [["y" + "x" * 300]], "filtered_resps": ["a", "b"]}
    return {"filter": kind, "metrics": [*values], "target": "t", **values, **more}


def test_a_documents_score_is_its_first_metric_under_the_first_filter() -> None:
    two = [logged("one", acc=0.0, acc_norm=1.0, other=9.0), logged("two", acc=0.5, acc_norm=0.25)]
    assert record_of(3, two, {"acc", "acc_norm"}) == {
        "index": 3, "score": 1.0, "answers": ["t"], "question": "x" * 300, "output": "a | b",
        "scores": {"acc,one": 0.0, "acc_norm,one": 1.0, "acc,two": 0.5, "acc_norm,two": 0.25},
    }  # fmt: skip
    order = ("math_verify", "acc_norm", "acc", "exact_match", "f1", "score", "any other")
    for first, second in itertools.pairwise(order):
        both = logged("none", **{second: 0.0, first: 1.0})
        assert record_of(0, [both], {first, second})["score"] == 1.0
    assert record_of(0, [logged("none", other=31.0)], {"other"})["score"] == 31.0
    with pytest.raises(RunError, match="gave document 0 no score"):
        record_of(0, two, {"f1"})


@pytest.mark.parametrize(("most", "samples"), [(None, 3), (2, 2), (4, 3)])
def test_a_task_has_at_most_the_samples_of_the_recipe(most: int | None, samples: int) -> None:
    suite, subtask = suite_of(HarnessEvaluation(samples=most)), Subtask("gsm8k", 0)
    suite._tasks[subtask] = SimpleNamespace(eval_docs=[{}] * 3)
    assert suite.samples(subtask) == samples


def test_sampled_answers_have_a_seed_for_each_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Documents 2 to 71 of 80, of two questions each; lm-eval counts within a chunk."""
    chunks: list[tuple[int, list[tuple[int, str]]]] = []

    def evaluate(lm: Any, tasks: Any, samples: dict[str, list[int]], **_: Any) -> dict[str, Any]:
        asked = [(instance.doc_id, instance.args) for instance in tasks["tasks"]["own"]._instances]
        chunks.append((torch.initial_seed(), asked))
        own = [{**logged("none", acc=1.0), "doc_id": index} for index in samples["own"]]
        return {"samples": {"own": own}}

    monkeypatch.setattr("lm_eval.evaluator.evaluate", evaluate)
    monkeypatch.setattr(harness_suite, "language_model", lambda *_: None)
    monkeypatch.setattr(harness_suite, "is_cut", lambda lm, request: request.args == (3, 1))
    suite = suite_of(HarnessEvaluation())
    subtask, places = Subtask("own", 0), range(2, 72)
    suite._tasks[subtask] = SimpleNamespace(
        aggregation=lambda: {"acc": np.mean}, eval_docs=range(80)
    )
    suite._requests[subtask] = {
        index: [Instance("generate_until", {}, (index, part), part, ("own", index, 1)) for part in
                range(2)] for index in range(80)
    }  # fmt: skip
    records = [one for batch in suite.answer(subtask, places, None) for one in batch]
    assert [record["index"] for record in records] == [*places]
    assert [record["index"] for record in records if "cut" in record] == [3]
    assert [len(asked) for _, asked in chunks] == [128, 12]
    assert len({seed for seed, _ in chunks}) == 2
    for first, (_, asked) in zip((2, 66), chunks, strict=True):
        assert asked == [(at, (first + at, part)) for at in range(len(asked) // 2) for part in
                         range(2)]  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "arguments", "cut"),
    [
        ("generate_until", ("a" * 24, {"max_gen_toks": 8}), False),
        ("generate_until", ("a" * 25, {"max_gen_toks": 8}), True),
        ("generate_until", ("é" * 9, {"max_gen_toks": 8}), False),  # many bytes, few tokens
        ("generate_until", ("a", {}), True),  # 256 by default
        ("loglikelihood", ("a" * 30, "bcd"), False),  # the last token is not read
        ("loglikelihood", ("a" * 31, "bcd"), True),
    ],
)
def test_prompts_that_lm_eval_cuts_are_recorded(kind: str, arguments: Any, cut: bool) -> None:
    lm = SimpleNamespace(max_length=32, tok_encode=lambda text, **_: list(text))
    request = Instance(kind, {}, arguments, 0, ("own", 0, 1))
    assert is_cut(lm, request) is cut


def test_a_prompt_with_a_token_for_every_byte_is_cut() -> None:
    lm = SimpleNamespace(max_length=32, tok_encode=lambda text, **_: list(text.encode()))
    arguments = "é" * 13, {"max_gen_toks": 8}
    assert is_cut(lm, Instance("generate_until", {}, arguments, 0, ("own", 0, 1)))


def test_a_template_without_system_turns_drops_a_tasks_description(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """As in lm-eval, where otherwise the whole suite would have no score."""
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = (
        "{% for one in messages %}{% if one.role in ('system', 'tool') %}"
        "{{ raise_exception('no') }}{% endif %}<{{ one.role }}>{{ one.content }}{% endfor %}"
    )
    suite = suite_of(HarnessEvaluation(), tokenizer=tokenizer, chat=ChatTemplate(tokenizer))
    asked: list[str] = []

    def build_all_requests(*, chat_template: Any, **options: Any) -> None:
        turns = [{"role": role, "content": role} for role in ("system", "user", "assistant")]
        asked.append(chat_template(turns[:2], add_generation_prompt=True))
        asked.append(chat_template(turns, add_generation_prompt=False))
        with pytest.raises(UserError, match="takes no conversation of tool"):
            chat_template([{"role": "tool"}])

    task = SimpleNamespace(
        set_fewshot_seed=lambda seed: None, build_all_requests=build_all_requests, instances=[],
        eval_docs=[],
    )  # fmt: skip
    suite._tasks[subtask := Subtask("mmlu", 0)] = task
    assert suite.requests(subtask) == {}
    assert asked == ["<user>user", "<user>user<assistant>assistant"]
    assert caplog.text.count("takes no system turn") == 1


def test_keys_of_answers_to_lm_eval_hold_all_that_they_depend_on(
    manager: TaskManager, tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(harness_suite, "task_manager", lambda names: manager)
    row = {"question": "1 + 1?", "answer": "2 #### 2"}
    for folder, count in (("one", 2), ("two", 3)):
        for split in ("train", "test"):
            write_jsonl(
                tmp_path / folder / f"gsm8k/{split}.jsonl",
                [row] * (6 if split == "train" else count),
            )

    def digest(
        chat: Any = None, tokenizer: Any = tokenizer, folder: str = "one", **section: Any
    ) -> str:
        section = {"tasks": ["gsm8k"], "data_dir": str(tmp_path / folder), **section}
        suite = suite_of(HarnessEvaluation(**section), tokenizer=tokenizer, chat=chat)
        suite.prepare()
        [subtask] = suite.subtasks
        return subtask.digest

    assert digest(samples=1) == digest()
    digests = {
        digest(), digest(num_fewshot=0), digest(folder="two"),
        digest(chat=SimpleNamespace(digest="template")), digest(tokenizer=tiny_tokenizer()),
    }  # fmt: skip
    assert len(digests) == 5
    # Scoring code, each package separately.
    for package in ("jieba", "rouge"):
        monkeypatch.setattr(
            harness_suite, "installed_versions",
            lambda names, own=package: {name: "9" for name in names if name == own},
        )  # fmt: skip
        digests.add(digest())
    assert len(digests) == 7


def test_documents_and_their_digest_are_equal_in_all_processes(
    manager: TaskManager, tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GPQA shuffles its options."""
    monkeypatch.setattr(harness_suite, "task_manager", lambda names: manager)
    wrong = {f"Incorrect Answer {n}": f"wrong {n}" for n in (1, 2, 3)}
    rows = [{"Question": f"{n}?", "Correct Answer": "right", **wrong} for n in range(9)]
    task = "gpqa_main_zeroshot"
    write_jsonl(tmp_path / task / "train.jsonl", rows)
    subtasks, documents = set(), []
    for drawn in range(2):  # each process has other random numbers, and other function objects
        random.seed(drawn)
        suite = suite_of(local(tmp_path, task), tokenizer=tokenizer, rank=drawn, world=2)
        suite.prepare()
        [subtask] = suite.subtasks
        subtasks.add(subtask)
        documents += [[*suite._tasks[subtask].eval_docs] for _ in range(2)]
    assert len(subtasks) == 1
    assert all(one == documents[0] for one in documents)
    assert len({document["answer"] for document in documents[0]}) > 1


def test_documents_are_made_once_for_all_models(
    manager: TaskManager, tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, seeded = list[int](), harness_tasks.seeded

    def counted(process: Any) -> Any:
        def documents(rows: Any) -> Any:
            made.append(len(rows))
            return process(rows)

        return seeded(documents)

    class Constant(LM):  # type: ignore[misc]
        max_length = 1000
        generate_until = loglikelihood_rolling = None

        def loglikelihood(self, requests: Any) -> list[tuple[float, bool]]:
            return [(-len(request.args[1]), False) for request in requests]

        def tok_encode(self, text: str, **_: Any) -> list[int]:
            return [0] * len(text)

    monkeypatch.setattr(harness_suite, "task_manager", lambda names: manager)
    monkeypatch.setattr(harness_suite, "language_model", lambda *_: Constant())
    monkeypatch.setattr(harness_suite, "CHUNK", 2)
    monkeypatch.setattr(harness_tasks, "seeded", counted)
    rows = [
        {"activity_label": "Run", "ctx_a": f"q{n}", "ctx_b": "he", "label": "0",
         "endings": ["a", "b" * (n + 2)]}
        for n in range(7)
    ]  # fmt: skip
    write_jsonl(tmp_path / "hellaswag/validation.jsonl", rows)
    suite = suite_of(local(tmp_path, "hellaswag", num_fewshot=0), tokenizer=tokenizer)
    suite.prepare()
    assert not suite.missing
    [subtask] = suite.subtasks
    answers, counts = [], []
    for _ in range(2):
        indices = range(1, suite.samples(subtask), 2)
        answers.append([one for some in suite.answer(subtask, indices, None) for one in some])
        counts.append(len(made))
    assert answers[0] == answers[1] and [answer["index"] for answer in answers[0]] == [1, 3, 5]
    assert [answer["question"] for answer in answers[0]] == [f"Run: q{n} He" for n in (1, 3, 5)]
    assert counts[0] == counts[1]


def test_a_task_whose_answers_fill_the_positions_is_missing_and_others_run(
    manager: TaskManager, tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """lm-eval would end the stage with an AssertionError; multiple choice generates nothing."""
    monkeypatch.setattr(harness_suite, "task_manager", lambda names: manager)
    row = {"question": "1 + 1?", "answer": "2 #### 2"}
    for split in ("train", "test"):
        write_jsonl(tmp_path / f"gsm8k/{split}.jsonl", [row] * 6)
    choice = {"question": "?", "choices": [*"abcd"], "answer": 2}
    write_jsonl(tmp_path / "mmlu_anatomy/test.jsonl", [choice])
    write_jsonl(tmp_path / "mmlu_anatomy/dev.jsonl", [choice])

    def prepared(positions: int) -> HarnessSuite:
        section = local(tmp_path, "gsm8k", "mmlu_anatomy")
        suite = suite_of(section, tokenizer=tokenizer, positions=positions)
        suite.prepare()
        return suite

    # lm-eval's own limit of an answer is 256.
    assert [subtask.task for subtask in prepared(257).subtasks] == ["gsm8k", "mmlu_anatomy"]
    suite = prepared(256)
    assert [subtask.task for subtask in suite.subtasks] == ["mmlu_anatomy"]
    assert suite.missing["gsm8k"] == (
        "its answers of up to 256 tokens leave none of the model's 256 positions for a prompt"
    )


def test_subjects_have_their_own_files_and_prompts(manager: TaskManager, tmp_path: Path) -> None:
    for subject, answer in (("anatomy", 0), ("astronomy", 1)):
        row = {"question": f"A question of {subject}?", "choices": ["a", "b", "c", "d"]}
        write_jsonl(tmp_path / f"mmlu_{subject}/test.jsonl", [{**row, "answer": answer}] * 2)
    # No subject uses the folder of the group.
    write_jsonl(
        tmp_path / "mmlu/test.jsonl", [{"question": "?", "choices": [*"abcd"], "answer": 2}]
    )
    loaded = load_tasks(manager, "mmlu", local(tmp_path, "mmlu"))
    assert loaded.tasks.keys() == {"mmlu_anatomy", "mmlu_astronomy"}
    for name, task in loaded.tasks.items():
        subject = name.removeprefix("mmlu_")
        context = task.fewshot_context(task.eval_docs[0], 0)
        assert f"about {subject}" in context and f"A question of {subject}?" in context
    assert len(loaded.missing) == 55 and "holds no files of" in loaded.missing["mmlu_virology"]
    [rule] = loaded.groups["mmlu"].rules
    assert (rule.metric, rule.filter_list, rule.weight_by_size) == ("acc", None, True)
    assert len(loaded.groups["mmlu"].tasks) == 57
    assert len(loaded.groups["mmlu_stem"].tasks) == 19


def test_a_variant_of_a_task_reads_the_files_of_the_original_task(
    manager: TaskManager, tmp_path: Path
) -> None:
    write_jsonl(tmp_path / "gsm8k/test.jsonl", [{}])
    index = manager.task_index
    assert harness_tasks.local_files(index, "gsm8k_cot", str(tmp_path), {}).keys() == {"test"}
    own = tmp_path / "gsm8k_cot" / "test.jsonl"
    write_jsonl(own, [{}])
    assert harness_tasks.local_files(index, "gsm8k_cot", str(tmp_path), {}) == {"test": own}
    write_jsonl(tmp_path / "mmlu_flan/test.jsonl", [{}])
    name = "mmlu_flan_cot_zeroshot_anatomy"
    assert harness_tasks.local_files(index, name, str(tmp_path), {}) == {}
    for other, found in (("x", {"test"}), ("y", set())):
        configs = {"own": "x", "own_other": other}
        index = {
            task: SimpleNamespace(cfg={"dataset_path": "p", "dataset_name": data})
            for task, data in configs.items()
        }
        write_jsonl(tmp_path / "own/test.jsonl", [{}])
        assert harness_tasks.local_files(index, "own_other", str(tmp_path), {}).keys() == found


def test_splits_have_the_names_that_the_task_defines(manager: TaskManager, tmp_path: Path) -> None:
    row = {"premise": "p", "hypothesis": "h", "label": 1, "idx": 0}
    write_jsonl(tmp_path / "mnli/validation_matched.jsonl", [row] * 3)
    loaded = load_tasks(manager, "mnli", local(tmp_path, "mnli"))
    assert loaded.missing == {} and len(loaded.tasks["mnli"].eval_docs) == 3


def test_a_task_whose_record_lacks_a_field_has_no_score(
    manager: TaskManager, tmp_path: Path
) -> None:
    """Otherwise a prompt would contain the text None."""
    row = {"question": "1 + 1?", "answer": "2 #### 2"}
    write_jsonl(tmp_path / "gsm8k/train.jsonl", [row] * 5)
    write_jsonl(tmp_path / "gsm8k/test.jsonl", [row, {"question": "2 + 2?"}])
    loaded = load_tasks(manager, "gsm8k", local(tmp_path, "gsm8k"))
    assert loaded.tasks == {}
    assert "test.jsonl, line 2: lacks the field answer" in loaded.missing["gsm8k"]


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("wikitext", "wikitext measures perplexity"),
        ("humaneval", "humaneval runs code that the model writes"),
        ("mbpp", "mbpp runs code that the model writes"),
        ("gsm9k", "lm-eval knows no task gsm9k"),
        (
            "flan_held_in",
            "flan_held_in has flan_held_in::.*, which is defined inside its group",
        ),
        ("openllm", "openllm sets options of mmlu, which lm-eval would then take for one of its"),
    ],
)
def test_tasks_that_cannot_be_scored_are_refused_by_their_settings(
    manager: TaskManager, name: str, fault: str
) -> None:
    with pytest.raises(UserError, match=f"evaluate.harness.tasks: .*{fault}"):
        refuse_unscorable(manager, ["hellaswag", name])


@pytest.mark.usefixtures("stubs")
def test_metrics_that_are_no_mean_are_refused_before_the_first_answer(
    manager: TaskManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Stub, "aggregation", lambda _: {"bleu": max})
    monkeypatch.setattr(harness_suite, "task_manager", lambda names: manager)
    with pytest.raises(UserError, match="hellaswag measures bleu, which is not a mean"):
        suite_of(HarnessEvaluation(tasks=["hellaswag"])).prepare()


def test_a_task_with_two_settings_is_refused(
    tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a group that sets it, and by itself."""
    (tmp_path / "group.yaml").write_text(
        "group: own\ntask: [{task: mmlu_anatomy, num_fewshot: 1}]\n"
    )
    mmlu = Path(lm_eval.tasks.__file__).parent / "mmlu"
    manager = TaskManager(include_path=[str(tmp_path), str(mmlu)], include_defaults=False)
    monkeypatch.setattr(harness_suite, "task_manager", lambda names: manager)
    row = {"question": "?", "choices": [*"abcd"], "answer": 2}
    for split in ("test", "dev"):
        write_jsonl(tmp_path / f"mmlu_anatomy/{split}.jsonl", [row])
    suite = suite_of(local(tmp_path, "mmlu_stem", "mmlu_anatomy"), tokenizer=tokenizer)
    suite.prepare()
    assert [subtask.task for subtask in suite.subtasks] == ["mmlu_anatomy"]
    with pytest.raises(UserError, match="mmlu_anatomy has mmlu_anatomy with other settings"):
        suite_of(local(tmp_path, "own", "mmlu_anatomy"), tokenizer=tokenizer).prepare()


@pytest.mark.usefixtures("stubs")
@pytest.mark.parametrize(
    ("documents", "shots", "reason"),
    [
        ([], 0, "it has no documents"),
        ([{}], 101, "its 101 worked examples come from dev.jsonl, which has 100; add it"),
    ],
)
def test_a_task_without_documents_or_worked_examples_has_no_score(
    manager: TaskManager, monkeypatch: pytest.MonkeyPatch, documents: list[Any], shots: int,
    reason: str,
) -> None:  # fmt: skip
    monkeypatch.setattr(Stub, "eval_docs", documents)
    monkeypatch.setattr(Stub, "fewshot_cfg", SimpleNamespace(split="dev"), raising=False)
    section = HarnessEvaluation(tasks=["hellaswag"], num_fewshot=shots)
    loaded = load_tasks(manager, "hellaswag", section)
    assert loaded.tasks == {} and reason in loaded.missing["hellaswag"]


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        (b'{"a": 1}\n{"a": ' + b"9" * 5000 + b"}\n", "line 2: not JSON"),
        (b'{"a": 1}\n\n[1]\n', "line 3: expected an object"),
        (b'{"a": 1, "b": 1}\n\n{"b": 1}\n', "line 3: lacks the field a, which other lines have"),
        (b'{"a": 1}\n{"b": 1, "a": 1}\n', "line 1: lacks the field b, which other lines have"),
    ],
)
def test_a_bad_record_of_a_task_is_refused_with_its_line(
    tmp_path: Path, content: bytes, fault: str
) -> None:
    (tmp_path / "test.jsonl").write_bytes(content)
    with pytest.raises(ValueError, match=rf"test\.jsonl.*{fault}"):
        read_records(tmp_path / "test.jsonl")


def test_records_of_a_task_are_read_or_refused_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / "test.jsonl").write_bytes(
        b'\xef\xbb\xbf{"a": "\xe2\x80\xa8"}\r\n\n' + b"\n" * 10**6
    )
    assert read_records(tmp_path / "test.jsonl") == [{"a": "\u2028"}]
    with pytest.raises(UserError, match="cannot be read"):
        read_records(tmp_path / "gone.jsonl")
    (tmp_path / "test.jsonl").write_bytes(b'{"a": 1}\n{"a": "\xff"}\n')
    with pytest.raises(UserError, match="not UTF-8 at byte 16 "):
        read_records(tmp_path / "test.jsonl")
