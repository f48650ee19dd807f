"""RULER's samples equal upstream's: recorded digests of the output of NVIDIA/RULER c3f5e3b.

The records were made with wonderwords 3.0.1, the quickstart's tokenizer, the text of
tests/ruler_case.py, seed 42 and the rule in data_prep/tasks/words.py instead of punkt.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from typing import get_args

import pytest

from bosch.errors import UserError
from data_prep.tasks import ruler
from data_prep.tasks.needles import Draft
from data_prep.tasks.questions import read_questions
from data_prep.tasks.ruler import Corpus, make_rows, read_rows, ruler_task, write_rows
from data_prep.tasks.tables import ANY_ANSWER, DATA_FILES, NEW_TOKENS, RULER_NEEDLES, RulerTask
from data_prep.tasks.words import (
    ADJECTIVES,
    NOUNS,
    OWN_WORDS,
    PairedWords,
    WordLists,
    sentence_splitter,
    split_by_rule,
)
from data_prep.text import encode_prompt, pydoc_topics, token_counter
from stages.evaluate.stage import RulerConfig
from tests.ruler_case import essay_text, write_data

RECORDS = json.loads((Path(__file__).parents[1] / "data/ruler.json").read_text())


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_data(tmp_path_factory.mktemp("data") / "ruler")


@pytest.fixture(autouse=True)
def rule(monkeypatch):
    """Split sentences by rule, whatever is installed here."""
    monkeypatch.setattr(ruler, "sentence_splitter", lambda: (split_by_rule, "rule"))


def _corpus(data, **words):
    return Corpus(essay_text().split(), data, **words)


@pytest.mark.parametrize("length", sorted(RECORDS))
@pytest.mark.parametrize("task", NEW_TOKENS)
def test_samples_equal_upstreams(task, length, tokenizer, data):
    counter = token_counter(tokenizer)
    generator = ruler_task(task, _corpus(data), 42, int(length), NEW_TOKENS[task], counter)
    assert generator.corpus.words.upstream, "install the package wonderwords"
    generator.fit()
    for index, record in enumerate(RECORDS[length][task]):
        draft = generator.sample(index)
        content = json.dumps([draft.text, draft.prefix, draft.answers])
        assert hashlib.sha256(content.encode()).hexdigest()[:16] == record, index


@pytest.mark.parametrize(
    ("eos", "ids"), [(None, [0, 0]), (9, [0, 9])], ids=["two opening", "one closing"]
)
def test_special_tokens_are_not_counted(eos, ids):
    def tokenizer(text, **options):
        return {"input_ids": [ids[0], *text.encode(), ids[1]] if eos else [*ids, *text.encode()]}

    tokenizer.eos_token_id = eos
    assert encode_prompt(tokenizer, "four") == [0] * (1 if eos else 2) + [*b"four"]
    assert token_counter(tokenizer)("four") == 4 and token_counter(tokenizer)("") == 0


@pytest.mark.parametrize("task", NEW_TOKENS)
def test_short_samples_fit_the_length(task, tokenizer, data):
    """Below RULER's lengths its steps are too large; ours are smaller."""
    length = 1500
    corpus = _corpus(data, words=OWN_WORDS)
    generator = ruler_task(task, corpus, 1, length, 16, token_counter(tokenizer))
    generator.fit()
    for index in range(3):
        sample = generator.sample(index)
        tokens = len(encode_prompt(tokenizer, sample.text)) + 16
        assert length * (0.6 if task in ("fwe", "qa_1", "qa_2") else 0.8) < tokens <= length
        # Those of the question are in it; the prompt does not contain its own answer.
        assert len(sample.answers) == _answers(task)
        assert sample.text.endswith(sample.prefix)


def test_ten_words_of_a_short_list_are_as_frequent_as_in_ruler(tokenizer):
    """Six times against once; in the worked example three times, and its answer names them."""
    task = ruler_task("cwe", _corpus(None, words=OWN_WORDS), 1, 2000, 16, token_counter(tokenizer))
    draft = task.draw(0, 50)
    example, asked = draft.text.split("Below is a numbered list")[1:]
    for text, expected in ((example, {3 + 1: 10, 1: 10}), (asked, {6: 10, 1: 40})):
        counts = Counter(re.findall(r"\d+\. (\w+)", text))
        assert Counter(counts.values()) == expected
    assert {word for word, count in counts.most_common(10)} == {*draft.answers}


