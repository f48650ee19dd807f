"""The tasks of a recipe as lm-eval's tasks, and a model's answers to them."""

from __future__ import annotations

import itertools
import logging
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import lm_eval.api.task
import numpy as np
import torch
from accelerate import PartialState
from accelerate.utils import gather_object
from lm_eval.evaluator import evaluate
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.tasks import TaskManager

from bosch.errors import RunError, UserError
from bosch.progress import progress
from data_prep.documents.calibration import CalibrationNeedles
from data_prep.tasks.ruler import Corpus, make_rows, read_rows, write_rows
from data_prep.text import haystack_words
from stages.context import StageConfig
from stages.evaluate.lm import LanguageModel
from stages.evaluate.names import ALL_TASKS, default_folder
from stages.evaluate.scores import TAIL_CHARACTERS
from stages.evaluate.stage import RULER_TASKS, EvaluateConfig
from stages.evaluate.tables import LM_EVAL, RULER, TaskGroup
from stages.evaluate.tasks.local import MAKERS

logger = logging.getLogger(__name__)
# Bars only on a terminal.
lm_eval.api.task.tqdm = partial(lm_eval.api.task.tqdm, disable=None)

OWN_TASKS = Path(__file__).parent / "tasks"
# A task's score is the first of these metrics that it has.
_METRICS = ("math_verify", "acc_norm", "acc", "exact_match", "f1", "score")
# Scores by which a mean differs from every other aggregation (sum, median, maximum).
_PROBE, _PROBE_MEAN = [0.0, 1.0, 1.0, 0.5], 0.625


@dataclass(frozen=True)
class AskedTask:
    """A task at a length (0: no length) of `documents` documents; `build` makes lm-eval's task."""

    suite: str
    name: str
    length: int
    documents: int
    build: Callable[[], Any]


@dataclass
class RecipeTasks:
    """A recipe's tasks in order; by suite the reasons of tasks without data, or without a score."""

    tasks: list[AskedTask] = field(default_factory=list)
    groups: dict[str, TaskGroup] = field(default_factory=dict)
    missing: dict[str, dict[str, str]] = field(default_factory=dict)

    def leave_out(self, suite: str, task: str, reason: str) -> None:
        logger.warning("%s has no score: %s", task, reason)
        self.missing.setdefault(suite, {})[task] = reason


def load_tasks(
    config: StageConfig[EvaluateConfig],
    tokenizer: Any,
    folder: Path,
    positions: int | None,
    state: PartialState,
    calibration: CalibrationNeedles | None,
) -> RecipeTasks:
    """All tasks, with RULER's samples in `folder`; called on every rank.

    Raises UserError for a task that lm-eval does not have, and for RULER's tasks that do not fit or
    whose data is missing or damaged, and RunError if a sample shares a needle with the
    `calibration` set.
    """
    section, found = config.section, RecipeTasks()
    found.tasks = _own_tasks(config, tokenizer, folder, state, calibration)
    names = section.lm_eval_tasks
    if not names:
        return found
    manager = _manager(names, section, config.model.path)
    for name in names:
        _seed()
        try:
            loaded = manager.load([name])
        except UserError:
            raise
        except Exception as error:  # errors of a task's data and code, of any type
            reason = " ".join(str(error).split())[:200] or type(error).__name__
            found.leave_out(LM_EVAL, name, f"its data could not be read ({reason})")
            continue
        for task_name, task in loaded["tasks"].items():
            if any(one.name == task_name for one in found.tasks):
                raise UserError(
                    f"evaluate.tasks: {name} has {task_name}, which another name of the list has "
                    "too; leave one of the two out"
                )
            _set(task, section)
            if fault := _fault(task, section, positions):
                found.leave_out(LM_EVAL, task_name, fault)
                continue
            count = min(len(task.eval_docs), section.limit or len(task.eval_docs))
            found.tasks.append(AskedTask(LM_EVAL, task_name, 0, count, partial(_same, task)))
        for group_name, group in loaded.get("groups", {}).items():
            if group.has_aggregation:
                found.groups[group_name] = _group(group, group_name == name)
    return found


def _seed() -> None:
    """As lm-eval's simple_evaluate; tasks draw documents and examples by these."""
    random.seed(0)
    np.random.seed(1234)
    torch.manual_seed(1234)


