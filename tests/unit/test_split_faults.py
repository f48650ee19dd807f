"""What of a recipe cannot be split over processes, a sentence each."""

from __future__ import annotations

from pathlib import Path

import pytest

from bosch.errors import UserError
from pipeline.recipe.load import load_recipe
from tests.pipeline_case import Case


def test_what_reads_whole_sequences_is_not_split(tmp_path: Path) -> None:
    case = Case(tmp_path)
    two = {"NPROC_PER_NODE": "2"}
    search, evaluate = ["runtime.search_parallel=context"], ["runtime.evaluate_parallel=context"]
    load_recipe(case.file, search + evaluate, env=two)
    for options, env, sentence in (
        (search, {}, r"search_parallel: context needs several processes, there is one"),
        (evaluate, {}, r"evaluate_parallel: context needs several processes, there is one"),
        ([*search, "search.method=dcam"], two, "dcam reads the examples in one process; set data"),
        ([*search, "search.sink=bias"], two, r"search\.sink is estimated on whole examples"),
        ([*search, "runtime.attention=varlen"], two, "search_parallel = context splits them"),
        ([*evaluate, "runtime.attention=varlen"], two, "evaluate_parallel = context splits them"),
        ([*evaluate, "evaluate.rivals=[dcam]"], two, "rivals names dcam, which read the examples"),
        ([*evaluate, "evaluate.harness.tasks=[gsm8k]"], two, "harness reads its prompts in one"),
    ):
        with pytest.raises(UserError, match=sentence):
            load_recipe(case.file, options, env=env)
