"""The wheel for `pip install .` and what it can do; the Dockerfile, without a builder."""

from __future__ import annotations

import argparse
import email
import errno
import fnmatch
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
import zipfile
from contextlib import nullcontext
from pathlib import Path

import pytest
import readme_renderer.markdown

import bosch.commands
from bosch.commands import command_help
from bosch.console import library_main
from bosch.errors import RunError, UserError
from bosch.version import VERSION
from pipeline.recipe.load import load_recipe
from tests.elsewhere import ROOT


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel, built offline from a copy: building leaves files in the tree."""
    folder = tmp_path_factory.mktemp("built")
    source = folder / "source"
    shutil.copytree(ROOT / "bosch", source / "bosch", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    build = "from setuptools.build_meta import *; build_wheel({0!r})"
    command = [sys.executable, "-c", build.format(str(folder))]
    done = subprocess.run(command, cwd=source, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return folder


@pytest.fixture(scope="module")
def site(built: Path) -> Path:
    """The wheel's contents, as in site-packages."""
    (wheel,) = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(built / "site")
    return built / "site"


def _bosch(site: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The installed program, in an environment without the checkout."""
    code = "import sys; from bosch.console import main; sys.exit(main())"
    return subprocess.run(
        [sys.executable, "-P", "-c", code, *arguments],
        env={**os.environ, "PYTHONPATH": str(site)}, cwd=site, capture_output=True, text=True,
    )  # fmt: skip


def test_the_wheel_contains_only_the_library(site: Path) -> None:
    assert {path.name for path in site.iterdir()} == {
        "bosch",
        f"bosch_pipeline-{VERSION}.dist-info",
    }
    own = {str(path.relative_to(ROOT)) for path in (ROOT / "bosch").rglob("*.py")}
    assert own <= {str(path.relative_to(site)) for path in site.rglob("*.py")}
    assert (site / "bosch" / "py.typed").exists()


def test_the_package_has_a_description_for_an_index(site: Path) -> None:
    (file,) = site.glob("*.dist-info/METADATA")
    metadata = email.message_from_string(file.read_text(encoding="utf-8"))
    assert metadata["Version"] == VERSION
    assert metadata["Description-Content-Type"] == "text/markdown"
    text = metadata.get_payload()
    assert isinstance(text, str)
    page = readme_renderer.markdown.render(text)
    assert page is not None and "<table>" in page
    assert page.count('href="http') == text.count("](https://"), "links to files of the repository"
    assert metadata.get_all("Project-URL")
    assert any("Typing :: Typed" in line for line in metadata.get_all("Classifier") or ())


def test_the_library_lists_its_commands_without_the_checkout(site: Path) -> None:
    listing = _bosch(site)
    assert listing.returncode == 0 and "show " in listing.stdout


@pytest.mark.parametrize(
    ("ends_with", "status", "said"),
    [
        (3, 3, ""),
        (UserError("no hybrid\x1b"), 2, "error: no hybrid\\x1b\n"),
        (RunError("no disk"), 1, "error: no disk\n"),
        (KeyboardInterrupt(), 130, ""),
        (OSError(errno.EACCES, "Permission denied", "there/config.json"), 2,
         "error: there: Permission denied; name another file or folder\n"),
        (OSError(errno.EACCES, "Permission denied", "/elsewhere"), None, ""),
    ],
)  # fmt: skip
def test_the_exit_status_of_the_librarys_commands(
    ends_with: int | BaseException, status: int | None, said: str,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    def end(options: argparse.Namespace) -> int:
        assert options.model == "there"
        if isinstance(ends_with, int):
            return ends_with
        raise ends_with

    monkeypatch.setattr("bosch.commands.show.command.run", end)
    with pytest.raises(PermissionError) if status is None else nullcontext():
        assert library_main(["show", "there"]) == status
    assert capsys.readouterr().err == said


def test_other_commands_say_that_they_need_the_checkout(site: Path) -> None:
    done = _bosch(site, "run", "recipes/quickstart.yaml")
    (line,) = done.stderr.splitlines()
    assert done.returncode == 2
    assert line == (
        "error: run: needs the checkout, of which only the library is installed here: clone the "
        "repository and run launch/setup.sh; the library's own commands are "
        + ", ".join(command_help([bosch.commands]))
    )


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
