"""Requirements and cost of a run, from the recipe and config.json without weights.

Every number is an estimate and names its assumption. T is a sequence's tokens, W the window.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import re
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

from bosch.budget import LayerHeads
from bosch.commands import print_json
from bosch.errors import UserError
from bosch.hardware import DEVICES, cpu_cores
from bosch.vllm import plan as vllm
from pipeline.commands import RecipeCommand
from pipeline.recipe.faults import suggest
from pipeline.recipe.load import missing_inputs
from stages.cost import BYTES, EFFICIENCY, Cost, Devices, memory_here
from stages.formats import format_bytes, format_flops, format_hours, format_length
from stages.materialize.stage import MaterializeConfig
from stages.search.stage import SearchConfig
from stages.shape import shape_of
from stages.stage import LoadedRecipe, ModelInfo, World, call

COMMAND = RecipeCommand(
    "say what a run needs and costs before it starts",
    json=True,
    fetch=False,
    input_files=False,
    model_files=False,
)

_UNEQUAL = "the ranks cannot share a layer's full heads equally"
# GPUs of a node in a plan for GPUs that this machine does not have.
_GPUS_PER_NODE = 8


def find_hardware(text: str | None, world: World) -> tuple[str, int]:
    """Name and count of the devices to plan for: `h100x8`, else this machine's GPUs or cores."""
    if text is None:
        return ("h100", world.size) if world.gpus else ("cpu", cpu_cores())
    match = re.fullmatch(rf"({'|'.join(DEVICES)})(?:x0*([1-9]\d{{,8}}))?", text.lower())
    if match is None:
        near = suggest(text.lower(), list(DEVICES))
        hint = f"; did you mean {near}?" if near else ""
        raise UserError(
            f"--hardware {text:.60}: expected one of {', '.join(DEVICES)}, as in h100x8{hint}"
        )
    return match[1], int(match[2] or (cpu_cores() if match[1] == "cpu" else 1))


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--hardware",
        metavar="NAMExCOUNT",
        help="what to plan for, like h100x8, a100x16 or cpu (default: this machine's GPUs at the "
        "speed of H100, or its cores)",
    )
    parser.add_argument(
        "--efficiency",
        metavar="SHARE",
        type=_share,
        help=f"share of the device's peak that is reached (default: {EFFICIENCY}, less in training "
        "of a mixture of experts)",
    )


def _share(text: str) -> float:
    with contextlib.suppress(ValueError):
        if 0 < (value := float(text)) <= 1:
            return value
    raise argparse.ArgumentTypeError(f"expected a share above 0 and at most 1, got {text!r:.60}")


def run(loaded: LoadedRecipe, options: argparse.Namespace) -> int:
    """Print the plan, and what is missing before a run can start."""
    if options.json:
        print_json(plan_record(loaded, options.hardware, options.efficiency))
        return 0
    print("\n".join(plan_lines(loaded, options.hardware, options.efficiency)))
    for fault in missing_inputs(loaded):
        print(f"before it can run: {fault}")
    return 0


def plan_devices(
    loaded: LoadedRecipe, hardware: str | None = None, efficiency: float | None = None
) -> Devices:
    """The devices of a plan: the hardware of that name, else this machine's GPUs or cores."""
    name, count = find_hardware(hardware, loaded.world)
    # A process drives one GPU, or all cores of a machine.
    processes = loaded.world.size if name == "cpu" else count
    memory = DEVICES[name].memory * 2**30
    if name == "cpu":  # the table has figures per core
        memory *= count / loaded.world.processes_per_node
    if hardware is None or (not loaded.world.gpus and (name, count) == ("cpu", cpu_cores())):
        memory = memory_here(loaded.world) or memory
    local = loaded.world.processes_per_node
    if hardware is not None and name != "cpu":
        local = max(loaded.world.gpus, _GPUS_PER_NODE)
    return Devices(name, count, processes, min(processes, local), memory, efficiency)


def plan_costs(loaded: LoadedRecipe, devices: Devices) -> dict[str, Cost]:
    """The cost of every stage of a recipe by name, as if nothing were cached."""
    return {stage.name: call(stage.cost, loaded, devices) or Cost() for stage in loaded.present}


def plan_record(
    loaded: LoadedRecipe, hardware: str | None = None, efficiency: float | None = None
) -> dict[str, Any]:
    """The plan as values. Raises UserError where the model's shape cannot be known."""
    devices = plan_devices(loaded, hardware, efficiency)
    costs = plan_costs(loaded, devices)
    assert loaded.info is not None
    return {
        "recipe": loaded.recipe.name,
        "file": str(loaded.file),
        "hardware": {"name": devices.name, "count": devices.count},
        "stages": [
            {
                "stage": name,
                "flops": cost.flops,
                "hours": cost.hours(devices.name, devices.count),
                "disk_bytes": cost.disk,
                "facts": cost.facts,
            }
            for name, cost in costs.items()
        ],
        "serving": [" ".join(line.split()) for line in _served(loaded, loaded.info, devices.name)],
        "missing": list(missing_inputs(loaded)),
    }


