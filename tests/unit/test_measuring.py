"""The parts of `measure`: what is measured, its checks, and reports of failures."""

from __future__ import annotations

import json
import mmap
import os
import shutil
import signal
import sys
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
from bosch.model.loading import load_config, load_model
from bosch.model.materialize import materialize
from bosch.this_process import killed_by_kernel
from bosch.window import Window
from pipeline.cli import main
from stages.context import ModelConfig, Runtime, StageConfig
from stages.measure import measurement, process
from stages.measure.measured_model import build_model, label, planned_masks
from stages.measure.process import measure_run
from stages.measure.results import add_original_ratios, draw_figure, point_of, results_table
from stages.measure.stage import Efficiency, MeasureConfig, MeasureSettings
from tests.hybrid_case import KV_HEADS, LAYERS, small_config, small_model
from tests.tiny_data import save_tiny_model

HYBRID = HeadMask(((0, 8), (0, 8)), 2)
ORIGINAL = HeadMask.all_full(2, 2)
SETTINGS = MeasureSettings(dtype="float32", chunk=16, decode_tokens=3)
HEAD_BYTES = 2 * 8 * 4  # keys and values of one head and token in the tiny model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model and a hybrid of it."""
    folder = tmp_path_factory.mktemp("measuring")
    save_tiny_model(folder / "model")
    model = load_model(folder / "model", dtype="float32")
    materialize(model, HeadMask(((8, 0), (8, 8)), 2)).save_pretrained(folder / "hybrid")
    return folder


def request(folder: Path, name: str, mask: HeadMask, length: int, **changes: Any) -> Any:
    settings = SETTINGS.model_copy(update=changes).model_dump(mode="json")
    place = {"model": str(folder / name), "mask": mask.content}
    return {**place, "length": length, "settings": settings}


@pytest.mark.parametrize("length", [5, 40])
def test_the_measured_cache_equals_the_formula_to_the_byte(folder: Path, length: int) -> None:
    """Two layers of two KV heads, one of each kind: W - 1 = 7 tokens and two sinks."""
    figures = measure_run(request(folder, "model", HYBRID, length))
    cached = length if length <= 7 else 7 + 2
    assert figures["kv_cache_bytes"] == 2 * (length + cached) * HEAD_BYTES
    assert figures["attention"] == "sdpa" and len(figures["token_seconds"]) == 3
    assert figures["memory_peak_bytes"] >= figures["memory_p90_bytes"] > 0
    figures = measure_run(request(folder, "model", ORIGINAL, length, random_weights=True))
    assert figures["kv_cache_bytes"] == 4 * length * HEAD_BYTES
    assert figures["model"]["weights_bytes"] == 4 * figures["model"]["parameters"]


@pytest.mark.parametrize(
    ("family", "cache"), [("gpt_oss", "HybridCache"), ("gemma3_text", "DynamicCache")]
)
def test_an_original_with_windows_of_its_own_needs_no_options(
    family: str, cache: str, tmp_path: Path
) -> None:
    """transformers has no sdpa for one of them; not all 20 tokens after the prompt are cached."""
    model = small_model(family)
    model.save_pretrained(tmp_path / family)
    original, hybrid = HeadMask.all_full(2, KV_HEADS), HeadMask(((0, 0, 8, 8),) * 2)
    figures = measure_run(request(tmp_path, family, original, 20))
    own = KV_HEADS * (model.config.sliding_window - 1)
    assert figures["kv_cache_bytes"] == (2 * KV_HEADS * 20 + own) * HEAD_BYTES
    measured = build_model(str(tmp_path / family), original, SETTINGS)
    assert type(measured.new_cache()).__name__ == cache
    figures = measure_run(request(tmp_path, family, hybrid, 20))
    assert figures["kv_cache_bytes"] == (4 * (20 + 7) + own) * HEAD_BYTES


