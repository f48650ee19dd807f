"""The model under study: its calibration sets, its searches and its held-out scores, each once.

S seeds, E held-out examples.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from bosch.calibration import CalibrationSet
from bosch.evaluation_log import EvaluationLog
from bosch.fingerprint import model_fingerprint
from bosch.heads import HeadMask
from bosch.method.run import SEARCHES, run_method
from bosch.method.settings import SearchSettings
from bosch.modeling import load_model, mask_shape, prepare_for_search
from bosch.objective import Objective
from data_prep.calibration import forced_records
from data_prep.essays import haystack_words
from data_prep.needles import SeedSpace
from stages.search import VERSION as SEARCH_VERSION
from stages.searching.methods import search_settings
from stages.studying.cells import Cells, Record
from stages.studying.options import StudyConfig

logger = logging.getLogger(__name__)

# Methods without a search that draw something at random all the same.
_DRAWN = ("rand", "razor")

# The search whose budget is a tenth of the published procedure's at the same kappa.
OURS = "bosch_plus"

Results = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Search:
    """One run of a method: what it found, what that cost, and stage 1's view of the layers."""

    mask: HeadMask
    score: float
    log_likelihood: float
    costs: dict[str, float]
    layers: list[dict[str, float]]
    full_log_likelihood: float


def variants(methods: Sequence[str], budgets: Sequence[int]) -> list[tuple[str, int | None]]:
    """Methods with the budgets they run at; None for those that have none to spend.

    `bosch_plus` spends kappa L / 10 evaluations where the published procedure spends 2 kappa L:
    besides the same kappa it gets ten times the largest one.
    """
    found: list[tuple[str, int | None]] = []
    for method in methods:
        if method not in SEARCHES:
            found.append((method, None))
            continue
        more = (10 * max(budgets),) if method == OURS else ()
        found += [(method, budget) for budget in (*budgets, *more)]
    return found


def _named(settings: SearchSettings) -> Record:
    """Settings that differ from the defaults: a cell outlives the arrival of new options."""
    usual = asdict(SearchSettings(swa_ratio=settings.swa_ratio))
    given = {name: value for name, value in asdict(settings).items() if value != usual[name]}
    return {**given, "swa_ratio": settings.swa_ratio, "seed": settings.seed}


