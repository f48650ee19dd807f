"""The plan's arithmetic against models built by transformers and against the paper's numbers."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM

from bosch.errors import UserError
from bosch.hardware import cpu_cores
from bosch.heads import HeadMask, HeadMaskFile
from bosch.objective.batches import batches_by_part
from bosch.objective.calibration import CalibrationSet
from bosch.window import Window
from pipeline.cli import main
from pipeline.commands import plan
from pipeline.commands.plan import find_hardware, plan_costs, plan_devices, plan_lines
from pipeline.recipe.load import load_recipe
from stages.cost import Cost, Devices, memory_here
from stages.shape import shape_of, stored_shape
from stages.stage import LoadedRecipe, ModelInfo, World
from stages.train import fit
from stages.train.fit import refuse_excess_memory, remedy, training_budget
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

    evaluations = int(costs["search"].facts[0].split()[2].replace(",", ""))
    assert costs["search"].flops == pytest.approx(evaluations * work(4 * 256, 256, 0))
    assert costs["original"].flops == pytest.approx(work(12 * 512, 512, 12 * 128))


def test_layers_are_recomputed_and_the_output_head_is_not(case: Case) -> None:
    once, again = (
        _costs(_load(case, f"runtime.checkpointing={way}"))["train"].flops
        for way in ("none", "full")
    )
    assert again - once == pytest.approx(once / 3 - 2 * 256 * 64 * 2048)


@pytest.mark.parametrize(
    ("changes", "samples", "longest"),
    [
        ("evaluate={needle: {lengths: [512, 256], samples: 2, tasks: [vt, fwe]}}", 8, "512"),
    ],
)  # fmt: skip
def test_every_suite_counts_in_the_memory_and_processes_of_an_evaluation(
    case: Case, changes: str, samples: int, longest: str
) -> None:
    cost = _costs(_load(case, changes))["evaluate"]
    (memory,) = [fact for fact in cost.facts if fact.startswith("per process: ")]
    assert f" of KV cache for {2 if 'samples: 2,' in changes else 8} samples of {longest}" in memory
    (fact,) = [text for text in cost.facts if " samples each for the hybrid" in text]
    assert not samples or fact.startswith(f"{samples:,} samples each")
    assert cost.jobs == (int(fact.partition(" ")[0].replace(",", "")),)
    assert cost.hours("h100", 8) <= cost.hours("h100", 1) / min(4, cost.jobs[0])


def test_generated_tokens_are_stated_as_the_sum_over_all_samples(case: Case) -> None:
    needle = "evaluate={needle: {lengths: [512], samples: 6, tasks: [vt], max_new_tokens: 32}}"
    for stage in ("original", "evaluate"):
        facts = _costs(_load(case, needle))[stage].facts
        generated = [fact for fact in facts if fact.startswith("up to ")]
        assert generated == [
            "up to 192 tokens generated by each model, for which weights and cache are read from "
            "memory"
        ]


def test_a_model_too_large_for_a_device_is_noted(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan, "cpu_cores", lambda: 1)
    # The embedding takes two bytes for each of 64 values.
    for gib, is_noted in ((23, False), (25, True)):
        case.change_config(vocab_size=gib * 2**30 // 128)
        # Each core of a process has 4 GiB.
        for hardware in ("rtx4090", "cpux6"):
            lines = list(plan_lines(_load(case), hardware))
            assert lines[-1].strip().startswith("note: the weights do not fit") == is_noted


def test_counts_of_one_are_in_the_singular(case: Case) -> None:
    one = (
        "prepare.calibration.examples=1", "prepare.train_tokens=128", "train.total_tokens=128",
        "train.batch_tokens=128", "train.checkpoint_tokens=[]", "evaluate.rivals=[intr]",
        "evaluate.needle.tasks=[vt]", "evaluate.needle.samples=1",
        "search.method=front", "search.points=[0.5]", "measure={lengths: [512], repeats: 1}",
    )  # fmt: skip
    text = "\n".join(plan_lines(_load(case, *one), "h100x1"))
    assert re.findall(r".*\b1 (?:more )?[a-z]+[a-rt-z]s\b.*|.*\((?:e?s)\).*", text) == []


def test_experts_train_at_the_efficiency_that_the_papers_days_imply() -> None:
    assert _hours("qwen3_30b_a3b", "train", "a800", 16, None) == pytest.approx(96, rel=0.05)
    text = "\n".join(plan_lines(_paper("qwen3_30b_a3b"), "a800x16"))
    assert "at 0.0565 of the peak, as a mixture of experts: four days" in text
    assert "mixture of experts" not in "\n".join(plan_lines(_paper("qwen3_14b"), "a800x16"))
    loaded = _paper("qwen3_30b_a3b")
    assert "mixture of experts" not in "\n".join(plan_lines(loaded, "a800x16", 0.4))
    # In forward passes experts are as efficient as dense models: 4.8 seconds against 2.2 (B.4).
    operations = []
    for name in ("qwen3_1p7b", "qwen3_30b_a3b"):
        operations.append(shape_of(_paper(name)).forward_flops(64 * 32768, 32768))
    assert operations[1] / operations[0] > 4.8 / 2.2


@pytest.mark.parametrize(("examples", "batch"), [(16, 8), (5, 1), (21, 1), (50, 2)])
def test_planned_batches_of_a_search_are_those_of_its_objective(
    case: Case, examples: int, batch: int
) -> None:
    calibration = CalibrationSet.from_records(([1, 2, k], 1) for k in range(examples))
    parts = batches_by_part(calibration, batch, 100)
    changes = (f"runtime.eval_batch_size={batch}", f"prepare.calibration.examples={examples}")
    assert _costs(_load(case, *changes))["search"].jobs == (sum(map(len, parts)),)
    # Each of its gradients uses one part of the batches.
    loaded = _load(case, *changes, "search.method=bosch_plus")
    assert _costs(loaded)["search"].jobs == tuple(map(len, parts))
    (line,) = [line for line in plan_lines(loaded, "h100x99") if line.startswith("  search ")]
    assert f" on {max(map(len, parts))} of them" in line


def test_a_batch_holds_no_more_than_the_examples(case: Case) -> None:
    two, eight = (
        _costs(_load(case, "prepare.calibration.examples=2", f"runtime.eval_batch_size={size}"))
        for size in (2, 8)
    )
    assert two["search"].facts == eight["search"].facts


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


@pytest.mark.parametrize(
    ("overrides", "processes", "names"),
    [
        (["runtime.checkpointing=none"], 16, "runtime.checkpointing=full"),
        (["runtime.micro_batch_size=4"], 16, "runtime.micro_batch_size=1"),
        (["runtime.sharding=none"], 16, "runtime.sharding=fsdp"),
        ([], 4, "runtime.offload_activations=true"),
        (
            ["runtime.offload_activations=true", "train.teacher=original"],
            4,
            "runtime.context_parallel=",
        ),
        ([], 2, "processes instead of 2"),
    ],
)
def test_a_training_that_does_not_fit_is_reported_with_a_setting_that_helps(
    overrides: list[str], processes: int, names: str
) -> None:
    text = "\n".join(plan_lines(_paper("qwen3_14b", *overrides), f"a800x{processes}"))
    assert "does not fit" in text
    assert names in text


def test_the_suggested_setting_fits_with_the_margin_for_fragmentation() -> None:
    text = "\n".join(plan_lines(_paper("qwen3_30b_a3b"), "h100x8"))
    (settings,) = re.findall("does not fit\n.*it fits with (.*)", text)
    helped = _paper("qwen3_30b_a3b", *settings.split(" and "))
    assert "GiB of 80 GiB: fits" in "\n".join(plan_lines(helped, "h100x8"))


def test_the_margin_for_fragmentation_is_only_for_gpus_and_counts_in_checkpointing() -> None:
    none, auto = (_paper("qwen3_1p7b", f"runtime.checkpointing={way}") for way in ("none", "auto"))
    kept = training_budget(none, 8, GIB, True)
    assert kept.margin > 0 == training_budget(none, 8, GIB, False).margin
    for memory, is_none in ((kept.need + 1.01 * kept.margin, True), (kept.need + 1, False)):
        chosen = training_budget(auto, 8, memory, True).runtime.checkpointing
        assert (chosen == "none") == is_none


def test_without_sharding_one_node_holds_the_whole_restart_point() -> None:
    held = {"none": "20.4 GiB", "fsdp": "10.2 GiB"}
    for sharding, size in held.items():
        lines = "\n".join(
            plan_lines(_paper("qwen3_1p7b", f"runtime.sharding={sharding}"), "h100x16")
        )
        assert f"{size} while restart points are written" in lines


def test_offloaded_inputs_of_layers_are_on_the_node_of_their_process() -> None:
    changes = ("runtime.offload_activations=true", "runtime.checkpointing=full")
    loaded = _paper("qwen3_14b", *changes, "runtime.micro_batch_size=1")
    found = [
        next(line for line in plan_lines(loaded, hardware) if "for the inputs of layers" in line)
        for hardware in ("h100x8", "h100x16")
    ]
    assert found[0] == found[1]


def test_the_suggestion_is_the_one_change_that_suffices() -> None:
    """Two processes can share a model already."""
    settled = ["runtime.checkpointing=full", "runtime.micro_batch_size=1"]
    loaded = _paper("qwen3_1p7b", "runtime.sharding=none", *settled)
    sharded = _paper("qwen3_1p7b", "runtime.sharding=fsdp", *settled)
    alone, shared = (training_budget(recipe, 2, 1.0, True).need for recipe in (loaded, sharded))
    found = remedy(loaded, 2, (alone + shared) / 2, True)
    assert found == "it fits with runtime.sharding=fsdp"
    assert "no sharding" in remedy(loaded, 2, 2.0**20, True)


def test_a_suggestion_counts_the_windows_of_sliding_heads() -> None:
    """Of which split sequences exchange fewer keys and values than of full heads."""
    settled = (
        "runtime.checkpointing=full",
        "runtime.micro_batch_size=1",
        "runtime.sharding=fsdp",
        "runtime.offload_activations=true",
    )
    split = training_budget(
        _paper("qwen3_1p7b", *settled, "runtime.context_parallel=2"), 2, 1.0, True
    )
    suggestion = remedy(_paper("qwen3_1p7b", *settled), 2, split.need + split.margin, True)
    assert suggestion == "it fits with runtime.context_parallel=2"
    suggestion = remedy(_paper("qwen3_1p7b", *settled), 2, split.need, True)
    assert suggestion == "it may fit with runtime.context_parallel=2"
    tight = replace(split, capacity=split.need)
    assert tight.verdict.endswith(": may not fit, only the fragmentation margin is missing")


def test_offloading_is_not_suggested_where_memory_is_already_the_hosts() -> None:
    loaded = _paper("qwen3_14b")
    advice = [remedy(loaded, 4, 80 * GIB, on_gpu) for on_gpu in (True, False)]
    assert ["runtime.offload_activations=true" in text for text in advice] == [True, False]


def test_the_suggestion_does_not_split_sequences_that_attention_needs_whole() -> None:
    for attention, is_split in (("flash", True), ("varlen", False)):
        loaded = _paper("qwen3_14b", f"runtime.attention={attention}")
        assert ("context_parallel" in remedy(loaded, 16, 25 * GIB, True)) == is_split


def test_a_run_that_does_not_fit_is_refused_before_it_starts(
    case: Case, capsys: pytest.CaptureFixture[str]
) -> None:
    refuse_excess_memory(_load(case))
    case.change_config(num_hidden_layers=400, hidden_size=2**18, layer_types=None)
    with pytest.raises(UserError, match=r"training needs .* on each of 1 process"):
        refuse_excess_memory(_load(case))
    assert main(["run", str(case.file)]) == 2
    assert "training needs" in capsys.readouterr().err
    assert not (case.runs / "store").exists()


def test_offloaded_inputs_that_the_host_cannot_hold_are_refused(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of all processes of the node together; if memory is not known, nothing is refused."""
    overrides = ["runtime.checkpointing=full", "runtime.offload_activations=true"]
    loaded = _load(case, *overrides, NPROC_PER_NODE="2")
    offloaded = training_budget(loaded, 2, 1e15, False).memory.offloaded
    monkeypatch.setattr(fit, "memory_here", lambda world: 1e15)
    monkeypatch.setattr(fit, "host_memory", lambda: 2 * offloaded)
    refuse_excess_memory(loaded)
    monkeypatch.setattr(fit, "host_memory", lambda: 2 * offloaded - 1)
    with pytest.raises(UserError, match=r"runtime\.offload_activations = true puts"):
        refuse_excess_memory(loaded)
    monkeypatch.setattr(fit, "memory_here", lambda world: None)
    refuse_excess_memory(loaded)


