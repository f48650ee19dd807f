"""NoLiMa, MRCR and HELMET: upstream's prompts and scores, faults of their data, and whole runs.

tests/data/nolima.json holds hashes of the prompts that adobe-research/NoLiMa (commit 7532e4e) makes
of `tests.nolima_case`, by context length.
"""

from __future__ import annotations

import copy
import hashlib
import json
import random
import re
import shutil
import time
from collections import Counter
from difflib import SequenceMatcher
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet
from tokenizers.processors import TemplateProcessing

from bosch.errors import UserError
from data_prep.documents.records import read_rows
from data_prep.documents.tokenizer import TokenizerSpec, load_tokenizer
from data_prep.text import encode_prompt
from pipeline.recipe.load import load_recipe
from stages.context import ModelConfig
from stages.evaluate.answers import AnswerFolder, EvaluatedModel, Subtask
from stages.evaluate.chat import ChatTemplate
from stages.evaluate.generation import generate
from stages.evaluate.prompt_suite import PromptSample, PromptSuite
from stages.evaluate.prompts import PromptEvaluation
from stages.evaluate.scores import read_samples
from stages.evaluate.stage import gaps as gaps_of
from stages.evaluate.suites.helmet import HELMET_TASKS, Helmet, HelmetTaskName
from stages.evaluate.suites.helmet import samples as helmet
from stages.evaluate.suites.mrcr import Mrcr
from stages.evaluate.suites.mrcr import samples as mrcr
from stages.evaluate.suites.nolima import Nolima
from stages.evaluate.suites.nolima import samples as nolima
from tests import helmet_case, nolima_case
from tests.evaluation_case import score_original
from tests.pipeline_case import Case
from tests.tiny_data import save_tiny_model

RECORDED = json.loads((Path(__file__).parents[1] / "data" / "nolima.json").read_text())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("prompts")
    save_tiny_model(folder / "model")
    nolima_case.write_case(folder / "nolima")
    helmet_case.write_case(folder / "helmet")
    (folder / "mrcr").mkdir()
    rows = conversations()
    parquet.write_table(pa.Table.from_pylist(rows[:3]), folder / "mrcr" / "2needle.parquet")
    lines = "".join(json.dumps(row) + "\n" for row in rows[3:])
    (folder / "mrcr" / "4needle.jsonl").write_text(lines)
    return folder


def conversations() -> list[dict[str, Any]]:
    """Four with two needles and two with four, each of 100 to 300 tokens of the tiny model."""
    rows = []
    for number in range(6):
        needles = 2 if number < 4 else 4
        turns = []
        for index in range(needles):
            turns.append({"role": "user", "content": "Write a line on tapirs"})
            turns.append({"role": "assistant", "content": f"Tapir {index} of {number} sleeps."})
        request = f"Prepend aB{number} to the 2nd (1 indexed) line on tapirs."
        turns.append({"role": "user", "content": request})
        rows.append(
            {
                "prompt": json.dumps(turns), "answer": f"aB{number}Tapir 1 of {number} sleeps.",
                "random_string_to_prepend": f"aB{number}", "n_needles": needles,
                "desired_msg_index": 3, "total_messages": 2 * needles + 1, "n_chars": 300,
            }
        )  # fmt: skip
    return rows


def template(tokenizer: Any) -> ChatTemplate:
    tokenizer.chat_template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    return ChatTemplate(tokenizer)


def test_all_places_of_a_nolima_question_count_as_one_document(folder: Path) -> None:
    """If only the question decides the score, its uncertainty is that of a few questions."""
    data = folder / "nolima"
    section = Nolima(data_dir=str(data), lengths=[100], depths=3)
    samples = section.make(nolima_case.tokenizer(), 0)
    tests = nolima.needle_tests(data / "needle_set.json", None)
    # Three depths in two books.
    assert Counter(sample.document for sample in samples) == {test.name: 6 for test in tests}


def mrcr_suite(
    folder: Path, answers: Path, lengths: tuple[int, ...] = (256, 512), **changes: Any
) -> PromptSuite:
    section = Mrcr(data_dir=str(folder / "mrcr"), lengths=[*lengths])
    return prompt_suite("mrcr", answers, **{"section": section, **changes})


def prompt_suite(name: str, answers: Path, **changes: Any) -> PromptSuite:
    fields = {"tokenizer": nolima_case.tokenizer(), **changes}
    suite = PromptSuite(
        name=name, answers=AnswerFolder(answers, None, 0), rank=0, world=1, batch_size=1,
        **fields,
    )  # fmt: skip
    suite.prepare()
    return suite


def helmet_samples(folder: Path, **section: Any) -> list[PromptSample]:
    section = {"data_dir": str(folder / "helmet"), "lengths": [8192], **section}
    return Helmet(**section).make(nolima_case.tokenizer(), 42)


