"""Which KV heads become sliding: the search, its log, its summary and its picture."""

from __future__ import annotations

import contextlib
import json
import logging
import signal
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stages.configs import SearchConfig
from stages.context import StageConfig

if TYPE_CHECKING:
    from bosch.method.bosch import SearchResult
    from bosch.method.ledger import Ledger
    from bosch.objective import Objective
    from bosch.progress import Progress
    from bosch.ranks import Ranks

logger = logging.getLogger(__name__)

VERSION = 3


def run(config: StageConfig, inputs: Mapping[str, Path], work_dir: Path) -> dict[str, Any]:
    """Write head_mask.json, evaluations.jsonl, summary.json and search.png below `work_dir`.

    A search that was stopped goes on from its evaluation log: it asks for the same masks in the
    same order and finds the first of them answered. The calibration set is inputs["prepare"].
    Called on every rank: each computes its share of the set, the first one writes the files.

    Raises:
        UserError: the model or the calibration set is damaged, or leaves nothing to search for.
        RunError: the model's logits are not finite, the log cannot be written, or a rank has ended.
    """
    from bosch.attention import resolve_backend
    from bosch.evaluation_log import EvaluationLog
    from bosch.method.ledger import Ledger
    from stages.numerics import numerics
    from stages.searching.processes import joined

    with joined(config.runtime.search_parallel) as ranks:
        objective = _objective(config, inputs["prepare"], ranks)
        backend, batch = resolve_backend(config.runtime.attention), config.runtime.eval_batch_size
        context = replace(
            objective.context,
            numerics=numerics(ranks.device, backend, batch, VERSION, shards=ranks.shards),
        )
        log = EvaluationLog.shared(work_dir / "evaluations.jsonl", context, ranks, config.shared)
        if ranks.is_first and ranks.size > objective.batches:
            logger.info(
                "%d of %d processes have nothing to do: the calibration set is %d batches of "
                "runtime.eval_batch_size",
                ranks.size - objective.batches, ranks.size, objective.batches,
            )  # fmt: skip
        if len(log) and ranks.is_first:
            logger.info("going on from %d evaluations of a stopped search", len(log))
        started = time.perf_counter()
        with _progress(config, objective) as bar, _stop_signal():
            ledger = Ledger(objective, log, bar)
            with _live(config, ledger, work_dir, ranks):
                result = _found(config, ledger, work_dir)
        summary = _summary(ledger, result, time.perf_counter() - started)
        summary |= objective.memory()
        if ranks.is_first:
            _write(work_dir, config, summary, result, ledger)
    return {
        name: summary[name]
        for name in ("best_score", "best_log_likelihood", "evaluations", "full_forward_equivalents")
    }


@contextlib.contextmanager
def _live(config: StageConfig, ledger: Ledger, work_dir: Path, ranks: Ranks) -> Iterator[None]:
    """Scalars and the best mask so far, for those who watch the search."""
    from stages.searching.live import LiveView

    section = config.section
    assert isinstance(section, SearchConfig)
    if not ranks.is_first:
        yield
        return
    view = LiveView(work_dir, section, config.model.path, _seed(config))
    ledger.watch = view.update
    try:
        yield
    finally:
        view.close()


def _found(config: StageConfig, ledger: Ledger, work_dir: Path) -> SearchResult:
    """The method's result; a search that is stopped leaves its last words."""
    from bosch.errors import LostRankError
    from stages.searching.methods import find_mask

    section = config.section
    assert isinstance(section, SearchConfig)
    try:
        return find_mask(section, ledger, _seed(config))
    except (KeyboardInterrupt, SystemExit, LostRankError):
        if ledger.log.path is not None:
            _say_what_is_kept(ledger, work_dir)
        raise


def _seed(config: StageConfig) -> int:
    section = config.section
    assert isinstance(section, SearchConfig)
    return config.seed if section.seed is None else section.seed