def test_memory_of_this_machine_is_the_smallest_gpus_or_a_share_of_the_hosts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[str] = []
    output = ""

    def run(command: list[str], **options: Any) -> SimpleNamespace:
        asked[:] = command
        return SimpleNamespace(stdout=output)

    monkeypatch.setattr("stages.cost.subprocess.run", run)
    for said, memory in (("81559\n40960\n", 40960 * 2**20), ("", None), ("none", None)):
        output = said
        assert memory_here(World(gpus=2)) == memory
    for visible, wanted in (("1,3", ["--id=1,3"]), (None, []), ("", [])):
        if visible is None:
            monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        else:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        memory_here(World(gpus=2))
        assert [word for word in asked if word.startswith("--id")] == wanted
    monkeypatch.setattr("stages.cost.host_memory", lambda: 100)
    assert memory_here(World(processes_per_node=4)) == 25


def test_hardware_names_are_parsed_or_refused() -> None:
    world = World()
    assert find_hardware("H100x8", world) == ("h100", 8)
    assert find_hardware("a100", world) == ("a100", 1)
    assert find_hardware("cpu", world) == ("cpu", cpu_cores())
    assert find_hardware(None, World(processes_per_node=4, gpus=4)) == ("h100", 4)
    assert find_hardware(None, world)[0] == "cpu"
    with pytest.raises(UserError, match="did you mean h100"):
        find_hardware("h10x8", world)
    for none in ("h100x0", "h100x00", "cpux000", "h100x" + "9" * 5000):
        with pytest.raises(UserError, match="expected one of"):
            find_hardware(none, world)


