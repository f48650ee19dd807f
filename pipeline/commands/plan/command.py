"""Needs and cost of a run, from the recipe and config.json alone: no torch, no weights.

Every number is an estimate with its assumption beside it. T is a sequence's tokens, W the window.
"""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path

from bosch.budget import even_layout, swa_budget
from bosch.errors import UserError
from bosch.files import CONFIG_LIMITS, load_json
from bosch.hardware import DEVICES, cpu_cores
from bosch.model.cache_size import CacheSize
from bosch.model.decoder_shape import DecoderShape
from bosch.objective.calibration import MAX_ROUNDS
from bosch.objective.memory import ActivationSizes
from bosch.search.methods import METHODS
from bosch.vllm.plan import (
    ServedCache,
    any_mask,
    engine_on,
    layers_refusal,
    served_caches,
    served_tokens,
    worst_shared_mask,
)
from pipeline.commands.plan.fit import memory_here, remedy, training_budget
from pipeline.recipe.faults import suggest
from pipeline.recipe.load import missing_inputs
from stages.evaluate.stage import EvaluateConfig
from stages.formats import format_bytes, format_flops, format_hours, format_length
from stages.materialize.memory import device_bytes
from stages.materialize.stage import MaterializeConfig
from stages.prepare.stage import PrepareConfig
from stages.recipe import LoadedRecipe, ModelInfo, Recipe, World
from stages.search.stage import SearchConfig
from stages.train.footprint import trained_parameters
from stages.train.memory import load_host_bytes, restart_disk_bytes, restart_host_bytes
from stages.train.stage import TrainConfig, batch_faults

_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
# Share of a device's peak that is reached in practice, recomputation counted as work.
EFFICIENCY = 0.4
# The same in training of a mixture of experts: what four days for 2.5B tokens of Qwen3-30B-A3B on
# 16 A800 come to (BOSCH B.5). Its forward passes reach what dense ones do: one evaluation of it
# takes 2.2 times as long as of Qwen3-1.7B (B.4), for 2.7 times the operations.
EXPERTS_EFFICIENCY = 0.057
# Tokens a core tokenises in a second, with a fast tokenizer on prose and code.
_TOKENS_PER_CORE_SECOND = 250_000
_UNEQUAL = "the ranks cannot share a layer's full heads equally"
# Of a node of named GPUs, where the machine that plans has fewer.
_GPUS_PER_NODE = 8


@dataclass(frozen=True)
class Cost:
    """FLOPs of a stage, bytes it leaves on disk, and what else is worth saying.

    The work comes in `jobs` of equal size, each done by one process: so many at a time, one group
    after the other; a single job is not distributed. `model_flops` leaves recomputation out, as MFU
    does; 0 where that is not asked for. `efficiency` is the share of the devices' peak.
    """

    stage: str
    flops: float
    disk: float
    facts: list[str]
    jobs: tuple[int, ...] = (1,)
    model_flops: float = 0.0
    efficiency: float = EFFICIENCY

    @property
    def distributed(self) -> bool:
        """Whether the stage uses more than one process where it gets them."""
        return sum(self.jobs) > 1

    def speedup(self, processes: int) -> float:
        """Speed of so many processes over that of one."""
        return sum(self.jobs) / sum(math.ceil(jobs / processes) for jobs in self.jobs)


