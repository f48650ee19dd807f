from __future__ import annotations

import json

import pytest

from bosch.errors import RunError, UserError
from data_prep.documents.calibration import CalibrationNeedles, needle_prompts, write_calibration
from data_prep.tasks.needles import pair_owner, string_match
from data_prep.text import essay_identity, haystack_words
from tests.ruler_case import essay_text

TASKS = ["niah_single_2", "niah_multikey_2", "niah_multikey_3"]


def prompts_of(space, tokenizer, count=9):
    words = essay_text().split()
    return list(needle_prompts(TASKS, count, 1024, lambda task: 32, space, 42, tokenizer, words))


def test_seed_spaces_share_no_needle_and_no_haystack(tokenizer):
    beginnings = set()
    for space in ("calibration", "evaluation"):
        prompts = prompts_of(space, tokenizer)
        pairs = {tuple(pair) for prompt in prompts for pair in prompt.needles}
        assert {pair_owner(*pair) for pair in pairs} == {space} and len(pairs) == 9
        assert [prompt.task for prompt in prompts] == TASKS * 3
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
