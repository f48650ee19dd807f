"""All methods: their names, settings, bounds of evaluations and functions.

A file in this folder registers a method; its function is there, with torch imported inside it, or
elsewhere. Recipes and plans read the table, without torch and numpy; `bosch.search.runs` runs it.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

from bosch.search.settings import SearchSettings

Kind = Literal["search", "ablation", "layer rule", "ranking", "file"]

# Evaluations of both anchors.
ANCHORS = 2


def no_search(settings: SearchSettings, num_layers: int, num_units: int) -> int:
    """The bound of a method that needs no score: the anchors and the final mask."""
    return ANCHORS + 1


@dataclass(frozen=True)
class Method:
    """One way to find a head mask.

    `label` is its name in tables, `about` a short description. `runner` is "module:function"; the
    function's signature depends on the kind (see `bosch.search.runs`). `settings` are the fields of
    `SearchSettings` that it reads besides `swa_ratio` and `head_granularity`; no other field
    changes its mask. `bound(settings, L, units per layer)` computes `most_evaluations`.
    `most_local` is the end of a ranking's scores that becomes sliding; `passes(examples)` are the
    passes over a calibration set of so many examples that a ranking spends. `gradients`: it uses
    gradients of gates. `several_windows`: it can choose among several windows. `finds_front`: it
    finds masks of several budgets, to choose from.
    """

    label: str
    kind: Kind
    runner: str
    about: str
    settings: frozenset[str] = frozenset()
    bound: Callable[[SearchSettings, int, int], int] = no_search
    most_local: Literal["largest", "smallest"] = "largest"
    passes: Callable[[int], float] = lambda _examples: 1.0
    gradients: bool = False
    several_windows: bool = False
    finds_front: bool = False

    @property
    def searches(self) -> bool:
        """Whether it has a budget of evaluations."""
        return "budget_per_layer" in self.settings

    @property
    def reads_attention(self) -> bool:
        """Whether it reads a model's attention, on whole examples in one process."""
        return self.kind == "ranking"

    def most_evaluations(self, settings: SearchSettings, num_layers: int, num_heads: int) -> int:
        """Upper bound of evaluations for L layers of KV heads, anchors and final mask included."""
        return self.bound(settings, num_layers, num_heads // settings.head_granularity)

    def load(self) -> Callable[..., Any]:
        """Import the function that runs the method."""
        module, _, function = self.runner.partition(":")
        return getattr(importlib.import_module(module), function)


METHODS: dict[str, Method] = {}


def register(name: str, method: Method) -> None:
    """Add a method after the others of its kind; raises ValueError if the name is taken."""
    if name in METHODS:
        raise ValueError(f"there is a method '{name}'")
    kinds = get_args(Kind)
    entries = sorted({**METHODS, name: method}.items(), key=lambda item: kinds.index(item[1].kind))
    METHODS.clear()
    METHODS.update(entries)


for _module in pkgutil.iter_modules(__path__):  # each file registers its methods
    importlib.import_module(f"{__name__}.{_module.name}")

if TYPE_CHECKING:
    MethodName = str
else:
    MethodName = Literal[*METHODS]