def _manager(names: Sequence[str], section: EvaluateConfig, model: str) -> Any:
    """An index of the folders named like these tasks, or if that is too little of all.

    Raises UserError for a name that no folder has.
    """
    below = default_folder()
    assert below is not None  # lm-eval is imported
    options: dict[str, Any] = {"metadata": {"pretrained": model}}
    folders = sorted({str(below / name.split("_")[0]) for name in names})
    own = list(section.include_path)
    near = [folder for folder in folders if Path(folder).is_dir()]
    manager = TaskManager(include_path=[*near, *own], include_defaults=False, **options)
    if not all(is_whole(manager.task_index, name) for name in names):
        manager = TaskManager(include_path=own, **options)
    for name in names:
        if name not in manager.all_tasks:
            raise UserError(f"evaluate.tasks: there is no task {name}; {ALL_TASKS} of lm-eval")
    return manager


def is_whole(index: Mapping[str, Any], name: str) -> bool:
    """Whether an index of some folders has all of a group; a tag may have tasks anywhere."""
    entry = index.get(name)
    if entry is None or entry.kind.name == "TAG":
        return False
    members = entry.cfg["task"] if entry.kind.name == "GROUP" else []
    members = members if isinstance(members, list) else [members]
    names = [one if isinstance(one, str) else one.get("group", one.get("task")) for one in members]
    return all(is_whole(index, one) for one in names)


def _same(task: Any) -> Any:
    return task


def _set(task: Any, section: EvaluateConfig) -> None:
    """Give a loaded task the recipe's settings, as simple_evaluate does."""
    if task.OUTPUT_TYPE == "generate_until" and section.gen_kwargs:
        task.set_config("generation_kwargs", dict(section.gen_kwargs), update=True)
    own = task.get_config("num_fewshot")
    if own is None or (section.num_fewshot is not None and own != 0):
        task.set_config("num_fewshot", section.num_fewshot or 0)
    # Otherwise lm-eval makes a task's documents again at each access, where some are drawn.
    method = "test_docs" if task.has_test_docs() else "validation_docs"
    setattr(task, method, partial(_same, task.eval_docs))


def _fault(task: Any, section: EvaluateConfig, positions: int | None) -> str | None:
    """Why a task has no score here."""
    if getattr(task, "UNSAFE_CODE", False) and not section.confirm_run_unsafe_code:
        return "it runs code that the model writes; set evaluate.confirm_run_unsafe_code"
    if getattr(task, "MULTIMODAL", False):
        return "it has pictures or sound"
    if not mean_metrics(task):
        return f"it measures {', '.join(task.aggregation())}, none of which is a mean of documents"
    shots = task.config.num_fewshot
    if shots and sum(1 for _ in itertools.islice(task.fewshot_docs() or (), shots)) < shots:
        return f"its {shots} worked examples are more than its data has; set num_fewshot"
    if task.OUTPUT_TYPE == "generate_until":
        most = normalize_gen_kwargs(dict(task.config.generation_kwargs))["max_gen_toks"]
        if positions is not None and most >= positions:
            return (
                f"its answers of up to {most:,} tokens leave none of the model's {positions:,} "
                "positions for a prompt"
            )
    elif section.enable_thinking:
        return "it compares probabilities, which enable_thinking does not allow"
    return None


def mean_metrics(task: Any) -> set[str]:
    """The task's metrics that are the mean of their values for each document."""

    def is_mean(aggregation: Any) -> bool:
        try:
            return abs(float(aggregation(list(_PROBE))) - _PROBE_MEAN) < 1e-9
        except Exception:  # it aggregates values other than numbers
            return False

    return {metric for metric, how in task.aggregation().items() if is_mean(how)}


def _group(group: Any, is_named: bool) -> TaskGroup:
    rule = group.aggregate_metric_list[0]
    filters = rule.filter_list or ["none"]
    tasks = tuple(task.task_name for task in group.get_all_tasks())
    metrics = tuple(f"{rule.metric},{one}" for one in filters)
    return TaskGroup(tasks, metrics, bool(rule.weight_by_size), is_named)


