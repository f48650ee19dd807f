"""Stage evaluate: scores of the untrained hybrid and every checkpoint."""

from __future__ import annotations

import importlib.util
import math
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import AfterValidator, Field

from bosch.errors import UserError
from bosch.model.yarn import original_positions, yarn_fault
from data_prep.source_files import files_below
from data_prep.tasks import tables
from data_prep.tasks.tables import DATA_FILES, NeedleTask, RulerTask
from stages.evaluate.chat import ChatConfig, template_of
from stages.faults import Fault
from stages.fields import Count, Flag, Line, Number, PathText, Section, different
from stages.inputs import Hasher, Input, hashed_files, prose
from stages.stage import LoadedRecipe, Recipe, Stage, model_processes, position_faults
from stages.versions import installed_versions

PresetName = Literal["short", "long", "reasoning"]

PRESETS: dict[PresetName, tuple[str, ...]] = {
    "short": ("mmlu", "ai2_arc", "hellaswag", "winogrande", "gsm8k"),
    "long": ("longbench", "longbench2", "graphwalks_128k", "infinitebench"),
    # Minerva's version: hendrycks_math500 does not accept an answer in \\boxed.
    "reasoning": ("minerva_math500", "aime24", "aime25"),
}
RULER_TASKS: tuple[str, ...] = get_args(RulerTask)
LocalTask = Literal["nolima", "mrcr"]
NEW_TOKENS = {**tables.NEW_TOKENS, "nolima": 192, "mrcr": 600}
_DATA_PACKAGE = partial(installed_versions, ["transformers"])


def _ruler_files(ruler: RulerConfig, folder: str | None, hasher: Hasher) -> dict[str, Any]:
    """Content hashes of the files that RULER downloads, of those that exist."""
    files = [Path(folder, name) for name in DATA_FILES.values()] if folder is not None else []
    return {path.name: hasher.sha256(path) for path in files if path.is_file()}


class RulerConfig(Section):
    """Samples of RULER's tasks (NVIDIA/RULER at commit c3f5e3b)."""

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

    def faults(self, loaded: LoadedRecipe, evaluate: EvaluateConfig) -> Iterator[Fault]:
        """Lengths without room for an answer, and lengths beyond the model's positions."""
        where, in_vllm = "evaluate.ruler", evaluate.engine == "vllm"
        for length in set(self.yarn) - set(self.lengths):
            yield Fault(f"{where}.yarn", f"{length:,} is not among {where}.lengths")
        fault = yarn_fault(loaded.info.config) if loaded.info is not None else None
        fault = "evaluate.engine must be hf" if in_vllm else fault
        if self.yarn and fault is not None:
            yield Fault(f"{where}.yarn", f"RoPE cannot be stretched: {fault}")
        trained = self._trained_length(loaded) or loaded.positions
        new_tokens = max(map(self.new_tokens, evaluate.own_tasks))
        # A chat template adds tokens; vLLM counts a prompt's BOS, and the last token of its answer.
        spare = 2 * evaluate.apply_chat_template or int(in_vllm)
        for length in self.lengths:
            if new_tokens >= length:
                yield Fault(
                    f"{where}.max_new_tokens",
                    f"{new_tokens:,} leaves no room for a prompt in {where}.lengths = {length:,}",
                )
            factor, limit = self.yarn.get(length), loaded.positions
            text, place = f"the model's {limit or 0:,} positions", f"{where}.lengths"
            if factor is not None:
                limit, place = trained and int(trained * factor), f"{where}.yarn"
                text = f"{factor:g} times the {trained or 0:,} that YaRN stretches"
            if limit is not None and length > limit - spare:
                more = " with the template or vLLM's BOS" if spare else ""
                example = f"{{{length}: {math.ceil((length + spare) / (trained or 1))}}}"
                yield Fault(
                    place,
                    f"{length:,}{more} is more than {text}; lower it, or set {where}.yarn, like "
                    f"{example}",
                )

    def _trained_length(self, loaded: LoadedRecipe) -> int | None:
        """The length that YaRN stretches, if recipe, config.json or model card have it."""
        if not self.yarn or self.yarn_original_length is not None or loaded.info is None:
            return self.yarn_original_length
        folder = loaded.info.directory
        return original_positions(loaded.info.config, folder and folder / "README.md")

    def missing(self, tasks: list[str]) -> Iterator[Fault]:
        """RULER's files that the tasks need."""
        for task in tasks:
            name = DATA_FILES.get(task) if task != "cwe" else None  # built-in words may suffice
            if name is None or (self.data_dir is not None and Path(self.data_dir, name).is_file()):
                continue
            where = f"{self.data_dir} holds none" if self.data_dir is not None else "none is named"
            yield Fault(
                "evaluate.ruler.data_dir",
                f"{task} needs a folder with {name}, as RULER downloads it; {where}",
            )


