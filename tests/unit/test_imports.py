"""Imports go one way: pipeline → stages → {bosch, data_prep}; data_prep may use bosch."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ALLOWED = {
    "bosch": {"bosch"},
    "data_prep": {"data_prep", "bosch"},
    "stages": {"stages", "data_prep", "bosch"},
    "pipeline": {"pipeline", "stages", "bosch"},
}


def imported(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found.add((node.module or "").partition(".")[0])
    return found


@pytest.mark.parametrize("package", ALLOWED)
def test_imports_go_one_way(package: str) -> None:
    files = list((ROOT / package).rglob("*.py"))
    assert files
    for path in files:
        wrong = imported(path) & (ALLOWED.keys() | {"tests"}) - ALLOWED[package]
        assert not wrong, f"{path.relative_to(ROOT)} imports {sorted(wrong)}"


def test_the_command_line_imports_nothing_heavy() -> None:
    code = (
        "import sys, pipeline.cli, pipeline.runner, pipeline.plan\n"
        "heavy = {'torch', 'transformers', 'datasets', 'numpy', 'pyarrow', 'accelerate'}\n"
        "print(sorted(heavy & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stderr


@pytest.mark.parametrize(
    "stage", ["prepare", "search", "materialize", "train", "evaluate", "report"]
)
def test_stage_modules_import_no_torch_at_the_top(stage: str) -> None:
    code = f"import sys, stages.{stage}; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.strip() == "False", done.stderr
