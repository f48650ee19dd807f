"""`plan` for recipes of every kind.

The modules behind it: stages.cost, stages.search.cost, stages.train.cost, stages.train.fit,
stages.evaluate.cost, stages.materialize.cost, stages.prepare.stage, pipeline.commands.plan.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from bosch.model.materialize import materialize
from bosch.objective.block_bytes import PeakMemory
from bosch.window import Window
from data_prep.tasks.samples import TAIL_CHARACTERS
from pipeline.commands.plan import plan_costs, plan_devices
from pipeline.recipe.load import load_recipe
from stages.evaluate.generation import Question
from stages.evaluate.section import Work
from stages.evaluate.stage import EvaluateConfig
from stages.evaluate.suite import answer_record
from stages.evaluate.suites.harness.suite import language_model
from stages.evaluate.suites.needle import NeedleEvaluation
from stages.evaluate.suites.positions import PositionEvaluation
from stages.evaluate.suites.positions.suite import token_losses
from tests.golden_plans import GOLDEN, RECIPES, plans
from tests.hybrid_case import random_mask, small_model, tokens
from tests.pipeline_case import Case
from tests.tiny_data import tiny_tokenizer


def test_plans_equal_the_golden_ones() -> None:
    """Every line; tests/golden_plans.py writes the file again."""
    assert list(plans()) == GOLDEN.read_text(encoding="utf-8").splitlines()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("suite", "length"), [("positions", 300), ("positions", 1200), ("options", 300)]
)
def test_logits_at_all_tokens_take_the_memory_that_a_plan_states(
    suite: str, length: int, dtype: torch.dtype
) -> None:
    """Of a large vocabulary: losses by position, 1,024 tokens at a time, or options in lm-eval."""
    model = small_model(vocab_size=6000, max_position_embeddings=2048).to(dtype)
    hybrid = materialize(model, random_mask(), Window(64)).eval()
    if suite == "positions":
        (work,), _ = PositionEvaluation(length=length).work()
        ids = tokens(1, length)[0].numpy()

        def read() -> None:
            # In inference mode the bytes inside of a loss function would not be seen.
            token_losses.__wrapped__(hybrid, ids)
    else:
        work = Work(2, 2 * length, length, length)
        sequences = [tokens(1, length, seed)[0].tolist() for seed in range(2)]
        lm = language_model(hybrid, tiny_tokenizer(), 2)

        def read() -> None:
            options = [(("", ""), ids[:-1], ids[-1:]) for ids in sequences]
            lm._loglikelihood_tokens(options, disable_tqdm=True)

    with torch.no_grad(), PeakMemory() as memory:
        read()
    stated = work.logit_bytes(2, 6000, dtype.itemsize)
    assert 0.95 <= stated / memory.peak <= 1.1


def test_a_plan_states_logits_and_the_pass_of_a_chunk() -> None:
    """Documents of any length are read 1,024 tokens at a time."""

    def memory(suites: str) -> str:
        overrides = [f"evaluate={{{suites}}}", "runtime.eval_batch_size=1"]
        file = RECIPES / "qwen3_1p7b_r075.yaml"
        loaded = load_recipe(file, overrides, fetch=False, input_files=False, model_files=False)
        return plan_costs(loaded, plan_devices(loaded))["original"].facts[-1].partition("about ")[2]

    needle = "needle: {lengths: [1024], tasks: [vt], samples: 1}"
    alone, short, long = (
        memory(needle + suite)
        for suite in ("", ", positions: {length: 4k}", ", positions: {length: 32k}")
    )
    assert short == long == f"{alone}, then up to 1.45 GiB of logits"


def test_an_answer_takes_no_more_disk_than_planned(tmp_path: Path) -> None:
    """In samples.jsonl and, with fewer names, among the shared answers."""
    case = Case(tmp_path)

    def disk(samples: int) -> float:
        overrides = [
            f"evaluate.needle.samples={samples}", "evaluate.needle.tasks=[niah_single_2]",
            "train=null",
        ]  # fmt: skip
        loaded = load_recipe(case.file, overrides)
        needle = loaded.recipe[EvaluateConfig].suites["needle"]
        assert isinstance(needle, NeedleEvaluation)
        return plan_costs(loaded, plan_devices(loaded))["evaluate"].disk / len(needle.lengths)

    question = Question(99, np.zeros(1, np.int32), ["1234567"], "x" * TAIL_CHARACTERS)
    head = {"checkpoint": "original", "suite": "needle", "task": "niah_single_2", "length": 32768}
    line = json.dumps({**head, **answer_record(question, 1.0, ["1234567"], " 1234567")})
    assert disk(2) - disk(1) >= 2 * (len(line) + 1)
