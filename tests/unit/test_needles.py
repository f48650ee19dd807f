from __future__ import annotations

import json
import re

import numpy as np
import pytest

from bosch.errors import RunError, UserError
from data_prep.documents.calibration import CalibrationNeedles
from data_prep.tasks.needles import (
    Draft,
    forced_ids,
    largest_fit,
    make_sample,
    pair_owner,
    string_match,
)
from data_prep.tasks.samples import StoredSample
from data_prep.tasks.tables import NEEDLES
from data_prep.tasks.words import ADJECTIVES, NOUNS
from data_prep.text import encode_prompt, essay_identity, haystack_words
from tests.tiny_data import tiny_tokenizer


@pytest.fixture(scope="module")
def tokenizer():
    return tiny_tokenizer()


@pytest.fixture(scope="module")
def words():
    return haystack_words(None)


def sample_of(task, tokenizer, words, *, length=1024, space="evaluation", seed=42, index=0, new=32):
    return make_sample(task, length, tokenizer, space, seed, index, new, words)


def count(sample: Draft, tokenizer, new: int) -> int:
    return len(encode_prompt(tokenizer, sample.text)) + new


@pytest.mark.parametrize("task", NEEDLES)
def test_sample_has_rulers_form(task, tokenizer, words):
    sample = sample_of(task, tokenizer, words)
    noun = "uuid" if task in ("niah_single_3", "niah_multikey_3") else "number"
    key = {value: key for key, value in sample.needles}[sample.answers[0]]
    lines = sample.prompt.split("\n")
    assert lines[0] == (
        f"A special magic {noun} is hidden within the following text. Make sure to memorize it. "
        f"I will quiz you about the {noun} afterwards."
    )
    assert lines[-1] == (
        f"What is the special magic {noun} for {key} mentioned in the provided text?"
    )
    assert sample.prefix == (
        f" The special magic {noun} for {key} mentioned in the provided text is"
    )
    for needle_key, value in sample.needles:
        needle = f"One of the special magic {noun}s for {needle_key} is: {value}."
        assert sample.prompt.count(needle) == 1


@pytest.mark.parametrize(
    ("task", "needles"),
    [("niah_single_1", 1), ("niah_single_2", 1), ("niah_single_3", 1), ("niah_multikey_1", 4)],
)
def test_number_of_needles(task, needles, tokenizer, words):
    assert len(sample_of(task, tokenizer, words).needles) == needles


def test_haystacks(tokenizer, words):
    noise = sample_of("niah_single_1", tokenizer, words).prompt.split("\n")[1:-1]
    kinds = {line for line in noise if not line.startswith("One of")}
    assert kinds == {
        "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
    }
    lines = sample_of("niah_multikey_2", tokenizer, words).prompt.split("\n")[1:-1]
    pattern = re.compile(r"One of the special magic numbers for [a-z]+-[a-z]+ is: [1-9]\d{6}\.")
    assert len(lines) > 5 and all(pattern.fullmatch(line) for line in lines)
    uuids = sample_of("niah_multikey_3", tokenizer, words).prompt.split("\n")[1:-1]
    form = r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}"
    assert all(re.fullmatch(rf"One of .* uuids for {form} is: {form}\.", line) for line in uuids)


def test_evaluation_essay_is_the_first_words_in_order(tokenizer, words):
    sample = sample_of("niah_multikey_1", tokenizer, words)
    context = sample.prompt.split("\n")[1]
    for key, value in sample.needles:
        context = context.replace(f"One of the special magic numbers for {key} is: {value}.", "")
    assert context.split() == words[: len(context.split())]
    numbered = [f"word{number}" for number in range(3000)]
    for space in ("calibration", "training"):
        samples = [
            sample_of("niah_single_2", tokenizer, numbered, space=space, index=index)
            for index in range(4)
        ]
        firsts = {re.search(r"word\d+", one.prompt)[0] for one in samples}
        assert len(firsts) == 4 and "word0" not in firsts


def test_short_essay_is_tiled(tokenizer):
    essay = ["Short", "it", "is.", "But", "prose!"]
    context = sample_of("niah_single_2", tokenizer, essay).prompt.split("\n")[1]
    rest = re.sub(r"One of .*? is: \d+\.", "", context).split()
    assert len(rest) > 100 and rest == (essay * 1000)[: len(rest)]


@pytest.mark.parametrize("length", [512, 1024, 2048])
@pytest.mark.parametrize("task", NEEDLES)
def test_samples_fill_the_length(task, length, tokenizer, words):
    for index in range(3):
        sample = sample_of(task, tokenizer, words, length=length, index=index)
        used = count(sample, tokenizer, 32)
        line = max(
            len(tokenizer(text)["input_ids"]) for text in sample.prompt.split("\n")[2:-1] or ["w"]
        )
        unit = line + 1 if NEEDLES[task].haystack != "essay" else 8
        assert length - unit < used <= length


