"""Cost of an evaluation; the original model's is that of a mask with every head full."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeAlias

from bosch.budget import LayerHeads, window_shares
from bosch.model.cache_size import CacheSize, states_text
from bosch.objective.decoder_shape import DecoderShape
from bosch.objective.memory import ActivationSizes
from bosch.window import Window
from stages.cost import BYTES, EFFICIENCY, Cost, Devices
from stages.evaluate.presets import PRESETS, benchmarks
from stages.evaluate.section import Work
from stages.evaluate.stage import EvaluateConfig
from stages.formats import counted, format_bytes, format_count
from stages.rival.stage import RivalConfig
from stages.search.choice import budget_rows
from stages.search.stage import SearchConfig
from stages.shape import shape_of
from stages.stage import LoadedRecipe, Recipe
from stages.train.stage import TrainConfig

Layout: TypeAlias = Sequence[LayerHeads]  # KV heads by window of each layer of a head mask

# Bytes of an answer on disk: names, the last 300 characters of its question, answers and output;
# in samples.jsonl and among the shared answers.
_ANSWER_BYTES = 2 * 500.0


def original(loaded: LoadedRecipe, devices: Devices) -> Cost:
    """The original model's answers, computed once for all recipes on it."""
    shape = shape_of(loaded)
    full: Layout = [{None: shape.key_value_heads}] * shape.full_layers
    text = ", once for all recipes on this model"
    result = _cost(loaded, devices, [full], shape.parameters, text)
    work, _ = _work(loaded.recipe[EvaluateConfig], loaded.positions)
    return replace(result, disk=result.disk + sum(part.stored_bytes for part in work))


def cost(loaded: LoadedRecipe, devices: Devices) -> Cost:
    """The answers of the hybrid, its checkpoints and its rivals."""
    recipe, shape = loaded.recipe, shape_of(loaded)
    evaluate, search, train = recipe[EvaluateConfig], recipe[SearchConfig], recipe.get(TrainConfig)
    checkpoints = len(train.checkpoint_steps) if train is not None else 0
    untrained = 1 + len(evaluate.rivals)
    trained_rival = recipe.get(RivalConfig) is not None
    chosen_layout = search.kv_heads(shape.kinds, recipe.model.dtype)
    windows = {*evaluate.windows} - {search.window.size}
    budgets = _more_budgets(loaded, chosen_layout)
    layouts: list[Layout] = [chosen_layout] * (untrained + checkpoints + trained_rival)
    for size in windows:
        window = Window(size, search.sinks)
        fulls = [row.get(None, 0) for row in chosen_layout]
        rows = [{None: full, window: shape.key_value_heads - full} for full in fulls]
        layouts += [rows] * untrained
    for layout in budgets:
        layouts += [layout] * (1 + checkpoints)
    models = ["the hybrid"]
    models += [counted(checkpoints, "checkpoint")] * (checkpoints > 0)
    models += [counted(untrained - 1, "rival")] * (untrained > 1)
    models += ["the trained rival"] * trained_rival
    *others, last = models
    text = f" each for {', '.join(others)} and {last}" if others else f" for {last}"
    if windows:
        text += f", for the untrained ones at {counted(len(windows), 'more window')}"
    if budgets:
        hybrids = "the hybrid and checkpoints" if checkpoints else "the hybrid"
        text += f", for {hybrids} at up to {counted(len(budgets), 'more budget')}"
    # A hybrid made from the original takes over its weights one at a time.
    return _cost(loaded, devices, layouts, shape.parameters + shape.largest_weight, text)


def _more_budgets(loaded: LoadedRecipe, chosen_layout: Layout) -> list[Layout]:
    """Upper bounds of the layouts that are scored besides the chosen one.

    Among all budgets, the chosen one is the largest within the chosen layout.
    """
    budgets = loaded.recipe[EvaluateConfig].budgets
    if budgets == "chosen":
        return []
    layouts: list[Layout] = [*budget_rows(loaded, budgets).values()]
    if budgets == "all":
        most = _full_heads(chosen_layout)
        fitting = sum(_full_heads(layout) <= most for layout in layouts)
        del layouts[max(0, fitting - 1)]
    return layouts


def _full_heads(rows: Layout) -> int:
    return sum(row.get(None, 0) for row in rows)


