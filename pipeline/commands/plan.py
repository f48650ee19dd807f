"""What a run costs, from the recipe and config.json without weights, data or network.

Every number is an estimate.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator

from bosch.budget import LayerHeads
from bosch.engines.vllm.plan import request_bytes, served_tokens
from bosch.errors import UserError
from bosch.hardware import DEVICES, cpu_cores
from bosch.model.cache_size import CacheSize
from pipeline.commands import RecipeCommand
from pipeline.recipe.load import all_faults, missing_inputs
from pipeline.run.graph import resolve
from stages.cost import BYTES, EFFICIENCY, Cost, Devices
from stages.formats import format_bytes, format_flops, format_hours, format_length
from stages.search.stage import SearchConfig
from stages.shape import shape_of
from stages.stage import LoadedRecipe, call

COMMAND = RecipeCommand(
    "say what a run needs and costs before it starts",
    without=("fetch", "input_files", "model_files"),
)


def find_hardware(text: str | None, gpus: int) -> tuple[str, int]:
    """Name and count of the devices to plan for: `h100x8`, else this machine's GPUs or cores."""
    if text is None:
        return ("h100", gpus) if gpus else ("cpu", cpu_cores())
    match = re.fullmatch(rf"({'|'.join(DEVICES)})(?:x0*([1-9]\d{{,8}}))?", text.lower())
    if match is None:
        names = ", ".join(DEVICES)
        raise UserError(f"hardware {text:.60}: expected one of {names}, as in h100x8")
    return match[1], int(match[2] or (cpu_cores() if match[1] == "cpu" else 1))


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--hardware",
        metavar="NAMExCOUNT",
        help="what to plan for, like h100x8, a100x16 or cpu (default: runtime.hardware of the "
        "recipe, else this machine's GPUs at the speed of H100, or its cores)",
    )
    parser.add_argument(
        "--efficiency",
        metavar="SHARE",
        type=_share,
        help=f"share of the device's peak that is reached (default: {EFFICIENCY}, less in training "
        "of a mixture of experts)",
    )


def _share(text: str) -> float:
    if not 0 < float(text) <= 1:
        raise argparse.ArgumentTypeError(f"expected a share above 0 and at most 1, got {text}")
    return float(text)


def run(loaded: LoadedRecipe, options: argparse.Namespace) -> int:
    """Print the plan, and what is missing before a run can start."""
    print("\n".join(plan_lines(loaded, options.hardware, options.efficiency)))
    for fault in all_faults(loaded, missing_inputs):
        print(f"before it can run: {fault}")
    return 0


def plan_devices(
    loaded: LoadedRecipe, hardware: str | None = None, efficiency: float | None = None
) -> Devices:
    """The devices of a plan; a process drives one GPU, or all cores of a machine."""
    world = loaded.world
    name, count = find_hardware(
        hardware or loaded.recipe.runtime.hardware, world.size if world.gpus else 0
    )
    memory = DEVICES[name].memory * 2**30
    if name == "cpu":  # the table has figures per core
        return Devices(name, count, world.size, memory * count / world.size, efficiency)
    return Devices(name, count, count, memory, efficiency)


def plan_costs(loaded: LoadedRecipe, devices: Devices) -> dict[str, Cost]:
    """The cost of every stage of a recipe and its branches, as if nothing were cached."""
    return {
        node.name: call(node.stage.cost, node.loaded, devices) or Cost() for node in resolve(loaded)
    }


def plan_lines(
    loaded: LoadedRecipe, hardware: str | None = None, efficiency: float | None = None
) -> Iterator[str]:
    """The plan as lines of text. Raises UserError where the model's shape cannot be known."""
    shape, devices = shape_of(loaded), plan_devices(loaded, hardware, efficiency)
    name, count = devices.name, devices.count
    costs = plan_costs(loaded, devices)
    width = max(12, *map(len, costs))

    def line(title: str, flops: float, hours: float, disk: float, note: str = "") -> str:
        work = (format_flops(flops), format_hours(hours)) if flops else ("", "")
        row = f"  {title:<{width}} {work[0]:>10}  {work[1]:>9}  {format_bytes(disk):>8}  {note}"
        return row.rstrip()

    yield f"{loaded.recipe.name} on {count} x {name}, at {efficiency or EFFICIENCY:.2g} of its peak"
    yield f"  {'':<{width}} {'FLOP':>10}  {'time':>9}  {'disk':>8}"
    hours = {stage: cost.hours(name, count) for stage, cost in costs.items()}
    for stage, cost in costs.items():
        yield line(stage, cost.flops, hours[stage], cost.disk, cost.note)
    all_costs = costs.values()
    disk = sum(cost.disk - cost.removed for cost in all_costs)
    disk += max(cost.removed for cost in all_costs)
    yield line("in all", sum(cost.flops for cost in all_costs), sum(hours.values()), disk)
    weights = shape.parameters * float(BYTES[loaded.recipe.model.dtype])
    excess = ""
    if weights > devices.memory:
        excess = f", more than the {format_bytes(devices.memory)} of a process"
    size = f"{format_bytes(weights)} of weights for search and evaluation{excess}"
    yield f"  {'memory':<{width}} {size}"
    for memory in dict.fromkeys(cost.memory for cost in all_costs if cost.memory):
        yield f"  {'':<{width}} {memory}"
    info, recipe = loaded.info, loaded.recipe
    assert info is not None
    # With the mask of a file, or any mask of the recipe's ratio.
    rows = recipe[SearchConfig].kv_heads(info.kinds, recipe.model.dtype)
    full: list[LayerHeads] = [{None: info.kinds.heads}] * len(rows)
    itemsize = BYTES[recipe.model.dtype]
    cache = CacheSize.of(rows, info.kinds, itemsize, state_bytes=0)
    longest = info.max_positions
    for tokens in served_tokens(longest):
        sizes = f"{format_bytes(cache.original(tokens))} of the original"
        sizes += f", {format_bytes(cache.dynamic(tokens))} of the hybrid"
        original, hybrid = (
            request_bytes(x, info.kinds, itemsize, tokens, longest) for x in (full, rows)
        )
        if hybrid is not None:
            sizes += f"; in vLLM {format_bytes(original or 0)} and {format_bytes(hybrid)}"
        yield f"  {'KV cache':<{width}} at {format_length(tokens)} tokens {sizes}"
