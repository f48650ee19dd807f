"""Tasks of lm-evaluation-harness: their section of the recipe."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, Field

from bosch.errors import UserError
from data_prep.source_files import files_below
from data_prep.tasks.longbench import TASKS as LONGBENCH
from data_prep.tasks.longbench import task_of
from stages.evaluate.section import SuiteSection
from stages.fields import Count, Flag, Line, PathText, different
from stages.inputs import Hasher, Input, hashed_files
from stages.stage import LoadedRecipe, call, position_faults
from stages.versions import installed_versions

NO_HARNESS = (
    "evaluate.harness: lm-evaluation-harness is not installed; pip install 'bosch-pipeline[eval]'"
)

# lm-eval, which has the prompts, and the packages of its metrics.
PACKAGES = ("lm-eval", "jieba", "math-verify", "rouge", "rouge-score")
# lm-eval's name of the limit of an answer's tokens.
ANSWER_TOKENS = "max_gen_toks"
# Fields of LongBench's tasks that settings may not change.
_FIXED_FOR_LONGBENCH = frozenset({"generation_kwargs", "repeats"})


def _task_files(
    harness: HarnessEvaluation, folder: str | None, hasher: Hasher
) -> dict[str, Any] | None:
    if folder is None or not Path(folder).is_dir():
        return None
    files = [path for path in files_below(Path(folder)) if path.suffix == ".jsonl"]
    return hashed_files(folder, sorted(files), hasher)


def _check_task_files(where: str, harness: HarnessEvaluation, folder: str) -> None:
    if not Path(folder).is_dir():
        raise UserError(f"{where}: there is no folder {folder}")
    list(files_below(Path(folder)))  # raises for anything but regular files


class HarnessEvaluation(SuiteSection):
    """Tasks of lm-evaluation-harness (the extra eval): LongBench v1, GSM8K and many others."""

    title = "Tasks of lm-eval"
    runner = "stages.evaluate.suites.harness.suite:HarnessSuite"
    rank = 1

    tasks: Annotated[list[Line], AfterValidator(different)] = Field(default=[])
    """Names of tasks, groups and tags as lm-eval has them, like gsm8k, mmlu, hellaswag; longbench
    stands for the 21 tasks of LongBench v1."""
    data_dir: Annotated[PathText | None, Input(_task_files, _check_task_files)] = None
    """Folder with local data: longbench/<task>.jsonl, and <task>/<split>.jsonl for others, also for
    each task of a group (mmlu_anatomy/test.jsonl)."""
    hub: Flag = True
    """Whether data that is not in data_dir is downloaded from the hub."""
    samples: Count | None = None
    """Documents per task, from its first on; default: all."""
    num_fewshot: int | None = Field(None, ge=0, le=1000)
    """Worked examples in a prompt; default: the task's own."""
    settings: dict[Line, dict[str, Any]] = Field(default={})
    """What to change in tasks, by the name of a task or group, as lm-eval writes it, like {aime25:
    {repeats: 4}}; a score is the mean over `repeats` sampled answers."""
    optional: Annotated[list[Line], AfterValidator(different)] = Field(default=[])
    """Tasks that may be impossible to run: they then have no score, but a reason."""
    max_length: Count = Field(31500, ge=2)
    """LongBench: maximum tokens of a prompt; a longer one is truncated in the middle."""

    def expanded(self, name: str) -> list[str]:
        """LongBench's tasks one by one, any other name as it is."""
        return [f"longbench_{task}" for task in LONGBENCH] if name == "longbench" else [name]

    @property
    def task_names(self) -> list[str]:
        return list(dict.fromkeys(task for name in self.tasks for task in self.expanded(name)))

    @property
    def required(self) -> list[str]:
        """The `task_names` that are not optional."""
        optional = {task for name in self.optional for task in self.expanded(name)}
        return [name for name in self.task_names if name not in optional]

    @classmethod
    def hub_tasks(cls, tasks: Sequence[str]) -> dict[str, tuple[str, str]]:
        return dict(call("stages.evaluate.suites.harness.tasks:hub_tasks", tasks))

    def faults(self, loaded: LoadedRecipe, where: str) -> Iterator[str]:
        if not self.tasks:
            yield f"{where}.tasks: names no task; set some, or evaluate.presets"
        for name in (*self.settings, *self.optional):
            if name not in self.tasks:
                field = "settings" if name in self.settings else "optional"
                yield f"{where}.{field}: {name} is not among {where}.tasks"
        for name, changes in self.settings.items():
            is_task = name == "longbench_e" or task_of(name) is not None
            if name == "longbench" or (is_task and not _FIXED_FOR_LONGBENCH.isdisjoint(changes)):
                yield (
                    f"{where}.settings: {name} is answered as LongBench's own code does, whatever "
                    "is set; leave it out"
                )
        required = [name for name in self.tasks if name not in self.optional]
        yield from self._answer_length_faults(loaded, required, where)
        longbench_tasks = {task for name in self.tasks if (task := task_of(name))}
        if not {"longbench", "longbench_e"}.isdisjoint(self.tasks):
            longbench_tasks = set(LONGBENCH)
        if longbench_tasks:
            tokens = self.max_length + max(
                LONGBENCH[task].max_new_tokens for task in longbench_tasks
            )
            yield from position_faults(
                loaded, f"{where}.max_length with a LongBench answer", tokens
            )

    def _answer_length_faults(
        self, loaded: LoadedRecipe, tasks: Sequence[str], where: str
    ) -> Iterator[str]:
        """Tasks whose settings leave no position for a prompt; a run checks the other tasks."""
        for name in tasks:
            options = self.settings.get(name, {}).get("generation_kwargs")
            answer_tokens = options.get(ANSWER_TOKENS) if isinstance(options, Mapping) else None
            if isinstance(answer_tokens, int):
                field = f"{where}.settings.{name}.generation_kwargs.{ANSWER_TOKENS} with a prompt"
                yield from position_faults(loaded, field, answer_tokens + 1)

    def slow_faults(self, where: str) -> Iterator[str]:
        yield from call("stages.evaluate.suites.harness.tasks:name_faults", self, where)

    def gaps(self, loaded: LoadedRecipe, tasks: Sequence[str] | None = None) -> Iterator[str]:
        """Tasks whose answers are too long and, if `hub` is off, tasks without local files."""
        if tasks is not None:
            yield from self._answer_length_faults(loaded, tasks, "evaluate.harness")
        names = self.required
        if tasks is not None:
            names = [name for task in tasks for name in self.expanded(task)]
        if not self.hub:
            yield from call("stages.evaluate.suites.harness.tasks:without_files", names, self)

    def missing(self, loaded: LoadedRecipe, where: str) -> Iterator[str]:
        if not installed_versions(["lm-eval"]):
            yield NO_HARNESS


SUITE = HarnessEvaluation
