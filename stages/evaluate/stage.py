"""Stage evaluate: scores of the untrained hybrid and every checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import AfterValidator, Field, create_model

from bosch.backends import lacking
from bosch.search.methods import METHODS, MethodName
from bosch.window import windows_text
from stages.evaluate.chat import has_template
from stages.evaluate.presets import PresetName, benchmarks, task_settings
from stages.evaluate.section import SuiteSection
from stages.evaluate.suites import SUITES
from stages.evaluate.suites.harness import HarnessEvaluation
from stages.evaluate.suites.needle import NeedleEvaluation
from stages.exchange import split_faults
from stages.fields import Count, Flag, Section, different
from stages.kv_budgets import KvBudgets, front_faults
from stages.recipe import LoadedRecipe, Recipe
from stages.search.stage import SearchConfig
from stages.stage import Stage

if TYPE_CHECKING:
    from typing import Self


def unsearched(names: list[MethodName]) -> list[MethodName]:
    """The methods, which must be layer rules and rankings: they measure no score."""
    for name in names:
        if METHODS[name].kind not in ("layer rule", "ranking"):
            known = ", ".join(n for n in METHODS if METHODS[n].kind in ("layer rule", "ranking"))
            raise ValueError(f"{name} is neither a rule nor a ranking: choose from {known}")
    return names


class _Prompts(Section):
    """How all suites ask."""

    presets: Annotated[list[PresetName], AfterValidator(different)] = Field(
        default=[],
        description=(
            "Lists of benchmarks that add their tasks to needle and harness: short (MMLU, ARC, "
            "HellaSwag, WinoGrande, GSM8K), long (RULER, LongBench v1 and v2, BABILong, LongProc, "
            "GraphWalks, InfiniteBench), reasoning (MATH500, AIME). What cannot be run has no "
            "score; `validate` names it."
        ),
    )
    chat_template: Flag = Field(
        False,
        description=(
            "Whether prompts are put into the tokenizer's chat template, which instruct models "
            "need; LongBench's few-shot and code tasks stay raw, as its authors ask them."
        ),
    )


# A field for each suite; presets add to the two that are named here.
if TYPE_CHECKING:

    class _Suites(_Prompts):
        needle: NeedleEvaluation | None
        harness: HarnessEvaluation | None

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

    rivals: Annotated[list[MethodName], AfterValidator(different), AfterValidator(unsearched)] = (
        Field(
            default=[],
            description=(
                "Layer rules and rankings to compare the search with: their untrained hybrids, at "
                "its ratio and window, answer the same samples."
            ),
        )
    )

    budgets: Literal["chosen", "all"] | KvBudgets = Field(
        "chosen",
        description=(
            "Budgets of the front at which the hybrid and its checkpoints are scored: the chosen "
            "one alone; beside it all, or a list, each by its KV slots or as the largest within a "
            "share of the original's (0.25)."
        ),
    )

    windows: Annotated[list[Count], AfterValidator(different)] = Field(
        default=[],
        description=(
            "Window sizes at which the search's mask and those of the rivals are scored too, "
            "untrained, like [256, 512, 2k, 4k]; the search's own is the hybrid's."
        ),
    )

    def completed(self, recipe: Recipe) -> Self:
        """The section with the tasks of its presets, which are optional."""
        needle, harness = self.needle, self.harness
        chosen = list(benchmarks(self.presets))
        if ruler := [task for one in chosen for task in one.needle]:
            needle = needle or NeedleEvaluation()
            changes = _added(needle.tasks, ruler, needle.optional)
            needle = needle.model_copy(update=changes)
        if names := [task for one in chosen for task in one.harness]:
            harness = harness or HarnessEvaluation()
            changes = _added(harness.tasks, names, harness.optional)
            changes["settings"] = {**task_settings(self.presets), **harness.settings}
            harness = harness.model_copy(update=changes)
        return self.model_copy(update={"needle": needle, "harness": harness})

    @property
    def suites(self) -> dict[str, SuiteSection]:
        """The sections of the suites that the recipe has, by name."""
        sections = {name: getattr(self, name) for name in SUITES}
        return {name: section for name, section in sections.items() if section is not None}


def _added(tasks: list[Any], of_preset: list[Any], optional: list[Any]) -> dict[str, Any]:
    """A suite's tasks with those of presets; who names a task himself needs it."""
    missing = [task for task in of_preset if task not in tasks]
    return {"tasks": [*tasks, *missing], "optional": [*optional, *missing]}


