"""One training for several budgets of a front: the budget of each step, and what stays the same."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from bosch.attention import HeadLayout
from bosch.errors import UserError
from bosch.front import FrontPoint
from bosch.heads import HeadMask
from bosch.model.head_table import kv_budgets
from bosch.model.interface import layouts_of
from bosch.window import Window
from pipeline.commands.plan import plan_costs, plan_devices
from pipeline.recipe.load import load_recipe
from stages.context import ModelConfig, Runtime
from stages.kv_budgets import budget_share, named_budgets, share_names
from stages.train import distillation
from stages.train.budgets import BudgetDraw, budget_weights, mean_over_budgets
from stages.train.footprint import TrainingJob
from stages.train.loop import Loop
from stages.train.metrics import step_flops
from stages.train.model import load_for_training
from stages.train.schedule import make_schedule
from stages.train.stage import TrainConfig
from stages.train.watch import HeldOutWatch
from tests.front_case import materialize_point, nested_front
from tests.pipeline_case import Case
from tests.training_case import make_case, metrics, train_here

FRONT = nested_front(2, 2, [Window(12), Window(4)], points=3, context=32, chosen=1)
SLOTS = tuple(point.kv_slots for point in FRONT.points)
SHORT = {"total_tokens": 6 * 128, "checkpoint_tokens": []}
SEED = 7  # of the small run


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_case(tmp_path_factory.mktemp("case"), front=FRONT)


@pytest.fixture(scope="module")
def shared(case: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One training for all budgets."""
    work_dir = tmp_path_factory.mktemp("shared")
    train_here(case, work_dir, train={**SHORT, "budgets": "all"})
    return work_dir


def weights(work_dir: Path) -> dict[str, torch.Tensor]:
    return load_file(work_dir / "checkpoints" / "tokens-768" / "model.safetensors")


def same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(value, second[name]) for name, value in first.items())


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_each_cycle_has_every_budget_in_its_share(count: int) -> None:
    budgets = tuple(range(10, 10 * count + 1, 10))
    weights, draw = budget_weights(count), BudgetDraw(budgets, 0)
    length = sum(weights)
    assert len(weights) == count and weights[0] == max(weights)
    steps = [draw.of_step(step) for step in range(1, 20 * length + 1)]
    shares = dict(zip(budgets, weights, strict=True))
    cycles = [tuple(steps[first : first + length]) for first in range(0, len(steps), length)]
    assert all(Counter(cycle) == shares for cycle in cycles)
    if count > 1:
        assert len(set(cycles)) > 2
        assert steps != [BudgetDraw(budgets, 1).of_step(n + 1) for n in range(len(steps))]
    assert mean_over_budgets({b: float(b) for b in budgets[::-1]}) == sum(steps) / len(steps)


def test_steps_follow_their_numbers_and_checkpoints_serve_every_budget(
    case: Path, shared: Path
) -> None:
    records = metrics(shared)
    draw = BudgetDraw(SLOTS, SEED)
    assert [record["kv_budget"] for record in records] == [draw.of_step(n) for n in range(1, 7)]
    assert {record["kv_budget"] for record in records} == set(SLOTS)
    checkpoint = shared / "checkpoints" / "tokens-768"
    start = AutoModelForCausalLM.from_pretrained(case / "materialize" / "model")
    ids = torch.arange(30)[None]
    for slots in SLOTS:
        trained = AutoModelForCausalLM.from_pretrained(checkpoint, kv_budget=slots)
        start.set_kv_budget(slots)
        assert layouts_of(trained) == layouts_of(start)
        with torch.inference_mode():
            assert not torch.equal(trained(ids).logits, start(ids).logits)
    assert AutoModelForCausalLM.from_pretrained(checkpoint).kv_budget == SLOTS[1]


def test_a_resumed_run_draws_the_same_budgets(
    case: Path, shared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = Loop.log

    def stop(self: Loop, *args: Any) -> None:
        log(self, *args)
        if self.step == 5:
            self.restarts.wait()
            raise KeyboardInterrupt

    train = {**SHORT, "budgets": "all"}
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Loop, "log", stop)
        train_here(case, tmp_path, train=train)
    assert (tmp_path / "restart" / "step-4").is_dir()
    train_here(case, tmp_path, train=train)
    assert metrics(tmp_path) == metrics(shared)
    assert same(weights(tmp_path), weights(shared))