@pytest.mark.parametrize("task", ["niah_multikey_1", "niah_multikey_2", "niah_multiquery"])
def test_a_key_has_one_value_if_keys_are_few(task, tokenizer, data):
    """A question about a key drawn twice would have two right answers."""
    words = WordLists(PairedWords(ADJECTIVES[:5], NOUNS[:3]), NOUNS)
    corpus = _corpus(data, words=words)
    generator = ruler_task(task, corpus, 1, 2000, 16, token_counter(tokenizer))
    generator.fit()
    for index in range(20):
        draft = generator.sample(index)
        needles = re.findall(r"special magic numbers? for (\S+) is: (\d+)", draft.text)
        assert len(needles) >= 4
        for key, value in draft.needles:
            assert {own for name, own in needles if name == key} == {value}


@pytest.mark.parametrize("length", [350, 500, 1000, 2000])
def test_three_coded_words_are_most_frequent(length, tokenizer):
    task = ruler_task("fwe", _corpus(None), 1, length, 16, token_counter(tokenizer))
    task.fit()
    for index in range(3):
        draft = task.sample(index)
        words = re.findall(r"coded words\. (.*)\nQuestion", draft.text)[0].split()
        counts = Counter(word for word in words if word != "...").most_common(4)
        assert {word for word, _ in counts[:3]} == {*draft.answers}
        assert counts[2][1] > counts[3][1]


class _Counted(ruler.RulerTask):
    """Drafts that have as many tokens as their size."""

    step, smallest = 8, 3

    def draw(self, index, size):
        return Draft("x" * size, "", [], [])


@pytest.mark.parametrize(
    ("first", "length", "sizes"),
    [
        (6, 8, [6]),
        (24, 12, [24, 16, 8]),
        (10, 5, [10, 3]),
        (8, 6, [8] * 200),
    ],
)
def test_a_sample_shrinks_by_steps_and_is_then_drawn_again(first, length, sizes):
    generator = _Counted(Corpus([]), 0, length, 2, len)
    generator.size, drawn = first, []
    generator.draft = lambda index, size: drawn.append(size) or generator.draw(index, size)
    with pytest.raises(UserError, match="fit into 6") if len(sizes) == 200 else nullcontext():
        generator.sample(0)
    assert drawn == sizes


@pytest.mark.parametrize(
    ("task", "lengths", "new_tokens"),
    [("vt", range(640, 700, 10), 30), ("cwe", (980, 1000, 1060, 1080), 60)],
)
def test_the_shortest_samples_are_complete_or_refused(task, lengths, new_tokens, tokenizer):
    """If a haystack just fits, one step less is no haystack of the task."""
    refused = 0
    for length in lengths:
        counter = token_counter(tokenizer)
        try:
            generator = ruler_task(task, _corpus(None), 1, length, new_tokens, counter)
            generator.fit()
            samples = [generator.sample(index) for index in range(3)]
        except UserError as fault:
            assert "does not fit" in str(fault)
            refused += 1
        else:
            assert {len(sample.answers) for sample in samples} == {_answers(task)}
    assert 0 < refused < len(lengths)


def _answers(task):
    if task in RULER_NEEDLES:
        return RULER_NEEDLES[task].values * RULER_NEEDLES[task].queries
    return {"vt": 5, "cwe": 10, "fwe": 3, "qa_1": 2, "qa_2": 1}[task]


def test_rows_are_read_as_they_were_made(tmp_path, tokenizer, data):
    """The model continues a row's prompt and prefix, which together are the sample's text."""
    for task in ("niah_multikey_2", "vt"):
        settings = {"seed": 5, "new_tokens": 8, "corpus": _corpus(data), "tokenizer": tokenizer}
        write_rows(tmp_path / task, make_rows(task, 1024, 3, **settings))
        generator = ruler_task(task, _corpus(data), 5, 1024, 8, token_counter(tokenizer))
        generator.fit()
        for index, row in enumerate(read_rows(tmp_path / task)):
            draft = generator.sample(index)
            assert row["prompt"] + row["prefix"] == draft.text and row["length"] == 1024
            assert row["answers"] == draft.answers
            assert [tuple(pair) for pair in row["needles"]] == draft.needles


def test_pairs_of_words_are_in_alphabetical_order():
    adjectives, nouns = ["high", "high-pitched", "old", "a"], ["pitched-a", "z", "b", "b"]
    pairs = PairedWords(adjectives, nouns)
    plain = sorted({f"{adjective}-{noun}" for adjective in adjectives for noun in nouns})
    assert list(pairs) == plain and len(pairs) == len(plain)
    with pytest.raises(IndexError):
        pairs[len(plain)]


