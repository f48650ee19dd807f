"""The search on two processes that share examples, a model or each sequence, with a kill."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from bosch import ranks
from bosch.errors import RunError, UserError
from bosch.heads import HeadMask
from bosch.model import tensor_parallel as sharding
from bosch.model.fingerprint import model_fingerprint
from bosch.model.interface import attention_modules, head_state
from bosch.model.loading import load_model
from bosch.model.search_mode import prepare_for_search
from bosch.objective.calibration import CalibrationSet
from bosch.objective.evaluation_log import EvaluationLog
from bosch.objective.objective import Objective
from bosch.ranks import Ranks
from bosch.search.methods import METHODS
from bosch.window import Window
from pipeline.run.failures import LOST_RANK_STATUS
from stages.context import StageConfig
from stages.search import run as search
from stages.search.processes import join_process_group
from stages.search.stage import SearchConfig
from tests.hybrid_case import KV_HEADS, LAYERS, random_mask, small_model, tokens
from tests.rank_processes import run_order
from tests.search_case import WINDOW, config_of, order, write_inputs

pytestmark = pytest.mark.usefixtures("one_thread")

SEARCH = SearchConfig(swa_ratio=0.5, window_size=WINDOW, budget_per_layer=4)
PLUS = SearchConfig(method="bosch_plus", swa_ratio=0.5, window_size=WINDOW)
FRONT = SearchConfig(
    method="front", windows=[4, WINDOW], budget={"ratio": 0.5, "context": 40}, budget_per_layer=30
)
_KILLED_AT = 9
FAMILIES = ("qwen3", "qwen3_moe", "olmo2", "phi3")


@pytest.fixture
def case(tmp_path):
    """A saved model, the inputs of a search, and folders for one process and for two."""
    base, prepared = write_inputs(tmp_path)
    folders = [tmp_path / "alone", tmp_path / "two"]
    for folder in folders:
        folder.mkdir()
    return base, {"prepare": prepared}, folders


def read(folders, name):
    return [json.loads((folder / name).read_text()) for folder in folders]


def search_or_die(
    config: StageConfig, inputs: Mapping[str, Path], work_dir: Path
) -> dict[str, Any]:
    """The search; its second rank dies after KILL_AT evaluations, if set."""
    append = EvaluationLog.append

    def append_or_die(self: Any, mask: Any, evaluation: Any, stage: str) -> None:
        append(self, mask, evaluation, stage)
        if os.environ["RANK"] == "1" and len(self) == int(os.environ["KILL_AT"]):
            os.kill(os.getpid(), signal.SIGKILL)

    if "KILL_AT" in os.environ:
        ranks.REPORT_SECONDS = 1.0  # what the other one waits for it
        EvaluationLog.append = append_or_die  # type: ignore[method-assign]
    return search.run(config, inputs, work_dir)


def test_two_ranks_find_what_one_finds_also_after_a_kill(case):
    base, inputs, folders = case
    config = config_of(base, SEARCH)
    search.run(config, inputs, folders[0])
    two = order(config, inputs, folders[1], f"{__name__}:search_or_die")
    assert run_order(two, 2, {"KILL_AT": str(_KILLED_AT)}) in (-signal.SIGKILL, LOST_RANK_STATUS)
    log = folders[1] / "evaluations.jsonl"
    assert len(log.read_text().splitlines()) in (_KILLED_AT - 1, _KILLED_AT)
    assert not (folders[1] / "head_mask.json").exists()
    with log.open("a") as file:
        file.write('{"mask": "3x4')

    assert run_order(two, 2) == 0
    assert "resuming from" in (folders[1] / "stage.log").read_text()
    masks, summaries = read(folders, "head_mask.json"), read(folders, "summary.json")
    assert masks[0] == masks[1]
    for name in ("trace", "notes", "best_log_likelihood", "evaluations", "reused_evaluations"):
        assert summaries[0][name] == summaries[1][name]
    keys = [json.loads(line)["mask"] for line in log.open()]
    assert len(keys) == len(set(keys)) == summaries[0]["evaluations"]


@pytest.mark.parametrize(
    ("section", "parallel", "numerics"),
    [
        (PLUS, "data", ""), (FRONT, "data", ""),
        (SEARCH, "tensor", "2 shards"), (PLUS, "context", "2 parts"),
    ],
)  # fmt: skip
def test_two_processes_find_what_one_finds(section, parallel, numerics, case):
    """Gradients, swaps, evaluations that end early, and held-out examples.

    Bit for bit if each process measures its own examples.
    """
    base, inputs, folders = case
    search.run(config_of(base, section), inputs, folders[0])
    two = config_of(base, section, search_parallel=parallel)
    assert run_order(order(two, inputs, folders[1], "stages.search.run:run"), 2) == 0
    results = read(folders, "front.json" if section is FRONT else "head_mask.json")
    assert results[0] == results[1]
    summaries = read(folders, "summary.json")
    exact = ("trace", "notes", "best_log_likelihood", "evaluations") if parallel == "data" else ()
    for name in (*exact, "best_score", "gradients"):
        assert summaries[0][name] == summaries[1][name]
    likelihoods = [summary["best_log_likelihood"] for summary in summaries]
    assert likelihoods[0] == pytest.approx(likelihoods[1], abs=1e-6)
    assert (summaries[0]["gradients"] >= 3) == (section is not SEARCH)
    if section is PLUS:
        assert any(point["is_bound"] for point in summaries[0]["trace"])
    logs = [
        [json.loads(line) for line in (folder / "evaluations.jsonl").open()] for folder in folders
    ]
    for log, words in ((logs[0], ""), (logs[1], numerics)):
        assert all(
            (one in line["numerics"]) == (one == words)
            for line in log for one in ("2 shards", "2 parts")
        )  # fmt: skip
    if parallel != "data":
        return
    for one, two in zip(*logs, strict=True):
        for entry in (one, two):
            values = entry.get("gradient") or entry.get("held_out") or entry
            # Each process compares a saving with a plain pass when it uses it first.
            del values["seconds"], values["full_forward_equivalents"], entry["crc32"]
        assert one == two


def masks() -> list[tuple[HeadMask, int]]:
    """Masks, each with the layers it shares with later ones, so that every kind of reuse occurs."""
    top = [[True] * 4, [True, True, False, False], [False] * 4, [False, False, True, True]]
    first, second = random_mask(0), random_mask(2)
    return [
        (HeadMask.all_full(LAYERS, KV_HEADS), 0),
        *((first.with_layer(LAYERS - 1, row), LAYERS - 1) for row in top),
        *((second.with_layer(0, row), 0) for row in top),
    ]


def measured(model: Any, ranks: Any = None) -> dict[str, Any]:
    """Every measurement that a search requests of a model."""
    prepare_for_search(model)
    data = CalibrationSet.from_records((tokens(1, n, seed=n)[0].tolist(), 2) for n in (40, 33, 37))
    objective = Objective(model, data, Window(WINDOW), batch_size=2, ranks=ranks)
    evaluations = [objective.evaluate(mask, shared) for mask, shared in masks()]
    gradient = objective.gate_gradient(random_mask(1))
    return {
        "scores": [e.score for e in evaluations],
        "log_likelihoods": [e.log_likelihood for e in evaluations],
        "work": [e.full_forward_equivalents for e in evaluations],
        "reuse": objective.cache.enabled,
        "gradient": gradient.values,
        "rankings": {
            name: method.load()(model, data, WINDOW).tolist()
            for name, method in METHODS.items()
            if method.kind == "ranking"
        },
        "fingerprint": model_fingerprint(model),
    }


def families(
    config: StageConfig, inputs: Mapping[str, Path], work_dir: Path
) -> dict[str, dict[str, Any]]:
    """On each of two processes: what the sharded model of each family gives; rank 0 tells."""
    torch.set_num_threads(1)
    results = {}
    with join_process_group("tensor", timeout_minutes=30) as joined:
        for family in FAMILIES:
            model = sharding.load_sharded(inputs[family], joined, dtype="float32")
            result = measured(model, joined)
            module: Any = attention_modules(model)[0]
            weight = (module.k_proj if hasattr(module, "k_proj") else module.qkv_proj).weight
            state = head_state(module)
            assert state is not None
            shapes: list[Any] = [None] * joined.shards
            mine = [list(weight.to_local().shape), state.layout.num_key_value_heads]
            dist.all_gather_object(shapes, mine)
            everywhere: list[Any] = [None] * joined.shards
            dist.all_gather_object(everywhere, result)
            results[family] = {
                **result,
                "whole": list(weight.shape),
                "held": shapes,
                "agree": everywhere[0] == everywhere[1],
            }
    if joined.is_first:
        (work_dir / "found.json").write_text(json.dumps(results))
    return {}


def test_sharded_models_of_every_kind_of_plan_equal_the_whole_model(tmp_path):
    inputs = {family: tmp_path / family for family in FAMILIES}
    for family, folder in inputs.items():
        small_model(family).save_pretrained(folder)
    work = tmp_path / "work"
    work.mkdir()
    families = order(config_of(inputs["qwen3"], SEARCH), inputs, work, f"{__name__}:families")
    assert run_order(families, 2) == 0
    results = json.loads((work / "found.json").read_text())
    for family, folder in inputs.items():
        result, expected = results[family], measured(load_model(folder, dtype="float32"))
        close = {"rtol": 1e-4, "atol": 1e-4}
        assert result["agree"]
        assert result["scores"] == expected["scores"]
        assert result["fingerprint"] == expected["fingerprint"]
        if result["reuse"]:  # if queries are gathered, reuse may be inexact and then stays off
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


def test_models_that_cannot_be_sharded_are_refused_in_a_sentence(tmp_path, monkeypatch):
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


def test_a_model_that_is_not_really_sharded_is_refused():
    with pytest.raises(RunError, match="instead of 1 in 2"):
        sharding.check_shards(small_model("qwen3"), 2)
