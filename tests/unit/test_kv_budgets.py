"""One model directory that serves every nested budget of a front."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.cache_utils import DynamicCache

from bosch.errors import UserError
from bosch.front import Front, FrontPoint
from bosch.heads import HeadMask
from bosch.model.head_table import budget_slots, budget_table, heads_by_window
from bosch.model.loading import load_config, load_model
from bosch.model.materialize import materialize_front
from bosch.model.search_mode import mask_shape
from bosch.vllm.checks import plan_of, served_layouts
from bosch.window import Window
from pipeline.cli import main
from tests.elsewhere import run_elsewhere
from tests.front_case import CONTEXT, materialize_point, nested_front
from tests.hybrid_case import KV_HEADS, small_config, small_model, tokens

MENU = [Window(9, 2), Window(4, 2)]
NEW = 4


def front_of(model: Any, **changes: Any) -> Front:
    return nested_front(mask_shape(model.config)[0], KV_HEADS, changes.pop("menu", MENU), **changes)


def outputs(model: Any, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    with torch.inference_mode():
        return model(ids).logits, model.generate(ids, max_new_tokens=NEW, do_sample=False)


@pytest.fixture(scope="module")
def model() -> Any:
    return small_model("qwen3")


@pytest.fixture(scope="module")
def front(model: Any) -> Front:
    return front_of(model)


@pytest.fixture(scope="module")
def folder(model: Any, front: Front, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("front") / "model"
    materialize_front(model, front).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("family", "menu"), [("qwen3", MENU), ("gemma2", [Window(6)]), ("gemma3", MENU)]
)
def test_each_budget_equals_a_directory_of_its_own_bit_for_bit(
    family: str, menu: list[Window], tmp_path: Path
) -> None:
    """By `from_pretrained` and by `set_kv_budget`, in a pass and in `generate`."""
    base, ids = small_model(family), tokens(2, 30)
    front = front_of(base, menu=menu)
    served = materialize_front(base, front)
    served.save_pretrained(tmp_path)
    assert served.kv_budget == front.points[1].kv_slots
    kind: Any = type(served)
    for index in (3, 0, 2):
        slots = front.points[index].kv_slots
        expected = outputs(materialize_point(base, front, index), ids)
        served.set_kv_budget(slots)
        assert served.kv_budget == slots
        for loaded in (served, kind.from_pretrained(tmp_path, kv_budget=slots)):
            logits, answer = outputs(loaded, ids)
            assert torch.equal(logits, expected[0]) and torch.equal(answer, expected[1])
        # With heads in another order, sums are computed in another order.
        logits, answer = outputs(materialize_point(base, front, index, reordered=True), ids)
        assert torch.allclose(logits, expected[0], rtol=1e-4, atol=1e-4)
        assert torch.equal(answer, expected[1])


def test_a_budget_may_be_a_share_and_is_saved(folder: Path, front: Front, tmp_path: Path) -> None:
    slots = [point.kv_slots for point in front.points]
    original = CONTEXT * KV_HEADS * front.num_layers
    with pytest.raises(UserError, match="name the slots of one") as caught:
        budget_slots(AutoConfig.from_pretrained(folder), 5)
    # Each name in the message selects its budget.
    for shown, expected_slots in zip(
        re.findall(r"(\d+) \(([\d.]+)\)", str(caught.value)), slots, strict=True
    ):
        config = AutoConfig.from_pretrained(folder)
        assert expected_slots == int(shown[0]) == budget_slots(config, float(shown[1]))
    load = AutoModelForCausalLM.from_pretrained
    for share, expected in [(1.0, 3), (slots[2] / original, 2), (slots[2] / original - 1e-6, 1)]:
        assert load(folder, kv_budget=share).kv_budget == slots[expected]
    config = AutoConfig.from_pretrained(folder, kv_budget=slots[0])
    assert load(folder, config=config).kv_budget == slots[0]
    assert load(folder, config=config, kv_budget=slots[2]).kv_budget == slots[2]
    assert config.kv_budget == slots[0]
    assert load(folder).kv_budget == load(folder, kv_budget=None).kv_budget == slots[1]
    other = load(folder)
    other.set_kv_budget(slots[2])
    other.save_pretrained(tmp_path)
    again = load(tmp_path)
    assert again.kv_budget == slots[2]
    again.set_kv_budget(None)
    assert again.kv_budget == slots[1]


def test_a_share_rounded_down_in_a_message_selects_its_budget() -> None:
    config: Any = small_config(num_hidden_layers=1)
    config.hybrid_attention = budget_table([[{None: 1, Window(4, 2): 3}]], 38, 53)
    assert 53 / 152 * 152 < 53 == budget_slots(config, 53 / 152) == budget_slots(config, 53)
    with pytest.raises(UserError, match=r"kv_budget is 53\.0;"):  # slots are an integer
        budget_slots(config, 53.0)


def test_kv_budget_with_a_given_configuration_affects_only_one_model(
    folder: Path, front: Front
) -> None:
    """The configuration may be an object, which does not change, or the path of one."""
    least, default = front.points[0].kv_slots, front.points[1].kv_slots
    config = load_config(str(folder))
    assert load_model(folder, config=config, kv_budget=least).kv_budget == least
    assert load_model(folder, config=config).kv_budget == default
    kind = type(load_model(folder))
    for given in (config, str(folder)):
        assert kind.from_pretrained(folder, config=given, kv_budget=least).kv_budget == least
    assert config.kv_budget is None


@pytest.mark.parametrize("asked", [17, 1.5, 0.0, -3, True, "25%", 0.001, float("nan")])
def test_a_missing_budget_is_refused_with_the_existing_ones(
    folder: Path, front: Front, asked: Any
) -> None:
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    for attempt in (
        lambda: loaded.set_kv_budget(asked),
        lambda: AutoModelForCausalLM.from_pretrained(folder, kv_budget=asked),
    ):
        with pytest.raises(UserError) as error:
            attempt()
        message = str(error.value)
        assert f"kv_budget is {asked!r}" in message and "\n" not in message
        assert all(str(point.kv_slots) in message for point in front.points)
    assert loaded.kv_budget == front.points[1].kv_slots


def test_compiled_decoding_follows_the_budget() -> None:
    """Numbers of heads that have changed once are symbols in later graphs."""
    torch._dynamo.reset()  # it also counts graphs of the same code in other tests
    base = small_model(num_hidden_layers=1)
    front, ids = front_of(base), tokens(1, 14)
    model = materialize_front(base, front)
    step = torch.compile(model.forward, fullgraph=True, backend="eager")

    def decoded() -> torch.Tensor:
        cache = model.new_static_cache(14)
        logits = [model(ids[:, :12], past_key_values=cache).logits]
        logits += [step(ids[:, at : at + 1], past_key_values=cache).logits for at in range(12, 14)]
        return torch.cat(logits, dim=1)

    with torch.inference_mode():
        for index in (1, 2, 3, 0):
            model.set_kv_budget(front.points[index].kv_slots)
            expected = model(ids, use_cache=False).logits
            torch.testing.assert_close(decoded(), expected, rtol=1e-4, atol=1e-4)


def test_a_model_with_one_layout_has_no_budgets(model: Any, front: Front, tmp_path: Path) -> None:
    hybrid = materialize_point(model, front, 1)
    assert hybrid.kv_budget is None
    with pytest.raises(UserError, match="a single head layout"):
        hybrid.set_kv_budget(front.points[1].kv_slots)
    hybrid.set_kv_budget(None)
    model.save_pretrained(tmp_path)
    with pytest.raises(UserError, match="kv_budget is 1, and the model is no hybrid"):
        load_model(tmp_path, kv_budget=1)


@pytest.mark.parametrize("family", ["qwen3", "qwen3_next"])  # the latter also has linear layers
def test_a_budget_cannot_change_while_a_cache_holds_states(family: str) -> None:
    base, ids = small_model(family), tokens(1, 20)
    front = front_of(base)
    served = materialize_front(base, front)
    first, second = (point.kv_slots for point in front.points[:2])
    served.set_kv_budget(first)
    caches = [served.new_cache(), DynamicCache(), served.new_static_cache(40)]
    expected = outputs(served, ids)
    for number in range(len(caches)):
        with torch.inference_mode():
            served(ids, past_key_values=caches[number])
        with pytest.raises(UserError, match=r"set_kv_budget: a .*Cache of this model holds states"):
            served.set_kv_budget(second)
        served.set_kv_budget(first)  # nothing changes
        assert served.kv_budget == first
        caches[number] = None
        served.set_kv_budget(second)
        served.set_kv_budget(first)
    assert torch.equal(outputs(served, ids)[0], expected[0])


def test_an_empty_cache_takes_the_current_layout_and_a_copy_of_another_is_refused(
    model: Any, front: Front
) -> None:
    served, ids = materialize_front(model, front), tokens(1, 20)
    early = [served.new_cache(), served.new_cache()]
    other = materialize_point(model, front, 0)
    held = other.new_cache()
    with torch.inference_mode():
        other(ids, past_key_values=held)
        served(ids, past_key_values=early[0])
        early[0].reset()
        served.set_kv_budget(front.points[2].kv_slots)
        for cache in early:
            logits = [served(part, past_key_values=cache).logits for part in ids.split(10, dim=1)]
            expected = materialize_point(model, front, 2)(ids).logits
            torch.testing.assert_close(torch.cat(logits, dim=1), expected, rtol=1e-4, atol=1e-4)
        with pytest.raises(UserError, match="holds states of another KV budget"):
            served(ids[:, :1], past_key_values=held)
    with pytest.raises(UserError, match="holds states of its current budget"):
        served.set_kv_budget(front.points[0].kv_slots)


def test_points_that_are_not_nested_are_left_out(model: Any) -> None:
    """The directory holds the points nested with the chosen one."""
    points = []
    for row in ([2, 2, 2, 2], [0, 2, 2, 2], [2, 0, 0, 2], [0, 0, 0, 2]):
        mask = HeadMask.of_choices([row, *[[2] * KV_HEADS] * (mask_shape(model.config)[0] - 1)])
        points.append(FrontPoint.of(mask, MENU, CONTEXT, score=0.5, log_likelihood=-1.0))
    front = replace(Front.of(points, MENU, CONTEXT, model="m"), chosen=1)
    served = materialize_front(model, front)
    held = [budget["kv_slots"] for budget in served.config.hybrid_attention["budgets"]]
    assert held == [points[index].kv_slots for index in (0, 1, 3)]


DAMAGES: dict[str, Any] = {
    "budgets": [[], "all", [7], [{}], "in another order", "twice"],
    "chosen": [None, 3, "all"],
    "context": [None, 0, "64", CONTEXT + 1],
}


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, values in DAMAGES.items() for value in values]
)
def test_a_damaged_table_is_refused_in_one_sentence(
    model: Any, front: Front, name: str, value: Any
) -> None:
    config = materialize_front(model, front).config
    budgets = config.hybrid_attention["budgets"]
    given = {"in another order": budgets[::-1], "twice": budgets[:1] + budgets}
    value = given.get(value, value) if isinstance(value, str) else value
    config.hybrid_attention = {**config.hybrid_attention, name: value}
    with pytest.raises(UserError) as error:
        heads_by_window(config)
    assert "hybrid_attention" in str(error.value) and "\n" not in str(error.value)


def test_the_table_stores_its_windows_once(front: Front) -> None:
    rows = [front.mask(index).heads_per_layer(front.windows) for index in (2, 0)]
    table = budget_table(rows, CONTEXT, front.points[0].kv_slots)
    assert json.loads(json.dumps(table)) == table
    assert table["window_sizes"] == [4, 9] and table["sinks"] == 2
    assert [budget["kv_slots"] for budget in table["budgets"]] == sorted(
        front.points[index].kv_slots for index in (0, 2)
    )
    assert set(table) == {"window_sizes", "sinks", "context", "chosen", "budgets"}


def test_transformers_alone_serves_every_budget(folder: Path, front: Front, tmp_path: Path) -> None:
    """With only the code file."""
    ids = tokens(1, 24)
    slots = [point.kv_slots for point in front.points]
    expected = [outputs(AutoModelForCausalLM.from_pretrained(folder, kv_budget=s), ids)[1].tolist()
                for s in slots]  # fmt: skip
    code = f"""
