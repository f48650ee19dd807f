"""Nothing is imported from the current directory: not by a command, its stages or launch/*.sh."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.run.launch import launch
from stages.context import ModelConfig, Runtime, StageConfig
from stages.report.stage import ReportConfig
from stages.stage import World
from tests.pipeline_case import ROOT, Case
from tests.search_case import order

ENTRY = ROOT / "pipeline" / "__main__.py"
# Libraries, standard modules that others import late, and the project's own names.
NAMES = ("yaml", "tokenize", "pydantic", "filecmp", "bosch", "stages", "torch", "numpy")
# Modules that the interpreter imports before the first line of a program.
EARLY = ("sitecustomize", "usercustomize", "runpy", "pkgutil", "encodings", "pipeline")


@pytest.fixture
def hostile(tmp_path: Path) -> Path:
    """A folder whose modules print that they were imported, and stop the program."""
    folder = tmp_path / "hostile"
    folder.mkdir()
    for name in NAMES:
        (folder / f"{name}.py").write_text("raise SystemExit('imported from the current folder')")
    return folder


@pytest.fixture
def more_hostile(hostile: Path) -> Path:
    """A folder that also has the modules that the interpreter itself imports."""
    for name in EARLY:
        shutil.copy(hostile / "yaml.py", hostile / f"{name}.py")
    return hostile


def _run(command: list[str], cwd: Path, **extra: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, **extra}
    environment.pop("PYTHONSAFEPATH", None)
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True)


def test_a_command_imports_nothing_from_the_current_directory(
    tmp_path: Path, hostile: Path
) -> None:
    """An empty entry of PYTHONPATH means the current directory, too."""
    case = Case(tmp_path)
    for start in (["-m", "pipeline"], [str(ENTRY)]):
        done = _run(
            [sys.executable, *start, "status", str(case.file)], hostile, PYTHONPATH=f":{ROOT}"
        )
        assert done.returncode == 0, done.stderr
        assert "never made" in done.stdout


def test_a_stage_imports_nothing_from_the_current_directory(
    tmp_path: Path, more_hostile: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(more_hostile)
    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)
    monkeypatch.setenv("PYTHONPATH", os.pathsep)
    work = tmp_path / "work"
    work.mkdir()
    config = StageConfig(ReportConfig(), ModelConfig(path="x"), 0, Runtime())
    what = order(config, {}, work, "tests.fake_stages:run")
    summary = launch(what, World(processes_per_node=1))
    assert summary == {"stage": "report", "rank": 0}
    assert json.loads((work / "output.json").read_text())["world"] == "1"


def test_launch_scripts_import_nothing_from_the_current_directory(
    tmp_path: Path, more_hostile: Path
) -> None:
    """A Python without packages is not taken for one that has them; torchrun.sh runs a recipe."""
    root = tmp_path / "checkout"
    shutil.copytree(ROOT / "launch", root / "launch")
    (root / "pipeline").mkdir()
    (root / "pipeline" / "__main__.py").write_text("import yaml, sys; print(sys.argv[1:])")
    python = root / ".venv" / "bin" / "python"
    (root / "launch" / "setup.sh").write_text(
        f"#!/bin/sh\necho set up\nmkdir -p {python.parent}\nln -sf {sys.executable} {python}\n"
        f"cp {Path(sys.executable).parents[1]}/pyvenv.cfg {root}/.venv/ 2>/dev/null || true\n"
    )
    for name in ("transformers", "accelerate", "datasets", "PyNomad", "altair", "rich"):
        (more_hostile / f"{name}.py").touch()
    bare = tmp_path / "bare"
    bare.mkdir()
    for name in ("python", "python3"):
        (bare / name).write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
        (bare / name).chmod(0o755)
    script = [f"{root}/launch/torchrun.sh", "recipe.yaml"]
    own = {"PATH": f"{bare}:/usr/bin:/bin", "BOSCH_PYTHON": ""}
    site = next(path for path in sys.path if path.endswith("site-packages"))
    done = _run(script, more_hostile, **own, PYTHONPATH="::")
    assert done.stdout.splitlines()[0] == "set up", done.stderr
    done = _run(script, more_hostile, **own, PYTHONPATH=f":{site}:")
    assert done.stdout.splitlines()[-1] == "['run', 'recipe.yaml']", done.stderr


def test_a_python_without_the_packages_gets_one_sentence(tmp_path: Path) -> None:
    done = _run([sys.executable, "-S", str(ENTRY), "--help"], tmp_path, PYTHONPATH=str(ROOT))
    assert done.returncode == 1
    assert re.fullmatch(r"error: this Python lacks \w+; run launch/setup.sh .*\n", done.stderr)