@pytest.mark.parametrize(
    ("hardware", "world", "devices"),
    [
        # The memory of this machine, if it is the hardware of the plan.
        (None, World(processes_per_node=2), ("cpu", 8, 2, 2, 50.0)),
        (None, World(gpus=1), ("h100", 1, 1, 1, 100.0)),
        ("h100x2", World(gpus=1), ("h100", 2, 2, 2, 80 * GIB)),
        ("cpux8", World(gpus=1), ("cpu", 8, 1, 1, 32 * GIB)),
        ("cpux8", World(processes_per_node=2), ("cpu", 8, 2, 2, 50.0)),
        # Another machine has four GiB per core.
        ("cpux6", World(processes_per_node=2), ("cpu", 6, 2, 2, 12 * GIB)),
        ("cpux6", World(2, 0, 3, "h", 1), ("cpu", 6, 6, 3, 8 * GIB)),
        (None, World(processes_per_node=4, gpus=4), ("h100", 4, 4, 4, 80 * GIB)),
        (None, World(2, 0, 4, "h", 1, gpus=4), ("h100", 8, 8, 4, 80 * GIB)),
        ("h200x16", World(gpus=4), ("h200", 16, 16, 8, 141 * GIB)),
        ("h200x32", World(gpus=16), ("h200", 32, 32, 16, 141 * GIB)),
        ("cpux1", World(processes_per_node=2), ("cpu", 1, 2, 2, 2 * GIB)),
        ("a100x4", World(), ("a100", 4, 4, 4, 80 * GIB)),
    ],
)
def test_plan_states_the_hardware_it_is_for(
    hardware: str | None, world: World, devices: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan, "cpu_cores", lambda: 8)
    here = {0: 100 / world.processes_per_node, 1: 100.0}
    monkeypatch.setattr(plan, "memory_here", lambda world: here.get(world.gpus))
    loaded = replace(_paper("qwen3_1p7b"), world=world)
    assert plan_devices(loaded, hardware) == Devices(*devices)


