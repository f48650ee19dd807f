"""The paper's recipes, published masks, the runs in recipes/README.md and the two-node guide."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from bosch.budget import swa_budget
from bosch.errors import UserError
from bosch.hardware import DEVICES
from bosch.mask_files import HeadMaskFile
from pipeline.recipe.load import load_recipe
from stages.shape import shape_of
from stages.stage import LoadedRecipe
from stages.train.memory import TrainingJob

ROOT = Path(__file__).resolve().parents[2]
MODELS = {
    "qwen3_1p7b": "Qwen/Qwen3-1.7B-Base",
    "qwen3_8b": "Qwen/Qwen3-8B-Base",
    "qwen3_14b": "Qwen/Qwen3-14B-Base",
    "qwen3_30b_a3b": "Qwen/Qwen3-30B-A3B-Base",
}
RATIOS, BASELINES = (0.25, 0.5, 0.75, 0.875), ("intr", "b_layer", "fisher")
SOURCES = 10


def _load(name: str, *overrides: str) -> LoadedRecipe:
    return load_recipe(ROOT / "recipes" / f"{name}_r075.yaml", overrides, fetch=False, env={})


@pytest.fixture
def shards(tmp_path: Path) -> list[str]:
    """Overrides that replace the ProLong data by empty shard indexes."""
    (tmp_path / "index.json").write_text('{"version": 2, "shards": []}')
    return [f"prepare.sources.{index}.path={tmp_path}" for index in range(SOURCES)]


@pytest.mark.parametrize("name", MODELS)
def test_paper_recipes_have_the_papers_parameters(name: str, shards: list[str]) -> None:
    recipe = _load(name, *shards).recipe
    assert recipe.name == f"{name}_r075"
    assert recipe.model.path == MODELS[name]
    search, train, evaluate = recipe.search, recipe.train, recipe.evaluate
    assert (search.swa_ratio, search.window_size, search.sinks) == (0.75, 1024, 0)
    assert search.method == "razor"
    calibration = recipe.prepare.calibration
    assert (calibration.examples, calibration.length) == (64, 32768)
    assert recipe.prepare.sequence_length == 32768
    assert train.total_tokens // train.batch_tokens == 1192
    assert train.batch_tokens == 64 * 32768
    assert (train.learning_rate, train.warmup_ratio) == (1e-5, 0.1)
    assert train.checkpoint_tokens == [700_000_000, 1_300_000_000, 2 * 10**9, 2_500_000_000]
    assert evaluate.ruler.lengths == [4096, 8192, 16384, 32768]
    assert (len(evaluate.tasks), evaluate.ruler.samples) == (6, 500)
    assert sum(source.weight for source in recipe.prepare.sources) == pytest.approx(1)
    for gpus in (1, 4, 8, 16):  # a batch divides evenly over them
        assert 64 % (recipe.runtime.micro_batch_size * gpus) == 0


def test_the_documented_override_gives_the_published_search(shards: list[str]) -> None:
    published = ["search.method=bosch", "search.strict=true", "search.budget_per_layer=100"]
    search = _load("qwen3_14b", *shards, *published).recipe.search
    assert (search.method, search.solver, search.budget_per_layer) == ("bosch", "nomad", 100)
    assert (search.alpha, search.gamma, search.max_group_variables) == (100.0, 0.2, 50)
    assert not search.settings(0).break_ties


def test_missing_data_is_reported_for_each_source(tmp_path: Path) -> None:
    missing = [f"prepare.sources.{index}.path={tmp_path}/{index}" for index in range(SOURCES)]
    with pytest.raises(UserError) as caught:
        _load("qwen3_8b", *missing)
    for index in range(SOURCES):
        assert f"prepare.sources.{index}.path: " in str(caught.value)


def _runs(page: str) -> list[LoadedRecipe]:
    """The recipe of every launch/torchrun.sh line in a page's bash blocks, expanded by bash."""
    text = (ROOT / page).read_text(encoding="utf-8")
    blocks = [b for b in re.findall(r"```bash\n(.*?)```", text, re.DOTALL) if "torchrun" in b]
    script = re.sub(r"\\\n\s*", "", "\n".join(blocks)).replace(
        "launch/torchrun.sh", "printf '%s\\037'"
    )
    script = re.sub(r"(?m)(printf .*)$", r"\1; echo", script)
    done = subprocess.run(["bash", "-ec", script], capture_output=True, text=True, check=True)
    commands = [line.rstrip("\037").split("\037") for line in done.stdout.splitlines() if line]
    return [
        load_recipe(
            ROOT / file, [a for a in arguments if "=" in a and not a.startswith("--")],
            fetch=False, input_files=False, model_files=False, env={},
        )
        for file, *arguments in commands
    ]  # fmt: skip


@pytest.fixture(scope="module")
def runs() -> dict[str, LoadedRecipe]:
    loaded = _runs("recipes/README.md")
    by_name = {run.recipe.name: run for run in loaded}
    assert len(by_name) == len(loaded)
    return by_name


def test_the_readme_has_the_papers_runs(runs: dict[str, LoadedRecipe]) -> None:
    loaded = [one for run in runs.values() for one in (run, *run.branches.values())]
    recipes = [one.recipe for one in loaded]
    settings = {
        (recipe.model.path, recipe.search.method, recipe.search.swa_ratio) for recipe in recipes
    }
    paths = MODELS.values()
    assert {(path, "razor", ratio) for path in paths for ratio in RATIOS} <= settings
    assert {(path, method, 0.75) for path in paths for method in BASELINES} <= settings


def test_the_readme_has_the_ablation_of_lengths(
    runs: dict[str, LoadedRecipe],
) -> None:
    for model in MODELS:
        recipe = runs[f"{model}_longer"].recipe
        assert recipe.train is None
        assert recipe.evaluate.ruler.yarn == {65536: 2, 131072: 4}


def test_every_training_fits_sixteen_gpus(runs: dict[str, LoadedRecipe]) -> None:
    trainings = {name: run for name, run in runs.items() if run.recipe.train is not None}
    for name, run in trainings.items():
        recipe, shape = run.recipe, shape_of(run)
        rows = recipe.search.kv_heads(shape.kinds, recipe.model.dtype)
        length, capacity = recipe.prepare.sequence_length, DEVICES["h100"].memory * 2**30
        job = TrainingJob(shape, recipe.train, recipe.runtime, length, rows, 16, True, capacity)
        assert job.memory().peak < 0.9 * capacity, name
    assert len(trainings) > len(MODELS)


def test_the_runs_of_the_guide_are_valid() -> None:
    assert _runs("docs/guide/two_nodes.md")


MASKS = sorted((ROOT / "recipes" / "masks").rglob("*.json"))


@pytest.mark.parametrize("path", MASKS, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_a_recipe_accepts_each_published_mask_which_is_what_its_name_says(path: Path) -> None:
    file = HeadMaskFile.load(path)
    method, ratio = path.stem.split("-")
    assert method == file.method
    assert file.mask.num_sliding == swa_budget(file.mask.is_full.size, float(ratio))
    (window,) = file.mask.menu
    loaded = load_recipe(
        ROOT / "recipes" / f"{path.parent.name}.yaml",
        [
            "search.method=given", f"search.mask={path}", f"search.swa_ratio={ratio}",
            f"search.window_size={window.size}", "search.points=null",
        ],
        fetch=False, env={},
    )  # fmt: skip
    assert loaded.recipe.model.path in (file.model, str(ROOT / file.model))


def test_there_are_masks_to_check() -> None:
    assert MASKS