class PositionConfig(Section):
    """Loss by position in held-out long documents."""

    length: Count = Field(32768, ge=2)
    """Tokens read of each document."""
    documents: Count = 32
    """Number of documents; the first that are long enough are used."""
    path: Annotated[PathText | None, prose(_DATA_PACKAGE)] = None
    """Folder of .txt or .md files that are no training data; default: the source files of
    transformers' models from their first class on, the longest first."""


def _folders(
    evaluate: Any, places: list[str] | dict[str, str], hasher: Hasher
) -> dict[str, Any] | None:
    """Folders by content; caches that Python and lm-eval write there do not count."""
    named = places if isinstance(places, dict) else {place: place for place in places}
    files = {
        folder: sorted(path for path in files_below(Path(folder)) if path.suffix != ".pyc")
        for folder in named.values()
    }
    return {name: hashed_files(at, files[at], hasher) for name, at in named.items()} or None


def _check_task_folders(evaluate: Any, folders: list[str]) -> None:
    for folder in folders:
        if not any(Path(folder).rglob("*.yaml")):
            raise UserError(f"there is no folder {folder} with a .yaml file of a task")


def _other_name(name: str) -> str:
    if re.fullmatch(r"original|hybrid|tokens-\d+", name):
        raise ValueError(f"'{name}' names a model of the recipe; choose another name")
    return name


def _check_data(evaluate: Any, data: dict[str, str]) -> None:
    patterns = {"nolima": ["needle_set.json"], "mrcr": ["**/*.parquet", "**/*.jsonl"]}
    for task, folder in data.items():
        if not any(any(Path(folder).glob(pattern)) for pattern in patterns[task]):
            raise UserError(f"{task}: {folder} has no {' or '.join(patterns[task])}")


def _check_models(evaluate: Any, models: dict[str, str]) -> None:
    for name, folder in models.items():
        if not Path(folder, "config.json").is_file():
            raise UserError(f"{name}: there is no {Path(folder, 'config.json')}")


