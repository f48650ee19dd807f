"""Links of the documentation lead somewhere, and the commands and functions in it exist."""

from __future__ import annotations

import ast
import functools
import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from bosch.commands import command_parser
from bosch.model.materialize import materialize
from bosch.window import Window
from pipeline.cli import commands, main
from pipeline.commands import new
from pipeline.recipe.load import load_recipe
from tests.hybrid_case import random_mask, small_model
from tests.notebook import NOTEBOOK, code_cells, run_notebook
from tests.report_fixture import publish
from tests.tiny_data import tiny_tokenizer

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(
    [*ROOT.glob("*.md"), *(p for f in ("docs", "recipes") for p in (ROOT / f).rglob("*.md"))]
)
COMMANDS = commands()
CELLS = code_cells(NOTEBOOK)
KINDS = {"start", "guide", "reference", "notes"}
_LINK = re.compile(r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]+))?\)")


def _text(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def _without_code(text: str) -> str:
    return re.sub(r"(?ms)^```.*?^```", "", text)


def _anchors(page: Path) -> set[str]:
    """Anchors that GitHub gives a page's headings."""
    headings = re.findall(r"(?m)^#+ (.+)$", _without_code(_text(page)))
    plain = (re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading) for heading in headings)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in plain}


def _commands(page: Path) -> list[list[str]]:
    """Words of each command line in a page's bash blocks."""
    blocks = re.findall(r"(?ms)^```bash\n(.*?)^```", _text(page))
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    return [words for line in lines if (words := shlex.split(line, comments=True))]


def _options(command: str) -> set[str]:
    return set(re.findall(r"--[\w-]+", command_parser(command, COMMANDS[command]).format_help()))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for path, anchor in _LINK.findall(_without_code(_text(page))):
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), path
        assert not anchor or anchor in _anchors(target), f"{path}#{anchor}"


def test_every_page_is_of_one_kind_and_the_readme_leads_to_it() -> None:
    linked = {(ROOT / path).resolve() for path, _ in _LINK.findall(_text(ROOT / "README.md"))}
    for page in (ROOT / "docs").rglob("*.md"):
        kind, *rest = page.relative_to(ROOT / "docs").parts
        assert kind in KINDS, page
        if len(rest) == 1:  # pages below a folder of their own are linked from the page beside it
            assert page in linked, page


def test_commands_and_their_options_exist() -> None:
    found = 0
    for page in PAGES:
        for words in _commands(page):
            for word in words:
                if (
                    word.startswith(("launch/", "recipes/"))
                    and "$" not in word
                    and "my_model" not in word
                ):
                    assert (ROOT / word).exists(), f"{page.name}: {word}"
            assert words[:3] != ["python", "-m", "pipeline"], f"{page.name}: the program is bosch"
            if words[0] == "bosch" and not words[1].startswith("--"):
                found += 1
                assert words[1] in COMMANDS, f"{page.name}: {words}"
                options = {word.partition("=")[0] for word in words if word.startswith("--")}
                assert options <= _options(words[1]), f"{page.name}: {words}"
            elif words[:2] == ["python", "-m"]:
                assert importlib.util.find_spec(words[2]), f"{page.name}: {words}"
    assert found > 20


