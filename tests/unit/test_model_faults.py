"""What is wrong with a recipe's model is told before anything runs, and nothing else is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipeline.recipe.load import load_recipe
from tests.pipeline_case import Case, truncate, write_safetensors


@pytest.fixture
def case(tmp_path: Path) -> Case:
    return Case(tmp_path)


@pytest.mark.parametrize(
    ("damage", "expected"),
    [
        (lambda c: (c.model / "config.json").unlink(), "has no config.json"),
        (lambda c: (c.model / "config.json").write_text("{"), "cannot be read as JSON"),
        (lambda c: (c.model / "config.json").write_text("[]"), "expected a JSON object"),
        (lambda c: c.change_config(num_hidden_layers=None), "num_hidden_layers = None"),
        (lambda c: c.change_config(num_key_value_heads=3), "no multiple of its 3 KV heads"),
        (lambda c: c.change_config(model_type=None), "names no model_type"),
        (lambda c: c.change_config(hybrid_attention={"sinks": 0}), "is a hybrid model already"),
        (lambda c: (c.model / "tokenizer.json").unlink(), "has no tokenizer files"),
        (lambda c: (c.model / "model.safetensors").unlink(), "are missing"),
        (lambda c: (c.model / "model.safetensors").write_bytes(b"ab"), "header is cut short"),
        (lambda c: truncate(c.model / "model.safetensors", 1), "its header asks for"),
        (lambda c: truncate(c.model / "model.safetensors", 30), "header is cut short"),
        (lambda c: write_index(c, "gone.safetensors"), "gone.safetensors are missing"),
        (lambda c: (c.model / "model.safetensors.index.json").write_text("{}"), "no weight_map"),
    ],
)
def test_damaged_models_are_refused(
    case: Case, damage: Callable[[Case], object], expected: str
) -> None:
    damage(case)
    message = case.fault()
    assert message.startswith("model.path: ")
    assert expected in message


def write_index(case: Case, name: str) -> None:
    write_safetensors(case.model / "part.safetensors")
    weights = {"w": "part.safetensors", "v": name}
    index = case.model / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weights}))


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"model_type": "bert"}, "'bert' are not supported: it is an encoder"),
        ({"kv_lora_rank": 64}, "latent attention"),
        ({"model_type": "mistral", "sliding_window": 9}, "(9 tokens) in every layer"),
        ({"layer_types": ["linear_attention"] * 4}, "no layer of it has full attention"),
    ],
)
def test_models_that_cannot_be_searched(case: Case, config: dict[str, Any], expected: str) -> None:
    case.change_config(**config)
    message = case.fault("search.buckets=[0,0.25]")
    assert message.startswith("2 faults")
    (line,) = [line for line in message.splitlines() if line.startswith("  model.path: ")]
    assert expected in line


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "mistral", "sliding_window": None},
        {"sliding_window": 9},
        {"sliding_window": 9, "use_sliding_window": False},
        {"sliding_window": None, "layer_types": ["sliding_attention"] * 4},
        {"layer_types": ["full_attention"] * 4, "sliding_window": 9},
        {"model_type": "gemma3_text", "sliding_window": None},
        {"model_type": "gemma2", "sliding_window": 9},
        {"model_type": "gpt_oss"},
        {"model_type": "olmo3", "sliding_window": 9},
        {"model_type": "exaone4", "sliding_window": 9, "sliding_window_pattern": 2},
        {"layer_types": ["full_attention", "sliding_attention"] * 2, "sliding_window": 9},
    ],
)
def test_models_that_have_full_layers_are_not_refused(case: Case, config: dict[str, Any]) -> None:
    case.change_config(**config)
    assert load_recipe(case.file).info is not None


def test_a_hybrid_hub_name_needs_no_network_for_status(case: Case) -> None:
    loaded = load_recipe(case.file, ["model.path=some/model"], fetch=False)
    assert loaded.info is None
    assert loaded.recipe.model.path == "some/model"
