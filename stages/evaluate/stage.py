"""Stage evaluate: scores of the untrained hybrid and every checkpoint."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, BeforeValidator, Field

from bosch.search.methods import METHODS, MethodName
from data_prep.longbench import TASKS as LONGBENCH
from data_prep.ruler_tasks import NEW_TOKENS, RulerTask
from stages.fields import Count, Flag, Line, PathText, Section, different, parse_number


def unsearched(names: list[MethodName]) -> list[MethodName]:
    """The methods, which must be layer rules and rankings: they measure no score."""
    for name in names:
        if METHODS[name].kind not in ("layer rule", "ranking"):
            known = ", ".join(n for n in METHODS if METHODS[n].kind in ("layer rule", "ranking"))
            raise ValueError(f"{name} is neither a rule nor a ranking: choose from {known}")
    return names


class NeedleEvaluation(Section):
    """RULER (NVIDIA/RULER at commit c3f5e3b)."""

    tasks: Annotated[list[RulerTask], AfterValidator(different)] = Field(
        default=[
            "niah_single_1",
            "niah_single_2",
            "niah_single_3",
            "niah_multikey_1",
            "niah_multikey_2",
            "niah_multikey_3",
        ],
        min_length=1,
        description="Tasks; the average is their unweighted mean.",
    )
    lengths: Annotated[list[Count], AfterValidator(different)] = Field(
        default=[4096, 8192, 16384, 32768],
        min_length=1,
        description="Tokens of a sample, generated ones included.",
    )
    samples: Count = Field(500, description="Samples per task and length.")
    max_new_tokens: Count | None = Field(
        None,
        description="Tokens generated, counted inside the length; default: RULER's for each task.",
    )
    yarn: dict[Count, Annotated[float, BeforeValidator(parse_number), Field(gt=1, le=1024)]] = (
        Field(
            default={},
            description=(
                "Lengths at which RoPE is stretched by YaRN, each with its factor, like "
                "{64k: 2, 128k: 4}; for all models, in evaluation alone."
            ),
        )
    )
    essay_dir: PathText | None = Field(
        None, description="Folder of prose for essay haystacks; default: pydoc's topics."
    )
    data_dir: PathText | None = Field(
        None,
        description=(
            "Folder with the files that RULER downloads: squad.json (qa_1), hotpotqa.json (qa_2), "
            "english_words.json (cwe, where a length needs more words than there are)."
        ),
    )

    def new_tokens(self, task: str) -> int:
        """Tokens that a model may generate in a task."""
        return NEW_TOKENS[task] if self.max_new_tokens is None else self.max_new_tokens

    def yarn_factor(self, length: int) -> float | None:
        """Factor by which RoPE is stretched at this length."""
        return self.yarn.get(length)


class HarnessEvaluation(Section):
    """Tasks of lm-evaluation-harness (the extra eval): LongBench v1, GSM8K and many others."""

    tasks: Annotated[list[Line], AfterValidator(different)] = Field(
        min_length=1,
        description=(
            "Names of tasks, groups and tags as lm-eval has them, like gsm8k, mmlu, hellaswag; "
            "longbench stands for the 21 tasks of LongBench v1."
        ),
    )
    data_dir: PathText | None = Field(
        None,
        description=(
            "Folder with local data: longbench/<task>.jsonl, and <task>/<split>.jsonl for others, "
            "also for each task of a group (mmlu_anatomy/test.jsonl)."
        ),
    )
    hub: Flag = Field(
        True, description="Whether data that data_dir does not hold is fetched from the hub."
    )
    samples: Count | None = Field(
        None, description="Documents per task, from its first on; default: all."
    )
    num_fewshot: int | None = Field(
        None, ge=0, le=1000, description="Worked examples in a prompt; default: the task's own."
    )
    max_length: Count = Field(
        31500,
        description="LongBench: tokens of a prompt, of which the first and last half are kept.",
    )

    @property
    def task_names(self) -> list[str]:
        """The tasks, LongBench's one by one."""
        every = {"longbench": [f"longbench_{task}" for task in LONGBENCH]}
        return list(dict.fromkeys(one for name in self.tasks for one in every.get(name, [name])))


class PositionEvaluation(Section):
    """Loss by position in held-out long documents."""

    length: Count = Field(32768, ge=2, description="Tokens of a document that are read.")
    documents: Count = Field(32, description="Documents, the first that are long enough.")
    path: PathText | None = Field(
        None,
        description=(
            "Folder of .txt or .md files that are no training data; default: the source files of "
            "transformers' models, the longest first."
        ),
    )


class EvaluateConfig(Section):
    """Scores of the original, the untrained hybrid and every checkpoint."""

    needle: NeedleEvaluation | None = NeedleEvaluation()
    harness: HarnessEvaluation | None = None
    positions: PositionEvaluation | None = None
    rivals: Annotated[list[MethodName], AfterValidator(different), AfterValidator(unsearched)] = (
        Field(
            default=[],
            description=(
                "Layer rules and rankings to compare the search with: their untrained hybrids, at "
                "its ratio and window, answer the same samples."
            ),
        )
    )

    windows: Annotated[list[Count], AfterValidator(different)] = Field(
        default=[],
        description=(
            "Window sizes at which the search's mask and those of the rivals are scored too, "
            "untrained, like [256, 512, 2k, 4k]; the search's own is the hybrid's."
        ),
    )

    @property
    def suites(self) -> dict[str, Section | None]:
        """The sections of the suites by name, None where the recipe leaves one out."""
        return {"needle": self.needle, "harness": self.harness, "positions": self.positions}