@contextlib.contextmanager
def _progress(config: StageConfig, objective: Objective) -> Iterator[Progress | None]:
    """Progress in evaluations, shown by the first rank."""
    from bosch.progress import progress
    from stages.searching.methods import most_evaluations

    section = config.section
    assert isinstance(section, SearchConfig)
    if not objective.ranks.is_first:
        yield None
        return
    total = most_evaluations(section, objective.num_layers)
    with progress(total, f"search ({section.method})", "evaluations") as bar:
        yield bar


def _objective(config: StageConfig, prepared: Path, ranks: Ranks) -> Objective:
    from bosch.calibration import CalibrationSet
    from bosch.modeling import load_model, prepare_for_search
    from bosch.objective import Objective
    from bosch.sharding import load_sharded

    section = config.section
    assert isinstance(section, SearchConfig)
    calibration = CalibrationSet.load(prepared / "calibration")
    options: dict[str, Any] = {
        "dtype": config.model.dtype,
        "revision": config.model.revision,
        "trust_remote_code": config.model.trust_remote_code,
    }
    if ranks.shards > 1:
        model = load_sharded(config.model.path, ranks, **options)
    else:
        model = load_model(config.model.path, device=ranks.device, **options)
    prepare_for_search(model, config.runtime.attention)
    return Objective(
        model,
        calibration,
        section.window_size,
        section.sinks,
        batch_size=config.runtime.eval_batch_size,
        ranks=ranks,
    )


def _summary(ledger: Ledger, result: SearchResult, seconds: float) -> dict[str, Any]:
    evaluation = result.evaluation
    return {
        "anchors": {
            "all_sliding": result.anchors.all_sliding,
            "all_full": result.anchors.all_full,
        },
        "best_score": evaluation.score,
        "best_log_likelihood": evaluation.log_likelihood,
        **ledger.costs(),
        "solver_seconds": max(0.0, seconds - ledger.fresh_seconds),
        "layer_importance": result.layers,
        "trace": ledger.trace_records(),
        "notes": ledger.notes,
    }


def _write(
    work_dir: Path,
    config: StageConfig,
    summary: dict[str, Any],
    result: SearchResult,
    ledger: Ledger,
) -> None:
    from stages.searching.live import BEST, mask_file
    from stages.searching.plot import plot_trace

    section = config.section
    assert isinstance(section, SearchConfig)
    plot_trace(ledger.trace, result.anchors, work_dir / "search.png")
    (work_dir / "summary.json").write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
    found = mask_file(
        result.mask, result.evaluation.score, section, config.model.path, _seed(config)
    )
    found.save(work_dir / "head_mask.json")
    (work_dir / BEST).unlink(missing_ok=True)
    logger.info(
        "search finished: score %.4f (all full %.4f, all sliding %.4f), %d evaluations, %d of them "
        "known from other searches, %.1f full passes computed",
        summary["best_score"], result.anchors.all_full, result.anchors.all_sliding,
        summary["evaluations"], summary["reused_evaluations"],
        summary["full_forward_equivalents"],
    )  # fmt: skip


def _say_what_is_kept(ledger: Ledger, work_dir: Path) -> None:
    """Last words of a stopped search: what its best mask is worth, and where it is."""
    from stages.searching.live import BEST

    kept = f"{ledger.costs()['evaluations']:.0f} evaluations are kept, the same command goes on"
    best = ledger.best_on_budget
    if best is None:
        logger.warning("search stopped before its first mask on budget; %s", kept)
        return
    _, score, log_likelihood = best
    worth = f"{score:.4f} (log-likelihood {log_likelihood:.4f}"
    ends = {point.unit: point.score for point in ledger.trace if point.stage == "anchors"}
    worth += "".join(f", {name} {value:.4f}" for name, value in ends.items()) + ")"
    logger.warning(
        "search stopped; the best mask on budget so far scores %s and is kept in %s; %s",
        worth, work_dir / BEST, kept,
    )  # fmt: skip


@contextlib.contextmanager
def _stop_signal() -> Iterator[None]:
    """Let SIGTERM end the search like Ctrl-C where nobody else handles it."""

    def stop(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    in_main_thread = threading.current_thread() is threading.main_thread()
    if not in_main_thread or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
