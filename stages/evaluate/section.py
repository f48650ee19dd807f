"""A suite's section of `evaluate` in a recipe, its checks and its cost; no torch."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

from stages.fields import Section
from stages.stage import LoadedRecipe


@dataclass(frozen=True)
class Work:
    """So many samples, answers counted, of a context of `length` tokens on average.

    `tokens` are those of all samples; `longest` is the longest of them, with its answer, and
    `most_rows` how many are read at once, at most. Logits are computed at `logits` of the tokens,
    where answers are generated at these; None: at all. `kept` are the bytes of the samples
    themselves on disk, for all models and recipes.
    """

    samples: int
    tokens: int
    length: int
    longest: int
    most_rows: int = sys.maxsize
    logits: int | None = None
    kept: int = 0


@dataclass(frozen=True)
class Benchmark:
    """Tasks of a suite of `evaluate`, and what they take; without tasks it is the whole suite.

    Of lm-eval's groups `parts` is how many tasks the documents belong to. `settings` change each of
    the tasks, as lm-eval writes them in a task's file. `packages` are modules that their scores
    need. `left_out`: parts that are no tasks here, and why.
    """

    name: str
    data: str
    tasks: tuple[str, ...] = ()
    suite: str = "harness"
    documents: int = 0
    parts: int = 1
    prompt: int = 0
    answer: int = 0
    settings: Mapping[str, Any] = field(default_factory=dict)
    packages: tuple[str, ...] = ()
    left_out: str = ""


def with_settings(task: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """A task's configuration with `settings`; those that are mappings change it key by key."""
    return {
        **task,
        **{
            key: {**(task.get(key) or {}), **value} if isinstance(value, Mapping) else value
            for key, value in settings.items()
        },
    }


class SuiteSection(Section):
    """A suite's section of a recipe.

    `title` names it for people, `runner` is its `Suite` as `module:class`. Suites are asked and
    shown by `rank`, then by name. One that is `by_default` is asked with its defaults where a
    recipe does not name it. One that `reads_alone` cannot split a prompt over processes.
    """

    title: ClassVar[str]
    runner: ClassVar[str]
    rank: ClassVar[int] = 3
    by_default: ClassVar[bool] = False
    reads_alone: ClassVar[bool] = False

    def faults(self, loaded: LoadedRecipe, where: str) -> Iterator[str]:
        """What is wrong between its fields, a message each that begins with `where`."""
        yield from ()

    def chat_faults(self, loaded: LoadedRecipe, where: str) -> Iterator[str]:
        """What of it leaves no room for the tokens of a chat template, as `faults`."""
        yield from ()

    def slow_faults(self, where: str) -> Iterator[str]:
        """What `validate` alone looks for, as `faults`."""
        yield from ()

    def missing(self, loaded: LoadedRecipe, where: str) -> Iterator[str]:
        """What a run needs beside the inputs that it names and that is not there, as `faults`."""
        yield from ()

    def gaps(self, loaded: LoadedRecipe, tasks: Sequence[str] | None = None) -> Iterator[str]:
        """Why some tasks would have no score; None: those that the recipe names itself."""
        yield from ()

    def with_benchmarks(self, added: Sequence[Benchmark]) -> Self:
        """With the tasks of presets, which are optional; who names a task himself needs it."""
        section: Any = self
        missing = [
            task for benchmark in added for task in benchmark.tasks if task not in section.tasks
        ]
        changes: dict[str, Any] = {
            "tasks": [*section.tasks, *missing],
            "optional": [*section.optional, *missing],
        }
        settings = {
            task: with_settings(benchmark.settings, section.settings.get(task, {}))
            for benchmark in added
            if benchmark.settings
            for task in benchmark.tasks
        }
        if settings:
            changes["settings"] = {**section.settings, **settings}
        return self.model_copy(update=changes)

    @classmethod
    def hub_tasks(cls, tasks: Sequence[str]) -> dict[str, tuple[str, str]]:
        """Those of some tasks whose data is a dataset of the hub: its name and its config's."""
        return {}

    @property
    def is_papers(self) -> bool:
        """Whether its average measures what the NIAH averages of BOSCH's Table 1 do."""
        return False

    def card(self, loaded: LoadedRecipe) -> dict[str, Any]:
        """What its scores depend on in the model's card."""
        return {}

    def work(self) -> tuple[list[Work], list[str]]:
        """Its samples, as far as they are known, and what `plan` says of them."""
        return [], []
