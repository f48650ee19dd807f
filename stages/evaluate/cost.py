"""Cost of an evaluation; the original model's is that of a mask with every head full."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from bosch.budget import LayerHeads, window_shares
from bosch.model.cache_size import CacheSize
from stages.cost import BYTES, EFFICIENCY, Cost, Devices
from stages.evaluate.stage import EvaluateConfig
from stages.formats import counted
from stages.search.stage import SearchConfig
from stages.shape import shape_of
from stages.stage import LoadedRecipe
from stages.train.stage import TrainConfig

Layout: TypeAlias = Sequence[LayerHeads]  # KV heads by window of each layer of a head mask

# Bytes of an answer on disk: names, the last 300 characters of its question, answers and output;
# in samples.jsonl and, until all are given, among the answers of its model.
_ANSWER_BYTES = 2 * 700.0


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
    section = recipe[EvaluateConfig]
    ruler, tasks, positions = section.ruler, section.own_tasks, section.positions
    count = min(ruler.samples, section.limit or ruler.samples)
    generated = count * sum(map(ruler.new_tokens, tasks))
    # Samples, their length, the most in a batch, and the tokens at which logits are computed: those
    # that are generated, or all (None).
    work: list[tuple[int, int, int, int | None]] = [
        (count * len(tasks), length, count, generated) for length in ruler.lengths if tasks
    ]
    if positions is not None:
        work.append((positions.documents, positions.length, 1, None))
    models += "; tasks of lm-eval not counted" * bool(section.lm_eval_tasks)
    samples = sum(number for number, *_ in work)
    itemsize, rows = BYTES[recipe.model.dtype], recipe.runtime.eval_batch_size
    flops = reads = 0.0
    for layout in layouts:
        cache = CacheSize.of(layout, shape.kinds, itemsize, state_bytes=0)
        shares = window_shares(layout)
        for number, length, most_rows, logits in work:
            flops += shape.forward_flops(number * length, length, shares, logits)
            # A generated token reads all weights once for the batch, and the cache of its row.
            weight_bytes = itemsize * shape.active_parameters / min(rows, most_rows)
            reads += (logits or 0) * (weight_bytes + cache.dynamic(length))
    return Cost(
        flops,
        1e6 + len(layouts) * samples * _ANSWER_BYTES,
        f"{counted(samples, 'sample')}{models}",
        max(1, samples),
        efficiency=devices.efficiency or EFFICIENCY,
        reads=reads,
    )