def _faults(loaded: LoadedRecipe) -> Iterator[str]:
    evaluate = loaded.recipe.get(EvaluateConfig)
    if evaluate is None:
        return
    if not evaluate.suites:
        names = ", ".join(SUITES)
        yield f"evaluate: names nothing to evaluate; set one of {names} or leave it out"
    if evaluate.windows and len(menu := loaded.recipe[SearchConfig].menu) > 1:
        yield (
            f"evaluate.windows: a mask with windows of {windows_text(menu)} has no one window "
            "that another could replace; leave the field out"
        )
    yield from front_faults(loaded, "evaluate.budgets", evaluate.budgets != "chosen")
    for name, section in evaluate.suites.items():
        yield from section.faults(loaded, f"evaluate.{name}")
    yield from _room_for_chat(loaded, evaluate)
    yield from _split(loaded, evaluate)


def _room_for_chat(loaded: LoadedRecipe, evaluate: EvaluateConfig) -> Iterator[str]:
    """RULER's lengths are those of the sample alone; a chat template has two tokens at least."""
    limit = loaded.info.max_positions if loaded.info is not None else None
    if limit is None or not evaluate.chat_template or evaluate.needle is None:
        return
    for length in evaluate.needle.lengths:
        if limit - 2 < length <= limit and length not in evaluate.needle.yarn:
            yield (
                f"evaluate.needle.lengths: {length:,} leaves no room for evaluate.chat_template in "
                f"the model's {limit:,} positions; lower it by about a hundred, or set "
                "evaluate.needle.yarn"
            )


def _split(loaded: LoadedRecipe, evaluate: EvaluateConfig) -> Iterator[str]:
    runtime, field = loaded.recipe.runtime, "runtime.evaluate_parallel"
    if runtime.evaluate_parallel != "context":
        return
    yield from split_faults(loaded, field)
    for name, section in evaluate.suites.items():
        if section.reads_alone:
            yield (
                f"{field}: context cannot split evaluate.{name}, which reads its prompts in one "
                "process: set data, or leave it out (evaluate.presets too)"
            )
    rankings = [name for name in evaluate.rivals if METHODS[name].kind == "ranking"]
    if rankings:
        yield (
            f"{field}: evaluate.rivals names {', '.join(rankings)}, which read the examples in one "
            "process; set data, or leave them out"
        )
    requests = {"chunks": "runtime.evaluate_parallel = context splits them"}
    for message in lacking(runtime.attention, requests):
        yield f"runtime.attention: {message}"


def _missing(loaded: LoadedRecipe) -> Iterator[str]:
    """Files and packages that the suites need beside the folders that a recipe names."""
    evaluate = loaded.recipe.get(EvaluateConfig)
    if evaluate is None:
        return
    for name, section in evaluate.suites.items():
        yield from section.missing(loaded, f"evaluate.{name}")
    folder = loaded.info.directory if loaded.info is not None else None
    if evaluate.chat_template and folder is not None and not has_template(Path(folder)):
        yield (
            f"evaluate.chat_template: the tokenizer in {folder} has no chat template; set it to "
            "false, or add chat_template.jinja"
        )


def model_card(loaded: LoadedRecipe) -> dict[str, Any]:
    """The part of the model card that is in the key of an evaluation."""
    evaluate = loaded.recipe.get(EvaluateConfig)
    sections = evaluate.suites.values() if evaluate is not None else ()
    return {name: value for one in sections for name, value in one.card(loaded).items()}


STAGE = Stage(
    "evaluate",
    "stages.evaluate.run:run",
    EvaluateConfig,
    version=18,
    field=Field(None, description="Scores; left out, nothing is evaluated."),
    needs=("prepare", "materialize", "train", "train_rival", "original"),
    model="weights",
    distributed=True,
    card=model_card,
    pool="evaluation",
    checks=_faults,
    missing=_missing,
    slow_checks="stages.evaluate.suites.harness.tasks:name_faults",
    gaps="stages.evaluate.suites.harness.tasks:preset_gaps",
    cost="stages.evaluate.cost:cost",
)
