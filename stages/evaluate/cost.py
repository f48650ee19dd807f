"""What an evaluation costs; the original model's is the same with every head full."""

from __future__ import annotations

from bosch.budget import LayerHeads, window_shares
from bosch.context_split import ContextSplit
from bosch.model.cache_size import CacheSize, beside_states
from bosch.objective.memory import ActivationSizes
from stages.cost import BYTES, EFFICIENCY, Cost, Devices
from stages.evaluate.presets import benchmarks
from stages.evaluate.section import Work
from stages.evaluate.stage import EvaluateConfig
from stages.exchange import pass_values
from stages.formats import format_bytes
from stages.prepare.stage import PrepareConfig
from stages.recipe import LoadedRecipe
from stages.rival.stage import RivalConfig
from stages.search.choice import front_slots
from stages.search.stage import SearchConfig
from stages.shape import shape_of
from stages.train.stage import TrainConfig

# A sample on disk: names, the 300 characters of its question that are kept, answers and output.
_SAMPLE_BYTES = 500.0


def original(loaded: LoadedRecipe, devices: Devices) -> Cost:
    """The original model's answers, once for all recipes on it."""
    return _cost(loaded, devices, 1, False, ", once for all recipes on this model")


def cost(loaded: LoadedRecipe, devices: Devices) -> Cost:
    """The answers of the hybrid, its checkpoints and its rivals."""
    evaluate, train = loaded.recipe[EvaluateConfig], loaded.recipe.get(TrainConfig)
    search, rivals = loaded.recipe[SearchConfig], len(evaluate.rivals)
    checkpoints = len(train.checkpoint_steps) if train is not None else 0
    windows = len({*evaluate.windows} - {search.window.size})
    budgets = _more_budgets(loaded)
    models = (1 + rivals) * (1 + windows) + checkpoints + budgets * (1 + checkpoints)
    trained_rival = loaded.recipe.get(RivalConfig) is not None
    models += trained_rival
    of_whom = f" for the hybrid and each of {checkpoints} checkpoints"
    of_whom += f" and {rivals} rivals" if rivals else ""
    of_whom += ", and the trained rival" if trained_rival else ""
    of_whom += f", the untrained ones at {windows} more windows" if windows else ""
    of_whom += f", hybrid and checkpoints at up to {budgets} more budgets" if budgets else ""
    return _cost(loaded, devices, models, True, of_whom)


def _more_budgets(loaded: LoadedRecipe) -> int:
    """Budgets that are scored beside the chosen one, at most."""
    budgets = loaded.recipe[EvaluateConfig].budgets
    if budgets == "chosen":
        return 0
    if budgets != "all":
        return len(budgets)
    context = loaded.recipe[PrepareConfig].calibration.length
    search, kinds = loaded.recipe[SearchConfig], shape_of(loaded).kinds
    price = search.front_price(kinds, loaded.recipe.model.dtype, context)
    return len(front_slots(search, price)) - 2  # neither the chosen one nor the original


def _cost(
    loaded: LoadedRecipe, devices: Devices, models: int, is_hybrid: bool, of_whom: str
) -> Cost:
    """All suites of `models` hybrids or the original, as far as their samples are known."""
    recipe, shape = loaded.recipe, shape_of(loaded)
    evaluate, search = recipe[EvaluateConfig], recipe[SearchConfig]
    rows_by_window = search.kv_heads(shape.kinds, recipe.model.dtype)
    shares = window_shares(rows_by_window) if is_hybrid else None
    work, facts = _work(evaluate, loaded.positions)
    passes = sum(shape.forward_flops(w.tokens, w.length, shares, w.logits) for w in work)
    samples = sum(one.samples for one in work)
    sharing = devices.processes if recipe.runtime.evaluate_parallel == "context" else 1
    number, rows = BYTES[recipe.model.dtype], recipe.runtime.eval_batch_size
    # A hybrid that is made from the original takes its weights over one by one.
    weights = shape.parameters + (shape.largest_weight if is_hybrid else 0)
    memory = f"per process: {format_bytes(number * weights)} of weights"
    if work:
        largest = max(work, key=lambda one: min(rows, one.most_rows) * one.longest)
        longest, rows = largest.longest, min(rows, largest.most_rows)
        cache = CacheSize.of(rows_by_window, shape.kinds, number, state_bytes=0)
        cached = cache.dynamic(longest) if is_hybrid else cache.original(longest)
        sizes = ActivationSizes.of(shape, number, sharing=sharing)
        where = " in the first one" if sharing > 1 else ""
        beside = beside_states(len(shape.kinds.states))
        if sharing > 1:
            full: list[LayerHeads] = [{None: shape.key_value_heads}] * shape.full_layers
            split = ContextSplit.padded(longest, sharing)
            sent = number * pass_values(shape, rows_by_window if is_hybrid else full, split)
            facts.append(
                f"each prompt split over {sharing} processes, which send each other "
                f"{format_bytes(sent)} of one of {longest:,} tokens; the first one generates"
            )
        facts.append(f"{samples:,} samples{of_whom}")
        memory += (
            f", {format_bytes(rows * cached)} of KV cache for {rows} samples of {longest:,}{where}"
            f"{beside}, about {format_bytes(sizes.plain_pass(rows * longest))} in a "
            "pass"
        )
    return Cost(
        models * passes,
        1e6 + models * samples * _SAMPLE_BYTES,
        [*facts, memory],
        (sharing,) if sharing > 1 else (max(1, samples),),
        efficiency=devices.efficiency or EFFICIENCY,
    )


def _work(evaluate: EvaluateConfig, positions: int | None) -> tuple[list[Work], list[str]]:
    """The samples of the suites, and what they are; those of single tasks of lm-eval are unknown.

    Of a prompt that is longer than the model's `positions` lm-eval keeps the end.
    """
    work, facts = list[Work](), list[str]()
    for one in benchmarks(evaluate.presets):
        left_out = f"; without {one.left_out}" if one.left_out else ""
        if not one.tasks:
            continue  # its own section says what it costs
        if not one.documents:
            facts.append(f"{one.name}: samples below, data: {one.data}{left_out}")
            continue
        limit = getattr(evaluate.suites[one.suite], "samples", None)  # of each task
        documents = min(one.documents, one.parts * (limit or one.documents))
        length = one.prompt + one.answer
        samples, read = documents * one.answers, min(length, positions or length)
        # Of answers that are only weighed, not generated, lm-eval takes all logits.
        generated = samples * one.answer if one.answer else None
        work.append(Work(samples, samples * read, read, read, logits=generated))
        answers = f", {one.answers} answers each" if one.answers > 1 else ""
        part = f" (the model reads the last {read:,})" if read < length else ""
        facts.append(
            f"{one.name}: {documents:,} documents of about {length:,} tokens{part}{answers}, data: "
            f"{one.data}{left_out}"
        )
    for section in evaluate.suites.values():
        own_work, own_facts = section.work()
        work += own_work
        facts += own_facts
    return work, facts
