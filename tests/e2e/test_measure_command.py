"""`bosch measure` as users meet it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from pipeline.cli import main
from tests.tiny_data import save_tiny_model

# What a run of the tiny model takes beside its attention, and what eager attention over 6,144
# tokens does not find: four heads of 6,144 x 6,144 scores in float32 are 604 MB, held twice.
# A torch for GPUs holds 0.6 GB more.
LIMIT = 1_000_000_000 if torch.version.cuda is None else 1_600_000_000


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("measure") / "model")


def test_a_report_in_which_the_hybrid_ran_out_of_memory(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in model.iterdir():
        if name.name != "config.json":
            name.unlink()  # with random weights nothing else is needed
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
    ],
)
def test_faulty_input_is_one_sentence_and_status_2(
    options: list[str],
    sentence: str,
    model: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = options if not options[0].startswith("--") else [str(model), *options]
    assert main(["measure", *arguments, "--output", str(tmp_path / "out")]) == 2
    message = capsys.readouterr().err.strip()
    assert message.startswith("error: ")
    assert sentence in message
    assert len(message.splitlines()) == 1
    assert not (tmp_path / "out").exists()
