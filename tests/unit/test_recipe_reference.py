"""docs/reference/recipe.md and commands.md say what the types and parsers say."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

from pipeline.recipe.stage_list import STAGES
from stages.fields import Section
from stages.recipe import recipe_type

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def maker() -> ModuleType:
    path = ROOT / "docs" / "reference" / "make_reference.py"
    spec = importlib.util.spec_from_file_location("make_reference", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_reference_is_current(maker: ModuleType) -> None:
    written = (ROOT / "docs" / "reference" / "recipe.md").read_text(encoding="utf-8")
    assert written == maker.recipe_reference(), "run: python docs/reference/make_reference.py"


def test_every_key_of_every_section_is_listed(maker: ModuleType) -> None:
    text = maker.recipe_reference()
    headings = set(re.findall(r"^## `?([\w. ]+)", text, re.MULTILINE))
    for name, field in recipe_type(STAGES).model_fields.items():
        section = maker.section_of(field.annotation)
        if section is None:
            assert f"| `{name}` |" in text
            continue
        assert name in headings
        assert issubclass(section, Section)
        part = text.split(f"## `{name}`", 1)[1].split("\n## ", 1)[0]
        for key, inner in section.model_fields.items():
            if maker.section_of(inner.annotation) is None:
                assert f"| `{key}` |" in part
            else:
                assert f"{name}.{key}" in headings


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ("swa_ratio", "number ≥ 0, ≤ 1 | **required**"),
        ("sequence_length", "count | `32768`"),
        ("adam_beta1", "number ≥ 0, < 1 | `0.9`"),
        ("buckets", "list of number ≥ 0, ≤ 1 | `[0, 0.25, 0.5, 0.75, 1]`"),
        ("processes", "integer > 0, ≤ 1,024 or `auto` | `auto`"),
    ],
)
def test_types_are_named_with_their_bounds(maker: ModuleType, row: str, expected: str) -> None:
    assert f"| `{row}` | {expected} |" in maker.recipe_reference()
