"""Tasks of lm-evaluation-harness: their section of the recipe."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, Field

from bosch.errors import UserError
from data_prep.source_files import files_below
from stages.evaluate.section import SuiteSection
from stages.faults import Fault
from stages.fields import Count, Flag, Line, PathText, different
from stages.inputs import Hasher, Input, hashed_files
from stages.stage import LoadedRecipe, call
from stages.versions import installed_versions

NO_HARNESS = "lm-evaluation-harness is not installed; pip install 'bosch-pipeline[eval]'"

# lm-eval, which has the prompts, and the packages of its metrics.
PACKAGES = ("lm-eval", "jieba", "math-verify", "rouge", "rouge-score")


def _task_files(
    harness: HarnessEvaluation, folder: str | None, hasher: Hasher
) -> dict[str, Any] | None:
    if folder is None or not Path(folder).is_dir():
        return None
    files = [path for path in files_below(Path(folder)) if path.suffix == ".jsonl"]
    return hashed_files(folder, sorted(files), hasher)


def _check_task_files(harness: HarnessEvaluation, folder: str) -> None:
    if not Path(folder).is_dir():
        raise UserError(f"there is no folder {folder}")
    list(files_below(Path(folder)))  # raises for anything but regular files


class HarnessEvaluation(SuiteSection):
    """Tasks of lm-evaluation-harness (the extra eval): LongBench, GSM8K and many others."""

    title = "Tasks of lm-eval"
    runner = "stages.evaluate.suites.harness.suite:HarnessSuite"
    rank = 1

    tasks: Annotated[list[Line], AfterValidator(different)] = Field(default=[])
    """Names of tasks, groups and tags as lm-eval has them, like gsm8k, mmlu, longbench."""
    data_dir: Annotated[PathText | None, Input(_task_files, _check_task_files)] = None
    """Folder with local data: <task>/<split>.jsonl, also for each task of a group
    (mmlu_anatomy/test.jsonl)."""
    hub: Flag = True
    """Whether data that is not in data_dir is downloaded from the hub."""
    samples: Count | None = None
    """Documents per task, from its first on; default: all."""
    num_fewshot: int | None = Field(None, ge=0, le=1000)
    """Worked examples in a prompt; default: the task's own."""

    def faults(self, loaded: LoadedRecipe, where: str) -> Iterator[Fault]:
        if not self.tasks:
            yield Fault(f"{where}.tasks", "names no task; set some, or evaluate.presets")

    def slow_faults(self, where: str) -> Iterator[Fault]:
        yield from call("stages.evaluate.suites.harness.tasks:name_faults", self, where)

    def missing(self, loaded: LoadedRecipe, where: str) -> Iterator[Fault]:
        if not installed_versions(["lm-eval"]):
            yield Fault(where, NO_HARNESS)


SUITE = HarnessEvaluation
