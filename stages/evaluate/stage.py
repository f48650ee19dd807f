"""Stage evaluate: scores of the untrained hybrid and every checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Self

from pydantic import AfterValidator, Field, create_model

from stages.evaluate.chat import has_template
from stages.evaluate.presets import PRESETS, PresetName
from stages.evaluate.section import SuiteSection
from stages.evaluate.suites import SUITES
from stages.evaluate.suites.harness import HarnessEvaluation
from stages.faults import Fault
from stages.fields import Flag, Section, different
from stages.stage import LoadedRecipe, Recipe, Stage, model_processes


class _Prompts(Section):
    """Fields for the prompts of all suites."""

    presets: Annotated[list[PresetName], AfterValidator(different)] = Field(default=[])
    """Lists of lm-eval's tasks, added to those of harness: short (MMLU, ARC, HellaSwag, WinoGrande,
    GSM8K), long (LongBench v1 and v2, LongProc, GraphWalks, InfiniteBench), reasoning
    (MATH500, AIME)."""
    chat_template: Flag = False
    """Whether prompts are put into the tokenizer's chat template, which instruct models need."""


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

    def completed(self, recipe: Recipe) -> Self:
        """The section with the tasks of its presets."""
        if not self.presets:
            return self
        harness: Any = self.suites.get("harness") or HarnessEvaluation()
        tasks = [*harness.tasks, *(task for name in self.presets for task in PRESETS[name])]
        changed = harness.model_copy(update={"tasks": list(dict.fromkeys(tasks))})
        return self.model_copy(update={"harness": changed})

    @property
    def suites(self) -> dict[str, SuiteSection]:
        """The sections of the suites that the recipe has, by name."""
        sections = {name: getattr(self, name) for name in SUITES}
        return {name: section for name, section in sections.items() if section is not None}


def _faults(loaded: LoadedRecipe) -> Iterator[Fault]:
    evaluate = loaded.recipe[EvaluateConfig]
    if not evaluate.suites:
        yield Fault("evaluate", f"names nothing to evaluate; set one of {', '.join(SUITES)}")
    for name, section in evaluate.suites.items():
        yield from section.faults(loaded, f"evaluate.{name}")
        if evaluate.chat_template:
            yield from section.chat_faults(loaded, f"evaluate.{name}")


def _missing(loaded: LoadedRecipe) -> Iterator[Fault]:
    """Missing files and packages of the suites other than the recipe's folders."""
    evaluate = loaded.recipe[EvaluateConfig]
    for name, section in evaluate.suites.items():
        yield from section.missing(loaded, f"evaluate.{name}")
    folder = loaded.info.directory if loaded.info is not None else None
    if evaluate.chat_template and folder is not None and not has_template(Path(folder)):
        yield Fault(
            "evaluate.chat_template",
            f"the tokenizer in {folder} has no chat template; set it to false, or add "
            "chat_template.jinja",
        )


def slow_faults(loaded: LoadedRecipe) -> Iterator[Fault]:
    """Faults of the suites that only `validate` looks for."""
    for name, section in loaded.recipe[EvaluateConfig].suites.items():
        yield from section.slow_faults(f"evaluate.{name}")


STAGE = Stage(
    "evaluate",
    "stages.evaluate.run:run",
    EvaluateConfig,
    field=Field(None, description="Scores; left out, nothing is evaluated."),
    completed=EvaluateConfig.completed,
    needs=("prepare", "materialize", "train", "original"),
    model="weights",
    distributed=True,
    processes=model_processes,
    checks=_faults,
    missing=_missing,
    slow_checks="stages.evaluate.stage:slow_faults",
    cost="stages.evaluate.cost:cost",
)