@pytest.mark.parametrize("first", ["", "a"])
@pytest.mark.parametrize("length", [400, 4000])
def test_nolima_prompts_equal_upstreams_to_the_character(
    folder: Path, length: int, first: str
) -> None:
    """Also with a tokenizer that puts a token before every text."""
    tokenizer = nolima_case.tokenizer()
    if first:
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
            single=f"{first} $A", special_tokens=[(first, tokenizer.convert_tokens_to_ids(first))]
        )
        assert tokenizer("b")["input_ids"][0] == tokenizer.convert_tokens_to_ids(first)
    tests = nolima.needle_tests(folder / "nolima" / "needle_set.json", None)
    paths = sorted((folder / "nolima" / "haystack").iterdir())
    books = [nolima.Book(path, tokenizer) for path in paths]
    samples = nolima.samples_of(tests, len(books), 4, length)
    prompts = [
        f"{sample.test.system_prompt}\0{sample.prompt(books[sample.book], length)}"
        for sample in samples
    ]
    digests = [hashlib.sha256(text.encode()).hexdigest()[:16] for text in prompts]
    assert digests == RECORDED[str(length)]


def test_a_distractor_is_a_fifth_of_the_context_away_from_the_needle_and_the_ends(
    folder: Path,
) -> None:
    tests = nolima.needle_tests(folder / "nolima" / "needle_set.json", None)
    samples = [
        (sample.depth, sample.distractor_depth)
        for sample in nolima.samples_of(tests, 20, 26, 4000)
        if sample.test.distractor is not None
    ]
    short, long = (
        {one.distractor_depth for one in nolima.samples_of(tests, 1, 4, length)
         if one.test.distractor is not None}
        for length in (499, 500)
    )  # fmt: skip
    assert short == {0.5, 0.6, 0.7} and not short & long  # a short context has fixed places
    sides = {distractor > depth for depth, distractor in samples if 0.4 < depth < 0.6}
    assert sides == {True, False}
    for depth, distractor in samples:
        assert 0.2 - 1e-9 <= distractor <= 0.8 + 1e-9
        assert abs(distractor - depth) >= 0.2 - 1e-9


def test_a_book_that_is_too_short_is_reported_before_a_model_is_loaded(folder: Path) -> None:
    section = Nolima(data_dir=str(folder / "nolima"), lengths=[400_000])
    with pytest.raises(UserError, match=r"txt: its .* no room for a context of 400,000 at depth 0"):
        section.make(nolima_case.tokenizer(), 0)
    spans: list[Any] = []
    book: Any = SimpleNamespace(span=lambda *place: spans.append(place))
    test: Any = SimpleNamespace(distractor="Another.")
    nolima.NolimaSample(test, 0, 0.5, "", 0.2).check_room(book, 9)
    assert spans == [(9, 0.5), (9, 0.2)]


def test_a_distractor_whose_place_is_ambiguous_is_reported(tmp_path: Path) -> None:
    (tmp_path / "set.json").write_text(json.dumps(nolima_case.NEEDLE_SET[1:]))
    [test] = nolima.needle_tests(tmp_path / "set.json", None)
    (tmp_path / "book.txt").write_text("This line is as all others of the book.\n" * 99)
    book = nolima.Book(tmp_path / "book.txt", nolima_case.tokenizer())
    with pytest.raises(UserError, match=r"book\.txt: the text before .* 12 times in 1,000 tok"):
        nolima.NolimaSample(test, 0, 0.5, "", 0.2).prompt(book, 1000)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"task_template": None}, "has no task_template; save the benchmark's own"),
        ({"task_template": "{haystack} {answer}"}, "the template of 0401 has other fields"),
        ({"task_template": "{haystack} {question:>999999999}"}, "has other fields than its two"),
        ({"task_template": "{question}"}, "has other fields than its two"),
        ({"id": "-999"}, "the id -999 is no number"),
        ({"character_set": ["Yuki", ""]}, "character_set of T1 must be texts that are not empty"),
        ({"character_set": []}, "0401_T1_onehop has no answer"),
        ({"needle": "A lute."}, "0401_T1_onehop has no answer"),
        (
            {"needle": "A lute.", "tests": {"T1": {"input_args": ["a"], "gold_answers": ""}}},
            "gold_answers of T1 must be texts",
        ),
        ({"tests": {"T1": {"input_args": [1]}}}, "input_args of T1"),
        ({"tests": {"T1": {"input_args": "lute"}}}, "input_args of T1 must be a list of texts"),
        ({"questions": {"onehop": 1}}, "question and needle of T1"),
        (
            {
                "questions": {f"kind {number}": "Who?" for number in range(400)},
                "tests": {f"T{number}": {"input_args": []} for number in range(400)},
            },
            "more than 100,000 questions",
        ),
        ({"questions": None}, "not a needle set of NoLiMa"),
        ({"questions": {}}, "not a needle set of NoLiMa: it has no question"),
        ({"tests": {"T1": {}}}, "not a needle set of NoLiMa: lacks 'input_args'"),
    ],
)
def test_a_faulty_needle_set_is_named(
    tmp_path: Path, change: dict[str, Any], sentence: str
) -> None:
    content = {
        key: v for key, v in {**nolima_case.NEEDLE_SET[0], **change}.items() if v is not None
    }
    (tmp_path / "set.json").write_text(json.dumps([content]))
    with pytest.raises(UserError, match=sentence):
        nolima.needle_tests(tmp_path / "set.json", None)