@pytest.mark.parametrize("task", NEEDLES)
def test_teacher_forced_form_fills_the_length(task, tokenizer, words):
    sample = sample_of(task, tokenizer, words, length=600, space="calibration", new=None)
    prompt, answer = forced_ids(sample, tokenizer)
    assert tokenizer.decode(prompt).endswith("mentioned in the provided text is:")
    assert tokenizer.decode(answer) == f" {sample.answers[0]}"
    assert 600 - 80 < len(prompt) + len(answer) <= 600


def test_same_arguments_give_the_same_sample(tokenizer, words):
    first = sample_of("niah_multikey_2", tokenizer, words)
    assert first == sample_of("niah_multikey_2", tiny_tokenizer(), words)
    assert first != sample_of("niah_multikey_2", tokenizer, words, index=1)
    assert first != sample_of("niah_multikey_2", tokenizer, words, seed=1)


@pytest.mark.parametrize("task", ["niah_single_2", "niah_multikey_2", "niah_multikey_3"])
def test_seed_spaces_share_no_needle(task, tokenizer, words):
    spaces = ("calibration", "evaluation", "training")
    pairs_of = {
        space: {
            pair
            for index in range(5)
            for pair in sample_of(task, tokenizer, words, space=space, index=index).needles
        }
        for space in spaces
    }
    assert all(pairs_of.values())
    for space, pairs in pairs_of.items():
        assert {pair_owner(*pair) for pair in pairs} == {space}


def test_needles_do_not_depend_on_the_length_left_by_the_tokenizer(tokenizer, words):
    short = sample_of("niah_multikey_2", tokenizer, words, new=200)
    long = sample_of("niah_multikey_2", tokenizer, words, new=0)
    assert len(long.needles) > len(short.needles)
    assert long.needles[: len(short.needles)] == short.needles


def test_a_sample_with_a_needle_or_the_prompt_of_the_calibration_set_is_refused():
    sample = StoredSample("vt", 3, np.zeros(1), [], "", "", [("a", "1"), ("b", "2")], "digest")
    CalibrationNeedles(frozenset({("a", "2")}), frozenset({"other"})).check(sample)
    for pairs, prompts, said in (({("b", "2")}, (), "the needle"), ((), {"digest"}, "its whole")):
        with pytest.raises(RunError, match=f"vt 3 shares {said}"):
            CalibrationNeedles(frozenset(pairs), frozenset(prompts)).check(sample)


def test_keys_of_a_sample_are_distinct(tokenizer, words):
    sample = sample_of("niah_multikey_2", tokenizer, words, length=16384)
    assert len({key for key, _ in sample.needles}) == len(sample.needles) > 200


def test_too_short_a_length_is_refused(tokenizer, words):
    with pytest.raises(UserError, match="niah_single_1 does not fit into 60 tokens"):
        sample_of("niah_single_1", tokenizer, words, length=60)


def test_unknown_task_is_refused(tokenizer, words):
    with pytest.raises(UserError, match="niah_single_9 is no needle task"):
        sample_of("niah_single_9", tokenizer, words)


@pytest.mark.parametrize("rate", [0.3, 1.0, 7.7])
@pytest.mark.parametrize("guess", [1.0, 3.0, 40.0])
def test_fit_is_found_in_few_steps(rate, guess):
    calls = []

    def tokens(size: int) -> int:
        calls.append(size)
        return 50 + round(rate * size)

    size = largest_fit(tokens, 4096, guess, 0, "task")
    assert tokens(size) <= 4096 < tokens(size) + max(guess, rate) + 1
    assert len(calls) < 20


def test_fit_ends_when_counts_never_grow():
    assert largest_fit(lambda size: 10, 4096, 2.0, 1, "task") > 1


def test_word_lists():
    for words in (ADJECTIVES, NOUNS):
        assert len(words) >= 150 and len(set(words)) == len(words)
        assert all(re.fullmatch("[a-z]+", word) for word in words)


def test_essay_folder(tmp_path):
    (tmp_path / "b.txt").write_text("three\n four")
    (tmp_path / "a.md").write_text("one  two")
    (tmp_path / "c.json").write_text(json.dumps({"text": "five"}))
    words = haystack_words(tmp_path)
    assert words == ["one", "two", "three", "four", "five"]
    assert essay_identity(tmp_path, words)["words"] == 5


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"good \xff bad", r"a\.txt: not UTF-8 at byte 5 \(0xff\)"),
        ("a.json", b"{", r"a\.json: expected a JSON object"),
        ("a.txt", b" \n", "hold no text"),
        ("a.bin", b"x", "holds no .txt"),
    ],
)
def test_damaged_essay_folder(tmp_path, name, content, message):
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
def test_string_match(output, answers, score, of_any):
    """As string_match_all and string_match_part of RULER's scripts/eval/synthetic/constants.py."""
    assert string_match(output, answers) == score
    assert string_match(output, answers, any_answer=True) == of_any
