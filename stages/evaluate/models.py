"""Evaluates models one after another, with the samples spread over the processes."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import gather_object

from bosch.errors import RunError, UserError
from bosch.files import file_hashes, remove
from bosch.model.families import max_positions, text_config
from bosch.model.loading import load_config, load_model
from bosch.progress import progress
from bosch.ranks import partners_alive
from data_prep.documents.calibration import CalibrationNeedles
from data_prep.documents.tokenizer import TokenizerSpec, load_tokenizer
from stages.context import Runtime, StageConfig
from stages.evaluate.answers import AnswerFolder, EvaluatedModel, ModelError
from stages.evaluate.chat import ChatTemplate, checked_template
from stages.evaluate.scores import (
    FAILED_MODELS,
    ORIGINAL,
    SAMPLES,
    Scores,
    read_samples,
    write_samples,
)
from stages.evaluate.stage import EvaluateConfig
from stages.evaluate.suite import Suite
from stages.evaluate.tables import SuiteAnswers, not_shares, suite_table

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Fault:
    """The reason, on one rank, why a model has no scores in a suite (None: in all suites)."""

    model: str
    suite: str | None
    reason: str
    is_user_error: bool


@partners_alive()
def evaluate_models(
    config: StageConfig[EvaluateConfig],
    models: Sequence[EvaluatedModel],
    tokenizer: TokenizerSpec,
    work_dir: Path,
    *,
    calibration: CalibrationNeedles | None = None,
    original: Path | None = None,
) -> Scores:
    """Score `models` and write scores.json and samples.jsonl; called on every rank.

    scores.json begins with the scores in the folder `original`, if it is given; otherwise the
    original may be one of `models`. All other scores are compared with the original's.
    samples.jsonl holds only the answers of `models`. Samples are dealt to the ranks in turn, and
    every rank appends its answers to its own files. A killed run resumes from them with any number
    of ranks.

    Raises UserError when a model or the data of samples is missing or damaged, and RunError when a
    sample shares a needle with the `calibration` set.
    """
    state = process_state(config.runtime)
    answers_dir = work_dir / "answers"
    rank = state.process_index
    rank_options: dict[str, Any] = {
        "answers": AnswerFolder(answers_dir, rank), "rank": rank,
        "world": state.num_processes,
    }  # fmt: skip
    if Scores.finished(work_dir) is None:
        tables: dict[str, Any] = {}
        suites = _suites(
            config, load_tokenizer(tokenizer), calibration, answers_dir, rank_options, tables
        )
        for suite in suites:
            suite.prepare()
        state.wait_for_everyone()
        faults = _answer(config, models, suites, state)
        state.wait_for_everyone()
        failed = _failed_models(gather_object(faults), models, suites)
        if state.is_main_process:
            scored = [model for model in models if model.name not in failed]
            tables |= write_tables(scored, suites, work_dir, original)
            if failed:
                tables["checkpoints"] |= {name: {} for name in failed}
                tables["missing"] = {**tables.get("missing", {}), FAILED_MODELS: failed}
            tables["sha256"] = file_hashes(work_dir, [SAMPLES])
            Scores.model_validate(tables).write(work_dir)
        state.wait_for_everyone()
    if state.is_main_process:
        remove(answers_dir)
    return Scores.read(work_dir)


def process_state(runtime: Runtime) -> PartialState:
    """The processes of a run; the first call connects them."""
    # Without cpu=True accelerate would not connect several CPU processes.
    timeout = timedelta(minutes=runtime.timeout_minutes)
    return PartialState(cpu=not torch.cuda.is_available(), timeout=timeout)


def _suites(
    config: StageConfig[EvaluateConfig],
    tokenizer: Any,
    calibration: CalibrationNeedles | None,
    answers_dir: Path,
    rank_options: dict[str, Any],
    tables: dict[str, Any],
) -> list[Suite]:
    """The suites of a recipe; adds the fields of prompts and texts to `tables`, for scores.json."""
    section, model, suites = config.section, config.model, list[Suite]()
    loaded = load_config(
        model.path, revision=model.revision, trust_remote_code=model.trust_remote_code
    )
    embeddings = text_config(loaded).vocab_size
    chat, tables["prompts"] = _chat_template(section, tokenizer, embeddings)
    common = {
        **rank_options, "tokenizer": tokenizer, "batch_size": config.runtime.eval_batch_size,
        "seed": config.seed, "chat": chat,
        "samples_folder": answers_dir / "samples",
        "card": Path(model.path, "README.md"), "calibration": calibration,
        "positions": max_positions(loaded),
    }  # fmt: skip
    for name, suite_section in section.suites.items():
        module, _, kind = suite_section.runner.partition(":")
        suite: type[Suite] = getattr(importlib.import_module(module), kind)
        suites.append(suite(name=name, section=suite_section, **common))
    if texts := {key: text for suite in suites for key, text in suite.texts.items()}:
        tables["corpus"] = texts
    return suites


def _chat_template(
    section: EvaluateConfig, tokenizer: Any, embeddings: int
) -> tuple[ChatTemplate | None, str]:
    """The chat template for prompts, if any, and its description in scores.json.

    Raises UserError if it contains a token without an embedding.
    """
    if section.chat_template:
        return checked_template(tokenizer, embeddings), "in the tokenizer's chat template"
    if tokenizer.chat_template:
        logger.warning(
            "the tokenizer has a chat template, which evaluate.chat_template: true would apply: "
            "an instruct model is asked in raw text"
        )
        return None, "raw; the tokenizer's chat template is not applied"
    return None, "raw"


def _answer(
    config: StageConfig[EvaluateConfig],
    models: Sequence[EvaluatedModel],
    suites: Sequence[Suite],
    state: PartialState,
) -> list[_Fault]:
    """Answer this rank's unanswered samples for every model; a fault does not stop the others."""
    faults: list[_Fault] = []
    loaded: Any = None
    unanswered = {
        model.name: sum(suite.count_unanswered(model) for suite in suites) for model in models
    }
    with progress(sum(unanswered.values()), "evaluation", "samples") as bar:
        for model in models:
            if not unanswered[model.name]:
                continue
            logger.info("evaluating %s (%s)", model.name, model.model.path)
            with _recording_faults(faults, model.name):
                loaded = None  # free the memory before the next model is loaded
                loaded = load_evaluated(config, model, state.device)
                for suite in suites:
                    with _recording_faults(faults, model.name, suite.name):
                        suite.run(model, loaded, bar)
    return faults