def _split(count: int, rounds: int) -> list[int]:
    """Sizes of so many rounds of equal size, or nearly so."""
    return [count // rounds + (number < count % rounds) for number in range(rounds)]


def plan_costs(
    loaded: LoadedRecipe,
    info: ModelInfo,
    processes: int,
    local_processes: int | None = None,
    on_gpu: bool = False,
) -> list[Cost]:
    """The cost of every stage of a recipe on so many processes, as if nothing was cached."""
    shape = info.decoder
    local = min(processes, local_processes or processes)
    search = _search(loaded, shape, processes, local, on_gpu)
    costs = [_prepare(loaded), search, _materialize(loaded, shape)]
    if loaded.recipe.get(TrainConfig) is not None:
        costs.append(_train(loaded, shape, processes, local, on_gpu))
    if loaded.recipe.get(EvaluateConfig) is not None:
        costs += _evaluate(loaded, shape)
    return [*costs, Cost("report", 0, 1e6, [])]


def _prepare(loaded: LoadedRecipe) -> Cost:
    prepare = loaded.recipe[PrepareConfig]
    tokens, length = prepare.train_tokens, prepare.sequence_length
    core_hours = tokens / _TOKENS_PER_CORE_SECOND / 3600
    examples = prepare.calibration.examples
    facts = [
        f"{tokens:,} tokens in {tokens // length:,} sequences of {length:,}",
        f"{examples} calibration examples of {prepare.calibration.length:,}",
        f"about {format_hours(core_hours)} on one core",
    ]
    return Cost("prepare", 0, tokens * 4.0 + examples * prepare.calibration.length * 6.0, facts)


def _search(
    loaded: LoadedRecipe, shape: DecoderShape, processes: int, local: int, on_gpu: bool
) -> Cost:
    recipe = loaded.recipe
    calibration, search = recipe[PrepareConfig].calibration, recipe[SearchConfig]
    evaluations = most_evaluations(loaded, shape, search.method)
    examples, length = calibration.examples, calibration.length
    tokens = examples * length
    one = shape.forward_flops(tokens, length)
    batch = recipe.runtime.eval_batch_size
    batches = _batches_by_round(recipe)
    sharded = recipe.runtime.search_parallel == "tensor"
    number = _BYTES[recipe.model.dtype]
    shards = processes if sharded else 1
    weights = number * shape.parameters / shards
    rows = min(batch, examples)
    sizes = ActivationSizes.of(shape, number, shards)
    passes = sizes.plain_pass(rows * length)
    gradients = sizes.gradient(rows, length, search.window_size)
    # One by one onto the GPUs, from files that all processes share; in host memory for each else.
    host = number * shape.parameters if on_gpu or sharded else weights * local
    facts = [
        f"at most {evaluations:,} evaluations of {tokens:,} tokens in {sum(batches)} batches",
        f"{format_flops(one)} each with every head full and nothing reused",
        f"per process: {format_bytes(weights)} of weights, about {format_bytes(passes)} in a pass, "
        f"about {format_bytes(gradients)} where gradients are taken",
        _reuse(recipe, sizes, examples if sharded else math.ceil(examples / processes)),
        f"host memory while loading: {format_bytes(host)} a node",
    ]
    jobs = _search_jobs(recipe, search.method)
    if sharded:
        facts.append(f"one model sharded over {processes} processes")
        jobs = (processes,)
    elif jobs == batches:
        facts.append(
            "gradients, and evaluations that may end early, take "
            f"{' or '.join(str(size) for size in sorted({*batches}))} of the batches at a time: "
            f"more than {max(batches)} process(es) have nothing to do then"
        )
    return Cost("search", evaluations * one, 1e6, facts, jobs=jobs)


def _batches_by_round(recipe: Recipe) -> tuple[int, ...]:
    """Batches of each round over the calibration set."""
    examples, batch = recipe[PrepareConfig].calibration.examples, recipe.runtime.eval_batch_size
    return tuple(math.ceil(size / batch) for size in _split(examples, min(MAX_ROUNDS, examples)))


def _search_jobs(recipe: Recipe, method: str) -> tuple[int, ...]:
    """Batches that a method measures at a time: a round, or all where nothing can end early."""
    batches = _batches_by_round(recipe)
    in_rounds = METHODS[method].gradients or (
        recipe[SearchConfig].race and "race" in METHODS[method].settings
    )
    return batches if in_rounds else (sum(batches),)


def _reuse(recipe: Recipe, sizes: ActivationSizes, examples: int) -> str:
    """Bytes that reuse keeps of one layer for a process's examples, and the share that fits."""
    entry = examples * sizes.layer_entry(recipe[PrepareConfig].calibration.length)
    room = recipe.runtime.reuse_memory
    fact = (
        "reuse: the input of a layer and its attention of both kinds, "
        f"{format_bytes(entry)} for the {examples} examples of a process; runtime.reuse_memory "
    )
    if isinstance(room, int):
        return fact + f"holds {min(1.0, room / entry):.0%} of it"
    return fact + "is the memory left after one gradient pass"


def most_evaluations(loaded: LoadedRecipe, shape: DecoderShape, method: str) -> int:
    """The bound of the table of methods, with the recipe's settings."""
    settings = loaded.recipe[SearchConfig].settings(loaded.recipe.seed)
    return METHODS[method].most_evaluations(settings, shape.full_layers, shape.key_value_heads)


def _materialize(loaded: LoadedRecipe, shape: DecoderShape) -> Cost:
    section = loaded.recipe[MaterializeConfig]
    number = _BYTES[section.dtype]
    facts = [
        f"{shape.parameters:,} parameters",
        f"{format_bytes(device_bytes(shape, number))} of weights on one device, weight by weight "
        f"from the base to the hybrid; written in files of {section.max_shard_size}",
    ]
    return Cost("materialize", 0, shape.parameters * float(number), facts)


def _train(
    loaded: LoadedRecipe, shape: DecoderShape, processes: int, local: int, on_gpu: bool
) -> Cost:
    recipe = loaded.recipe
    train, runtime, search = recipe.get(TrainConfig), recipe.runtime, recipe[SearchConfig]
    assert train is not None
    steps = train.optimizer_steps
    tokens, length = steps * train.batch_tokens, recipe[PrepareConfig].sequence_length
    flops = shape.training_flops(tokens, length, search.swa_ratio, search.window)
    teacher = shape.forward_flops(tokens, length) if train.teacher != "none" else 0.0
    checkpoints = len(train.checkpoint_steps)
    number = _BYTES[recipe[MaterializeConfig].dtype]
    saved = float(checkpoints * shape.parameters * number)
    computed = 2 if train.mixed_precision == "bf16" else 4
    host = load_host_bytes(shape.parameters, number, computed, runtime.sharding, local, on_gpu)
    trained = trained_parameters(shape, train)
    restart = float(restart_disk_bytes(shape.parameters, trained))
    writing = restart_host_bytes(
        shape.parameters, trained, runtime.sharding, processes, local, on_gpu
    )
    facts = [
        f"{steps:,} steps of {train.batch_tokens:,} tokens = {tokens:,} tokens",
        f"{train.batch_tokens // length} sequences a step on {processes} process(es)",
        f"{format_flops(flops)} without recomputation: "
        f"{flops / shape.training_flops(tokens, length, 0.0, search.window):.0%} of the original's",
        f"host memory a node: {format_bytes(host)} while loading, {format_bytes(writing)} while "
        "restart points are written",
        f"on disk {checkpoints} checkpoints ({format_bytes(saved)}) and at most two "
        f"restart points ({format_bytes(restart)})",
    ]
    if teacher:
        facts.append(f"{format_flops(teacher)} of a forward pass of the original, the teacher")
    done = (4 / 3 if runtime.gradient_checkpointing else 1.0) * flops + teacher
    return Cost(
        "train", done, saved + restart, facts, (train.batch_tokens // length,), flops + teacher,
        EXPERTS_EFFICIENCY if shape.experts else EFFICIENCY,
    )  # fmt: skip


def _evaluate(loaded: LoadedRecipe, shape: DecoderShape) -> list[Cost]:
    recipe, evaluate = loaded.recipe, loaded.recipe[EvaluateConfig]
    needle, search, train = evaluate.needle, recipe[SearchConfig], recipe.get(TrainConfig)
    checkpoints = len(train.checkpoint_steps) if train is not None else 0
    rivals = len(evaluate.rivals)
    windows = len({*evaluate.windows} - {search.window_size})
    models = {"original": 1, "evaluate": (1 + rivals) * (1 + windows) + checkpoints}
    if needle is None:
        return [Cost(stage, 0, 1e6, []) for stage in models]
    each = needle.samples * len(needle.tasks)
    ratios = {"original": 0.0, "evaluate": search.swa_ratio}
    samples = each * len(needle.lengths)
    longest, number = max(needle.lengths), _BYTES[recipe.model.dtype]
    rows = recipe.runtime.eval_batch_size
    assert shape.kinds is not None
    counts = even_layout(shape.full_layers, shape.key_value_heads, search.swa_ratio)
    cache = CacheSize.of(counts, shape.kinds, search.window, number)
    held = {
        "original": rows * cache.original(longest),
        "evaluate": rows * cache.dynamic(longest),
    }
    facts = {
        "original": [f"{samples:,} samples, once for all recipes on this model"],
        "evaluate": [
            f"{samples:,} samples for the hybrid and each of {checkpoints} checkpoints"
            + (f" and {rivals} rivals" if rivals else "")
            + (f", the untrained ones at {windows} more windows" if windows else "")
        ],
    }
    activations = ActivationSizes.of(shape, number).plain_pass(rows * longest)
    # A hybrid that is made from the original takes its weights over one by one.
    weights = {"original": shape.parameters, "evaluate": shape.parameters + shape.largest_weight}
    for stage, lines in facts.items():
        lines.append(
            f"per process: {format_bytes(number * weights[stage])} of weights, "
            f"{format_bytes(held[stage])} of KV cache for {rows} samples of {longest:,}"
            f"{_states_text(shape)}, about {format_bytes(activations)} in a pass"
        )
    return [
        Cost(
            stage,
            count
            * sum(
                shape.forward_flops(each * length, length, ratios[stage], search.window)
                for length in needle.lengths
            ),
            samples * count * 300.0,
            facts[stage],
            jobs=(samples,),
        )
        for stage, count in models.items()
    ]


def _states_text(shape: DecoderShape) -> str:
    """What the cache's bytes leave out."""
    layers = len(shape.kinds.states) if shape.kinds is not None else 0
    return f" beside the states of {layers} layers of other kinds" if layers else ""


def find_hardware(text: str | None, world: World) -> tuple[str, int]:
    """Name and count of what to plan for: `h100x8`, else the GPUs or the cores found here."""
    if text is None:
        return ("h100", world.size) if world.gpus else ("cpu", cpu_cores())
    match = re.fullmatch(rf"({'|'.join(DEVICES)})(?:x(\d+))?", text.lower())
    if match is None or match[2] == "0":
        near = suggest(text.lower(), list(DEVICES))
        hint = f"; did you mean {near}?" if near else ""
        raise UserError(
            f"--hardware {text}: expected one of {', '.join(DEVICES)}, as in h100x8{hint}"
        )
    return match[1], int(match[2] or (cpu_cores() if match[1] == "cpu" else 1))


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `plan`: hardware and its efficiency."""
    parser.add_argument(
        "--hardware",
        metavar="NAMExCOUNT",
        help="what to plan for, like h100x8, a100x16 or cpu (default: the machine's own)",
    )
    parser.add_argument(
        "--efficiency",
        metavar="SHARE",
        type=_share,
        help=f"share of the device's peak that is reached (default: {EFFICIENCY}, in training of "
        f"a mixture of experts {EXPERTS_EFFICIENCY})",
    )


def _share(text: str) -> float:
    value = float(text)
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError("expected a share above 0 and at most 1")
    return value


def run(loaded: LoadedRecipe, options: argparse.Namespace) -> int:
    """Print the plan, and what is missing before the run can start."""
    print("\n".join(plan_lines(loaded, options.hardware, options.efficiency)))
    for fault in missing_inputs(loaded):
        print(f"before it can run: {fault}")
    return 0


def plan_lines(
    loaded: LoadedRecipe, hardware: str | None = None, efficiency: float | None = None
) -> Iterator[str]:
    """The plan as lines of text. Raises UserError where the model's shape cannot be known."""
    if loaded.info is None:
        raise UserError(
            f"model.path: the shape of {loaded.recipe.model.path} is not known here; put its "
            "config.json into a folder of its own and plan with model.path=FOLDER"
        )
    name, count = find_hardware(hardware, loaded.world)
    device, shape = DEVICES[name], loaded.info.decoder
    # A process drives one GPU, or all cores of a machine.
    processes = loaded.world.size if name == "cpu" else count
    costs = plan_costs(
        loaded, loaded.info, processes, _per_node(name, loaded.world), on_gpu=name != "cpu"
    )
    if efficiency is not None:
        costs = [replace(cost, efficiency=efficiency) for cost in costs]
    weights = shape.parameters * float(_BYTES[loaded.recipe.model.dtype])
    yield f"{loaded.recipe.name} on {count} x {name}, at {efficiency or EFFICIENCY:.2g} of its peak"
    yield f"  model        {format_bytes(weights)} of weights in search and evaluation"
    total_hours = 0.0
    for cost in costs:
        used = min(count, max(cost.jobs))
        hours = stage_hours(cost, name, count)
        total_hours += hours
        fewer = f" on {used} of them" if name != "cpu" and used < count else ""
        time = f", {format_hours(hours)}{fewer}" if cost.flops else ""
        work = f"{format_flops(cost.flops)}{time}, " if cost.flops else ""
        yield f"  {cost.stage:<12} {work}{format_bytes(cost.disk)} on disk"
        facts = list(cost.facts)
        if cost.model_flops:
            mfu = cost.efficiency * cost.model_flops / cost.flops
            facts.append(f"an MFU of {mfu:.2g} is assumed")
        if cost.efficiency == EXPERTS_EFFICIENCY:
            facts.append(
                f"at {cost.efficiency:.2g} of the peak, as a mixture of experts: four days of "
                "Qwen3-30B-A3B on 16 A800 (BOSCH B.5); --efficiency says another"
            )
        if cost.stage == "search":
            facts.append(_hours_of_methods(loaded, shape, cost, name, count))
        if cost.stage == "train":
            facts += _memory_facts(loaded, shape, processes, name, count)
        for fact in facts:
            yield f"  {'':<12} - {fact}"
    flops, disk = sum(cost.flops for cost in costs), sum(cost.disk for cost in costs)
    total = f"{format_flops(flops)}, {format_hours(total_hours)}, {format_bytes(disk)} on disk"
    yield f"  {'in all':<12} {total}"
    yield from _other_hardware(costs, count)
    yield from _served(loaded, loaded.info, name)
    if weights > device.memory * 2**30:
        yield f"  note: the weights do not fit into one {name} of {device.memory:g} GiB"


def _per_node(name: str, world: World) -> int:
    """Processes that load their model into one machine's memory."""
    return world.processes_per_node if name == "cpu" else max(world.gpus, _GPUS_PER_NODE)


def stage_hours(cost: Cost, name: str, count: int) -> float:
    """Hours of a stage on `count` devices."""
    faster = count if name == "cpu" else cost.speedup(count)
    return cost.flops / (DEVICES[name].tflops * 1e12 * faster * cost.efficiency) / 3600


def _other_hardware(costs: Sequence[Cost], count: int) -> Iterator[str]:
    """All stages on other devices, as many of them."""
    for name in ("a800", "h100", "h200", "cpu"):
        stages = {c.stage: stage_hours(c, name, count) for c in costs if c.flops}
        hours = ", ".join(f"{stage} {format_hours(hours)}" for stage, hours in stages.items())
        yield f"  {name + ' x ' + str(count):<12} {hours}"


def _hours_of_methods(
    loaded: LoadedRecipe, shape: DecoderShape, search: Cost, name: str, count: int
) -> str:
    """Most hours of every method, without reuse."""
    one = search.flops / most_evaluations(loaded, shape, loaded.recipe[SearchConfig].method)
    sharded = loaded.recipe.runtime.search_parallel == "tensor"
    times: dict[str, list[str]] = {}
    for method in METHODS:
        flops = one * most_evaluations(loaded, shape, method)
        jobs = search.jobs if sharded else _search_jobs(loaded.recipe, method)
        text = format_hours(stage_hours(replace(search, flops=flops, jobs=jobs), name, count))
        times.setdefault(text, []).append(method)
    return "at most " + "; ".join(f"{text}: {', '.join(names)}" for text, names in times.items())


def _memory_facts(
    loaded: LoadedRecipe, shape: DecoderShape, processes: int, name: str, count: int
) -> Iterator[str]:
    """Memory of a process in training by what holds it, and whether it fits."""
    recipe = loaded.recipe
    faults = list(
        batch_faults(
            recipe[TrainConfig],
            recipe.runtime,
            recipe[PrepareConfig].sequence_length,
            processes,
        )
    )
    if faults:
        yield f"does not run on {processes} processes: {faults[0]}"
        return
    on_gpu, capacity = name != "cpu", DEVICES[name].memory * 2**30
    if not on_gpu:  # the table's figure is a core's share of another machine
        here = memory_here(loaded) if count == cpu_cores() else None
        capacity = here or count * capacity / loaded.world.processes_per_node
    budget = training_budget(loaded, shape, processes, capacity, on_gpu)
    yield f"per process {budget.verdict}"
    if not budget.fits:
        yield remedy(loaded, shape, processes, capacity, on_gpu)
    breakdown = {
        **budget.memory.breakdown,
        "device and libraries": budget.overhead,
        "fragmentation": budget.margin,
    }
    for name, size in breakdown.items():
        if size:
            yield f"  {name:<20} {format_bytes(size)}"


def _served(loaded: LoadedRecipe, info: ModelInfo, device: str) -> Iterator[str]:
    """Bytes that vLLM holds per request: with the mask of a file, else with any mask on budget."""
    search = loaded.recipe[SearchConfig]
    if search.sinks:
        yield f"  {'vLLM':<12} serves no sliding heads with sinks (search.sinks = {search.sinks})"
        return
    if refusal := layers_refusal(info.kinds):
        yield f"  {'vLLM':<12} not served: {refusal}"
        return
    heads, granularity, rows = info.key_value_heads, search.head_granularity, len(info.kinds.full)
    budget = rows * heads - swa_budget(rows * heads, search.swa_ratio)
    given = _full_kv_heads(str(search.mask), info) if search.method == "given" else None
    engine = engine_on(device, DEVICES[device].memory)

    def caches_of(full_kv_heads_per_layer: list[int]) -> list[ServedCache]:
        return list(
            served_caches(
                full_kv_heads_per_layer,
                heads,
                [search.window.vllm] * rows,
                2 * info.head_dim * _BYTES[loaded.recipe[MaterializeConfig].dtype],
                list(info.kinds.windows.values()),
                engine=engine,
                lengths=served_tokens(info.max_positions),
            )
        )

    for ranks, group in groupby(
        caches_of(given or any_mask(budget, rows, heads)), key=lambda cache: cache.ranks
    ):
        caches = list(group)
        figures = (
            cache.refusal
            or f"{format_length(cache.tokens)}: {format_bytes(cache.hybrid)} instead of "
            f"{format_bytes(cache.original)}{' on each' * (ranks > 1)} "
            f"({cache.original / cache.hybrid:.1f} x the tokens)"
            for cache in caches
        )
        text = ", ".join(dict.fromkeys(figures))
        if given and caches[-1].padded:
            text += f"; {format_bytes(caches[-1].padded)} of it because {_UNEQUAL}"
        multiple = math.lcm(granularity, min(ranks, heads))
        if not given and multiple > granularity and not caches[-1].refusal:
            worst = worst_shared_mask(
                budget // granularity, rows, heads // granularity, multiple // granularity
            )
            last = [c for c in caches_of([granularity * n for n in worst]) if c.ranks == ranks][-1]
            text += f"; {last.refusal or 'up to ' + format_bytes(last.hybrid)} where {_UNEQUAL}"
            if budget % multiple == 0:
                text += f", which search.head_granularity={multiple} avoids"
        on = f"{ranks} rank{'s' * (ranks > 1)}"
        yield f"  {'vLLM':<12} a request on {on} ({engine.name}): {text}"


def _full_kv_heads(path: str, info: ModelInfo) -> list[int]:
    """Full KV heads of each layer by a mask file; not by HeadMaskFile, which needs numpy.

    The search reads the file with all checks.
    """
    try:
        rows = load_json(Path(path), CONFIG_LIMITS)["swa_kv_heads"]
        full = [info.key_value_heads - len(heads) for heads in rows]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"search.mask: {path} is no head mask ({error})") from None
    layers = len(info.kinds.full)
    if len(full) != layers or min(full) < 0:
        raise UserError(
            f"search.mask: {path} is no mask for {layers} layers of {info.key_value_heads} KV heads"
        )
    return full
