"""From the recipe's `search` section to a result: the method it names, on a scorer."""

from __future__ import annotations

from bosch.baselines import layer_rules
from bosch.heads import HeadMask
from bosch.method.bosch import SearchResult, b_single, bosch, finished
from bosch.method.ledger import Ledger
from bosch.method.settings import SearchSettings
from stages.configs import SearchConfig

SEARCHES = {"bosch": bosch, "b_single": b_single}


def search_settings(section: SearchConfig, seed: int) -> SearchSettings:
    """The library's settings of a recipe's section."""
    return SearchSettings(
        swa_ratio=section.swa_ratio,
        solver=section.solver,
        budget_per_layer=section.budget_per_layer,
        alpha=section.alpha,
        gamma=section.gamma,
        buckets=tuple(section.buckets),
        max_group_variables=section.max_group_variables,
        break_ties=section.tie_break == "log_likelihood",
        seed=seed,
    )


def find_mask(section: SearchConfig, ledger: Ledger, seed: int) -> SearchResult:
    """Run `search.method`; the result's mask has exactly ceil(rho N) sliding KV heads."""
    settings = search_settings(section, seed)
    if section.method in SEARCHES:
        return SEARCHES[section.method](ledger, settings)
    anchors = ledger.anchors()
    shape = ledger.scorer.num_layers, ledger.scorer.num_key_value_heads
    return finished(ledger, settings, _rule(section, shape, seed), anchors)


def _rule(section: SearchConfig, shape: tuple[int, int], seed: int) -> HeadMask:
    if section.method == "rand":
        return layer_rules.rand(*shape, section.swa_ratio, seed)
    if section.method == "bme":
        return layer_rules.bme(*shape, section.swa_ratio)
    return layer_rules.intr(*shape, section.swa_ratio)


def most_evaluations(section: SearchConfig, num_layers: int) -> int:
    """Upper bound of the evaluations of a search, for its progress."""
    if section.method not in SEARCHES:
        return 3
    stages = 2 if section.method == "bosch" else 1
    return 3 + stages * num_layers * section.budget_per_layer
