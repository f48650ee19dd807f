"""Tasks, groups and tags of lm-evaluation-harness: the tasks behind a name, and their data."""

from __future__ import annotations

import difflib
import functools
import importlib.util
import io
import json
import logging
import os
import random
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from pathlib import Path
from typing import Any

from bosch.errors import UserError
from stages.evaluate.answers import TaskGroup
from stages.evaluate.suites.harness import NO_HARNESS, HarnessEvaluation
from stages.faults import Fault

logger = logging.getLogger(__name__)

_SPLITS = ("train", "validation", "test", "dev")
# Fields of a task's configuration that name a split of its data.
_SPLIT_FIELDS = ("training_split", "validation_split", "test_split", "fewshot_split")
_FIELD = "evaluate.harness.tasks"
_ALL_TASKS = "`lm-eval ls tasks` lists them all"
# lm-eval marks all of LongProc as unsafe; scoring these tasks executes no output of a model.
_EXECUTES_NOTHING = re.compile(
    r"longproc_(path_traversal|tom_tracking|html_to_tsv|travel_planning)_[\d.]+k"
)
# With this seed lm-eval draws the order of a document's options, as in GPQA.
_DOCUMENT_SEED = 0
# Scores by which a mean differs from every other aggregation (sum, median, maximum).
_PROBE, _PROBE_MEAN = [0.0, 1.0, 1.0, 0.5], 0.625


@dataclass
class LoadedTasks:
    """The tasks of a name, reasons of tasks without data, and groups that have a score."""

    tasks: dict[str, Any] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    groups: dict[str, TaskGroup] = field(default_factory=dict)


@dataclass(frozen=True)
class _Absent:
    """Placeholder in lm-eval's groups for a task without data."""

    task_name: str


def name_faults(section: HarnessEvaluation, where: str) -> Iterator[Fault]:
    """Tasks that lm-eval does not know, or that a run would refuse."""
    unknown = _unknown(section.tasks)
    for name, similar in unknown.items():
        hint = f"did you mean {similar}? " if similar else ""
        yield Fault(f"{where}.tasks", f"lm-eval knows no task {name}; {hint}{_ALL_TASKS}")
    if not unknown:
        try:
            refuse_unscorable(task_manager(section.tasks), section.tasks)
        except UserError as fault:
            yield Fault.of(fault, f"{where}.tasks")


def _unknown(names: Sequence[str]) -> dict[str, str | None]:
    """Names unknown to lm-eval, each with the most similar name of a file or folder.

    Searches the text of lm-eval's files, first those in the folder named like the task. A name that
    occurs there as something other than a task passes; the harness refuses it before training.
    """
    spec = importlib.util.find_spec("lm_eval")
    if spec is None or spec.origin is None:
        return {}
    below = Path(spec.origin).parent / "tasks"
    unknown = set(names)
    for folder in (*sorted({below / name.split("_")[0] for name in unknown}), below):
        for place, _, files in os.walk(folder) if unknown else ():
            # Files that other files include, with their tags, have no suffix.
            for file in (file for file in files if os.path.splitext(file)[1] in ("", ".yaml")):
                content = Path(place, file).read_bytes()
                candidates = [name for name in unknown if name.encode() in content]
                text = content.decode(errors="replace") if candidates else ""
                for name in candidates:
                    if re.search(rf"(?<![\w.+-]){re.escape(name)}(?![\w.+-])", text):
                        unknown.remove(name)
    stems = sorted({path.stem for path in below.rglob("*")}) if unknown else []
    return {
        name: next(iter(difflib.get_close_matches(name, stems, n=1)), None)
        for name in names
        if name in unknown
    }


def task_manager(names: Sequence[str]) -> Any:
    """The harness's index of the folders named like these tasks, or of all folders.

    Raises UserError when lm-eval is not installed.
    """
    spec = importlib.util.find_spec("lm_eval")
    if spec is None or spec.origin is None:
        raise UserError(NO_HARNESS, "evaluate.harness")
    from lm_eval.tasks import TaskManager

    below = Path(spec.origin).parent / "tasks"
    folders = {below / name.split("_")[0] for name in names}
    if all(folder.is_dir() for folder in folders):
        manager = TaskManager(include_path=list(map(str, folders)), include_defaults=False)
        # Tasks of a group or a tag may lie in other folders.
        if set(names) <= set(manager.all_subtasks):
            return manager
    return whole_index()


@functools.cache
def whole_index() -> Any:
    """The harness's index of all its thousands of files, which takes many seconds to make."""
    from lm_eval.tasks import TaskManager

    return TaskManager()


