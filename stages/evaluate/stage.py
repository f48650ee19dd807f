"""Stage evaluate: scores of the untrained hybrid and every checkpoint."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Self

from pydantic import AfterValidator, Field, create_model

from bosch.search.methods import UnsearchedName
from bosch.window import Window, windows_text
from stages.evaluate.chat import has_template
from stages.evaluate.presets import PRESETS, Benchmark, PresetName, benchmarks
from stages.evaluate.section import SuiteSection
from stages.evaluate.suites import SUITES
from stages.fields import Count, Flag, Section, different
from stages.search.stage import SearchConfig, window_faults
from stages.stage import LoadedRecipe, Recipe, Stage


class _Prompts(Section):
    """Fields for the prompts of all suites."""

    presets: Annotated[list[PresetName], AfterValidator(different)] = Field(default=[])
    """Lists of benchmarks that add their tasks to needle and harness: short (MMLU, ARC, HellaSwag,
    WinoGrande, GSM8K), long (RULER, LongBench v1 and v2, BABILong, LongProc, GraphWalks,
    InfiniteBench), reasoning (MATH500, AIME). What cannot be run has no score; `validate` names
    it."""
    chat_template: Flag = False
    """Whether prompts are put into the tokenizer's chat template, which instruct models need;
    LongBench's few-shot and code tasks stay raw, as its authors ask them."""


# A field for each suite.
if TYPE_CHECKING:
    _Suites = _Prompts
else:
    _Suites = create_model(
        "_Suites",
        __base__=_Prompts,
        **{
            name: (suite | None, suite() if suite.by_default else None)
            for name, suite in SUITES.items()
        },
    )


class EvaluateConfig(_Suites):
    """Scores of the original, the untrained hybrid and every checkpoint."""

    rivals: Annotated[list[UnsearchedName], AfterValidator(different)] = Field(default=[])
    """Layer rules and rankings for comparison with the search: their untrained hybrids, at its
    ratio and window, answer the same samples."""
    windows: Annotated[list[Count], AfterValidator(different)] = Field(default=[])
    """Further window sizes at which the untrained masks of the search and the rivals are scored,
    like [256, 512, 2k, 4k]."""

    def completed(self, recipe: Recipe) -> Self:
        """The section with the tasks of its presets, which are optional."""
        added: dict[str, list[Benchmark]] = {}
        for benchmark in benchmarks(self.presets):
            if benchmark.tasks:
                added.setdefault(benchmark.suite, []).append(benchmark)
        sections = {name: getattr(self, name) or SUITES[name]() for name in added}
        return self.model_copy(
            update={
                name: section.with_benchmarks(added[name]) for name, section in sections.items()
            }
        )

    @property
    def suites(self) -> dict[str, SuiteSection]:
        """The sections of the suites that the recipe has, by name."""
        sections = {name: getattr(self, name) for name in SUITES}
        return {name: section for name, section in sections.items() if section is not None}


def _faults(loaded: LoadedRecipe) -> Iterator[str]:
    evaluate = loaded.recipe[EvaluateConfig]
    if not evaluate.suites:
        names = ", ".join(SUITES)
        yield f"evaluate: names nothing to evaluate; set one of {names} or leave it out"
    if evaluate.windows and len(menu := loaded.recipe[SearchConfig].menu) > 1:
        yield (
            f"evaluate.windows: a mask with windows of {windows_text(menu)} has no one window "
            "that another could replace; leave the field out"
        )
    if (limit := loaded.positions) is not None:
        windows = [Window(size, loaded.recipe[SearchConfig].sinks) for size in evaluate.windows]
        yield from window_faults(windows, "evaluate.windows", "the model's positions", limit)
    for name, section in evaluate.suites.items():
        yield from section.faults(loaded, f"evaluate.{name}")
        if evaluate.chat_template:
            yield from section.chat_faults(loaded, f"evaluate.{name}")


def _missing(loaded: LoadedRecipe) -> Iterator[str]:
    """Missing files and packages of the suites other than the recipe's folders."""
    evaluate = loaded.recipe[EvaluateConfig]
    for name, section in evaluate.suites.items():
        yield from section.missing(loaded, f"evaluate.{name}")
    folder = loaded.info.directory if loaded.info is not None else None
    if evaluate.chat_template and folder is not None and not has_template(Path(folder)):
        yield (
            f"evaluate.chat_template: the tokenizer in {folder} has no chat template; set it to "
            "false, or add chat_template.jinja"
        )


def slow_faults(loaded: LoadedRecipe) -> Iterator[str]:
    """Faults of the suites that only `validate` looks for."""
    for name, section in loaded.recipe[EvaluateConfig].suites.items():
        yield from section.slow_faults(f"evaluate.{name}")


def gaps(loaded: LoadedRecipe) -> Iterator[str]:
    """Tasks of presets and suites that will have no score, if known before the run."""
    evaluate = loaded.recipe[EvaluateConfig]
    for preset in evaluate.presets:
        for benchmark in PRESETS[preset]:
            reasons = [
                f"the package {package} is not installed"
                for package in benchmark.packages
                if importlib.util.find_spec(package) is None
            ]
            section = evaluate.suites.get(benchmark.suite)
            if section is None:
                reasons.append(
                    f"its data ({benchmark.data}) is not named: evaluate.{benchmark.suite}.data_dir"
                )
            else:
                reasons += section.gaps(loaded, benchmark.tasks)
            yield from (f"evaluate.presets: {preset}: {benchmark.name}: {why}" for why in reasons)
    for name, section in evaluate.suites.items():
        yield from (f"evaluate.{name}: {why}" for why in section.gaps(loaded))


STAGE = Stage(
    "evaluate",
    "stages.evaluate.run:run",
    EvaluateConfig,
    field=Field(None, description="Scores; left out, nothing is evaluated."),
    completed=EvaluateConfig.completed,
    needs=("prepare", "materialize", "train", "train_rival", "original"),
    model="weights",
    distributed=True,
    checks=_faults,
    missing=_missing,
    slow_checks="stages.evaluate.stage:slow_faults",
    gaps="stages.evaluate.stage:gaps",
    cost="stages.evaluate.cost:cost",
)
