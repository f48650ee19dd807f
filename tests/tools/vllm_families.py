"""Serve a small random hybrid model of every family with vLLM; hold it against transformers.

    .venv-vllm/bin/python -m tests.tools.vllm_families              every family
    .venv-vllm/bin/python -m tests.tools.vllm_families phimoe opt   only these

It prints the rows of docs/reference/serving_families.md. Each family has processes of its own:
vLLM's transformers backend changes transformers' classes. What is not served is tried as the
original model too, which says whose the fault is.
"""

from __future__ import annotations

import argparse
import importlib
import math
import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from textwrap import shorten
from typing import Any

import torch

from bosch.errors import UserError
from bosch.files import read_json, write_json
from bosch.model.families import decoder_layers
from tests.hybrid_case import FAMILY_NAMES, small_config, small_model
from tests.vllm_case import (
    SIZES,
    engine,
    generate,
    largest_difference,
    load_reference,
    random_prompts,
    save_hybrid,
    stated_logprobs,
)

WINDOW, TOLERANCE = 16, 1e-4
COUNTS = (1, 3, 2)
LENGTHS = (5, WINDOW, WINDOW + 1, 100, 200)
_NEW_TOKENS = 12
_PATIENCE_SECONDS = 400
# What published checkpoints have, and vLLM's classes take for granted; attention of GraniteMoE is
# not scaled by default, which makes log-probabilities of a random model too sharp to compare.
_PUBLISHED: dict[str, dict[str, Any]] = {
    "phimoe": {"attention_bias": True, "lm_head_bias": True},
    "minimax_m2": {"rotary_dim": 16, "scoring_func": "sigmoid", "use_routing_bias": True},
    "ernie4_5": {"use_bias": False},
    "gpt_neox": {"num_key_value_heads": 4},
    "stablelm": {"head_dim": 64},
    "persimmon": {"head_dim": 64},
    "granitemoe": {"attention_multiplier": 32**-0.5},
    "granitemoeshared": {"attention_multiplier": 32**-0.5},
    "granite_swa": {"attention_multiplier": 32**-0.5},
    "qwen3_next": {"linear_key_head_dim": 128, "linear_value_head_dim": 128},
    "granitemoe_swa": {"attention_multiplier": 32**-0.5},
}
# Whose kernel on a CPU takes no other type.
_BFLOAT16 = {"qwen3_next": 2e-2}
_REFUSED = "refused: "
# How the plugin's refusals begin (bosch/engines/vllm/checks.py): the page gives the reason alone.
_NOT_SERVED = "the plugin for vLLM does not serve this model, because "


@dataclass(frozen=True)
class Outcome:
    """What became of one model: `distance` from transformers' log-probabilities, or `reason`."""

    served: bool
    route: str = ""
    distance: float | None = None
    reason: str = ""


def save_original(folder: Path, family: str) -> None:
    """The family's small model in float32, all heads full."""
    model = small_model(family, **_sizes(family)).float()
    model.save_pretrained(folder)
    # Published models name their class as vLLM does, transformers may write it in other letters.
    registry: Any = importlib.import_module("vllm.model_executor.models").ModelRegistry
    name = type(model).__name__
    known = {known.lower(): known for known in registry.models}
    write_json(
        folder / "config.json",
        {**read_json(folder / "config.json"), "architectures": [known.get(name.lower(), name)]},
    )


def save_uneven(folder: Path, family: str) -> None:
    """Its hybrid, with another number of full heads in each layer."""
    rows = len(decoder_layers(small_config(family, **_sizes(family))).full)
    save_hybrid(folder, family, COUNTS[:rows], WINDOW, **_sizes(family))


def _sizes(family: str) -> dict[str, Any]:
    return {**SIZES, **_PUBLISHED.get(family, {})}