@contextmanager
def _recording_faults(faults: list[_Fault], model: str, suite: str | None = None) -> Iterator[None]:
    """Append UserError and ModelError from inside the block to `faults`."""
    try:
        yield
    except (UserError, ModelError) as error:
        scores = "scores" if suite is None else f"scores in {suite}"
        logger.error("%s has no %s: %s", model, scores, error)
        faults.append(_Fault(model, suite, str(error), isinstance(error, UserError)))


def _failed_models(
    faults: Sequence[_Fault], models: Sequence[EvaluatedModel], suites: Sequence[Suite]
) -> dict[str, str]:
    """Reasons why models have no scores at all, by name; raises if no model has scores.

    For a model without scores in some suites the reason goes to `failed` of these suites.
    """
    failed: dict[str, str] = {}
    for model in models:
        model_faults = [fault for fault in faults if fault.model == model.name]
        failed_suites = {fault.suite for fault in model_faults}
        reason = "; ".join(dict.fromkeys(fault.reason for fault in model_faults))
        failed_in_all = bool(model_faults) and failed_suites >= {suite.name for suite in suites}
        if None in failed_suites or failed_in_all:
            failed[model.name] = reason
    if models and len(failed) == len(models):
        kind = UserError if all(fault.is_user_error for fault in faults) else RunError
        raise kind("; ".join(f"{name}: {reason}" for name, reason in failed.items()))
    for fault in faults:
        for suite in suites:
            if suite.name == fault.suite and fault.model not in failed:
                suite.failed[fault.model] = fault.reason
    return failed


def load_evaluated(
    config: StageConfig[EvaluateConfig], evaluated: EvaluatedModel, device: torch.device
) -> Any:
    """Load a model in the precision and backend of the evaluation."""
    model, runtime = evaluated.model, config.runtime
    return load_model(
        model.path, backend=runtime.attention, device=runtime.place(device), **model.loading
    )


def write_tables(
    models: Sequence[EvaluatedModel], suites: Sequence[Suite], work_dir: Path, original: Path | None
) -> dict[str, Any]:
    """Write samples.jsonl; returns every model's tables, those of `original` first.

    Models in a suite's `failed` have no scores there.
    """
    answers = _write_answers(models, suites, work_dir)
    checkpoints: dict[str, Any] = {}
    own_tables: dict[str, dict[str, Any]] = {}
    if original is not None:
        published = Scores.read(original).content
        checkpoints |= published.get("checkpoints", {})
        own_tables |= {suite.name: dict(published.get(suite.name, {})) for suite in suites}
        answers |= _original_answers(suites, original, published)
    for suite in suites:
        # A task left out for one model is left out for all, so that averages compare.
        tasks = {subtask.task for subtask in suite.subtasks}
        for (_, name), suite_answers in answers.items():
            if name == suite.name:
                unusable = not_shares(suite_answers.scores)
                suite.missing |= {task: unusable[task] for task in tasks & unusable.keys()}
    # Recompute the original's tables without the tasks that other models leave out.
    tables = checkpoints.get(ORIGINAL, {})
    for suite in suites:
        if tables.get(suite.name, {}).keys() & suite.missing.keys():
            del tables[suite.name]
            if table := _table(suite, answers[ORIGINAL, suite.name], None):
                tables[suite.name] = table
    for model in models:
        checkpoints[model.name] = {}
        for suite in suites:
            if (model.name, suite.name) not in answers:
                continue
            suite_answers = answers[model.name, suite.name]
            base = answers.get((ORIGINAL, suite.name)) if model.name != ORIGINAL else None
            if (own_table := suite.own_table(suite_answers, base)) is not None:
                own_tables.setdefault(suite.name, {})[model.name] = own_table
            elif (table := _table(suite, suite_answers, base)) is not None:
                _note_missing_groups(suite, table)
                logger.info("%s: %s average %.1f", model.name, suite.name, table["average"])
                checkpoints[model.name][suite.name] = table
    absent = {suite.name: suite.missing | suite.failed for suite in suites}
    missing = {name: reasons for name, reasons in absent.items() if reasons}
    return {
        "checkpoints": checkpoints,
        "digests": {suite.name: _digests(suite) for suite in suites},
        **{name: table for name, table in own_tables.items() if table},
        **({"missing": missing} if missing else {}),
    }


