"""The pages and the schema in docs/reference are those of the recipe's types and the parsers."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import jsonschema
import pydantic
import pytest

from pipeline.recipe.faults import known_paths
from pipeline.recipe.stage_list import STAGES
from pipeline.recipe.yaml_file import read_mapping
from stages.stage import recipe_type

ROOT = Path(__file__).resolve().parents[2]
_PINS = (ROOT / "launch" / "tested" / "pipeline.txt").read_text(encoding="utf-8")
PYDANTIC = _PINS.partition("\npydantic==")[2].split()[0]
# Releases of pydantic order a schema's words differently.
by_pydantic = pytest.mark.skipif(
    pydantic.VERSION != PYDANTIC, reason=f"the schema is as pydantic {PYDANTIC} writes it"
)
RECIPES = sorted([*ROOT.glob("recipes/*.yaml"), *ROOT.glob("recipes/*/*.yaml")])


@pytest.fixture(scope="module")
def maker() -> ModuleType:
    path = ROOT / "docs" / "reference" / "make_reference.py"
    spec = importlib.util.spec_from_file_location("make_reference", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def schema(maker: ModuleType) -> Any:
    return jsonschema.Draft202012Validator(json.loads(maker.recipe_schema()))


@pytest.mark.parametrize(
    ("page", "function"),
    [
        ("recipe.md", "recipe_reference"),
        pytest.param("recipe.schema.json", "recipe_schema", marks=by_pydantic),
        ("commands.md", "command_reference"),
        ("python.md", "python_reference"),
    ],
)
def test_reference_is_current(maker: ModuleType, page: str, function: str) -> None:
    written = (ROOT / "docs" / "reference" / page).read_text(encoding="utf-8")
    assert written == getattr(maker, function)(), "run: python docs/reference/make_reference.py"


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_the_schema_that_a_recipe_names_accepts_it(schema: Any, recipe: Path) -> None:
    first, _, _ = recipe.read_text(encoding="utf-8").partition("\n")
    mark, _, named = first.partition("$schema=")
    assert mark == "# yaml-language-server: "
    assert (recipe.parent / named).resolve() == ROOT / "docs" / "reference" / "recipe.schema.json"
    schema.validate(read_mapping(recipe))


@pytest.mark.parametrize(
    ("keys", "value", "accepted"),
    [
        (("search", "swa_ration"), 0.5, False),
        (("search", "swa_ratio"), 1.5, False),
        (("search", "swa_ratio"), "7e-1", True),
        (("search", "window_size"), "1k", True),
        (("search", "window_size"), "wide", False),
        (("search", "method"), "bosh", False),
        (("runtime", "offload_activations"), "yes", True),
        (("runtime", "offload_activations"), 1, False),
        (("train",), None, True),
        (("model",), None, False),
    ],
)
def test_the_schema_accepts_what_a_recipe_may_hold(
    schema: Any, keys: tuple[str, ...], value: Any, accepted: bool
) -> None:
    content = read_mapping(ROOT / "recipes" / "quickstart.yaml")
    inner = content
    for key in keys[:-1]:
        inner = inner.setdefault(key, {})
    inner[keys[-1]] = value
    assert schema.is_valid(content) is accepted


def test_every_key_is_in_its_sections_table(maker: ModuleType) -> None:
    _, *parts = re.split(r"^## `?([\w. ]+)", maker.recipe_reference(), flags=re.MULTILINE)
    tables = dict(zip(parts[::2], parts[1::2], strict=True))
    for path in known_paths(recipe_type(STAGES)):
        path = path.replace(".0", "")  # of a list's items
        section, _, key = path.rpartition(".")
        assert path in tables or f"| `{key}` |" in tables[section or "The recipe"]
