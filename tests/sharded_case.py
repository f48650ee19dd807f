"""Results of each process of a sharded model, for tests of sharding."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from bosch.heads import HeadMask
from bosch.model.fingerprint import model_fingerprint
from bosch.model.interface import attention_modules, head_state
from bosch.model.loading import load_model
from bosch.model.search_mode import prepare_for_search
from bosch.model.tensor_parallel import load_sharded
from bosch.objective.calibration import CalibrationSet
from bosch.objective.objective import Objective
from bosch.search.methods import METHODS
from bosch.window import Window
from stages.context import StageConfig
from stages.search.processes import join_process_group
from tests.hybrid_case import KV_HEADS, LAYERS, random_mask, tokens

VERSION = 1
WINDOW = 8
FAMILIES = ("qwen3", "qwen3_moe", "olmo2", "phi3")


def masks() -> list[tuple[HeadMask, int]]:
    """Masks with the layers that the next ones share, so that every kind of reuse occurs."""
    top = [[True] * 4, [True, True, False, False], [False] * 4, [False, False, True, True]]
    first, second = random_mask(0), random_mask(2)
    return [
        (HeadMask.all_full(LAYERS, KV_HEADS), 0),
        *((first.with_layer(LAYERS - 1, row), LAYERS - 1) for row in top),
        *((second.with_layer(0, row), 0) for row in top),
    ]


def measured(model: Any, ranks: Any = None) -> dict[str, Any]:
    """Everything that is asked of a model in a search."""
    prepare_for_search(model)
    data = CalibrationSet.from_records((tokens(1, n, seed=n)[0].tolist(), 2) for n in (40, 33, 37))
    objective = Objective(model, data, Window(WINDOW), batch_size=2, ranks=ranks)
    evaluations = [objective.evaluate(mask, shared) for mask, shared in masks()]
    gradient = objective.gate_gradient(random_mask(1))
    return {
        "scores": [e.score for e in evaluations],
        "log_likelihoods": [e.log_likelihood for e in evaluations],
        "work": [e.full_forward_equivalents for e in evaluations],
        "reuse": objective.cache.enabled,
        "gradient": gradient.values,
        "rankings": {
            name: method.load()(model, data, WINDOW).tolist()
            for name, method in METHODS.items()
            if method.kind == "ranking"
        },
        "fingerprint": model_fingerprint(model),
    }


def families(
    config: StageConfig, inputs: Mapping[str, Path], work_dir: Path
) -> dict[str, dict[str, Any]]:
    """On each of two processes: what the sharded model of each family gives; rank 0 tells."""
    torch.set_num_threads(1)
    results = {}
    with join_process_group("tensor", timeout_minutes=30) as ranks:
        for family in FAMILIES:
            model = load_sharded(inputs[family], ranks, dtype="float32")
            result = measured(model, ranks)
            module: Any = attention_modules(model)[0]
            weight = (module.k_proj if hasattr(module, "k_proj") else module.qkv_proj).weight
            state = head_state(module)
            assert state is not None
            shapes: list[Any] = [None] * ranks.shards
            mine = [list(weight.to_local().shape), state.layout.num_key_value_heads]
            dist.all_gather_object(shapes, mine)
            everywhere: list[Any] = [None] * ranks.shards
            dist.all_gather_object(everywhere, result)
            results[family] = {
                **result,
                "whole": list(weight.shape),
                "held": shapes,
                "agree": everywhere[0] == everywhere[1],
            }
    if ranks.is_first:
        (work_dir / "found.json").write_text(json.dumps(results))
    return {}


def alone(folder: Path) -> dict[str, Any]:
    """The same of one process with the whole model."""
    return measured(load_model(folder, dtype="float32"))
