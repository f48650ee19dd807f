"""Tasks of lm-evaluation-harness on one rank; the model is loaded once for all suites."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from transformers import LogitsProcessorList

from bosch.errors import RunError, UserError
from bosch.files import file_digest
from bosch.model.families import rope_depends_on_length
from data_prep.tasks.samples import TAIL_CHARACTERS, tokenizer_digest
from stages.evaluate.answers import Subtask, digest_of
from stages.evaluate.generation import NanCheck, refuse_nan
from stages.evaluate.suite import Records, Suite
from stages.evaluate.suites.harness import PACKAGES, HarnessEvaluation
from stages.evaluate.suites.harness.tasks import (
    load_tasks,
    local_files,
    mean_metrics,
    no_data,
    refuse_unscorable,
    task_manager,
)
from stages.versions import installed_versions

logger = logging.getLogger(__name__)

# Documents per call of the harness; a chunk's answers are stored before the next chunk begins.
CHUNK = 64
# With this seed lm-eval draws a task's worked examples, one document after the other.
_FEWSHOT_SEED = 1234
# The address in a function's repr, which differs in every process.
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
# A task's score is the first of these metrics that it has.
_METRICS = ("math_verify", "acc_norm", "acc", "exact_match", "f1", "score")


@dataclass(kw_only=True)
class HarnessSuite(Suite):
    """Tasks of the harness, and the answers to their documents."""

    section: HarnessEvaluation
    _tasks: dict[Subtask, Any] = field(default_factory=dict)
    _requests: dict[Subtask, dict[int, list[Any]]] = field(default_factory=dict)
    _drops_system_turn: bool = False

    @property
    def subtasks(self) -> list[Subtask]:
        return list(self._tasks)

    def samples(self, subtask: Subtask) -> int:
        count = len(self._tasks[subtask].eval_docs)
        return count if self.section.samples is None else min(count, self.section.samples)

    def prepare(self) -> None:
        """Load the tasks' documents; a task without its data becomes `missing`.

        Raises UserError when lm-eval is not installed or knows no such task.
        """
        names = self.section.tasks
        manager = task_manager(names)
        refuse_unscorable(manager, names)
        for name in names:
            try:
                loaded = load_tasks(manager, name, self.section)
            except UserError:
                raise
            except Exception as error:  # errors of a group's files, of any type
                self.missing[name] = no_data(error)
                logger.warning("%s has no score: %s", name, self.missing[name])
                continue
            self.missing |= loaded.missing
            self.groups |= loaded.groups
            for task_name, task in loaded.tasks.items():
                self._add_task(manager, name, task_name, task)

    def _add_task(self, manager: Any, listed_name: str, task_name: str, task: Any) -> None:
        """Add a task that the recipe's list names as `listed_name`, or the reason it is missing."""
        if fault := self._length_fault(task):
            self.missing[task_name] = fault
            return
        # Otherwise lm-eval makes a task's documents again at each access.
        method = "test_docs" if task.has_test_docs() else "validation_docs"
        setattr(task, method, lambda documents=task.eval_docs: documents)
        subtask = Subtask(task_name, 0, self._digest(manager, task_name, task))
        if any(other.task == task_name and other != subtask for other in self._tasks):
            raise UserError(
                f"evaluate.harness.tasks: {listed_name} has {task_name} with other settings than "
                "another name of the list; leave one of the two out"
            )
        self._tasks[subtask] = task

    def _length_fault(self, task: Any) -> str | None:
        """Why a task's answers leave no room for a prompt; lm-eval ends with an AssertionError."""
        positions = self.positions
        if positions is None or task.OUTPUT_TYPE != "generate_until":
            return None
        most = _answer_tokens(task.config.generation_kwargs or {})
        if most < positions:
            return None
        return (
            f"its answers of up to {most:,} tokens leave none of the model's {positions:,} "
            "positions for a prompt"
        )

    def note(self, subtask: Subtask) -> str:
        return subtask.task

    def _digest(self, manager: Any, name: str, task: Any) -> str:
        documents = [dict(document) for document in task.eval_docs]
        # These include a group's changes of a task. lm-eval's version identifies its own files.
        settings = {
            key: value
            for key, value in task.dump_config().items()
            if key not in ("custom_dataset", "metadata")
        }
        return digest_of(
            {
                "documents": json.dumps(documents, default=str, sort_keys=True),
                "files": {
                    split: file_digest(path)
                    for split, path in local_files(
                        manager.task_index, name, self.section.data_dir, settings
                    ).items()
                },
                "settings": _ADDRESS.sub("", json.dumps(settings, default=repr, sort_keys=True)),
                "shots": [task.config.num_fewshot, _FEWSHOT_SEED],
                "versions": installed_versions(PACKAGES),
                "tokenizer": tokenizer_digest(self.tokenizer),
                **({"chat": self.chat.digest} if self.chat is not None else {}),
            }
        )

    def requests(self, subtask: Subtask) -> dict[int, list[Any]]:
        """The harness's requests for each document, the same for any number of processes.

        A document's worked examples depend on those drawn before, so all are drawn together and in
        order, and the harness's `evaluate` must not draw them again.
        """
        if subtask not in self._requests:
            task = self._tasks[subtask]
            task.set_fewshot_seed(_FEWSHOT_SEED)
            task.build_all_requests(
                limit=self.samples(subtask),
                apply_chat_template=self.chat is not None,
                fewshot_as_multiturn=self.chat is not None,
                chat_template=self._chat_text,
                tokenizer_name=self.chat.digest if self.chat is not None else "",
            )
            task.build_all_requests = lambda **_: None
            requests: dict[int, list[Any]] = {}
            for request in task.instances:
                requests.setdefault(request.doc_id, []).append(request)
            self._requests[subtask] = requests
        return self._requests[subtask]

    def _chat_text(self, turns: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """A conversation in the chat template, for lm-eval.

        The system turn, a task's description, is left out for templates without one (Gemma 2).
        """
        assert self.chat is not None
        try:
            return self.chat.text(turns, add_generation_prompt)
        except UserError:
            without_system = [turn for turn in turns if turn["role"] != "system"]
            if without_system == turns:
                raise
            if not self._drops_system_turn:
                self._drops_system_turn = True
                logger.warning("the chat template takes no system turn: descriptions are left out")
            return self.chat.text(without_system, add_generation_prompt)

    def answer(self, subtask: Subtask, indices: Sequence[int], loaded: Any) -> Records:
        """Records of the answers to the documents at `indices`, a chunk at a time."""
        from lm_eval.evaluator import evaluate

        lm = language_model(loaded, self.tokenizer, self.batch_size)
        task = self._tasks[subtask]
        requests, documents = self.requests(subtask), task.eval_docs
        for start in range(0, len(indices), CHUNK):
            chunk = list(indices[start : start + CHUNK])
            # Sampled answers are the same in every run with this number of processes.
            torch.manual_seed(_FEWSHOT_SEED + chunk[0])
            task._instances = [
                _numbered(request, number)
                for number, index in enumerate(chunk)
                for request in requests[index]
            ]
            # lm-eval's own iterator reads all documents to find these, once for each filter.
            chosen = [documents[index] for index in chunk]
            task.doc_iterator = lambda chosen=chosen, **_: enumerate(chosen)
            result = evaluate(
                lm,
                {"tasks": {subtask.task: task}},
                samples={subtask.task: chunk},
                bootstrap_iters=0,
                # Tasks that execute the model's output were refused.
                confirm_run_unsafe_code=True,
            )
            by_document: dict[int, list[Mapping[str, Any]]] = {}
            for logged in result["samples"][subtask.task]:
                by_document.setdefault(logged["doc_id"], []).append(logged)
            metrics = mean_metrics(task)
            yield [
                record_of(index, by_document[index], metrics)
                | ({"cut": True} if any(is_cut(lm, request) for request in requests[index]) else {})
                for index in chunk
            ]


def _numbered(request: Any, number: int) -> Any:
    """A copy of the request without answers, for document `number` of this call."""
    place = (request.task_name, number, request.repeats)
    return replace(request, metadata=place, resps=[], filtered_resps={})


def language_model(loaded: Any, tokenizer: Any, batch_size: int) -> Any:
    """The harness's interface to a loaded model, which refuses NaN logits."""
    from lm_eval.models.huggingface import HFLM

    class Model(HFLM):  # type: ignore[misc]
        def _model_call(self, inps: Any) -> Any:
            logits = super()._model_call(inps)
            refuse_nan(logits)
            return logits

        def _model_generate(self, context: Any, *args: Any, **kwargs: Any) -> Any:
            nan_check = NanCheck()
            kwargs["logits_processor"] = LogitsProcessorList([nan_check])
            output = super()._model_generate(context, *args, **kwargs)
            nan_check.check()
            return output

    # For a loaded model lm-eval assumes one process and does not split the documents again.
    # A longer row would change the factors of RoPE of the others.
    rows = 1 if rope_depends_on_length(loaded.config) else batch_size
    return Model(pretrained=loaded, tokenizer=tokenizer, batch_size=rows)


def is_cut(lm: Any, request: Any) -> bool:
    """Whether prompt and answer are too long, so that lm-eval drops the prompt's beginning."""
    context, options_or_choice = request.args
    if request.request_type == "generate_until":
        answer = _answer_tokens(options_or_choice)
    else:  # the last token of a choice is not an input
        answer = len(lm.tok_encode(options_or_choice, add_special_tokens=False)) - 1
    # A text has no more tokens than bytes, except for its opening tokens.
    if len(context.encode()) + answer < lm.max_length - 8:
        return False
    return len(lm.tok_encode(context)) + answer > lm.max_length


def _answer_tokens(options: Mapping[str, Any]) -> int:
    """The limit of an answer's tokens in lm-eval's generation options."""
    from lm_eval.models.utils import normalize_gen_kwargs

    return int(normalize_gen_kwargs(dict(options))["max_gen_toks"])


def record_of(
    index: int, logged: Sequence[Mapping[str, Any]], metrics: Collection[str]
) -> dict[str, Any]:
    """A document's answer; `scores` has each of `metrics` under every filter of the harness."""
    scores = {
        f"{metric},{entry['filter']}": float(entry[metric])
        for entry in logged
        for metric in entry["metrics"]
        if metric in metrics and isinstance(entry[metric], (int, float, np.number))
    }
    first = logged[0]["filter"]
    preferred = [f"{metric},{first}" for metric in _METRICS]
    names = [name for name in preferred if name in scores] or list(scores)
    if not names:
        raise RunError(f"evaluate.harness: lm-eval gave document {index} no score")
    return {
        "index": index,
        "score": scores[names[0]],
        "scores": scores,
        "answers": [str(logged[0]["target"])],
        "question": str(logged[0]["arguments"][0][0])[-TAIL_CHARACTERS:],
        "output": " | ".join(str(response) for response in np.ravel(logged[0]["filtered_resps"])),
    }
