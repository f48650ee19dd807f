"""The parts of `measure`: what is measured, its checks, and reports of failures."""

from __future__ import annotations

import json
import mmap
import os
import resource
import signal
from collections import Counter
from contextlib import nullcontext
from functools import partial
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from bosch.backends import BACKENDS
from bosch.budget import swa_budget
from bosch.errors import RunError, UserError, is_out_of_memory
from bosch.masks import HeadMask
from bosch.model.cache_size import CacheSize
from bosch.model.loading import full_attention_config, load_config, load_model
from bosch.model.materialize import materialize
from bosch.this_process import killed_by_kernel
from bosch.window import Window
from stages.context import ModelConfig, Runtime, StageConfig
from stages.measure import measurement, process
from stages.measure.measured_model import (
    Variant,
    build_model,
    chosen_device,
    planned_variants,
)
from stages.measure.process import check_kernels, measure_run
from stages.measure.results import (
    add_original_ratios,
    figures,
    point_of,
    results_table,
)
from stages.measure.run import run as measure_stage
from stages.measure.stage import Efficiency, MeasureConfig, MeasureSettings
from stages.pages.charts import Picture
from tests.hybrid_case import KV_HEADS, LAYERS, random_mask, small_config, small_model, tokens
from tests.tiny_data import save_tiny_model

HYBRID = Variant(kind="hybrid", windows=((0, 8), (0, 8)), sinks=2)
ORIGINAL = Variant(kind="original", windows=((0, 0), (0, 0)))
SETTINGS = MeasureSettings(
    dtype="float32", device="cpu", chunk=16, decode_tokens=3, original_attention="eager"
)
HEAD_BYTES = 2 * 8 * 4  # keys and values of one head and token in the tiny model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model and a hybrid of it."""
    folder = tmp_path_factory.mktemp("measuring")
    save_tiny_model(folder / "model")
    mask = HeadMask(((8, 0), (8, 8)), 2)
    model = load_model(folder / "model", dtype="float32")
    materialize(model, mask).save_pretrained(folder / "hybrid")
    return folder


def request(folder: Path, name: str, variant: Variant, length: int, **changes: Any) -> Any:
    settings = SETTINGS.model_copy(update=changes)
    return {
        "model": str(folder / name),
        "original": None,
        "variant": variant.model_dump(mode="json"),
        "settings": settings.model_dump(mode="json"),
        "length": length,
    }


@pytest.mark.parametrize("length", [5, 40])
def test_the_measured_cache_equals_the_formula_to_the_byte(folder: Path, length: int) -> None:
    """Two layers of two KV heads, one of each kind: W - 1 = 7 tokens and two sinks."""
    figures = process.measure_run(request(folder, "model", HYBRID, length))
    cached = length if length <= 7 else 7 + 2
    assert figures["kv_cache_bytes"] == 2 * (length + cached) * HEAD_BYTES
    assert figures["attention"]["cache"] == "HybridCache"
    assert len(figures["token_seconds"]) == 3
    assert figures["memory_peak_bytes"] >= figures["memory_p90_bytes"] > 0


def test_the_original_runs_the_requested_attention(folder: Path) -> None:
    eager = process.measure_run(request(folder, "model", ORIGINAL, 20))
    assert eager["attention"]["implementation"] == "eager"
    assert eager["attention"]["cache"] == "DynamicCache"
    assert not any("scaled_dot_product" in name for name in eager["attention"]["kernels"])
    assert eager["kv_cache_bytes"] == 4 * 20 * HEAD_BYTES
    auto = build_model(
        str(folder / "model"), None, ORIGINAL, MeasureSettings(dtype="float32", device="cpu")
    )
    assert auto.implementation == "sdpa"
    absent = SETTINGS.model_copy(update={"original_attention": "flash_attention_9"})
    with pytest.raises(UserError, match=r"^--original-attention flash_attention_9: "):
        build_model(str(folder / "model"), None, ORIGINAL, absent)
    options = {"original_attention": "hybrid", "random_weights": True, "dtype": "bfloat16"}
    figures = process.measure_run(request(folder, "model", ORIGINAL, 20, **options))
    assert figures["attention"]["implementation"] == "bosch"
    assert figures["kv_cache_bytes"] == 4 * 20 * HEAD_BYTES // 2
    assert figures["model"]["weights_bytes"] == 2 * figures["model"]["parameters"]


