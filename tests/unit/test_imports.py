"""The order of imports: one way, no cycles, and no project module imported in a function."""

from __future__ import annotations

import ast
import graphlib
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("bosch", "data_prep", "stages", "pipeline")

# From the ground up: a module may use what stands below it, and what stands beside it in its own
# package. Names on one line are on one floor.
FLOORS = {
    "bosch": (
        (
            "errors",
            "hardware",
            "progress",
            "this_process",
            "ranks",
            "journal",
            "files",
            "heads",
            "front",
            "units",
            "context_split",
            "window",
            "budget",
            "backends",
            "version",
            "weight_files",
        ),
        ("attention",),
        ("model",),
        ("vllm", "mlx"),
        ("objective",),
        ("baselines", "analysis"),
        ("search",),
        ("commands",),
        ("console",),
    ),
    "data_prep": (("text",), ("tasks",), ("documents",)),
    "pipeline": (("recipe",), ("run",), ("commands",), ("cli",), ("__main__",)),
}
USES = {
    "bosch": set(),
    "data_prep": {"bosch"},
    "stages": {"bosch", "data_prep"},
    "pipeline": {"bosch", "data_prep", "stages"},
}
# Imports that stand in a function, and why.
_TRANSFORMERS = "`import bosch` loads neither torch nor transformers, only waits for the latter"
LAZY = {
    "bosch.model.registration imports bosch.model.configuration": _TRANSFORMERS,
    "bosch.model.registration imports bosch.model.deploy_mode": _TRANSFORMERS,
    "bosch.model.registration imports bosch.model.interface": _TRANSFORMERS,
}


def modules() -> dict[str, ast.Module]:
    files = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
    return {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): ast.parse(
            path.read_text(encoding="utf-8")
        )
        for path in files
    }


MODULES = modules()


def imports(name: str, nodes: Iterator[ast.AST]) -> set[str]:
    """Modules of the project that the nodes import; a name of a package is its module, if any."""
    result = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            result |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name}: relative import"
            for alias in node.names:
                member = f"{node.module}.{alias.name}"
                result.add(member if member in MODULES else str(node.module))
    return {one for one in result if one.partition(".")[0] in (*PACKAGES, "tests")} - {name}


def functions(tree: ast.Module) -> Iterator[ast.AST]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from ast.walk(node)


def type_checking(tree: ast.Module) -> Iterator[ast.AST]:
    """What only type checkers import."""
    for node in tree.body:
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            yield from ast.walk(node)


IMPORTS = {name: imports(name, ast.walk(tree)) for name, tree in MODULES.items()}


def floor(name: str) -> int:
    package, _, rest = name.partition(".")
    own = rest.partition(".")[0]
    floors = [number for number, names in enumerate(FLOORS[package]) if own in names]
    assert floors, f"{name} stands on no floor; add it to FLOORS and to the design"
    return floors[0]


def test_packages_use_only_those_below_them() -> None:
    wrong = [
        f"{name} imports {used}"
        for name, all_used in IMPORTS.items()
        for used in sorted(all_used)
        if used.partition(".")[0] not in USES[name.partition(".")[0]] | {name.partition(".")[0]}
    ]
    assert wrong == []


def test_floors_use_only_those_below_them() -> None:
    wrong = []
    for name, all_used in IMPORTS.items():
        package, _, rest = name.partition(".")
        if package not in FLOORS or not rest:
            continue
        for used in sorted(one for one in all_used if one.startswith(f"{package}.")):
            beside = used.split(".")[1] == rest.split(".")[0] or floor(name) == 0
            if floor(used) > floor(name) or (floor(used) == floor(name) and not beside):
                wrong.append(f"{name} imports {used}")
        if package in all_used:
            wrong.append(f"{name} imports {package}, which stands above it")
    assert wrong == []


def test_nothing_is_imported_in_a_circle() -> None:
    used = {
        name: IMPORTS[name] - imports(name, type_checking(tree)) for name, tree in MODULES.items()
    }
    order = list(graphlib.TopologicalSorter(used).static_order())  # raises CycleError
    assert len(order) >= len(MODULES)


def test_no_function_imports_a_module_of_the_project() -> None:
    lazy = {
        f"{name} imports {used}"
        for name, tree in MODULES.items()
        for used in imports(name, functions(tree))
    }
    assert lazy - LAZY.keys() == set()
    assert LAZY.keys() - lazy == set(), "these exceptions are needed no more"
    in_tests = [
        f"{path.name} imports {used}"
        for path in sorted((ROOT / "tests").rglob("*.py"))
        for used in imports(path.name, functions(ast.parse(path.read_text(encoding="utf-8"))))
    ]
    assert in_tests == []


def test_the_command_line_imports_nothing_heavy() -> None:
    code = (
        "import sys, pipeline.cli, pipeline.run.runner\n"
        "import pipeline.commands.run, pipeline.commands.status\n"
        "import pipeline.commands.evaluate\n"
        "import stages.report.index\n"  # which every run writes, a cached one too
        "heavy = {'torch', 'transformers', 'datasets', 'numpy', 'pyarrow', 'accelerate', "
        "'altair', 'vl_convert'}\n"
        "print(sorted(heavy & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stderr


def test_tests_use_what_is_public() -> None:
    """No test imports, calls or replaces a name of the project that begins with an underscore."""
    wrong = []
    for path in sorted((ROOT / "tests").rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        imported = {
            alias.asname or alias.name: alias.name
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom) and str(node.module).split(".")[0] in PACKAGES
            for alias in node.names
        }
        names = list(imported.values())
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                names += [node.attr] if node.value.id in imported else []
            elif isinstance(node, ast.Call) and node.args:
                # setattr(module, "name", …), monkeypatch.setattr("package.module.name", …)
                first, *others = map(ast.unparse, node.args[:2])
                dotted = first.strip("'\"").split(".")
                names += [dotted[-1]] if dotted[0] in PACKAGES else []
                quoted = [other.strip("'\"") for other in others if other[0] in "'\""]
                names += quoted if first in imported else []
        wrong += [f"{path.name}: {name}" for name in names if re.match("_(?!_)", name)]
    assert wrong == []


def test_the_plain_reference_shares_no_code_with_what_it_checks() -> None:
    tree = ast.parse((ROOT / "tests" / "plain_attention.py").read_text(encoding="utf-8"))
    assert imports("plain_attention", ast.walk(tree)) == set()
