"""Tasks of lm-evaluation-harness on one rank: LongBench v1, GSM8K and whatever else it has.

The model is the one that is loaded for all suites. LongBench takes the harness's prompts
and the benchmark's own truncation in the middle, which the harness lacks.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from bosch.errors import UserError
from bosch.progress import Progress
from data_prep import longbench
from data_prep.ruler_samples import tokenizer_digest
from data_prep.text import read_utf8
from stages.configs import HarnessEvaluation
from stages.evaluate.answers import AnswerFolder, Evaluated, Subtask, digest_of
from stages.evaluate.generation import Question, generate
from stages.evaluate.shared_prompt import SharedPrompt
from stages.versions import installed_versions

logger = logging.getLogger(__name__)

_LONGBENCH = "longbench_"
# Documents that the harness answers at once; each chunk is on disk before the next begins.
CHUNK = 64
# With this seed lm-eval draws a task's worked examples, one document after the other.
_FEWSHOT_SEED = 1234
_SPLITS = ("train", "validation", "test", "dev")
# The first of these that a task has is its score.
_METRICS = ("acc_norm", "acc", "exact_match", "f1", "score")


@dataclass
class HarnessSuite:
    """Tasks and answers of one of `world` ranks, which takes every `world`-th document."""

    section: HarnessEvaluation
    tokenizer: Any
    answers: AnswerFolder
    rank: int
    world: int
    batch_size: int
    name: str = "harness"
    missing: dict[str, str] = field(default_factory=dict)
    groups: dict[str, list[str]] = field(default_factory=dict)
    _tasks: dict[Subtask, Any] = field(default_factory=dict)
    _requests: dict[Subtask, dict[int, list[Any]]] = field(default_factory=dict)

    @property
    def subtasks(self) -> list[Subtask]:
        return list(self._tasks)

    def samples(self, subtask: Subtask) -> int:
        count = len(self._tasks[subtask].eval_docs)
        return count if self.section.samples is None else min(count, self.section.samples)

    def prepare(self) -> None:
        """Load the tasks' documents; a task whose data is not there becomes `missing`.

        Raises:
            UserError: lm-eval is not installed or knows no such task.
        """
        manager = task_manager(self.section.task_names)
        for name in self.section.task_names:
            try:
                tasks = load_tasks(manager, name, self.section)
            except UserError:
                raise
            except Exception as error:  # whatever a task's own data and code raise
                reason = " ".join(str(error).split())[:200] or type(error).__name__
                self.missing[name] = f"its data could not be read ({reason})"
                logger.warning("%s has no score: %s", name, self.missing[name])
                continue
            for one, task in tasks.items():
                self._tasks[Subtask(one, 0, self._digest(name, task))] = task
            if len(tasks) > 1:
                self.groups[name] = list(tasks)
        if any(name.startswith(_LONGBENCH) for name in self.section.task_names):
            self.groups |= longbench.groups()

    def open_samples(self, model: Evaluated) -> int:
        return sum(len(self._open(model, subtask)) for subtask in self.subtasks)

    def run(self, model: Evaluated, loaded: Any, bar: Progress) -> None:
        for subtask in self.subtasks:
            indices = self._open(model, subtask)
            if not indices:
                continue
            journal = self.answers.journal(model, subtask)
            is_longbench = subtask.task.startswith(_LONGBENCH)
            answers = self._longbench_answers if is_longbench else self._harness_answers
            for records in answers(subtask, indices, loaded):
                journal.append(*records)
                bar.update(len(records), note=subtask.task)

    def _open(self, model: Evaluated, subtask: Subtask) -> list[int]:
        answered = self.answers.read(model, subtask).keys()
        indices = range(self.rank, self.samples(subtask), self.world)
        return [index for index in indices if index not in answered]

    def _digest(self, name: str, task: Any) -> str:
        documents = [dict(document) for document in task.eval_docs]
        return digest_of(
            {
                "documents": json.dumps(documents, default=str, sort_keys=True),
                "files": {
                    split: hashlib.sha256(path.read_bytes()).hexdigest()
                    for split, path in local_files(name, self.section.data_dir).items()
                },
                "shots": [task.config.num_fewshot, _FEWSHOT_SEED],
                "version": installed_versions(["lm-eval"]),
                "max_length": self.section.max_length,
                "tokenizer": tokenizer_digest(self.tokenizer),
            }
        )

    def requests(self, subtask: Subtask) -> dict[int, list[Any]]:
        """What the harness asks about each document when one process runs them all, in order.

        A document's worked examples depend on those drawn before, so all are drawn together, and
        the harness's `evaluate` must not draw them again.
        """
        if subtask not in self._requests:
            task = self._tasks[subtask]
            task.set_fewshot_seed(_FEWSHOT_SEED)
            task.build_all_requests(limit=self.samples(subtask))
            task.build_all_requests = lambda **_: None
            requests: dict[int, list[Any]] = {}
            for request in task.instances:
                requests.setdefault(request.doc_id, []).append(request)
            self._requests[subtask] = requests
        return self._requests[subtask]

    def _longbench_answers(
        self, subtask: Subtask, indices: Sequence[int], loaded: Any
    ) -> Iterator[list[dict[str, Any]]]:
        """Records of the answers to the documents at `indices`, a batch at a time."""
        name, task = subtask.task.removeprefix(_LONGBENCH), self._tasks[subtask]
        limit, questions = self.section.max_length, []
        for index in indices:
            document = task.eval_docs[index]
            text = longbench.prompt(name, task.config.doc_to_text, document)
            ids = np.asarray(longbench.truncated_ids(self.tokenizer, text, limit), np.int32)
            questions.append(Question(index, ids, [], text[-300:]))
        for batch in generate(
            loaded, self.tokenizer, questions, longbench.TASKS[name].new_tokens, self.batch_size,
            stop_at_newline=name == "samsum",
        ):  # fmt: skip
            records = []
            for question, output in batch:
                document = task.eval_docs[question.index]
                answers = [str(answer) for answer in document["answers"]]
                score = longbench.score(name, output, answers, document["all_classes"])
                record = {"index": question.index, "score": score, "answers": answers}
                records.append({**record, "question": question.tail, "output": output})
            yield records

    def _harness_answers(
        self, subtask: Subtask, indices: Sequence[int], loaded: Any
    ) -> Iterator[list[dict[str, Any]]]:
        """Records of the answers to the documents at `indices`, a chunk at a time."""
        from lm_eval.evaluator import evaluate

        lm = language_model(loaded, self.tokenizer, self.batch_size)
        task = self._tasks[subtask]
        requests = self.requests(subtask)
        for start in range(0, len(indices), CHUNK):
            chunk = list(indices[start : start + CHUNK])
            task._instances = [
                _numbered(request, number)
                for number, index in enumerate(chunk)
                for request in requests[index]
            ]
            result = evaluate(
                lm,
                {"tasks": {subtask.task: task}},
                samples={subtask.task: chunk},
                bootstrap_iters=0,
            )
            by_document: dict[int, list[Mapping[str, Any]]] = {}
            for logged in result["samples"][subtask.task]:
                by_document.setdefault(logged["doc_id"], []).append(logged)
            yield [record_of(index, by_document[index]) for index in chunk]


def _numbered(request: Any, number: int) -> Any:
    """The request as that of document `number` of those that are asked together, unanswered."""
    place = (request.task_name, number, request.repeats)
    return replace(request, metadata=place, resps=[], filtered_resps={})


def language_model(loaded: Any, tokenizer: Any, batch_size: int) -> Any:
    """The harness's interface to a loaded model; what prompts begin with is computed once."""
    from lm_eval.models.huggingface import HFLM

    shared = SharedPrompt(loaded)

    class Model(HFLM):  # type: ignore[misc]
        def _model_generate(self, context: Any, *args: Any, **kwargs: Any) -> Any:
            cache = shared.cache(context, kwargs["attention_mask"])
            if cache is not None:
                kwargs["past_key_values"] = cache
            return super()._model_generate(context, *args, **kwargs)

    lm = Model(pretrained=loaded, tokenizer=tokenizer, batch_size=batch_size)
    # The ranks have their own documents here; the harness must not split them again.
    lm._rank, lm._world_size = 0, 1
    return lm


