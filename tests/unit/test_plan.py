"""The plan's arithmetic against built models and the paper's numbers; its lines are golden.

Published models are planned and validated without weights, tokenizer or network.
"""

from __future__ import annotations

import json
import shutil
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM

from bosch.errors import UserError
from pipeline.cli import main
from pipeline.commands import plan
from pipeline.commands.plan import plan_costs, plan_devices, plan_lines
from pipeline.recipe.load import load_recipe
from pipeline.recipe.model_shape import SHAPES, read_model
from stages.cost import Cost, Devices
from stages.evaluate.stage import EvaluateConfig
from stages.formats import format_bytes
from stages.shape import shape_of, stored_shape
from stages.stage import LoadedRecipe, ModelInfo, World
from stages.train.stage import training_processes
from tests.golden_plans import GOLDEN, plans
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


ROOT = Path(__file__).resolve().parents[2]
GIB = 2.0**30


def _load(case: Case, *overrides: str, **env: str) -> LoadedRecipe:
    return load_recipe(case.file, overrides, env=env, input_files=False)


def _costs(loaded: LoadedRecipe) -> dict[str, Cost]:
    return plan_costs(loaded, plan_devices(loaded))


def _paper(name: str, *overrides: str) -> LoadedRecipe:
    file = ROOT / "recipes" / f"{name}_r075.yaml"
    return load_recipe(file, overrides, fetch=False, input_files=False, model_files=False, env={})


def _hours(
    name: str, stage: str, device: str, count: int, efficiency: float | None, *overrides: str
) -> float:
    """Planned hours of a recipe's stage on `count` devices."""
    loaded = _paper(name, *overrides)
    devices = plan_devices(loaded, f"{device}x{count}", efficiency)
    return plan_costs(loaded, devices)[stage].hours(device, count)


def test_logits_are_counted_only_where_they_are_computed(case: Case) -> None:
    """In a search at the answers, which are few; in an evaluation at generated tokens."""
    model: Any = AutoModelForCausalLM.from_config(
        AutoConfig.for_model("qwen3", **SHAPE), attn_implementation="eager"
    )
    with FlopCounterMode(display=False) as counter:
        model.generate(torch.ones(1, 40, dtype=torch.long), max_new_tokens=3, min_new_tokens=3)
    attention = 4 * 3 * 8 * 16  # for each pair of query and key, of which eager computes all
    linear = counter.get_total_flops() - attention * (40 * 40 + 41 + 42)
    shape = stored_shape(ModelInfo({"model_type": "qwen3", **SHAPE}))
    planned = shape.forward_flops(42, 42, logits=3) - attention * 42 * 43 / 2
    assert linear == planned

    costs, layers = _costs(_load(case)), 4 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 128)

    def work(tokens: int, length: int, logits: int) -> float:
        return tokens * (2 * layers + 4 * 4 * 64 * (length + 1) / 2) + logits * 2 * 64 * 256

    evaluations = int(costs["search"].note.split()[2].replace(",", ""))
    assert costs["search"].flops == pytest.approx(evaluations * work(4 * 256, 256, 0))
    assert costs["original"].flops == pytest.approx(work(12 * 512, 512, 12 * 128))


def test_layers_are_recomputed_and_the_output_head_is_not(case: Case) -> None:
    once, again = (
        _costs(_load(case, f"runtime.checkpointing={way}"))["train"].flops
        for way in ("none", "full")
    )
    assert again - once == pytest.approx(once / 3 - 2 * 256 * 64 * 2048)


def test_samples_count_with_the_recipes_settings(case: Case) -> None:
    suites = "evaluate={tasks: [vt, fwe], ruler: {lengths: [512, 256], samples: 2}}"
    cost = _costs(_load(case, suites))["original"]
    assert cost.jobs == 8 and "8 samples" in cost.note
    assert cost.hours("h100", 8) <= cost.hours("h100", 1) / min(4, cost.jobs)


def test_experts_train_at_the_efficiency_that_the_papers_days_imply() -> None:
    assert _hours("qwen3_30b_a3b", "train", "a800", 16, None) == pytest.approx(96, rel=0.05)
    devices = plan_devices(_paper("qwen3_30b_a3b"), "a800x16")
    assert "at 0.0565 of the peak" in plan_costs(_paper("qwen3_30b_a3b"), devices)["train"].note
    # In forward passes experts are as efficient as dense models: 4.8 seconds against 2.2 (B.4).
    operations = []
    for name in ("qwen3_1p7b", "qwen3_30b_a3b"):
        operations.append(shape_of(_paper(name)).forward_flops(64 * 32768, 32768))
    assert operations[1] / operations[0] > 4.8 / 2.2


# Days of training on 16 A800 in the paper (B.5), and the share of the peak that they imply for
# the operations computed.
PAPER_DAYS = {"qwen3_1p7b": (1, 0.102), "qwen3_30b_a3b": (4, 0.0565)}


def _train_hours(name: str, efficiency: float) -> float:
    # The paper recomputes activations; here memory decides.
    return _hours(name, "train", "a800", 16, efficiency, "runtime.checkpointing=full")


def test_planned_hours_equal_the_papers_at_a_stated_efficiency() -> None:
    for name, (days, efficiency) in PAPER_DAYS.items():
        assert _train_hours(name, efficiency) == pytest.approx(24 * days, rel=0.05)
    # At the default efficiency no model may take longer than the paper's slowest one, and
    # the operations order the dense ones by size.
    hours = [_train_hours(name, 0.4) for name in ("qwen3_1p7b", "qwen3_8b", "qwen3_14b")]
    assert hours == sorted(hours)
    assert hours[-1] < 96
    # With one efficiency, 8B and 14B are between one and four days.
    for name in ("qwen3_8b", "qwen3_14b"):
        assert 24 < _train_hours(name, 0.3) < 96


