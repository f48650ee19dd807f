"""RULER as a suite: keys of its answers, which rank makes which samples, and its scores."""

from __future__ import annotations

from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bosch.errors import UserError
from data_prep.tasks.samples import SampleFolder
from stages.context import ModelConfig
from stages.evaluate.answers import AnswerFolder, EvaluatedModel
from stages.evaluate.suites.needle import NeedleEvaluation
from stages.evaluate.suites.needle import suite as needle_suite
from stages.evaluate.suites.needle.suite import NeedleSuite

TASKS = ["niah_single_2", "niah_multikey_1"]
MODEL = EvaluatedModel("original", ModelConfig(path="model"))
STOP = SimpleNamespace(update=lambda *_, **__: None)


@pytest.fixture
def suite(tokenizer: Any, tmp_path: Path) -> Any:
    def of(rank: int = 0, chat: Any = None, calibration: Any = None, **section: Any) -> NeedleSuite:
        given = {"tasks": TASKS, "lengths": [600, 900], "samples": 3, **section}
        return NeedleSuite(
            name="needle", section=NeedleEvaluation(**given),
            samples_folder=tmp_path / "samples", card=tmp_path / "README.md",
            calibration=calibration, tokenizer=tokenizer, rank=rank, world=2, batch_size=2,
            chat=chat, answers=AnswerFolder(tmp_path / "answers", rank),
        )  # fmt: skip

    return of


def digests(suite: NeedleSuite) -> dict[tuple[str, int], str]:
    return {(subtask.task, subtask.length): subtask.digest for subtask in suite.subtasks}


def test_keys_of_answers_hold_all_that_they_depend_on(suite: Any, tmp_path: Path) -> None:
    plain = digests(suite())
    assert list(plain) == [(task, length) for length in (600, 900) for task in TASKS]
    assert len(set(plain.values())) == 4 and digests(suite()) == plain
    stretched = digests(suite(yarn={900: 2}))
    changed = {place for place, digest in stretched.items() if plain[place] != digest}
    assert changed == {place for place in plain if place[1] == 900}
    stated = digests(suite(yarn={900: 2}, yarn_original_length=32768))
    (tmp_path / "README.md").write_text('"original_max_position_embeddings": 32768')
    carded = digests(suite(yarn={900: 2}))
    assert carded == stated and {p for p in carded if carded[p] != stretched[p]} == changed
    assert digests(suite(yarn={900: 2}, yarn_original_length=4096)) != carded
    assert digests(suite()) == plain  # the card does not matter if nothing is stretched
    chat = digests(suite(chat=SimpleNamespace(digest="template")))
    assert all(chat[place] != plain[place] for place in plain)


def test_all_tasks_that_cannot_be_made_are_reported_on_every_rank(
    suite: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Common words of 128k tokens need more words than there are."""
    make, gathered, counts = SampleFolder.make, list[str](), list[int]()

    def refuse(self: SampleFolder, count: int, *arguments: Any) -> None:
        counts.append(count)
        if self.task in ("cwe", "vt"):
            raise UserError(f"too few words for {self.task}")
        make(self, count, *arguments)

    def gather(own: list[str]) -> list[str]:
        gathered.extend(own)
        return gathered

    monkeypatch.setattr(SampleFolder, "make", refuse)
    monkeypatch.setattr(needle_suite, "gather_object", gather)
    for rank in (0, 1):
        with pytest.raises(UserError, match="too few words for cwe"):
            suite(rank, tasks=["cwe", *TASKS]).prepare()
    gathered.clear()
    counts.clear()
    with pytest.raises(UserError, match=r"for cwe\ntoo few words for vt"):
        suite(tasks=["cwe", "vt", "niah_multikey_1"]).prepare()
    assert counts == [1, 1, 1]  # all are reported before more than one sample is made


def test_samples_are_made_in_turn_and_answered_by_their_rank(
    suite: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 makes every other subtask and answers the even samples; scores are shares."""
    stretches: list[tuple[Any, ...]] = []

    @contextmanager
    def yarn(loaded: Any, *settings: Any) -> Any:
        stretches.append(settings)
        yield

    monkeypatch.setattr(needle_suite, "yarn", yarn)
    asked: list[tuple[list[int], int]] = []

    def generated(loaded: Any, questions: Any, new_tokens: int) -> Any:
        asked.append(([question.index for question in questions], new_tokens))
        yield [(question, " ".join(question.answers)) for question in questions[:1]]
        yield [(question, "nothing") for question in questions[1:]]

    changes = {"tasks": ["vt", "niah_multikey_1"], "yarn": {900: 2.0}, "yarn_original_length": 500}
    suites = [suite(rank, lengths=[700, 900], **changes) for rank in (0, 1)]
    for made, one in zip((2, 4), suites, strict=True):
        one.prepare()
        assert len(list((tmp_path / "samples").glob("*/ids.bin"))) == made
    for one in suites:
        monkeypatch.setattr(one, "generated", generated)
        assert one.count_unanswered(MODEL) == 4 * (2, 1)[one.rank]
        one.run(MODEL, None, STOP)
        assert one.count_unanswered(MODEL) == 0
        one.run(MODEL, None, STOP)  # no answer is computed again
    assert asked == [(indices, new) for indices in ([0, 2], [1]) for new in (30, 128, 30, 128)]
    card = tmp_path / "README.md"
    assert stretches == [(None, 500, card)] * 2 + [(2.0, 500, card)] * 2 + [
        (None, 500, card), (None, 500, card), (2.0, 500, card), (2.0, 500, card),
    ]  # fmt: skip
    for subtask in suites[0].subtasks:
        answers = suites[0].answers.read(MODEL, subtask)
        scores = {index: answer["score"] for index, answer in answers.items()}
        assert scores == {0: 1.0, 1: 1.0, 2: 0.0}
        assert answers[2]["output"] == "nothing"
        assert len(answers[2]["answers"]) == (5 if subtask.task == "vt" else 1)


@pytest.mark.parametrize(("any_answer", "score"), [((), 0.25), (("niah_multivalue",), 1.0)])
def test_one_of_several_answers_is_enough_as_upstream(
    suite: Any, any_answer: tuple[str, ...], score: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a chat template the beginning of the answer comes after the prompt."""
    monkeypatch.setattr(needle_suite, "ANY_ANSWER", any_answer)
    chat = SimpleNamespace(digest="template", ids=lambda ids, prefix: [len(ids), len(prefix)])
    one = suite(chat=chat, tasks=["niah_multivalue"], lengths=[600], samples=1)
    one.prepare()

    def answer(loaded: Any, questions: Any, new_tokens: int) -> Any:
        [asked] = questions
        prefix = asked.tail[asked.tail.rindex(" The special magic numbers for") :]
        assert asked.prompt_ids.tolist()[1] == len(prefix)
        yield [(asked, asked.answers[0])]

    monkeypatch.setattr(one, "generated", answer)
    one.run(MODEL, None, STOP)
    assert one.answers.read(MODEL, one.subtasks[0])[0]["score"] == score
