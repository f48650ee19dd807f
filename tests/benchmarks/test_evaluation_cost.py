"""Tokens that a model computes in an evaluation over those that its prompts have, padding included.

    pytest -s tests/benchmarks/test_evaluation_cost.py

A random model of two layers, batches of 8, the longest prompts first. RULER: four needle tasks at
two lengths, generated tokens included. GSM8K: `gsm8k_cot`, tokens of prompts over those of the
shared examples once and of every question; with the real test file where GSM8K_DIR names its folder
(default: ../shared/data/gsm8k), else made up. MMLU: the same with made-up questions and options.
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
from stages.evaluate.answers import AnswerFolder, EvaluatedModel
from stages.evaluate.models import load_evaluated
from stages.evaluate.stage import EvaluateConfig
from stages.evaluate.suite import Suite
from stages.evaluate.suites.harness import HarnessEvaluation
from stages.evaluate.suites.harness.suite import HarnessSuite
from stages.original import run as original
from tests.folders import write_jsonl
from tests.tiny_data import save_tiny_model

pytestmark = pytest.mark.slow

_QUESTIONS, _BATCH, _BOUND = 64, 8, 1.3
_GSM8K = Path(os.environ.get("GSM8K_DIR", Path(__file__).parents[3] / "shared/data/gsm8k"))


def _questions() -> list[dict[str, str]]:
    file = _GSM8K / "test.jsonl"
    if file.is_file():
        lines = file.read_text(encoding="utf-8").splitlines()[:_QUESTIONS]
        return [json.loads(line) for line in lines]
    return [
        {"question": f"{n} have " + "two apples each, " * (n % 13), "answer": f"#### {2 * n}"}
        for n in range(_QUESTIONS)
    ]


def _count_tokens(model: Any) -> list[tuple[int, int]]:
    """A list to which every later forward pass appends its rows and tokens per row."""
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

    generated = Suite.generated

    def count_distinct(suite: Suite, model: Any, questions: Any, max_tokens: int) -> Any:
        nonlocal distinct
        distinct += sum(len(question.prompt_ids) + max_tokens - 1 for question in questions)
        return generated(suite, model, questions, max_tokens)

    monkeypatch.setattr("stages.evaluate.models.load_evaluated", load)
    monkeypatch.setattr(Suite, "generated", count_distinct)
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


def _gsm8k(folder: Path) -> HarnessEvaluation:
    write_jsonl(folder / "gsm8k/test.jsonl", _questions())
    return HarnessEvaluation(tasks=["gsm8k_cot"], data_dir=str(folder), hub=False)


def _mmlu(folder: Path) -> HarnessEvaluation:
    rows = [
        {"question": f"Which of these has {n} " + "and more parts " * (n % 13) + "?",
         "choices": ["a bone", "a muscle", "a nerve", "a vein"], "answer": n % 4}
        for n in range(_QUESTIONS)
    ]  # fmt: skip
    for split, split_rows in (("dev", rows[:5]), ("test", rows)):
        write_jsonl(folder / f"mmlu_anatomy/{split}.jsonl", split_rows)
    return HarnessEvaluation(tasks=["mmlu_anatomy"], num_fewshot=5, data_dir=str(folder), hub=False)


def _texts(request: Any) -> tuple[str, str]:
    """A prompt, and the option after it where there is one."""
    text, option = request.args
    return text, option if isinstance(option, str) else ""


@pytest.mark.parametrize("task", [_gsm8k, _mmlu])
def test_shared_examples_are_computed_once(tmp_path: Path, task: Any) -> None:
    folder = save_tiny_model(tmp_path / "model")
    tokenizer = load_tokenizer(TokenizerSpec(str(folder)))
    loaded = load_model(folder, dtype="float32")
    model = materialize(loaded, HeadMask(np.array([[True, False]] * 2)), Window(64, 4))
    section = task(tmp_path / "data")
    answers = AnswerFolder(tmp_path / "answers", None, 0)
    suite = HarnessSuite(
        name="harness", section=section, tokenizer=tokenizer, answers=answers, rank=0, world=1,
        batch_size=_BATCH,
    )  # fmt: skip
    suite.prepare()
    [subtask] = suite.subtasks
    prompts = suite.requests(subtask)
    # An option's last token is not read, since nothing follows it: options may share a row.
    distinct_rows = {
        tuple(
            tokenizer(text + option)["input_ids"][:-1] if option else tokenizer(text)["input_ids"]
        )
        for requests in prompts.values()
        for text, option in map(_texts, requests)
    }
    ids = sorted(distinct_rows)
    columns = enumerate(zip(*ids, strict=False))
    shared_tokens = next(place for place, column in columns if len(set(column)) > 1)
    distinct = shared_tokens + sum(len(row) - shared_tokens for row in ids)

    passes = _count_tokens(model)
    evaluated = EvaluatedModel("hybrid", ModelConfig(path=str(folder)))
    with progress(len(prompts), "evaluation", "samples") as bar:
        suite.run(evaluated, model, bar)
    assert len(answers.read(evaluated, subtask)) == len(prompts)
    computed = sum(rows * width for rows, width in passes if width > 1)
    print(
        f"\n{len(prompts)} prompts of {sum(map(len, ids)):,} tokens: {computed:,} computed, "
        f"{distinct:,} distinct; ratio {computed / distinct:.2f}"
    )
    assert computed <= _BOUND * distinct
