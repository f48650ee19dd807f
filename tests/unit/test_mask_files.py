"""The head masks in recipes/masks."""

from __future__ import annotations

from pathlib import Path

import pytest

from bosch.budget import swa_budget
from bosch.mask_files import HeadMaskFile
from pipeline.recipe.load import load_recipe

ROOT = Path(__file__).resolve().parents[2]
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
    )  # fmt: skip
    assert loaded.recipe.model.path == str(ROOT / file.model)


def test_there_are_masks_to_check() -> None:
    assert MASKS
