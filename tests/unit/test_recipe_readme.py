"""Runs that recipes/README.md and docs/guide/two_nodes.md name are valid and have a plan."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path

import pytest

from pipeline.commands.plan import plan_lines
from pipeline.recipe.load import load_recipe
from stages.recipe import LoadedRecipe

ROOT = Path(__file__).resolve().parents[2]
MODELS, RATIOS = ("qwen3_1p7b", "qwen3_8b", "qwen3_14b", "qwen3_30b_a3b"), (0.25, 0.5, 0.75, 0.875)
BASELINES = ("intr", "b_layer", "fisher")


def _commands(page: str) -> list[list[str]]:
    """Arguments of every launch/torchrun.sh in a page's bash blocks, as bash expands them."""
    text = (ROOT / page).read_text(encoding="utf-8")
    blocks = [b for b in re.findall(r"```bash\n(.*?)```", text, re.DOTALL) if "torchrun" in b]
    script = re.sub(r"\\\n\s*", "", "\n".join(blocks)).replace(
        "launch/torchrun.sh", "printf '%s\\037'"
    )
    script = re.sub(r"(?m)(printf .*)$", r"\1; echo", script)
    done = subprocess.run(["bash", "-ec", script], capture_output=True, text=True, check=True)
    return [line.rstrip("\037").split("\037") for line in done.stdout.splitlines() if line]


def _load(arguments: list[str]) -> LoadedRecipe:
    return load_recipe(
        ROOT / arguments[0], [a for a in arguments[1:] if "=" in a],
        fetch=False, input_files=False, model_files=False, env={},
    )  # fmt: skip


@pytest.fixture(scope="module")
def runs() -> dict[str, LoadedRecipe]:
    loaded = [_load(arguments) for arguments in _commands("recipes/README.md")]
    names = [run.recipe.name for run in loaded]
    assert len(set(names)) == len(names)
    return dict(zip(names, loaded, strict=True))


def test_the_readme_holds_the_paper_s_runs(runs: dict[str, LoadedRecipe]) -> None:
    settings = {
        (run.recipe.model.path, run.recipe.search.method, run.recipe.search.swa_ratio)
        for run in runs.values()
    }
    paths = {
        load_recipe(
            ROOT / "recipes" / f"{model}_r075.yaml", fetch=False, input_files=False, env={}
        ).recipe.model.path
        for model in MODELS
    }
    published = runs["qwen3_14b_bosch_0.75"].recipe.search.method
    assert {(path, published, ratio) for path in paths for ratio in RATIOS} <= settings
    assert {(path, method, 0.75) for path in paths for method in BASELINES} <= settings
    assert any("Llama-3" in path for path, _, _ in settings)


def test_the_readme_holds_the_ablations_of_windows_and_lengths(
    runs: dict[str, LoadedRecipe],
) -> None:
    for model in ("qwen3_8b", "qwen3_14b"):
        recipe = runs[f"{model}_windows"].recipe
        assert recipe.train is None
        assert recipe.search.window_size == 1024
        assert recipe.evaluate.windows == [256, 512, 1024, 2048, 4096]
    for model in MODELS:
        recipe = runs[f"{model}_longer"].recipe
        assert recipe.train is None
        assert recipe.evaluate.needle.yarn == {65536: 2, 131072: 4}


def test_every_run_has_a_plan_that_fits_sixteen_gpus(runs: dict[str, LoadedRecipe]) -> None:
    for name, run in runs.items():
        lines = "\n".join(plan_lines(run, "h100x16"))
        assert run.recipe.train is None or ": fits" in lines, name
        assert f"{name} on 16 x h100" in lines


def test_the_guide_s_commands_name_what_is_there() -> None:
    text = (ROOT / "docs" / "guide" / "two_nodes.md").read_text(encoding="utf-8")
    for block in re.findall(r"```bash\n(.*?)```", text, re.DOTALL):
        for word in shlex.split(block):
            if word.startswith(("launch/", "recipes/")):
                assert (ROOT / word).is_file(), word
    for arguments in _commands("docs/guide/two_nodes.md"):
        _load([a for a in arguments if not a.startswith("--")])
