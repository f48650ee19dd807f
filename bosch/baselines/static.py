"""The static head rankings by name, and the mask each of them gives (BOSCH B.3)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np

from bosch.baselines.apl import apl
from bosch.baselines.dcam import dcam
from bosch.baselines.fisher import fisher
from bosch.baselines.proxy import proxy
from bosch.baselines.qada import qada
from bosch.baselines.ranking import MostLocal, Ranked, Scores, rank_units
from bosch.baselines.razor import razor
from bosch.calibration import CalibrationSet
from bosch.errors import RunError
from bosch.finite import remedy
from bosch.modeling import mask_shape

StaticName: TypeAlias = Literal["dcam", "apl", "proxy", "qada", "razor", "fisher"]


class StaticRanking(NamedTuple):
    """Scores [L, HQ] of (model, calibration set, W, seed), and which end of them is local."""

    score: Callable[[Any, CalibrationSet, int, int], Scores]
    most_local: MostLocal


STATIC_RANKINGS: dict[StaticName, StaticRanking] = {
    "dcam": StaticRanking(lambda model, data, window, seed: dcam(model, data, window), "largest"),
    "apl": StaticRanking(lambda model, data, window, seed: apl(model, data, window), "largest"),
    "proxy": StaticRanking(
        lambda model, data, window, seed: proxy(model, data, window), "smallest"
    ),
    "qada": StaticRanking(lambda model, data, window, seed: qada(model, data, window), "largest"),
    "razor": StaticRanking(
        lambda model, data, window, seed: razor(model, data, seed=seed), "smallest"
    ),
    "fisher": StaticRanking(
        lambda model, data, window, seed: fisher(model, data, window), "largest"
    ),
}


def static_mask(
    name: StaticName,
    model: Any,
    calibration: CalibrationSet,
    window_size: int,
    swa_ratio: float,
    seed: int = 0,
) -> Ranked:
    """Rank the heads by `name`: the ceil(rho N) most local KV groups become sliding.

    `model` has full attention; it is left as it was. Raises UserError when its family is not
    supported, RunError when it gives numbers that are not finite.
    """
    ranking = STATIC_RANKINGS[name]
    scores = ranking.score(model, calibration, window_size, seed)
    if not np.isfinite(scores).all():
        raise RunError(f"{name} gives scores that are not finite: {remedy(model)}")
    _, heads = mask_shape(model.config)
    return rank_units(scores, heads, swa_ratio, ranking.most_local)
