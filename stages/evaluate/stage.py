"""Stage evaluate: scores of the untrained hybrid and every checkpoint."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

from pydantic import AfterValidator, BeforeValidator, Field, create_model

from bosch.backends import lacking
from bosch.errors import UserError
from bosch.model.yarn import original_positions, yarn_fault
from bosch.search.methods import METHODS, MethodName
from bosch.window import windows_text
from data_prep.documents.source_files import files_below
from data_prep.tasks.longbench import TASKS as LONGBENCH
from data_prep.tasks.longbench import task_of
from data_prep.tasks.tables import DATA_FILES, NEW_TOKENS, NeedleTask, RulerTask
from data_prep.tasks.words import sentences_identity, words_identity
from stages.evaluate.chat import has_template
from stages.evaluate.presets import PresetName, benchmarks, task_settings
from stages.evaluate.prompts import SUITES, PromptEvaluation
from stages.exchange import split_faults
from stages.fields import Count, Flag, Line, PathText, Section, different, parse_number
from stages.inputs import Hasher, Input, hashed_files, prose
from stages.kv_budgets import KvBudgets, front_faults
from stages.recipe import LoadedRecipe, Recipe, position_faults
from stages.search.stage import SearchConfig
from stages.stage import Stage
from stages.versions import installed_versions

if TYPE_CHECKING:
    from typing import Self


NO_HARNESS = (
    "evaluate.harness: lm-evaluation-harness is not installed; pip install 'bosch-pipeline[eval]'"
)


def unsearched(names: list[MethodName]) -> list[MethodName]:
    """The methods, which must be layer rules and rankings: they measure no score."""
    for name in names:
        if METHODS[name].kind not in ("layer rule", "ranking"):
            known = ", ".join(n for n in METHODS if METHODS[n].kind in ("layer rule", "ranking"))
            raise ValueError(f"{name} is neither a rule nor a ranking: choose from {known}")
    return names


def _ruler_files(needle: NeedleEvaluation, folder: str | None, hasher: Hasher) -> dict[str, Any]:
    """The files of the recipe's tasks that are there, by content."""
    names = [name for task, name in DATA_FILES.items() if task in needle.tasks]
    files = [Path(folder, name) for name in names] if folder is not None else []
    return {path.name: hasher.sha256(path) for path in files if path.is_file()}


def _task_files(
    harness: HarnessEvaluation, folder: str | None, hasher: Hasher
) -> dict[str, Any] | None:
    """The local data of the harness's tasks by content."""
    if folder is None or not Path(folder).is_dir():
        return None
    files = [path for path in files_below(Path(folder)) if path.suffix == ".jsonl"]
    return hashed_files(folder, sorted(files), hasher)


def _check_task_files(where: str, harness: HarnessEvaluation, folder: str) -> None:
    if not Path(folder).is_dir():
        raise UserError(f"{where}: there is no folder {folder}")
    list(files_below(Path(folder)))  # raises for what is no regular file