@pytest.mark.parametrize(
    "runtime", [{"micro_batch_size": 1}, {"micro_batch_size": 4}, {"checkpointing": "full"}]
)
def test_accumulation_and_checkpointing_change_no_budget(
    case: Path, shared: Path, tmp_path: Path, runtime: dict[str, Any]
) -> None:
    train_here(case, tmp_path, train={**SHORT, "budgets": "all"}, runtime=runtime)
    for record, expected in zip(metrics(tmp_path), metrics(shared), strict=True):
        assert record["kv_budget"] == expected["kv_budget"]
        assert record["loss"] == pytest.approx(expected["loss"], rel=1e-5)
        assert record["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-4)
    if "checkpointing" in runtime:
        assert same(weights(tmp_path), weights(shared))


def test_changing_the_layout_before_the_backward_pass_is_an_error(
    case: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loss_of = Loop.loss_of

    def change(self: Loop, *args: Any) -> Any:
        loss = loss_of(self, *args)
        other = next(slots for slots in SLOTS if slots != self.unwrapped.kv_budget)
        self.unwrapped.set_kv_budget(other)
        return loss

    monkeypatch.setattr(Loop, "loss_of", change)
    with pytest.raises(AssertionError, match="the layout changed within a step"):
        train_here(case, tmp_path, train={**SHORT, "budgets": "all"})


@pytest.mark.parametrize("teacher", ["none", "original"])
def test_training_one_budget_equals_training_a_directory_of_it(
    case: Path, tmp_path: Path, teacher: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The teacher has every head full, whatever the step's budget is."""
    load, teachers = distillation.load_teacher, []
    monkeypatch.setattr(
        "stages.train.run.load_teacher", lambda *args: teachers.append(load(*args)) or teachers[-1]
    )
    monkeypatch.setattr(
        "tests.training_case.materialize", lambda base, *_: materialize_point(base, FRONT, 0)
    )
    own = make_case(tmp_path / "same order")
    train = {**SHORT, "teacher": teacher}
    train_here(case, tmp_path / "one", train={**train, "budgets": [SLOTS[0]]})
    train_here(own, tmp_path / "two", train=train)
    assert same(weights(tmp_path / "one"), weights(tmp_path / "two"))
    every = HeadLayout.deploy({None: 2})
    assert all(layouts_of(model) == [every, every] for model in teachers)
    assert len(teachers) == (2 if teacher == "original" else 0)


def test_scores_during_training_are_of_the_chosen_budget(
    case: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen, score = [], HeldOutWatch.score

    def note(self: HeldOutWatch, model: Any, device: Any) -> Any:
        seen.append(model.kv_budget)
        return score(self, model, device)

    monkeypatch.setattr(HeldOutWatch, "score", note)
    runtime = {"heldout_every_steps": 2, "heldout_sequences": 2}
    train_here(case, tmp_path, train={**SHORT, "budgets": "all"}, runtime=runtime)
    assert seen == [SLOTS[1]] * 3


def test_flops_of_a_step_are_those_of_its_budget(case: Path) -> None:
    config = AutoConfig.from_pretrained(case / "materialize" / "model")
    train = TrainConfig(batch_tokens=128, total_tokens=768)
    schedule = make_schedule(train, Runtime(), 32, 1, on_gpu=False)
    flops = step_flops(config, schedule, train)
    assert flops[SLOTS[0]] < flops[SLOTS[1]] < flops[SLOTS[2]] and flops[None] == flops[SLOTS[1]]


def test_compiled_layers_have_a_graph_for_each_layout(
    case: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self: None)
    model = ModelConfig(path="unused")
    layouts = {tuple(row.items()) for index in range(3) for row in
               FRONT.mask(index).heads_per_layer(FRONT.windows)}  # fmt: skip
    with torch._dynamo.config.patch(recompile_limit=8):
        load_for_training(
            case / "materialize" / "model", model, TrainConfig(), Runtime(compile=True)
        )
        assert torch._dynamo.config.recompile_limit == 8 * len(layouts) > 8


def test_budgets_are_named_by_slots_or_shares(case: Path, tmp_path: Path) -> None:
    config = AutoConfig.from_pretrained(case / "materialize" / "model")
    assert named_budgets(config, "all") == SLOTS
    assert named_budgets(config, [1.0, SLOTS[0], (SLOTS[2] - 1) / 128]) == SLOTS
    assert [budget_share(config, slots) for slots in SLOTS] == [
        f"{100 * slots / 128:.1f}".removesuffix(".0") + " %" for slots in SLOTS
    ]
    assert share_names([1000, 4000, 8000], 8000) == ["12.5 %", "50 %", "100 %"]
    # Rounded only as far as they still differ.
    assert share_names([1000, 1001], 8000) == ["12.50 %", "12.51 %"]
    with pytest.raises(UserError, match="kv_budget is 5"):
        train_here(case, tmp_path, train={"budgets": [5]})
    points = [*FRONT.points, FrontPoint.of(
        HeadMask.all_full(2, 2), FRONT.windows, 32, score=1.0, log_likelihood=0.0
    )]  # fmt: skip
    front = replace(FRONT, points=tuple(points))
    case = make_case(tmp_path / "whole", front=front)
    whole = AutoConfig.from_pretrained(case / "materialize" / "model")
    assert named_budgets(whole, "all") == SLOTS
    assert named_budgets(config, [1]) == SLOTS[-1:]  # a share, as 1.0 is
    assert named_budgets(whole, [1.0]) == (128,)
    single = make_case(tmp_path / "single")
    for budgets in ("all", [0.5]):
        with pytest.raises(UserError, match="a single head layout"):
            train_here(single, tmp_path, train={"budgets": budgets})


def test_a_quoted_budget_equals_an_unquoted_one() -> None:
    budgets = TrainConfig(budgets=["12k", "2.5k", "4992", "0.25", "1.0", "1e-1", 0.5]).budgets
    assert repr(budgets) == "[12288, 2560, 4992, 0.25, 1.0, 0.1, 0.5]"


def test_the_plan_counts_the_mean_over_a_cycle_of_steps(tmp_path: Path) -> None:
    case = Case(tmp_path)

    def flops(*overrides: str) -> tuple[float, str]:
        changes = ["search.method=front", "search.points=[0.3,0.5,0.9]", *overrides]
        loaded = load_recipe(case.file, changes, env={})
        cost = plan_costs(loaded, plan_devices(loaded))["train"]
        return cost.flops, " ".join(cost.facts)

    several, text = flops("train.budgets=all")
    assert "the mean over steps for 4 budgets" in text  # the points, and all heads slide
    each = [flops(f"train.budgets=[{share}]")[0] for share in (0.2, 0.3, 0.5, 0.9)]
    assert each == sorted(each) and len(set(each)) == 4
    assert several == pytest.approx((3 * each[0] + each[1] + each[2] + 2 * each[3]) / 7)
    changes = ["search.method=front", "search.points=[0.3,0.5,0.9]", "evaluate.budgets=all"]
    loaded = load_recipe(case.file, changes, env={})
    facts = plan_costs(loaded, plan_devices(loaded))["evaluate"].facts
    assert "hybrid and checkpoints at up to 3 more budgets" in " ".join(facts)
    # By its slots.
    heads = 16 * load_recipe(case.file, changes, env={}).recipe.prepare.calibration.length
    one, text = flops(f"train.budgets=[{round(0.3 * heads)}]")
    assert one == each[1] and "mean over steps" not in text
    # Both are the share of the original, which trains as it is.
    whole, text = flops("train.budgets=[1]")
    assert flops("train.budgets=[1.0]")[0] == whole > each[3]
    assert "100% of the original's" in text
    assert flops("train.budgets=[0.4,0.9]")[0] == pytest.approx((3 * each[1] + 2 * each[3]) / 5)


def test_planned_memory_is_that_of_the_largest_budget(
    case: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not of the default one, which receives fewer keys from other processes."""
    seen: list[Any] = []

    def stop(job: TrainingJob, *_: Any) -> None:
        seen.append(job.layers)
        raise UserError("seen")

    monkeypatch.setattr("stages.train.run.memory_budget", stop)
    for budgets in (None, "all"):
        with pytest.raises(UserError, match=r"^seen$"):
            train_here(case, tmp_path, train={**SHORT, "budgets": budgets})
    config = AutoConfig.from_pretrained(case / "materialize" / "model")
    every = kv_budgets(config)
    chosen, largest = named_budgets(config, "all")[1:3]
    assert seen == [every[chosen], every[largest]]


def test_the_plan_counts_bytes_sent_for_the_trained_budgets(tmp_path: Path) -> None:
    """If processes share sequences; the original's budget sends as much as the original."""
    case = Case(tmp_path)

    def sent(budgets: str) -> int:
        changes = [
            "search.method=front", "search.points=[0.3,0.5]", "runtime.context_parallel=2",
            f"train.budgets={budgets}",
        ]  # fmt: skip
        loaded = load_recipe(case.file, changes, env={"NPROC_PER_NODE": "2"})
        text = " ".join(plan_costs(loaded, plan_devices(loaded))["train"].facts)
        match = re.search(r"a step: (\d+)% of what the original's heads would", text)
        assert match is not None
        return int(match[1])

    scarce, large = sent("[0.3]"), sent("[0.5]")
    assert scarce < large < sent("[1.0]") == 100
    assert sent("[0.3,0.5]") == pytest.approx((3 * scarce + 2 * large) / 5, abs=1)


def test_the_plan_finds_a_budget_by_its_share_despite_rounding(tmp_path: Path) -> None:
    """In floats 0.58 of 3,200 slots is less than the 1,856 that a budget of this share holds."""
    case = Case(tmp_path)
    front = [
        "search.method=front", "search.swa_ratio=null", "search.budget.ratio=0.5",
        "search.budget.context=200", "search.window_size=9", "search.points=[0.58]",
    ]  # fmt: skip
    by_share, by_slots = (
        load_recipe(case.file, [*front, f"train.budgets=[{budget}]"], env={})
        for budget in ("0.58", "1856")
    )
    assert plan_costs(by_share, plan_devices(by_share))["train"].flops == (
        plan_costs(by_slots, plan_devices(by_slots))["train"].flops
    )
