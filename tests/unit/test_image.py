"""The Dockerfile, without a builder: its steps name files of the repository."""

from __future__ import annotations

import fnmatch
import json
import os
import re
import shlex
import subprocess
import tomllib
from pathlib import Path

from pipeline.recipe.load import load_recipe
from tests.elsewhere import ROOT

_KNOWN = {"FROM", "ARG", "WORKDIR", "COPY", "RUN", "ENV", "ENTRYPOINT", "CMD"}
_MODES = ("cpu", "gpu")


def _steps() -> list[tuple[str, str]]:
    """Instruction and arguments of each step."""
    text = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    lines = re.sub(r"\\\n", " ", re.sub(r"(?m)^#.*\n", "", text)).splitlines()
    return [(step, rest) for step, _, rest in (line.partition(" ") for line in lines if line)]


def _of(name: str) -> list[str]:
    return [rest for step, rest in _steps() if step == name]


def _ignored(path: Path) -> bool:
    """Whether .dockerignore keeps a path of the repository out of the image."""
    patterns = (ROOT / ".dockerignore").read_text(encoding="utf-8").split()
    parts = path.relative_to(ROOT).parts
    return any(
        fnmatch.fnmatch("/".join(parts[:length]), pattern.removeprefix("**/"))
        or (pattern.startswith("**/") and fnmatch.fnmatch(parts[length - 1], pattern[3:]))
        for pattern in patterns
        for length in range(1, len(parts) + 1)
    )


def test_the_image_has_a_supported_python_and_no_unknown_step() -> None:
    assert {step for step, _ in _steps()} <= _KNOWN
    (base,) = _of("FROM")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    version = re.fullmatch(r"python:(\d+\.\d+)-slim", base)
    assert version is not None
    assert f"Programming Language :: Python :: {version[1]}" in project["classifiers"]
    assert _of("ARG") == [f"MODE={_MODES[0]}"] and _of("COPY") == [". ."]


def test_the_image_contains_what_its_steps_and_comments_name() -> None:
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    assert not [name for name in tracked.stdout.splitlines() if _ignored(ROOT / name)]
    assert _ignored(ROOT / ".git") and _ignored(ROOT / ".venv") and _ignored(ROOT / "runs")
    (step,) = _of("RUN")
    script = shlex.split(step.partition(" && ")[0])
    assert script == ["launch/setup.sh", "${MODE}"]
    assert os.access(ROOT / script[0], os.X_OK)
    words = (ROOT / script[0]).read_text(encoding="utf-8")
    assert f"{' | '.join(_MODES)}) mode=" in words, "the script takes these modes"
    recipe = re.search(r"bosch run (\S+)", (ROOT / "Dockerfile").read_text(encoding="utf-8"))
    assert recipe is not None
    load_recipe(ROOT / recipe[1], fetch=False, env={})


def test_the_image_starts_the_installed_program() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    (entry,), (command,), (folder,) = (_of(name) for name in ("ENTRYPOINT", "CMD", "WORKDIR"))
    (program,) = json.loads(entry)
    assert program in project["scripts"] and json.loads(command) == ["--help"]
    assert _of("ENV") == [f'PATH="{folder}/.venv/bin:${{PATH}}"']