def leaf_configs(manager: Any, name: str) -> dict[str, Mapping[str, Any]]:
    """The tasks that a task, group or tag of lm-eval stands for, by name; builds none of them.

    A task that is defined only inside its group is called <group>::<task>. Raises UserError when
    lm-eval knows no such name.
    """
    index = manager.task_index
    if name not in index:
        raise UserError(f"{_FIELD}: lm-eval knows no task {name}; {_ALL_TASKS}")

    def of_name(task_name: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
        entry = index[task_name]
        if entry.kind.name == "TAG":
            for member in sorted(entry.tags & index.keys()):
                yield from of_name(member)
        elif entry.kind.name == "GROUP":
            yield from of_group(task_name, entry.cfg)
        else:
            yield task_name, entry.cfg

    def of_group(group: str, config: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
        members = config.get("task") or []
        for member in [members] if isinstance(members, str) else members:
            task = member if isinstance(member, str) else member.get("group", member.get("task"))
            if task in index:
                is_task = isinstance(member, Mapping) and "task" in member
                if is_task and index[task].kind.name in ("TAG", "GROUP"):
                    raise UserError(
                        f"{_FIELD}: {group} sets options of {task}, which lm-eval would then take "
                        f"for one of its tasks; name {task} and the others of {group} themselves"
                    )
                yield from of_name(task)
            elif isinstance(member, Mapping) and "group" in member:
                yield from of_group(f"{group}::{task}", member)
            else:
                yield f"{group}::{task}", member if isinstance(member, Mapping) else {}

    return dict(of_name(name))


def refuse_unscorable(manager: Any, names: Sequence[str]) -> None:
    """Raise UserError for tasks that run a model's code, or lack a score in [0, 1] or a file."""
    for name in names:
        for leaf, config in leaf_configs(manager, name).items():
            if "::" in leaf:
                fault = "is defined inside its group, where lm-eval takes no local data or settings"
            elif config.get("unsafe_code") and _EXECUTES_NOTHING.fullmatch(leaf) is None:
                fault = "runs code that the model writes, which this project does not do"
            elif config.get("output_type") == "loglikelihood_rolling":
                fault = "measures perplexity, not a share (evaluate.positions measures loss)"
            else:
                continue
            task = leaf if leaf == name else f"{name} has {leaf}, which"
            raise UserError(f"{_FIELD}: {task} {fault}; leave it out")


def load_tasks(manager: Any, name: str, section: HarnessEvaluation) -> LoadedTasks:
    """The tasks that `name` stands for, each on its local data if there is any.

    They are lm-eval's tasks with the settings of its groups. Raises UserError when lm-eval knows no
    such name, or its tasks cannot be scored here.
    """
    refuse_unscorable(manager, [name])
    # Silence warnings that do not matter here.
    logging.getLogger("lm_eval.api.task").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", "Using slow pure-python SequenceMatcher")
    loaded = LoadedTasks()
    factory = manager._factory
    build_task = factory._build_task

    def build(entry: Any, overrides: Mapping[str, Any] | None) -> Any:
        """A task with its data; without data a placeholder, with the reason in `missing`."""
        try:
            changes = _changes(manager.task_index, entry, overrides or {}, section)
            random.seed(_DOCUMENT_SEED)  # worked examples are drawn when the task is created
            task = build_task(entry, changes)
            _seed_documents(task)
            _check_task(task)
        except UserError:
            raise
        except Exception as error:  # errors of a task's data and code, of any type
            loaded.missing[entry.name] = reason = no_data(error)
            logger.warning("%s has no score: %s", entry.name, reason)
            return _Absent(entry.name)
        return task

    # lm-eval has no settings for a single task of a group: all its tasks inherit the group's.
    factory._build_task = build
    try:
        built = manager.load([name])
    finally:
        del factory._build_task
    loaded.tasks = {
        name: task for name, task in built["tasks"].items() if not isinstance(task, _Absent)
    }
    for group_name, group in built.get("groups", {}).items():
        if group.has_aggregation:
            rules = tuple(group.aggregate_metric_list)
            loaded.groups[group_name] = TaskGroup(
                tuple(_leaf_names(group)), rules, is_named=group_name == name
            )
    return loaded


def _changes(
    index: Mapping[str, Any],
    entry: Any,
    overrides: Mapping[str, Any],
    section: HarnessEvaluation,
) -> dict[str, Any]:
    """Settings of a task from outside its file: its groups, the recipe and its data."""
    changes = dict(overrides)
    files = local_files(index, entry.name, section.data_dir, changes)
    if not files and not section.hub:
        raise FileNotFoundError(f"{section.data_dir} holds no files of {entry.name}")
    if files:
        splits = _splits({**entry.cfg, **changes})
        changes["custom_dataset"] = lambda **_: _datasets(files, splits)
    if section.num_fewshot is not None:
        changes["num_fewshot"] = section.num_fewshot
    return changes


def _seed_documents(task: Any) -> None:
    """Make a task's documents the same in every process and at each access."""
    for config in (task.config, task.config.fewshot_config):
        if callable(config.process_docs):
            config.process_docs = seeded(config.process_docs)


def seeded(process: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A task's function that draws the same numbers in every process and at each call."""

    @functools.wraps(process)
    def with_seed(dataset: Any) -> Any:
        random.seed(_DOCUMENT_SEED)
        return process(dataset)

    return with_seed


def no_data(error: Exception) -> str:
    """Why a task has no score."""
    reason = " ".join(str(error).split())[:200] or type(error).__name__
    return f"its data could not be read ({reason})"


def _check_task(task: Any) -> None:
    """Raise if a task has no documents or worked examples, or no score that is a mean."""
    if not len(task.eval_docs):
        raise ValueError("it has no documents")
    shots = task.config.num_fewshot or 0
    examples = sum(1 for _ in islice(task.fewshot_docs() or (), shots)) if shots else 0
    if examples < shots:
        split = task.fewshot_cfg.split or "train"
        raise ValueError(
            f"its {shots} worked examples come from {split}.jsonl, which has {examples}; add "
            "it, or set num_fewshot"
        )
    if not mean_metrics(task):
        raise UserError(
            f"{_FIELD}: {task.task_name} measures {', '.join(task.aggregation())}, which is not "
            "a mean of one share from 0 to 1 per document; leave it out"
        )


def mean_metrics(task: Any) -> set[str]:
    """The task's metrics that are the mean of their values for each document."""

    def is_mean(aggregation: Any) -> bool:
        try:
            return abs(float(aggregation(list(_PROBE))) - _PROBE_MEAN) < 1e-9
        except Exception:  # it aggregates values other than numbers
            return False

    return {metric for metric, how in task.aggregation().items() if is_mean(how)}


def _leaf_names(group: Any) -> Iterator[str]:
    for child in group:
        name = getattr(child, "task_name", None)
        yield from _leaf_names(child) if name is None else [name]


def local_files(
    index: Mapping[str, Any], name: str, data_dir: str | None, changes: Mapping[str, Any]
) -> dict[str, Path]:
    """Files of a task below the data folder, by split; `changes` may name other splits.

    They are <folder>/<task>/<split>.jsonl. Without such files, those of a task on the same data
    whose name is a prefix of `name` are used: those of gsm8k for gsm8k_cot.
    """
    if data_dir is None:
        return {}
    root = Path(data_dir)
    config = index[name].cfg
    splits = _splits({**config, **changes})
    words = name.split("_")
    for count in range(len(words), 0, -1):
        folder = "_".join(words[:count])
        if folder != name and (folder not in index or _data(index[folder].cfg) != _data(config)):
            continue
        paths = {split: root / folder / f"{split}.jsonl" for split in splits}
        files = {split: path for split, path in paths.items() if path.is_file()}
        if files:
            return files
    return {}


def _data(config: Mapping[str, Any] | None) -> tuple[Any, ...]:
    return tuple((config or {}).get(name) for name in ("dataset_path", "dataset_name"))


def _splits(config: Mapping[str, Any]) -> tuple[str, ...]:
    fewshot = config.get("fewshot_config")
    named = [config.get(name) for name in _SPLIT_FIELDS]
    named.append(fewshot.get("split") if isinstance(fewshot, Mapping) else None)
    return tuple(dict.fromkeys(name for name in named if isinstance(name, str))) or _SPLITS


def _datasets(files: Mapping[str, Path], splits: Sequence[str]) -> dict[str, Any]:
    """A dataset for each split; empty without a file, since a task may not need the split."""
    from datasets import Dataset

    datasets = {split: Dataset.from_list(read_records(path)) for split, path in files.items()}
    columns = next(iter(datasets.values())).column_names
    empty = Dataset.from_dict({name: [] for name in columns})
    return {split: datasets.get(split, empty) for split in splits}


def read_records(path: Path) -> list[dict[str, Any]]:
    """The objects of a JSONL file, which all have the same fields.

    Raises ValueError with the file and, for an invalid object, its line.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from error
    records = dict[int, dict[str, Any]]()  # by line
    for number, line in enumerate(io.BytesIO(content), 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except ValueError as error:
            reason = getattr(error, "msg", None) or str(error)
            raise ValueError(f"{path}, line {number}: not JSON ({reason})") from None
        if not isinstance(record, dict):
            raise ValueError(f"{path}, line {number}: expected an object")
        records[number] = record
    # A dataset would fill in nulls, which a prompt shows as the text None.
    for name in dict.fromkeys(chain.from_iterable(records.values())):
        lacking = [number for number, record in records.items() if name not in record]
        if lacking:
            raise ValueError(
                f"{path}, line {lacking[0]}: lacks the field {name}, which other lines have"
            )
    return [*records.values()]