@pytest.mark.parametrize(
    ("family", "implementation"),
    [("gpt_oss", "bosch"), ("gemma3_text", "sdpa")],
)
def test_an_original_with_windows_of_its_own_needs_no_options(
    family: str, implementation: str, tmp_path: Path
) -> None:
    """transformers has no sdpa for one of them; not all 20 tokens after the prompt are cached."""
    model = small_model(family)
    model.save_pretrained(tmp_path / family)
    original = Variant(kind="original", windows=((0,) * KV_HEADS,) * 2)
    order = request(tmp_path, family, original, 20, original_attention="auto")
    figures = process.measure_run(order)
    assert figures["attention"]["implementation"] == implementation
    own = KV_HEADS * (model.config.sliding_window - 1)
    assert figures["kv_cache_bytes"] == (2 * KV_HEADS * 20 + own) * HEAD_BYTES
    hybrid = Variant(kind="hybrid", windows=((0, 0, 8, 8),) * 2)
    figures = process.measure_run(order | {"variant": hybrid.model_dump(mode="json")})
    assert figures["kv_cache_bytes"] == (4 * (20 + 7) + own) * HEAD_BYTES


def test_processor_time_is_measured_if_requested(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory is the peak of each pass."""
    ticks, peaks, passes = count(), [50, 10, 20, 30, 40], count()
    meter = process.MemoryMeter(
        "planned", lambda: next(passes), lambda: peaks[next(passes) // 2], lambda: 7
    )
    monkeypatch.setattr(process, "memory_meter", lambda device: meter)
    monkeypatch.setattr(process, "time", SimpleNamespace(process_time=lambda: next(ticks)))
    figures = process.measure_run(request(folder, "model", ORIGINAL, 20, clock="processor"))
    assert figures["prefill_seconds"] == 2  # chunks of 16 and 4
    assert figures["token_seconds"] == [1] * 3
    memory = [figures[f"memory_{name}_bytes"] for name in ("start", "peak", "p90")]
    assert memory == pytest.approx([7, 50, 46])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(UserError, match="--clock processor: it does not count the work of a GPU"):
        chosen_device(MeasureSettings(clock="processor"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UserError, match="--device cuda: torch finds no GPU here"):
        chosen_device(MeasureSettings(device="cuda"))
    assert chosen_device(MeasureSettings()).type == "cpu"


def test_memory_of_a_process_is_what_the_system_reports_in_bytes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The peak includes memory that was freed, until the next measurement begins."""
    meter, large, little = process.memory_meter(torch.device("cpu")), 2**27, 2**23
    meter.restart()
    with mmap.mmap(-1, large) as block:  # memory freed to malloc may stay in the process
        for page in range(0, large, mmap.PAGESIZE):
            block[page] = 1
    assert meter.in_use() == pytest.approx(psutil.Process().memory_info().rss, abs=little)
    assert meter.peak() - meter.in_use() == pytest.approx(large, abs=little)
    meter.restart()
    assert 0 <= meter.peak() - meter.in_use() < little
    limits: list[Any] = []
    monkeypatch.setattr(resource, "setrlimit", lambda *limit: limits.append(limit))
    process.limit_memory(torch.device("cpu"), large)
    assert limits == [(resource.RLIMIT_DATA, (large, large))]


def test_a_hybrid_model_is_measured_as_it_is_and_at_other_windows(folder: Path) -> None:
    config = load_config(str(folder / "hybrid"))
    original, own = planned_variants(config, MeasureSettings(lengths=(64,)))
    assert own.mask == HeadMask(((8, 0), (8, 8)), 2)
    figures = process.measure_run(request(folder, "hybrid", own, 30))
    assert figures["kv_cache_bytes"] == (30 + 3 * (7 + 2)) * HEAD_BYTES
    wider = planned_variants(config, MeasureSettings(lengths=(64,), windows=(16,)))[1]
    figures = process.measure_run(request(folder, "hybrid", wider, 30))
    assert figures["kv_cache_bytes"] == (30 + 3 * (15 + 2)) * HEAD_BYTES
    figures = process.measure_run(request(folder, "hybrid", original, 30))
    assert figures["kv_cache_bytes"] == 4 * 30 * HEAD_BYTES
    random = request(folder, "hybrid", own, 30, random_weights=True, attention="eager")
    assert process.measure_run(random)["kv_cache_bytes"] == (30 + 3 * (7 + 2)) * HEAD_BYTES


def test_a_hybrid_of_several_windows_is_measured_with_these(tmp_path: Path) -> None:
    model = small_model("qwen3")
    hybrid = materialize(model, HeadMask(((0, 8, 4, 4),) * LAYERS))
    hybrid.save_pretrained(tmp_path)
    config = load_config(str(tmp_path))
    _, own = planned_variants(config, MeasureSettings(lengths=(64,)))
    assert own.name == "ρ = 0.75, W = 4 and 8"
    again = Variant.model_validate_json(own.model_dump_json())
    (row,) = (
        results_table([point_of(again, 1024, 1, [{"out_of_memory": "no room"}])]).groups[0].rows
    )
    assert row[:3] == ["1k", "0.75", "4 and 8"]
    assert again == own
    measured = build_model(str(tmp_path), None, again, SETTINGS)
    assert type(measured.new_cache()).__name__ == "HybridCache"
    with pytest.raises(UserError, match="--windows: the model's heads have several windows"):
        planned_variants(config, MeasureSettings(lengths=(64,), windows=(16,)))


def test_a_cache_that_differs_from_the_formula_ends_the_run(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = CacheSize.dynamic
    monkeypatch.setattr(CacheSize, "dynamic", lambda size, tokens: right(size, tokens) - 1)
    with pytest.raises(RunError, match="holds 3,072 bytes after 15 tokens"):
        process.measure_run(request(folder, "model", HYBRID, 15))


def test_a_hybrids_weights_with_every_head_full_are_the_original(tmp_path: Path) -> None:
    model = small_model("qwen3_moe")
    materialize(model, random_mask(Window(6))).save_pretrained(tmp_path)
    config = full_attention_config(load_config(str(tmp_path)))
    figures = load_model(tmp_path, dtype="float32", config=config)
    assert type(figures) is type(model)
    ids = tokens(2, 30)
    torch.testing.assert_close(figures(ids).logits, model(ids).logits, rtol=1e-4, atol=1e-4)


def test_planned_variants_are_the_original_and_the_grid() -> None:
    settings = MeasureSettings(lengths=(32,), ratios=(0.5, 0.75), windows=(8, 16), sinks=1)
    original, *hybrids = planned_variants(small_config("qwen3"), settings)
    assert original.mask == HeadMask.all_full(LAYERS, KV_HEADS)
    figures = [(v.mask.swa_ratio, v.mask.menu) for v in hybrids]
    assert figures == [(rho, (Window(w, 1),)) for rho in (0.5, 0.75) for w in (8, 16)]
    # Ratios with equal numbers of heads are one variant; a window may be as long as a sequence.
    near = MeasureSettings(lengths=(32, 64), ratios=(0.49, 0.5), windows=(32,))
    _, one = planned_variants(small_config("qwen3"), near)
    assert (one.mask.swa_ratio, one.mask.menu) == (0.5, (Window(32),))
    by_default = planned_variants(small_config("qwen3"), MeasureSettings(lengths=(1024,)))[1:]
    assert {v.mask.menu for v in by_default} == {(Window(1024),)}
    heads = LAYERS * KV_HEADS
    assert [v.mask.swa_ratio for v in by_default] == [
        swa_budget(heads, ratio) / heads for ratio in (0.25, 0.5, 0.75, 0.875)
    ]


@pytest.mark.parametrize(
    ("model", "original", "options", "sentence"),
    [
        ("model", None, {"lengths": (32, 99), "windows": (8, 64)},
         "--lengths: a sequence of 32 tokens is shorter than a window"),
        ("hybrid", None, {"ratios": (0.5,)}, "--ratios: the model is a hybrid"),
        ("model", None, {"attention": "flex"},
         "--attention: flex computes no passes with a KV cache, a"),
        ("hybrid", "wide", {},
         r"^--original: .*/wide has 2 layers of 4 KV heads, .*/hybrid has 2 of 2"),
    ],
)  # fmt: skip
def test_impossible_measurements_are_refused_before_any_run(
    model: str, original: str | None, options: Any, sentence: str,
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    for name in ("flex", "varlen"):
        monkeypatch.setitem(BACKENDS, name, BACKENDS[name]._replace(usable=lambda: True))
    config = json.loads((folder / "model" / "config.json").read_text())
    (folder / "wide").mkdir(exist_ok=True)
    (folder / "wide" / "config.json").write_text(json.dumps(config | {"num_key_value_heads": 4}))
    original_dir = None if original is None else str(folder / original)
    settings = MeasureSettings(**options)
    with pytest.raises(UserError, match=sentence):
        measurement.measure(str(folder / model), original_dir, settings, tmp_path / "none")
    assert not (tmp_path / "none").exists()


def test_an_output_below_a_file_is_refused_in_a_sentence(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"^--output .*/file/out: cannot be created \(Not a dir"):
        measurement.measure(str(folder / "model"), None, MeasureSettings(), tmp_path / "file/out")


@pytest.mark.parametrize(
    ("requested", "ran"),
    [
        ("varlen", ["aten::_scaled_dot_product_flash_attention_for_cpu"]),
        ("eager", ["aten::_scaled_dot_product_attention_math", "aten::softmax"]),
        ("varlen", ["aten::softmax"]),
        ("sdpa", ["aten::softmax"]),
        ("sdpa", []),
    ],
)
def test_another_kernel_than_the_requested_one_is_an_error(requested: str, ran: list[str]) -> None:
    """If sdpa was requested, capped logits may come from another kernel."""
    with pytest.raises(RunError, match=f"attention '{requested}' was requested"):
        check_kernels(requested, ran, own_logits=requested != "sdpa")


def run(seconds: float, peak: int = 100) -> dict[str, Any]:
    return {
        "prefill_seconds": seconds, "token_seconds": [seconds, seconds],
        "memory_peak_bytes": peak, "memory_p90_bytes": peak - 1, "memory_start_bytes": 1,
        "kv_cache_bytes": 400 // peak, "attention": {},
    }  # fmt: skip


def test_the_slow_token_time_is_the_ninetieth_percentile_of_all_runs() -> None:
    seconds = [[1.0, 11.0, *range(3, 8)], [2.0, 8.0, 9.0, 10.0]]
    runs = [{**run(1.0), "token_seconds": second} for second in seconds]
    assert point_of(ORIGINAL, 10, 2, runs)["decode_seconds_per_token_p90"] == 10.0


def test_points_are_medians_and_ratios_to_the_original() -> None:
    points = [
        point_of(ORIGINAL, 10, 2, [run(2.0), run(9.0, 200), run(4.0, 50)]),
        point_of(HYBRID, 10, 2, [run(1.0, 50)]),
        point_of(ORIGINAL, 20, 2, [{"out_of_memory": "no room"}]),
        point_of(HYBRID, 20, 2, [run(1.0)]),
    ]
    add_original_ratios(points)
    assert points[0]["memory_p90_bytes"] == 99 and "over_original" not in points[0]
    assert points[1]["over_original"] == {
        "prefill_tokens_per_second": 4, "decode_tokens_per_second": 4, "memory_peak_bytes": 0.5,
        "kv_cache_bytes": 2,
    }  # fmt: skip
    assert points[2]["out_of_memory_reason"] == "no room"
    assert points[3]["over_original"] is None
    assert [row for group in results_table(points).groups for row in group.rows] == [
        ["10", "original", "", "5", "0.5", "9000.0", "100 B", "4 B", "0.2 B"],
        ["10", "0.5", "8", "20", "2", "1000.0", "50 B", "8 B", "0.4 B"],
        ["20", "original", "", "out of memory"],
        ["20", "0.5", "8", "40", "2", "1000.0", "100 B", "4 B", "0.1 B"],
    ]


def test_a_panel_shows_the_original_and_the_hybrids_of_one_window_with_units() -> None:
    wide = HYBRID.model_copy(update={"windows": ((0, 16), (0, 16))})
    points = [
        point_of(variant, 10, 1, [run(1.0, 2 * 10**9 + 1)]) for variant in (ORIGINAL, HYBRID, wide)
    ]
    panels = figures(points)["figure_5_ratios"]
    assert len(panels) == 2 * 3
    for panel, window in ((panels[2], 8), (panels[5], 16)):
        description = f"memory, 90th percentile, GB, W = {window}: original, 10: 2; ρ = 0.5, 10: 2."
        assert panel.description == description


def test_a_report_states_the_layout_and_hardware_that_were_measured(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Although the last run ran out of memory; that one is not tried again."""
    tried = Counter[tuple[str, str]]()

    def measured(request: Any, what: str) -> Any:
        is_hybrid = request["variant"]["kind"] == "hybrid"
        tried[request["variant"]["kind"], str(request["variant"]["windows"])] += 1
        return {"out_of_memory": "full"} if is_hybrid else {**run(1.0), "hardware": {"cpu": "x"}}

    monkeypatch.setattr(measurement, "run_in_process", measured)
    monkeypatch.setattr(measurement, "draw_figures", lambda points, output: None)
    settings = MeasureSettings(lengths=(64,), windows=(8,), repeats=2)
    report = measurement.measure(str(folder / "hybrid"), None, settings, tmp_path / "a" / "b")
    assert {times: kind for (kind, _), times in tried.items()} == {2: "original", 1: "hybrid"}
    assert report["model"]["layout"] == "of the hybrid model" and report["hardware"] == {"cpu": "x"}
    assert report["model"]["original"] == "the hybrid's weights, every head full"


def test_an_interrupted_measurement_resumes_and_a_complete_one_starts_anew(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[str, int]] = []

    def stopped_at_the_fourth(request: dict[str, Any], what: str) -> dict[str, Any]:
        if len(calls) == 3:
            calls.append(("stop", 0))
            raise KeyboardInterrupt
        calls.append((request["variant"]["kind"], request["repeat"]))
        return run(1.0)

    monkeypatch.setattr(measurement, "run_in_process", stopped_at_the_fourth)
    settings = MeasureSettings(lengths=(64,), ratios=(0.5,), windows=(8,), repeats=3)
    arguments = (str(folder / "model"), None, settings, tmp_path)
    with pytest.raises(KeyboardInterrupt):
        measurement.measure(*arguments)
    free: list[bool] = []
    bar = SimpleNamespace(update=lambda items, note, **known: free.append(known["free"]))
    with monkeypatch.context() as patch:
        patch.setattr(measurement, "progress", lambda *about: nullcontext(bar))
        report = measurement.measure(*arguments)
    assert free == [True] * 3 + [False] * 3  # the time left counts only the remaining runs
    turns = [("original", 0), ("hybrid", 0), ("original", 1)]
    assert calls == [*turns, ("stop", 0), ("hybrid", 1), ("original", 2), ("hybrid", 2)]
    assert [len(p["runs"]) for p in report["points"]] == [3, 3]
    calls.clear()
    with pytest.raises(KeyboardInterrupt):
        measurement.measure(*arguments)
    assert calls == [*turns, ("stop", 0)]
    # Runs on another machine, with other packages or with a replaced model are not
    # reused.
    for change in (
        lambda: monkeypatch.setattr(measurement.socket, "gethostname", lambda: "elsewhere"),
        lambda: monkeypatch.setattr(measurement, "installed_versions", lambda names: {"torch": 0}),
        lambda: os.utime(folder / "model" / "model.safetensors"),
    ):
        change()
        calls.clear()
        with pytest.raises(KeyboardInterrupt):
            measurement.measure(*arguments)
        assert calls == [*turns, ("stop", 0)]


def test_out_of_memory_is_distinguished_from_other_failures(
    tmp_path: Path,
) -> None:
    assert is_out_of_memory(MemoryError())
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory"))
    for sign in (
        "can't allocate memory", "std::bad_alloc", "CUDA out of memory", "ALLOC_FAILED",
        "CUDA error: out of memory",
    ):  # fmt: skip
        assert is_out_of_memory(RuntimeError(f"an allocator: {sign}"))
        assert not is_out_of_memory(ValueError(sign))
    assert not is_out_of_memory(RuntimeError("shape mismatch"))
    counts = tmp_path / "vmstat"
    counts.write_text("pgfault 5\noom_kill 3\n")
    reason = partial(measurement.lack_of_memory, killed_now=partial(killed_by_kernel, counts))
    assert reason(-signal.SIGKILL, "", 2) == "killed by the system, which was out of memory"
    assert reason(-signal.SIGKILL, "", 3) is None
    # If the system does not count such kills, a killed process is taken for one.
    assert reason(-signal.SIGKILL, "", None) == reason(-signal.SIGKILL, "", 2)
    assert reason(-signal.SIGKILL, "", 3, killed_now=lambda: None) == reason(-signal.SIGKILL, "", 2)
    assert reason(-signal.SIGABRT, "an assertion", 3) is None
    assert reason(-signal.SIGABRT, "what(): std::bad_alloc", 3) == "std::bad_alloc"
    assert reason(1, "std::bad_alloc", 3) is None


def test_a_process_that_dies_is_reported_with_its_last_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dying = tmp_path / "python"
    dying.write_text("#!/bin/sh\necho first\necho the device caught fire\nexit 3\n")
    dying.chmod(0o755)
    monkeypatch.setattr(measurement.sys, "executable", str(dying))
    with pytest.raises(RunError, match="measuring it failed with status 3: the device caught fire"):
        measurement.run_in_process({}, "it")
    for result, ending in (
        ({"status": "user_error", "reason": "a fault"}, pytest.raises(UserError, match="a fault")),
        ({"status": "run_error", "reason": "a stop"}, pytest.raises(RunError, match="a stop")),
        ({"status": "out_of_memory", "reason": "full"}, nullcontext({"out_of_memory": "full"})),
        ({"status": "measured", "kv_cache_bytes": 5}, nullcontext({"kv_cache_bytes": 5})),
    ):
        dying.write_text(f"#!/bin/sh\necho '{json.dumps(result)}' > $5\n")
        with ending as expected:
            assert measurement.run_in_process({}, "it") == expected


def drawn(picture: Picture) -> list[list[dict[str, Any]]]:
    """The rows of a picture's datasets."""
    datasets: dict[str, list[dict[str, Any]]] = picture.chart.to_dict(validate=True)["datasets"]
    return list(datasets.values())


def point(model: str, length: int, ratio: float, window: int, speed: float) -> Any:
    mask = HeadMask.evenly(1, 4, round(4 * ratio), Window(window))
    return {
        "model": model, "length": length, **mask.content,
        "out_of_memory": speed == 0, "prefill_tokens_per_second": speed,
        "decode_tokens_per_second": 2 * speed, "memory_p90_bytes": 1e9 * speed,
    }  # fmt: skip


def test_figures_of_measurements_have_a_panel_per_setting_and_a_line_per_model() -> None:
    points = [
        point("original", 1024, 0.0, 1, 10.0),
        point("original", 2048, 0.0, 1, 0),
        *(point("hybrid", 1024, ratio, window, speed) for ratio, window, speed in (
            (0.75, 64, 30.0), (0.5, 64, 20.0), (0.5, 1024, 15.0))),
    ]  # fmt: skip
    found = figures(points)
    assert {name: len(pictures) for name, pictures in found.items()} == {
        "figure_5_ratios": 6, "figure_6_windows": 6,
    }  # fmt: skip
    first = found["figure_5_ratios"]
    assert [panel.heading for panel in first[::3]] == [
        "prefill, tokens/s, W = 64", "prefill, tokens/s, W = 1,024",
    ]  # fmt: skip
    series = [(row["series"], row["x"], row["y"]) for row in drawn(first[0])[0]]
    assert series == [("original", 1024, 10.0), ("ρ = 0.75", 1024, 30.0), ("ρ = 0.5", 1024, 20.0)]
    assert drawn(first[0])[1] == [
        {"series": "original", "x": 2048, "tip": "original, 2k: out of memory"}
    ]
    assert all("✕ out of memory" in str(panel.chart.to_dict(validate=False)) for panel in first)
    assert [row["y"] for row in drawn(first[1])[0]] == [20.0, 60.0, 40.0]
    assert [row["y"] for row in drawn(first[2])[0]] == [10.0, 30.0, 20.0]
    assert len(drawn(first[3])[0]) == 2
    by_window = found["figure_6_windows"]
    assert by_window[0].heading == "prefill, tokens/s, ρ = 0.5"
    assert [row["series"] for row in drawn(by_window[0])[0]] == ["original", "W = 64", "W = 1,024"]
    scale = first[0].chart.to_dict(validate=False)["layer"][0]["encoding"]["color"]["scale"]
    assert scale["domain"] == ["original", "ρ = 0.5", "ρ = 0.75"]


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measurement, "run_in_process", lambda request, what: measure_run(request))


@pytest.mark.usefixtures("in_this_process")
def test_the_stage_measure_compares_the_hybrid_with_its_original(tmp_path: Path) -> None:
    base = load_model(save_tiny_model(tmp_path / "base"))
    mask = HeadMask(((32, 0), (0, 32)))
    materialize(base, mask).save_pretrained(tmp_path / "materialize" / "model")
    config = StageConfig(
        section=MeasureConfig(lengths=[1024], decode_tokens=2, repeats=1),
        model=ModelConfig(path="unused", dtype="float32"),
        seed=0,
        runtime=Runtime(attention="sdpa"),
    )
    (tmp_path / "work").mkdir()
    summary = measure_stage(config, {"materialize": tmp_path / "materialize"}, tmp_path / "work")
    record = Efficiency.read(tmp_path / "work")
    assert record.settings["dtype"] == "float32" and record.settings["attention"] == "sdpa"
    assert record.machine
    assert [point.length for point in record.hybrids] == [1024]
    assert summary.keys() == {"1024"} and summary["1024"]["prefill_tokens_per_second"] > 0
    assert not list((tmp_path / "work").glob("*.partial.jsonl"))
