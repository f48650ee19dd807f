"""The result of evaluating a head mask, and the journal of all results."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

from bosch.heads import HeadMask
from bosch.journal import Journal
from bosch.ranks import Ranks

logger = logging.getLogger(__name__)

T = TypeVar("T")

# Whether a mask can still win, given upper bounds of its score and log-likelihood.
CanWin = Callable[[float, float], bool]


@dataclass(frozen=True)
class Evaluation:
    """Result of one pass over the calibration set.

    `score` is S(z) in [0, 1] (BOSCH Eq. 4), `log_likelihood` the mean over examples of the summed
    log-probability of the answer, in nats. `full_forward_equivalents` is the work done, relative to
    a pass with every head full without reuse; `whole_pass_equivalents` is the work for this mask
    without savings. A pass that ended early, because the mask could no longer win, has upper bounds
    of score and log-likelihood (`is_bound`). `round_likelihoods` are the means of the rounds (None:
    not measured), by which the scorer orders the rounds of later passes.
    """

    score: float
    log_likelihood: float
    seconds: float = 0.0
    full_forward_equivalents: float = 1.0
    whole_pass_equivalents: float = 1.0
    is_bound: bool = False
    round_likelihoods: tuple[float | None, ...] = ()

    @property
    def rank(self) -> tuple[float, float]:
        """Order of masks: by score, then by log-likelihood."""
        return self.score, self.log_likelihood

    def beaten_by(self, score: float, log_likelihood: float) -> bool:
        """Whether a mask with these values would be better."""
        return (score, log_likelihood) > self.rank


@dataclass(frozen=True)
class GateGradient:
    """Derivative of the mean log-likelihood by gate, [L, HKV], or by choice, [L, HKV, choices]."""

    values: list[Any]
    seconds: float = 0.0
    full_forward_equivalents: float = 0.0


@dataclass(frozen=True)
class EvaluationContext:
    """All that S(z) depends on besides the mask; evaluations of other contexts are not reused.

    `numerics` (device, kernels, batches) can change last bits; equal contexts may differ in it.
    """

    calibration: str
    model: str
    window_size: int | list[int]  # or the list of windows, the widest first
    sinks: int
    numerics: str = field(default="", compare=False)

    @property
    def exact(self) -> str:
        """Text that is equal for contexts whose evaluations agree to the bit."""
        return json.dumps(asdict(self), sort_keys=True)


@dataclass(frozen=True)
class Record:
    """An evaluation, and whether it came from the pool or from this search."""

    evaluation: Evaluation
    context: EvaluationContext
    reused: bool = False

    def entry(self, mask_key: str, phase: str) -> dict[str, Any]:
        """The journal's entry; `phase` is the search's phase."""
        context, evaluation = asdict(self.context), asdict(self.evaluation)
        return {"mask": mask_key, **context, "phase": phase, **evaluation, "reused": self.reused}


class EvaluationLog:
    """The evaluations of one search, in a journal on disk.

    A mask can have several evaluations: passes that ended early, and a complete one. A mask whose
    line was damaged counts as not evaluated. Without a path the log is only in memory. Masks that
    this search has not evaluated are looked up in the `pool` of all searches, if there is one. The
    pool's entries agree with this process to the bit; the journal of a resumed search may come from
    another device. Raises RunError when a file cannot be read or written.
    """

    def __init__(
        self, path: Path | None, context: EvaluationContext, pool: Journal | None = None
    ) -> None:
        self.path, self.context = path, context
        self._journal = None if path is None else Journal(path)
        self._ranks = Ranks()
        self._pool = pool
        self._has_pool = pool is not None
        self._pooled: dict[str, Evaluation] = {}
        self._records: dict[str, list[Record]] = {}
        self._gradients: dict[str, GateGradient] = {}
        self._held_out: dict[str, Evaluation] = {}
        self._read_journal()
        self._read_pool()
        self._complete_pool()

    @classmethod
    def shared(
        cls, path: Path, context: EvaluationContext, ranks: Ranks, pool_folder: Path | None = None
    ) -> EvaluationLog:
        """A log for all ranks, of which the first reads and writes files and sends the entries."""
        pool = None
        if ranks.is_first and pool_folder is not None:
            digest = hashlib.sha256(context.exact.encode()).hexdigest()
            pool = Journal(pool_folder / f"evaluations-{digest[:24]}.jsonl")
        log = cls(path if ranks.is_first else None, context, pool)
        log._records, log._gradients, log._held_out = ranks.from_first(
            (log._records, log._gradients, log._held_out)
        )
        log._ranks, log._has_pool = ranks, pool_folder is not None
        return log

    def __len__(self) -> int:
        return len(self._records)

    def get(self, mask: HeadMask) -> Evaluation | None:
        """This search's complete evaluation of `mask`."""
        for record in self._records.get(mask.key, ()):
            if not record.evaluation.is_bound:
                return record.evaluation
        return None

    def history(self, mask: HeadMask, phase: str) -> Sequence[Record]:
        """All evaluations of `mask`, and the pool's if none is complete; all ranks call it."""
        if self._has_pool and self.get(mask) is None:
            self._read_pool()
            pooled = self._ranks.from_first(self._pooled.get(mask.key))
            if pooled is not None:
                self._add(mask.key, Record(pooled, self.context, reused=True), phase)
        return self._records.get(mask.key, ())

    def gradient(self, mask: HeadMask, share: str) -> GateGradient | None:
        """This search's gradient at `mask` over a share of the examples, if any."""
        return self._gradients.get(f"{mask.key} {share}")

    def append_gradient(self, mask: HeadMask, share: str, gradient: GateGradient) -> None:
        """Append a gradient; returns when it is on disk."""
        self._gradients[f"{mask.key} {share}"] = gradient
        if self._journal is not None:
            entry = {"mask": mask.key, "share": share, **asdict(self.context)}
            self._journal.append({**entry, "gradient": asdict(gradient)})

    def held_out(self, mask: HeadMask) -> Evaluation | None:
        """This search's evaluation of `mask` on the held-out examples, if any."""
        return self._held_out.get(mask.key)

    def append_held_out(self, mask: HeadMask, evaluation: Evaluation) -> None:
        """Append an evaluation on the held-out examples; returns when it is on disk."""
        self._held_out[mask.key] = evaluation
        if self._journal is not None:
            entry = {"mask": mask.key, **asdict(self.context)}
            self._journal.append({**entry, "held_out": asdict(evaluation)})

    def append(self, mask: HeadMask, evaluation: Evaluation, phase: str) -> None:
        """Append a new evaluation; returns when it is on disk."""
        record = Record(evaluation, self.context)
        self._add(mask.key, record, phase)
        # A bound is only useful for one comparison of this search.
        if self._pool is not None and not evaluation.is_bound:
            self._pool.append(record.entry(mask.key, phase))

    def _add(self, mask_key: str, record: Record, phase: str) -> None:
        self._records.setdefault(mask_key, []).append(record)
        if self._journal is not None:
            self._journal.append(record.entry(mask_key, phase))

    def _read_journal(self) -> None:
        if self._journal is None:
            return
        intact: list[dict[str, Any]] = []

        def load(entry: dict[str, Any]) -> bool:
            has_context = self._load(entry)
            intact.append(entry)
            return has_context

        foreign = self._journal.read_new(load).count(False)
        if self._journal.damaged:  # the file is published, so remove damaged lines
            self._journal.replace(intact)
        if foreign:
            logger.warning(
                "%s: %d evaluations are of another model, calibration set or window: not used",
                self.path, foreign,
            )  # fmt: skip

    def _load(self, entry: dict[str, Any]) -> bool:
        """Load an entry of the journal; False if it has another context."""
        context = _from_fields(EvaluationContext, entry)
        if context != self.context:
            return False
        if "gradient" in entry:
            gradient = _from_fields(GateGradient, entry["gradient"])
            self._gradients[f"{entry['mask']} {entry['share']}"] = gradient
        elif "held_out" in entry:
            self._held_out[entry["mask"]] = _evaluation(entry["held_out"])
        else:
            record = Record(_evaluation(entry), context, entry["reused"])
            self._records.setdefault(entry["mask"], []).append(record)
        return True

    def _read_pool(self) -> None:
        if self._pool is not None:
            pooled = self._pool.read_new(lambda entry: (entry["mask"], _evaluation(entry)))
            for mask, evaluation in pooled:
                self._pooled.setdefault(mask, evaluation)

    def _complete_pool(self) -> None:
        """Append entries that are missing in the pool, after a kill between both writes."""
        if self._pool is None:
            return
        for key, records in self._records.items():
            for record in records:
                exact = record.context.exact == self.context.exact
                if exact and not record.evaluation.is_bound and key not in self._pooled:
                    self._pool.append(record.entry(key, "resumed"))
                    self._pooled[key] = record.evaluation


def _evaluation(entry: dict[str, Any]) -> Evaluation:
    rounds = tuple(entry["round_likelihoods"])
    return _from_fields(Evaluation, {**entry, "round_likelihoods": rounds})


def _from_fields(kind: type[T], entry: dict[str, Any]) -> T:
    return kind(**{f.name: entry[f.name] for f in fields(kind)})  # type: ignore[arg-type]
