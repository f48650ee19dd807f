"""`bosch status RECIPE`: the state of each stage, within half a second."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from bosch.commands import print_json
from bosch.errors import printable
from pipeline.commands import RecipeCommand
from pipeline.run.graph import resolve
from pipeline.run.status import StageState, inspect
from pipeline.run.store import Store
from stages.stage import LoadedRecipe

COMMAND = RecipeCommand(
    "say for each stage whether it is cached, to run, running or failed, and why",
    json=True,
    without=("fetch", "model_family"),
)

# Most bytes of new input files to hash; larger ones are reported as not hashed.
_BUDGET_BYTES = 64 * 1024**2


def run(loaded: LoadedRecipe, options: argparse.Namespace) -> int:
    """Print the state of every stage."""
    store = Store(loaded.output_root)
    hasher = store.hasher(_BUDGET_BYTES)
    nodes = resolve(loaded, hasher)
    states = inspect(nodes, store, hasher, loaded.recipe.name)
    if options.json:
        facts = {"recipe": loaded.recipe.name, "file": str(loaded.file)}
        facts["results"] = str(loaded.output_root / loaded.recipe.name)
        stages = [{"stage": s.node.name, "state": s.state, "reason": s.reason} for s in states]
        print_json({**facts, "stages": stages})
    else:
        print_states(loaded, states)
    if store.root.exists():
        hasher.save()
    return 0


def print_states(loaded: LoadedRecipe, states: Sequence[StageState]) -> None:
    """One line for each stage, below the recipe's name."""
    print(f"{loaded.recipe.name} ({loaded.file})")
    width = max(len(state.node.name) for state in states)
    for state in states:
        print(f"  {state.node.name:<{width}}  {printable(str(state))}")
