"""The head masks in recipes/masks, and their format."""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path

import pytest

from bosch.budget import swa_budget
from bosch.heads import HeadMask, HeadMaskFile
from bosch.window import Window
from pipeline.recipe.load import load_recipe

ROOT = Path(__file__).resolve().parents[2]
MASKS = sorted((ROOT / "recipes" / "masks").rglob("*.json"))
SCHEMA = json.loads(resources.files("bosch").joinpath("head_mask.schema.json").read_text())


@pytest.mark.parametrize("path", MASKS, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_a_published_mask_has_its_method_ratio_and_origin_in_its_name(path: Path) -> None:
    file = HeadMaskFile.load(path)
    method, ratio = path.stem.split("-")
    assert method == file.method
    units = file.num_layers * file.num_key_value_heads
    assert file.mask.num_sliding == swa_budget(units, float(ratio))
    provenance = json.loads(path.read_text())["provenance"]
    assert {"recipe", "command", "git_commit"} <= provenance.keys()


@pytest.mark.parametrize("path", MASKS, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_a_recipe_accepts_each_published_mask(path: Path) -> None:
    file = HeadMaskFile.load(path)
    loaded = load_recipe(
        ROOT / json.loads(path.read_text())["provenance"]["recipe"],
        [
            "search.method=given", f"search.mask={path}", f"search.swa_ratio={file.swa_ratio}",
            f"search.window_size={file.window_size}", "search.points=null",
        ],
    )  # fmt: skip
    assert loaded.recipe.model.path == str(ROOT / file.model)


def test_the_schema_has_the_fields_of_the_file() -> None:
    mask = HeadMask.of_choices([[0, 1, 2]])
    one = HeadMaskFile.of(
        HeadMask(mask.is_full), Window(8), model="m", method="rand", swa_ratio=2 / 3
    ).content
    several = HeadMaskFile.of(
        mask, [Window(8), Window(4)], model="m", method="rand", swa_ratio=2 / 3
    ).content
    assert one.keys() | several.keys() | {"provenance"} == set(SCHEMA["properties"])
    own = {"window_size"}, {"window_sizes"}
    for content, mine, number in zip((one, several), own, (1, 2), strict=True):
        assert content["format"] == number and mine <= content.keys()
        assert content.keys() - mine - {"score", "seed"} == set(SCHEMA["required"])
    assert MASKS, "there is no mask to check"
    for path in MASKS:
        content = json.loads(path.read_text())
        assert set(SCHEMA["required"]) <= content.keys() <= set(SCHEMA["properties"])
