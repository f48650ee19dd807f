"""Cost of a search."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace

from bosch.objective.batches import examples_by_part
from bosch.objective.decoder_shape import DecoderShape
from bosch.objective.memory import ActivationSizes
from bosch.search.methods import METHODS
from stages.cost import BYTES, EFFICIENCY, Cost, Devices
from stages.formats import counted, format_bytes, format_flops, format_hours
from stages.prepare.stage import PrepareConfig
from stages.search.budget import HELD_OUT_EVERY
from stages.search.choice import point_slots
from stages.search.stage import SearchConfig
from stages.shape import shape_of
from stages.stage import LoadedRecipe, Recipe


def cost(loaded: LoadedRecipe, devices: Devices) -> Cost:
    """The method's largest number of evaluations, each a full pass."""
    recipe, shape = loaded.recipe, shape_of(loaded)
    calibration, search = recipe[PrepareConfig].calibration, recipe[SearchConfig]
    (evaluations,) = _most_evaluations(loaded, shape, [search.method])
    examples, length = _searched_examples(recipe, search.method), calibration.length
    per_evaluation = _evaluation_flops(recipe, shape, search.method)
    batch = recipe.runtime.eval_batch_size
    batches = _batches_by_part(recipe, search.method)
    itemsize = BYTES[recipe.model.dtype]
    weights = itemsize * shape.parameters
    rows = min(batch, examples)
    sizes = ActivationSizes.of(shape, itemsize, attention=recipe.runtime.attention)
    passes = sizes.plain_pass(rows, length)
    gradients = sizes.gradient(rows, length, *(window.size for window in search.menu))
    # Weights are moved to the GPUs one by one, from mapped files that all processes of a node
    # share; on a CPU each process has a copy.
    host = weights if devices.on_gpu else weights * devices.local_processes
    facts = [
        f"at most {counted(evaluations, 'evaluation')} of {examples * length:,} tokens "
        f"in {counted(sum(batches), 'batch', 'batches')}",
        f"{format_flops(per_evaluation)} each with every head full",
        f"per process: {format_bytes(weights)} of weights, about {format_bytes(passes)} in a pass, "
        f"about {format_bytes(gradients)} where gradients are taken",
        f"host memory while loading: {format_bytes(host)} a node",
    ]
    facts += _budget_facts(recipe, shape)
    jobs = _search_jobs(recipe, search.method)
    if jobs == batches:
        facts.append(
            f"gradients take {' or '.join(str(size) for size in sorted({*batches}))} of the "
            f"batches at a time: processes beyond {max(batches)} are idle then"
        )
    efficiency = devices.efficiency or EFFICIENCY
    result = Cost(evaluations * per_evaluation, 1e6, facts, jobs, efficiency=efficiency)
    return replace(result, facts=[*facts, _hours_of_methods(loaded, result, devices)])


def _budget_facts(recipe: Recipe, shape: DecoderShape) -> list[str]:
    """Remarks on a budget in bytes, the original's cache, and the points of a front."""
    search, length = recipe[SearchConfig], recipe[PrepareConfig].calibration.length
    heads = shape.full_layers * shape.key_value_heads
    cache = search.request_cache(shape.kinds, recipe.model.dtype, length)
    facts = []
    if search.budget is not None:
        facts.append(f"search.budget.{search.budget.name} allows {cache.text(cache.allowed_bytes)}")
    if METHODS[search.method].finds_front:
        shares = [slots / (heads * cache.tokens) for slots in point_slots(search, cache)]
        facts.append(
            f"a front of {counted(len(shares), 'point')}, {shares[0]:.1%} to {shares[-1]:.1%} of "
            "the slots of full layers; the original holds "
            f"{format_bytes(cache.original)} at {cache.tokens:,} tokens"
        )
        held_out = recipe[PrepareConfig].calibration.examples
        held_out -= _searched_examples(recipe, search.method)
        facts.append(f"held out to score the points: {counted(held_out, 'example')}")
    elif search.swa_ratio is None:
        sliding = round(heads * search.ratio_for(shape.kinds, recipe.model.dtype))
        facts.append(f"so {sliding} of {heads} KV heads slide (rho = {sliding / heads:.4g})")
    return facts


def _searched_examples(recipe: Recipe, method: str) -> int:
    """Calibration examples of an evaluation: all except those held out for a front."""
    examples = recipe[PrepareConfig].calibration.examples
    return examples - examples // HELD_OUT_EVERY if METHODS[method].finds_front else examples


def _evaluation_flops(recipe: Recipe, shape: DecoderShape, method: str) -> float:
    """Operations of an evaluation with all heads full, without its few logits."""
    length = recipe[PrepareConfig].calibration.length
    return shape.forward_flops(_searched_examples(recipe, method) * length, length, logits=0)


def _batches_by_part(recipe: Recipe, method: str) -> tuple[int, ...]:
    """Batches of each part of the examples that a method searches on."""
    examples, batch = _searched_examples(recipe, method), recipe.runtime.eval_batch_size
    return tuple(math.ceil(len(indices) / batch) for indices in examples_by_part(examples))


def _search_jobs(recipe: Recipe, method: str) -> tuple[int, ...]:
    """Batches that a method takes together: all, or those of a part for a gradient."""
    batches = _batches_by_part(recipe, method)
    return batches if METHODS[method].gradients else (sum(batches),)


def _most_evaluations(
    loaded: LoadedRecipe, shape: DecoderShape, methods: Iterable[str]
) -> list[int]:
    """The most evaluations of each method with the recipe's settings."""
    search = loaded.recipe[SearchConfig]
    ratio = search.ratio_for(shape.kinds, loaded.recipe.model.dtype)
    settings = search.settings(loaded.recipe.seed, ratio)
    layers, heads = shape.full_layers, shape.key_value_heads
    return [METHODS[method].most_evaluations(settings, layers, heads) for method in methods]


def _hours_of_methods(loaded: LoadedRecipe, search: Cost, devices: Devices) -> str:
    """The largest number of hours of each method."""
    shape = shape_of(loaded)
    times: dict[str, list[str]] = {}
    for method, evaluations in zip(METHODS, _most_evaluations(loaded, shape, METHODS), strict=True):
        flops = _evaluation_flops(loaded.recipe, shape, method) * evaluations
        method_cost = replace(search, flops=flops, jobs=_search_jobs(loaded.recipe, method))
        text = format_hours(method_cost.hours(devices.name, devices.count))
        times.setdefault(text, []).append(method)
    return "upper bounds: " + "; ".join(
        f"{text}: {', '.join(names)}" for text, names in times.items()
    )
