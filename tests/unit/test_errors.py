"""Messages of any length are cut, and what a terminal would obey is written out."""

from __future__ import annotations

import pytest

from bosch.errors import RunError, UserError, control_character, printable


def test_a_message_shows_the_ends_of_a_value_of_any_length() -> None:
    name = "a" * 5000 + "z" * 5000
    assert str(UserError(f"weights.json: {name} is missing")) == (
        f"weights.json: {'a' * 200}… (10,000 characters) …{'z' * 100} is missing"
    )
    lines = "\n".join(f"fault {number}" for number in range(2000))
    assert str(RunError(lines)) == lines
    assert len(str(UserError(str(list(range(50_000)))))) < 400


def test_words_of_500_and_lines_of_5000_characters_are_whole() -> None:
    word, line = "w" * 500, "a line of " * 500
    assert str(UserError(f"{word} is\n{line}")) == f"{word} is\n{line}"
    assert str(UserError(f"{word}w is")) == f"{'w' * 200}… (501 characters) …{'w' * 100} is"
    assert str(UserError(f"{line}b")) == f"{line[:200]}… (5,001 characters) …{line[-99:]}b"


@pytest.mark.parametrize(
    ("text", "first", "shown"),
    [
        ("a\tb\nc ü → 字", None, "a\tb\nc ü → 字"),
        ("a\tb\nc\x9b\ud800", "\x9b", "a\tb\nc\\x9b\\ud800"),
        ("\x1b[2J\x00\r", "\x1b", "\\x1b[2J\\x00\\r"),
        ("~\x7f\x80 \x9f\xa0\udfff", "\x7f", "~\\x7f\\x80 \\x9f\xa0\\udfff"),
        ("\x0b\x1f", "\x0b", "\\x0b\\x1f"),
    ],
)
def test_what_a_terminal_obeys_is_found_and_written_out(
    text: str, first: str | None, shown: str
) -> None:
    assert (control_character(text), printable(text)) == (first, shown)