class EvaluateConfig(ChatConfig):
    """Scores of the original, the untrained hybrid and every checkpoint, by lm-eval."""

    engine: Literal["hf", "vllm"] = "hf"
    """What answers the tasks: transformers, or vLLM with the plugin for hybrids, which batches
    faster. The loss by position is transformers' in both."""
    tasks: Annotated[list[Line], AfterValidator(different)] = Field(
        default=list(get_args(NeedleTask))
    )
    """Tasks, groups and tags of lm-eval, of include_path, nolima, mrcr, and RULER's thirteen tasks
    (ruler: all), which stand in place of lm-eval's tasks with these names."""
    presets: Annotated[list[PresetName], AfterValidator(different)] = Field(default=[])
    """Lists of lm-eval's tasks, added to tasks: short (MMLU, ARC, HellaSwag, WinoGrande, GSM8K),
    long (LongBench v1 and v2, GraphWalks, InfiniteBench), reasoning (MATH500, AIME)."""
    include_path: Annotated[list[PathText], Input(_folders, _check_task_folders)] = Field(
        default=[]
    )
    """Folders with tasks of your own, as lm-eval reads them: YAML files and functions."""
    num_fewshot: int | None = Field(None, ge=0, le=1000)
    """Worked examples in a prompt; default: the task's own."""
    fewshot_as_multiturn: Flag = True
    """In a chat template, whether worked examples are turns of the conversation."""
    limit: Count | None = None
    """Documents per task, from its first on; default: all."""
    gen_kwargs: dict[Line, bool | int | float | Line | list[Line]] = Field(default={})
    """Settings of generation in place of the tasks' own, like {max_gen_toks: 2048}."""
    confirm_run_unsafe_code: Flag = False
    """Whether tasks may run code that the model writes, like humaneval."""
    ruler: RulerConfig = RulerConfig()
    positions: PositionConfig | None = None
    models: Annotated[
        dict[Annotated[Line, AfterValidator(_other_name)], PathText],
        Input(_folders, _check_models),
    ] = Field(default={})
    """Folders of other models of Hugging Face by name, scored with the original, on the same
    questions by their own tokenizer; they have no loss by position."""
    data: Annotated[dict[LocalTask, PathText], Input(_folders, _check_data)] = Field(default={})
    """Folders with the data of nolima (needle_set.json and haystack/ of NoLiMa) and mrcr (files of
    openai/mrcr, Parquet or JSON lines); both have the lengths, samples and seed of ruler."""

    def completed(self, recipe: Recipe) -> Self:
        """The section with the tasks of `ruler` and of its presets."""
        names = [*self.tasks, *(task for name in self.presets for task in PRESETS[name])]
        every = [one for name in names for one in (RULER_TASKS if name == "ruler" else (name,))]
        return self.model_copy(update={"tasks": list(dict.fromkeys(every))})

    @property
    def ruler_tasks(self) -> list[str]:
        return [task for task in self.tasks if task in RULER_TASKS]

    @property
    def own_tasks(self) -> list[str]:
        """RULER's tasks, NoLiMa and MRCR, which have lengths."""
        return [task for task in self.tasks if task in NEW_TOKENS]

    @property
    def lm_eval_tasks(self) -> list[str]:
        """All other tasks, groups and tags."""
        return [task for task in self.tasks if task not in NEW_TOKENS]


def _faults(loaded: LoadedRecipe) -> Iterator[Fault]:
    evaluate = loaded.recipe[EvaluateConfig]
    yield from evaluate.faults("evaluate")
    if not evaluate.tasks and evaluate.positions is None:
        yield Fault("evaluate.tasks", "names nothing to evaluate; set tasks, presets or positions")
    if evaluate.own_tasks:
        yield from evaluate.ruler.faults(loaded, evaluate)
    for task in {*evaluate.own_tasks} & {*get_args(LocalTask)} - {*evaluate.data}:
        yield Fault("evaluate.data", f"{task} needs a folder: data: {{{task}: FOLDER}}")
    if evaluate.positions is not None:
        yield from position_faults(loaded, "evaluate.positions.length", evaluate.positions.length)


def _missing(loaded: LoadedRecipe) -> Iterator[Fault]:
    """Missing files and packages other than the recipe's folders."""
    evaluate = loaded.recipe[EvaluateConfig]
    yield from evaluate.ruler.missing(evaluate.ruler_tasks)
    if evaluate.engine == "vllm" and importlib.util.find_spec("vllm") is None:
        yield Fault(
            "evaluate.engine",
            "vllm is not installed here; launch/setup_engine.sh vllm makes an environment with it",
        )
    folder = loaded.info.directory if loaded.info is not None else None
    if evaluate.apply_chat_template and folder is not None and not template_of(folder):
        yield Fault(
            "evaluate.apply_chat_template",
            f"the tokenizer in {folder} has no chat template; set it to false, or add "
            "chat_template.jinja",
        )


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
    slow_checks="stages.evaluate.names:slow_faults",
    cost="stages.evaluate.cost:cost",
)
