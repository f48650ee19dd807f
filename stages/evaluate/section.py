"""A suite's section of `evaluate` in a recipe, its checks and its cost; no torch."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

from stages.cost import BYTES
from stages.fields import Section
from stages.stage import LoadedRecipe


@dataclass(frozen=True)
class Work:
    """Samples, with their answers, of `length` tokens on average.

    `tokens` is the sum over all samples; `longest` is the longest sample with its answer,
    `most_rows` the largest batch. Logits are computed at `logits` tokens, where answers are
    generated; None: at all tokens. A pass reads at most `chunk` tokens of a sample, unless
    processes share it. With `float32_losses` the softmax of logits is in float32. `stored_bytes` is
    the size on disk of the samples themselves, shared by all models and recipes.
    """

    samples: int
    tokens: int
    length: int
    longest: int
    most_rows: int = sys.maxsize
    logits: int | None = None
    chunk: int = sys.maxsize
    float32_losses: bool = False
    stored_bytes: int = 0

    def logit_bytes(self, rows: int, vocabulary: int, value_bytes: int) -> int:
        """Peak bytes of the logits at all tokens of a pass over `rows` samples; 0 with answers.

        Logits and their log-softmax, which in float32 needs a copy of logits in half precision.
        """
        if self.logits is not None:
            return 0
        copies = 2 * value_bytes
        if self.float32_losses and value_bytes < BYTES["float32"]:
            copies = value_bytes + 2 * BYTES["float32"]
        return min(rows, self.most_rows) * min(self.longest, self.chunk) * vocabulary * copies


@dataclass(frozen=True)
class Benchmark:
    """Tasks of a suite of `evaluate` with their sizes; without tasks, the whole suite.

    `parts` is the number of tasks in a group of lm-eval. `settings` change each task's
    configuration in lm-eval's format. `packages` are modules that the scores need. `excluded`:
    parts of the benchmark that are not run, and why. `prompt` and `answer` are in tokens.
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
    excluded: str = ""


def with_settings(task: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """A task's configuration updated by `settings`; mappings are merged key by key."""
    return {
        **task,
        **{
            key: {**(task.get(key) or {}), **value} if isinstance(value, Mapping) else value
            for key, value in settings.items()
        },
    }


class SuiteSection(Section):
    """A suite's section of a recipe.

    `title` is its display name, `runner` its `Suite` as `module:class`. Suites are run and shown by
    `rank`, then by name. A suite that is `by_default` runs with its defaults if the recipe does not
    name it.
    """

    title: ClassVar[str]
    runner: ClassVar[str]
    rank: ClassVar[int] = 3
    by_default: ClassVar[bool] = False

    def faults(self, loaded: LoadedRecipe, where: str) -> Iterator[str]:
        """Conflicts between the section's fields: messages that begin with `where`."""
        yield from ()

    def chat_faults(self, loaded: LoadedRecipe, where: str) -> Iterator[str]:
        """Fields that leave no room for the tokens of a chat template, as in `faults`."""
        yield from ()

    def slow_faults(self, where: str) -> Iterator[str]:
        """Faults that only `validate` looks for, as in `faults`."""
        yield from ()

    def missing(self, loaded: LoadedRecipe, where: str) -> Iterator[str]:
        """Missing packages and files other than the named inputs, as in `faults`."""
        yield from ()

    def gaps(self, loaded: LoadedRecipe, tasks: Sequence[str] | None = None) -> Iterator[str]:
        """Reasons why `tasks` would have no score; None: the tasks that the recipe names itself."""
        yield from ()

    def with_benchmarks(self, added: Sequence[Benchmark]) -> Self:
        """The section with the tasks of presets as optional tasks."""
        section: Any = self
        missing = [
            task for benchmark in added for task in benchmark.tasks if task not in section.tasks
        ]
        changes: dict[str, Any] = {
            name: [*getattr(section, name), *missing] for name in ("tasks", "optional")
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
        """Name and config of the hub dataset of each of the tasks that has one."""
        return {}

    def work(self) -> tuple[list[Work], list[str]]:
        """The samples that are known in advance, and remarks for `plan`."""
        return [], []
