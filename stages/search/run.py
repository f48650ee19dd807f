"""Which KV heads become sliding: the search, its log and its summary."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from bosch.errors import LostRankError
from bosch.mask_files import Front, HeadMaskFile
from bosch.model.families import decoder_layers
from bosch.model.loading import load_model
from bosch.model.materialize import check_hybrid
from bosch.model.search_mode import prepare_for_search
from bosch.progress import progress
from bosch.ranks import Ranks, limit_collectives
from bosch.score.evaluation_log import EvaluationLog
from bosch.score.objective import Objective
from bosch.search.bosch import SearchResult
from bosch.search.evaluator import Evaluator, SlotBudgets
from bosch.search.methods import METHODS
from bosch.search.runs import find_mask
from stages.context import StageConfig
from stages.formats import format_bytes
from stages.search.budget import HELD_OUT_EVERY, RequestCache
from stages.search.charts import write_front, write_traces
from stages.search.examples import calibration_set
from stages.search.points import point_slots
from stages.search.processes import join_process_group
from stages.search.progress_files import BEST, LiveView, mask_file
from stages.search.stage import EVALUATIONS, FRONT, HEAD_MASK, SearchConfig, SearchSummary

logger = logging.getLogger(__name__)

# Tokens of the text on which the model and its hybrid are compared before the search.
_CHECKED_TOKENS = 128


def run(
    config: StageConfig[SearchConfig], inputs: Mapping[str, Path], work_dir: Path
) -> dict[str, Any]:
    """Write head mask or front, evaluations, summary and trace plots below `work_dir`.

    A stopped search resumes from its evaluation log: it requests the same masks in the same order,
    and takes logged results from the log. Before the search the model answers the prompts in
    inputs["prepare"]. Returns the best score and log-likelihood and their cost. Called on every
    rank: each computes its share of the set, the first one writes the files. Raises UserError when
    the model is damaged or answers too few prompts right, or there is nothing to search for;
    RunError when the model's logits are not finite, the log cannot be written, or a rank ends.
    """
    section, runtime, method = config.section, config.runtime, METHODS[config.section.method]
    if section.method == "given" and section.mask is not None:
        HeadMaskFile.load(section.mask)  # refuses a damaged mask before the model is loaded
    with join_process_group(runtime.timeout_minutes) as ranks:
        objective, notes = _objective(config, inputs["prepare"], work_dir, ranks)
        log = EvaluationLog(work_dir / EVALUATIONS, objective.context, ranks)
        ranks.from_first(None)  # all ranks have loaded; from here on they synchronise
        limit_collectives(config.runtime.collective_timeout_minutes)
        if ranks.is_first and ranks.size > objective.batches:
            logger.info(
                "%d of %d processes have nothing to do: the calibration set is %d batches of "
                "runtime.eval_batch_size",
                ranks.size - objective.batches, ranks.size, objective.batches,
            )  # fmt: skip
        if len(log) and ranks.is_first:
            logger.info("resuming from %d evaluations of a stopped search", len(log))
        started = time.perf_counter()
        kinds = decoder_layers(objective.model.config)
        # Without a context in the recipe, bytes are counted at the longest example.
        longest = objective.calibration.max_length
        cache = section.request_cache(kinds, config.model.dtype, longest)
        ratio = 1.0 if method.finds_front else section.ratio_for(kinds, config.model.dtype)
        settings = section.settings(config.seed, ratio)
        evaluator = Evaluator(objective, log)
        if method.finds_front:
            evaluator.slot_budgets = SlotBudgets(cache.tokens, point_slots(section, cache))
        for note in notes:
            evaluator.note(note)
        with contextlib.ExitStack() as stack:
            if ranks.is_first:
                total = method.most_evaluations(settings, *objective.shape)
                bar = progress(total, f"search ({section.method})", "evaluations")
                evaluator.progress = stack.enter_context(bar)
                view = contextlib.closing(LiveView(work_dir, config))
                evaluator.watch = stack.enter_context(view).update
            try:
                result = find_mask(section.method, evaluator, settings)
            except (KeyboardInterrupt, LostRankError):
                if log.path is not None:
                    _log_stopped_search(evaluator, work_dir)
                raise
        summary = summary_of(evaluator, result, time.perf_counter() - started)
        if ranks.is_first:
            _write_results(work_dir, config, summary, result, cache)
    names = ("best_score", "best_log_likelihood", "evaluations", "full_forward_equivalents")
    return {name: summary[name] for name in names}


def _objective(
    config: StageConfig[SearchConfig], prepared: Path, work_dir: Path, ranks: Ranks
) -> tuple[Objective, list[str]]:
    """The objective on the model's own answers, and notes about them."""
    section, runtime, held_out = config.section, config.runtime, None
    model = load_model(
        config.model.path, device=runtime.place(ranks.device), **config.model.loading
    )
    calibration, notes = calibration_set(config, prepared, work_dir, model, ranks)
    if METHODS[section.method].finds_front:
        calibration, held_out = calibration.split(HELD_OUT_EVERY)
    text = calibration.examples[0].input_ids[:_CHECKED_TOKENS]
    check_hybrid(model, torch.tensor([text]))
    prepare_for_search(model, config.runtime.attention)
    objective = Objective(
        model, calibration, section.menu, batch_size=config.runtime.eval_batch_size,
        ranks=ranks, held_out=held_out,
    )  # fmt: skip
    return objective, notes