def _cost(
    loaded: LoadedRecipe, devices: Devices, layouts: Sequence[Layout], weights: int, models: str
) -> Cost:
    """All suites (with known samples) of a model with each of `layouts`; `models` names these.

    A process holds `weights` bytes and the largest layout's cache.
    """
    recipe, shape = loaded.recipe, shape_of(loaded)
    work, facts = _work(recipe[EvaluateConfig], loaded.positions)
    samples = sum(part.samples for part in work)
    itemsize, rows = BYTES[recipe.model.dtype], recipe.runtime.eval_batch_size
    flops = reads = 0.0
    caches = [CacheSize.of(layout, shape.kinds, itemsize, state_bytes=0) for layout in layouts]
    for layout, cache in zip(layouts, caches, strict=True):
        shares = window_shares(layout)
        for part in work:
            flops += shape.forward_flops(part.tokens, part.length, shares, part.logits)
            # A generated token reads all weights once for the batch, and the cache of its row.
            weight_bytes = itemsize * shape.active_parameters / min(rows, part.most_rows)
            reads += (part.logits or 0) * (weight_bytes + cache.dynamic(part.length))
    memory = f"per process: {format_bytes(itemsize * weights)} of weights"
    if work:
        largest = max(work, key=lambda part: min(rows, part.most_rows) * part.longest)
        facts.append(f"{counted(samples, 'sample')}{models}")
        if generated := sum(part.logits or 0 for part in work):
            facts.append(
                f"up to {format_count(generated)} tokens generated by each model, for which "
                "weights and cache are read from memory"
            )
        longest, rows = largest.longest, min(rows, largest.most_rows)
        cache_bytes = rows * max(cache.dynamic(longest) for cache in caches)
        pass_bytes, logit_bytes = _pass_bytes(recipe, shape, work)
        memory += (
            f", {format_bytes(cache_bytes)} of KV cache for {counted(rows, 'sample')} of "
            f"{longest:,}{states_text(len(shape.kinds.states))}, "
            f"about {format_bytes(pass_bytes)} in a pass"
        )
        if logit_bytes:
            memory += f", then up to {format_bytes(logit_bytes)} of logits"
    return Cost(
        flops,
        1e6 + len(layouts) * samples * _ANSWER_BYTES,
        [*facts, memory],
        (max(1, samples),),
        efficiency=devices.efficiency or EFFICIENCY,
        reads=reads,
    )


def _pass_bytes(recipe: Recipe, shape: DecoderShape, work: Sequence[Work]) -> tuple[int, int]:
    """Most bytes of a pass of any suite, and of the logits after it."""
    itemsize, batch = BYTES[recipe.model.dtype], recipe.runtime.eval_batch_size
    sizes = ActivationSizes.of(shape, itemsize, attention=recipe.runtime.attention)
    passes, logits = list[int](), list[int]()
    for part in work:
        tokens = min(part.longest, part.chunk)
        passes.append(sizes.plain_pass(min(batch, part.most_rows), tokens))
        logits.append(part.logit_bytes(batch, shape.vocabulary, itemsize))
    return max(passes), max(logits)


def _work(evaluate: EvaluateConfig, positions: int | None) -> tuple[list[Work], list[str]]:
    """The suites' samples, with remarks; for lm-eval only the tasks of presets.

    Other tasks are listed by name, since their samples are unknown. lm-eval keeps the end of a
    prompt that exceeds the model's `positions`.
    """
    work, facts = list[Work](), list[str]()
    unknown = {*getattr(evaluate.suites.get("harness"), "tasks", ())}
    for benchmark in benchmarks([*PRESETS]):
        section: Any = evaluate.suites.get(benchmark.suite)
        # The suite's section computes the cost of the whole suite.
        if not benchmark.tasks or section is None or not {*benchmark.tasks} <= {*section.tasks}:
            continue
        unknown -= {*benchmark.tasks}
        excluded = f"; without {benchmark.excluded}" if benchmark.excluded else ""
        if not benchmark.documents:
            facts.append(f"{benchmark.name}: samples below, data: {benchmark.data}{excluded}")
            continue
        per_part = section.samples or benchmark.documents
        documents = min(benchmark.documents, benchmark.parts * per_part)
        repeats = int(section.settings.get(benchmark.tasks[0], {}).get("repeats", 1))
        length = benchmark.prompt + benchmark.answer
        samples, tokens = documents * repeats, min(length, positions or length)
        # For answers that are only scored, not generated, lm-eval computes all logits.
        generated = samples * benchmark.answer if benchmark.answer else None
        work.append(Work(samples, samples * tokens, tokens, tokens, logits=generated))
        answers = f", {repeats} answers each" if repeats > 1 else ""
        part = f" (the model reads the last {tokens:,})" if tokens < length else ""
        facts.append(
            f"{benchmark.name}: {counted(documents, 'document')} of about {length:,} tokens{part}"
            f"{answers}, data: {benchmark.data}{excluded}"
        )
    if unknown:
        facts.append(f"not counted, their samples are unknown: {', '.join(sorted(unknown))}")
    for section in evaluate.suites.values():
        suite_work, suite_facts = section.work()
        work += suite_work
        facts += suite_facts
    return work, facts
