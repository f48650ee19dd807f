"""Method given: a head mask from a file, checked against the model, the ratio and the window."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bosch.errors import UserError
from bosch.mask_files import HeadMaskFile
from bosch.masks import HeadMask
from bosch.score.objective import Objective
from bosch.search.runs import find_mask
from bosch.search.settings import SearchSettings
from bosch.window import Window
from pipeline.cli import main
from pipeline.recipe.load import load_recipe
from pipeline.run.graph import resolve
from pipeline.run.store import Store
from tests.pipeline_case import Case
from tests.search_case import WINDOW, evaluator_of, searchable


def _saved(path: Path, mask: HeadMask, window: int = WINDOW) -> str:
    HeadMaskFile(HeadMask.of(mask.is_full, Window(window)), "m", "elsewhere").save(path)
    return str(path)


def _mask(shape: tuple[int, int], sliding: int, seed: int = 0) -> HeadMask:
    bits = np.ones(shape[0] * shape[1], dtype=bool)
    bits[np.random.default_rng(seed).permutation(bits.size)[:sliding]] = False
    return HeadMask.of(bits.reshape(shape), Window(WINDOW))


@pytest.fixture(scope="module")
def objective() -> Objective:
    model, calibration = searchable()
    return Objective(model, calibration, Window(WINDOW), batch_size=4)


def _find(objective: Any, **settings: Any) -> Any:
    return find_mask("given", evaluator_of(objective), SearchSettings(**settings))


def test_the_mask_in_the_file_is_scored(tmp_path: Path, objective: Objective) -> None:
    shape = objective.num_layers, objective.num_key_value_heads
    mask = _mask(shape, 5)
    path = _saved(tmp_path / "mask.json", mask)
    result = _find(objective, swa_ratio=mask.swa_ratio, mask=path)
    assert result.mask == mask
    assert result.evaluation.score == objective.evaluate(mask).score


def test_a_given_mask_must_be_named(objective: Objective) -> None:
    with pytest.raises(UserError, match=r"search\.mask: method given takes .* from a file"):
        _find(objective, swa_ratio=0.5)


def test_no_head_of_a_given_mask_gets_another_window(tmp_path: Path) -> None:
    """Even if the anchor is on budget and scores more."""
    model, calibration = searchable()
    menu = Window(WINDOW), Window(3)
    objective = Objective(model, calibration, menu, batch_size=4)
    heads = np.arange(12).reshape(objective.shape)
    masks = [HeadMask(np.where(heads == one, WINDOW, 3).tolist()) for one in range(12)]
    mask = min(masks, key=lambda mask: objective.evaluate(mask).rank)
    narrowest = HeadMask.all_sliding(*objective.shape, Window(3))
    assert objective.evaluate(mask).rank < objective.evaluate(narrowest).rank
    path = str(tmp_path / "mask.json")
    HeadMaskFile(mask, "m", "elsewhere").save(path)
    assert _find(objective, swa_ratio=1, mask=path).mask == mask


@pytest.mark.parametrize(
    ("layers", "sliding", "window", "granularity", "sentence"),
    [
        (1, 6, WINDOW, 1, "KV heads, the model has"),
        (0, 4, WINDOW, 1, r"search\.swa_ratio: .* set it to"),
        (0, 6, WINDOW + 1, 1, r"search\.window_size: the window is"),
        (0, 6, WINDOW, 2, r"search\.head_granularity: layer 0 of .* has 3 full KV heads, no mul"),
    ],
)
def test_a_mask_that_does_not_fit_is_refused(
    tmp_path: Path,
    objective: Objective,
    layers: int,
    sliding: int,
    window: int,
    granularity: int,
    sentence: str,
) -> None:
    shape = objective.num_layers, objective.num_key_value_heads
    path = _saved(tmp_path / "mask.json", _mask((shape[0] + layers, shape[1]), sliding), window)
    with pytest.raises(UserError, match=sentence):
        _find(objective, swa_ratio=0.5, mask=path, head_granularity=granularity)


def _keys(case: Case) -> dict[str, str | None]:
    loaded = load_recipe(case.file, env={})
    hasher = Store(loaded.output_root).hasher()
    return {node.name: node.key for node in resolve(loaded, hasher)}


def test_the_recipe_names_the_file_and_its_content_is_in_the_key(tmp_path: Path) -> None:
    case = Case(tmp_path)
    case.content["search"] |= {"method": "given", "mask": str(tmp_path / "mask.json")}
    case.save()
    with pytest.raises(UserError, match=r"search\.mask: there is no file"):
        load_recipe(case.file, env={})
    (tmp_path / "mask.json").write_text("{}")
    _saved(tmp_path / "mask.json", _mask((4, 4), 8))
    first = _keys(case)
    _saved(tmp_path / "mask.json", _mask((4, 4), 8, seed=1))
    second = _keys(case)
    assert first["prepare"] == second["prepare"] and first["search"] != second["search"]
    case.content["search"]["mask"] = str((tmp_path / "mask.json").rename(tmp_path / "other.json"))
    case.save()
    assert _keys(case) == second


def test_validate_reads_the_mask(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    case = Case(tmp_path)
    case.content["search"] |= {"method": "given", "mask": str(tmp_path / "mask.json")}
    case.save()
    for window, status in ((32, 0), (31, 2)):
        _saved(tmp_path / "mask.json", _mask((4, 4), 8), window)
        assert main(["validate", str(case.file)]) == status
    assert "search.window_size: the window is" in capsys.readouterr().err