ids = torch.tensor({ids.tolist()})
load = AutoModelForCausalLM.from_pretrained
changed = load(".", trust_remote_code=True)
for slots in {slots}:
    loaded = load(".", trust_remote_code=True, kv_budget=slots)
    changed.set_kv_budget(slots)
    for model in (loaded, changed):
        report(model.generate(ids, max_new_tokens={NEW}, do_sample=False).tolist())
try:
    load(".", trust_remote_code=True, kv_budget=5)
except Exception as error:
    report(str(error))
"""
    *answers, refusal = run_elsewhere(code, folder, cache=tmp_path)
    assert answers == [answer for answer in expected for _ in range(2)]
    assert all(str(slot) in refusal for slot in slots)


def test_show_lists_the_budgets(
    folder: Path, front: Front, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["show", str(folder)]) == 0
    shown = capsys.readouterr().out
    assert f"kv_budget: {front.points[1].kv_slots} KV slots, one of " in shown
    assert all(f"{point.kv_slots:,}" in shown for point in front.points)


def test_vllm_serves_the_budget_in_its_configuration(model: Any) -> None:
    """`--hf-overrides '{"kv_budget": …}'` sets the attribute, which decides the plan of modules."""
    front = front_of(model, menu=[Window(9), Window(4)])
    config = materialize_front(model, front).config
    for index, point in enumerate(front.points):
        config.update({"kv_budget": point.kv_slots})
        single = materialize_point(model, front, index).config
        assert served_layouts(config) == served_layouts(single)
        assert plan_of(served_layouts(config), 1) == plan_of(served_layouts(single), 1)
    config.update({"kv_budget": 5})
    with pytest.raises(UserError, match="kv_budget is 5"):
        served_layouts(config)
