"""Needle scores of the original model, the untrained hybrid and every checkpoint."""

from __future__ import annotations

import json
import logging
import re
import shutil
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stages.configs import EvaluateConfig, NeedleEvaluation
from stages.context import StageConfig
from stages.output import write_json

if TYPE_CHECKING:
    from stages.evaluating.original import SharedAnswers

logger = logging.getLogger(__name__)

VERSION = 1

_CHECKPOINT = re.compile(r"tokens-(\d+)")


def run(config: StageConfig, inputs: Mapping[str, Path], work_dir: Path) -> dict[str, Any]:
    """Write scores.json and samples.jsonl below `work_dir`; called on every rank.

    Samples go to the ranks in turn. Every rank appends its answers to files of its own below
    `work_dir`/answers, from which a killed run goes on, with any number of ranks.

    Raises:
        UserError: a model or the essay folder is missing or damaged.
        RunError: a sample shares a needle with the calibration set.
    """
    import torch
    from accelerate import PartialState

    section = config.section
    assert isinstance(section, EvaluateConfig)
    scores_file, answers = work_dir / "scores.json", work_dir / "answers"
    # Without cpu=True accelerate takes several CPU processes for unconnected ones.
    state = PartialState(cpu=not torch.cuda.is_available(), timeout=timedelta(hours=6))
    if not scores_file.exists():
        checkpoints = _checkpoints(config, inputs)
        scores: dict[str, Any] = {"checkpoints": {name: {} for name in checkpoints}}
        if section.needle is not None:
            corpus = _answer_needles(config, section.needle, inputs, checkpoints, answers, state)
            state.wait_for_everyone()
            if state.is_main_process:
                _add_needle_scores(scores, section.needle, corpus, answers, work_dir)
        if state.is_main_process:
            write_json(scores_file, scores)
        state.wait_for_everyone()
    if state.is_main_process:
        shutil.rmtree(answers, ignore_errors=True)
    scores = json.loads(scores_file.read_text())
    return {
        name: {suite: table["average"] for suite, table in suites.items()}
        for name, suites in scores["checkpoints"].items()
    }


def _checkpoints(config: StageConfig, inputs: Mapping[str, Path]) -> dict[str, Path | str]:
    """Name to model directory, in the order of training."""
    found: dict[str, Path | str] = {"original": config.model.path}
    if "materialize" in inputs:
        found["hybrid"] = inputs["materialize"] / "model"
    if "train" in inputs:
        folders = (inputs["train"] / "checkpoints").iterdir()
        trained = [(int(m[1]), path) for path in folders if (m := _CHECKPOINT.fullmatch(path.name))]
        found |= {path.name: path for _, path in sorted(trained)}
    return found


def _answer_needles(
    config: StageConfig,
    section: NeedleEvaluation,
    inputs: Mapping[str, Path],
    checkpoints: Mapping[str, Path | str],
    folder: Path,
    state: Any,
) -> dict[str, Any]:
    """Answer this rank's samples for every checkpoint; returns the essay corpus' identity."""
    from bosch.progress import progress
    from data_prep.calibration import CalibrationNeedles
    from data_prep.essays import essay_identity, haystack_words
    from data_prep.tokenize import TokenizerSpec, load_tokenizer
    from stages.evaluating.needle_suite import NeedleSuite

    trust = config.model.trust_remote_code
    words = haystack_words(section.essay_dir)
    suite = NeedleSuite(
        section=section,
        seed=config.seed,
        tokenizer=load_tokenizer(TokenizerSpec(str(inputs["prepare"] / "tokenizer"), None, trust)),
        essay_words=words,
        calibration=CalibrationNeedles.load(inputs["prepare"] / "calibration"),
        folder=folder,
        rank=state.process_index,
        world=state.num_processes,
        batch_size=config.runtime.eval_batch_size,
    )
    pool = _shared_answers(config, section, essay_identity(section.essay_dir, words), folder, state)
    state.wait_for_everyone()
    todo = {name: suite.samples_per_checkpoint - suite.answered(name) for name in checkpoints}
    with progress(sum(todo.values()), "needle tasks", "samples") as bar:
        for name, path in checkpoints.items():
            if todo[name]:
                suite.run(name, _load(config, name, path, state.device), bar)
    state.wait_for_everyone()
    if pool is not None:
        pool.give()
    return dict(essay_identity(section.essay_dir, words))


def _shared_answers(
    config: StageConfig,
    section: NeedleEvaluation,
    corpus: Mapping[str, Any],
    folder: Path,
    state: Any,
) -> SharedAnswers | None:
    """On the first rank: the original's answers that earlier evaluations gave, put in place."""
    from stages.evaluating.original import SharedAnswers
    from stages.numerics import numerics

    if config.shared is None or not state.is_main_process:
        return None
    batch, backend = config.runtime.eval_batch_size, config.runtime.attention
    identity = {
        "corpus": corpus["sha256"],
        "seed": config.seed,
        "max_new_tokens": section.max_new_tokens,
        "numerics": numerics(state.device, backend, batch, VERSION),
    }
    pool = SharedAnswers(config.shared, json.dumps(identity), section, folder)
    fetched = pool.fetch()
    if fetched:
        logger.info("%d answers of the original model are known from earlier evaluations", fetched)
    return pool


def _load(config: StageConfig, name: str, path: Path | str, device: Any) -> Any:
    from bosch.modeling import load_model

    logger.info("evaluating %s (%s)", name, path)
    return load_model(
        path,
        dtype=config.model.dtype,
        backend=config.runtime.attention,
        device=device,
        revision=config.model.revision if name == "original" else None,
        trust_remote_code=config.model.trust_remote_code,
    )


def _add_needle_scores(
    scores: dict[str, Any],
    section: NeedleEvaluation,
    corpus: dict[str, Any],
    answers: Path,
    work_dir: Path,
) -> None:
    from stages.evaluating.tables import needle_scores, write_samples

    for name, suites in scores["checkpoints"].items():
        suites["needle"] = needle_scores(answers, name, section)
        logger.info("%s: needle average %.1f", name, suites["needle"]["average"])
    write_samples(work_dir / "samples.jsonl", answers, list(scores["checkpoints"]), section)
    scores["corpus"] = corpus
