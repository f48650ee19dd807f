"""`bosch measure` as users meet it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from pipeline.cli import main
from tests.rank_processes import Forked
from tests.tiny_data import save_tiny_model

# What a run of the tiny model takes beside its attention, and what eager attention over 6,144
# tokens does not find: four heads of 6,144 x 6,144 scores in float32 are 604 MB, held twice.
# A torch for GPUs holds 0.6 GB more.
LIMIT = 1_000_000_000 if torch.version.cuda is None else 1_600_000_000


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("measure") / "model")


def test_a_report_in_which_the_original_ran_out_of_memory(model: Path, tmp_path: Path) -> None:
    for name in model.iterdir():
        if name.name != "config.json":
            name.unlink()  # with random weights nothing else is needed
    command = ["measure", str(model), "--random-weights"]
    command += ["--lengths", "6k", "--ratios", "0.5", "--windows", "32", "--decode-tokens", "2"]
    command += ["--dtype", "float32", "--original-attention", "eager", "--memory-limit"]
    command += [str(LIMIT), "--device", "cpu", "--repeats", "1", "--output", str(tmp_path / "out")]
    # Stacks count as memory, too. Each measurement is made in a new Python.
    done = Forked(command, tmp_path / "printed", OPENBLAS_NUM_THREADS="1").done(600)
    assert done.returncode == 0, done.stderr
    assert "out of memory" in done.stdout
    report = json.loads((tmp_path / "out" / "efficiency.json").read_text())
    assert report["format"] == 1
    assert report["model"]["key_value_heads"] == 2
    assert report["settings"]["memory_limit"] == LIMIT
    assert report["hardware"]["device"] == "cpu"
    assert {"python", "torch", "transformers"} <= report["versions"].keys()
    original, hybrid = report["points"]
    assert (original["model"], original["length"]) == ("original", 6144)
    assert original["out_of_memory"]
    assert "allocate memory" in original["out_of_memory_reason"]
    assert (hybrid["model"], hybrid["length"]) == ("hybrid", 6144)
    assert not hybrid["out_of_memory"], hybrid
    assert hybrid["kv_cache_bytes"] == 2 * (6144 + 31) * 2 * 8 * 4
    assert hybrid["over_original"] is None
    assert hybrid["prefill_tokens_per_second"] > 0
    assert len(hybrid["runs"][0]["token_seconds"]) == 2
    page = (tmp_path / "out" / "efficiency.html").read_text()
    assert page.count('<figure class="chart"') == 2 * 3 and "out of memory" in page
    for figure in ("figure_5_ratios", "figure_6_windows"):
        for kind in (".png", ".svg"):
            assert (tmp_path / "out" / figure).with_suffix(kind).stat().st_size > 5000


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["no/such/model"], "no/such/model"),
        (["--ratios", "0.5,2"], "--ratios: expected a value at most 1, found "),
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