def outcome(family: str, save: Callable[[Path, str], None], **options: Any) -> Outcome:
    """Save, serve with an engine's options and compare a model, each in a process of its own."""
    dtype = "bfloat16" if family in _BFLOAT16 else "float32"
    tolerance = _BFLOAT16.get(family, TOLERANCE)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        saved = in_process(partial(save, folder, family))
        if isinstance(saved, str):
            return Outcome(False, reason=saved)
        served = in_process(partial(outputs, folder, {"dtype": dtype, **options}))
        if isinstance(served, str):
            return Outcome(False, reason=served)
        route, answers = served
        if any(math.isnan(number) for answer in answers for number in stated_logprobs(answer)):
            return Outcome(False, route, reason="vLLM's log-probabilities are NaN")
        distance = in_process(lambda: largest_distance(rounded(folder, dtype), answers))
    if isinstance(distance, str):
        return Outcome(False, route, reason=distance)
    if not math.isfinite(distance):
        reason = "transformers' are NaN" if math.isnan(distance) else "other greedy tokens"
        return Outcome(False, route, reason=reason)
    if distance >= tolerance:
        return Outcome(False, route, distance, f"log-probabilities differ by {distance:.2g}")
    return Outcome(True, route, distance)


def rounded(folder: Path, dtype: str) -> Any:
    """The model by transformers in float32, of the weights that the engine has."""
    return load_reference(folder).to(getattr(torch, dtype)).float()


def outputs(folder: Path, options: dict[str, Any]) -> tuple[str, list[Any]]:
    """Answers of vLLM, and by which class it serves the model."""
    registry: Any = importlib.import_module("vllm.model_executor.models.registry")
    # vLLM looks at a class in a new process, lest CUDA starts in this one, which ends soon.
    registry._run_in_subprocess = lambda function: function()
    prompts = random_prompts(LENGTHS)
    with engine(folder, **options) as llm:
        answers = generate(llm, prompts, _NEW_TOKENS)
        worker = llm.llm_engine.model_executor.driver_worker.worker
        bases = [base.__name__ for base in type(worker.get_model()).__mro__]
    backend = any(base.startswith("Transformers") for base in bases)
    return "transformers backend" if backend else "own class", answers


def largest_distance(reference: Any, answers: Sequence[Any]) -> float:
    """Of log-probabilities; infinite where a token is not transformers' most likely one."""
    largest = 0.0
    for answer in answers:
        distance, greedy = largest_difference(reference, answer.prompt_token_ids, answer)
        if math.isnan(distance):
            return distance
        largest = max(largest, distance if greedy else math.inf)
    return largest


def in_process(function: Callable[[], Any]) -> Any:
    """What `function` returns in a fork of this process, or the sentence with which it failed."""
    fork = multiprocessing.get_context("fork")
    receiver, sender = fork.Pipe(duplex=False)
    process = fork.Process(target=_send, args=(sender, function))
    process.start()
    sender.close()
    try:
        answer = receiver.recv() if receiver.poll(_PATIENCE_SECONDS) else "no answer in time"
    except EOFError:
        process.join()
        answer = f"the process ended with status {process.exitcode}"
    process.kill()
    process.join()
    return answer


def _send(sender: Any, function: Callable[[], Any]) -> None:
    try:
        sender.send(function())
    except UserError as error:
        sender.send(f"{_REFUSED}{error}")
    except Exception as error:
        traceback.print_exc()
        sender.send(f"{type(error).__name__}: {error}")
    sender.close()
    os._exit(0)


def prepare() -> None:
    """Import vLLM once for all forks, with settings for its CPU build."""
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    importlib.import_module("vllm.entrypoints.llm")  # once for all forks


def main() -> None:
    """Try the families named, or all of them."""
    parser = argparse.ArgumentParser()
    parser.add_argument("families", nargs="*", metavar="FAMILY", choices=[[], *FAMILY_NAMES])
    prepare()
    for family in parser.parse_args().families or FAMILY_NAMES:
        hybrid, original = outcome(family, save_uneven), None
        if not hybrid.served and not hybrid.reason.startswith(_REFUSED):
            original = outcome(family, save_original)
        distance = "" if hybrid.distance is None else f"{hybrid.distance:.1e}"
        before = _state(original) if original else ""
        cells = (f"`{family}`", hybrid.route, _state(hybrid), distance, before)
        print(f"| {' | '.join(cells)} |", flush=True)


def _state(outcome: Outcome) -> str:
    reason = outcome.reason.replace(_NOT_SERVED, "")
    reason = shorten(reason, 160, placeholder=" …").replace("|", "\\|")
    return "served" if outcome.served else reason


if __name__ == "__main__":
    main()
