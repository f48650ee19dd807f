"""Cost of an evaluation; the original model's is that of a mask with every head full."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeAlias

from bosch.budget import LayerHeads, window_shares
from bosch.context_split import ContextSplit
from bosch.model.cache_size import CacheSize, states_text
from bosch.objective.memory import ActivationSizes
from bosch.window import Window
from stages.cost import BYTES, EFFICIENCY, Cost, Devices
from stages.evaluate.presets import PRESETS, benchmarks
from stages.evaluate.section import Work
from stages.evaluate.stage import EvaluateConfig
from stages.exchange import pass_values
from stages.formats import counted, format_bytes, format_count
from stages.rival.stage import RivalConfig
from stages.search.choice import budget_rows
from stages.search.stage import SearchConfig
from stages.shape import shape_of
from stages.stage import LoadedRecipe
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
    return replace(result, disk=result.disk + sum(part.kept for part in work))


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
    *most, last = models
    text = f" each for {', '.join(most)} and {last}" if most else f" for {last}"
    if windows:
        text += f", for the untrained ones at {counted(len(windows), 'more window')}"
    if budgets:
        more = counted(len(budgets), "more budget")
        text += f", for the hybrid{' and checkpoints' * (checkpoints > 0)} at up to {more}"
    # A hybrid made from the original takes over its weights one at a time.
    return _cost(loaded, devices, layouts, shape.parameters + shape.largest_weight, text)


def _more_budgets(loaded: LoadedRecipe, chosen_layout: Layout) -> list[Layout]:
    """Upper bounds of the layouts that are scored besides the chosen one.

    Of `all`, which leaves out the original's, the largest within the chosen layout is the chosen.
    """
    budgets = loaded.recipe[EvaluateConfig].budgets
    if budgets == "chosen":
        return []
    layouts: list[Layout] = [*budget_rows(loaded, budgets).values()]
    if budgets == "all":
        within = sum(_full_heads(rows) <= _full_heads(chosen_layout) for rows in layouts)
        del layouts[max(0, within - 1)]
    return layouts


def _full_heads(rows: Layout) -> int:
    return sum(row.get(None, 0) for row in rows)


def _cost(
    loaded: LoadedRecipe, devices: Devices, layouts: Sequence[Layout], weights: int, of_whom: str
) -> Cost:
    """All suites (with known samples) of a model with each of `layouts`.

    A process holds `weights` bytes and the largest layout's cache.
    """
    recipe, shape = loaded.recipe, shape_of(loaded)
    work, facts = _work(recipe[EvaluateConfig], loaded.positions)
    samples = sum(part.samples for part in work)
    sharing = devices.processes if recipe.runtime.evaluate_parallel == "context" else 1
    number, rows = BYTES[recipe.model.dtype], recipe.runtime.eval_batch_size
    flops = reads = 0.0
    caches = [CacheSize.of(layout, shape.kinds, number, state_bytes=0) for layout in layouts]
    for layout, cache in zip(layouts, caches, strict=True):
        for part in work:
            shares = window_shares(layout)
            flops += shape.forward_flops(part.tokens, part.length, shares, part.logits)
            # A generated token reads all weights once for the batch, and the cache of its row. If
            # processes share prompts, the first process generates.
            each = number * shape.active_parameters / min(rows, part.most_rows)
            reads += sharing * (part.logits or 0) * (each + cache.dynamic(part.length))
    memory = f"per process: {format_bytes(number * weights)} of weights"
    if work:
        largest = max(work, key=lambda part: min(rows, part.most_rows) * part.longest)
        longest, rows = largest.longest, min(rows, largest.most_rows)
        cached = max(cache.dynamic(longest) for cache in caches)
        sizes = ActivationSizes.of(shape, number, sharing=sharing)
        where = " in the first one" if sharing > 1 else ""
        beside = states_text(len(shape.kinds.states))
        if sharing > 1:
            split = ContextSplit.padded(longest, sharing)
            sent = number * max(pass_values(shape, layout, split) for layout in layouts)
            facts.append(
                f"each prompt split over {sharing} processes, which send each other "
                f"{format_bytes(sent)} of one of {longest:,} tokens; the first one generates"
            )
        facts.append(f"{counted(samples, 'sample')}{of_whom}")
        if generated := sum(part.logits or 0 for part in work):
            facts.append(
                f"answers of up to {format_count(generated)} tokens to each, for which weights and "
                "cache are read from memory"
            )
        memory += (
            f", {format_bytes(rows * cached)} of KV cache for {counted(rows, 'sample')} of "
            f"{longest:,}{where}{beside}, about {format_bytes(sizes.plain_pass(rows * longest))} "
            "in a pass"
        )
    return Cost(
        flops,
        1e6 + len(layouts) * samples * _ANSWER_BYTES,
        [*facts, memory],
        (sharing,) if sharing > 1 else (max(1, samples),),
        efficiency=devices.efficiency or EFFICIENCY,
        reads=reads,
    )


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
        left_out = f"; without {benchmark.left_out}" if benchmark.left_out else ""
        if not benchmark.documents:
            facts.append(f"{benchmark.name}: samples below, data: {benchmark.data}{left_out}")
            continue
        documents = min(
            benchmark.documents, benchmark.parts * (section.samples or benchmark.documents)
        )  # of each
        repeats = int(section.settings.get(benchmark.tasks[0], {}).get("repeats", 1))
        length = benchmark.prompt + benchmark.answer
        samples, read = documents * repeats, min(length, positions or length)
        # For answers that are only scored, not generated, lm-eval computes all logits.
        generated = samples * benchmark.answer if benchmark.answer else None
        work.append(Work(samples, samples * read, read, read, logits=generated))
        answers = f", {repeats} answers each" if repeats > 1 else ""
        part = f" (the model reads the last {read:,})" if read < length else ""
        facts.append(
            f"{benchmark.name}: {counted(documents, 'document')} of about {length:,} tokens{part}"
            f"{answers}, data: {benchmark.data}{left_out}"
        )
    if unknown:
        facts.append(f"not counted, their samples are unknown: {', '.join(sorted(unknown))}")
    for section in evaluate.suites.values():
        own_work, own_facts = section.work()
        work += own_work
        facts += own_facts
    return work, facts
