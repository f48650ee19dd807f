"""plan and validate for published models without weights, tokenizer or network."""

from __future__ import annotations

import json
import shutil
import socket
from pathlib import Path
from typing import Any

import pytest

from pipeline.cli import main
from pipeline.recipe.model_shape import SHAPES, read_model
from stages.shape import stored_shape
from stages.stage import ModelInfo
from tests.pipeline_case import Case

# Numbers of parameters in the models' cards and files.
PARAMETERS = {
    "Qwen/Qwen3-1.7B-Base": 1_720_574_976,
    "Qwen/Qwen3-8B-Base": 8_190_735_360,
    "Qwen/Qwen3-14B-Base": 14_768_307_200,
    "Qwen/Qwen3-30B-A3B-Base": 30_532_122_624,
    "meta-llama/Llama-3.1-8B": 8_030_261_248,
    "HuggingFaceTB/SmolLM2-135M-Instruct": 134_515_008,
    "allenai/Olmo-3-1025-7B": 7_298_011_136,
}
# Billions in the cards of models whose checkpoints also hold an image tower.
BILLIONS = {
    "Qwen/Qwen3.5-9B-Base": 9, "Qwen/Qwen3.6-27B": 27, "Qwen/Qwen3.6-35B-A3B": 35,
    "google/gemma-4-31B": 31,
}  # fmt: skip


@pytest.fixture
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty hub cache, and an error for every connection."""

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("the network was used")

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache/hub"))
    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


@pytest.mark.parametrize("name", [*PARAMETERS, *BILLIONS])
def test_a_published_shape_has_the_models_parameters(
    name: str, tmp_path: Path, offline: None
) -> None:
    info, faults = read_model(name, None, tmp_path, fetch=False)
    assert (faults, type(info)) == ([], ModelInfo)
    assert info is not None
    parameters = stored_shape(info).parameters
    if name in BILLIONS:
        assert round(parameters / 1e9) == BILLIONS[name]
    else:
        assert parameters == PARAMETERS[name]


def test_a_large_model_is_sized_without_its_memory() -> None:
    """As large as Qwen3-235B-A22B: 876 GiB of weights in float32."""
    content = json.loads((SHAPES / "qwen3_30b_a3b" / "config.json").read_text())
    content |= {"hidden_size": 4096, "num_hidden_layers": 94, "num_attention_heads": 64}
    content |= {"moe_intermediate_size": 1536, "intermediate_size": 12288}
    shape = stored_shape(ModelInfo(content))
    assert shape.parameters == 235_093_634_560
    assert shape.active_parameters == pytest.approx(22e9, rel=0.03)  # and its name says 22


def test_validate_names_the_files_that_a_run_would_download(
    tmp_path: Path, offline: None, capsys: pytest.CaptureFixture[str]
) -> None:
    case = Case(tmp_path / "case")
    assert main(["validate", str(case.file)]) == 0
    assert "fetches" not in capsys.readouterr().out
    case.content["model"]["path"] = "Qwen/Qwen3-8B-Base"
    case.save()
    assert main(["validate", str(case.file)]) == 0
    assert "a run fetches the model Qwen/Qwen3-8B-Base" in capsys.readouterr().out
    assert main(["validate", str(case.file), "model.path=nobody/unknown"]) == 0
    assert "its shape is not known here" in capsys.readouterr().out
    # First all files are in the hub's cache, then the weights are not.
    snapshot = tmp_path / "cache" / "hub" / "models--some--model" / "snapshots" / "main"
    shutil.copytree(case.model, snapshot)
    for is_noted in (False, True):
        assert main(["validate", str(case.file), "model.path=some/model"]) == 0
        assert ("a run fetches the model some/model: " in capsys.readouterr().out) == is_noted
        (snapshot / "model.safetensors").unlink(missing_ok=True)


def test_a_plan_needs_only_a_configuration(
    tmp_path: Path, offline: None, capsys: pytest.CaptureFixture[str]
) -> None:
    case = Case(tmp_path / "case")
    for name in ("Qwen/Qwen3-8B-Base", str(SHAPES / "qwen3_8b")):
        assert main(["plan", str(case.file), f"model.path={name}"]) == 0
        assert "15.3 GiB" in capsys.readouterr().out
        assert main(["plan", str(case.file), f"model.path={name}", "model.dtype=float32"]) == 0
        assert " memory       30.5 GiB of weights" in capsys.readouterr().out
    assert main(["plan", str(case.file), "model.path=nobody/unknown"]) == 2
    assert "the shape of nobody/unknown is not known here" in capsys.readouterr().err
