"""The calibration set: the evaluation's prompts, with the original model's own right answers.

Its needles and texts are not the evaluation's.
"""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from bosch.errors import RunError, UserError
from bosch.masks import HeadMask
from bosch.model.materialize import materialize
from bosch.model.search_mode import prepare_for_search
from bosch.ranks import Ranks
from bosch.score.calibration import CalibrationSet
from bosch.score.objective import Objective
from bosch.window import Window
from data_prep.documents.calibration import (
    CalibrationNeedles,
    Prompt,
    needle_prompts,
    write_calibration,
)
from data_prep.tasks.needles import pair_owner, string_match
from data_prep.tasks.ruler import Corpus, make_rows
from data_prep.text import encode_prompt, essay_identity, haystack_words
from pipeline.recipe.load import load_recipe
from stages.evaluate.chat import ChatConfig
from stages.evaluate.lm import LanguageModel
from stages.search import examples, run
from stages.search.examples import answered, calibration_set
from stages.search.stage import SearchConfig
from tests.hybrid_case import random_mask, small_model, tokens
from tests.pipeline_case import Case
from tests.ruler_case import TOKENIZER, essay_text
from tests.search_case import WINDOW, config_of, write_inputs
from tests.tiny_data import byte_tokenizer

TASKS = ("niah_single_1", "niah_single_2", "niah_multikey_1", "niah_multikey_2", "niah_multikey_3")


@pytest.mark.parametrize("task", TASKS)
def test_calibration_asks_as_the_evaluation_does(task: str) -> None:
    """The texts differ only in what is hidden, and are tokenised by the same function."""
    tokenizer = AutoTokenizer.from_pretrained(TOKENIZER)
    words = essay_text().split()
    settings: dict[str, Any] = {"seed": 7, "new_tokens": 32, "tokenizer": tokenizer}
    [row] = make_rows(task, 1024, 1, corpus=Corpus(words), **settings)
    [prompt] = needle_prompts([task], 1, 1024, lambda name: 32, "calibration", 7, tokenizer, words)
    texts = []
    for one in (row, asdict(prompt)):
        key = next(key for key, value in one["needles"] if value == one["answers"][0])
        first, *_, last = one["prompt"].split("\n")
        texts.append((first, last.replace(key, "KEY"), one["prefix"].replace(key, "KEY")))
    assert texts[0] == texts[1] and texts[0][2].endswith("mentioned in the provided text is")
    tokens = len(encode_prompt(tokenizer, prompt.prompt + prompt.prefix))
    assert 1024 - 100 < tokens + 32 <= 1024


def language_model(rows: int = 4, **chat: Any) -> LanguageModel:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "{{ 'ASK:' + messages[0]['content'] + ':THEN' }}"
    return LanguageModel(small_model(), tokenizer, ChatConfig(**chat), rows)


def asked(lm: LanguageModel, count: int = 12) -> list[Prompt]:
    """Prompts of random tokens; the model's answer to every third is wrong."""
    prompts = []
    for index in range(count):
        text = lm.tok_decode(tokens(1, 30 + 2 * index, seed=index)[0].tolist())
        [(_, _, ids)] = lm.answer_ids({0: (lm.prompt(text, ""), [])}, 3)
        answer = lm.tok_decode(ids)[1:] if index % 3 else "no answer"
        prompts.append(Prompt(f"task {index % 2}", 60, 5, text, "", [answer]))
    return prompts


