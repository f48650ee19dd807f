"""Recorded digests of the stages' code when their versions were last reviewed.

    python -m tests.tools.stage_code

writes tests/tools/stage_code.json again: the digest of every module that a stage imports, directly
or not, or loads by name, and the stages' versions. A test fails while the file is behind. Whoever
runs this answers one question first: do results change? If so, the version of each stage named is
raised.

Comments, docstrings, annotations and layout are no part of a digest.
"""

from __future__ import annotations

import ast
import hashlib
import json
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from bosch.backends import BACKENDS
from bosch.search.methods import METHODS
from data_prep.documents.sources import KINDS
from pipeline.recipe.stage_list import STAGES
from stages.evaluate import suites
from stages.evaluate.answers import VERSIONS

ROOT = Path(__file__).resolve().parents[2]
FILE = Path(__file__).with_suffix(".json")
_PACKAGES = ("bosch", "data_prep", "stages")
# What the key of the answers that runs share stands for: its GENERATION and SCORING count as the
# version of a stage.
ANSWERS = "answers"
# What a suite loads by name: the module of its class, and what makes its prompts.
_OF_SUITES = {
    module
    for section in suites.SUITES.values()
    for module in (section.runner.partition(":")[0], f"{section.__module__}.samples")
}
_METHODS = "bosch.search.methods"
# What modules load by name, whether there is such a module or not.
_BY_NAME = {
    suites.__name__: _OF_SUITES,
    "bosch.search.runs": {
        *(method.runner.partition(":")[0] for method in METHODS.values()),
        *(
            f"{_METHODS}.{file.stem}"
            for file in ROOT.joinpath(*_METHODS.split(".")).glob("[!_]*.py")
        ),
    },
    "bosch.attention": {entry.function.partition(":")[0] for entry in BACKENDS.values()},
    "data_prep.documents.tokenization": {
        *(type(kind).__module__ for kind in KINDS.values()),
        *(f"data_prep.documents.{name}" for name in ("mds", "records", "retrieval", "tokenizer")),
    },
}
# Sentences, progress bars and formats of numbers are no results.
_NO_RESULT = {"bosch.errors", "bosch.progress", "stages.versions"}
_SKIPPED_FIELDS = {"annotation", "returns", "type_comment", "kind", "type_params", "ctx"}


def current() -> dict[str, Any]:
    """Versions by stage, and digests by module."""
    modules = {module for stage in STAGES for module in closure(entry(stage.function))}
    return {
        "versions": {**{stage.name: stage.version for stage in STAGES}, ANSWERS: VERSIONS},
        "modules": {module: digest(source(module)) for module in sorted(modules)},
    }


def behind(recorded: dict[str, Any], now: dict[str, Any]) -> dict[str, list[str]]:
    """Changed modules by stage, for the stages whose version is the recorded one."""
    before, after = recorded["modules"], now["modules"]
    changed = {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}
    closures = {stage.name: closure(entry(stage.function)) for stage in STAGES}
    closures[ANSWERS] = {one for suite in _OF_SUITES if path(suite) for one in closure(suite)}
    stages = {}
    for name, modules in closures.items():
        same = recorded["versions"].get(name) == now["versions"].get(name)
        if same and changed & modules:
            stages[name] = sorted(changed & modules)
    return stages


def entry(function: str) -> str:
    return function.partition(":")[0]


def closure(module: str) -> set[str]:
    """A module and all project modules that it imports, directly or not."""
    modules, pending = set(), [module]
    while pending:
        one = pending.pop()
        if one not in modules and one not in _NO_RESULT:
            modules.add(one)
            pending += imports(one)
            pending += filter(path, _BY_NAME.get(one, ()))
    return modules


@cache
def imports(module: str) -> Sequence[str]:
    """The project modules that a module's code names in imports."""
    names = imported(ast.parse(source(module)))
    return [name for name in names if name.split(".")[0] in _PACKAGES and path(name)]


def imported(tree: ast.AST) -> Iterator[str]:
    """Modules that the imports of a source text name; of what may be one, its dotted name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def path(module: str) -> Path | None:
    """The file of a module or package; None for a name that is neither."""
    base = ROOT.joinpath(*module.split("."))
    candidates = (base.with_suffix(".py"), base / "__init__.py")
    return next((file for file in candidates if file.is_file()), None)


def source(module: str) -> str:
    file = path(module)
    assert file is not None, module
    return file.read_text(encoding="utf-8")


@cache
def digest(text: str) -> str:
    """Hash of what a source text does, the same for every version of Python."""
    return hashlib.sha256(repr(_plain(ast.parse(text))).encode()).hexdigest()[:16]


def _plain(node: Any) -> Any:
    """Syntax as nested tuples, without docstrings, annotations and empty fields."""
    if isinstance(node, list):
        return tuple(_plain(item) for item in node)
    if not isinstance(node, ast.AST):
        return node
    fields = []
    for name, value in ast.iter_fields(node):
        if name in _SKIPPED_FIELDS or value is None or value == []:
            continue
        if name == "body" and isinstance(value, list):
            value = [item for item in value if not _is_text(item)]
        fields.append((name, _plain(value)))
    return type(node).__name__, tuple(fields)


def _is_text(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


def main() -> int:
    now = current()
    recorded = json.loads(FILE.read_text()) if FILE.exists() else {"modules": {}, "versions": {}}
    for stage, modules in behind(recorded, now).items():
        print(f"{stage}, still version {now['versions'][stage]}: {', '.join(modules)}")
    FILE.write_text(json.dumps(now, indent=1) + "\n")
    print(f"{FILE.relative_to(ROOT)} written; raise version in a stage whose results change")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
