"""The model under study: its calibration sets, searches and held-out scores, computed once.

E is the number of held-out examples.
"""

from __future__ import annotations

import gc
import hashlib
import json
import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from bosch.budget import swa_budget
from bosch.errors import UserError
from bosch.heads import HeadMask, HeadMaskFile
from bosch.model.families import text_config
from bosch.model.fingerprint import model_fingerprint
from bosch.model.loading import load_model
from bosch.model.search_mode import mask_shape, prepare_for_search
from bosch.objective.answers import model_results
from bosch.objective.calibration import CalibrationSet
from bosch.objective.evaluation_log import EvaluationLog
from bosch.objective.objective import Objective
from bosch.search.evaluator import SlotBudgets
from bosch.search.methods import METHODS
from bosch.search.runs import run_method
from bosch.search.settings import SearchSettings
from bosch.window import Window, Windows, window_menu
from data_prep.documents.calibration import forced_records
from data_prep.documents.tokenizer import TokenizerSpec, load_tokenizer
from data_prep.tasks.needles import SeedSpace
from data_prep.text import haystack_words
from pipeline.commands.paths import model_label
from pipeline.commands.study import StudyOptions
from pipeline.run.launch import Launcher, launch
from pipeline.run.runner import Runner, RunOptions
from stages.finished import FinishedWork, Record
from stages.formats import counted
from stages.prepare.stage import PrepareConfig
from stages.search.stage import STAGE as SEARCH
from stages.search.stage import SearchConfig
from stages.stage import LoadedRecipe
from stages.train.stage import STAGE as TRAIN
from stages.train.stage import TrainConfig, checkpoint_folders

logger = logging.getLogger(__name__)

# At equal kappa this method makes at most a tenth of the published procedure's evaluations.
BOSCH_PLUS = "bosch_plus"

Results = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Setting:
    """Settings of a search, besides its seed; None means the recipe's value.

    With a `menu`, sliding heads may have any of its windows, within the ratio's slots.
    """

    method: str
    ratio: float
    budget: int | None = None
    granularity: int | None = None
    examples: int | None = None
    menu: tuple[Window, ...] | None = None


@dataclass(frozen=True)
class SearchOutcome:
    """One run of a method: its mask, score, costs, and the layer rows of Algorithm 1."""

    mask: HeadMask
    score: float
    log_likelihood: float
    costs: dict[str, float]
    layers: list[dict[str, float]]
    full_log_likelihood: float
    examples: int = 0  # calibration examples; 0 in results of earlier versions


def variants(methods: Sequence[str], budgets: Sequence[int]) -> list[tuple[str, int | None]]:
    """Methods with the values of kappa they run at; None for methods that do not search.

    `bosch_plus` makes kappa L / 10 evaluations, the published procedure 2 kappa L. So `bosch_plus`
    also gets ten times the largest kappa.
    """
    pairs: list[tuple[str, int | None]] = []
    for method in methods:
        if not METHODS[method].searches:
            pairs.append((method, None))
            continue
        largest = (10 * max(budgets),) if method == BOSCH_PLUS else ()
        pairs += [(method, budget) for budget in (*budgets, *largest)]
    return pairs


def _changed_settings(settings: SearchSettings) -> Record:
    """Settings that differ from the defaults, so that new options do not change results' keys."""
    defaults = asdict(SearchSettings(swa_ratio=settings.swa_ratio))
    changed = {name: value for name, value in asdict(settings).items() if value != defaults[name]}
    return {**changed, "swa_ratio": settings.swa_ratio, "seed": settings.seed}


def _windows_key(menu: tuple[Window, ...]) -> Record:
    """Window and sinks for a key; for several windows the ascending sizes."""
    sizes = [window.size for window in menu[::-1]]
    return {"window_size": sizes[0] if len(sizes) == 1 else sizes, "sinks": menu[0].sinks}


def _device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def digest_of(key: Record) -> str:
    """Short digest of a key, for file names."""
    return hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]


