"""The recipes for the paper's models hold the paper's parameters and pass every check."""

from __future__ import annotations

from pathlib import Path

import pytest

from bosch.errors import UserError
from pipeline.recipe.load import load_recipe

ROOT = Path(__file__).resolve().parents[2]
MODELS = {
    "qwen3_1p7b_r075": "Qwen/Qwen3-1.7B-Base",
    "qwen3_8b_r075": "Qwen/Qwen3-8B-Base",
    "qwen3_14b_r075": "Qwen/Qwen3-14B-Base",
    "qwen3_30b_a3b_r075": "Qwen/Qwen3-30B-A3B-Base",
}
SOURCES = 10


@pytest.fixture
def shards(tmp_path: Path) -> list[str]:
    """Overrides that put an index of shards in the place of the ProLong data."""
    (tmp_path / "index.json").write_text('{"version": 2, "shards": []}')
    return [f"prepare.sources.{index}.path={tmp_path}" for index in range(SOURCES)]


@pytest.mark.parametrize("name", MODELS)
def test_paper_recipes_hold_the_paper_parameters(name: str, shards: list[str]) -> None:
    recipe = load_recipe(ROOT / "recipes" / f"{name}.yaml", shards, fetch=False).recipe
    assert recipe.name == name
    assert recipe.model.path == MODELS[name]
    search, train, evaluate = recipe.search, recipe.train, recipe.evaluate
    assert (search.swa_ratio, search.window_size, search.sinks) == (0.75, 1024, 0)
    assert (search.budget_per_layer, search.alpha, search.gamma) == (8, 100.0, 0.2)
    assert (search.method, search.solver, search.max_group_variables) == (
        "bosch_plus",
        "nomad",
        50,
    )
    calibration = recipe.prepare.calibration
    assert (calibration.examples, calibration.length) == (64, 32768)
    assert recipe.prepare.sequence_length == 32768
    assert train.total_tokens // train.batch_tokens == 1192
    assert train.batch_tokens == 64 * 32768
    assert (train.learning_rate, train.warmup_ratio) == (1e-5, 0.1)
    assert train.checkpoint_tokens == [700_000_000, 1_300_000_000, 2 * 10**9, 2_500_000_000]
    assert evaluate.needle.lengths == [4096, 8192, 16384, 32768]
    assert (len(evaluate.needle.tasks), evaluate.needle.samples) == (6, 500)
    assert sum(source.weight for source in recipe.prepare.sources) == pytest.approx(1)


def test_an_override_gives_the_published_search(shards: list[str]) -> None:
    published = ["search.method=bosch", "search.strict=true", "search.budget_per_layer=100"]
    path = ROOT / "recipes" / "qwen3_14b_r075.yaml"
    search = load_recipe(path, shards + published, fetch=False).recipe.search
    assert (search.method, search.solver, search.budget_per_layer) == ("bosch", "nomad", 100)
    assert not search.settings(0).break_ties


@pytest.mark.parametrize("gpus", [1, 4, 8, 16])
@pytest.mark.parametrize("name", MODELS)
def test_paper_batches_divide_over_common_numbers_of_gpus(
    name: str, gpus: int, shards: list[str]
) -> None:
    recipe = load_recipe(ROOT / "recipes" / f"{name}.yaml", shards, fetch=False).recipe
    micro = recipe.runtime.micro_batch_size
    assert isinstance(micro, int)
    assert recipe.train.batch_tokens // recipe.prepare.sequence_length % (micro * gpus) == 0


def test_missing_data_is_named_source_by_source(tmp_path: Path) -> None:
    missing = [f"prepare.sources.{index}.path={tmp_path}/{index}" for index in range(SOURCES)]
    with pytest.raises(UserError) as caught:
        load_recipe(ROOT / "recipes" / "qwen3_8b_r075.yaml", missing, fetch=False)
    for index in range(SOURCES):
        assert f"prepare.sources.{index}.path: " in str(caught.value)
