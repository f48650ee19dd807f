"""The plan's arithmetic against models built by transformers and against the paper's numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bosch.calibration import MAX_PARTS, CalibrationSet
from bosch.errors import UserError
from pipeline.graph import STAGES
from pipeline.modelinfo import ModelInfo
from pipeline.plan import find_hardware, model_shape, plan_costs, plan_lines, search_evaluations
from pipeline.recipe import load_recipe
from pipeline.world import World
from stages.configs import SearchConfig
from tests.pipeline_case import Case

SHAPE = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 16,
}


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("experts", [0, 4])
def test_parameters_are_counted_as_the_model_has_them(tied: bool, experts: int) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    values: dict[str, Any] = {**SHAPE, "tie_word_embeddings": tied}
    if experts:
        values |= {"num_experts": experts, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    config = AutoConfig.for_model("qwen3_moe" if experts else "qwen3", **values)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    if tied:
        model.tie_weights()
    exact = sum(parameter.numel() for parameter in model.parameters())
    # Norms of single heads are left out of the count.
    shape = model_shape(ModelInfo(None, None, values))
    assert shape.total == pytest.approx(exact, rel=0.005)
    table = SHAPE["vocab_size"] * SHAPE["hidden_size"]
    idle = (0 if tied else table) + (3 * 2 * 3 * 32 * 64 if experts else 0)
    assert shape.total - shape.active == pytest.approx(idle, abs=0.005 * exact)


@pytest.mark.parametrize(
    ("method", "ratio", "budget", "expected"),
    [
        ("bosch", 0.75, 100, 2 + 28 * 28 + 2800),
        ("bosch", 0.5, 20, 2 + 28 * 20 + 560),
        ("bosch_plus", 0.5, 100, 3 + 280),
        ("b_single", 0.5, 100, 2 + 28 * 70),
        ("b_multi", 0.75, 100, 2 + 7 * 400),
        ("b_layer", 0.5, 100, 2 + 2800),
        ("b_layer", 0.96, 100, 2 + 28),
        ("rand", 0.5, 100, 3),
        ("dcam", 0.5, 100, 3),
    ],
)
def test_evaluations_of_a_search(method: Any, ratio: float, budget: int, expected: int) -> None:
    search = SearchConfig(method=method, swa_ratio=ratio, budget_per_layer=budget)
    assert search_evaluations(search, layers=28, heads=8) == expected


def test_the_plan_names_steps_tokens_and_hours(tmp_path: Path) -> None:
    case = Case(tmp_path)
    text = "\n".join(plan_lines(load_recipe(case.file, env={}), "h100x8"))
    assert "8 x h100" in text
    assert "4 steps of 512 tokens = 2,048 tokens" in text
    assert "4 sequences a step on 8 process(es)" in text
    assert "12 samples for each of 3 models" in text
    assert "note:" not in text


def test_a_model_too_large_for_a_device_is_noted(tmp_path: Path) -> None:
    case = Case(tmp_path)
    case.change_config(vocab_size=2**30)
    lines = list(plan_lines(load_recipe(case.file, env={}), "rtx4090"))
    assert lines[-1].strip().startswith("note: the weights do not fit")


def test_hours_count_the_devices_that_a_stage_uses(tmp_path: Path) -> None:
    case = Case(tmp_path)
    case.content["runtime"]["eval_batch_size"] = 1
    case.save()
    loaded = load_recipe(case.file, env={})
    assert loaded.info is not None
    costs = {cost.stage: cost for cost in plan_costs(loaded, loaded.info, 1)}
    distributed = {name for name, cost in costs.items() if cost.distributed}
    assert distributed == {"search", "train", "evaluate"}
    assert [costs["search"].speedup(n) for n in (1, 2, 3, 4, 8)] == [1, 2, 2, 4, 4]
    lines = list(plan_lines(loaded, "h100x8"))
    search = next(line for line in lines if line.startswith("  search "))
    assert "on 4 of them" in search
    assert not any("of them" in line for line in plan_lines(loaded, "h100x4"))


@pytest.mark.parametrize(("examples", "questions", "batch"), [(16, 1, 8), (21, 2, 1), (50, 3, 2)])
def test_a_search_has_as_many_batches_as_its_objective(
    tmp_path: Path, examples: int, questions: int, batch: int
) -> None:
    from bosch.batches import cut

    records = [([k // questions + 5, 1, 2, 3, k], 1, 3) for k in range(examples)]
    found = CalibrationSet.from_records(records)
    parts = cut(found, min(MAX_PARTS, len(found.haystacks)), batch, 100)
    case = Case(tmp_path)
    case.content["runtime"]["eval_batch_size"] = batch
    wanted = {"examples": examples, "questions_per_haystack": questions}
    case.content["prepare"]["calibration"] |= wanted
    case.save()
    loaded = load_recipe(case.file, env={})
    assert loaded.info is not None
    costs = {cost.stage: cost for cost in plan_costs(loaded, loaded.info, 1)}
    assert costs["search"].parts == sum(map(len, parts))


def test_distributed_stages_are_those_the_runner_starts_on_all_processes() -> None:
    assert {s.name for s in STAGES if s.distributed} == {"search", "train", "evaluate"}


def test_hardware_names() -> None:
    world = World()
    assert find_hardware("H100x8", world) == ("h100", 8)
    assert find_hardware("a100", world) == ("a100", 1)
    assert find_hardware(None, World(processes_per_node=4, gpus=4)) == ("h100", 4)
    assert find_hardware(None, world)[0] == "cpu"
    with pytest.raises(UserError, match="did you mean h100"):
        find_hardware("h10x8", world)
    with pytest.raises(UserError, match="expected one of"):
        find_hardware("h100x0", world)
