"""The head masks in recipes/masks, and their format."""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path

import pytest

from bosch.budget import swa_budget
from bosch.heads import HeadMask, HeadMaskFile
from bosch.journal import Journal
from bosch.model.fingerprint import model_fingerprint
from bosch.model.loading import load_model
from bosch.window import Window
from pipeline.recipe.load import load_recipe
from recipes.masks.make_masks import masks_of_study, with_provenance

ROOT = Path(__file__).resolve().parents[2]
MASKS = sorted((ROOT / "recipes" / "masks").rglob("*.json"))
SCHEMA = json.loads(resources.files("bosch").joinpath("head_mask.schema.json").read_text())


@pytest.mark.parametrize("path", MASKS, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_a_published_mask_has_its_method_ratio_and_origin_in_its_name(path: Path) -> None:
    file = HeadMaskFile.load(path)
    method, *options, ratio = path.stem.split("-")
    assert method == file.method
    for option in options:  # g4: search.head_granularity
        counts = file.mask.full_kv_heads_per_layer
        assert option[0] == "g" and not any(count % int(option[1:]) for count in counts)
    units = file.num_layers * file.num_key_value_heads
    assert file.mask.num_sliding == swa_budget(units, float(ratio))
    provenance = json.loads(path.read_text())["provenance"]
    assert {"recipe", "command", "git_commit"} <= provenance.keys()
    assert with_provenance(file, provenance) == path.read_text()


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


def test_for_each_study_the_mask_of_the_largest_budget_is_published(tmp_path: Path) -> None:
    """Keys leave out a default budget; masks of several windows or another model are skipped.

    Of two equal budgets the mask of more examples is published.
    """
    recipe = Path("recipes", "study", "enumerable.yaml")
    loaded = load_recipe(ROOT / recipe, []).recipe
    model = model_fingerprint(load_model(loaded.model.path, **loaded.model.loading))
    masks = [HeadMask.from_swa_kv_heads([[head], [], []], 4).key for head in range(4)]
    journal = Journal(tmp_path / "results.jsonl")
    for mask, window, examples, settings in zip(
        [masks[0], *masks], (64, 64, 64, 64, [16, 64]), (96, 96, 16, 96, 96),
        ({}, {"budget_per_layer": 16}, {}, {}, {}), strict=True,
    ):  # fmt: skip
        settings |= {"swa_ratio": 0.25, "seed": loaded.seed}
        method = "front" if window != 64 else "bosch"
        key = {"kind": "search", "method": method, "window_size": window, "sinks": 0}
        # The first entry is another model's.
        key["model"] = model if (tmp_path / "results.jsonl").exists() else "another"
        result = {"mask": mask, "score": 1.0, "costs": {"full_forward_equivalents": 1.0}}
        result["examples"] = examples
        journal.append({"key": key | {"settings": settings}, "result": result})
    (found,) = masks_of_study(recipe, tmp_path)
    assert found[0] == "bosch-0.25" and found[1].mask.key == masks[2]


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