class StudiedModel:
    """Searches and measures one model; results in `finished` are not computed again.

    Raises UserError when model, tokenizer or haystack are missing or damaged.
    """

    def __init__(
        self, loaded: LoadedRecipe, options: StudyOptions, folder: Path, launcher: Launcher = launch
    ) -> None:
        recipe = loaded.recipe
        self.loaded, self.recipe, self.options, self.folder = loaded, recipe, options, folder
        self.launcher = launcher
        folder.mkdir(parents=True, exist_ok=True)
        self.finished = FinishedWork(folder / "results.jsonl")
        if len(self.finished):
            logger.info("%d results exist already", len(self.finished))
        self._sets: dict[tuple[SeedSpace, int, int], CalibrationSet] = {}
        self._objectives: dict[tuple[str, Windows | None], Objective] = {}

    @cached_property
    def model(self) -> Any:
        model = self.recipe.model
        loaded = load_model(model.path, device=_device(), **model.loading)
        prepare_for_search(loaded, self.recipe.runtime.attention)
        return loaded

    @cached_property
    def fingerprint(self) -> str:
        return model_fingerprint(self.model)

    @property
    def label(self) -> str:
        return model_label(self.recipe.model.path)

    @property
    def window(self) -> Window:
        """The window of sliding heads in settings without a menu."""
        return self.recipe[SearchConfig].window

    @cached_property
    def shape(self) -> tuple[int, int]:
        return mask_shape(self.model.config)

    def examples(self, space: SeedSpace, seed: int, count: int) -> CalibrationSet:
        """Teacher-forced questions of the recipe's tasks and length, or of the examples file."""
        key = space, seed, count
        if key not in self._sets and self._file is not None:
            self._sets[key] = self._file_examples(self._file, space, seed, count)
        if key not in self._sets:
            config = self.recipe[PrepareConfig].calibration
            records = forced_records(
                config.tasks, count, config.length, space, seed, self._tokenizer, self._words
            )
            self._sets[key] = CalibrationSet.from_records(record for _, record in records)
        return self._sets[key]

    def _file_examples(
        self, file: CalibrationSet, space: SeedSpace, seed: int, count: int
    ) -> CalibrationSet:
        """The file's last examples for evaluation, `count` others at random for calibration.

        Raises UserError if the file has too few of either.
        """
        remaining = len(file) - self.options.held_out
        least = self.recipe[PrepareConfig].calibration.examples
        if space == "calibration":
            least = count
        if remaining < least:
            raise UserError(
                f"--examples: {self.options.examples} holds {len(file)} examples, too few for "
                f"{self.options.held_out} to hold out (--held-out) and {least} to calibrate on "
                "(prepare.calibration.examples, or --sizes)"
            )
        if space == "evaluation":
            return CalibrationSet(file.examples[remaining:])
        shuffled = Random(seed).sample(file.examples[:remaining], remaining)
        return CalibrationSet(tuple(shuffled[:count]))

    @cached_property
    def _file(self) -> CalibrationSet | None:
        path = self.options.examples
        if path is None:
            return None
        examples = CalibrationSet.load(Path(path), "name another file")
        largest = max(max(example.input_ids) for example in examples.examples)
        if largest >= (vocabulary := text_config(self.model.config).vocab_size):
            raise UserError(
                f"--examples: {path} has the token id {largest:,}, the model's vocabulary ends at "
                f"{vocabulary - 1:,}; expected examples in its own tokens"
            )
        return examples

    @property
    def about_examples(self) -> str:
        """Size and kind of the calibration sets and of the held-out examples, for pages."""
        config, path = self.recipe[PrepareConfig].calibration, self.options.examples
        sets = f"calibration sets of {counted(config.examples, 'example')}"
        if path is None:
            sets += f" of {config.length} tokens"
            kind = f" of the same length and tasks ({', '.join(config.tasks)})"
        else:
            sets += f" of up to {self.held_out_set.max_length} tokens from {model_label(path)}"
            kind = " of the same file"
        return f"{sets}, {counted(len(self.held_out_set), 'held-out example')}{kind}"

    def objective(self, examples: CalibrationSet, window: Windows | None = None) -> Objective:
        """An objective on `examples`, whose passes reuse cached activations.

        Sliding heads have the `window`, or one of several; by default the recipe's.
        """
        key = examples.fingerprint, window
        if key not in self._objectives:
            self._objectives[key] = self._new_objective(examples, window)
        return self._objectives[key]

    def _new_objective(self, examples: CalibrationSet, window: Windows | None) -> Objective:
        window, runtime = window or self.window, self.recipe.runtime
        return Objective(
            self.model, examples, window, batch_size=runtime.eval_batch_size
        )  # fmt: skip

    def calibration(self, seed: int, examples: int | None = None) -> CalibrationSet:
        """The calibration set of study seed `seed`; smaller sets are prefixes of larger ones."""
        count = self.recipe[PrepareConfig].calibration.examples if examples is None else examples
        return self.examples("calibration", self.recipe.seed + seed, count)

    @cached_property
    def held_out_set(self) -> CalibrationSet:
        """Questions whose needles are in no calibration set and no training document.

        With a file of examples, its last ones.
        """
        return self.examples("evaluation", self.recipe.seed, self.options.held_out)

    def search(
        self,
        setting: Setting,
        seed: int,
        *,
        calibration_seed: int | None = None,
        log: EvaluationLog | None = None,
    ) -> SearchOutcome:
        """Search with seed `seed`, on that seed's own calibration set by default.

        With a shared `log` the costs are not those of an independent run.
        """
        method, ratio, menu = setting.method, setting.ratio, setting.menu
        set_seed = seed if calibration_seed is None else calibration_seed
        calibration = self.calibration(set_seed, setting.examples)
        settings = self.settings(ratio, seed, setting.budget)
        if setting.granularity is not None:
            settings = replace(settings, head_granularity=setting.granularity)
        if not METHODS[method].searches:  # without a budget, so one run serves all budgets
            settings = replace(settings, budget_per_layer=1)
            if not METHODS[method].seeded:
                settings = replace(settings, seed=self.recipe.seed)
        key = {
            "kind": "search", "method": method, "settings": _changed_settings(settings),
            "shared_log": log is not None, **self.context(calibration),
        }  # fmt: skip
        if menu is not None:
            key |= {**_windows_key(menu), "slots": self.slots(ratio)}
        unfinished = self.folder / f"under-way-{digest_of(key)}.jsonl"
        record = self.finished.once(
            key, lambda: self._run_search(method, settings, calibration, menu, log, unfinished)
        )
        unfinished.unlink(missing_ok=True)
        return SearchOutcome(**{**record, "mask": HeadMask.from_key(record["mask"])})

    def slots(self, ratio: float) -> int:
        """KV slots of masks with this ratio and the recipe's window, at the longest example."""
        units, tokens = math.prod(self.shape), self.held_out_set.max_length
        sliding = swa_budget(units, ratio)
        return (units - sliding) * tokens + sliding * self.window.held(tokens)

    def settings(self, ratio: float, seed: int, budget: int | None = None) -> SearchSettings:
        """The recipe's settings of a search, with another ratio, seed or budget per layer."""
        settings = self.recipe[SearchConfig].settings(0, ratio)
        settings = replace(settings, seed=self.recipe.seed + seed)
        return settings if budget is None else replace(settings, budget_per_layer=budget)

    def held_out(self, mask: HeadMask, window: Windows | None = None) -> Results:
        """Exact match and log-likelihood of each held-out example, [E, 2], as `objective`."""
        key = {"kind": "held_out", "mask": mask.key, **self.context(self.held_out_set)}
        if window is not None:
            key |= _windows_key(window_menu(window))

        return self._results_once(
            key, lambda: self.objective(self.held_out_set, window).example_results(mask)
        )

    def _results_once(self, key: Record, compute: Callable[[], Any]) -> Results:
        names = "exact", "log_likelihood"
        record = self.finished.once(
            key, lambda: dict(zip(names, compute().T.tolist(), strict=True))
        )
        return np.array([record[name] for name in names]).T

    def trained(self, mask: HeadMask, window: Windows | None = None) -> Results:
        """As `held_out`, for the hybrid that the recipe's stages make with this mask and train.

        Results in the store are reused; the model is released while stages run. Raises UserError
        and RunError as the stages.
        """
        runner = Runner(self._with_mask(mask, window), RunOptions(), self.launcher)
        runner.hasher.save()
        train = next(node for node in runner.nodes if node.name == TRAIN.name)
        examples, key = self.held_out_set, str(train.key)

        def compute() -> Any:
            self.release()
            runner.run()
            folders = checkpoint_folders(runner.store.published(TRAIN.name, key))
            loading = {**self.recipe.model.loading, "revision": None}
            hybrid = load_model([*folders.values()][-1], device=_device(), **loading)
            return model_results(hybrid, examples, self.recipe.runtime.eval_batch_size)

        return self._results_once(
            {"kind": "trained", "train": key, "examples": examples.fingerprint}, compute
        )

    def _with_mask(self, mask: HeadMask, windows: Windows | None) -> LoadedRecipe:
        """The recipe with this mask instead of a search, up to training."""
        search, train = self.recipe[SearchConfig], self.recipe[TrainConfig]
        menu = search.menu if windows is None else window_menu(windows)
        file = HeadMaskFile.of(
            mask, menu, model=self.label, method="given",
            swa_ratio=mask.swa_ratio,
        )  # fmt: skip
        name = digest_of({"mask": mask.key, **_windows_key(menu)})
        path = self.folder / "masks" / f"{name}.json"
        file.save(path)
        sizes = [window.size for window in menu[::-1]]
        has_several = len(menu) > 1
        changes = {
            "method": "given",
            "mask": str(path.resolve()),
            "swa_ratio": mask.swa_ratio,
            "budget": None,
            "points": None,
            "head_granularity": 1,
            "sinks": menu[0].sinks,
            "windows": sizes if has_several else None,
            "window_size": None if has_several else sizes[0],
        }
        sections = {
            "name": f"{self.recipe.name}/study/trained/{name}",
            "search": search.model_copy(update=changes),
            "train": train.model_copy(update={"budgets": None}),
        }
        recipe = self.recipe.model_copy(update=sections)
        return replace(self.loaded, recipe=recipe).up_to(TRAIN.name)

    def release(self) -> None:
        """Free the model's memory; it is loaded again when it is needed."""
        self._objectives.clear()
        self.__dict__.pop("model", None)
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def _run_search(
        self,
        method: str,
        settings: SearchSettings,
        calibration: CalibrationSet,
        menu: tuple[Window, ...] | None,
        log: EvaluationLog | None,
        unfinished: Path,
    ) -> Record:
        """Run a search, with its evaluations in `unfinished`, from which it can resume.

        Unless evaluations are shared, it reuses nothing of other searches, so that its costs are
        those of an independent run.
        """
        if log is not None:
            objective = self.objective(calibration, menu)
        else:
            objective = self._new_objective(calibration, menu)
            log = EvaluationLog(unfinished, objective.context)
        # Processor time, since other processes may slow a search down.
        clock = time.process_time if self.model.device.type == "cpu" else time.perf_counter
        started = clock()
        slots = None
        if menu is not None:
            tokens, count = self.held_out_set.max_length, self.slots(settings.swa_ratio)
            slots = SlotBudgets(tokens, (count,), count)
        run = run_method(method, objective, settings, log=log, slot_budgets=slots)
        # Passes before a stop happened before this start.
        seconds = clock() - started + run.costs["earlier_seconds"]
        full = next(point for point in run.trace if point.subproblem == "all full")
        logger.info(
            "%s at %.4g, seed %d: score %.4f, log-likelihood %.3f, %.1f full passes",
            method,
            settings.swa_ratio,
            settings.seed,
            run.result.evaluation.score,
            run.result.evaluation.log_likelihood,
            run.costs["full_forward_equivalents"],
        )
        return {
            "mask": run.mask.key,
            "score": run.result.evaluation.score,
            "log_likelihood": run.result.evaluation.log_likelihood,
            "costs": {**run.costs, "seconds": seconds},
            "layers": run.result.layers,
            "full_log_likelihood": full.log_likelihood,
            "examples": len(calibration),
        }

    def context(self, examples: CalibrationSet) -> Record:
        """All that results on `examples` depend on besides mask and settings."""
        return {
            "version": SEARCH.version,
            "model": self.fingerprint,
            "examples": examples.fingerprint,
            "window_size": self.window.size,
            "sinks": self.window.sinks,
        }

    @cached_property
    def _tokenizer(self) -> Any:
        model = self.recipe.model
        return load_tokenizer(TokenizerSpec(model.path, model.revision, model.trust_remote_code))

    @cached_property
    def _words(self) -> list[str]:
        return haystack_words(self.recipe[PrepareConfig].calibration.essay_dir)
