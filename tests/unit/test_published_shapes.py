"""What plan and validate know of the published models without weights, tokenizer or network."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import pytest

from bosch.errors import UserError
from pipeline.cli import main
from pipeline.recipe.load import load_recipe
from pipeline.recipe.model_shape import SHAPES, read_model
from stages.recipe import ModelInfo
from tests.pipeline_case import Case

# Parameters that the models' cards and files state.
PARAMETERS = {
    "Qwen/Qwen3-1.7B-Base": 1_720_574_976,
    "Qwen/Qwen3-8B-Base": 8_190_735_360,
    "Qwen/Qwen3-14B-Base": 14_768_307_200,
    "Qwen/Qwen3-30B-A3B-Base": 30_532_122_624,
    "meta-llama/Llama-3.1-8B": 8_030_261_248,
}


@pytest.fixture
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty cache, and an error wherever a connection is tried."""

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("the network was used")

    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


@pytest.mark.parametrize("name", PARAMETERS)
def test_a_published_shape_has_the_model_s_parameters(
    name: str, tmp_path: Path, offline: None
) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    info, faults = read_model(name, None, tmp_path, fetch=False)
    assert (faults, type(info)) == ([], ModelInfo)
    assert info is not None
    folder = next(
        path.parent
        for path in SHAPES.glob("*/config.json")
        if json.loads(path.read_text())["_name_or_path"] == name
    )
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    model.tie_weights()
    assert sum(parameter.numel() for parameter in model.parameters()) == PARAMETERS[name]


def test_validate_names_what_a_run_would_fetch(
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


def test_a_plan_needs_a_configuration_and_nothing_else(
    tmp_path: Path, offline: None, capsys: pytest.CaptureFixture[str]
) -> None:
    case = Case(tmp_path / "case")
    for name in ("Qwen/Qwen3-8B-Base", str(SHAPES / "qwen3_8b")):
        assert main(["plan", str(case.file), f"model.path={name}"]) == 0
        assert "15.3 GiB" in capsys.readouterr().out
    assert main(["plan", str(case.file), "model.path=nobody/unknown"]) == 2
    assert "the shape of nobody/unknown is not known here" in capsys.readouterr().err


def test_a_run_needs_the_files_themselves(tmp_path: Path) -> None:
    case = Case(tmp_path / "case")
    with pytest.raises(UserError, match="has no tokenizer files"):
        load_recipe(case.file, [f"model.path={SHAPES / 'qwen3_8b'}"])
