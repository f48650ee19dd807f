"""Training at a published shape, 32k tokens, rho = 0.75: speed, memory, profile of a step.

python -m tests.gpu.training [--shape NAME] [--layers N] [--attention NAME]     one GPU of 80 GB
python -m tests.gpu.training --small     a small shape on any machine: shows that it runs
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import logging
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile
from transformers import AutoConfig, AutoModelForCausalLM

from bosch.model.configuration import hybrid_mask
from bosch.score.decoder_shape import DecoderShape
from pipeline.recipe.load import ROOT
from stages.context import Runtime
from stages.train.loop import Loop
from stages.train.memory import TrainingJob
from stages.train.stage import TrainConfig, TrainingStep, read_metrics
from tests.training_case import train_here, write_random_case

SHAPES = ROOT / "recipes" / "shapes"
SMALL = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 512,
    "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 16,
    "moe_intermediate_size": 32, "num_experts": 8, "num_experts_per_tok": 2,
}  # fmt: skip
RATIO, STEPS, PROFILED_STEP = 0.75, 6, 4
MAX_ROWS = 25  # of the profile


def make_case(folder: Path, shape: str, layers: int | None, small: bool) -> tuple[Any, int]:
    """Write a hybrid of random weights and random tokens; its configuration and sequence length."""
    length, window = (512, 64) if small else (32768, 1024)
    config = AutoConfig.from_pretrained(SHAPES / shape)
    changes = {name: size for name, size in SMALL.items() if hasattr(config, name)} if small else {}
    count = layers or changes.get("num_hidden_layers", config.num_hidden_layers)
    full = ["full_attention"] * count
    config.update({**changes, "num_hidden_layers": count, "layer_types": full})
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        base = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    sliding = round(RATIO * config.num_key_value_heads)
    write_random_case(folder, base, sliding, window, length, STEPS)
    return AutoConfig.from_pretrained(folder / "materialize" / "model"), length


def profile_one_step(tables: list[str]) -> None:
    """Profile one step of the next training, and append its table to `tables`."""
    forward_backward_unprofiled = Loop.forward_backward
    on_gpu = torch.cuda.is_available()
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]

    def forward_backward(self: Loop, *args: Any) -> float:
        if self.step != PROFILED_STEP:
            return forward_backward_unprofiled(self, *args)
        with profile(activities=activities) as profiler:
            result = forward_backward_unprofiled(self, *args)
        order = "self_cuda_time_total" if on_gpu else "self_cpu_time_total"
        rows = profiler.key_averages()
        tables.append(rows.table(sort_by=order, row_limit=MAX_ROWS, max_name_column_width=60))
        return result

    Loop.forward_backward = forward_backward  # type: ignore[method-assign]


def report(config: Any, length: int, train: dict[str, Any], runtime: dict[str, Any],
           steps: list[TrainingStep]) -> None:  # fmt: skip
    """Print the medians of the steps after the first two, without profiled ones."""
    steady = [step for step in steps[2:] if step.step != PROFILED_STEP]
    memory = TrainingJob(
        DecoderShape.of(config), TrainConfig(**train), Runtime(**runtime), length,
        hybrid_mask(config).layers, 1, torch.cuda.is_available(), 0.0,
    ).memory()  # fmt: skip
    tokens_per_second = statistics.median(step.tokens_per_second or 0.0 for step in steady)
    print(f"tokens/s: {tokens_per_second:,.0f}")
    utilisation = [step.mfu for step in steady if step.mfu is not None]
    print(f"MFU: {statistics.median(utilisation):.1%}" if utilisation else "MFU: no known GPU")
    peak = steps[-1].memory or 0
    scope = "measured" if torch.cuda.is_available() else "measured of the whole process"
    print(f"peak: {peak / 2**30:.2f} GiB {scope}, {memory.peak / 2**30:.2f} GiB planned")
    print(json.dumps({name: round(size / 2**30, 3) for name, size in memory.parts.items()}))


def main(shape: str, layers: int | None, attention: str, small: bool) -> None:
    logging.basicConfig(level=logging.INFO, stream=sys.stdout)
    on_gpu = torch.cuda.is_available()
    with tempfile.TemporaryDirectory() as folder:
        case = Path(folder)
        config, length = make_case(case, shape, layers, small)
        train: dict[str, Any] = {
            "total_tokens": STEPS * length, "batch_tokens": length, "checkpoint_tokens": [],
            "mixed_precision": "bf16" if on_gpu else "no",
            "liger": on_gpu and importlib.util.find_spec("liger_kernel") is not None,
        }  # fmt: skip
        runtime: dict[str, Any] = {
            "checkpointing": "full", "micro_batch_size": 1, "save_every_steps": 1000,
            "attention": attention if on_gpu else "auto",
        }  # fmt: skip
        tables: list[str] = []
        profile_one_step(tables)
        train_here(case, case / "work", train=train, runtime=runtime)
        report(config, length, train, runtime, read_metrics(case / "work"))
        print(tables[0])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", default="qwen3_1p7b", help="a folder of recipes/shapes")
    parser.add_argument("--layers", type=int, help="default: all of the shape")
    parser.add_argument("--attention", default="auto", help="as runtime.attention")
    parser.add_argument("--small", action="store_true")
    chosen = parser.parse_args()
    main(chosen.shape, chosen.layers, chosen.attention, chosen.small)
