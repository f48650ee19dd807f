"""The quickstart recipe at a size a test can wait for: real model, real stages, real kills."""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline.recipe import ROOT, load_recipe

RECIPE = "recipes/quickstart.yaml"
SMALL = [
    "prepare.sequence_length=384",
    "prepare.train_tokens=18432",
    "prepare.calibration.examples=8",
    "prepare.calibration.length=384",
    "search.budget_per_layer=3",
    "train.total_tokens=18432",
    "train.batch_tokens=1536",
    "train.checkpoint_tokens=[9216,18432]",
    "runtime.save_every_steps=2",
    "evaluate.needle.tasks=[niah_single_2]",
    "evaluate.needle.lengths=[384]",
    "evaluate.needle.samples=4",
]


def start(root: Path, *options: str, processes: int = 1) -> subprocess.Popen[str]:
    """The command a user types, in a process group of its own.

    One thread each: how many there are decides the last bits of a matrix product.
    """
    return subprocess.Popen(
        ["launch/torchrun.sh", RECIPE, *SMALL, f"runtime.output_root={root}", *options],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "NPROC_PER_NODE": str(processes)},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


def finish(root: Path, *options: str, processes: int = 1) -> str:
    child = start(root, *options, processes=processes)
    text, _ = child.communicate(timeout=600)
    assert child.returncode == 0, text[-3000:]
    return text


def results(root: Path) -> dict[str, Any]:
    """What has to be the same however often a run was killed."""
    output = root / "quickstart"
    metrics = [json.loads(line) for line in (output / "train/metrics.jsonl").open()]
    weights = output / "train/checkpoints/tokens-18432/model.safetensors"
    return {
        "mask": json.loads((output / "search/head_mask.json").read_text())["swa_kv_heads"],
        "losses": [line["loss"] for line in metrics],
        "weights": hashlib.sha256(weights.read_bytes()).hexdigest(),
        "scores": json.loads((output / "evaluate/scores.json").read_text())["checkpoints"],
    }


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("undisturbed")
    finish(root)
    return root


@pytest.mark.slow
def test_the_pipeline_runs_and_a_second_run_does_nothing(undisturbed: Path) -> None:
    output = undisturbed / "quickstart"
    mask = json.loads((output / "search/head_mask.json").read_text())
    sliding = sum(len(heads) for heads in mask["swa_kv_heads"])
    assert sliding == 0.75 * mask["num_layers"] * mask["num_key_value_heads"]
    assert len(results(undisturbed)["losses"]) == 12
    scores = json.loads((output / "evaluate/scores.json").read_text())["checkpoints"]
    assert list(scores) == ["original", "hybrid", "tokens-9216", "tokens-18432"]
    page = (output / "report/index.html").read_text()
    assert "<svg" in page
    assert "http-equiv" in page
    began = time.monotonic()
    assert "nothing to do" in finish(undisturbed)
    assert time.monotonic() - began < 10
    told = finish(undisturbed, "search.swa_ratio=0.5", "--dry-run")
    assert "prepare      cached" in told
    assert "search.swa_ratio changed 0.75 → 0.5" in told


@pytest.mark.slow
def test_a_run_killed_again_and_again_ends_the_same(undisturbed: Path, tmp_path: Path) -> None:
    rng = random.Random(20)
    for seconds in [rng.uniform(4, 20) for _ in range(4)]:
        child = start(tmp_path)
        try:
            child.communicate(timeout=seconds)
            break  # finished before the kill
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)
            child.communicate()
    finish(tmp_path)
    assert results(tmp_path) == results(undisturbed)


@pytest.mark.slow
@pytest.mark.distributed
def test_two_processes_end_where_one_does(undisturbed: Path, tmp_path: Path) -> None:
    """Search and scores to the bit; in training, gradients are summed in another order."""
    finish(tmp_path, processes=2)
    one, two = results(undisturbed), results(tmp_path)
    assert two["mask"] == one["mask"]
    assert two["losses"] == pytest.approx(one["losses"], rel=5e-3)
    for name in ("original", "hybrid"):
        assert two["scores"][name] == one["scores"][name]
    for stage, processes in (("prepare", 1), ("search", 2), ("train", 2), ("evaluate", 2)):
        manifest = json.loads((tmp_path / "quickstart" / stage / "manifest.json").read_text())
        assert manifest["processes"] == processes


@pytest.mark.slow
def test_the_trained_hybrid_loads_and_generates(undisturbed: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    import bosch  # noqa: F401  (makes the model type known)

    folder = undisturbed / "quickstart/train/checkpoints/tokens-18432"
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    inputs = tokenizer("def main(" * 60, return_tensors="pt")
    length = inputs.input_ids.shape[1]
    assert length > 128
    out = model.generate(**inputs, max_new_tokens=8, do_sample=False, return_dict_in_generate=True)
    config = model.config
    full = sum(config.hybrid_attention["full_kv_heads_per_layer"])
    heads = config.num_hidden_layers * config.num_key_value_heads
    seen = length + 7  # the last token generated was not read back
    entries = full * seen + (heads - full) * min(seen, 127)
    size = torch.finfo(model.dtype).bits // 8
    assert out.past_key_values.num_bytes == 2 * entries * config.head_dim * size


def test_the_recipe_is_valid_and_names_the_model_in_the_repository() -> None:
    loaded = load_recipe(ROOT / RECIPE, fetch=False)
    assert loaded.info is not None
    assert (loaded.info.key_value_heads, loaded.info.max_positions) == (8, 2048)