def _write_answers(
    models: Sequence[EvaluatedModel], suites: Sequence[Suite], work_dir: Path
) -> dict[tuple[str, str], SuiteAnswers]:
    """Write samples.jsonl; returns the answers by model and suite."""
    answers: dict[tuple[str, str], SuiteAnswers] = {}

    def lines() -> Iterator[dict[str, Any]]:
        for model in models:
            for suite in suites:
                if model.name not in suite.failed:
                    records = list(suite.records(model))
                    key = (model.name, suite.name)
                    answers[key] = SuiteAnswers.of(records, *key)
                    yield from records

    write_samples(work_dir, lines())
    return answers


def _original_answers(
    suites: Sequence[Suite], original: Path, published: Mapping[str, Any]
) -> dict[tuple[str, str], SuiteAnswers]:
    """The published answers of the original; its faults and absent tasks go to the suites."""
    answers: dict[tuple[str, str], SuiteAnswers] = {}
    records = [record for record in read_samples(original) if record["checkpoint"] == ORIGINAL]
    for suite in suites:
        fault = published.get("missing", {}).get(suite.name, {}).get(ORIGINAL)
        if fault is not None:
            suite.failed[ORIGINAL] = fault
            continue
        suite_answers = SuiteAnswers.of(records, ORIGINAL, suite.name)
        answers[ORIGINAL, suite.name] = suite_answers
        suite.missing = _not_compared(suite, suite_answers, published) | suite.missing
    return answers


def _note_missing_groups(suite: Suite, table: Mapping[str, Any]) -> None:
    for name, group in suite.groups.items():
        if group.is_named and name not in table.get("groups", {}):
            suite.missing[name] = "none of its tasks has its metric as a share of 1"


def _digests(suite: Suite) -> dict[str, dict[int, str]]:
    digests: dict[str, dict[int, str]] = {}
    for subtask in suite.subtasks:
        digests.setdefault(subtask.task, {})[subtask.length] = subtask.digest
    return digests


def _not_compared(
    suite: Suite, original: SuiteAnswers, published: Mapping[str, Any]
) -> dict[str, str]:
    """By task, why it cannot be compared with the original, whose stage may have had other data.

    `published` is the content of its scores.json.
    """
    if original.losses:  # a suite without scores
        return {}
    reasons: dict[str, str] = {}
    digests = published.get("digests", {}).get(suite.name, {})
    for subtask in suite.subtasks:
        task, length = subtask.task, str(subtask.length)
        if (task, subtask.length) not in original.scores:
            why = published.get("missing", {}).get(suite.name, {}).get(task)
            reasons[task] = "the original has no score of it" + (f" ({why})" if why else "")
        elif digests.get(task, {}).get(length, subtask.digest) != subtask.digest:
            reasons[task] = "the original answered other samples of it"
    tasks = {subtask.task for subtask in suite.subtasks}
    table = published.get("checkpoints", {}).get(ORIGINAL, {}).get(suite.name, {})
    for task, _ in original.scores:
        if task in table and task not in tasks:
            reasons[task] = "the original alone has a score of it"
    return {task: f"{reason}; run with --force original" for task, reason in reasons.items()}


def _table(suite: Suite, answers: SuiteAnswers, base: SuiteAnswers | None) -> dict[str, Any] | None:
    """A model's table without the tasks in `suite.missing`; None if nothing is left."""
    subtasks = {
        key: scores for key, scores in answers.scores.items() if key[0] not in suite.missing
    }
    if not subtasks:
        return None
    table = suite_table(
        subtasks,
        base.scores if base is not None else None,
        suite.groups,
        answers.metrics,
        base.metrics if base is not None else None,
    )
    for task, length in subtasks:
        if cut := answers.cut.get((task, length)):
            table[task][str(length)]["cut"] = cut
    return table
