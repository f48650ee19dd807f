"""Faults of a recipe's model are reported before anything runs, and valid models are accepted."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from bosch.errors import UserError
from bosch.model.loading import load_config
from data_prep.documents.tokenizer import TokenizerSpec, load_tokenizer
from pipeline.recipe.load import load_recipe
from stages.materialize.weights import weight_faults
from tests.pipeline_case import Case, truncate, write_safetensors
from tests.tiny_data import save_tiny_model


@pytest.mark.parametrize(
    ("damage", "expected"),
    [
        (lambda c: (c.model / "config.json").unlink(), "has no config.json"),
        (lambda c: (c.model / "config.json").write_text("{"), "cannot be read as JSON"),
        (lambda c: (c.model / "config.json").write_text("[]"), "expected a JSON object"),
        (lambda c: (c.model / "tokenizer.json").unlink(), "has no tokenizer files"),
        (lambda c: (c.model / "model.safetensors").unlink(), "are missing"),
        (lambda c: (c.model / "model.safetensors").write_bytes(b"ab"), "header is cut short"),
        (lambda c: truncate(c.model / "model.safetensors", 1), "its header asks for"),
        (lambda c: truncate(c.model / "model.safetensors", 330_000), "header is cut short"),
        (lambda c: write_index(c, "gone.safetensors"), "gone.safetensors are missing"),
        (lambda c: (c.model / "model.safetensors.index.json").write_text("{}"), "no weight_map"),
        (lambda c: (c.model / "adapter_config.json").write_text("{}"), "beside the model"),
        (
            lambda c: (c.model / "shard-00000-model-00000-of-00001.safetensors").touch(),
            "beside the model",
        ),
        (lambda c: (c.model / "generation_config.json").symlink_to("gone"), "No such file"),
        (
            lambda c: (c.model / "generation_config.json").write_text("7"),
            "generation_config.json cannot be read as JSON (expected a JSON object)",
        ),
        (lambda c: write_generation(c, penalty_alpha=0.6), "penalty_alpha = 0.6 would load other"),
        (
            lambda c: (c.model / "tokenizer_config.json").write_text(
                '{"fast_tokenizer_files": ["tokenizer.4.0.json"]}'
            ),
            "other code or files",
        ),
        (
            lambda c: (c.model / "tokenizer_config.json").write_text('{"gguf_file": "/a.gguf"}'),
            "other code or files",
        ),
    ],
)
def test_damaged_models_are_refused(
    case: Case, damage: Callable[[Case], object], expected: str
) -> None:
    damage(case)
    message = case.fault()
    assert message.startswith("model.path: ")
    assert expected in message


def write_generation(case: Case, **settings: Any) -> None:
    (case.model / "generation_config.json").write_text(json.dumps(settings))


def write_index(case: Case, name: str) -> None:
    write_safetensors(case.model / "part.safetensors")
    weights = {"w": "part.safetensors", "v": name}
    index = case.model / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weights}))


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "mistral", "sliding_window": None},
        {"model_type": "phi3", "sliding_window": 2**20},  # beyond the model's positions
        {"sliding_window": 9},
        {"sliding_window": 9, "use_sliding_window": False},
        {"sliding_window": None, "layer_types": ["sliding_attention"] * 4},
        {"layer_types": ["full_attention"] * 4, "sliding_window": 9},
        {"model_type": "gemma3_text", "sliding_window": None},
        {"model_type": "gemma2", "sliding_window": 9},
        {"model_type": "gpt_oss"},
        {"model_type": "gpt_oss", "quantization_config": {"quant_method": "mxfp4"}},
        {"attn_implementation": "flash_attention_2", "experts_implementation": None},
        {"use_kernels": False, "quantization_config": {"quant_method": "fp8"}},
        {"model_type": "olmo3", "sliding_window": 9},
        {"model_type": "exaone4", "sliding_window": 9, "sliding_window_pattern": 2},
        {"layer_types": ["full_attention", "sliding_attention"] * 2, "sliding_window": 9},
    ],
)
def test_models_with_layers_of_full_attention_are_accepted(
    case: Case, config: dict[str, Any]
) -> None:
    case.change_config(**{"layer_types": None, **config})
    assert load_recipe(case.file).info is not None


def test_a_hybrid_hub_name_needs_no_network_for_status(case: Case) -> None:
    loaded = load_recipe(case.file, ["model.path=some/model"], fetch=False)
    assert loaded.info is None
    assert loaded.recipe.model.path == "some/model"


def hub_snapshot(cache: Path, patch: pytest.MonkeyPatch) -> Path:
    """An empty snapshot of some/one in a cache of the hub."""
    repository = cache / "models--some--one"
    snapshot = repository / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(snapshot.name)
    patch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache))
    return snapshot


def test_a_model_of_the_hub_needs_no_generation_config(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = hub_snapshot(tmp_path, monkeypatch)
    (snapshot / "config.json").write_text('{"model_type": "gpt2", "n_layer": 3}')
    assert load_config("some/one").num_hidden_layers == 3
    (snapshot / "generation_config.json").write_text("[]")
    with pytest.raises(UserError, match=r"generation_config\.json"):
        load_config("some/one")


@pytest.mark.parametrize(
    ("files", "said"),
    [
        (
            {"config.json": '{"model_type": "gpt2"}', "vocab.json": "{"},
            r"vocab\.json cannot be rea",
        ),
        ({"tokenizer.json": '{"version": "1.0", '}, r"tokenizer\.json cannot be read as JSON"),
        (
            {"config.json": '{"model_type": "qwen3", "rms_norm_eps": "small"}'},
            "no tokenizer could be loaded .*'rms_norm_eps' expected float",
        ),
    ],
)
def test_a_damaged_file_of_a_tokenizer_is_named(
    files: dict[str, str], said: str, tmp_path: Path
) -> None:
    if "vocab.json" not in files:
        save_tiny_model(tmp_path)
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(UserError, match=said) as caught:
        load_tokenizer(TokenizerSpec(str(tmp_path)))
    assert "\n" not in str(caught.value)


def _renamed(prefix: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda weights: {prefix + name: value for name, value in weights.items()}


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (_renamed("_orig_mod."), "weights are missing or of another shape"),
        (_renamed("module."), "weights are missing or of another shape"),
        (lambda w: {**w, "model.norm.weight": torch.zeros(0)}, "model.norm.weight first"),
        (lambda w: {**w, "v_head.summary.weight": torch.zeros(1, 4)}, "have no place in the model"),
        (lambda w: w, None),
    ],
)
def test_validate_compares_the_headers_of_weights_with_the_model(
    change: Callable[[dict[str, Any]], dict[str, Any]], expected: str | None, tmp_path: Path
) -> None:
    folder = save_tiny_model(tmp_path / "model")
    weights = change(load_file(folder / "model.safetensors"))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    info = SimpleNamespace(directory=folder)
    model = SimpleNamespace(loading={})
    faults = list(weight_faults(SimpleNamespace(info=info, recipe=SimpleNamespace(model=model))))  # type: ignore[arg-type]
    assert len(faults) == (expected is not None)
    assert expected is None or (expected in faults[0].text and faults[0].path == "model.path")
