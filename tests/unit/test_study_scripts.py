"""The scripts in studies/: each prints its help, and their arithmetic agrees with cases by hand."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bosch.masks import HeadMask
from bosch.score.evaluation_log import Evaluation
from bosch.window import Window
from recipes.study.make_composition_model import (
    FIRST_QUESTION,
    KINDS,
    VOCABULARY,
    exact_match,
    examples,
)
from studies.optimality import Standing, masks_on_budget, standing
from studies.selectors import jaccard_distance, mean_distance, swapped, turnover
from tests.elsewhere import ROOT
from tests.hybrid_case import sliding_mask

SCRIPTS = sorted(
    path for path in (ROOT / "studies").glob("*.py") if "__main__" in path.read_text("utf-8")
)


def sliding(*heads: int, of: int = 6) -> HeadMask:
    """One layer in which these heads slide."""
    return sliding_mask([heads], of, Window(8))


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_a_script_prints_its_help_with_its_command(
    script: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [str(script), "--help"])
    with pytest.raises(SystemExit) as stopped:
        runpy.run_module(f"studies.{script.stem}", run_name="__main__")
    assert stopped.value.code == 0
    assert f"python -m studies.{script.stem}" in capsys.readouterr().out


def test_turnover_and_swaps_by_hand() -> None:
    """Of 6 heads 2 slide, then 4, of which 2, 1 and 0 are others."""
    small = sliding(0, 1)
    for large, share in ((sliding(2, 3, 4, 5), 1.0), (sliding(1, 2, 3, 4), 0.5)):
        found = turnover(small, large)
        assert (found.share, found.maximum, found.normalised) == (share, 1.0, share)
        swap = swapped(small, large, seed=3)
        assert swap.num_sliding == 4 and turnover(small, swap).share == 0.0
    assert turnover(small, sliding(0, 1, 2, 3)).share == 0.0
    assert swapped(small, sliding(0, 1, 2, 3), seed=3) == sliding(0, 1, 2, 3)
    assert turnover(small, sliding(*range(6))).normalised == 0.0
    # 8 heads, 6 slide, then 7: one of six can be outside (the paper's 0.75 and 0.875).
    assert turnover(sliding(*range(6), of=8), sliding(*range(1, 8), of=8)).maximum == 1 / 6


def test_distances_of_sets_by_hand() -> None:
    assert jaccard_distance(sliding(0, 1, 2), sliding(1, 2, 3, 4)) == 1 - 2 / 5
    assert jaccard_distance(sliding(), sliding()) == 0.0
    first, second = [sliding(0), sliding(1)], [sliding(0), sliding(2)]
    assert mean_distance(first, second) == 0.75 and mean_distance(first, first) == 1.0
    one = [sliding(0)]
    assert mean_distance(one, one) == 0.0


def test_every_mask_on_budget_is_enumerated_and_ranked() -> None:
    masks = list(masks_on_budget(2, 2, 0.5, Window(8)))
    assert len(set(masks)) == 6 and all(mask.num_sliding == 2 for mask in masks)
    landscape = {mask: Evaluation(number // 2 / 4, -number) for number, mask in enumerate(masks)}
    assert standing(masks[3], landscape) == Standing(0.25, 3.0, 3, 4)
    assert standing(masks[5], landscape) == Standing(0.0, 5.0, 1, 6)


@pytest.mark.parametrize("first", range(KINDS))
def test_scores_are_grouped_by_the_kinds_of_questions(first: int) -> None:
    """Wherever a list of records begins: a held-out set may begin with any kind."""

    def answers_the_last_kind(input_ids: torch.Tensor, use_cache: bool) -> Any:
        if FIRST_QUESTION + KINDS - 1 not in input_ids:
            return SimpleNamespace(logits=torch.zeros(*input_ids.shape, VOCABULARY))
        following = input_ids.roll(-1, dims=1)
        return SimpleNamespace(logits=torch.nn.functional.one_hot(following, VOCABULARY))

    records = examples(9)[first:]
    model: Any = answers_the_last_kind
    assert [exact_match(model, records, kind) for kind in range(KINDS)] == [0, 0, 1]
