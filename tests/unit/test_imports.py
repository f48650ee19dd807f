"""The order of imports: one way and no cycles.

pyproject.toml declares every imported package, and no version below the tested one.
"""

from __future__ import annotations

import ast
import functools
import graphlib
import importlib.metadata
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.elsewhere import ROOT

PACKAGES = ("bosch", "data_prep", "stages", "pipeline")

USES = {
    "bosch": set(),
    "data_prep": {"bosch"},
    "stages": {"bosch", "data_prep"},
    "pipeline": {"bosch", "data_prep", "stages"},
}


@functools.cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def _name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


@functools.cache
def modules() -> dict[str, ast.Module]:
    return {
        _name(path): _tree(path) for package in PACKAGES for path in (ROOT / package).rglob("*.py")
    }


def imports(name: str, nodes: Iterator[ast.AST]) -> set[str]:
    """Project modules that the nodes import; `from package import name` may import a module."""
    result = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            result |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name}: relative import"
            for alias in node.names:
                member = f"{node.module}.{alias.name}"
                result.add(member if member in modules() else str(node.module))
    return {module for module in result if module.partition(".")[0] in (*PACKAGES, "tests")} - {
        name
    }


@functools.cache
def imports_of_modules() -> dict[str, set[str]]:
    return {name: imports(name, ast.walk(tree)) for name, tree in modules().items()}


def test_packages_use_only_packages_below_them() -> None:
    wrong = [
        f"{name} imports {used}"
        for name, all_used in imports_of_modules().items()
        for used in sorted(all_used)
        if used.partition(".")[0] not in USES[name.partition(".")[0]] | {name.partition(".")[0]}
    ]
    assert wrong == []


def test_there_are_no_import_cycles() -> None:
    """Not even in imports for type checkers."""
    graph = graphlib.TopologicalSorter(imports_of_modules())
    order = list(graph.static_order())  # raises CycleError
    assert len(order) >= len(modules())


def test_importing_bosch_imports_neither_torch_nor_transformers() -> None:
    """Nor do `bosch run` and `status` where nothing is to do: tests/e2e/test_command_line.py."""
    code = "import bosch, sys; print({'torch', 'transformers'} & {*sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("set()\n", "")


def test_the_plain_reference_shares_no_code_with_what_it_checks() -> None:
    tree = _tree(ROOT / "tests" / "plain_attention.py")
    assert imports("plain_attention", ast.walk(tree)) == set()


PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
# Modules of a distribution with another name.
_DISTRIBUTION = {"PyNomad": "PyNomadBBO", "vl_convert": "vl-convert-python", "yaml": "pyyaml"}
_OWN = {"bosch", "data_prep", "pipeline", "recipes", "stages", "studies", "tests"}
# The extras in which each folder's imports may be declared; "" is the core, for the library.
_EXTRAS = {
    "bosch": ("", "pipeline", "mlx"),
    "data_prep": ("", "pipeline", "eval"),
    "pipeline": ("", "pipeline"),
    "stages": ("", "pipeline", "eval", "adapt", "gpu"),
    "docs": ("", "pipeline", "test", "docs"),
    "recipes": ("", "pipeline"),
    "studies": ("", "pipeline"),
    "tests": ("", "pipeline", "eval", "adapt", "gpu", "serve", "test", "mlx"),
}
# The dependencies of vllm conflict with ours, and an export to ONNX needs more; triton comes with
# torch's builds for a GPU. On a CPU each has its own environment.
_SEPARATE_ENVIRONMENTS = {"onnx", "onnxruntime-genai", "triton", "vllm"}


def _lines(extra: str) -> list[str]:
    return PROJECT["optional-dependencies"][extra] if extra else PROJECT["dependencies"]


def _declared(*extras: str) -> set[str]:
    return {canonicalize_name(Requirement(line).name) for extra in extras for line in _lines(extra)}


def _packages(nodes: Iterable[ast.AST]) -> set[str]:
    """Distributions of other packages that the nodes import."""
    names: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names.add(str(node.module).partition(".")[0])
    others = names - sys.stdlib_module_names - _OWN
    return {canonicalize_name(_DISTRIBUTION.get(name, name)) for name in others}


@pytest.mark.parametrize("folder", _EXTRAS)
def test_every_package_imported_is_declared(folder: str) -> None:
    declared = _declared(*_EXTRAS[folder]) | _SEPARATE_ENVIRONMENTS
    missing = {
        f"{path.relative_to(ROOT)}: {package}"
        for path in sorted((ROOT / folder).rglob("*.py"))
        for package in _packages(ast.walk(_tree(path))) - declared
    }
    assert not missing


def test_the_library_can_be_imported_with_only_its_own_dependencies() -> None:
    """`pip install .` installs no extra; modules that need one import it when used."""
    core = _declared("")
    missing = {
        f"{path.relative_to(ROOT)}: {package}"
        for path in sorted((ROOT / "bosch").rglob("*.py"))
        if path.parent.name not in ("vllm", "mlx")
        for package in _packages(_tree(path).body) - core
    }
    assert not missing


@pytest.mark.parametrize("extra", ["", *PROJECT["optional-dependencies"]], ids="extra {}".format)
def test_requirements_have_a_lowest_version_and_allow_the_installed_one(extra: str) -> None:
    """`launch/setup.sh oldest` installs the lowest, which it must be able to find in the file."""
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