def test_the_recipe_of_the_first_hour_is_what_the_command_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And is valid with the quickstart's model in place of the reader's, as its smoke test is."""
    page = ROOT / "docs" / "start" / "own_model.md"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(new, "ROOT", tmp_path)
    monkeypatch.setattr(new, "SCHEMA", tmp_path / "docs" / "reference" / "recipe.schema.json")
    Path("recipes").mkdir()
    Path("data", "mine").mkdir(parents=True)
    Path("data", "mine", "a.txt").write_text("text")
    (command,) = [words for words in _commands(page) if words[:2] == ["bosch", "new"]]
    assert main(command[1:]) == 0
    (content,) = re.findall(r"(?ms)^```yaml\n(.*?)^```", _text(page))
    recipe = Path("recipes", "my_model.yaml")
    assert recipe.read_text(encoding="utf-8") == content
    (smoke,) = [words for words in _commands(page) if "name=smoke" in words]
    assert smoke[3:] == list(new.SMOKE)
    small = [
        f"model.path={ROOT}/recipes/quickstart/base_model",
        "prepare.sequence_length=2k",
        "prepare.calibration.length=2k",
        "evaluate.ruler.lengths=[1k,2k]",
    ]
    for overrides in ((), new.SMOKE):
        load_recipe(recipe, [*small, *overrides])


def test_the_python_reference_makes_a_hybrid(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = _text(ROOT / "docs" / "reference" / "python.md")
    (program,) = re.findall(r"(?ms)^```python\n(.*?)^```", page)
    (by_hand,) = re.findall(r"`(bosch\.HeadMask\(.*?)`", page)
    monkeypatch.chdir(tmp_path)
    Path("recipes").symlink_to(ROOT / "recipes")
    names: dict[str, Any] = {}
    exec(program, names)
    assert eval(by_hand, names).num_sliding == 3
    with torch.no_grad():
        hybrid = AutoModelForCausalLM.from_pretrained("my_hybrid")(**names["inputs"]).logits
    torch.testing.assert_close(hybrid, names["logits"])
    rows = names["file"].mask.windows  # the prompt is shorter than these windows
    narrow = names["bosch"].HeadMask([[min(size, 2) for size in row] for row in rows])
    with names["bosch"].head_mask(names["model"], narrow):
        assert not torch.allclose(names["model"](**names["inputs"]).logits, names["logits"])


def test_the_site_is_built_without_a_warning(tmp_path: Path) -> None:
    """Its links are the repository's, rewritten by a hook; nothing comes from the network."""
    pytest.importorskip("material", reason="the extra 'docs' is not installed")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-q", "-d", str(tmp_path)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    for page in PAGES:
        if page.is_relative_to(ROOT / "docs"):
            place = page.relative_to(ROOT / "docs").with_suffix(".html")
            assert (tmp_path / place).is_file(), place
    home = (tmp_path / "index.html").read_text(encoding="utf-8")
    assert 'href="start/quickstart.html"' in home and "start/quickstart.md" not in home
    assert 'src="images/report.png"' in home and (tmp_path / "images" / "report.png").is_file()
    outside = re.findall(r'(?:src|href)="https?://[^"]*\.(?:js|css|woff2?)"', home)
    assert not outside


def test_the_notebook_is_kept_without_outputs_and_says_what_it_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert all(not cell["outputs"] and cell["execution_count"] is None for cell in CELLS)
    monkeypatch.setenv("BOSCH_RUN", str(tmp_path))
    with pytest.raises(SystemExit, match=f"{tmp_path} holds no finished run: launch/torchrun.sh"):
        run_notebook(NOTEBOOK)


def test_the_notebook_runs_without_training_and_without_a_score(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    publish(tmp_path, without=("train",))
    model = tmp_path / "materialize" / "model"
    hybrid = materialize(small_model(vocab_size=512), random_mask(Window(8)))
    hybrid.save_pretrained(model)
    tiny_tokenizer().save_pretrained(model)
    shutil.copy(tmp_path / "search" / "head_mask.json", model)
    scores = tmp_path / "evaluate" / "scores.json"
    content = json.loads(scores.read_text())
    content["checkpoints"]["original"] = {}
    scores.write_text(json.dumps(content))
    monkeypatch.setenv("BOSCH_RUN", str(tmp_path))
    assert run_notebook(NOTEBOOK)["folder"] == model
    assert re.search("original  +–", capsys.readouterr().out)


PAGE = ROOT / "docs" / "notes" / "paper_map.md"
REFERENCE = re.compile(r"`([\w/]+\.py)::([\w.]+)`")


@functools.cache
def names_in(path: Path) -> set[str]:
    """Functions, classes, methods as Class.method, and assigned names of a module."""
    names = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            inner = [part for part in node.body if isinstance(part, ast.FunctionDef)]
            names |= {f"{node.name}.{part.name}" for part in inner}
        targets = node.targets if isinstance(node, ast.Assign) else []
        targets = [node.target] if isinstance(node, ast.AnnAssign) else targets
        names |= {target.id for target in targets if isinstance(target, ast.Name)}
    return names


def test_named_code_exists() -> None:
    references = set(REFERENCE.findall(PAGE.read_text("utf-8")))
    missing = [f"{p}::{name}" for p, name in references if name not in names_in(ROOT / p)]
    assert len(references) > 50 and missing == []
