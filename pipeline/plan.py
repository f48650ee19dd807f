"""What a run will cost, from the recipe and config.json alone: no torch, no weights.

Every number is an estimate with its assumption beside it. T is a sequence's tokens, W the window.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass

from bosch.calibration import MAX_PARTS
from bosch.errors import UserError
from pipeline.checks import optimizer_steps
from pipeline.faults import suggest
from pipeline.modelinfo import ModelInfo
from pipeline.recipe import LoadedRecipe
from pipeline.world import World
from stages.configs import SearchConfig

_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
# Share of a device's peak that a forward and a training step reach in practice.
_EFFICIENCY = 0.4
# Tokens a core tokenises in a second, with a fast tokenizer on prose and code.
_TOKENS_PER_CORE_SECOND = 250_000


@dataclass(frozen=True)
class Device:
    """Peak of dense bf16 matrix products in TFLOP/s, and memory in GiB."""

    tflops: float
    memory: float


# Vendors' data sheets; a CPU core is what AVX-512 cores reach in bf16 or fp32 within a factor 2.
HARDWARE = {
    "h100": Device(989, 80),
    "h200": Device(989, 141),
    "b200": Device(2250, 180),
    "a100": Device(312, 80),
    "a800": Device(312, 80),
    "l40s": Device(362, 48),
    "rtx4090": Device(165, 24),
    "cpu": Device(0.05, 4),
}


@dataclass(frozen=True)
class Cost:
    """FLOPs of a stage, bytes it leaves on disk, and what else is worth saying.

    The work comes in `parts` of equal size, each done by one process; 1 is not distributed.
    """

    stage: str
    flops: float
    disk: float
    facts: list[str]
    parts: int = 1

    @property
    def distributed(self) -> bool:
        """Whether the stage uses more than one process where it gets them."""
        return self.parts > 1

    def speedup(self, processes: int) -> float:
        """How much faster so many processes are than one."""
        return self.parts / math.ceil(self.parts / processes)


@dataclass(frozen=True)
class Shape:
    """Parameters of a decoder; `active` are those a token is multiplied with."""

    total: int
    active: int
    attention_per_token: float

    def forward(self, tokens: float, length: float) -> float:
        """FLOPs of a forward pass over `tokens` in sequences of `length`, all heads full."""
        return tokens * (2 * self.active + self.attention_per_token * length)


def model_shape(info: ModelInfo) -> Shape:
    """Count parameters from config.json: gated MLP, grouped-query attention, optional experts."""
    hidden, layers = info.hidden_size, info.layers
    q_size = info.attention_heads * info.head_dim
    kv_size = info.key_value_heads * info.head_dim
    attention = hidden * q_size * 2 + hidden * kv_size * 2
    experts = next(
        (info.number(key) for key in ("num_experts", "num_local_experts") if info.config.get(key)),
        0,
    )
    width = info.number("intermediate_size", 4 * hidden)
    if experts:
        width = info.number("moe_intermediate_size", width)
        used = info.number("num_experts_per_tok", 1)
        mlp, active_mlp = (hidden * (3 * width * many + experts) for many in (experts, used))
    else:
        mlp = active_mlp = 3 * width * hidden
    table = info.number("vocab_size") * hidden
    tables = table if info.config.get("tie_word_embeddings") else 2 * table
    total = layers * (attention + mlp + 2 * hidden) + tables + hidden
    # A token's matrix products: its layers and the output head; the input table is a look-up.
    active = layers * (attention + active_mlp) + table
    # Causal attention: 2 products of q_size per key, half of the T keys on average.
    return Shape(total, active, 2.0 * layers * q_size)


def search_evaluations(search: SearchConfig, layers: int, heads: int) -> int:
    """Most evaluations of S(z) a search can spend, anchors included (BOSCH Algorithms 1 and 3)."""
    kappa, joint = search.budget_per_layer, max(1, search.max_group_variables // heads)
    joint = 1 << (joint.bit_length() - 1)

    def probes(layers_per_group: int, units: int) -> int:
        sizes = _split(layers, -(-layers // layers_per_group))
        return sum(min(kappa * size, _choices(size * units, search.swa_ratio)) for size in sizes)

    if search.method == "bosch":
        return 2 + probes(1, heads) + kappa * layers
    if search.method == "bosch_plus":
        return 3 + max(4, round(kappa * layers / 10))
    first_stage = {"b_single": (1, heads), "b_multi": (joint, heads), "b_layer": (layers, 1)}
    if search.method in first_stage:
        return 2 + probes(*first_stage[search.method])
    return 3


def _split(count: int, parts: int) -> list[int]:
    """Sizes of so many parts of equal size, or nearly so."""
    return [count // parts + (part < count % parts) for part in range(parts)]


def _choices(units: int, ratio: float) -> int:
    """Ways to make the share `ratio` of so many units sliding."""
    from bosch.heads import swa_budget  # with numpy, which no command line needs before this

    return math.comb(units, swa_budget(units, ratio))


def plan_costs(loaded: LoadedRecipe, info: ModelInfo, processes: int) -> list[Cost]:
    """The cost of every stage of a recipe on so many processes, as if nothing was cached."""
    shape = model_shape(info)
    costs = [_prepare(loaded), _search(loaded, info, shape), _materialize(loaded, shape)]
    if loaded.recipe.train is not None:
        costs.append(_train(loaded, shape, processes))
    if loaded.recipe.evaluate is not None:
        costs.append(_evaluate(loaded, shape))
    return [*costs, Cost("report", 0, 1e6, [])]


def _prepare(loaded: LoadedRecipe) -> Cost:
    prepare = loaded.recipe.prepare
    tokens, length = prepare.train_tokens, prepare.sequence_length
    core_hours = tokens / _TOKENS_PER_CORE_SECOND / 3600
    examples = prepare.calibration.examples
    facts = [
        f"{tokens:,} tokens in {tokens // length:,} sequences of {length:,}",
        f"{examples} calibration examples of {prepare.calibration.length:,}",
        f"about {_hours(core_hours)} on one core",
    ]
    return Cost("prepare", 0, tokens * 4.0 + examples * prepare.calibration.length * 6.0, facts)


def _search(loaded: LoadedRecipe, info: ModelInfo, shape: Shape) -> Cost:
    calibration, search = loaded.recipe.prepare.calibration, loaded.recipe.search
    evaluations = search_evaluations(search, info.layers, info.key_value_heads)
    rows = math.ceil(calibration.examples / calibration.questions_per_haystack)
    tokens = rows * calibration.length
    one = shape.forward(tokens, calibration.length)
    batch = loaded.recipe.runtime.eval_batch_size
    batches = sum(math.ceil(size / batch) for size in _split(rows, min(MAX_PARTS, rows)))
    sharded = loaded.recipe.runtime.search_parallel == "tensor"
    facts = [
        f"at most {evaluations:,} evaluations of {tokens:,} tokens in {batches} batches",
        f"{_flops(one)} each with every head full and nothing reused",
    ]
    if sharded:
        facts.append(f"one model sharded over {loaded.world.size} processes")
    parts = loaded.world.size if sharded else batches
    return Cost("search", evaluations * one, 1e6, facts, parts=parts)


def _materialize(loaded: LoadedRecipe, shape: Shape) -> Cost:
    size = shape.total * float(_BYTES[loaded.recipe.materialize.dtype])
    return Cost("materialize", 0, size, [f"{shape.total:,} parameters"])


def _train(loaded: LoadedRecipe, shape: Shape, processes: int) -> Cost:
    recipe = loaded.recipe
    train, runtime = recipe.train, recipe.runtime
    assert train is not None
    steps = optimizer_steps(train)
    tokens, length = steps * train.batch_tokens, recipe.prepare.sequence_length
    factor = 4 if runtime.gradient_checkpointing else 3
    shards = processes if runtime.sharding != "none" else 1
    # fp32 weights, gradients and two Adam moments; autocast keeps a bf16 copy of a layer at a time.
    memory = 16.0 * shape.total / shards
    facts = [
        f"{steps:,} steps of {train.batch_tokens:,} tokens = {tokens:,} tokens",
        f"{train.batch_tokens // length} sequences a step on {processes} process(es)",
        f"weights, gradients and optimizer {_bytes(memory)} per process, activations besides",
    ]
    kept = len(train.checkpoint_tokens) + 1
    disk = kept * 2.0 * shape.total + 12.0 * shape.total
    parts = train.batch_tokens // length
    return Cost("train", factor * shape.forward(tokens, length), disk, facts, parts)


def _evaluate(loaded: LoadedRecipe, shape: Shape) -> Cost:
    recipe = loaded.recipe
    assert recipe.evaluate is not None
    needle = recipe.evaluate.needle
    checkpoints = len(recipe.train.checkpoint_tokens) if recipe.train is not None else 0
    models = 2 + checkpoints
    if needle is None:
        return Cost("evaluate", 0, 1e6, [f"{models} models"])
    each = needle.samples * len(needle.tasks)
    flops = sum(shape.forward(each * length, length) for length in needle.lengths)
    samples = each * len(needle.lengths)
    facts = [f"{samples:,} samples for each of {models} models (original, hybrid, checkpoints)"]
    return Cost("evaluate", models * flops, samples * models * 300.0, facts, parts=samples)


def find_hardware(text: str | None, world: World) -> tuple[str, int]:
    """Name and count of what to plan for: `h100x8`, else the GPUs or the cores found here."""
    if text is None:
        cores = os.cpu_count() or 1
        return ("h100", world.size) if world.gpus else ("cpu", cores)
    match = re.fullmatch(rf"({'|'.join(HARDWARE)})(?:x(\d+))?", text.lower())
    if match is None or match[2] == "0":
        near = suggest(text.lower(), list(HARDWARE))
        hint = f"; did you mean {near}?" if near else ""
        raise UserError(
            f"--hardware {text}: expected one of {', '.join(HARDWARE)}, as in h100x8{hint}"
        )
    alone = os.cpu_count() or 1 if match[1] == "cpu" else 1
    return match[1], int(match[2] or alone)


def plan_lines(loaded: LoadedRecipe, hardware: str | None = None) -> Iterator[str]:
    """The plan as lines of text. Raises UserError where the model's shape cannot be known."""
    if loaded.info is None:
        raise UserError(f"model.path: the shape of {loaded.recipe.model.path} is not known here")
    name, count = find_hardware(hardware, loaded.world)
    device = HARDWARE[name]
    # A process drives one GPU, or all cores of a machine.
    processes = loaded.world.size if name == "cpu" else count
    costs = plan_costs(loaded, loaded.info, processes)
    weights = model_shape(loaded.info).total * float(_BYTES[loaded.recipe.model.dtype])
    yield f"{loaded.recipe.name} on {count} x {name}, at {_EFFICIENCY:.0%} of its peak"
    yield f"  model        {_bytes(weights)} of weights in search and evaluation"
    total_hours = 0.0
    for cost in costs:
        used = min(count, cost.parts)
        faster = count if name == "cpu" else cost.speedup(count)
        hours = cost.flops / (device.tflops * 1e12 * faster * _EFFICIENCY) / 3600
        total_hours += hours
        fewer = f" on {used} of them" if name != "cpu" and used < count else ""
        time = f", {_hours(hours)}{fewer}" if cost.flops else ""
        work = f"{_flops(cost.flops)}{time}, " if cost.flops else ""
        yield f"  {cost.stage:<12} {work}{_bytes(cost.disk)} on disk"
        for fact in cost.facts:
            yield f"  {'':<12} - {fact}"
    flops, disk = sum(cost.flops for cost in costs), sum(cost.disk for cost in costs)
    yield f"  {'in all':<12} {_flops(flops)}, {_hours(total_hours)}, {_bytes(disk)} on disk"
    if weights > device.memory * 2**30:
        yield f"  note: the weights do not fit into one {name} of {device.memory:g} GiB"


def _flops(value: float) -> str:
    for power, unit in ((18, "EFLOP"), (15, "PFLOP"), (12, "TFLOP"), (9, "GFLOP")):
        if value >= 10**power:
            return f"{value / 10**power:.3g} {unit}"
    return f"{value:.3g} FLOP"


def _bytes(value: float) -> str:
    for power, unit in ((40, "TiB"), (30, "GiB"), (20, "MiB")):
        if value >= 2**power:
            return f"{value / 2**power:.3g} {unit}"
    return f"{value / 2**10:.3g} KiB"


def _hours(hours: float) -> str:
    if hours < 1 / 60:
        return "less than a minute"
    return f"{hours * 60:.0f} min" if hours < 2 else f"{hours:,.1f} h"
