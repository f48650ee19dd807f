"""Cost of an evaluation; the original model's is that of a mask with every head full."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from bosch.budget import LayerHeads, window_shares
from bosch.model.cache_size import CacheSize
from stages.cost import BYTES, EFFICIENCY, Cost, Devices
from stages.evaluate.section import Work
from stages.evaluate.stage import EvaluateConfig
from stages.formats import counted
from stages.search.stage import SearchConfig
from stages.shape import shape_of
from stages.stage import LoadedRecipe
from stages.train.stage import TrainConfig

Layout: TypeAlias = Sequence[LayerHeads]  # KV heads by window of each layer of a head mask

# Bytes of an answer on disk: names, the last 300 characters of its question, answers and output;
# in samples.jsonl and, until all are given, in journals.
_ANSWER_BYTES = 2 * 500.0


def original(loaded: LoadedRecipe, devices: Devices) -> Cost:
    """The original model's answers, computed once for all recipes on it."""
    shape = shape_of(loaded)
    full: Layout = [{None: shape.key_value_heads}] * shape.full_layers
    text = ", once for all recipes on this model"
    return _cost(loaded, devices, [full], text)


def cost(loaded: LoadedRecipe, devices: Devices) -> Cost:
    """The answers of the hybrid, and its checkpoints."""
    recipe, shape = loaded.recipe, shape_of(loaded)
    search, train = recipe[SearchConfig], recipe.get(TrainConfig)
    checkpoints = len(train.checkpoint_steps) if train is not None else 0
    layout = search.kv_heads(shape.kinds, recipe.model.dtype)
    text = " for the hybrid"
    if checkpoints:
        text = f" each{text} and {counted(checkpoints, 'checkpoint')}"
    return _cost(loaded, devices, [layout] * (1 + checkpoints), text)


def _cost(loaded: LoadedRecipe, devices: Devices, layouts: Sequence[Layout], models: str) -> Cost:
    """All suites (with known samples) of a model with each of `layouts`; `models` names these."""
    recipe, shape = loaded.recipe, shape_of(loaded)
    suites = recipe[EvaluateConfig].suites.values()
    work: list[Work] = [part for section in suites for part in section.work()]
    models += "".join(f"; {section.title} not counted" for section in suites if not section.work())
    samples = sum(part.samples for part in work)
    itemsize, rows = BYTES[recipe.model.dtype], recipe.runtime.eval_batch_size
    flops = reads = 0.0
    for layout in layouts:
        cache = CacheSize.of(layout, shape.kinds, itemsize, state_bytes=0)
        shares = window_shares(layout)
        for part in work:
            flops += shape.forward_flops(
                part.samples * part.length, part.length, shares, part.logits
            )
            # A generated token reads all weights once for the batch, and the cache of its row.
            weight_bytes = itemsize * shape.active_parameters / min(rows, part.most_rows)
            reads += (part.logits or 0) * (weight_bytes + cache.dynamic(part.length))
    return Cost(
        flops,
        1e6 + len(layouts) * samples * _ANSWER_BYTES,
        f"{counted(samples, 'sample')}{models}",
        max(1, samples),
        efficiency=devices.efficiency or EFFICIENCY,
        reads=reads,
    )
