"""Every function and test that docs/notes/paper_map.md names exists."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "notes" / "paper_map.md"
REFERENCE = re.compile(r"`([\w/]+\.py)::([\w.]+)`")


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


def test_named_code_exists() -> None:
    references = set(REFERENCE.findall(PAGE.read_text("utf-8")))
    missing = [f"{p}::{name}" for p, name in references if name not in names_in(ROOT / p)]
    assert len(references) > 50 and missing == []
