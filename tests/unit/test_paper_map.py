"""Every function and test that docs/notes/paper_map.md names exists."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "notes" / "paper_map.md"
REFERENCE = re.compile(r"`([\w/]+\.py)::([\w.]+)`")


def rows() -> list[list[str]]:
    """Cells of the page's table rows, without headers and rules."""
    lines = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line[:2] == "| "]
    cells = [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in lines]
    return [row for row in cells if row[0] != "paper"]


@functools.cache
def names_in(path: Path) -> set[str]:
    """Functions, classes, methods as Class.method, and assigned names of a module."""
    names = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            inner = [part for part in node.body if isinstance(part, ast.FunctionDef)]
            names |= {f"{node.name}.{part.name}" for part in inner}
        targets = node.targets if isinstance(node, ast.Assign) else []
        targets = [node.target] if isinstance(node, ast.AnnAssign) else targets
        names |= {target.id for target in targets if isinstance(target, ast.Name)}
    return names


@pytest.mark.parametrize(("path", "name"), sorted(set(REFERENCE.findall(PAGE.read_text("utf-8")))))
def test_named_code_exists(path: str, name: str) -> None:
    assert (ROOT / path).is_file()
    assert name in names_in(ROOT / path)


def test_every_row_names_code_and_a_test() -> None:
    assert len(rows()) >= 20
    for row in rows():
        subject, code, tests = row
        assert any(not path.startswith("tests/") for path, _ in REFERENCE.findall(code)), subject
        named = REFERENCE.findall(tests)
        assert named, subject
        assert all(
            path.startswith("tests/") and name.startswith("test_") for path, name in named
        ), subject