def test_documents_are_drawn_if_there_are_more_than_needed(tokenizer, data):
    _, documents = read_questions("qa_1", data / DATA_FILES["qa_1"])
    task = ruler_task("qa_1", _corpus(data), 1, 4096, 32, token_counter(tokenizer))
    for size, draws in ((len(documents) - 1, True), (len(documents), False)):
        before = task.random.getstate()
        task.draw(0, size)
        assert (task.random.getstate() != before) == draws


def test_missing_and_damaged_data_is_reported(tmp_path, tokenizer, data):
    def make(task, folder):
        ruler_task(task, _corpus(folder), 1, 1024, 16, token_counter(tokenizer)).fit()

    (tmp_path / "squad.json").write_text('{"data": [{"paragraphs": 3}]}')
    (tmp_path / "hotpotqa.json").write_text("[")
    with pytest.raises(UserError, match="not the file that RULER downloads"):
        make("qa_1", tmp_path)
    with pytest.raises(UserError, match=r"hotpotqa\.json cannot be read as JSON"):
        make("qa_2", tmp_path)
    with pytest.raises(UserError, match=r"hotpotqa\.json: holds 60 questions; lower evaluate\.ru"):
        ruler_task("qa_2", _corpus(data), 1, 1024, 16, token_counter(tokenizer)).draw(60, 3)
    with pytest.raises(UserError, match="too few for 32,768 tokens: install the package"):
        corpus = _corpus(data, words=OWN_WORDS)
        ruler_task("cwe", corpus, 1, 32768, 120, token_counter(tokenizer)).fit()
    for task, length, said in (
        ("qa_1", 80, "qa_1 at 80 tokens: it does not fit"),
        ("fwe", 90, "fwe at 90 tokens: it does not fit"),
        ("vt", 300, "vt at 300 tokens: it does not fit into 150 tokens"),
    ):
        with pytest.raises(UserError, match=said):
            settings = {"new_tokens": 16, "corpus": _corpus(data), "tokenizer": tokenizer}
            list(make_rows(task, length, 1, seed=1, **settings))


def test_a_list_longer_than_the_words_uses_rulers_english_words(tmp_path, tokenizer):
    words = [f"w{number}" for number in range(3000)]
    file = tmp_path / "english_words.json"
    file.write_text(json.dumps({f"key {word}": word for word in words}))
    corpus = _corpus(tmp_path, words=OWN_WORDS)
    task = ruler_task("cwe", corpus, 1, 32768, 120, token_counter(tokenizer))
    task.fit()
    assert len(OWN_WORDS.single) < task.size < len(words)
    sample = task.sample(0)
    assert len(sample.answers) == 10 and {*sample.answers} <= {*words}
    file.write_text("[]")
    with pytest.raises(UserError, match=r"english_words\.json: expected a JSON object of words"):
        ruler_task("cwe", corpus, 1, 32768, 120, token_counter(tokenizer))


def test_a_recipe_accepts_all_tasks():
    assert set(get_args(RulerTask)) == set(NEW_TOKENS)
    assert {"qa_1", "qa_2"} == ANY_ANSWER
    section = RulerConfig(yarn={"64k": 2, 131072: 4.0})
    assert section.yarn == {65536: 2.0, 131072: 4.0}
    assert RulerConfig.model_validate(section.model_dump(mode="json")) == section
    assert [section.new_tokens(task) for task in ("vt", "cwe")] == [30, 120]


# An abbreviation that punkt learns from the corpus; the rule ends a sentence there.
TEXT = "It has many uses, approx. Ten of them are known. Others follow."


def test_punkt_splits_if_its_data_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import nltk  # here: it would cost seconds in every process that collects the tests

    folder = tmp_path / "tokenizers/punkt_tab/english"
    folder.mkdir(parents=True, mode=0o700)
    corpus = " ".join(list(pydoc_topics().values())[:20])
    corpus += " Of approx. five uses, approx. two count." * 50
    punkt = nltk.tokenize.punkt
    parameters = punkt.PunktTrainer(corpus).get_params()
    monkeypatch.setattr(nltk.data, "path", [])
    assert sentence_splitter.__wrapped__() == (split_by_rule, "built in")
    assert len(split_by_rule(TEXT)) == 3
    monkeypatch.setattr(nltk.data, "path", [str(tmp_path)])  # it writes nowhere else
    punkt.save_punkt_params(parameters, str(folder))
    split, name = sentence_splitter.__wrapped__()
    assert name.startswith("punkt of nltk ")
    assert split(TEXT) == punkt.PunktSentenceTokenizer(parameters).tokenize(TEXT)
    assert len(split(TEXT)) == 2
