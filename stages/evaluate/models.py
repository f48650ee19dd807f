"""Evaluates models one after another, with the samples spread over the processes."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState

from bosch.backends import resolve_backend
from bosch.errors import RunError, UserError
from bosch.files import file_hashes, load_json, make_folder, remove, write_json
from bosch.heads import HeadMaskFile
from bosch.model.loading import load_model
from bosch.model.materialize import materialize
from bosch.model.search_mode import set_sink_bias
from bosch.progress import progress
from bosch.ranks import partners_alive
from data_prep.documents.calibration import CalibrationNeedles
from data_prep.documents.tokenizer import TokenizerSpec, load_tokenizer
from data_prep.tasks.ruler import Corpus
from data_prep.tasks.words import sentences_identity, words_identity
from data_prep.text import essay_identity, haystack_words
from stages.context import ModelConfig, Runtime, StageConfig
from stages.evaluate.answers import AnswerFolder, Evaluated, ModelError, digest_of
from stages.evaluate.chat import ChatTemplate
from stages.evaluate.harness_suite import HarnessSuite
from stages.evaluate.needle_suite import NeedleSuite
from stages.evaluate.position_suite import (
    PositionSuite,
    documents_identity,
    position_losses,
    position_table,
)
from stages.evaluate.prompt_suite import PromptSuite
from stages.evaluate.scores import (
    FAILED_MODELS,
    ORIGINAL,
    SAMPLES,
    Scores,
    read_samples,
    write_samples,
)
from stages.evaluate.shared_reading import SharedAnswers, SharedReading
from stages.evaluate.stage import EvaluateConfig
from stages.evaluate.suite import Suite
from stages.evaluate.tables import (
    metric_scores,
    not_shares,
    subtask_scores,
    suite_records,
    suite_table,
)

logger = logging.getLogger(__name__)

_FAULTS = "faults"
# How many answers there were before the first attempt.
_CACHED = "cached.json"


@partners_alive()
def evaluate_models(
    config: StageConfig[EvaluateConfig],
    models: Sequence[Evaluated],
    tokenizer: TokenizerSpec,
    work_dir: Path,
    *,
    calibration: CalibrationNeedles | None = None,
    original: Path | None = None,
    kind: type[Scores] = Scores,
) -> Scores:
    """Score `models` and write scores.json and samples.jsonl; called on every rank.

    scores.json begins with the scores in the folder `original`, where it is named. All others are
    compared with the original's, which may stand among `models` instead; samples.jsonl holds the
    answers of `models` alone. Samples go to the ranks in turn. Every rank appends its answers to
    files of its own, from which a killed run resumes, with any number of ranks, and other runs on
    the same models and samples begin.

    Raises UserError when a model or what samples are made of is missing or damaged; and RunError
    when a sample shares a needle with the `calibration` set.
    """
    state = process_state(config.runtime)
    own = work_dir / "answers"
    rank, shared = state.process_index, None
    folder = AnswerFolder(own, config.shared, rank)
    dealt: dict[str, Any] = {"answers": folder, "rank": rank, "world": state.num_processes}
    if config.runtime.evaluate_parallel == "context" and state.num_processes > 1:
        shared = SharedReading()
        folder = SharedAnswers(own, config.shared, rank, shared)
        dealt = {"answers": folder, "rank": 0, "world": 1, "shared": shared}
    if kind.finished(work_dir) is None:
        tables: dict[str, Any] = {}
        suites = _suites(config, load_tokenizer(tokenizer), calibration, own, dealt, tables)
        for suite in suites:
            suite.prepare()
        if state.is_main_process:
            remove(own / _FAULTS)
            _count_cached(own / _CACHED, models, suites, folder)
        state.wait_for_everyone()
        _answer(config, models, suites, state, own / _FAULTS, shared)
        state.wait_for_everyone()
        faults = _read_faults(own / _FAULTS, models)
        if state.is_main_process:
            scored = [model for model in models if model.name not in faults]
            tables |= write_tables(scored, suites, folder, work_dir, original)
            if faults:
                tables["checkpoints"] |= {name: {} for name in faults}
                tables["missing"] = {**tables.get("missing", {}), FAILED_MODELS: faults}
            tables["cached_answers"] = load_json(own / _CACHED)["answers"]
            tables["sha256"] = file_hashes(work_dir, [SAMPLES])
            kind.model_validate(tables).write(work_dir)
        state.wait_for_everyone()
    if state.is_main_process:
        remove(own)
    return kind.read(work_dir)


def _count_cached(
    path: Path, models: Sequence[Evaluated], suites: Sequence[Suite], folder: AnswerFolder
) -> None:
    """Note, on the first attempt, how many answers earlier runs have given."""
    if not path.exists():
        subtasks = [subtask for suite in suites for subtask in suite.subtasks]
        answers = sum(len(folder.read(model, one)) for model in models for one in subtasks)
        make_folder(path.parent)
        write_json(path, {"answers": answers})


def process_state(runtime: Runtime) -> PartialState:
    """The processes of a run; the first call joins them."""
    # Without cpu=True accelerate takes several CPU processes for unconnected ones.
    timeout = timedelta(minutes=runtime.timeout_minutes)
    return PartialState(cpu=not torch.cuda.is_available(), timeout=timeout)


def _suites(
    config: StageConfig[EvaluateConfig],
    tokenizer: Any,
    calibration: CalibrationNeedles | None,
    own: Path,
    dealt: dict[str, Any],
    tables: dict[str, Any],
) -> list[Suite]:
    """The suites of a recipe; `tables` gets what scores.json says of prompts and texts."""
    section, suites = config.section, list[Suite]()
    chat, tables["prompts"] = _chat_template(section, tokenizer)
    common = {
        **dealt, "tokenizer": tokenizer, "batch_size": config.runtime.eval_batch_size,
        "seed": config.seed, "chat": chat,
    }  # fmt: skip
    if (needle := section.needle) is not None:
        data_dir = Path(needle.data_dir) if needle.data_dir is not None else None
        corpus = Corpus(haystack_words(needle.essay_dir), data_dir)
        suites.append(
            NeedleSuite(
                name="needle",
                section=needle,
                corpus=corpus,
                calibration=calibration,
                folder=(config.shared or own) / "samples",
                card=Path(config.model.path, "README.md"),
                **common,
            )
        )
        tables["corpus"] = {  # what RULER's samples were made of, for reports
            **essay_identity(needle.essay_dir, corpus.essay),
            "keys": words_identity(),
            "sentences": sentences_identity(),
        }
    if section.harness is not None:
        suites.append(HarnessSuite(name="harness", section=section.harness, **common))
    if section.positions is not None:
        suites.append(PositionSuite(name="positions", section=section.positions, **common))
        identity = documents_identity(section.positions.path)
        tables.setdefault("corpus", {})["long documents"] = identity
    for name, prompts in section.prompts.items():
        folder = Path(prompts.data_dir)
        files = file_hashes(folder, prompts.files(folder))
        suites.append(PromptSuite(name=name, section=prompts, files=files, **common))
    return suites


def _chat_template(section: EvaluateConfig, tokenizer: Any) -> tuple[ChatTemplate | None, str]:
    """The template that prompts are put into, and what scores say of it."""
    if section.chat_template:
        return ChatTemplate(tokenizer), "in the tokenizer's chat template"
    if tokenizer.chat_template:
        logger.warning(
            "the tokenizer has a chat template, which evaluate.chat_template: true would apply: "
            "an instruct model is asked in raw text"
        )
        return None, "raw; the tokenizer's chat template is not applied"
    return None, "raw"


def _answer(
    config: StageConfig[EvaluateConfig],
    models: Sequence[Evaluated],
    suites: Sequence[Suite],
    state: PartialState,
    faults: Path,
    shared: SharedReading | None,
) -> None:
    """Answer this rank's samples for every model, less what has been answered before.

    A model that cannot be evaluated leaves a file in `faults`, and the others continue.
    """
    open_samples = {m.name: sum(suite.open_samples(m) for suite in suites) for m in models}
    with progress(sum(open_samples.values()), "evaluation", "samples") as bar:
        for model in models:
            if open_samples[model.name]:
                logger.info("evaluating %s (%s)", model.name, model.model.path)
                try:
                    load = partial(
                        load_evaluated,
                        config, model.model, state.device, model.mask, model.kv_budget,
                    )  # fmt: skip
                    loaded = load() if shared is None else shared.load(load, config.runtime)
                    for suite in suites:
                        suite.run(model, loaded, bar)
                except (UserError, ModelError) as error:
                    logger.error("%s has no scores: %s", model.name, error)
                    fault = {
                        "model": model.name,
                        "fault": str(error),
                        "user": isinstance(error, UserError),
                    }
                    make_folder(faults)
                    write_json(faults / f"{digest_of(fault)}.rank{state.process_index}.json", fault)
                loaded = None


def _read_faults(folder: Path, models: Sequence[Evaluated]) -> dict[str, str]:
    """Why some of the models could not be evaluated, by name; raises where none could."""
    faults = [load_json(path) for path in sorted(folder.glob("*.json"))]
    reasons = {fault["model"]: fault["fault"] for fault in faults}
    if models and reasons.keys() >= {model.name for model in models}:
        kind = UserError if all(fault["user"] for fault in faults) else RunError
        raise kind("; ".join(f"{name}: {reason}" for name, reason in reasons.items()))
    return reasons


def load_evaluated(
    config: StageConfig[EvaluateConfig],
    model: ModelConfig,
    device: torch.device,
    mask: HeadMaskFile | None = None,
    kv_budget: int | None = None,
) -> Any:
    """The model in evaluation's precision and attention backend, a hybrid under `mask`.

    One that serves several budgets is under that of `kv_budget` KV slots.
    """
    loaded = load_model(
        model.path, backend=config.runtime.attention, device=device, kv_budget=kv_budget,
        **model.loading,
    )  # fmt: skip
    config.check_inputs()
    if mask is None:
        return loaded
    set_sink_bias(loaded, mask.sink_bias)
    hybrid = materialize(loaded, mask.mask, mask.windows, take_weights=True)
    hybrid.set_attn_implementation(resolve_backend(config.runtime.attention))
    return hybrid


def write_tables(
    models: Sequence[Evaluated],
    suites: Sequence[Suite],
    folder: AnswerFolder,
    work_dir: Path,
    original: Path | None,
) -> dict[str, Any]:
    """Write samples.jsonl; returns every model's tables, those of `original` first."""
    write_samples(
        work_dir,
        (
            record
            for model in models
            for suite in suites
            for record in suite_records(suite, model, folder)
        ),
    )
    known = Scores.read(original).content if original is not None else {}
    checkpoints = dict(known.get("checkpoints", {}))
    positions = dict(known.get("positions", {}))
    has_original = any(model.name == ORIGINAL for model in models)
    base = original if original is not None else work_dir if has_original else None
    for model in models:
        checkpoints[model.name] = {}
        compared = base if model.name != ORIGINAL else None
        for suite in suites:
            if isinstance(suite, PositionSuite):
                length = suite.section.length
                losses = position_losses(work_dir, model.name, length)
                original_losses = position_losses(compared, ORIGINAL, length) if compared else None
                positions[model.name] = position_table(length, losses, original_losses)
                continue
            every = subtask_scores(read_samples(work_dir), model.name, suite.name)
            unusable = not_shares(every)
            suite.missing |= unusable
            subtasks = {key: scores for key, scores in every.items() if key[0] not in unusable}
            if not subtasks:
                continue
            metrics = metric_scores(read_samples(work_dir), model.name, suite.name)
            scores = original_metrics = None
            if compared is not None:
                scores = subtask_scores(read_samples(compared), ORIGINAL, suite.name)
                original_metrics = metric_scores(read_samples(compared), ORIGINAL, suite.name)
            table = suite_table(subtasks, scores, suite.groups, metrics, original_metrics)
            for name, group in suite.groups.items():
                if group.is_asked and name not in table.get("groups", {}):
                    suite.missing[name] = "none of its tasks has its metric as a share of 1"
            logger.info("%s: %s average %.1f", model.name, suite.name, table["average"])
            checkpoints[model.name][suite.name] = table
    missing = {suite.name: suite.missing for suite in suites if suite.missing}
    return {
        "checkpoints": checkpoints,
        **({"positions": positions} if positions else {}),
        **({"missing": missing} if missing else {}),
    }