class NeedleEvaluation(Section):
    """RULER (NVIDIA/RULER at commit c3f5e3b)."""

    tasks: Annotated[list[RulerTask], AfterValidator(different)] = Field(
        default=list(get_args(NeedleTask)),
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
    yarn_original_length: Count | None = Field(
        None,
        description=(
            "Length that YaRN stretches; default: original_max_position_embeddings of the model's "
            "config.json or card, else its max_position_embeddings."
        ),
    )
    essay_dir: Annotated[PathText | None, prose()] = Field(
        None, description="Folder of prose for essay haystacks; default: pydoc's topics."
    )
    data_dir: Annotated[PathText | None, Input(_ruler_files)] = Field(
        None,
        description=(
            "Folder with the files that RULER downloads: squad.json (qa_1), hotpotqa.json (qa_2), "
            "english_words.json (cwe, where a length needs more words than there are)."
        ),
    )

    optional: Annotated[list[RulerTask], AfterValidator(different)] = Field(
        default=[],
        description="Tasks that have no score, with the reason, where their data is not there.",
    )

    def environment(self) -> dict[str, Any]:
        """Words that samples are made of, and what splits sentences."""
        return {"words": words_identity(), "sentences": sentences_identity()}

    def new_tokens(self, task: str) -> int:
        """Tokens that a model may generate in a task."""
        return NEW_TOKENS[task] if self.max_new_tokens is None else self.max_new_tokens


class HarnessEvaluation(Section):
    """Tasks of lm-evaluation-harness (the extra eval): LongBench v1, GSM8K and many others."""

    tasks: Annotated[list[Line], AfterValidator(different)] = Field(
        default=[],
        description=(
            "Names of tasks, groups and tags as lm-eval has them, like gsm8k, mmlu, hellaswag; "
            "longbench stands for the 21 tasks of LongBench v1."
        ),
    )
    data_dir: Annotated[PathText | None, Input(_task_files, _check_task_files)] = Field(
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
    settings: dict[Line, dict[str, Any]] = Field(
        default={},
        description=(
            "What to change in tasks, by the name of a task or group, as lm-eval writes it, like "
            "{aime25: {repeats: 4}}; a score is the mean over `repeats` sampled answers."
        ),
    )
    optional: Annotated[list[Line], AfterValidator(different)] = Field(
        default=[],
        description="Tasks that have no score, with the reason, where they cannot be run.",
    )
    max_length: Count = Field(
        31500,
        description="LongBench: tokens of a prompt, of which the first and last half are kept.",
    )

    def environment(self) -> dict[str, Any]:
        """The harness, which holds the prompts and the metrics."""
        return dict(installed_versions(["lm-eval"]))

    def expanded(self, name: str) -> list[str]:
        """LongBench's tasks one by one, any other name as it is."""
        return [f"longbench_{task}" for task in LONGBENCH] if name == "longbench" else [name]

    @property
    def task_names(self) -> list[str]:
        """The tasks, LongBench's one by one."""
        return list(dict.fromkeys(one for name in self.tasks for one in self.expanded(name)))

    @property
    def required(self) -> list[str]:
        """Those of `task_names` that are not optional."""
        optional = {one for name in self.optional for one in self.expanded(name)}
        return [name for name in self.task_names if name not in optional]


class PositionEvaluation(Section):
    """Loss by position in held-out long documents."""

    length: Count = Field(32768, ge=2, description="Tokens of a document that are read.")
    documents: Count = Field(32, description="Documents, the first that are long enough.")
    path: Annotated[PathText | None, prose(partial(installed_versions, ["transformers"]))] = Field(
        None,
        description=(
            "Folder of .txt or .md files that are no training data; default: the source files of "
            "transformers' models from their first class on, the longest first."
        ),
    )


class _Suites(Section):
    """The suites, and how all of them ask."""

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
    needle: NeedleEvaluation | None = NeedleEvaluation()
    harness: HarnessEvaluation | None = None
    positions: PositionEvaluation | None = None


# A field for each folder of `prompts`.
if TYPE_CHECKING:
    _AllSuites = _Suites
else:
    _AllSuites = create_model(
        "_AllSuites",
        __base__=_Suites,
        **{name: (suite | None, None) for name, suite in SUITES.items()},
    )


class EvaluateConfig(_AllSuites):
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
    def suites(self) -> dict[str, Section | None]:
        """The sections of the suites by name, None where the recipe leaves one out."""
        return {name: value for name, value in self if value is None or isinstance(value, Section)}

    @property
    def prompts(self) -> dict[str, PromptEvaluation]:
        """The sections of the suites of prompts that the recipe has, by name."""
        return {name: one for name, one in self if isinstance(one, PromptEvaluation)}


def _added(tasks: list[Any], of_preset: list[Any], optional: list[Any]) -> dict[str, Any]:
    """A suite's tasks with those of presets; who names a task himself needs it."""
    missing = [task for task in of_preset if task not in tasks]
    return {"tasks": [*tasks, *missing], "optional": [*optional, *missing]}


def _faults(loaded: LoadedRecipe) -> Iterator[str]:
    evaluate = loaded.recipe.get(EvaluateConfig)
    if evaluate is None:
        return
    if not any(evaluate.suites.values()):
        names = ", ".join(evaluate.suites)
        yield f"evaluate: names nothing to evaluate; set one of {names} or leave it out"
    if evaluate.windows and len(menu := loaded.recipe[SearchConfig].menu) > 1:
        yield (
            f"evaluate.windows: a mask with windows of {windows_text(menu)} has no one window "
            "that another could replace; leave the field out"
        )
    yield from front_faults(loaded, "evaluate.budgets", evaluate.budgets != "chosen")
    if evaluate.needle is not None:
        yield from _needle(loaded, evaluate.needle)
    if evaluate.harness is not None:
        yield from _harness(loaded, evaluate.harness)
    for name, section in evaluate.prompts.items():
        fields, tokens = section.most_tokens
        yield from position_faults(loaded, f"evaluate.{name}.{fields}", tokens)
    if evaluate.positions is not None:
        length = evaluate.positions.length
        yield from position_faults(loaded, "evaluate.positions.length", length)
    yield from _split(loaded, evaluate)


def _split(loaded: LoadedRecipe, evaluate: EvaluateConfig) -> Iterator[str]:
    runtime, field = loaded.recipe.runtime, "runtime.evaluate_parallel"
    if runtime.evaluate_parallel != "context":
        return
    yield from split_faults(loaded, field)
    if evaluate.harness is not None:
        yield (
            f"{field}: context splits all suites but evaluate.harness, which "
            "reads its prompts in one process: set data, or leave it out (evaluate.presets too)"
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


def _needle(loaded: LoadedRecipe, needle: NeedleEvaluation) -> Iterator[str]:
    limit = loaded.info.max_positions if loaded.info is not None else None
    yield from _stretched(loaded, needle, limit)
    for length in needle.lengths:
        new_tokens = max(needle.new_tokens(task) for task in needle.tasks)
        if new_tokens >= length:
            yield (
                f"evaluate.needle.max_new_tokens: {new_tokens:,} leaves no room "
                f"for a prompt in evaluate.needle.lengths = {length:,}"
            )


def _stretched(loaded: LoadedRecipe, needle: NeedleEvaluation, limit: int | None) -> Iterator[str]:
    """Lengths beyond the model's positions without a factor for YaRN that reaches so far."""
    for length in set(needle.yarn) - set(needle.lengths):
        yield f"evaluate.needle.yarn: {length:,} is not among evaluate.needle.lengths"
    fault = yarn_fault(loaded.info.config) if loaded.info is not None and needle.yarn else None
    if fault is not None:
        yield f"evaluate.needle.yarn: RoPE cannot be stretched: {fault}"
    trained = _trained_length(loaded) or limit
    for length in needle.lengths:
        factor = needle.yarn.get(length)
        reach = limit if factor is None or trained is None else trained * factor
        if reach is not None and trained is not None and length > reach:
            name, of_whom = ("lengths", f"the model's {limit:,} positions")
            if factor is not None:
                name, of_whom = "yarn", f"{factor:g} times the {trained:,} that YaRN stretches"
            yield (
                f"evaluate.needle.{name}: {length:,} is more than {of_whom}"
                f"; set evaluate.needle.yarn, like {{{length}: {math.ceil(length / trained)}}}"
            )


def _trained_length(loaded: LoadedRecipe) -> int | None:
    """The length that YaRN stretches, where recipe, config.json or model card say it."""
    evaluate = loaded.recipe.get(EvaluateConfig)
    if evaluate is None or evaluate.needle is None or not evaluate.needle.yarn:
        return None
    info = loaded.info
    if evaluate.needle.yarn_original_length is not None or info is None:
        return evaluate.needle.yarn_original_length
    card = info.directory / "README.md" if info.directory is not None else None
    return original_positions(info.config, card)


def model_card(loaded: LoadedRecipe) -> dict[str, Any]:
    """The part of the model card that is in the key of an evaluation."""
    length = _trained_length(loaded)
    return {} if length is None else {"yarn_original_length": length}


def _harness(loaded: LoadedRecipe, harness: HarnessEvaluation) -> Iterator[str]:
    if not harness.tasks:
        yield "evaluate.harness.tasks: names no task; set some, or evaluate.presets"
    for name in (*harness.settings, *harness.optional):
        if name not in harness.tasks:
            field = "settings" if name in harness.settings else "optional"
            yield f"evaluate.harness.{field}: {name} is not among evaluate.harness.tasks"
    longbench_tasks = {one for name in harness.tasks if (one := task_of(name))}
    if not {"longbench", "longbench_e"}.isdisjoint(harness.tasks):
        longbench_tasks = set(LONGBENCH)
    if longbench_tasks:
        tokens = harness.max_length + max(LONGBENCH[one].new_tokens for one in longbench_tasks)
        yield from position_faults(
            loaded, "evaluate.harness.max_length with a LongBench answer", tokens
        )


def _missing(loaded: LoadedRecipe) -> Iterator[str]:
    """Files and packages that the suites need beside the folders that a recipe names."""
    evaluate = loaded.recipe.get(EvaluateConfig)
    if evaluate is None:
        return
    for task in ("qa_1", "qa_2"):
        needle = evaluate.needle
        if needle is None or task not in needle.tasks or task in needle.optional:
            continue
        if fault := missing_ruler_file(task, needle.data_dir):
            yield f"evaluate.needle.data_dir: {fault}"
    folder = loaded.info.directory if loaded.info is not None else None
    if evaluate.chat_template and folder is not None and not has_template(Path(folder)):
        yield (
            f"evaluate.chat_template: the tokenizer in {folder} has no chat template; set it to "
            "false, or add chat_template.jinja"
        )
    if evaluate.harness is not None and not installed_versions(["lm-eval"]):
        yield NO_HARNESS


def missing_ruler_file(task: str, folder: str | None) -> str | None:
    """Why a task of RULER cannot be made; None where it can."""
    name = DATA_FILES.get(task) if task != "cwe" else None  # its words may suffice
    if name is None or (folder is not None and Path(folder, name).is_file()):
        return None
    where = f"{folder} holds none" if folder is not None else "none is named"
    return f"{task} needs a folder with {name}, as RULER downloads it; {where}"


def suite_title(name: str) -> str:
    """A suite's name for people."""
    titles = {"needle": "Needle", "harness": "Other tasks"}
    return SUITES[name].title if name in SUITES else titles.get(name, name)


STAGE = Stage(
    "evaluate",
    "stages.evaluate.run:run",
    EvaluateConfig,
    version=17,
    field=Field(None, description="Scores; left out, nothing is evaluated."),
    needs=("prepare", "materialize", "train", "train_rival", "original"),
    model="weights",
    distributed=True,
    card=model_card,
    pool="evaluation",
    checks=_faults,
    missing=_missing,
    slow_checks="stages.evaluate.harness_tasks:name_faults",
    gaps="stages.evaluate.harness_tasks:preset_gaps",
    cost="stages.evaluate.cost:cost",
)
