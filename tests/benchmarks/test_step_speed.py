"""A step of the training stage beside a bare loop, and of a hybrid beside its original.

    pytest -s tests/benchmarks/test_step_speed.py

Ratios of processor time within one run that alternates between the two; medians.
"""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from bosch.objective.decoder_shape import DecoderShape
from bosch.window import Window
from stages.context import ModelConfig, Runtime, StageConfig
from stages.train.model import load_for_training
from stages.train.run import build_loop
from stages.train.stage import TrainConfig
from stages.train.storage import RestartPoints
from tests.training_case import stage_config, write_random_case

pytestmark = pytest.mark.slow

VOCABULARY, STEPS, WARM_UP_STEPS = 2048, 14, 3
SAVED_STEPS, SAVE_EVERY = 41, 10  # in the test of restart points
SIZES = {
    "vocab_size": VOCABULARY, "hidden_size": 256, "intermediate_size": 512,
    "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 32,
    "tie_word_embeddings": True, "max_position_embeddings": 4096,
}  # fmt: skip


def write_case(folder: Path, length: int, window: int, sliding: int) -> Path:
    """A hybrid with `sliding` of 4 KV heads per layer, and random tokens to train on."""
    torch.manual_seed(0)
    base = Qwen3ForCausalLM(Qwen3Config(**SIZES, bos_token_id=None, eos_token_id=0))
    return write_random_case(folder, base, sliding, window, length, SAVED_STEPS)


def config_of(length: int, steps: int = STEPS, every: int = 1000) -> StageConfig[TrainConfig]:
    return stage_config(
        train={"total_tokens": steps * length, "batch_tokens": length, "checkpoint_tokens": []},
        runtime={"micro_batch_size": 1, "save_every_steps": every},
    )


def model_of(case: Path, config: StageConfig[TrainConfig]) -> Any:
    folder = case / "materialize" / "model"
    return load_for_training(folder, ModelConfig(path="x"), config.section, Runtime()).train()


def loop_of(
    tmp_path: Path, steps: int = STEPS, every: int = 1000
) -> tuple[Path, StageConfig[TrainConfig], Any]:
    """A case of sequences of 1,024 tokens, its configuration and the loop of the stage."""
    case, config = write_case(tmp_path / "case", 1024, 128, 3), config_of(1024, steps, every)
    work_dir = tmp_path / "work"
    work_dir.mkdir()
    inputs = {name: case / name for name in ("prepare", "materialize")}
    restarts = RestartPoints(work_dir, config.section)
    return case, config, build_loop(config, inputs, work_dir, restarts)


def bare_step(model: Any, optimizer: Any, ids: torch.Tensor) -> None:
    """A training step with nothing but forward pass, backward pass, clipping and update."""
    loss = model(input_ids=ids, labels=ids)["loss"]
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()


def test_a_step_takes_as_long_as_that_of_a_bare_loop(tmp_path: Path) -> None:
    case, config, loop = loop_of(tmp_path)
    model = model_of(case, config)
    train = config.section
    optimizer = torch.optim.AdamW(
        model.parameters(), train.learning_rate, betas=(train.adam_beta1, train.adam_beta2)
    )
    ids = torch.randint(0, VOCABULARY, (1, 1024))
    seconds: list[list[float]] = [[], []]
    save = loop.save

    def save_and_take_a_bare_step(decision: Any) -> None:
        save(decision)
        seconds[0].append(time.process_time() - step_started[0])
        started = time.process_time()
        bare_step(model, optimizer, ids)
        step_started[0] = time.process_time()
        seconds[1].append(step_started[0] - started)

    loop.save = save_and_take_a_bare_step  # type: ignore[method-assign]
    step_started = [time.process_time()]
    loop.run()
    ours, bare = (statistics.median(taken[WARM_UP_STEPS:]) for taken in seconds)
    print(f"a step: {ours:.3f} s, of a bare loop {bare:.3f} s, ratio {ours / bare:.3f}")
    assert ours <= 1.03 * bare


def test_restart_points_cost_two_percent_of_the_steps(tmp_path: Path) -> None:
    """One per ten steps: the training thread's time for them as a share of its time for all.

    Other threads write them; if the training thread waited for these, the elapsed time (the second
    number printed) would show it.
    """
    _, _, loop = loop_of(tmp_path, SAVED_STEPS, SAVE_EVERY)
    save, saves_seconds = loop.save, []
    clocks = (time.thread_time, time.perf_counter)

    def timed_save(is_due: bool) -> None:
        before = [clock() for clock in clocks]
        save(is_due)
        if is_due:
            saves_seconds.append(
                [clock() - start for clock, start in zip(clocks, before, strict=True)]
            )

    loop.save = timed_save  # type: ignore[method-assign]
    before = [clock() for clock in clocks]
    loop.run()
    run_seconds = [clock() - start for clock, start in zip(clocks, before, strict=True)]
    intervals = SAVED_STEPS / SAVE_EVERY
    shares = [
        [seconds / (total / intervals) for seconds in of_saves]
        for of_saves, total in zip(zip(*saves_seconds, strict=True), run_seconds, strict=True)
    ]
    for name, values in zip(("processor time", "time"), shares, strict=True):
        print(f"a restart point of ten steps, {name}: {[f'{v:.2%}' for v in values]}")
    assert len(saves_seconds) == SAVED_STEPS // SAVE_EVERY
    assert statistics.median(shares[0]) <= 0.02


def test_the_times_of_a_hybrids_and_its_originals_step_relate_as_their_operations(
    tmp_path: Path,
) -> None:
    length, window = 4096, 256
    config = config_of(length)
    cases = [write_case(tmp_path / str(n), length, window, n) for n in (3, 0)]
    models = [model_of(case, config) for case in cases]
    optimizers = [torch.optim.AdamW(model.parameters(), 1e-4) for model in models]
    ids = torch.randint(0, VOCABULARY, (1, length))
    seconds: list[list[float]] = [[], []]
    for _ in range(6):
        for taken, model, optimizer in zip(seconds, models, optimizers, strict=True):
            started = time.process_time()
            bare_step(model, optimizer, ids)
            taken.append(time.process_time() - started)
    hybrid, original = (statistics.median(taken[1:]) for taken in seconds)
    shape = DecoderShape.of(Qwen3Config(**SIZES))
    flops = shape.training_flops(length, length, {Window(window): 0.75})
    expected = flops / shape.training_flops(length, length)
    print(f"hybrid over original: {hybrid / original:.3f}, of the operations {expected:.3f}")
    assert hybrid / original == pytest.approx(expected, rel=0.2)
