"""The tool that changes lines at random and counts the changes that tests notice."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest

from tests.tools.mutate import finished, first_failure, mutated, nearest_tests, read_contexts


@pytest.mark.parametrize(
    "name", ["tests/a.py", "tests/a.py::test_b", "tests/a.py::test_b[x - y]", "a.py::b[c d-[1]]"]
)
@pytest.mark.parametrize("reason", ["", " - assert 0 - [1]", " - Exception"])
def test_the_failure_is_named_whole(name: str, reason: str) -> None:
    assert first_failure(f"1 failed\nFAILED {name}{reason}\nERROR c.py\n") == name
    assert first_failure("1 passed\n") is None


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("a < b", ["a <= b"]), ("a and b", ["a or b"]), ("a + b", ["a - b"]), ("3", ["4"]),
        ("True", ["False"]), ("a if b else c", ["c if b else a"]), ("f(a, b)", ["f(b, a)"]),
        ("min(a, b)", ["max(a, b)"]), ("sorted(a)", ["list(a)"]), ("a / 'x'", []), ("f(a)", []),
    ],
)  # fmt: skip
def test_a_plausible_mistake_and_none_that_changes_nothing(before: str, after: list[str]) -> None:
    node = ast.parse(before, mode="eval").body
    assert [ast.unparse(changed) for changed in mutated(node)] == after


def test_tests_that_ran_a_line_come_first(tmp_path: Path) -> None:
    report = tmp_path / "coverage.json"
    own, other = "tests/unit/test_attention.py", "tests/unit/test_heads.py"
    contexts = {
        "7": ["tests.unit.test_attention.test_bands", f"{other}::test_keys[1] (call)", ""],
        "8": [f"{own}::test_bands (setup)|tests.unit.test_attention_of.test"],
        "9": [""],
    }
    file = "stages/evaluate/cost.py"
    report.write_text(json.dumps({"files": {file: {"contexts": contexts}}}))
    ran = read_contexts(report)
    assert ran == {(file, 7): {own, other}, (file, 8): {own}, (file, 9): set()}
    nearest = nearest_tests(file, 4)
    assert own not in nearest and len(nearest) == 4
    assert nearest_tests(file, 4, frozenset({own})) == [own, *nearest[:3]]


def test_a_run_goes_on_after_the_last_whole_row_of_its_log(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert finished(None) == finished(log) == {}
    log.write_text("survived\ta.py:1: a  ->  b\nkilled by x\ta.py:2: c  ->  d\nkil")
    assert finished(log) == {"a.py:1: a  ->  b": "survived", "a.py:2: c  ->  d": "killed by x"}
