"""One model shared by two processes: the numbers and the masks of one process."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from bosch.errors import RunError, UserError
from bosch.heads import HeadMaskFile
from bosch.model import tensor_parallel as sharding
from bosch.ranks import Ranks
from stages.context import ModelConfig, Runtime, StageConfig
from stages.search import run as search
from stages.search.stage import SearchConfig
from tests.hybrid_case import KV_HEADS, small_model
from tests.rank_processes import run_order
from tests.search_case import WINDOW, order, write_inputs
from tests.sharded_case import FAMILIES, alone


def config_of(base: Path, **runtime) -> StageConfig:
    return StageConfig(
        section=SearchConfig(swa_ratio=0.5, window_size=WINDOW, budget_per_layer=4),
        model=ModelConfig(path=str(base), dtype="float32"),
        seed=5,
        runtime=Runtime(eval_batch_size=2, **runtime),
    )


@pytest.fixture
def one_thread(monkeypatch):
    """Here and in the processes that are started: what is reused depends on it."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("one_thread")
def test_shards_of_every_kind_of_plan_give_the_numbers_of_the_whole_model(tmp_path):
    inputs = {family: tmp_path / family for family in FAMILIES}
    for family, folder in inputs.items():
        small_model(family).save_pretrained(folder)
    work = tmp_path / "work"
    work.mkdir()
    families = order(config_of(inputs["qwen3"]), inputs, work, "tests.sharded_case:families")
    assert run_order(families, 2) == 0
    results = json.loads((work / "found.json").read_text())
    for family, folder in inputs.items():
        result, expected = results[family], alone(folder)
        close = {"rtol": 1e-4, "atol": 1e-4}
        assert result["agree"]
        assert result["scores"] == expected["scores"]
        assert result["fingerprint"] == expected["fingerprint"]
        if result["reuse"]:  # where queries are gathered, reuse may not be exact and then stays off
            np.testing.assert_allclose(result["work"], expected["work"])
        assert result["reuse"] or family not in ("qwen3", "qwen3_moe")
        np.testing.assert_allclose(result["log_likelihoods"], expected["log_likelihoods"], **close)
        assert len(set(np.round(expected["log_likelihoods"], 4))) > 4
        np.testing.assert_allclose(result["gradient"], expected["gradient"], **close)
        for name, scores in expected["rankings"].items():
            np.testing.assert_allclose(result["rankings"][name], scores, err_msg=name, **close)
        rows, columns = result["whole"]
        heads = KV_HEADS if family in ("olmo2", "phi3") else KV_HEADS // 2
        assert result["held"] == [[[rows // 2, columns], heads]] * 2


def test_a_sharded_search_ends_with_the_mask_of_one_process(tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    base, prepared = write_inputs(tmp_path)
    inputs, folders = {"prepare": prepared}, [tmp_path / "alone", tmp_path / "sharded"]
    for folder in folders:
        folder.mkdir()
    search.run(config_of(base), inputs, folders[0])
    sharded = config_of(base, search_parallel="tensor")
    assert run_order(order(sharded, inputs, folders[1], "stages.search.run:run"), 2) == 0
    masks = [HeadMaskFile.load(folder / "head_mask.json") for folder in folders]
    assert masks[0] == masks[1]
    assert "sharded over 2 processes" in (folders[1] / "stage.log").read_text()
    lines = [json.loads(line) for line in (folders[1] / "evaluations.jsonl").open()]
    assert all("2 shards" in line["numerics"] for line in lines)


def test_what_cannot_be_sharded_is_refused_in_a_sentence(tmp_path, monkeypatch):
    small_model("qwen3").save_pretrained(tmp_path)
    with pytest.raises(UserError, match="4 KV heads cannot be divided among 3 processes"):
        sharding.load_sharded(tmp_path, Ranks(shards=3), dtype="float32")
    read = sharding.load_config

    def without_plan(*args, **options):
        config = read(*args, **options)
        config.base_model_tp_plan = None
        return config

    monkeypatch.setattr(sharding, "load_config", without_plan)
    with pytest.raises(UserError, match="no tensor-parallel plan for models of type 'qwen3'"):
        sharding.load_sharded(tmp_path, Ranks(shards=2), dtype="float32")


def test_a_model_that_is_not_really_sharded_is_found(tmp_path):
    with pytest.raises(RunError, match="instead of 1 in 2"):
        sharding.check_shards(small_model("qwen3"), 2)