def summary_of(evaluator: Evaluator, result: SearchResult, seconds: float) -> dict[str, Any]:
    """The summary of a search's result and cost; `seconds` are those of the stage."""
    evaluation = result.evaluation
    return {
        "anchors": asdict(result.anchors),
        "best_score": evaluation.score,
        "best_log_likelihood": evaluation.log_likelihood,
        "last_phase_score": result.last_phase.score,
        "last_phase_log_likelihood": result.last_phase.log_likelihood,
        **evaluator.costs(),
        "solver_seconds": max(0.0, seconds - evaluator.fresh_seconds),
        "layer_importance": result.layers,
        "trace": [asdict(point) for point in evaluator.trace],
        "notes": evaluator.notes,
    }


def _write_results(
    work_dir: Path,
    config: StageConfig[SearchConfig],
    summary: dict[str, Any],
    result: SearchResult,
    cache: RequestCache,
) -> None:
    published = SearchSummary.check(summary, "summary")
    published.write(work_dir)
    if result.front is None:
        mask_file(config, result.mask, result.evaluation.score).save(work_dir / HEAD_MASK)
        if cache.budget is not None:
            size = cache.bytes_of(result.mask)
            allowed = format_bytes(cache.allowed_bytes)
            logger.info("the mask holds %s, search.budget allows %s", cache.text(size), allowed)
    else:
        _write_front(work_dir, result.front, cache)
    write_traces(published, result.mask.key, work_dir)
    (work_dir / BEST).unlink(missing_ok=True)
    logger.info(
        "search finished: score %.4f (all full %.4f, all sliding %.4f), %d evaluations, %.1f full "
        "passes computed",
        summary["best_score"], result.anchors.all_full, result.anchors.all_sliding,
        summary["evaluations"], summary["full_forward_equivalents"],
    )  # fmt: skip


def _write_front(work_dir: Path, front: Front, cache: RequestCache) -> None:
    """Write front.json with bytes; materialize chooses the point."""
    points = (replace(point, bytes=cache.bytes_of(point.mask)) for point in front.points)
    front = Front(front.context, tuple(points))
    front.save(work_dir / FRONT)
    write_front(front, work_dir)
    logger.info("a front of %d points at %d tokens", len(front.points), front.context)


def _log_stopped_search(evaluator: Evaluator, work_dir: Path) -> None:
    """Log the score and the file of a stopped search's best mask."""
    evaluations = evaluator.costs()["evaluations"]
    advice = f"{evaluations:.0f} evaluations are kept, the same command resumes"
    best = evaluator.best_on_budget
    if best is None:
        logger.warning("search stopped before its first mask on budget; %s", advice)
        return
    _, evaluation = best
    scores = f"{evaluation.score:.4f} (log-likelihood {evaluation.log_likelihood:.4f}"
    anchors = [point for point in evaluator.trace if point.phase == "anchors"]
    scores += "".join(f", {point.subproblem} {point.score:.4f}" for point in anchors) + ")"
    logger.warning(
        "search stopped; the best mask on budget so far scores %s and is kept in %s; %s",
        scores,
        work_dir / BEST,
        advice,
    )
