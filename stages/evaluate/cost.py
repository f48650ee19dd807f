"""What an evaluation costs; the original model's is the same with every head full."""

from __future__ import annotations

from collections.abc import Mapping

from bosch.budget import window_shares
from bosch.model.cache_size import CacheSize
from bosch.objective.decoder_shape import DecoderShape
from bosch.objective.memory import ActivationSizes
from bosch.window import Window
from stages.cost import BYTES, EFFICIENCY, Cost, Devices
from stages.evaluate.presets import benchmarks
from stages.evaluate.stage import EvaluateConfig
from stages.exchange import pass_values, whole_chunks
from stages.formats import format_bytes
from stages.prepare.stage import PrepareConfig
from stages.recipe import LoadedRecipe
from stages.rival.stage import RivalConfig
from stages.search.choice import point_slots
from stages.search.stage import SearchConfig
from stages.shape import shape_of
from stages.train.stage import TrainConfig

# A sample's question, answer and score on disk.
_SAMPLE_BYTES = 300.0


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
    return len(point_slots(search, price)) - 1


def _cost(
    loaded: LoadedRecipe, devices: Devices, models: int, is_hybrid: bool, of_whom: str
) -> Cost:
    """Needle samples and presets of `models` hybrids or the original; other suites are small."""
    recipe, shape = loaded.recipe, shape_of(loaded)
    evaluate, search = recipe[EvaluateConfig], recipe[SearchConfig]
    needle, efficiency = evaluate.needle, devices.efficiency or EFFICIENCY
    rows_by_window = search.kv_heads(shape.kinds, recipe.model.dtype)
    shares = window_shares(rows_by_window) if is_hybrid else None
    passes, disk, facts = _presets(evaluate, shape, shares)
    sharing = devices.processes if recipe.runtime.evaluate_parallel == "context" else 1
    jobs: tuple[int, ...] = (sharing,) if sharing > 1 else ()
    for section in evaluate.prompts.values():
        count = section.most_samples
        for length in section.lengths:
            tokens = length + section.new_tokens
            passes += shape.forward_flops(count * tokens, length, shares)
        disk += count * len(section.lengths) * _SAMPLE_BYTES
        facts.append(f"{section.title}: up to {count:,} samples at each length")
    if needle is None:
        return Cost(
            models * passes, 1e6 + models * disk, facts, jobs or (1,), efficiency=efficiency
        )
    each = needle.samples * len(needle.tasks)
    samples, rows = each * len(needle.lengths), recipe.runtime.eval_batch_size
    longest, number = max(needle.lengths), BYTES[recipe.model.dtype]
    cache = CacheSize.of(rows_by_window, shape.kinds, number)
    cached = cache.dynamic(longest) if is_hybrid else cache.original(longest)
    # A hybrid that is made from the original takes its weights over one by one.
    weights = shape.parameters + (shape.largest_weight if is_hybrid else 0)
    sizes = ActivationSizes.of(shape, number, sharing=sharing)
    activations = sizes.plain_pass(rows * longest)
    where = " in the first one" if sharing > 1 else ""
    if sharing > 1:
        full = [{None: shape.key_value_heads}] * shape.full_layers
        split = whole_chunks(longest, sharing)
        sent = number * pass_values(shape, rows_by_window if is_hybrid else full, split)
        facts.append(
            f"each prompt split over {sharing} processes, which send each other "
            f"{format_bytes(sent)} of one of {longest:,} tokens; the first one generates"
        )
    facts = [
        *facts,
        f"{samples:,} samples{of_whom}",
        f"per process: {format_bytes(number * weights)} of weights, "
        f"{format_bytes(rows * cached)} of KV cache for {rows} samples of {longest:,}{where}"
        f"{_states_text(shape)}, about {format_bytes(activations)} in a pass",
    ]
    passes += sum(shape.forward_flops(each * length, length, shares) for length in needle.lengths)
    disk = models * (disk + samples * _SAMPLE_BYTES)
    return Cost(models * passes, disk, facts, jobs or (samples,), efficiency=efficiency)


def _presets(
    evaluate: EvaluateConfig, shape: DecoderShape, shares: Mapping[Window, float] | None
) -> tuple[float, float, list[str]]:
    """Operations and bytes on disk of the presets' benchmarks of lm-eval, and what they are."""
    flops, disk, facts = 0.0, 0.0, []
    limit = evaluate.harness.samples if evaluate.harness is not None else None
    for one in benchmarks(evaluate.presets):
        left_out = f"; without {one.left_out}" if one.left_out else ""
        if one.section:
            continue  # its own section says what it costs
        if not one.documents:
            facts.append(f"{one.name}: samples below, data: {one.data}{left_out}")
            continue
        documents = min(one.documents, limit or one.documents)
        length = one.prompt + one.answer
        flops += shape.forward_flops(documents * one.answers * length, length, shares)
        disk += documents * _SAMPLE_BYTES
        answers = f", {one.answers} answers each" if one.answers > 1 else ""
        facts.append(
            f"{one.name}: {documents:,} documents of about {length:,} tokens{answers}, data: "
            f"{one.data}{left_out}"
        )
    return flops, disk, facts


def _states_text(shape: DecoderShape) -> str:
    """What the cache's bytes leave out."""
    layers = len(shape.kinds.states)
    return f" beside the states of {layers} layers of other kinds" if layers else ""
