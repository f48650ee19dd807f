"""The stages of the pipeline: every package in stages/ with a module `stage`, in order."""

from __future__ import annotations

import graphlib
import importlib
import importlib.util
import pkgutil
from collections.abc import Iterable
from typing import Any

import stages
from stages.stage import Stage


def in_order(table: Iterable[Stage[Any]]) -> tuple[Stage[Any], ...]:
    """Order stages so that each follows those it needs.

    Stages that need all others (`needs` is None) come last, followed by those that depend on them.
    Raises ValueError for a stage that needs an unknown one.
    """
    by_name = {stage.name: stage for stage in sorted(table, key=lambda stage: stage.name)}
    for stage in by_name.values():
        if unknown := {*(stage.needs or ())} - by_name.keys():
            raise ValueError(f"stage {stage.name} needs {min(unknown)}, which is no stage")
    late = {name for name, stage in by_name.items() if stage.needs is None}
    for _ in by_name:  # once for each link of the longest possible chain
        late |= {name for name, stage in by_name.items() if late.intersection(stage.needs or ())}
    graph = {
        name: [*(by_name.keys() - late if stage.needs is None else stage.needs), *stage.after]
        for name, stage in by_name.items()
    }
    order = graphlib.TopologicalSorter(graph).static_order()
    return tuple(by_name[name] for name in order if name in by_name)


def _packages() -> Iterable[Stage[Any]]:
    for package in pkgutil.iter_modules(stages.__path__, "stages."):
        module = f"{package.name}.stage"
        if package.ispkg and importlib.util.find_spec(module):
            yield importlib.import_module(module).STAGE


STAGES = in_order(_packages())
