"""Evaluates models one after another, with the samples spread over the processes."""

from __future__ import annotations

import gc
import json
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState

from bosch.errors import RunError, UserError
from bosch.files import exists, file_hashes, remove, write_text
from bosch.model.families import max_positions
from bosch.model.loading import load_config, load_model
from bosch.model.yarn import yarn
from bosch.progress import Progress, progress
from bosch.ranks import partners_alive
from data_prep.documents.calibration import CalibrationNeedles
from data_prep.documents.tokenizer import TokenizerSpec, load_tokenizer
from data_prep.tasks.words import ruler_words, sentence_splitter
from data_prep.text import essay_identity
from stages.context import ModelConfig, Runtime, StageConfig
from stages.evaluate.answers import AnswerLog, ModelError, digest_of
from stages.evaluate.lm import LanguageModel
from stages.evaluate.load import RecipeTasks, ask, load_tasks, ruler_corpus
from stages.evaluate.positions import corpus_name, long_documents, losses
from stages.evaluate.scores import (
    FAILED_MODELS,
    SAMPLES,
    Scores,
    read_samples,
)
from stages.evaluate.stage import EvaluateConfig
from stages.evaluate.tables import score_tables
from stages.evaluate.vllm import vllm_model
from stages.versions import installed_versions

logger = logging.getLogger(__name__)

# What answers depend on besides the model and the recipe.
_PACKAGES = ("lm-eval", "torch", "transformers", "vllm")
# Fields of samples.jsonl that no table needs.
_TEXTS = ("answers", "question", "output")


