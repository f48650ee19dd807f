"""The table of all methods: what each is called, reads, may spend and which function runs it.

Imports neither torch nor numpy: recipes, plans and comparisons read the table, `bosch.search.runs`
runs a method. L layers, H KV heads or units of heads per layer, kappa evaluations per layer.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from bosch.budget import swa_budget
from bosch.search.groups import layer_groups, max_layers_per_group
from bosch.search.settings import SearchSettings

MethodName = Literal[
    "bosch", "bosch_plus", "front", "b_single", "b_multi", "b_layer",
    "one_plus_one", "annealing", "learned_gates", "one_gradient",
    "single_ablation", "layer_ablation", "layer_restoration",
    "rand", "bme", "intr",
    "dcam", "apl", "proxy", "qada", "razor", "fisher", "moa", "lu_kv",
    "given",
]  # fmt: skip
Kind = Literal["search", "ablation", "one by one", "layer rule", "ranking", "profile", "file"]
MostLocal = Literal["largest", "smallest"]

ANCHORS = 2
# Passes that bosch_plus may spend however small kappa is.
LEAST_PLUS_BUDGET = 4


@dataclass(frozen=True)
class Method:
    """One way to find a head mask.

    `label` is its name in tables, `about` says in a few words what it does. `runner` is
    "module:function"; the function's signature depends on the kind (see `bosch.search.runs`).
    `most_local` is the end of a ranking's scores that becomes sliding. `gradients`: it reads
    gradients of gates where the scorer has them. `several_windows`: recipes may give it several
    windows. `finds_front`: it finds masks for a row of budgets, one of which is chosen later.
    `settings` are the fields of `SearchSettings` that it reads besides `swa_ratio` and
    `head_granularity`: no other field changes its mask. `bound(settings, L, units per layer)` is
    that of `most_evaluations`.
    """

    label: str
    kind: Kind
    runner: str
    about: str
    settings: frozenset[str]
    bound: Callable[[SearchSettings, int, int], int]
    in_paper: bool = True
    most_local: MostLocal = "largest"
    gradients: bool = False
    several_windows: bool = False
    finds_front: bool = False

    @property
    def searches(self) -> bool:
        """Whether it spends a budget of evaluations."""
        return "budget_per_layer" in self.settings

    @property
    def reads_attention(self) -> bool:
        """Whether it reads a model's attention on whole examples in one process."""
        return self.kind in ("ranking", "profile")

    @property
    def seeded(self) -> bool:
        """Whether another seed may give another mask."""
        return "seed" in self.settings

    def most_evaluations(self, settings: SearchSettings, num_layers: int, num_heads: int) -> int:
        """Upper bound of the evaluations of S(z), the two anchors and the final mask included."""
        return self.bound(settings, num_layers, num_heads // settings.head_granularity)

    def load(self) -> Callable[..., Any]:
        """Import the function that runs the method."""
        module, _, function = self.runner.partition(":")
        return getattr(importlib.import_module(module), function)


def plus_budget(settings: SearchSettings, num_layers: int) -> int:
    """kappa L / 10: what bosch_plus may spend, gradients counted at their cost in evaluations."""
    return max(LEAST_PLUS_BUDGET, round(settings.budget_per_layer * num_layers / 10))


def front_budget(settings: SearchSettings, num_layers: int) -> int:
    """What a search of a front may spend: half as much again as `bosch_plus` on one budget."""
    return math.ceil(1.5 * plus_budget(settings, num_layers))


def _sub_problem(settings: SearchSettings, layers: int, units: int, quota: int) -> int:
    """kappa evaluations per layer, or one per candidate on budget where these are fewer (B.2)."""
    return min(settings.budget_per_layer * layers, math.comb(units, quota))


def _layer_importance(
    settings: SearchSettings, num_layers: int, num_heads: int, per_group: int
) -> tuple[int, list[int]]:
    """Evaluations of Algorithm 1 and the sliding units of each group."""
    groups = layer_groups(num_layers, per_group)
    quotas = [swa_budget(len(group) * num_heads, settings.swa_ratio) for group in groups]
    return sum(
        _sub_problem(settings, len(group), len(group) * num_heads, quota)
        for group, quota in zip(groups, quotas, strict=True)
    ), quotas


def _bosch(settings: SearchSettings, num_layers: int, num_heads: int) -> int:
    # The groups of Algorithm 3 are not known beforehand: kappa for each layer, as published. Where
    # it has nothing to search, the final mask takes one of these.
    evaluations, _ = _layer_importance(settings, num_layers, num_heads, 1)
    return ANCHORS + evaluations + settings.budget_per_layer * num_layers


def _bosch_plus(settings: SearchSettings, num_layers: int, num_heads: int) -> int:
    return ANCHORS + plus_budget(settings, num_layers)


def _front(settings: SearchSettings, num_layers: int, num_heads: int) -> int:
    return ANCHORS + front_budget(settings, num_layers)


def _b_multi(settings: SearchSettings, num_layers: int, num_heads: int) -> int:
    per_group = max_layers_per_group(num_heads, settings.max_group_variables)
    return _layer_importance_mask(settings, num_layers, num_heads, per_group)


def _layer_importance_mask(
    settings: SearchSettings, num_layers: int, num_heads: int, per_group: int = 1
) -> int:
    evaluations, quotas = _layer_importance(settings, num_layers, num_heads, per_group)
    # To restore one surplus unit, every sliding unit of one layer is tried.
    surplus = sum(quotas) - swa_budget(num_layers * num_heads, settings.swa_ratio)
    return ANCHORS + evaluations + surplus * min(num_heads, max(quotas))


def _b_layer(settings: SearchSettings, num_layers: int, num_heads: int) -> int:
    budget = swa_budget(num_layers * num_heads, settings.swa_ratio)
    quota = -(-budget // num_heads)
    surplus = quota * num_heads - budget
    # The layer that gives units back is chosen among the sliding ones, then its units in turn.
    repair = quota + sum(num_heads - i for i in range(surplus)) if surplus else 0
    return ANCHORS + _sub_problem(settings, num_layers, num_layers, quota) + repair


def _whole_mask(settings: SearchSettings, num_layers: int, num_heads: int) -> int:
    units = num_layers * num_heads
    quota = swa_budget(units, settings.swa_ratio)
    return ANCHORS + _sub_problem(settings, num_layers, units, quota)


def _every_unit(settings: SearchSettings, num_layers: int, num_heads: int) -> int:
    return ANCHORS + num_layers * num_heads + 1


def _every_layer(settings: SearchSettings, num_layers: int, num_heads: int) -> int:
    return ANCHORS + num_layers + 1


def _one_gradient(settings: SearchSettings, num_layers: int, num_heads: int) -> int:
    # A gradient is a forward pass, its recomputation and a backward pass of two.
    return ANCHORS + 1 + 4


def _no_search(settings: SearchSettings, num_layers: int, num_heads: int) -> int:
    return ANCHORS + 1


_SOLVER_FIELDS = frozenset(
    {"solver", "budget_per_layer", "alpha", "gamma", "strict", "race", "seed"}
)
_GROUPED = _SOLVER_FIELDS | {"max_group_variables"}
_ONE_SOLVER = _SOLVER_FIELDS - {"solver"}


def _rule(label: str, name: str, about: str, *settings: str) -> Method:
    runner = f"bosch.baselines.layer_rules:{name}"
    return Method(label, "layer rule", runner, about, frozenset(settings), _no_search)


def _ranking(
    label: str, name: str, about: str, *settings: str, most_local: MostLocal = "largest"
) -> Method:
    runner, reads = f"bosch.baselines.{name}:{name}", frozenset(settings)
    return Method(label, "ranking", runner, about, reads, _no_search, most_local=most_local)


def _profile(label: str, name: str, about: str) -> Method:
    runner = f"bosch.baselines.{name}:{name}"
    return Method(
        label, "profile", runner, about, frozenset(), _no_search, in_paper=False,
        several_windows=True,
    )  # fmt: skip


METHODS: dict[str, Method] = {
    "bosch": Method(
        "BOSCH", "search", "bosch.search.bosch:bosch", "the published search, Algorithms 1 to 3",
        _GROUPED | {"buckets"}, _bosch,
    ),
    "bosch_plus": Method(
        "BOSCH+", "search", "bosch.search.bosch_plus:bosch_plus",
        "elimination and swaps by gradients, a tenth of the published evaluations",
        frozenset({"budget_per_layer"}), _bosch_plus, in_paper=False, gradients=True,
    ),
    "front": Method(
        "Front", "search", "bosch.search.front:front",
        "masks of several windows for every budget from one search by gradients",
        frozenset({"budget_per_layer"}), _front, in_paper=False, gradients=True,
        several_windows=True, finds_front=True,
    ),
    "b_single": Method(
        "B-single", "ablation", "bosch.search.ablations:b_single",
        "Algorithm 1's own mask, layer by layer", _SOLVER_FIELDS, _layer_importance_mask,
    ),
    "b_multi": Method(
        "B-multi", "ablation", "bosch.search.ablations:b_multi",
        "Algorithm 1's own mask, by groups of layers", _GROUPED, _b_multi,
    ),
    "b_layer": Method(
        "B-layer", "ablation", "bosch.search.ablations:b_layer",
        "Algorithm 1's own mask, by whole layers", _SOLVER_FIELDS, _b_layer,
    ),
    "one_plus_one": Method(
        "(1+1)", "ablation", "bosch.search.rivals:one_plus_one",
        "the (1+1) algorithm on the whole mask, without stages", _ONE_SOLVER, _whole_mask,
        in_paper=False,
    ),
    "annealing": Method(
        "Annealing", "ablation", "bosch.search.rivals:annealing",
        "simulated annealing on the whole mask, without stages", _ONE_SOLVER, _whole_mask,
        in_paper=False,
    ),
    "learned_gates": Method(
        "Gates", "search", "bosch.search.rivals:learned_gates",
        "gates learned by gradient at an exact ratio (arXiv 2410.10819, 2606.18056)",
        frozenset({"budget_per_layer", "seed"}), _bosch_plus, in_paper=False, gradients=True,
    ),
    "one_gradient": Method(
        "One gradient", "one by one", "bosch.search.rivals:one_gradient",
        "ranks heads by one gradient at the original model (as MoA profiles, arXiv 2406.14909)",
        frozenset({"strict"}), _one_gradient, in_paper=False, gradients=True,
    ),
    "single_ablation": Method(
        "One head", "one by one", "bosch.search.rivals:single_ablation",
        "ranks heads by the score without each alone (arXiv 2602.11374)",
        frozenset({"strict"}), _every_unit, in_paper=False,
    ),
    "layer_ablation": Method(
        "One layer", "one by one", "bosch.search.rivals:layer_ablation",
        "ranks layers by the log-likelihood without each alone (arXiv 2606.27791)",
        frozenset({"strict"}), _every_layer, in_paper=False,
    ),
    "layer_restoration": Method(
        "One full layer", "one by one", "bosch.search.rivals:layer_restoration",
        "ranks layers by the log-likelihood with each alone full (after arXiv 2512.20569)",
        frozenset({"strict"}), _every_layer, in_paper=False,
    ),
    "rand": _rule("RAND", "rand", "full layers at random places", "seed"),
    "bme": _rule("BME", "bme", "full layers at the beginning, in the middle and at the end"),
    "intr": _rule("INTR", "intr", "full layers at even spacing"),
    "dcam": _ranking("DCAM", "dcam", "ranks heads by their attention mass inside the window"),
    "apl": _ranking("APL", "apl", "ranks heads by the distance at which their attention peaks"),
    "proxy": _ranking(
        "Proxy", "proxy", "ranks heads by the blocks of keys that hold their attention",
        most_local="smallest",
    ),
    "qada": _ranking("QAdA", "qada", "ranks heads by local mass against an estimate of the rest"),
    "razor": _ranking(
        "Razor", "razor", "ranks heads by attention to repeated tokens", "seed",
        most_local="smallest",
    ),
    "fisher": _ranking(
        "Fisher", "fisher", "ranks heads by gradient-weighted mass inside the window"
    ),
    "moa": _profile(
        "MoA", "moa", "windows by a profile of what masked attention costs (arXiv 2406.14909)"
    ),
    "lu_kv": _profile(
        "LU-KV", "lu_kv", "windows by the attention that answers lose (after arXiv 2602.08585)"
    ),
    "given": Method(
        "Given", "file", "bosch.search.given:given_mask", "takes the mask of search.mask",
        frozenset({"mask"}), _no_search, in_paper=False, several_windows=True,
    ),
}  # fmt: skip
# Those that find a mask by themselves.
FINDING = tuple(name for name, method in METHODS.items() if method.kind != "file")
