"""Write recipe.md, recipe.schema.json, commands.md and python.md from the program's own types,
parsers and docstrings.

    python docs/reference/make_reference.py

tests/unit/test_recipe_reference.py fails while the pages and the program differ.
"""

from __future__ import annotations

import inspect
import json
import sys
import types
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic.fields import FieldInfo
from pydantic.json_schema import GenerateJsonSchema

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import bosch  # noqa: E402
from bosch.commands import command_parser  # noqa: E402
from pipeline.cli import commands  # noqa: E402
from pipeline.recipe.faults import nested_section  # noqa: E402
from pipeline.recipe.stage_list import STAGES  # noqa: E402
from stages.fields import (  # noqa: E402
    Section,
    parse_count,
    parse_flag,
    parse_number,
)
from stages.stage import recipe_type  # noqa: E402

FOLDER = ROOT / "docs" / "reference"

INTRODUCTION = """\
# Recipe reference

<!-- Written by docs/reference/make_reference.py from the sections in
stages/*/stage.py. -->

A recipe is one YAML file. A key that is not listed here is refused.
With `# yaml-language-server: $schema=…/docs/reference/recipe.schema.json` as its first line, an
editor completes keys and checks values. The sections `train`, `evaluate` and `measure` may
be left out; their stages then do not run. Any value can be replaced on the command line by its
dotted path, as in `search.swa_ratio=0.5` or `prepare.sources.0.weight=2`.

- *count*: a positive integer, or one with a suffix: `32k` (× 1,024), `2M` (× 1,048,576), `2.5B`
  (× 1,000,000,000).
- *size*: bytes, or `512MiB`, `40GB`.
- *number*: also `1e-5`, which plain YAML would read as text.
- *path*: relative paths start at the recipe's folder; in an override, at the current directory; in
  a default, at the checkout.
"""

# Texts that stand for other values, as patterns: editors run no code.
_WRITTEN = {
    parse_count: r"^\s*[0-9][0-9_,]*(\.[0-9]+)?\s*[kKmMbB]?\s*$",
    parse_number: r"^[-+]?[0-9.]+([eE][-+]?[0-9]+)?$",
    parse_flag: r"^(yes|on|true|no|off|false)$",
}

_BOUNDS = {
    "ge": "minimum", "gt": "exclusiveMinimum", "le": "maximum", "lt": "exclusiveMaximum",
}  # fmt: skip

COMMANDS_INTRODUCTION = """\
# Command reference

<!-- Written by docs/reference/make_reference.py from the commands' parsers. -->

`bosch COMMAND …` needs the project's environment: `source .venv/bin/activate` first, or call
`.venv/bin/bosch`. It works from any folder; `python -m pipeline COMMAND …` in the checkout is the
same program. `bosch --version` prints the version, `bosch completion bash` a script that completes
commands, options and files.
Where only the library is installed (`pip install .`), `bosch` has the commands `show` and `export`.
`launch/torchrun.sh` takes the arguments of `run`, installs the environment if it is missing, and
uses all GPUs. Overrides, `key.path=value`, may stand before, between and after options; values are
YAML.

| exit status | meaning |
|---|---|
| 0 | done |
| 1 | a failure, such as a full disk; some task has no score (`validate`: will have none) |
| 2 | an invalid recipe, option or input file |
| 75 | asked to stop by a signal, and the work is saved: a scheduler may queue the command again |
| 130 | stopped by Ctrl-C |
"""

PYTHON_INTRODUCTION = """\
# Python reference

<!-- Written by docs/reference/make_reference.py from the docstrings in bosch/. -->

The library's functions for programs that do more than [load a hybrid](../guide/load.md): apply a
head mask to a loaded model, or make and save a hybrid without a recipe.

```python
import bosch
from transformers import AutoTokenizer

base = "recipes/quickstart/base_model"
model = bosch.load_model(base, dtype="float32")
tokenizer = AutoTokenizer.from_pretrained(base)
file = bosch.HeadMaskFile.load("recipes/masks/quickstart/bosch-0.75.json")
inputs = tokenizer("def main(", return_tensors="pt")

with bosch.head_mask(model, file.mask):  # weights stay as they are
    logits = model(**inputs).logits
hybrid = bosch.materialize(model, file.mask)  # the same logits, and a smaller cache
hybrid.save_pretrained("my_hybrid")
tokenizer.save_pretrained("my_hybrid")
```

`bosch.HeadMask(((64, 64, 0, 0), (0, 0, 64, 0)))` makes a mask by hand, here for two layers of four
KV heads: the window of each, 0 for a full head. `import bosch` does not load torch or transformers;
the names below load them on first use. `help(bosch.materialize)` shows arguments, shapes and
errors.

| `bosch.` | |
|---|---|
"""


def recipe_reference() -> str:
    """Text of recipe.md."""
    return INTRODUCTION + "".join(_sections(recipe_type(STAGES), "", "The recipe"))


class _RecipeSchema(GenerateJsonSchema):
    """A schema that knows the texts which stand for counts, sizes, numbers and flags."""

    def function_before_schema(self, schema: Any) -> dict[str, Any]:
        inner = super().function_before_schema(schema)
        pattern = _WRITTEN.get(schema["function"]["function"])
        return {"anyOf": [inner, {"type": "string", "pattern": pattern}]} if pattern else inner