@dataclass(frozen=True)
class EvaluatedModel:
    """A model to evaluate.

    Answers of an unfinished evaluation are used again only for a model with the same `identity`.
    """

    name: str
    model: ModelConfig
    identity: str | None = None
    tokenizer: TokenizerSpec | None = None  # of a model that is no hybrid of the original


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

    All scores are compared with those of the original, whose samples are in the folder `original`,
    if it is given; otherwise the original may be one of `models`. samples.jsonl holds only the
    answers of `models`. A killed run resumes with any number of ranks.

    Raises UserError when a model or the data of samples is missing or damaged, and RunError when a
    sample shares a needle with the `calibration` set.
    """
    state = process_state(config.runtime)
    if Scores.finished(work_dir) is None:
        content = _evaluated(config, models, load_tokenizer(tokenizer), work_dir, state,
                             calibration, original)  # fmt: skip
        if state.is_main_process:
            content["sha256"] = file_hashes(work_dir, [SAMPLES])
            Scores.model_validate(content).write(work_dir)
        state.wait_for_everyone()
    if state.is_main_process:
        remove(work_dir / "answers")
    return Scores.read(work_dir)


def process_state(runtime: Runtime) -> PartialState:
    """The processes of a run; the first call connects them."""
    # Without cpu=True accelerate would not connect several CPU processes.
    timeout = timedelta(minutes=runtime.timeout_minutes)
    return PartialState(cpu=not torch.cuda.is_available(), timeout=timeout)


def _evaluated(
    config: StageConfig[EvaluateConfig],
    models: Sequence[EvaluatedModel],
    tokenizer: Any,
    work_dir: Path,
    state: PartialState,
    calibration: CalibrationNeedles | None,
    original: Path | None,
) -> dict[str, Any]:
    """Write samples.jsonl; returns the content of scores.json."""
    section, folder = config.section, work_dir / "answers"
    place = config.model.path
    base = load_config(
        place, revision=config.model.revision, trust_remote_code=config.model.trust_remote_code
    )
    tasks = load_tasks(config, tokenizer, folder / "rows", max_positions(base), state, calibration)
    texts = long_documents(section.positions, tokenizer) if section.positions is not None else []
    card, positions = Path(place, "README.md"), section.ruler.yarn_original_length
    files, failed = dict[str, Path](), dict[str, Exception]()
    samples = sum(task.documents for task in tasks.tasks) + len(texts)

    def answers(model: EvaluatedModel, log: AnswerLog, bar: Progress) -> Iterator[dict[str, Any]]:
        own = load_tokenizer(model.tokenizer) if model.tokenizer else tokenizer
        in_vllm = section.engine == "vllm" and bool(tasks.tasks)
        with log.shared():
            if in_vllm:
                lm = vllm_model(config, model.model, own, log)
            else:
                loaded = load_evaluated(config, model, state.device)
                lm = LanguageModel(loaded, own, section, config.runtime.eval_batch_size, log)
        lm.progress = bar
        for task in tasks.tasks:
            with yarn(lm.model, section.ruler.yarn.get(task.length), positions, card):
                yield from ask(lm, task, section)
        if in_vllm:
            lm.close()
        if texts and in_vllm and own is tokenizer:
            with log.shared():
                loaded = load_evaluated(config, model, state.device)
        # The loss of a token says nothing to models with other tokens.
        yield from losses(loaded, texts, log) if texts and own is tokenizer else ()
        bar.update(len(texts))

    with progress(len(models) * samples, "evaluation", "samples") as bar:
        for model in models:
            name = digest_of([model.name, model.identity, installed_versions(_PACKAGES)])
            files[model.name] = path = folder / f"{name}.jsonl"
            if exists(path):
                bar.update(samples, free=True)
                continue
            logger.info("evaluating %s (%s)", model.name, model.model.path)
            try:
                lines = list(answers(model, AnswerLog(folder / name, state), bar))
            except (UserError, ModelError) as error:
                logger.error("%s has no scores: %s", model.name, error)
                failed[model.name] = error
            else:
                if state.is_main_process:
                    named = ({"checkpoint": model.name, **line} for line in lines)
                    write_text(path, "".join(f"{json.dumps(line)}\n" for line in named))
                state.wait_for_everyone()
            gc.collect()  # frees the model's memory before the next one is loaded
    if failed and len(failed) == len(models):
        kind = UserError if all(isinstance(e, UserError) for e in failed.values()) else RunError
        raise kind("; ".join(f"{name}: {error}" for name, error in failed.items()))
    if not state.is_main_process:
        return {}
    with (work_dir / SAMPLES).open("w", encoding="utf-8") as file:
        for name, path in files.items():
            file.write(path.read_text(encoding="utf-8") if name not in failed else "")
    content = _tables(work_dir, original, tasks)
    if failed:
        content["checkpoints"] |= {name: {} for name in failed}
        reasons = {name: str(error) for name, error in failed.items()}
        content.setdefault("missing", {})[FAILED_MODELS] = reasons
    return {**content, **_sources(config, tokenizer)}


def _tables(work_dir: Path, original: Path | None, tasks: RecipeTasks) -> dict[str, Any]:
    """The tables of scores.json, from the samples of the original and of `work_dir`."""
    records: dict[str, list[dict[str, Any]]] = {}
    for source in (original, work_dir):
        for record in read_samples(source) if source is not None else ():
            kept = {name: value for name, value in record.items() if name not in _TEXTS}
            records.setdefault(record["checkpoint"], []).append(kept)
    content = score_tables(records, tasks.groups, tasks.missing)
    for name, suites in content["checkpoints"].items():
        for suite, table in suites.items():
            logger.info("%s: %s average %.1f", name, suite, table["average"])
    return content


def _sources(config: StageConfig[EvaluateConfig], tokenizer: Any) -> dict[str, Any]:
    """The fields of scores.json about prompts and texts."""
    section, corpus = config.section, dict[str, Any]()
    if section.ruler_tasks:
        essay = essay_identity(section.ruler.essay_dir, ruler_corpus(section).essay)
        keys = ruler_words().upstream or "built in"
        corpus |= {**essay, "keys": keys, "sentences": sentence_splitter()[1]}
    if section.positions is not None:
        corpus["long documents"] = corpus_name(section.positions)
    prompts = "in the tokenizer's chat template" if section.apply_chat_template else "raw"
    if tokenizer.chat_template and not section.apply_chat_template:
        logger.warning(
            "the tokenizer has a chat template, which evaluate.apply_chat_template: true would "
            "apply: an instruct model is asked in raw text"
        )
        prompts = "raw; the tokenizer's chat template is not applied"
    return {"prompts": prompts, **({"corpus": corpus} if corpus else {})}


def load_evaluated(
    config: StageConfig[EvaluateConfig], evaluated: EvaluatedModel, device: torch.device
) -> Any:
    """Load a model in the precision and backend of the evaluation."""
    model, runtime = evaluated.model, config.runtime
    return load_model(
        model.path, backend=runtime.attention, device=runtime.place(device), **model.loading
    )