@pytest.mark.parametrize("in_chat", [False, True])
def test_s_of_a_mask_is_the_rate_of_generations_that_reproduce_the_answers(in_chat: bool) -> None:
    lm = language_model(apply_chat_template=in_chat)
    prompts = asked(lm)
    records = answered(lm, prompts)
    right = [prompt for index, prompt in enumerate(prompts) if index % 3]
    assert [record["task"] for record in records] == [prompt.task for prompt in right]
    questions = {}
    for record, prompt in zip(records, right, strict=True):
        ids, length = record["input_ids"], record["answer_length"]
        context = f"ASK:{prompt.prompt}:THEN" if in_chat else prompt.prompt
        assert ids[:-length] == lm.tok_encode(context)
        text = lm.tok_decode(ids[-length:])
        assert string_match(text, prompt.answers) == 1.0
        assert string_match(text[:-1], prompt.answers) == 0.0  # nothing after the answer
        questions[len(questions)] = context, prompt.answers
    calibration = CalibrationSet.from_records(
        (record["input_ids"], record["answer_length"]) for record in records
    )
    window = Window(WINDOW)
    masks = [HeadMask.all_full(3, 4), HeadMask.all_sliding(3, 4, window)]
    masks += [random_mask(window, seed) for seed in range(2)]
    rates = []
    for mask in masks:
        hybrid = LanguageModel(materialize(small_model(), mask), lm.tokenizer, ChatConfig(), 3)
        same = 0
        for number, _, answer in hybrid.answer_ids(questions, 5):
            example = calibration.examples[number]
            expected = example.input_ids[-example.answer_length :]
            same += tuple(answer[: len(expected)]) == expected
        rates.append(same / len(questions))
    prepare_for_search(lm.model)
    objective = Objective(lm.model, calibration, window, batch_size=3)
    assert [objective.evaluate(mask).score for mask in masks] == rates
    assert rates[0] == 1.0 and len({*rates}) > 2


