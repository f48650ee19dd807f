"""A small random model of each class that a recipe names, through every stage.

CI runs one of them: hybrids of hybrids inside a checkpoint with an image tower. `launch/test.sh
full` runs all.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from pipeline.recipe.load import load_recipe
from pipeline.run.runner import Runner
from pipeline.run.worker import execute
from tests.hybrid_case import ALL_FAMILIES, small_model
from tests.pipeline_case import Case
from tests.tiny_data import tiny_tokenizer

MODELS = ("qwen3_5", "qwen3_5_moe", "gemma4", "olmo3")


def _answers(model: Path) -> list[dict[str, Any]]:
    """Examples of tokens that the model itself continues so; it answers no question."""
    own = AutoModelForCausalLM.from_pretrained(model)
    records = []
    for number in range(4):
        prompt = torch.arange(3, 90 + number)[None]
        ids = own.generate(prompt, max_new_tokens=2, do_sample=False)[0].tolist()
        records.append({"input_ids": ids, "answer_length": 2})
    return records


@pytest.mark.parametrize("family", MODELS if ALL_FAMILIES else MODELS[:1])
def test_a_recent_model_runs_through_every_stage(family: str, tmp_path: Path) -> None:
    case = Case(tmp_path)
    shutil.rmtree(case.model)
    sizes = {"vocab_size": 512, "max_position_embeddings": 4096}
    if family == "gemma4":
        sizes["vocab_size_per_layer_input"] = 512
    small_model(family, **sizes).save_pretrained(case.model)
    tiny_tokenizer().save_pretrained(case.model)
    (case.corpus / "a.txt").write_text("the cat sat on the mat\n\n" * 2000)
    case.content["model"]["dtype"] = "float32"
    case.content["prepare"]["calibration"]["length"] = 1024
    case.content["search"] |= {"method": "bosch_plus", "budget_per_layer": 4}
    case.content["train"] |= {"mixed_precision": "no", "teacher": "original"}
    ruler = {"lengths": [1024], "samples": 2, "max_new_tokens": 4}
    case.content["evaluate"] = {"tasks": ["niah_single_1"], "ruler": ruler}
    case.save()

    def here(order: Mapping[str, Any], _world: Any) -> dict[str, Any]:
        if order["stage"] == "search":
            lines = "".join(json.dumps(record) + "\n" for record in _answers(case.model))
            (Path(order["work_dir"]) / "calibration.jsonl").write_text(lines)
        return execute(order)

    Runner(load_recipe(case.file, (), env={}), launcher=here).run()
    scores = json.loads((case.output("evaluate") / "scores.json").read_text())["checkpoints"]
    assert set(scores) == {"original", "hybrid", "tokens-1024", "tokens-2048"}
    summary = json.loads((case.output("search") / "summary.json").read_text())
    assert summary["gradients"] > 0
    trained = case.output("train") / "checkpoints" / "tokens-2048"
    config = AutoModelForCausalLM.from_pretrained(trained).config
    windows = json.loads((case.output("search") / "head_mask.json").read_text())["windows"]
    assert {size for row in windows for size in row} == {0, 32}
    assert config.hybrid_attention["windows"] == windows
