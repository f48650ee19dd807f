"""pyproject.toml declares every package that the code imports, and no version below the tested."""

from __future__ import annotations

import ast
import importlib.metadata
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.elsewhere import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
# Modules of a distribution with another name.
_DISTRIBUTION = {"PyNomad": "PyNomadBBO", "vl_convert": "vl-convert-python", "yaml": "pyyaml"}
_OWN = {"bosch", "data_prep", "pipeline", "recipes", "stages", "tests"}
# Where each folder's imports may be declared; "" is the core, which the library must do with.
_EXTRAS = {
    "bosch": ("", "pipeline", "flash", "vllm", "mlx"),
    "data_prep": ("", "pipeline", "eval"),
    "pipeline": ("", "pipeline"),
    "stages": ("", "pipeline", "eval", "adapt", "gpu"),
    "docs": ("", "pipeline", "test", "docs"),
    "recipes": ("", "pipeline"),
    "tests": ("", "pipeline", "eval", "adapt", "serve", "test", "flash", "vllm", "mlx"),
}
# Of which only a maker of test data has need, by hand.
_BY_HAND = {"tests/data/mds/make_shards.py": {"streaming"}}


def _lines(extra: str) -> list[str]:
    return PROJECT["optional-dependencies"][extra] if extra else PROJECT["dependencies"]


def _declared(*extras: str) -> set[str]:
    return {canonicalize_name(Requirement(line).name) for one in extras for line in _lines(one)}


def _imports(path: Path, top_level: bool = False) -> Iterator[str]:
    """First parts of the modules that a file imports, those of its functions too."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in tree.body if top_level else ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield str(node.module).partition(".")[0]


def _packages(names: Iterator[str]) -> set[str]:
    others = set(names) - sys.stdlib_module_names - _OWN
    return {canonicalize_name(_DISTRIBUTION.get(name, name)) for name in others}


@pytest.mark.parametrize("folder", _EXTRAS)
def test_every_package_imported_is_declared(folder: str) -> None:
    declared = _declared(*_EXTRAS[folder])
    missing = {
        f"{path.relative_to(ROOT)}: {package}"
        for path in sorted((ROOT / folder).rglob("*.py"))
        for package in _packages(_imports(path)) - declared
        if package not in _BY_HAND.get(str(path.relative_to(ROOT)), ())
    }
    assert not missing


def test_the_library_is_imported_with_its_own_dependencies_alone() -> None:
    """`pip install .` brings no extra; what needs one is imported where it is used."""
    core = _declared("")
    missing = {
        f"{path.relative_to(ROOT)}: {package}"
        for path in sorted((ROOT / "bosch").rglob("*.py"))
        if path.parent.name not in ("vllm", "mlx")
        for package in _packages(_imports(path, top_level=True)) - core
    }
    assert not missing


@pytest.mark.parametrize("extra", ["", *PROJECT["optional-dependencies"]], ids="extra {}".format)
def test_requirements_have_a_lowest_version_and_admit_what_is_installed(extra: str) -> None:
    """`launch/setup.sh oldest` installs the lowest: it must be written so that it finds it."""
    for text in _lines(extra):
        requirement = Requirement(text)
        if requirement.name == PROJECT["name"]:
            continue
        line = f"{requirement.name}[{','.join(sorted(requirement.extras))}]".replace("[]", "")
        assert re.match(rf"{re.escape(line)}>=\d+(\.\d+)*([,;]|$)", text), text
        try:
            version = importlib.metadata.version(requirement.name)
        except importlib.metadata.PackageNotFoundError:
            continue
        assert requirement.specifier.contains(version, prereleases=True), (text, version)