def test_spare_prompts_replace_those_that_are_answered_wrongly(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lm = language_model()
    prompts = asked(lm)
    with_spare = [replace(p, spare=index >= 8) for index, p in enumerate(prompts)]
    everything = answered(lm, prompts)
    assert len(everything) == 8
    assert answered(lm, with_spare) == everything  # 5 of the first 8, 3 spare
    few = [replace(p, spare=index >= 4) for index, p in enumerate(prompts)]
    assert answered(lm, few) == everything[:4]
    enough = [replace(p, spare=index % 3 == 0) for index, p in enumerate(prompts)]
    counted: list[int] = []
    original = lm.answer_ids

    def counting(asked: Any, new_tokens: int) -> Any:
        counted.append(len(asked))
        return original(asked, new_tokens)

    monkeypatch.setattr(lm, "answer_ids", counting)
    assert answered(lm, enough) == everything
    assert counted == [8]


def test_a_model_that_answers_too_few_is_refused_with_the_tasks_before_the_search(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base, prepared = write_inputs(tmp_path)
    path = prepared / "calibration" / "prompts.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for number, line in enumerate(lines):
        line["task"] = f"task {number % 2}"
        line["answers"] = line["answers"] if number % 2 else ["no answer"]
    path.write_text("\n".join(map(json.dumps, lines)))
    config = config_of(base, SearchConfig(swa_ratio=0.5, window_size=WINDOW))
    monkeypatch.setattr(Objective, "evaluate", lambda *_: pytest.fail("a pass of the search"))
    message = r"answers 0 of 3 in task 0, 3 of 3 in task 1 right, at \d+ tokens: too few"
    with pytest.raises(UserError, match=message):
        run.run(config, {"prepare": prepared}, tmp_path)
    assert not (tmp_path / "calibration.jsonl").exists()


def test_answers_are_kept_for_a_search_that_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a note where some prompts are answered wrongly."""
    base, prepared = write_inputs(tmp_path)
    path = prepared / "calibration" / "prompts.jsonl"
    first = json.loads(path.read_text().splitlines()[0])
    with path.open("a") as file:
        file.write(json.dumps({**first, "answers": ["no answer"]}) + "\n")
    config = config_of(base, SearchConfig(swa_ratio=0.5, window_size=WINDOW))
    model = small_model()
    found, notes = calibration_set(config, prepared, tmp_path, model, Ranks())
    assert notes == [
        "the calibration set has 6 of 7 examples: the model answered only these of 7 prompts right"
    ]
    with monkeypatch.context() as patch:
        patch.setattr(examples, "answered", lambda *_: pytest.fail("asked again"))
        again = calibration_set(config, prepared, tmp_path, model, Ranks())
    assert again == (found, notes) and len(found) == 6
    with path.open("a") as file:
        file.write(json.dumps({**first, "prompt": "^"}) + "\n")
    (tmp_path / "calibration.jsonl").unlink()
    with pytest.raises(UserError, match="holds the token id 61, the model's vocabulary ends at 60"):
        calibration_set(config, prepared, tmp_path, model, Ranks())


def test_the_evaluations_prompts_are_the_default(case: Case) -> None:
    def sections(*overrides: str) -> tuple[Any, Any]:
        recipe: Any = load_recipe(case.file, overrides, env={}).recipe
        chat = recipe.search.chat
        assert chat.system_instruction == (recipe.evaluate and recipe.evaluate.system_instruction)
        return chat.apply_chat_template, recipe.prepare.calibration.max_new_tokens

    assert sections("evaluate=null") == (False, None)
    shorter = "evaluate.ruler={lengths: [512], max_new_tokens: 9}"
    (case.model / "chat_template.jinja").write_text("{{ messages[0]['content'] }}")
    assert sections("evaluate.apply_chat_template=true", shorter) == (True, 9)
    own = ("search.chat.apply_chat_template=false", "prepare.calibration.max_new_tokens=7")
    assert sections("evaluate.apply_chat_template=true", shorter, *own) == (False, 7)


NEEDLES = ["niah_single_2", "niah_multikey_2", "niah_multikey_3"]


def prompts_of(space, tokenizer, count=9):
    words = essay_text().split()
    return list(needle_prompts(NEEDLES, count, 1024, lambda task: 32, space, 42, tokenizer, words))


def test_seed_spaces_share_no_needle_and_no_haystack(tokenizer):
    beginnings = set()
    for space in ("calibration", "evaluation"):
        prompts = prompts_of(space, tokenizer)
        pairs = {tuple(pair) for prompt in prompts for pair in prompt.needles}
        assert {pair_owner(*pair) for pair in pairs} == {space} and len(pairs) == 9
        assert [prompt.task for prompt in prompts] == NEEDLES * 3
        beginnings |= {prompt.prompt[:300] for prompt in prompts[::3]}
    assert len(beginnings) == 3 + 1  # an evaluation's begins with the essay
    assert prompts == prompts_of("evaluation", tokenizer)


def test_a_sample_with_a_needle_or_prompt_of_the_calibration_set_is_refused(tokenizer, tmp_path):
    write_calibration(tmp_path, prompts_of("calibration", tokenizer, 4), 2)
    calibration = CalibrationNeedles.load(tmp_path)
    for own in prompts_of("calibration", tokenizer, 4):
        [(key, value)] = own.needles
        calibration.check("vt 3", own.prompt + " ", [["a", value], [key, "b"]])
        with pytest.raises(RunError, match="vt 3 shares the needle"):
            calibration.check("vt 3", "other", [["a", "b"], [key, value]])
        with pytest.raises(RunError, match="vt 3 shares its whole"):
            calibration.check("vt 3", own.prompt, [["a", "b"]])


def test_essays_are_read_from_a_folder(tmp_path):
    (tmp_path / "b.txt").write_text("three\n four")
    (tmp_path / "a.md").write_text("one  two")
    (tmp_path / "c.json").write_text(json.dumps({"text": "five"}))
    words = haystack_words(tmp_path)
    assert words == ["one", "two", "three", "four", "five"]
    assert essay_identity(tmp_path, words)["words"] == 5


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"good \xff bad", r"a\.txt: not UTF-8 at byte 5"),
        ("a.json", b"{", r"a\.json: expected a JSON object"),
        ("a.txt", b" \n", "hold no text"),
        ("a.bin", b"x", "holds no .txt"),
    ],
)
def test_a_damaged_essay_folder_is_refused(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message):
        haystack_words(tmp_path)


@pytest.mark.parametrize(
    ("output", "answers", "score", "of_any"),
    [
        (": 1234567.", ["1234567"], 1.0, 1.0),
        ("1234568", ["1234567"], 0.0, 0.0),
        ("ABC-Def\x00\x07", ["abc-dEF"], 1.0, 1.0),
        ("A one\x00and TWO", ["one", "two", "three", "four"], 0.5, 1.0),
        ("123\x004567", ["1234567"], 0.0, 0.0),
    ],
)
def test_string_match_equals_rulers(output, answers, score, of_any):
    """string_match_all and string_match_part in its scripts/eval/synthetic/constants.py."""
    assert string_match(output, answers) == score
    assert string_match(output, answers, any_answer=True) == of_any
