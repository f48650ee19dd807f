"""RULER: its section of the recipe."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, get_args

from pydantic import AfterValidator, Field

from bosch.model.yarn import original_positions, yarn_fault
from data_prep.tasks.tables import DATA_FILES, NEW_TOKENS, NeedleTask, RulerTask
from stages.evaluate.section import SuiteSection, Work
from stages.faults import Fault
from stages.fields import Count, Number, PathText, different
from stages.inputs import Hasher, Input, prose
from stages.stage import LoadedRecipe


def _ruler_files(needle: NeedleEvaluation, folder: str | None, hasher: Hasher) -> dict[str, Any]:
    """Content hashes of the existing files of the recipe's tasks."""
    names = [name for task, name in DATA_FILES.items() if task in needle.tasks]
    files = [Path(folder, name) for name in names] if folder is not None else []
    return {path.name: hasher.sha256(path) for path in files if path.is_file()}


class NeedleEvaluation(SuiteSection):
    """RULER (NVIDIA/RULER at commit c3f5e3b)."""

    title = "Needle"
    runner = "stages.evaluate.suites.needle.suite:NeedleSuite"
    rank = 0
    by_default = True

    tasks: Annotated[list[RulerTask], AfterValidator(different)] = Field(
        default=list(get_args(NeedleTask)), min_length=1
    )
    """Tasks; the average is their unweighted mean."""
    lengths: Annotated[list[Count], AfterValidator(different)] = Field(
        default=[4096, 8192, 16384, 32768], min_length=1
    )
    """Tokens of a sample, including generated ones."""
    samples: Count = 500
    """Samples per task and length."""
    max_new_tokens: Count | None = None
    """Tokens generated, counted inside the length; default: RULER's for each task."""
    yarn: dict[Count, Annotated[Number, Field(gt=1, le=1024)]] = Field(default={})
    """Lengths at which RoPE is stretched by YaRN, each with its factor, like {64k: 2, 128k: 4}; for
    all models, only in this evaluation."""
    yarn_original_length: Count | None = None
    """Length that YaRN stretches; default: original_max_position_embeddings of the model's
    config.json or card, else its max_position_embeddings."""
    essay_dir: Annotated[PathText | None, prose()] = None
    """Folder of prose for essay haystacks; default: pydoc's topics."""
    data_dir: Annotated[PathText | None, Input(_ruler_files)] = None
    """Folder with the files that RULER downloads: squad.json (qa_1), hotpotqa.json (qa_2),
    english_words.json (cwe, where a length needs more words than there are)."""

    def new_tokens(self, task: str) -> int:
        """Tokens that a model may generate in a task."""
        return NEW_TOKENS[task] if self.max_new_tokens is None else self.max_new_tokens

    def faults(self, loaded: LoadedRecipe, where: str) -> Iterator[Fault]:
        yield from self._yarn_faults(loaded, where)
        for length in self.lengths:
            new_tokens = max(self.new_tokens(task) for task in self.tasks)
            if new_tokens >= length:
                yield Fault(
                    f"{where}.max_new_tokens",
                    f"{new_tokens:,} leaves no room for a prompt in {where}.lengths = {length:,}",
                )

    def chat_faults(self, loaded: LoadedRecipe, where: str) -> Iterator[Fault]:
        """Lengths with less than two positions left, which a chat template needs at least."""
        for length, (limit, limit_text) in self._position_limits(loaded).items():
            if limit - 2 < length <= limit:
                yield Fault(
                    f"{where}.lengths",
                    f"{length:,} leaves no room for evaluate.chat_template in {limit_text}; lower "
                    f"it by about a hundred, or set a larger factor in {where}.yarn",
                )

    def _yarn_faults(self, loaded: LoadedRecipe, where: str) -> Iterator[Fault]:
        """Lengths beyond the model's positions without a sufficient YaRN factor."""
        for length in set(self.yarn) - set(self.lengths):
            yield Fault(f"{where}.yarn", f"{length:,} is not among {where}.lengths")
        fault = yarn_fault(loaded.info.config) if loaded.info is not None and self.yarn else None
        if fault is not None:
            yield Fault(f"{where}.yarn", f"RoPE cannot be stretched: {fault}")
        trained = self._trained_length(loaded) or loaded.positions or 1
        for length, (limit, limit_text) in self._position_limits(loaded).items():
            if length > limit:
                yield Fault(
                    f"{where}.{'yarn' if length in self.yarn else 'lengths'}",
                    f"{length:,} is more than {limit_text}; set {where}.yarn, like "
                    f"{{{length}: {math.ceil(length / trained)}}}",
                )

    def _position_limits(self, loaded: LoadedRecipe) -> dict[int, tuple[float, str]]:
        """By length, the positions at its YaRN factor, and how a message names them."""
        limit = loaded.positions
        trained = self._trained_length(loaded) or limit
        limits: dict[int, tuple[float, str]] = {}
        for length in self.lengths:
            factor = self.yarn.get(length)
            if factor is not None and trained is not None:
                text = f"{factor:g} times the {trained:,} that YaRN stretches"
                limits[length] = trained * factor, text
            elif limit is not None:
                limits[length] = limit, f"the model's {limit:,} positions"
        return limits

    def _trained_length(self, loaded: LoadedRecipe) -> int | None:
        """The length that YaRN stretches, if recipe, config.json or model card have it."""
        info = loaded.info
        if not self.yarn:
            return None
        if self.yarn_original_length is not None or info is None:
            return self.yarn_original_length
        card = info.directory / "README.md" if info.directory is not None else None
        return original_positions(info.config, card)

    def missing(self, loaded: LoadedRecipe, where: str) -> Iterator[Fault]:
        for task in self.tasks:
            fault = missing_ruler_file(task, self.data_dir)
            if fault is not None:
                yield Fault(f"{where}.data_dir", fault)

    def work(self) -> list[Work]:
        samples = self.samples * len(self.tasks)
        generated = self.samples * sum(map(self.new_tokens, self.tasks))
        return [Work(samples, length, self.samples, generated) for length in self.lengths]


def missing_ruler_file(task: str, folder: str | None) -> str | None:
    """Why the samples of a RULER task cannot be made, or None."""
    name = DATA_FILES.get(task) if task != "cwe" else None  # the built-in words may suffice
    if name is None or (folder is not None and Path(folder, name).is_file()):
        return None
    where = f"{folder} holds none" if folder is not None else "none is named"
    return f"{task} needs a folder with {name}, as RULER downloads it; {where}"


SUITE = NeedleEvaluation
