"""search.sink: bias through the stages: estimated, searched, materialised, trained."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from bosch.errors import UserError
from bosch.heads import HeadMaskFile
from bosch.journal import Journal
from bosch.model.loading import load_model
from stages.context import ModelConfig, Runtime, StageConfig
from stages.materialize import run as materialize
from stages.materialize.stage import MaterializeConfig
from stages.search import run as search
from stages.search.stage import SearchConfig
from stages.train.model import load_for_training
from stages.train.optimizer import parameter_groups
from tests.hybrid_case import KV_HEADS, LAYERS, tokens
from tests.search_case import WINDOW, write_inputs
from tests.tiny_data import tiny_tokenizer
from tests.training_case import make_case, stage_config, train_here


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    base, prepared = write_inputs(tmp_path_factory.mktemp("inputs"))
    tiny_tokenizer().save_pretrained(base)
    return base, prepared


def _search(inputs: tuple[Path, Path], work: Path, **changes: Any) -> HeadMaskFile:
    base, prepared = inputs
    work.mkdir(exist_ok=True)
    options = {
        "swa_ratio": 0.5, "window_size": WINDOW, "budget_per_layer": 2, "sink": "bias", **changes,
    }  # fmt: skip
    model = ModelConfig(path=str(base), dtype="float32")
    config = StageConfig(SearchConfig(**options), model, 5, Runtime(eval_batch_size=3))
    search.run(config, {"prepare": prepared}, work)
    assert not list(work.glob("sink_bias*"))
    return HeadMaskFile.load(work / "head_mask.json")


def test_the_mask_is_materialised_with_the_estimated_bias(
    inputs: tuple[Path, Path], tmp_path: Path
) -> None:
    """The stage itself compares the saved model's logits with the searched one's."""
    file = _search(inputs, tmp_path / "search", method="bosch_plus")
    assert file.sink_bias is not None and len(file.sink_bias) == LAYERS
    (tmp_path / "work").mkdir()
    config = StageConfig(
        MaterializeConfig(dtype="float32"), ModelConfig(path=str(inputs[0])), 3, Runtime()
    )
    materialize.run(config, {"search": tmp_path / "search"}, tmp_path / "work")
    folder = tmp_path / "work/model"
    assert json.loads((folder / "config.json").read_text())["hybrid_attention"]["sink"] == "bias"
    weights = load_file(folder / "model.safetensors")
    for layer, (row, values) in enumerate(zip(file.mask.is_full, file.sink_bias, strict=True)):
        name = f"model.layers.{layer}.self_attn.sink_bias"
        if row.all():
            assert name not in weights
            continue
        order = torch.tensor(row).logical_not().argsort(stable=True)
        by_head = torch.tensor(values).view(KV_HEADS, -1)[order]
        torch.testing.assert_close(weights[name].view(KV_HEADS, -1), by_head)
    model, ids = load_model(folder, dtype="float32"), tokens(1, 30)
    with torch.no_grad():
        expected = model(ids).logits
        for module in model.modules():
            if hasattr(module, "sink_bias"):
                module.sink_bias.fill_(-1e4)
        assert (model(ids).logits - expected).abs().max() > 1e-4


def test_a_resumed_search_keeps_its_bias(inputs: tuple[Path, Path], tmp_path: Path) -> None:
    values = torch.randn(LAYERS, 8).tolist()
    kept = tmp_path / "stopped/sink_bias.jsonl"
    Journal(kept).append({"values": values})
    file = _search(inputs, tmp_path / "stopped", method="intr")
    assert file.sink_bias == tuple(map(tuple, values))
    # A damaged one is estimated again, as in a search that was never stopped.
    Journal(tmp_path / "damaged/sink_bias.jsonl").append({"values": values})
    text = (tmp_path / "damaged/sink_bias.jsonl").read_text()
    digit = next(place for place in range(20, 30) if text[place] in "123456789")
    damaged = f"{text[:digit]}{int(text[digit]) % 9 + 1}{text[digit + 1 :]}"
    (tmp_path / "damaged/sink_bias.jsonl").write_text(damaged)
    again = _search(inputs, tmp_path / "damaged", method="intr")
    assert again.sink_bias == _search(inputs, tmp_path / "whole", method="intr").sink_bias
    # A mask with a bias of its own, used unchanged.
    shutil.copy(tmp_path / "stopped/head_mask.json", tmp_path / "mask.json")
    again = _search(inputs, tmp_path / "given", method="given", mask=str(tmp_path / "mask.json"))
    assert again.sink_bias == file.sink_bias and again.score == file.score


def test_calibration_must_be_longer_than_the_window_and_four_tokens(
    inputs: tuple[Path, Path], tmp_path: Path
) -> None:
    records = (inputs[1] / "calibration/calibration.jsonl").read_text().splitlines()
    longest = max(len(json.loads(record)["input_ids"]) for record in records)
    with pytest.raises(UserError, match=r"search\.sink: no calibration example is longer than"):
        _search(inputs, tmp_path / "work", method="intr", window_size=longest - 4)


@pytest.mark.parametrize(
    "options",
    [{}, {"freeze": "attention_only"}, {"lora": {"rank": 2}}],
    ids=["all", "attn", "lora"],
)
def test_training_refines_the_bias_without_weight_decay(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    case = make_case(tmp_path, sink_bias=True)
    model_dir = case / "materialize/model"
    train = {"total_tokens": 2 * 4 * 32, "checkpoint_tokens": [2 * 4 * 32], **options}
    config = stage_config(train)
    loaded = load_for_training(model_dir, config.model, config.section, config.runtime)
    bias = dict(loaded.named_parameters())["model.layers.0.self_attn.sink_bias"]
    groups = parameter_groups(loaded, 0.1)
    assert any(bias is parameter for parameter in groups[1]["params"])
    train_here(case, tmp_path / "work", train=train)
    (trained,) = (tmp_path / "work").rglob("checkpoints/*/model.safetensors")
    before, after = load_file(model_dir / "model.safetensors"), load_file(trained)
    assert before.keys() == after.keys()
    for layer in range(2):
        name = f"model.layers.{layer}.self_attn.sink_bias"
        full = 2 if layer == 0 else 0  # of four query heads
        assert torch.equal(before[name][:full], after[name][:full])
        assert bool((before[name][full:] != after[name][full:]).all())