def test_time_is_summed_over_passes_and_memory_is_the_peak_of_each(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ticks, peaks, passes = count(), [50, 10, 20, 30, 40], count()
    meter = process.MemoryMeter(lambda: next(passes), lambda: peaks[next(passes) // 2], lambda: 7)
    monkeypatch.setattr(process, "memory_meter", lambda device: meter)
    monkeypatch.setattr(process, "time", SimpleNamespace(perf_counter=lambda: next(ticks)))
    figures = measure_run(request(folder, "model", ORIGINAL, 20))
    assert figures["prefill_seconds"] == 2  # chunks of 16 and 4
    assert figures["token_seconds"] == [1] * 3
    assert [figures[f"memory_{name}_bytes"] for name in ("peak", "p90")] == pytest.approx([50, 46])


def test_memory_of_a_process_is_what_the_system_reports_in_bytes() -> None:
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


def test_a_hybrid_model_is_measured_as_it_is(folder: Path, tmp_path: Path) -> None:
    """Also with several windows, and beside its own weights with every head full."""
    original, own = planned_masks(load_config(str(folder / "hybrid")), SETTINGS)
    assert own == HeadMask(((8, 0), (8, 8)), 2)
    held = (30 + 3 * (7 + 2)) * HEAD_BYTES
    assert measure_run(request(folder, "hybrid", own, 30))["kv_cache_bytes"] == held
    random = request(folder, "hybrid", own, 30, random_weights=True, attention="eager")
    assert measure_run(random)["kv_cache_bytes"] == held
    figures = measure_run(request(folder, "hybrid", original, 30))
    assert figures["kv_cache_bytes"] == 4 * 30 * HEAD_BYTES
    several = HeadMask(((0, 8, 4, 4),) * LAYERS)
    materialize(small_model("qwen3"), several).save_pretrained(tmp_path)
    assert planned_masks(load_config(str(tmp_path)), SETTINGS)[1] == several
    assert label(several) == "ρ = 0.75, W = 4 and 8"


def test_a_cache_that_differs_from_the_formula_ends_the_run(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = CacheSize.dynamic
    monkeypatch.setattr(CacheSize, "dynamic", lambda size, tokens: right(size, tokens) - 1)
    with pytest.raises(RunError, match="holds 3,072 bytes after 15 tokens"):
        measure_run(request(folder, "model", HYBRID, 15))


def test_planned_models_are_the_original_and_the_grid() -> None:
    config = small_config("qwen3")
    settings = MeasureSettings(lengths=[32], ratios=[0.5, 0.75], windows=[8, 16], sinks=1)
    original, *hybrids = planned_masks(config, settings)
    assert original == HeadMask.all_full(LAYERS, KV_HEADS)
    figures = [(mask.swa_ratio, mask.menu) for mask in hybrids]
    assert figures == [(rho, (Window(w, 1),)) for rho in (0.5, 0.75) for w in (8, 16)]
    # Ratios with equal numbers of heads are one model; a window may be as long as a sequence.
    near = MeasureSettings(lengths=[32, 64], ratios=[0.49, 0.5], windows=[32])
    _, one = planned_masks(config, near)
    assert (one.swa_ratio, one.menu) == (0.5, (Window(32),))
    by_default, heads = planned_masks(config, MeasureSettings())[1:], LAYERS * KV_HEADS
    assert {mask.menu for mask in by_default} == {(Window(1024),)}
    ratios = [swa_budget(heads, ratio) / heads for ratio in (0.25, 0.5, 0.75, 0.875)]
    assert [mask.swa_ratio for mask in by_default] == ratios


# What a run of the tiny model takes beside its attention, and what eager attention over 6,144
# tokens does not find: four heads of 6,144 x 6,144 scores in float32 are 604 MB, held twice.
# A torch for GPUs holds 0.6 GB more.
LIMIT = 1_000_000_000 if torch.version.cuda is None else 1_600_000_000


def test_a_report_in_which_the_hybrid_ran_out_of_memory(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """As a command; with random weights it needs only a configuration."""
    model = tmp_path / "model"
    model.mkdir()
    shutil.copy(folder / "model" / "config.json", model)
    python = tmp_path / "python"
    python.write_text(f'#!/bin/bash\nulimit -d {LIMIT // 1024}; exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "1")  # stacks count as memory, too
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    command = ["measure", str(model), "--random-weights", "--attention", "eager"]
    command += ["--lengths", "6k", "--ratios", "0.5", "--windows", "32", "--decode-tokens", "2"]
    command += ["--dtype", "float32", "--repeats", "1", "--output", str(tmp_path / "out")]
    assert main(command) == 0
    assert "out of memory" in capsys.readouterr().out
    report = json.loads((tmp_path / "out" / "efficiency.json").read_text())
    assert report["hardware"]["device"] == "cpu"
    assert {"python", "torch", "transformers"} <= report["versions"].keys()
    original, hybrid = report["points"]
    assert (original["model"], original["length"]) == ("original", 6144)
    assert not original["out_of_memory"], original
    assert original["kv_cache_bytes"] == 4 * 6144 * 2 * 8 * 4
    assert original["prefill_tokens_per_second"] > 0
    assert len(original["runs"][0]["token_seconds"]) == 2
    assert (hybrid["model"], hybrid["length"]) == ("hybrid", 6144)
    assert hybrid["out_of_memory"] and "allocate memory" in hybrid["out_of_memory_reason"]
    assert hybrid["over_original"] is None


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["no/such/model"], "no/such/model"),
        (["--ratios", "0.5,2"], "--ratios: expected less than or equal to 1, found "),
        (["--dtype", "int3"], "--dtype: expected float32, bfloat16, float16, found 'int3'"),
        (["--lengths", "4k,long"], "--lengths: 'long' is not a count"),
        (["--sinks", "2147483647"], "--windows and --sinks: window_size and sinks are 1,024 with"),
        (["--lengths", "32,99", "--windows", "8,64"], "--lengths: a sequence of 32 tokens is shor"),
        (["--windows", "8", "--attention", "flex"], "--attention: flex computes no passes with a"),
    ],
)
def test_faulty_input_is_one_sentence_and_status_2(
    options: list[str], sentence: str, folder: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setitem(BACKENDS, "flex", BACKENDS["flex"]._replace(usable=lambda: True))
    arguments = options if options[0] == "no/such/model" else [str(folder / "model"), *options]
    assert main(["measure", *arguments, "--output", str(tmp_path / "out")]) == 2
    message = capsys.readouterr().err.strip()
    assert message.startswith("error: ") and sentence in message and "\n" not in message
    assert not (tmp_path / "out").exists()


def run(seconds: float, peak: int = 100) -> dict[str, Any]:
    return {
        "prefill_seconds": seconds, "token_seconds": [seconds, seconds],
        "memory_peak_bytes": peak, "memory_p90_bytes": peak - 1,
        "kv_cache_bytes": 400 // peak, "attention": "sdpa",
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
    assert [row for group in results_table(points).groups for row in group] == [
        ["10", "original", "", "5", "0.5", "9000.0", "100 B", "4 B", "0.2 B"],
        ["10", "0.5", "8 with 2 sinks", "20", "2", "1000.0", "50 B", "8 B", "0.4 B"],
        ["20", "original", "", "out of memory"],
        ["20", "0.5", "8 with 2 sinks", "40", "2", "1000.0", "100 B", "4 B", "0.1 B"],
    ]


def test_the_figure_has_a_line_for_each_model_that_had_memory(tmp_path: Path) -> None:
    wide = HeadMask(((0, 16), (0, 16)))
    points = [point_of(mask, 10, 1, [run(1.0, 2 * 10**9 + 1)]) for mask in (ORIGINAL, HYBRID, wide)]
    points.append(point_of(ORIGINAL, 20, 1, [{"out_of_memory": "full"}]))
    text = draw_figure(points, tmp_path)
    series = "original, 10: {0}; ρ = 0.5, W = 8 with 2 sinks, 10: {0}; ρ = 0.5, W = 16, 10: {0}"
    panels = {"prefill, tokens/s": 10, "decoding, tokens/s": 1, "memory, 90th percentile, GB": 2}
    assert text == ". ".join(f"{name}: {series.format(y)}" for name, y in panels.items())
    assert text in (tmp_path / "efficiency.svg").read_text()
    assert (tmp_path / "efficiency.png").stat().st_size > 5000


def test_a_run_out_of_memory_is_a_result_and_not_tried_again(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = Counter[int]()

    def measured(request: Any, what: str) -> Any:
        sliding = HeadMask(**request["mask"]).num_sliding
        tried[sliding] += 1
        return {"out_of_memory": "full"} if sliding else {**run(1.0), "hardware": {"cpu": "x"}}

    monkeypatch.setattr(measurement, "run_in_process", measured)
    settings = MeasureSettings(lengths=[64], repeats=2)
    report = measurement.measure(str(folder / "hybrid"), settings, tmp_path / "a" / "b")
    assert tried == {0: 2, 3: 1} and report["hardware"] == {"cpu": "x"}
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"^--output .*/file/out: cannot be created \(Not a dir"):
        measurement.measure(str(folder / "hybrid"), settings, tmp_path / "file/out")


def test_an_interrupted_measurement_resumes_and_a_complete_one_starts_anew(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[str, int]] = []

    def stopped_at_the_fourth(request: dict[str, Any], what: str) -> dict[str, Any]:
        if len(calls) == 3:
            calls.append(("stop", 0))
            raise KeyboardInterrupt
        sliding = HeadMask(**request["mask"]).num_sliding
        calls.append(("hybrid" if sliding else "original", request["length"]))
        return run(1.0)

    monkeypatch.setattr(measurement, "run_in_process", stopped_at_the_fourth)
    settings = MeasureSettings(lengths=[64, 65, 66], ratios=[0.5], windows=[8], repeats=1)
    arguments = (str(folder / "model"), settings, tmp_path)
    with pytest.raises(KeyboardInterrupt):
        measurement.measure(*arguments)
    free: list[bool] = []
    bar = SimpleNamespace(update=lambda items, note, **known: free.append(known["free"]))
    with monkeypatch.context() as patch:
        patch.setattr(measurement, "progress", lambda *about: nullcontext(bar))
        report = measurement.measure(*arguments)
    assert free == [True] * 3 + [False] * 3  # the time left counts only the remaining runs
    turns = [("original", 64), ("hybrid", 64), ("original", 65)]
    assert calls == [*turns, ("stop", 0), ("hybrid", 65), ("original", 66), ("hybrid", 66)]
    assert [len(p["runs"]) for p in report["points"]] == [1] * 6
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
        ({"user_error": "a fault"}, pytest.raises(UserError, match="a fault")),
        ({"run_error": "a stop"}, pytest.raises(RunError, match="a stop")),
        ({"out_of_memory": "full"}, nullcontext({"out_of_memory": "full"})),
        ({"kv_cache_bytes": 5}, nullcontext({"kv_cache_bytes": 5})),
    ):
        dying.write_text(f"#!/bin/sh\necho '{json.dumps(result)}' > $5\n")
        with ending as expected:
            assert measurement.run_in_process({}, "it") == expected


def test_the_stage_measure_compares_the_hybrid_with_its_original(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measurement, "run_in_process", lambda request, what: measure_run(request))
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
    summary = measurement.run(config, {"materialize": tmp_path / "materialize"}, tmp_path / "work")
    record = Efficiency.read(tmp_path / "work")
    assert record.settings["dtype"] == "float32" and record.settings["attention"] == "sdpa"
    assert record.machine
    assert [point.length for point in record.hybrids] == [1024]
    assert summary.keys() == {"1024"} and summary["1024"]["prefill_tokens_per_second"] > 0
    assert not list((tmp_path / "work").glob("*.partial.jsonl"))
