"""What the benchmarks of the composition models count."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from recipes.study.make_composition_model import (
    FIRST_QUESTION,
    KINDS,
    VOCABULARY,
    exact_match,
    examples,
)


@pytest.mark.parametrize("first", range(KINDS))
def test_scores_are_of_the_questions_own_kinds(first: int) -> None:
    """Wherever a list of records begins: those of a held-out set begin with any kind."""

    def answers_the_last_kind(input_ids: torch.Tensor, use_cache: bool) -> Any:
        if FIRST_QUESTION + KINDS - 1 not in input_ids:
            return SimpleNamespace(logits=torch.zeros(*input_ids.shape, VOCABULARY))
        following = input_ids.roll(-1, dims=1)
        return SimpleNamespace(logits=torch.nn.functional.one_hot(following, VOCABULARY))

    records = examples(9)[first:]
    model: Any = answers_the_last_kind
    assert [exact_match(model, records, kind) for kind in range(KINDS)] == [0, 0, 1]
