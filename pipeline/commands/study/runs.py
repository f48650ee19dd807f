"""A table of searches: each setting over all seeds, with held-out results of its masks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np

from bosch.analysis.intervals import Estimate, crossed_difference, crossed_mean
from bosch.progress import progress
from pipeline.commands.study.studied_model import Results, SearchOutcome, Setting, StudiedModel

_MEASURES = ("score", "log_likelihood")
_DIGITS = {"score": 3, "log_likelihood": 2}


@dataclass(frozen=True)
class Measured:
    """One setting over all seeds; held-out `results` by measure, [S, E] each."""

    setting: Setting
    runs: Sequence[SearchOutcome]
    results: Mapping[str, Results]

    def mean(self, measure: str) -> Estimate:
        """Mean held-out score or log-likelihood."""
        return held_out_mean(self.results[measure], measure)

    def difference(self, measure: str, base: Measured) -> Estimate:
        """Difference from another setting on the same examples."""
        results, base_results = self.results[measure], base.results[measure]
        return crossed_difference(results, base_results, is_score=measure == "score")

    def cost(self, name: str) -> float:
        return median(run.costs[name] for run in self.runs)

    def record(self, prefix: str = "", **entries: Any) -> dict[str, Any]:
        """Method, ratio, `entries`, and the mean of each measure."""
        record = {"method": self.setting.method, "swa_ratio": self.setting.ratio, **entries}
        means = {f"{prefix}{measure}": self.mean(measure)._asdict() for measure in _MEASURES}
        return record | means

    def differences(self, base: Measured) -> dict[str, Any]:
        return {
            f"{measure}_difference": self.difference(measure, base)._asdict()
            for measure in _MEASURES
        }

    def cells(self, base: Measured | None = None, *, is_compared: bool = False) -> list[str]:
        """Table cells of both measures, each followed by its difference if it `is_compared`."""
        cells = []
        for measure in _MEASURES:
            digits = _DIGITS[measure]
            cells.append(interval_text(self.mean(measure), digits))
            if is_compared:
                text = ""
                if base is not None and base is not self:
                    text = interval_text(self.difference(measure, base), digits)
                cells.append(text)
        return cells


def measured(
    model: StudiedModel, settings: Sequence[Setting], *, has_held_out: bool = True
) -> list[Measured]:
    """Every setting with every seed, in the order of the settings."""
    seeds, rows = model.options.seeds, []
    with progress(len(settings) * seeds, "searches", "searches") as bar:
        for setting in settings:
            runs = []
            for seed in range(seeds):
                count = len(model.finished)
                runs.append(model.search(setting, seed))
                bar.update(free=len(model.finished) == count)
            held_out: tuple[Results, ...] = ()
            if has_held_out:
                values = np.stack([model.held_out(run.mask, setting.menu) for run in runs])
                held_out = values[:, :, 0], values[:, :, 1]
            results = dict(zip(_MEASURES, held_out, strict=has_held_out))
            rows.append(Measured(setting, runs, results))
    return rows


def held_out_mean(results: Results, measure: str) -> Estimate:
    """Mean of exact matches or log-likelihoods [S, E], within their range."""
    mean = crossed_mean(results, is_score=measure == "score")
    return mean if measure == "score" else mean.within(-math.inf, 0.0)


def interval_text(estimate: Estimate, digits: int = 3) -> str:
    """`0.812 [0.775, 0.849]`; a value that rounds to 0 has no sign."""
    mean = f"{estimate.mean:z.{digits}f}"
    if estimate.low is None or estimate.high is None:
        return f"{mean} [too few]"
    return f"{mean} [{estimate.low:z.{digits}f}, {estimate.high:z.{digits}f}]"