def test_the_search_of_the_14b_recipe_takes_at_most_20_minutes_on_8_h100() -> None:
    assert _hours("qwen3_14b", "search", "h100", 8, 0.4) <= 20 / 60
    published = "search.method=bosch", "search.strict=true", "search.budget_per_layer=100"
    assert _hours("qwen3_14b", "search", "h100", 8, 0.4, *published) == pytest.approx(39, rel=0.05)


def test_the_plan_is_for_the_hardware_that_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the option, else by the recipe, else this machine's."""
    monkeypatch.setattr(plan, "cpu_cores", lambda: 6)
    loaded = _paper("qwen3_1p7b")
    assert plan_devices(loaded) == Devices("h100", 16, 16, 80 * GIB)
    assert plan_devices(loaded, "A100x4") == Devices("a100", 4, 4, 80 * GIB)
    assert plan_devices(loaded, "rtx4090") == Devices("rtx4090", 1, 1, 24 * GIB)
    own = _paper("qwen3_1p7b", "runtime.hardware=null")
    assert plan_devices(own) == Devices("cpu", 6, 1, 24 * GIB)
    two = replace(own, world=World(processes_per_node=2))
    assert plan_devices(two) == Devices("cpu", 6, 2, 12 * GIB)
    gpus = replace(own, world=World(2, 0, 4, "h", 1, gpus=4))
    assert plan_devices(gpus) == Devices("h100", 8, 8, 80 * GIB)
    with pytest.raises(UserError, match="expected one of h100"):
        plan_devices(loaded, "h10x8")
    for none in ("h100x0", "h100x00", "cpux000", "h100x" + "9" * 5000):
        with pytest.raises(UserError, match="expected one of"):
            plan_devices(loaded, none)


def test_a_model_too_large_for_a_device_is_noted(case: Case) -> None:
    # The embedding takes two bytes for each of 64 values.
    for gib, is_noted in ((23, False), (25, True)):
        case.change_config(vocab_size=gib * 2**30 // 128)
        # Each core of a process has 4 GiB.
        for hardware in ("rtx4090", "cpux6"):
            text = "\n".join(plan_lines(_load(case), hardware))
            assert ("evaluation, more than the 24 GiB of a process" in text) == is_noted


def test_copies_of_a_model_share_the_gpus(case: Case) -> None:
    """On one GPU there is one copy; of four each copy has two."""
    loaded = _load(case, "runtime.sharding=fsdp", "runtime.replicas=2")
    for hardware in ("h100", "h100x4"):
        assert plan_costs(loaded, plan_devices(loaded, hardware))["train"].memory


@pytest.mark.parametrize("recipe", sorted(ROOT.glob("recipes/*.yaml")), ids=lambda path: path.stem)
def test_every_shipped_recipe_runs_on_any_usual_number_of_processes(recipe: Path) -> None:
    used = []
    for count in ("1", "2", "4", "8"):
        loaded = load_recipe(
            recipe, fetch=False, input_files=False, model_files=False, env={"NPROC_PER_NODE": count}
        )
        cost = plan_costs(loaded, plan_devices(loaded, f"h100x{count}"))["train"]
        assert cost.memory.startswith("about ")
        used.append(training_processes(loaded))
    small = {"quickstart": [1, 2, 2, 2], "smollm2_135m": [1, 2, 4, 4]}  # batches of few sequences
    assert used == small.get(recipe.stem, [1, 2, 4, 8])


def test_the_plan_states_the_cache_of_both_models(case: Case) -> None:
    """4 layers of 4 heads, half of them sliding: 32 bytes a head and token."""
    loaded = _load(case)
    (line,) = (line for line in plan_lines(loaded) if "KV cache" in line)
    window = loaded.recipe.search.window
    sizes = format_bytes(16 * 32 * 1024), format_bytes(8 * 32 * (1024 + window.past))
    assert f"at 1k tokens {sizes[0]} of the original, {sizes[1]} of the hybrid; in vLLM" in line


def test_plans_equal_the_golden_ones() -> None:
    """Every line; tests/golden_plans.py writes the file again."""
    assert list(plans()) == GOLDEN.read_text(encoding="utf-8").splitlines()


def test_an_answer_takes_no_more_disk_than_planned(tmp_path: Path) -> None:
    """In samples.jsonl and among the answers of its model."""
    case = Case(tmp_path)

    def disk(samples: int) -> float:
        overrides = [
            f"evaluate.ruler.samples={samples}", "evaluate.tasks=[niah_single_2]",
            "train=null",
        ]  # fmt: skip
        loaded = load_recipe(case.file, overrides)
        lengths = loaded.recipe[EvaluateConfig].ruler.lengths
        return plan_costs(loaded, plan_devices(loaded))["evaluate"].disk / len(lengths)

    head = {"checkpoint": "original", "suite": "ruler", "task": "niah_single_2", "length": 32768}
    answer = {"score": 1.0, "scores": {"score,none": 1.0}, "answers": ["1234567"]}
    texts = {"question": "x" * 300, "output": " 1234567", "prompt": "0" * 16}
    line = json.dumps({**head, "index": 99, **answer, **texts})
    assert disk(2) - disk(1) >= 2 * (len(line) + 1)


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
