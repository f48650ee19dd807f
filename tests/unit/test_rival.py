"""The trained rival: its inputs, the stages it leaves cached, and its training."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bosch.heads import HeadMask, HeadMaskFile
from bosch.window import Window
from pipeline.commands.plan import plan_costs
from pipeline.recipe.load import load_recipe
from stages.context import ModelConfig, Runtime, StageConfig
from stages.cost import Cost, Devices
from stages.evaluate import run as evaluate
from stages.evaluate.rivals import rivals
from stages.evaluate.scores import (
    named_rival,
    rival_name,
)
from stages.evaluate.stage import EvaluateConfig
from stages.materialize.stage import MaterializeConfig
from stages.prepare.stage import PrepareConfig
from stages.rival import run as rival
from stages.rival.stage import RivalConfig
from stages.search.stage import SearchConfig
from stages.train.stage import TrainConfig, TrainingSummary
from stages.train_rival import run as train_rival
from tests.pipeline_case import Case, runner
from tests.tiny_data import save_tiny_model

CPU = Devices("cpu", 2, 1, 1, 1e12)


def test_adding_a_rival_to_a_finished_run_trains_the_hybrid_no_second_time(case: Case) -> None:
    """Only the stages that show the rival run again."""
    assert runner(case).run() == 7
    states = {
        state.node.name: str(state).partition(" ")[0]
        for state in runner(case, "rival.method=bme").states()
    }
    to_run = {name for name, state in states.items() if state != "cached"}
    assert to_run == {"rival", "train_rival", "evaluate", "report"}
    assert list(states)[-4:] == ["rival", "train_rival", "evaluate", "report"]


def test_the_plan_states_the_cost_of_the_rival(case: Case) -> None:
    def costs(*overrides: str) -> dict[str, Cost]:
        return plan_costs(load_recipe(case.file, overrides, env={}), CPU)

    without, with_rival = costs(), costs("rival={}")
    assert "train_rival" not in without
    assert with_rival["train_rival"].flops == with_rival["train"].flops == without["train"].flops
    assert without["train"].flops > 0
    # For the hybrid, its two checkpoints and the rival's.
    assert with_rival["evaluate"].flops == pytest.approx(without["evaluate"].flops * 4 / 3)


def test_a_rival_is_trained_like_the_hybrid(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    monkeypatch.setattr(train_rival, "train", lambda *arguments: calls.append(arguments) or {})
    section = TrainConfig(total_tokens=4096)
    config = StageConfig(
        section=RivalConfig(),
        model=ModelConfig(path="model"),
        seed=3,
        runtime=Runtime(),
        upstream={"rival": RivalConfig(), "train": section},
    )
    folders = {name: tmp_path / name for name in ("prepare", "search", "rival", "train")}
    assert train_rival.run(config, folders, tmp_path) == {}
    [(own, inputs, work_dir)] = calls
    assert own.section == section and own.seed == 3
    own = {name: folders[name] for name in ("prepare", "search")}
    assert inputs == {**own, "materialize": folders["rival"]}
    assert work_dir == tmp_path


def test_a_rivals_hybrid_is_made_like_the_searchs_with_another_mask(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def mask_file(mask: HeadMask, method: str) -> HeadMaskFile:
        return HeadMaskFile.of(mask, Window(4), model="m", method=method, swa_ratio=0.5)

    searched = mask_file(HeadMask.from_swa_kv_heads([[0]], 2), "bosch")
    own = mask_file(HeadMask.from_swa_kv_heads([[1]], 2), "bme")
    folders = {name: tmp_path / name for name in ("search", "materialize")}
    (folders["materialize"] / "model").mkdir(parents=True)
    searched.save(folders["materialize"] / "model" / "head_mask.json")
    section = MaterializeConfig(dtype="float16")
    config = StageConfig(
        RivalConfig(method="bme"), ModelConfig(path="model"), 3, Runtime(),
        upstream={"materialize": section},
    )  # fmt: skip
    asked, made = [], []
    monkeypatch.setattr(rival, "rival_masks", lambda *given: asked.append(given) or [own])
    monkeypatch.setattr(
        rival, "materialize", lambda *given: made.append(given) or {"parameters": 1}
    )
    assert rival.run(config, folders, tmp_path) == {"parameters": 1}
    assert asked[0][1:4] == (["bme"], searched, folders["search"])
    assert made == [(config.with_section(section), {"search": tmp_path / "mask"}, tmp_path)]
    assert HeadMaskFile.load(tmp_path / "mask" / "head_mask.json") == own


def test_rivals_of_a_mask_of_several_windows_use_the_most_frequent_and_hold_no_more(
    tmp_path: Path,
) -> None:
    model = save_tiny_model(tmp_path / "model")
    length = 300
    record = {"input_ids": [1] * length, "answer_length": 1}
    (tmp_path / "calibration.jsonl").write_text(json.dumps(record))
    prepare = {
        "train_tokens": 1, "sources": [{"name": "a", "kind": "retrieval"}],
        "calibration": {"length": length},
    }  # fmt: skip
    config = StageConfig(
        EvaluateConfig(needle=None, rivals=["intr", "rand"]),
        ModelConfig(path=str(model), dtype="float32"),
        seed=1,
        runtime=Runtime(),
        upstream={
            "search": SearchConfig(swa_ratio=0.5, window_size=200),
            "prepare": PrepareConfig.model_validate(prepare),
        },
    )
    choices, windows = [[0, 2], [2, 1]], (Window(200), Window(16))
    searched = HeadMaskFile.of(
        HeadMask.of_choices(choices), windows, model="m", method="front", swa_ratio=0.75
    )
    found = rivals(config, searched, tmp_path, tmp_path / "work")
    assert [rival.name for rival in found] == ["intr", "rand"]
    (tmp_path / "work" / "rivals" / "rand.json").unlink()
    assert rivals(config, searched, tmp_path, tmp_path / "work") == found
    for one in found:
        assert one.mask is not None
        assert one.mask.windows == (Window(16),) and one.mask.swa_ratio == 0.75
        # 529 slots: one full head, one of 199, two of 15. With two sliding heads: 630.
        assert one.mask.mask.num_sliding == 3
    assert len({one.mask and one.mask.mask for one in found}) == 2


def test_the_last_checkpoint_of_a_trained_rival_is_scored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Together with the hybrid and all its checkpoints, and at no other budget."""
    for stage in ("train", "train_rival"):
        for tokens in (5, 10):
            (tmp_path / stage / "checkpoints" / f"tokens-{tokens}").mkdir(parents=True)
        TrainingSummary(
            final_loss=1.0, tokens=10, steps=2, seconds=1.0, processes=1, sharding="none",
            checkpoints={"tokens-5": 1, "tokens-10": 2},
        ).write(tmp_path / stage)  # fmt: skip
    (tmp_path / "materialize" / "model").mkdir(parents=True)
    (tmp_path / "calibration").mkdir()
    (tmp_path / "calibration" / "needles.jsonl").touch()
    mask = HeadMask.from_swa_kv_heads([[0], [1]], 2)
    file = HeadMaskFile.of(mask, Window(8), model="m", method="bosch", swa_ratio=0.5)
    file.save(tmp_path / "materialize" / "model" / "head_mask.json")
    places: dict[str, Path] = {}

    def evaluated(config: Any, models: Any, *_: Any, **__: Any) -> Any:
        places.update(
            {
                evaluated.name: Path(evaluated.model.path).relative_to(tmp_path)
                for evaluated in models
            }
        )
        return SimpleNamespace(averages={})

    monkeypatch.setattr(evaluate, "evaluate_models", evaluated)
    config = StageConfig(
        EvaluateConfig(), ModelConfig(path="m"), 0, Runtime(), {"rival": RivalConfig()}
    )
    stages = ("search", "materialize", "train", "train_rival", "original")
    inputs = {**{name: tmp_path / name for name in stages}, "prepare": tmp_path}
    evaluate.run(config, inputs, tmp_path)
    own = [f"train/checkpoints/tokens-{tokens}" for tokens in (5, 10)]
    names = ["hybrid", "tokens-5", "tokens-10"]
    expected = dict(zip(names, ["materialize/model", *own], strict=True))
    expected["intr-tokens-10"] = "train_rival/checkpoints/tokens-10"
    assert {name: place.as_posix() for name, place in places.items()} == expected


def test_names_of_models_describe_them() -> None:
    assert named_rival(rival_name("intr", "tokens-1000")) == ("intr", 1000)
    for name in ("tokens-1000", "intr", "other-tokens-1000", "intr-tokens-"):
        assert named_rival(name) is None
