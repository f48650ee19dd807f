"""From the recipe's `search` section to a result: the method it names, on a scorer."""

from __future__ import annotations

from bosch.method import run
from bosch.method.bosch import SearchResult
from bosch.method.ledger import Ledger
from bosch.method.settings import SearchSettings
from stages.configs import SearchConfig


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
        race=section.race,
        seed=seed,
    )


def find_mask(section: SearchConfig, ledger: Ledger, seed: int) -> SearchResult:
    """Run `search.method`; the result's mask has exactly ceil(rho N) sliding KV heads."""
    return run.find_mask(section.method, ledger, search_settings(section, seed))


def most_evaluations(section: SearchConfig, num_layers: int) -> int:
    """Upper bound of the evaluations of a search, for its progress."""
    return run.most_evaluations(section.method, search_settings(section, 0), num_layers)