def plan_lines(
    loaded: LoadedRecipe, hardware: str | None = None, efficiency: float | None = None
) -> Iterator[str]:
    """The plan as lines of text. Raises UserError where the model's shape cannot be known."""
    shape, devices = shape_of(loaded), plan_devices(loaded, hardware, efficiency)
    name, count = devices.name, devices.count
    costs = plan_costs(loaded, devices)
    weights = shape.parameters * float(BYTES[loaded.recipe.model.dtype])
    yield f"{loaded.recipe.name} on {count} x {name}, at {efficiency or EFFICIENCY:.2g} of its peak"
    yield f"  model        {format_bytes(weights)} of weights in search and evaluation"
    for stage, cost in costs.items():
        busy = min(count, max(cost.jobs))
        fewer = f" on {busy} of them" if name != "cpu" and busy < count else ""
        time = format_hours(cost.hours(name, count))
        work = f"{format_flops(cost.flops)}, {time}{fewer}, " if cost.flops else ""
        yield f"  {stage:<12} {work}{format_bytes(cost.disk)} on disk"
        for fact in cost.facts:
            yield f"  {'':<12} - {fact}"
    all_costs = costs.values()
    flops = sum(cost.flops for cost in all_costs)
    disk = sum(cost.disk - cost.removed for cost in all_costs)
    disk += max(cost.removed for cost in all_costs)
    hours = sum(cost.hours(name, count) for cost in all_costs)
    total = f"{format_flops(flops)}, {format_hours(hours)}, {format_bytes(disk)} on disk"
    yield f"  {'in all':<12} {total}"
    for device in ("a800", "h100", "h200", "cpu"):
        hours_of_stages = (
            f"{stage} {format_hours(cost.hours(device, count))}"
            for stage, cost in costs.items()
            if cost.flops
        )
        yield f"  {f'{device} x {count}':<12} {', '.join(hours_of_stages)}"
    assert loaded.info is not None
    yield from _served(loaded, loaded.info, name)
    if weights > devices.memory:
        device = f"one {name}" if devices.on_gpu else "a process"
        yield f"  note: the weights do not fit into {device} of {format_bytes(devices.memory)}"


def _served(loaded: LoadedRecipe, info: ModelInfo, device: str) -> Iterator[str]:
    """Bytes per request in vLLM, with the mask of a file or any mask on budget."""
    search = loaded.recipe[SearchConfig]
    if search.sinks:
        yield f"  {'vLLM':<12} serves no sliding heads with sinks (search.sinks = {search.sinks})"
        return
    if refusal := vllm.layers_refusal(info.kinds):
        yield f"  {'vLLM':<12} not served: {refusal}"
        return
    heads, granularity, rows = info.kinds.heads, search.head_granularity, len(info.kinds.full)
    mask = search.kv_heads(info.kinds, loaded.recipe.model.dtype)
    budget = sum(row[None] for row in mask)
    is_given = search.method == "given"
    engine = vllm.engine_on(device, DEVICES[device].memory)
    itemsize = BYTES[loaded.recipe[MaterializeConfig].dtype]

    def caches_of(layers: Sequence[LayerHeads], ranks: Sequence[int]) -> list[vllm.ServedCache]:
        served = vllm.served_caches(
            vllm.engine_heads(layers),
            2 * info.kinds.head_dim * itemsize,
            list(info.kinds.windows.values()),
            engine=engine,
            lengths=vllm.served_tokens(info.max_positions),
            numbers_of_ranks=ranks,
        )
        return list(served)

    def with_full(counts: Sequence[int]) -> list[LayerHeads]:
        return [{None: full, search.menu[-1]: heads - full} for full in counts]

    def worst_cache(ranks: int, multiple: int) -> vllm.ServedCache:
        """The largest cache, or a refusal, of masks whose full heads the ranks share unequally."""
        masks = vllm.worst_shared_masks(
            budget // granularity, rows, heads // granularity, multiple // granularity
        )
        layouts = (with_full([granularity * count for count in mask]) for mask in masks)
        return max(
            (caches_of(layout, [ranks])[-1] for layout in layouts),
            key=lambda cache: (bool(cache.refusal), cache.hybrid),
        )

    ranks_by_text: dict[str, list[int]] = {}
    layers = mask if is_given else with_full(vllm.example_mask(budget, rows, heads))
    served = caches_of(layers, vllm.SERVED_RANKS)
    for ranks, group in groupby(served, key=lambda cache: cache.ranks):
        caches = list(group)
        text = ", ".join(dict.fromkeys(map(_cache_text, caches)))
        if is_given and caches[-1].padded:
            text += f"; {format_bytes(caches[-1].padded)} of it because {_UNEQUAL}"
        multiple = math.lcm(granularity, min(ranks, heads))
        if not is_given and multiple > granularity and not caches[-1].refusal:
            worst = worst_cache(ranks, multiple)
            if worst.refusal or worst.hybrid > caches[-1].hybrid:
                text += (
                    f"; {worst.refusal or 'up to ' + format_bytes(worst.hybrid)} where {_UNEQUAL}"
                )
                if budget % multiple == 0:
                    text += f", which search.head_granularity={multiple} avoids"
        ranks_by_text.setdefault(text, []).append(ranks)
    for text, numbers in ranks_by_text.items():
        on = f"{' or '.join(map(str, numbers))} rank{'s' * (numbers[-1] > 1)}"
        yield f"  {'vLLM':<12} a request on {on} ({engine.name}): {text}"


def _cache_text(cache: vllm.ServedCache) -> str:
    if cache.refusal:
        return cache.refusal
    return (
        f"{format_length(cache.tokens)}: {format_bytes(cache.hybrid)} instead of "
        f"{format_bytes(cache.original)}{' on each' * (cache.ranks > 1)} "
        f"({cache.original / cache.hybrid:.1f} x the tokens)"
    )
