"""What the studies share: a recipe's model and questions, one run of a search, and tables."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bosch.analysis.intervals import student
from bosch.masks import HeadMask
from bosch.model.loading import load_model
from bosch.model.search_mode import mask_shape, prepare_for_search
from bosch.score.calibration import CalibrationSet
from bosch.score.evaluation_log import EvaluationLog
from bosch.score.objective import Objective
from bosch.search.methods import METHODS
from bosch.search.runs import MethodRun, run_method
from data_prep.documents.calibration import needle_prompts
from data_prep.documents.tokenizer import TokenizerSpec, load_tokenizer
from data_prep.text import haystack_words
from pipeline.recipe.load import load_recipe
from stages.evaluate.chat import ChatConfig
from stages.evaluate.lm import LanguageModel
from stages.formats import interval, signed
from stages.prepare.stage import PrepareConfig
from stages.search.examples import answered
from stages.search.stage import SearchConfig

PAPER_METHODS = ("intr", "razor", "fisher", "bosch", "bosch_plus")


class StudiedModel:
    """A recipe's model in search mode, with its calibration set and other questions held out.

    The questions are the recipe's needles, or drawn from a file of `examples`.
    """

    def __init__(
        self, recipe: str, changes: Sequence[str], held_out: int, examples: Path | None = None
    ) -> None:
        self.recipe = load_recipe(recipe, changes).recipe
        self.examples = None if examples is None else CalibrationSet.load(examples).examples
        model = self.recipe.model
        device = "cuda" if torch.cuda.is_available() else "cpu"
        self.model = load_model(model.path, device=device, **model.loading)
        self.shape = mask_shape(self.model.config)
        prepare_for_search(self.model, self.recipe.runtime.attention)
        self.held_out = self.questions("evaluation", held_out, 0)
        self.calibrate(0)

    def calibrate(self, seed: int) -> None:
        """Search on the examples of this seed."""
        examples = self.recipe[PrepareConfig].calibration.examples
        self.calibration = self.questions("calibration", examples, seed)

    def questions(
        self, space: Any, count: int, seed: int, tasks: Sequence[str] | None = None
    ) -> Objective:
        """Questions that the model answers right; the two spaces share no needle."""
        config, model = self.recipe[PrepareConfig].calibration, self.recipe.model
        window, size = self.recipe[SearchConfig].window, self.recipe.runtime.eval_batch_size
        if self.examples is not None:  # the first ones are held out
            first = len(self.examples) // 2 if space == "calibration" else 0
            drawn = np.random.default_rng(seed).permutation(len(self.examples) // 2)[:count]
            own = CalibrationSet(tuple(self.examples[first + index] for index in drawn))
            return Objective(self.model, own, window, batch_size=size)
        tokenizer = load_tokenizer(
            TokenizerSpec(model.path, model.revision, model.trust_remote_code)
        )
        prompts = needle_prompts(
            tasks or config.tasks, count, config.length, config.new_tokens, space,
            self.recipe.seed + seed, tokenizer, haystack_words(config.essay_dir),
        )  # fmt: skip
        records = answered(LanguageModel(self.model, tokenizer, ChatConfig(), size), list(prompts))
        examples = CalibrationSet.from_records(
            (r["input_ids"], r["answer_length"]) for r in records
        )
        return Objective(self.model, examples, window, batch_size=size)

    def search(
        self, method: str, ratio: float, seed: int, log: EvaluationLog | None = None, **changes: Any
    ) -> MethodRun:
        """One run of a method on the calibration set; masks in `log` are not measured again.

        `changes` are of `SearchSettings`.
        """
        settings = self.recipe[SearchConfig].settings(0, ratio)
        settings = replace(settings, seed=self.recipe.seed + seed, **changes)
        return run_method(method, self.calibration, settings, log=log)

    def seeds_of(self, method: str, seeds: int) -> range:
        """The seeds that may give different masks."""
        return range(seeds if "seed" in METHODS[method].settings else 1)

    def held_out_score(self, mask: HeadMask) -> tuple[float, float]:
        """Score and log-likelihood on the questions that no search has seen."""
        found = self.held_out.evaluate(mask)
        return found.score, found.log_likelihood


def options(description: str | None, ratios: str) -> argparse.ArgumentParser:
    """The options of a study on a recipe's model."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("recipe", help="a recipe, like recipes/study/enumerable.yaml")
    parser.add_argument("changes", nargs="*", metavar="KEY=VALUE", help="changes of the recipe")
    parser.add_argument("--ratios", type=_numbers, default=_numbers(ratios), metavar="RHO,RHO,…")
    parser.add_argument(
        "--methods", type=lambda text: tuple(text.split(",")), default=PAPER_METHODS,
        metavar="NAME,NAME,…", help=f"among {', '.join(METHODS)}",
    )  # fmt: skip
    parser.add_argument("--budget", type=int, default=16, help="κ, evaluations per layer")
    parser.add_argument("--seeds", type=int, default=3, help="seeds of methods that draw at random")
    parser.add_argument("--held-out", type=int, default=48, help="questions that no search sees")
    parser.add_argument("--examples", type=Path, help="questions instead of needles, as JSON lines")
    return parser


def _numbers(text: str) -> tuple[float, ...]:
    return tuple(sorted({float(part) for part in text.split(",")}))


def command(module: str) -> str:
    """The command that made a page, for its head."""
    return f"    python -m {module} {shlex.join(sys.argv[1:])}\n"


def table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A Markdown table; floats have three decimals, and all columns but the first are numbers."""
    cells = [[f"{x:.3f}" if isinstance(x, float) else str(x) for x in row] for row in rows]
    lines = [list(header), ["---", *["---:"] * (len(header) - 1)], *cells]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def mean_difference(values: Sequence[float]) -> str:
    """The mean difference of pairs with its interval, which fewer than five do not have."""
    if not values:
        return ""
    mean, low, high = student(values)
    ends = "" if low is None or high is None else f" {interval(low, high, 3)}"
    return f"{signed(mean, 3)}{ends}"


def spread(values: Sequence[float]) -> str:
    """The mean, and the ends of the range if the values differ."""
    mean = sum(values) / len(values)
    if min(values) == max(values):
        return f"{mean:.3f}"
    return f"{mean:.3f} ({min(values):.3f} to {max(values):.3f})"
