"""From the recipe's `search` section to a result: the method it names, on a scorer."""

from __future__ import annotations

import logging
import time
from typing import cast

from bosch.baselines import layer_rules
from bosch.baselines.static import STATIC_RANKINGS, StaticName, static_mask
from bosch.heads import HeadMask
from bosch.method.bosch import SearchResult, b_single, bosch, finished
from bosch.method.ledger import Ledger
from bosch.method.settings import SearchSettings
from bosch.objective import Objective
from stages.configs import SearchConfig

logger = logging.getLogger(__name__)

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
    if section.method in STATIC_RANKINGS:
        return finished(ledger, settings, _ranked(section, ledger, seed), anchors)
    shape = ledger.scorer.num_layers, ledger.scorer.num_key_value_heads
    return finished(ledger, settings, _rule(section, shape, seed), anchors)


def _ranked(section: SearchConfig, ledger: Ledger, seed: int) -> HeadMask:
    """Mask of a static ranking, with notes on what its reader must know."""
    objective = ledger.scorer
    assert isinstance(objective, Objective)
    name = cast(StaticName, section.method)
    started = time.perf_counter()
    # Every rank goes by the first one's ranking: rounding on another device could differ.
    ranked = objective.ranks.from_first(
        static_mask(
            name,
            objective.model,
            objective.calibration,
            section.window_size,
            section.swa_ratio,
            seed,
        )
    )
    logger.info("%s ranked all heads in %.1f s", name, time.perf_counter() - started)
    if ranked.tied:
        ledger.note(
            f"{name} gave {ranked.tied} units the same score at the border of the budget: "
            "those of lower index became sliding"
        )
    if section.sinks:
        ledger.note(f"{name} ranked the heads by the window alone, without the sinks")
    return ranked.mask


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
