"""Tokens that a model computes in an evaluation over those that its prompts have, padding included.

    pytest -s tests/benchmarks/test_evaluation_cost.py

A random model of two layers, batches of 8, the longest prompts first. RULER: four needle tasks at
two lengths, generated tokens included. GSM8K: `gsm8k_cot`, tokens of prompts over those of the
shared examples once and of every question; with the real test file where GSM8K_DIR names its folder
(default: ../shared/data/gsm8k), else made up.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bosch.heads import HeadMask
from bosch.model.loading import load_model
from bosch.model.materialize import materialize
from bosch.progress import progress
from bosch.window import Window
from data_prep.documents.tokenizer import TokenizerSpec, load_tokenizer
from stages.context import ModelConfig, Runtime, StageConfig
from stages.evaluate.answers import AnswerFolder, Evaluated
from stages.evaluate.harness_suite import HarnessSuite
from stages.evaluate.models import load_evaluated
from stages.evaluate.stage import EvaluateConfig, HarnessEvaluation
from stages.evaluate.suite import Suite
from stages.original import run as original
from tests.tiny_data import save_tiny_model

pytestmark = pytest.mark.slow

_QUESTIONS, _BATCH, _BOUND = 64, 8, 1.3
_REAL = Path(os.environ.get("GSM8K_DIR", Path(__file__).parents[3] / "shared/data/gsm8k"))


def _questions() -> list[dict[str, str]]:
    file = _REAL / "test.jsonl"
    if file.is_file():
        lines = file.read_text(encoding="utf-8").splitlines()[:_QUESTIONS]
        return [json.loads(line) for line in lines]
    return [
        {"question": f"{n} have " + "two apples each, " * (n % 13), "answer": f"#### {2 * n}"}
        for n in range(_QUESTIONS)
    ]


def _count_tokens(model: Any) -> list[tuple[int, int]]:
    """Rows and tokens of every pass from now on."""
    passes: list[tuple[int, int]] = []
    model.get_input_embeddings().register_forward_hook(
        lambda module, inputs, output: passes.append(tuple(inputs[0].shape))
    )
    return passes


def test_needle_prompts_are_padded_little(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save_tiny_model(tmp_path / "model")
    passes: list[list[tuple[int, int]]] = []
    distinct = 0

    def load(*arguments: Any) -> Any:
        model = load_evaluated(*arguments)
        passes.append(_count_tokens(model))
        return model

    answer = Suite.generated

    def ask(suite: Suite, model: Any, questions: Any, most: int) -> Any:
        nonlocal distinct
        distinct += sum(len(question.prompt_ids) + most - 1 for question in questions)
        return answer(suite, model, questions, most)

    monkeypatch.setattr("stages.evaluate.models.load_evaluated", load)
    monkeypatch.setattr(Suite, "generated", ask)
    tasks = ["niah_single_1", "niah_single_2", "niah_multikey_1", "niah_multikey_2"]
    needle = {"tasks": tasks, "lengths": [512, 1024], "samples": 20, "max_new_tokens": 16}
    config = StageConfig(
        EvaluateConfig.model_validate({"needle": needle}),
        ModelConfig(path=str(folder), dtype="float32"),
        seed=1,
        runtime=Runtime(eval_batch_size=_BATCH),
        model_identity="m" * 64,
    )
    (tmp_path / "work").mkdir()
    original.run(config, {}, tmp_path / "work")
    computed = sum(rows * width for rows, width in passes[0])
    print(f"\n{computed:,} tokens for {distinct:,} distinct; ratio {computed / distinct:.2f}")
    assert 0 < computed <= _BOUND * distinct


def test_shared_examples_are_computed_once(tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path / "model")
    tokenizer = load_tokenizer(TokenizerSpec(str(folder)))
    loaded = load_model(folder, dtype="float32")
    model = materialize(loaded, HeadMask(np.array([[True, False]] * 2)), Window(64, 4))
    (tmp_path / "data/gsm8k").mkdir(parents=True)
    lines = [json.dumps(question) for question in _questions()]
    (tmp_path / "data/gsm8k/test.jsonl").write_text("\n".join(lines))
    section = HarnessEvaluation(tasks=["gsm8k_cot"], data_dir=str(tmp_path / "data"), hub=False)
    answers = AnswerFolder(tmp_path / "answers", None, 0)
    suite = HarnessSuite(
        name="harness", section=section, tokenizer=tokenizer, answers=answers, rank=0, world=1,
        batch_size=_BATCH,
    )  # fmt: skip
    suite.prepare()
    [subtask] = suite.subtasks
    prompts = [request.args[0] for [request] in suite.requests(subtask).values()]
    ids = [tokenizer(prompt)["input_ids"] for prompt in prompts]
    columns = enumerate(zip(*ids, strict=False))
    beginning = next(place for place, column in columns if len(set(column)) > 1)
    distinct = beginning + sum(len(row) - beginning for row in ids)

    counts = _count_tokens(model)
    evaluated = Evaluated("hybrid", ModelConfig(path=str(folder)))
    with progress(len(prompts), "evaluation", "samples") as bar:
        suite.run(evaluated, model, bar)
    assert len(answers.read(evaluated, subtask)) == len(prompts)
    computed = sum(width * rows for rows, width in counts if width > 1)
    print(
        f"\n{len(prompts)} prompts of {sum(map(len, ids)):,} tokens: {computed:,} computed, "
        f"{distinct:,} distinct; ratio {computed / distinct:.2f}"
    )
    assert computed <= _BOUND * distinct