def test_a_question_that_occurs_twice_is_reported(tmp_path: Path) -> None:
    first = nolima_case.NEEDLE_SET[0]
    path = tmp_path / "set.json"
    path.write_text(json.dumps([first, {**first, "id": "0999"}]))
    names = [test.name for test in nolima.needle_tests(path, None)]
    path.write_text(json.dumps([first, first]))
    with pytest.raises(UserError, match=rf"not a needle set of NoLiMa: {names[0]} appears 2 times"):
        nolima.needle_tests(path, None)


def test_a_row_that_occurs_twice_counts_once(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = conversations()
    shutil.copytree(folder / "mrcr", tmp_path / "mrcr")
    again = [rows[1], {**rows[2], "n_chars": 1}, {**rows[3], "answer": "aB3Another."}]
    lines = "".join(json.dumps(row) + "\n" for row in again)
    (tmp_path / "mrcr" / "copy.jsonl").write_text(lines)
    files = Mrcr(data_dir=str(tmp_path / "mrcr"), lengths=[512]).data_files
    samples = list(mrcr.read_samples(files, 1000))
    assert len(samples) == 7 and {sample.answer for sample in samples} == {
        *(row["answer"] for row in rows), "aB3Another.",
    }  # fmt: skip
    assert "copy.jsonl: left out 2 that equal an earlier row of MRCR's data" in caplog.text
    caplog.clear()
    assert len(list(mrcr.read_samples(files[:1], 1000))) == 3 and not caplog.text


def test_scores_equal_upstreams() -> None:
    assert nolima.score("It was Yuki.", ["Yuki"]) == 1 and nolima.score("yuki", ["Yuki"]) == 0
    answer, prefix = "aB1Tapir 1 sleeps.", "aB1"
    assert mrcr.score(f"  {answer}\n", answer, prefix) == 1
    assert mrcr.score("Tapir 1 sleeps.", answer, prefix) == 0  # the answer lacks the random string
    partly = SequenceMatcher(None, "Tapir 2 naps", "Tapir 1 sleeps.").ratio()
    assert mrcr.score("aB1Tapir 2 naps", answer, prefix) == partly


def test_all_suites_are_evaluated_and_answered_once(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    section: dict[str, Any] = {
        "nolima": {"data_dir": str(folder / "nolima"), "lengths": [100], "samples": 6, "depths": 3,
                   "max_new_tokens": 2},
        "mrcr": {"data_dir": str(folder / "mrcr"), "lengths": [256, 512], "samples": 2},
        "helmet": {"data_dir": str(folder / "helmet"), "lengths": [8192], "samples": 1},
    }  # fmt: skip
    scores = score_original(folder, tmp_path / "first", **section)
    counts = {
        suite: {(task, at): by[at].samples for task, by in table.tasks.items() for at in by}
        for suite, table in scores.checkpoints["original"].items()
    }
    assert {at for _, at in counts["nolima"]} == {100}
    assert {task for task, _ in counts["mrcr"]} == {"2 needles", "4 needles"}
    assert max(counts["mrcr"].values()) == 2
    # Two depths of one question are one sample.
    assert counts["helmet"] == {(task, 8192): 1 for task in HELMET_TASKS}
    records = list(read_samples(tmp_path / "first"))
    asked = [record["document"] for record in records if record["suite"] == "nolima"]
    assert len(asked) == 6 and sum(counts["nolima"].values()) == len({*asked})
    assert all(
        record["question"].endswith("Assistant:") for record in records if record["suite"] == "mrcr"
    )
    # Other runs on the same data need no new answers.
    monkeypatch.setattr("stages.evaluate.models.load_evaluated", lambda *_: pytest.fail("loaded"))
    assert score_original(folder, tmp_path / "again", **section).checkpoints == scores.checkpoints


@pytest.mark.parametrize("is_applied", [True, False])
def test_the_chat_template_is_used_if_the_recipe_says_so(
    folder: Path,
    tmp_path: Path,
    is_applied: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = shutil.copytree(folder / "model", tmp_path / "model")
    tokenizer = copy.deepcopy(load_tokenizer(TokenizerSpec(str(folder / "model"))))
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="! $A", special_tokens=[("!", tokenizer.convert_tokens_to_ids("!"))]
    )
    tokenizer.chat_template = (
        "{{ eos_token }}{% for m in messages %}({{ m.role }}){{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}(answer){% endif %}"
    )
    tokenizer.save_pretrained(model)
    prompts: list[str] = []

    def spy(loaded: Any, own: Any, questions: Any, *rest: Any, **more: Any) -> Any:
        prompts.extend(own.decode(question.prompt_ids) for question in questions)
        return generate(loaded, own, questions, *rest, **more)

    monkeypatch.setattr("stages.evaluate.suite.generate", spy)
    mrcr = {"data_dir": str(folder / "mrcr"), "lengths": [256], "samples": 1}
    scores = score_original(tmp_path, tmp_path / "out", mrcr=mrcr, chat_template=is_applied)
    first, second = sorted(prompts, key=len)
    turns = json.loads(conversations()[0]["prompt"])
    if is_applied:
        text = "".join(f"({turn['role']}){turn['content']}" for turn in turns)
        assert first == f"{tokenizer.eos_token}{text}(answer)"
        assert scores.prompts == "in the tokenizer's chat template"
    else:
        assert first.startswith("!User: ") and first.endswith("Assistant:")
        assert scores.prompts == "raw; the tokenizer's chat template is not applied"
    assert turns[-1]["content"] in first and turns[-1]["content"] not in second
    assert ("an instruct model is asked in raw text" in caplog.text) is not is_applied


def test_a_length_without_samples_is_reported_as_missing(folder: Path, tmp_path: Path) -> None:
    assert mrcr_suite(folder, tmp_path).missing == {}
    fault = f"evaluate.mrcr.lengths: {folder / 'mrcr'} has no sample of 65,536 tokens"
    assert mrcr_suite(folder, tmp_path, lengths=(512, 65536)).missing == {"65,536 tokens": fault}
    with pytest.raises(UserError, match=f"^{fault}; .* no sample of 32,768 tokens$"):
        mrcr_suite(folder, tmp_path, lengths=(65536, 32768))


def test_keys_of_answers_hold_all_that_the_answers_depend_on(folder: Path, tmp_path: Path) -> None:
    def digests(data: Path = folder, **changes: Any) -> set[str]:
        return {subtask.digest for subtask in mrcr_suite(data, tmp_path, **changes).subtasks}

    shutil.copytree(folder / "mrcr", tmp_path / "mrcr")
    with (tmp_path / "mrcr" / "4needle.jsonl").open("a") as file:
        file.write("\n")
    [plain] = digests()
    assert digests(lengths=(512,)) == {plain}  # another length needs no new answers
    assert digests(lengths=(256, 4096)) == {plain}
    other = nolima_case.tokenizer()
    other.add_tokens(["another token"])
    section = Mrcr(data_dir=str(folder / "mrcr"), lengths=[256, 512], samples=9)
    changed = [
        digests(tmp_path), digests(seed=1), digests(tokenizer=other),
        digests(section=section), digests(chat=template(nolima_case.tokenizer())),
    ]  # fmt: skip
    assert len({plain}.union(*changed)) == 6


def test_another_task_or_length_of_helmet_reuses_answers(folder: Path, tmp_path: Path) -> None:
    data = shutil.copytree(folder / "helmet", tmp_path / "helmet")
    for file in [*data.rglob("*_k50_*")]:
        shutil.copy(file, file.with_name(file.name.replace("_k50_", "_k105_")))

    def subtasks(tasks: list[HelmetTaskName], lengths: list[int], **more: Any) -> set[Subtask]:
        section = Helmet(data_dir=str(data), tasks=tasks, lengths=lengths, **more)
        return {*prompt_suite("helmet", tmp_path, section=section).subtasks}

    one = subtasks(["kilt_nq"], [8192])
    more = subtasks(["kilt_nq", "kilt_popqa_3"], [8192, 16384])
    assert len(more) == 4 and one < more
    assert not more & subtasks(["kilt_nq"], [8192], samples=1)


def test_the_longest_right_answer_limits_all_answers_of_a_subtask(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = conversations()[:2]
    rows[1]["answer"] = "aB1".ljust(99, "x")
    (tmp_path / "mrcr").mkdir()
    (tmp_path / "mrcr" / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    suite = mrcr_suite(tmp_path, tmp_path / "answers", lengths=(384,))
    limits: list[tuple[list[int], int]] = []

    def generated(loaded: Any, questions: Any, new_tokens: int) -> Any:
        limits.append(([one.new_tokens for one in questions], new_tokens))
        yield [(question, rows[question.index]["answer"]) for question in questions[::-1]]

    monkeypatch.setattr(suite, "generated", generated)
    model = EvaluatedModel("original", ModelConfig(path="x"))
    suite.run(model, None, SimpleNamespace(update=lambda *_, **__: None))
    assert limits == [([23, 99], 99)]
    for index, record in suite.answers.read(model, suite.subtasks[0]).items():
        assert record["answers"] == [rows[index]["answer"]] and record["score"] == 1.0


@pytest.mark.parametrize("is_instruct", [False, True])
@pytest.mark.parametrize(
    ("factor", "offset", "is_in"), [(1, 0, True), (1, -1, False), (2, -1, True), (2, 0, False)]
)
def test_samples_of_an_mrcr_length_take_more_than_half_and_at_most_all_of_it(
    tmp_path: Path, factor: int, offset: int, is_in: bool, is_instruct: bool
) -> None:
    """In tokens of the prompt (with or without chat template) and of the answer."""
    row, tokenizer = conversations()[0], nolima_case.tokenizer()
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="! $A", special_tokens=[("!", tokenizer.vocab["!"])]
    )
    (tmp_path / "a.jsonl").write_text(json.dumps(row) + "\n")
    turns, chat = json.loads(row["prompt"]), template(tokenizer) if is_instruct else None
    texts = [mrcr.plain_text(turns) if chat is None else chat.text(turns), row["answer"]]
    tokens, answer = sum(map(len, texts)) + (not is_instruct), len(row["answer"])
    length = factor * tokens + offset
    section = Mrcr(data_dir=str(tmp_path), lengths=[length, 8])
    assert [(one.length, one.new_tokens) for one in section.make(tokenizer, 0, chat)] == [
        (length, answer)
    ] * is_in


def test_validate_names_missing_data(tmp_path: Path) -> None:
    case = Case(tmp_path)
    (tmp_path / "empty").mkdir()
    case.content["evaluate"]["nolima"] = {"data_dir": "empty", "lengths": [512]}
    case.content["evaluate"]["mrcr"] = {"data_dir": "empty", "lengths": [2048]}
    case.save()
    fault = case.fault()
    assert "evaluate.mrcr.lengths: 2,048 is more than the model's 1,024 positions" in fault
    case.content["evaluate"]["nolima"]["lengths"] = [1000]
    case.save()
    assert "evaluate.nolima.lengths and max_new_tokens: 1,192 is more than the" in case.fault()
    case.content["evaluate"]["nolima"]["lengths"] = [512]
    case.content["evaluate"]["mrcr"]["lengths"] = [512]
    case.save()
    fault = case.fault()
    assert f"evaluate.nolima.data_dir: {tmp_path / 'empty'} has no needle set" in fault
    assert "evaluate.mrcr.data_dir: " in fault and "no Parquet or JSONL file" in fault


def test_a_preset_names_the_data_that_the_recipe_lacks(tmp_path: Path) -> None:
    case = Case(tmp_path)
    nolima_case.write_case(tmp_path / "data")
    case.content["evaluate"] |= {"presets": ["long"], "harness": {"max_length": 512}}
    case.content["evaluate"]["nolima"] = {"data_dir": "data", "lengths": [512]}
    case.save()
    gaps = list(gaps_of(load_recipe(case.file, env={})))
    named = [gap for gap in gaps if ".data_dir" in gap and "is not named" in gap]
    assert named == [
        f"evaluate.presets: long: {title}: its data ({data}) is not named: evaluate.{name}.data_dir"
        for title, data, name in (
            ("HELMET", "princeton-nlp/HELMET", "helmet"),
            ("MRCR", "openai/mrcr", "mrcr"),
        )
    ]


def test_an_invalid_row_of_mrcr_is_reported(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    whole = conversations()[0]
    for change, sentence in (
        ({"prompt": 1}, r"row 1: not in MRCR's layout"),
        ({"prompt": [{}]}, r"row 1: .*\(prompt is no text that holds JSON\)"),
        ({"prompt": '[{"role": "user", "content": null}]'}, r"row 1: .*NoneType found"),
        ({"prompt": "[" * 900}, r"row 1: not in MRCR's layout"),
        ({"prompt": "[]"}, r"row 1: .*must not be empty"),
        ({"answer": ""}, r"row 1: .*must not be empty"),
        ({"random_string_to_prepend": ""}, r"row 1: .*must not be empty"),
        ({"answer": "\ud800"}, r"row 1: not in MRCR's layout \('utf-8' codec can't encode"),
        ({"n_needles": 10**30}, r"row 1: .*n_needles is 1000"),
        ({"n_needles": 0}, r"row 1: .*n_needles is 0"),
    ):
        path.write_text("".join(json.dumps(row) + "\n" for row in (whole, {**whole, **change})))
        with pytest.raises(UserError, match=sentence):
            list(mrcr.read_samples([path], 1000))
    for text, sentence in (
        ("[1]\n", r"a\.jsonl, line 1: expected a JSON object, not a list"),
        ('{"answer": "x"}\n', r"a\.jsonl, row 0: not in MRCR's layout \(lacks 'prompt'\)"),
    ):
        path.write_text(text)
        with pytest.raises(UserError, match=sentence):
            list(mrcr.read_samples([path], 1000))


def test_parquet_with_other_columns_is_reported(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    parquet.write_table(pa.Table.from_pylist(conversations()), path)
    assert [sample.needles for sample in mrcr.read_samples([path], 1000)] == [2, 2, 2, 2, 4, 4]
    longest = max(len(row["prompt"]) for row in conversations())
    assert (
        len([*mrcr.read_samples([path], longest)])
        == 6
        > len([*mrcr.read_samples([path], longest - 1)])
    )
    lists = [{**row, "prompt": json.loads(row["prompt"])} for row in conversations()]
    parquet.write_table(pa.Table.from_pylist(lists), path)
    with pytest.raises(UserError, match=r"a\.parquet: column `prompt` is of type list"):
        list(mrcr.read_samples([path], 1000))
    parquet.write_table(pa.table({"prompt": ["[]"]}), path)
    with pytest.raises(UserError, match=r"a\.parquet: no column `answer`"):
        list(mrcr.read_samples([path], 1000))


def test_a_text_that_parquet_repeats_is_decoded_once(tmp_path: Path) -> None:
    """Two kilobytes that would become 400 GB of text."""
    rows, path = 20_000, tmp_path / "a.parquet"
    columns = {name: pa.array([conversations()[0][name]] * rows) for name in mrcr.FIELDS}
    long = pa.DictionaryArray.from_arrays(pa.array([0] * rows, pa.int32()), ["x" * 20_000_000])
    parquet.write_table(pa.table({**columns, "prompt": long}), path, compression="zstd")
    assert path.stat().st_size < 10_000
    started = time.process_time()
    assert not list(mrcr.read_samples([path], 1000))
    assert time.process_time() - started < 20


def test_a_needle_set_is_hashed_wherever_it_is(tmp_path: Path) -> None:
    """Otherwise answers to another needle set would be reused."""
    nolima_case.write_case(tmp_path / "data")
    (tmp_path / "set.json").write_text(json.dumps(nolima_case.NEEDLE_SET))
    (tmp_path / "data" / "set").write_text(json.dumps(nolima_case.NEEDLE_SET))
    for name in ("../set.json", str(tmp_path / "set.json"), "set", "haystack/../needle_set.json"):
        section = Nolima(data_dir=str(tmp_path / "data"), needle_set=name)
        [fault] = section.missing_files(tmp_path / "data")
        assert "it is named by its place in this folder" in fault


def test_the_needle_set_decides_the_questions(folder: Path) -> None:
    section = Nolima(data_dir=str(folder / "nolima"), lengths=[400], depths=4)
    samples = section.make(nolima_case.tokenizer(), 0)
    assert len(samples) == len(RECORDED["400"])
    system, user = samples[-1].turns()
    assert system == {"role": "system", "content": "Be short."}
    assert user["content"].startswith("Read this:")
    assert {sample.task for sample in samples} == {"onehop", "twohop", "direct"}
    few = section.model_copy(update={"samples": 5}).make(nolima_case.tokenizer(), 7)
    drawn = sorted(np.random.default_rng([7, 400]).permutation(len(samples))[:5])
    assert [sample.turns() for sample in few] == [samples[at].turns() for at in drawn]


@pytest.mark.parametrize(
    ("text", "system"),
    [
        ("{% for m in messages %}{{ m.content }}{% endfor %}", "You are a helpful assistant"),
        ("{{ 1 // 0 if messages[0].role == 'system' else messages[0].content }}", None),
    ],
)
def test_a_chat_model_gets_nolimas_system_turn(folder: Path, text: str, system: str | None) -> None:
    """Instead of the needle set's own; some templates refuse any system turn."""
    tokenizer = nolima_case.tokenizer()
    tokenizer.chat_template = text
    section = Nolima(data_dir=str(folder / "nolima"), lengths=[400], depths=2)
    plain = section.make(tokenizer, 0)
    chat = section.make(tokenizer, 0, ChatTemplate(tokenizer))
    assert {sample.task for sample in chat} == {"onehop", "twohop", "direct"}
    expected = [] if system is None else [{"role": "system", "content": system}]
    for one, other in zip(plain, chat, strict=True):
        assert other.turns() == [*expected, one.turns()[-1]]


def test_helmet_prompts_equal_upstreams(folder: Path) -> None:
    """All depths of a question share two worked examples; PopQA's are of other questions."""
    samples = helmet_samples(folder)
    texts = {name: [sample.plain(sample.turns()) for sample in samples if sample.task == name]
             for name in HELMET_TASKS}  # fmt: skip
    assert [len(texts[name]) for name in HELMET_TASKS] == [6, 6, 6, 4, 6]
    # Upstream's generation_max_length.
    limits = {sample.task: sample.new_tokens for sample in samples}
    assert limits == {name: 100 if name == "json_kv" else 20 for name in HELMET_TASKS}
    first, second = texts["kilt_nq"][:2]
    demos, _, rest = first.partition("Document (Title: Island 0): The island 0 of nq-dev")
    assert demos.startswith(
        "Use the given documents to write a concise and short answer to the question. Write your "
        "answer in the following format:\nAnswer: [answer]\n\nDocument (Title: Island "
    )
    assert demos.count("\nAnswer: The ") == 2 and second.startswith(demos)
    assert rest == (
        "-multikilt has 0 tapirs.\n\nDocument (Title: Weather): It rains in the north.\n\n"
        "Question: How many tapirs has island 0 of nq-dev-multikilt?\nAnswer:"
    )
    examples = {tuple(re.findall(r"Title: Island (\d)", text)[:2]) for text in texts["kilt_nq"]}
    assert len(examples) > 1  # other ones for another question
    popular = [
        helmet.is_used(HELMET_TASKS["kilt_popqa_3"], {"s_pop": views}) for views in (999, 1000)
    ]
    assert popular == [True, False]
    for text in texts["kilt_popqa_3"]:
        *others, own = re.findall(r"Title: Island (\d)", text)
        assert own not in others and "1" not in (*others, own)
    assert sorted(texts["json_kv"])[0] == (
        'JSON data:\n{"key-0-0": "value-0", "key-0-1": "value-1", "key-0-2": "value-2", "key-0-3": '
        '"value-3"}\n\nExtract the value corresponding to the specified key in the JSON object '
        "below.\n\nKey: key-0-2\nCorresponding value: value-2\n\nKey: key-0-3\nCorresponding "
        "value: value-3\n\nKey: key-0-1\nCorresponding value:"
    )


def test_helmet_questions_are_drawn_as_upstream(folder: Path) -> None:
    samples = helmet_samples(folder, tasks=["kilt_nq"], samples=2)
    questions = sorted(f"How many tapirs has island {n} of nq-dev-multikilt?" for n in range(3))
    drawn = set(random.Random(42).sample(questions, 2))
    assert {sample.turns()[0]["content"].rpartition("Question: ")[2] for sample in samples} == drawn
    keys = helmet_samples(folder, tasks=["json_kv"], samples=4)
    expected = [f"key-{n}-1" for n in np.random.default_rng(42).permutation(6)[:4]]
    assert [sample.turns()[0]["content"].rpartition("Key: ")[2] for sample in keys] == expected


@pytest.mark.parametrize("form", ["$A", "a $A", "$A b", "a $A b"])
def test_a_long_helmet_prompt_loses_its_last_passages(folder: Path, form: str) -> None:
    """Also with a tokenizer that adds a token before every text, or behind it."""
    task = HELMET_TASKS["kilt_nq"]
    row = next(read_rows(folder / "helmet" / task.file.format(k=50), ()))
    sample = helmet.rag_sample(task, row, [])
    tokenizer = nolima_case.tokenizer()
    tokenizer.eos_token = "b"
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=form,
        special_tokens=[(letter, tokenizer.convert_tokens_to_ids(letter)) for letter in "ab"],
    )
    whole = len(encode_prompt(tokenizer, sample.prompt() + sample.ending))
    text = helmet.fitted(sample, whole - 5, tokenizer)
    assert whole - 12 < len(encode_prompt(tokenizer, text + sample.ending)) <= whole - 5
    assert text.startswith(sample.prompt()[:150]) and text.endswith(
        "\n\nQuestion: " + sample.question
    )
    assert helmet.fitted(sample, whole, tokenizer) == sample.prompt()
    context = len(tokenizer(sample.context, add_special_tokens=False)["input_ids"])
    assert helmet.fitted(sample, whole - context, tokenizer) == sample.prompt("")


def test_a_helmet_prompt_fits_if_a_token_spans_the_end_of_its_context() -> None:
    """In the vocabularies of Qwen3 and Llama 3, a stop and an empty line are one token."""
    tokenizer = nolima_case.tokenizer()
    tokenizer.add_tokens([".\n\n"])
    sample = helmet.HelmetSample("{context}\n\n{question}", "One, two.", "", "Which?", ":", ("1",))
    sizes = {
        most: len(tokenizer(helmet.fitted(sample, most, tokenizer) + ":")["input_ids"])
        for most in range(9, 18)
    }
    assert sizes == {most: most if most < 17 else 16 for most in sizes}
    with pytest.raises(UserError, match=r"takes more than 8 tokens without any"):
        helmet.fitted(sample, 8, tokenizer)


@pytest.mark.parametrize(
    ("output", "score"),
    [
        (" The 3 Tapirs.", 1),
        ("They are 3 of them, I think", 1),
        ("\n3 tapirs", 1),  # upstream's code does not stop at the end of a line
        ("3 a tapirs", 1),
        ("3, an tapirs", 1),
        ("33", 0),
    ],
)
def test_a_helmet_answer_scores_if_the_output_contains_it(output: str, score: int) -> None:
    assert helmet.score(output, ("The 3 tapirs", "3 of them")) == score


def test_helmet_files_are_found_by_task_and_length(tmp_path: Path) -> None:
    """The names in its archive; k is the number of passages or pairs."""
    section = Helmet(
        data_dir=str(tmp_path), lengths=[8192, 16384, 32768, 65536, 131072], samples=10
    )
    passages, named = ["50", "105", "220", "440", "1000"], dict[str, list[str]]()
    for sentence in section.missing_files(tmp_path):
        if match := re.search(r"has no (\S+?)k(\d+)(\S+) of HELMET", sentence):
            named.setdefault(f"{match[1]}k*{match[3]}", []).append(match[2])
    assert {name: sorted(counts, key=int) for name, counts in named.items()} == {
        "kilt/nq-dev-multikilt_1000_k*_dep6.jsonl": passages,
        "kilt/triviaqa-dev-multikilt_1000_k*_dep6.jsonl": passages,
        "kilt/hotpotqa-dev-multikilt_1000_k*_dep3.jsonl": passages,
        "kilt/popqa_test_1000_k*_dep6.jsonl": ["3", *passages],
        "json_kv/test_k*_dep6.jsonl": ["105", "220", "440", "900", "1800"],
        "kilt/nq-train-multikilt_1000_k*_dep6.jsonl": ["3"],
        "kilt/triviaqa-train-multikilt_1000_k*_dep6.jsonl": ["3"],
        "kilt/hotpotqa-train-multikilt_1000_k*_dep3.jsonl": ["3"],
    }


@pytest.mark.parametrize(
    ("section", "samples", "tokens", "generated"),
    [
        # NoLiMa's lengths leave out the answer, those of the others include it.
        (Nolima(data_dir="d", lengths=[512], samples=4, max_new_tokens=32), 4, 4 * (512 + 32), 128),
        (Mrcr(data_dir="d", lengths=[1024], samples=5), 15, 15 * 1024, 15 * 600),
        # The public data has no more.
        (Mrcr(data_dir="d", lengths=[1024], samples=999), 300, 300 * 1024, 300 * 600),
        (Helmet(data_dir="d", lengths=[8192], samples=2, tasks=["kilt_nq", "json_kv"]),
         14, 14 * 8192, 12 * 20 + 2 * 100),
    ],
)  # fmt: skip
def test_planned_tokens_count_each_answer_once(
    section: PromptEvaluation, samples: int, tokens: int, generated: int
) -> None:
    ((work,), _) = section.work()
    assert (work.samples, work.tokens, work.logits) == (samples, tokens, generated)


def test_lengths_of_helmet_include_template_and_answer(tmp_path: Path) -> None:
    folder, tokenizer = helmet_case.write_case(tmp_path / "helmet"), nolima_case.tokenizer()
    keys = folder / "json_kv" / "test_k105_dep6.jsonl"
    row = json.loads(keys.read_text().partition("\n")[0])
    keys.write_text(json.dumps({**row, "context": "x" * 8192}))
    section = Helmet(data_dir=str(folder), lengths=[8192], tasks=["json_kv"])
    (sample,) = section.make(tokenizer, 0)
    assert len(tokenizer(sample.plain(sample.turns()))["input_ids"]) == 8192 - sample.new_tokens
    (sample,) = section.make(tokenizer, 0, template(tokenizer))
    prompt = len(tokenizer(template(tokenizer).text(sample.turns()))["input_ids"])
    # If a template follows the prompt, the answer has no given beginning.
    assert prompt == 8192 - sample.new_tokens
    assert not sample.turns()[-1]["content"].endswith(HELMET_TASKS["json_kv"].ending)


def test_faults_in_helmet_data_are_reported(tmp_path: Path) -> None:
    folder = helmet_case.write_case(tmp_path / "helmet")
    section = Helmet(data_dir=str(folder), lengths=[8192, 16384])
    missing = list(section.missing_files(folder))
    assert len(missing) == 5 and "kilt/nq-dev-multikilt_1000_k105_dep6.jsonl" in "".join(missing)
    with pytest.raises(ValueError, match="4,096 is none of HELMET's lengths"):
        Helmet(data_dir=str(folder), lengths=[4096])
    file = folder / "kilt" / "nq-dev-multikilt_1000_k50_dep6.jsonl"
    for answers in ([], "Because.", {"Because.": 1}, ["Because.", ""], ["Because.", None]):
        file.write_text(json.dumps({"question": "Why?", "answers": answers, "ctxs": []}))
        with pytest.raises(
            UserError, match=r"dep6\.jsonl, row 0: not in HELMET's layout \(answers"
        ):
            helmet_samples(tmp_path, tasks=["kilt_nq"])
    file.write_text('{"question": ["Why?"]}\n')
    with pytest.raises(UserError, match=r"dep6\.jsonl: not in HELMET's layout \(unhashable"):
        helmet_samples(tmp_path, tasks=["kilt_nq"])
    keys = folder / "json_kv" / "test_k105_dep6.jsonl"
    row = json.loads(keys.read_text().partition("\n")[0])
    keys.write_text(json.dumps({**row, "answer": ""}))
    with pytest.raises(UserError, match=r"k105_dep6\.jsonl, row 0: .*the answer is empty"):
        helmet_samples(tmp_path, tasks=["json_kv"])
    keys.write_text(json.dumps({**row, "question": "Which?" * 8192}))
    (sample,) = helmet_samples(tmp_path, tasks=["json_kv"])
    with pytest.raises(UserError, match=r"the question 'Which\?.* takes more than 8,092 tokens"):
        sample.turns()