def test_plan_states_what_vllm_holds_for_any_mask(case: Case) -> None:
    """4 layers of 4 heads, half of them sliding: two or four ranks can share 8 full heads."""

    def lines(*overrides: str) -> list[str]:
        return [line for line in plan_lines(_load(case, *overrides)) if "vLLM" in line]

    # Blocks of 32 tokens: 32 for all, 9 + 1 for a window and 256 tokens of a step; 1 KiB a head.
    assert "(CPU): 1k: 336 KiB instead of 512 KiB (1.5 x the tokens)" in lines()[0]
    assert "up to" not in lines("search.head_granularity=2")[1]
    # More ranks than heads hold what as many ranks do; one of a layer's two heads is full anyway.
    one_layer = {"num_hidden_layers": 1, "layer_types": ["full_attention"]}
    case.change_config(num_key_value_heads=2, **one_layer)
    alone, more = lines()
    assert "on 1 rank (" in alone and "on 2 or 4 or 8 ranks (" in more
    assert "up to" not in more
    case.change_config(num_key_value_heads=4, num_hidden_layers=4, layer_types=None)
    exact = lines("materialize.dtype=float32")[0]
    assert "(CPU): 1k: 672 KiB instead of 1 MiB (1.5 x the tokens)" in exact
    # Two layers slide in the original, too: 62 and 42 blocks.
    own = {"model_type": "olmo3", "sliding_window": 9}
    case.change_config(layer_types=["full_attention", "sliding_attention"] * 2, **own)
    assert "(CPU): 1k: 248 KiB instead of 336 KiB (1.4 x the tokens)" in lines()[0]
    case.change_config(
        layer_types=["full_attention", "linear_attention"] * 2, model_type="qwen3_next"
    )
    assert ["not served: it has layers without attention" in line for line in lines()] == [True]
    case.change_config(layer_types=["full_attention"] * 4, model_type="qwen3")
    mask = case.folder / "mask.json"
    HeadMaskFile.of(
        HeadMask.all_sliding(1, 1), Window(4), model="", method="rand", swa_ratio=1.0
    ).save(mask)
    given = ("search.method=given", f"search.mask={mask}")
    with pytest.raises(UserError, match="is no mask for"):
        lines(*given)
    one_full = HeadMask.from_swa_kv_heads([[0, 1, 2]] * 4, 4)
    HeadMaskFile.of(one_full, Window(4), model="", method="rand", swa_ratio=0.75).save(mask)
    assert "of it because the ranks cannot share" not in lines(*given)[0]
    assert "of it because the ranks cannot share" in lines(*given)[1]


def test_the_search_of_the_14b_recipe_takes_at_most_20_minutes_on_8_h100() -> None:
    assert _hours("qwen3_14b", "search", "h100", 8, 0.4) <= 20 / 60
    published = "search.method=bosch", "search.strict=true", "search.budget_per_layer=100"
    assert _hours("qwen3_14b", "search", "h100", 8, 0.4, *published) == pytest.approx(39, rel=0.05)
