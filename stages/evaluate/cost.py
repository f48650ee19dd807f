"""Cost of an evaluation; the original model's is that of a mask with every head full."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
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


@dataclass(frozen=True)
class _Work:
    """Samples of `length` tokens with their answers, in batches of at most `most_rows`.

    Logits are computed at `logits` tokens, where answers are generated; None: at all tokens.
    """

    samples: int
    length: int
    most_rows: int
    logits: int | None = None


def _work(evaluate: EvaluateConfig) -> list[_Work]:
    """The samples that are known in advance."""
    ruler, tasks = evaluate.ruler, evaluate.ruler_tasks
    samples = min(ruler.samples, evaluate.limit or ruler.samples)
    generated = samples * sum(map(ruler.new_tokens, tasks))
    work = [_Work(samples * len(tasks), at, samples, generated) for at in ruler.lengths if tasks]
    if evaluate.positions is not None:
        work.append(_Work(evaluate.positions.documents, evaluate.positions.length, most_rows=1))
    return work


def _cost(loaded: LoadedRecipe, devices: Devices, layouts: Sequence[Layout], models: str) -> Cost:
    """All suites (with known samples) of a model with each of `layouts`; `models` names these."""
    recipe, shape = loaded.recipe, shape_of(loaded)
    work = _work(recipe[EvaluateConfig])
    models += "; tasks of lm-eval not counted" * bool(recipe[EvaluateConfig].lm_eval_tasks)
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