class Subject:
    """Searches and measures one model; what `cells` knows is not done again.

    Raises UserError when model, tokenizer or haystack are missing or damaged.
    """

    def __init__(self, config: StudyConfig, folder: Path) -> None:
        self.config, self.folder = config, folder
        self.cells = Cells(folder / "cells.jsonl")
        self._sets: dict[tuple[SeedSpace, int, int], CalibrationSet] = {}
        self._objectives: dict[str, Objective] = {}

    @cached_property
    def model(self) -> Any:
        model = self.config.model
        loaded = load_model(
            model.path,
            dtype=model.dtype,
            device="cuda" if torch.cuda.is_available() else "cpu",
            revision=model.revision,
            trust_remote_code=model.trust_remote_code,
        )
        prepare_for_search(loaded, self.config.runtime.attention)
        return loaded

    @cached_property
    def fingerprint(self) -> str:
        """Identity of the model."""
        return model_fingerprint(self.model)

    @property
    def shape(self) -> tuple[int, int]:
        """Layers and KV heads."""
        return mask_shape(self.model.config)

    def examples(self, space: SeedSpace, seed: int, count: int) -> CalibrationSet:
        """Teacher-forced questions of the recipe's tasks and length."""
        known = self._sets.get((space, seed, count))
        if known is None:
            wanted = self.config.calibration
            made = forced_records(
                wanted.tasks, count, wanted.length, space, seed, self._tokenizer, self._words,
                wanted.questions_per_haystack if space == "calibration" else 1,
            )  # fmt: skip
            known = CalibrationSet.from_records(record for _, record in made)
            self._sets[space, seed, count] = known
        return known

    def objective(self, examples: CalibrationSet) -> Objective:
        """Measures masks on `examples`; what its passes left behind serves later ones."""
        key = examples.fingerprint
        if key not in self._objectives:
            self._objectives[key] = self._new_objective(examples)
        return self._objectives[key]

    def _new_objective(self, examples: CalibrationSet) -> Objective:
        search = self.config.search
        return Objective(
            self.model,
            examples,
            search.window_size,
            search.sinks,
            batch_size=self.config.runtime.eval_batch_size,
        )

    def calibration(self, seed: int, examples: int | None = None) -> CalibrationSet:
        """The calibration set of study seed `seed`; a smaller one is the beginning of a larger."""
        count = self.config.calibration.examples if examples is None else examples
        return self.examples("calibration", self.config.seed + seed, count)

    @cached_property
    def held_out_set(self) -> CalibrationSet:
        """Questions whose needles no calibration set and no training document holds."""
        return self.examples("evaluation", self.config.seed, self.config.options.held_out)

    def search(
        self,
        method: str,
        ratio: float,
        seed: int,
        *,
        budget: int | None = None,
        examples: int | None = None,
        calibration_seed: int | None = None,
        log: EvaluationLog | None = None,
    ) -> Search:
        """Run `method` with search seed `seed`, on that seed's own calibration set by default.

        With a `log` that is shared the costs are not this run's own.
        """
        drawn = seed if calibration_seed is None else calibration_seed
        calibration = self.calibration(drawn, examples)
        settings = self.settings(ratio, seed, budget)
        if method not in SEARCHES:  # no budget to spend: one run serves every budget
            settings = replace(settings, budget_per_layer=1)
            if method not in _DRAWN:
                settings = replace(settings, seed=self.config.seed)
        key = {
            "kind": "search",
            "method": method,
            "settings": _named(settings),
            "shared_log": log is not None,
            **self._context(calibration),
        }
        digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
        under_way = self.folder / f"under-way-{digest[:16]}.jsonl"
        record = self.cells.once(
            key, lambda: self._searched(method, settings, calibration, log, under_way)
        )
        under_way.unlink(missing_ok=True)
        return Search(**{**record, "mask": HeadMask.from_key(record["mask"])})

    def settings(self, ratio: float, seed: int, budget: int | None = None) -> SearchSettings:
        """The recipe's settings of a search, with another ratio, seed or budget per layer."""
        settings = search_settings(self.config.search, self.config.seed + seed)
        settings = replace(settings, swa_ratio=ratio)
        return settings if budget is None else replace(settings, budget_per_layer=budget)

    def held_out(self, mask: HeadMask) -> Results:
        """Exact match and log-likelihood of each held-out example, [E, 2]."""
        key = {"kind": "held_out", "mask": mask.key, **self._context(self.held_out_set)}

        def compute() -> Record:
            results = self.objective(self.held_out_set).example_results(mask).T.tolist()
            return {"exact": results[0], "log_likelihood": results[1]}

        record = self.cells.once(key, compute)
        return np.array([record["exact"], record["log_likelihood"]]).T

    def held_out_over_seeds(self, masks: list[HeadMask]) -> tuple[Results, Results]:
        """Exact match and log-likelihood of the masks of all seeds, each [S, E]."""
        results = np.stack([self.held_out(mask) for mask in masks])
        return results[:, :, 0], results[:, :, 1]

    def _searched(
        self,
        method: str,
        settings: SearchSettings,
        calibration: CalibrationSet,
        log: EvaluationLog | None,
        under_way: Path,
    ) -> Record:
        """Run a search; its evaluations are kept in `under_way`, should it be stopped.

        Unless its evaluations are shared, it finds nothing that another search left behind: what
        it costs is its own.
        """
        if log is not None:
            objective = self.objective(calibration)
        else:
            objective = self._new_objective(calibration)
            log = EvaluationLog(under_way, objective.context)
        # Other processes on the machine slow a search down, but do not use its processor time.
        clock = time.process_time if self.model.device.type == "cpu" else time.perf_counter
        started = clock()
        run = run_method(method, objective, settings, log=log)
        seconds = clock() - started
        full = next(point for point in run.trace if point.unit == "all full")
        logger.info(
            "%s at %.4g, seed %d: score %.4f, log-likelihood %.3f, %.1f full passes",
            method, settings.swa_ratio, settings.seed, run.result.evaluation.score,
            run.result.evaluation.log_likelihood, run.costs["full_forward_equivalents"],
        )  # fmt: skip
        return {
            "mask": run.mask.key,
            "score": run.result.evaluation.score,
            "log_likelihood": run.result.evaluation.log_likelihood,
            "costs": {**run.costs, "seconds": seconds},
            "layers": run.result.layers,
            "full_log_likelihood": full.log_likelihood,
        }

    def _context(self, examples: CalibrationSet) -> Record:
        search = self.config.search
        return {
            "version": SEARCH_VERSION,
            "model": self.fingerprint,
            "examples": examples.fingerprint,
            "window_size": search.window_size,
            "sinks": search.sinks,
        }

    @cached_property
    def _tokenizer(self) -> Any:
        from data_prep.tokenize import TokenizerSpec, load_tokenizer

        model = self.config.model
        return load_tokenizer(TokenizerSpec(model.path, model.revision, model.trust_remote_code))

    @cached_property
    def _words(self) -> list[str]:
        return haystack_words(self.config.calibration.essay_dir)