def recipe_schema() -> str:
    """Text of recipe.schema.json: what editors complete and check while a recipe is written."""
    recipe = recipe_type(STAGES)
    schema = _with_bounds(recipe.model_json_schema(schema_generator=_RecipeSchema))
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    # A default that the loader fills in.
    filled = [name for name, text in recipe.descriptions().items() if "default:" in text]
    schema["required"] = [name for name in schema["required"] if name not in filled]
    return json.dumps(schema, indent=2, ensure_ascii=False) + "\n"


def _with_bounds(schema: Any) -> Any:
    """The schema with JSON's names of bounds, where pydantic leaves its own behind a parser."""
    if isinstance(schema, list):
        return [_with_bounds(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    return {_BOUNDS.get(key, key): _with_bounds(value) for key, value in schema.items()}


def command_reference() -> str:
    """Text of commands.md."""
    return COMMANDS_INTRODUCTION + "".join(
        _command(name, module) for name, module in commands().items()
    )


def python_reference() -> str:
    """Text of python.md."""
    return PYTHON_INTRODUCTION + "".join(
        f"| `{name}` | {_escape(_first_paragraph(getattr(bosch, name)))} |\n"
        for name in sorted(bosch.__all__, key=str.lower)
    )


def _first_paragraph(documented: Any) -> str:
    return " ".join((inspect.getdoc(documented) or "").partition("\n\n")[0].split())


def _command(name: str, module: types.ModuleType) -> str:
    """A table of a command's arguments and options."""
    parser, rows, about = command_parser(name, module), [], module.COMMAND.help
    for action in parser._actions:
        if "--help" not in action.option_strings:
            choices = "|".join(map(str, action.choices or []))
            words = action.metavar or choices or action.dest.upper()
            option = " ".join(action.option_strings)
            takes_value = not option or action.nargs != 0
            usage = f"{option} {words}" if option and takes_value else option or words
            meaning = (action.help or "") % {"default": action.default, "prog": parser.prog}
            rows.append(f"| `{_escape(usage)}` | {_escape(meaning)} |\n")
    table = "\n| argument | meaning |\n|---|---|\n" + "".join(rows)
    return f"\n## {name}\n\n{about[0].upper()}{about[1:]}.\n{table}"


def _sections(model: type[Section], path: str, heading: str) -> Iterator[str]:
    """A table of the section's plain fields, then the sections inside it."""
    inner: list[tuple[str, FieldInfo, type[Section]]] = []
    rows, descriptions = [], model.descriptions()
    for name, field in model.model_fields.items():
        section, _ = nested_section(field.annotation)
        if section is not None:
            inner.append((name, field, section))
        else:
            kind = _kind(field.annotation, field.metadata)
            about = descriptions[name]
            default = _default(field, about)
            rows.append(f"| `{name}` | {kind} | {default} | {_escape(about)} |\n")
    about = f"\n{model.__doc__}\n" if path and model.__doc__ else ""
    yield f"\n## {heading}\n{about}"
    if rows:
        yield "\n| key | type | default | meaning |\n|---|---|---|---|\n" + "".join(rows)
    for name, field, section in sorted(inner, key=lambda one: one[0] == "runtime"):
        below = f"{path}.{name}" if path else name
        many = get_origin(field.annotation) is list
        mark = ", a list" if many else ""
        mark += ", required" if field.is_required() else ""
        yield from _sections(section, below, f"`{below}`{mark}")


def _kind(annotation: Any, metadata: Sequence[Any] = ()) -> str:
    """A type with its bounds, as a recipe's writer names it."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        inner = [
            bound.metadata if isinstance(bound, FieldInfo) else [bound] for bound in arguments[1:]
        ]
        return _kind(arguments[0], [item for items in inner for item in items])
    parsers = {getattr(item, "func", None) for item in metadata}
    if parse_count in parsers:
        return "count"
    if origin is Literal:
        return ", ".join(f"`{value}`" for value in arguments)
    if origin is list:
        return f"list of {_kind(arguments[0])}"
    if origin is dict:
        return f"{_kind(arguments[0])} to {_kind(arguments[1])}"
    if origin in (Union, types.UnionType):
        return " or ".join(_kind(argument) for argument in arguments if argument is not type(None))
    words = {str: "text", int: "integer", float: "number", bool: "true or false", Any: "any value"}
    name = words[annotation]
    return ", ".join([name, *_bounds(metadata)]).replace(", ", " ", 1)


def _bounds(metadata: Sequence[Any]) -> list[str]:
    signs = ((Ge, "ge", "≥"), (Gt, "gt", ">"), (Le, "le", "≤"), (Lt, "lt", "<"))
    return [
        f"{sign} {getattr(item, name):,}"
        for item in metadata
        for kind, name, sign in signs
        if isinstance(item, kind)
    ]


def _default(field: FieldInfo, about: str) -> str:
    if field.is_required():
        # A default that the loader fills in stands in the description.
        return "see meaning" if "default:" in about else "**required**"
    value = field.get_default(call_default_factory=True)
    if value is None:
        return "none"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, list):
        return "`[" + ", ".join(_plain(item) for item in value) + "]`"
    return f"`{_plain(value)}`"


def _plain(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:g}"
    return f"{value:_}" if isinstance(value, int) and value >= 100_000 else str(value)


def _escape(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    for page, text in (
        ("recipe.md", recipe_reference()),
        ("recipe.schema.json", recipe_schema()),
        ("commands.md", command_reference()),
        ("python.md", python_reference()),
    ):
        (FOLDER / page).write_text(text, encoding="utf-8")
        sys.stdout.write(f"{(FOLDER / page).relative_to(ROOT)} written\n")