def _own_tasks(
    config: StageConfig[EvaluateConfig],
    tokenizer: Any,
    folder: Path,
    state: PartialState,
    calibration: CalibrationNeedles | None,
) -> list[AskedTask]:
    """RULER's tasks, NoLiMa and MRCR by length; the files of rows are dealt to the ranks."""
    section = config.section
    ruler, names = section.ruler, section.own_tasks
    data: Mapping[str, str] = {str(name): place for name, place in section.data.items()}
    if not names:
        return []
    every = list(itertools.product(ruler.lengths, names))
    corpus = ruler_corpus(section)

    def rows(task: str, length: int) -> Iterator[dict[str, Any]]:
        count, seed, new_tokens = ruler.samples, config.seed, ruler.new_tokens(task)
        if task in MAKERS:
            place = Path(data[task])
            local = [*MAKERS[task](place, length, count, seed, new_tokens, tokenizer)]
            if not local:
                raise UserError(
                    f"evaluate.data: {place} has no prompt of {task} for {length:,} tokens; choose "
                    "other evaluate.ruler.lengths"
                )
            yield from local
            return
        made = make_rows(
            task, length, count, seed=seed, new_tokens=new_tokens, corpus=corpus,
            tokenizer=tokenizer,
        )  # fmt: skip
        for number, row in enumerate(made):
            if calibration is not None:
                calibration.check(f"{task} {number}", row["prompt"], row["needles"])
            yield row

    faults: list[tuple[type[Exception], str]] = []
    own = every[state.process_index :: state.num_processes]
    with progress(len(own), "RULER samples", "tasks") as bar:
        for length, task in own:
            path = _file(folder, task, length)
            try:
                if not path.exists():
                    write_rows(path, rows(task, length))
            except (UserError, RunError) as fault:
                faults.append((type(fault), str(fault)))
            bar.update()
    if faults := gather_object(faults):
        raise faults[0][0]("\n".join(text for _, text in faults))
    count = min(ruler.samples, section.limit or ruler.samples)
    asked = []
    for length, task in every:
        there = count  # a folder may have fewer
        if task in MAKERS:
            there = min(count, len(read_rows(_file(folder, task, length))))
        builder = _builder(folder, task, length, section)
        asked.append(AskedTask(_suite(task), task, length, there, builder))
    return asked


def _suite(task: str) -> str:
    return RULER if task in RULER_TASKS else LM_EVAL


def ruler_corpus(section: EvaluateConfig) -> Corpus:
    """The texts and words of RULER's samples."""
    data_dir = section.ruler.data_dir
    words = haystack_words(section.ruler.essay_dir)
    return Corpus(words, Path(data_dir) if data_dir is not None else None)


def _file(folder: Path, task: str, length: int) -> Path:
    return folder / f"{task}-{length}.jsonl"


def _builder(folder: Path, name: str, length: int, section: EvaluateConfig) -> Callable[[], Any]:
    """Builds the task anew for each model: all rows together may not fit into memory."""

    def build() -> Any:
        metadata: Any = {"files": str(folder), "length": length}
        manager = TaskManager(
            include_path=str(OWN_TASKS), include_defaults=False, metadata=metadata
        )
        task = manager.load([name])["tasks"][name]
        options = {"max_gen_toks": section.ruler.new_tokens(name)}
        task.set_config("generation_kwargs", options, update=True)
        return task

    return build


def ask(lm: LanguageModel, asked: AskedTask, section: EvaluateConfig) -> list[dict[str, Any]]:
    """A model's answers to a task, in order; called on every rank."""
    task = asked.build()
    _seed()
    task.set_fewshot_seed(1234)
    lm.note = f"{asked.name} at {asked.length:,}" if asked.length else asked.name
    result = evaluate(
        lm,
        {"tasks": {asked.name: task}},
        limit=section.limit,
        bootstrap_iters=0,
        system_instruction=section.system_instruction,
        apply_chat_template=section.apply_chat_template,
        fewshot_as_multiturn=section.fewshot_as_multiturn,
        confirm_run_unsafe_code=section.confirm_run_unsafe_code,
    )
    by_document: dict[int, list[Mapping[str, Any]]] = {}
    for logged in result["samples"][asked.name]:
        by_document.setdefault(logged["doc_id"], []).append(logged)
    metrics, place = mean_metrics(task), {"task": asked.name, "length": asked.length}
    task._instances = None
    records = []
    for index, logged in sorted(by_document.items()):
        cut = any(lm.is_cut(arguments[0]) for arguments in logged[0]["arguments"])
        record = _record(logged, metrics) | ({"cut": True} if cut else {})
        records.append({"suite": asked.suite, **place, "index": index, **record})
    return records


def _record(logged: Sequence[Mapping[str, Any]], metrics: set[str]) -> dict[str, Any]:
    """A document's answer; `scores` has each of `metrics` under every filter."""
    scores = {
        f"{metric},{entry['filter']}": float(entry[metric])
        for entry in logged
        for metric in entry["metrics"]
        if metric in metrics and isinstance(entry[metric], (int, float, np.number))
    }
    first = logged[0]
    preferred = [f"{metric},{first['filter']}" for metric in _METRICS]
    name = next(name for name in (*preferred, *scores) if name in scores)
    responses = np.ravel(np.array(first["filtered_resps"], dtype=object))
    return {
        "score": scores[name],
        "scores": scores,
        "answers": list(first["doc"].get("answers") or [str(first["target"])]),
        "question": str(first["arguments"][0][0])[-TAIL_CHARACTERS:],
        "output": " | ".join(map(str, responses)),
        "prompt": first["prompt_hash"][:16],
    }