def record_of(index: int, logged: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """A document's answer; `scores` holds every metric under every filter of the harness.

    Raises:
        UserError: the task's score is no share, so that intervals and averages mean nothing.
    """
    scores = {
        f"{metric},{one['filter']}": float(one[metric])
        for one in logged
        for metric in one["metrics"]
        if isinstance(one[metric], (int, float, np.number))
    }
    first = logged[0]["filter"]
    named = [f"{m},{first}" for m in _METRICS if f"{m},{first}" in scores] or list(scores)
    if not named or not 0 <= scores[named[0]] <= 1:
        raise UserError(
            f"evaluate.harness: a task measures {', '.join(scores) or 'nothing'}, which is no "
            "share of 1 per document; leave the task out"
        )
    return {
        "index": index,
        "score": scores[named[0]],
        "scores": scores,
        "answers": [str(logged[0]["target"])],
        "question": str(logged[0]["arguments"][0][0])[-300:],
        "output": " | ".join(str(response) for response in np.ravel(logged[0]["filtered_resps"])),
    }


def task_manager(names: Sequence[str]) -> Any:
    """The harness's index of the folders that these tasks are in by their names, else the whole.

    Raises:
        UserError: lm-eval is not installed.
    """
    spec = importlib.util.find_spec("lm_eval")
    if spec is None or spec.origin is None:
        raise UserError(
            "evaluate.harness: lm-evaluation-harness is not installed; "
            "pip install 'bosch-pipeline[eval]'"
        )
    from lm_eval.tasks import TaskManager

    below = Path(spec.origin).parent / "tasks"
    folders = {below / name.split("_")[0] for name in names}
    if all(folder.is_dir() for folder in folders):
        paths = sorted(str(folder) for folder in folders)
        manager = TaskManager(include_path=paths, include_defaults=False)
        if set(names) <= set(manager.all_tasks):
            return manager
    return whole_index()


def whole_index() -> Any:
    """The index of thousands of files, which takes many seconds."""
    from lm_eval.tasks import TaskManager

    return TaskManager()


def load_tasks(manager: Any, name: str, section: HarnessEvaluation) -> dict[str, Any]:
    """The harness's task, on local data where there is some; for a group all that it holds."""
    if name not in manager.all_tasks:
        raise UserError(
            f"evaluate.harness.tasks: lm-eval knows no task {name}; "
            "`lm-eval ls tasks` lists them all"
        )
    files = local_files(name, section.data_dir)
    if not files and not section.hub:
        raise FileNotFoundError(f"{section.data_dir} holds no files of {name}")
    spec: dict[str, Any] = {"task": name}
    if files:
        spec["custom_dataset"] = lambda **_: _datasets(files)
    if section.num_fewshot is not None:
        spec["num_fewshot"] = section.num_fewshot
    # Advice that is none to whoever runs a recipe.
    logging.getLogger("lm_eval.api.task").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", "Using slow pure-python SequenceMatcher")
    # As a group of one, so that the harness puts what is named here over the task's own settings.
    tasks: dict[str, Any] = manager.load([{"group": f"{name}_here", "task": [spec]}])["tasks"]
    for task in tasks.values():
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
    return tasks


def local_files(name: str, data_dir: str | None) -> dict[str, Path]:
    """Files of a task below the data folder, by split.

    LongBench: <folder>/longbench/<task>.jsonl, as its data.zip has them; else
    <folder>/<task>/<split>.jsonl, where gsm8k's files serve its variants (gsm8k_cot) too.
    """
    if data_dir is None:
        return {}
    root = Path(data_dir)
    if name.startswith(_LONGBENCH):
        file = root / "longbench" / f"{name.removeprefix(_LONGBENCH)}.jsonl"
        return {"test": file} if file.is_file() else {}
    for folder in (root / name, root / name.split("_")[0]):
        files = {split: folder / f"{split}.jsonl" for split in _SPLITS}
        there = {split: path for split, path in files.items() if path.is_file()}
        if there:
            return there
    return {}


def _datasets(files: Mapping[str, Path]) -> dict[str, Any]:
    """A dataset for each split; one without a file is empty, for a task may do without it."""
    from datasets import Dataset

    there = {
        split: Dataset.from_list([_with_both_names(record) for record in read_records(path)])
        for split, path in files.items()
    }
    columns = next(iter(there.values())).column_names
    empty = Dataset.from_dict({name: [] for name in columns})
    return {split: there.get(split, empty) for split in _SPLITS}


def _with_both_names(record: dict[str, Any]) -> dict[str, Any]:
    """A record of LongBench, whose two public copies call a field `input` and `question`."""
    if "input" in record and "context" in record:
        return {"question": record["input"], **record}
    return record


def read_records(path: Path) -> list[dict[str, Any]]:
    """The objects of a JSONL file. Raises ValueError that names file and line."""
    records = []
    for number, line in enumerate(read_utf8(path).splitlines(), 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}, line {number}: not JSON ({error.msg})") from None
        if not isinstance(record, dict):
            raise ValueError(f"{path}, line {number}: expected an object")
        records.append(record)
    return records
