"""What one evaluation of a head mask gave, and the file that remembers every one of them."""

from __future__ import annotations

import json
import logging
import math
import os
import zlib
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from bosch.errors import RunError
from bosch.heads import HeadMask
from bosch.ranks import Ranks
from bosch.shared_lines import SharedLines

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Evaluation:
    """Result of one pass over the calibration set.

    `score` is S(z) in [0, 1] (BOSCH Eq. 4), `log_likelihood` the mean over examples of the summed
    log-probability of the answer, in nats. `full_forward_equivalents` is the work done, over that
    of a pass with every head full that keeps and reuses nothing; `whole_pass_equivalents` is what
    this mask would have cost without savings. A pass that ended early because the mask could no
    longer win gives upper bounds of score and log-likelihood (`is_bound`).
    """

    score: float
    log_likelihood: float
    seconds: float = 0.0
    full_forward_equivalents: float = 1.0
    whole_pass_equivalents: float = 1.0
    is_bound: bool = False


@dataclass(frozen=True)
class GateGradient:
    """Derivative of the mean log-likelihood by each unit's gate, [L, HKV], at a mask."""

    values: list[list[float]]
    seconds: float = 0.0
    full_forward_equivalents: float = 0.0


@dataclass(frozen=True)
class EvaluationContext:
    """All that S(z) depends on besides the mask; evaluations of another context are not reused.

    `numerics` names what can change the last bits of a log-likelihood: device, kernels, batches.
    It is no part of what is measured: contexts that differ in nothing else are equal.
    """

    calibration: str
    model: str
    window_size: int
    sinks: int
    numerics: str = field(default="", compare=False)

    @property
    def exact(self) -> str:
        """Text that is the same for contexts whose evaluations agree to the bit."""
        return json.dumps(asdict(self), sort_keys=True)


@dataclass(frozen=True)
class _Entry:
    """An evaluation, and whether it came from the pool instead of this search's own work."""

    evaluation: Evaluation
    context: EvaluationContext
    reused: bool = False


class EvaluationLog:
    """The evaluations of one search: an append-only JSONL file, on disk before the search goes on.

    A last line that a killed process left torn is cut off; a line elsewhere that does not fit its
    checksum is skipped with a warning and its mask evaluated again. Raises RunError when the file
    cannot be read. Without a path the log lives in memory only.
    A mask that this search has not evaluated is looked up in the `pool` of all searches, where
    there is one. Entries of the pool agree with this process to the bit; the file of a search that
    was stopped may have been written on another device.
    """

    def __init__(
        self, path: Path | None, context: EvaluationContext, pool: SharedLines | None = None
    ) -> None:
        self.path, self.context = path, context
        self._ranks = Ranks()
        self._pool = pool
        self._pooled: dict[str, Evaluation] = {}
        self._has_pool = pool is not None
        self._known: dict[str, _Entry] = {}
        self._gradients: dict[str, GateGradient] = {}
        if path is not None and path.exists():
            self._read(path)
        if pool is not None:
            pool.read_new(self._use_pooled)
            self._make_up(pool)

    @classmethod
    def shared(
        cls, path: Path, context: EvaluationContext, ranks: Ranks, pool_folder: Path | None = None
    ) -> EvaluationLog:
        """One log for all ranks: the first reads and writes the files and tells the others."""
        if not ranks.is_first:
            log = cls(None, context)
        else:
            pool = None
            if pool_folder is not None:
                pool = SharedLines(pool_folder, "evaluations", context.exact)
            log = cls(path, context, pool)
        log._known, log._gradients = ranks.from_first((log._known, log._gradients))
        log._ranks, log._has_pool = ranks, pool_folder is not None
        return log

    def __len__(self) -> int:
        return len(self._known)

    def get(self, mask: HeadMask) -> Evaluation | None:
        """This search's evaluation of `mask`, made to its end."""
        entry = self._known.get(mask.key)
        return None if entry is None or entry.evaluation.is_bound else entry.evaluation

    def bound(self, mask: HeadMask) -> Evaluation | None:
        """Upper bounds from an evaluation of `mask` that ended early."""
        entry = self._known.get(mask.key)
        return entry.evaluation if entry is not None and entry.evaluation.is_bound else None

    def gradient(self, mask: HeadMask, share: str) -> GateGradient | None:
        """This search's gradient at `mask` over a share of the examples."""
        return self._gradients.get(_gradient_key(mask, share))

    def append_gradient(self, mask: HeadMask, share: str, gradient: GateGradient) -> None:
        """Remember a gradient; returns when the line is on disk."""
        self._gradients[_gradient_key(mask, share)] = gradient
        line = {"mask": mask.key, "share": share, **asdict(self.context)}
        self._write({**line, "gradient": asdict(gradient)})

    def reused(self, mask: HeadMask) -> bool:
        """Whether the evaluation of `mask` was paid for by another search."""
        entry = self._known.get(mask.key)
        return entry is not None and entry.reused

    def recall(self, mask: HeadMask, stage: str) -> Evaluation | None:
        """As `get`, and where this search does not know the mask, what any other one knows.

        All ranks must ask for the same masks. What is taken from the pool goes into the file.
        """
        known = self.get(mask)
        if known is not None or not self._has_pool:
            return known
        if self._pool is not None:
            self._pool.read_new(self._use_pooled)
        found = self._ranks.from_first(self._pooled.get(mask.key))
        if found is not None:
            self._keep(mask.key, _Entry(found, self.context, reused=True), stage)
        return found

    def append(self, mask: HeadMask, evaluation: Evaluation, stage: str) -> None:
        """Remember an evaluation that was made; returns when the line is on disk."""
        entry = _Entry(evaluation, self.context)
        self._keep(mask.key, entry, stage)
        # A bound holds for the comparison it was made for, and tells other searches nothing.
        if self._pool is not None and not evaluation.is_bound:
            self._pool.append(_line(mask.key, entry, stage))
            self._pooled[mask.key] = evaluation

    def _keep(self, key: str, entry: _Entry, stage: str) -> None:
        self._known[key] = entry
        self._write({**_line(key, entry, stage), "reused": entry.reused})

    def _write(self, line: dict[str, object]) -> None:
        if self.path is None:
            return
        text = json.dumps({**line, "check": _checksum(line)})
        try:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(text + "\n")
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise RunError(
                f"{self.path}: cannot write the evaluation log ({error.strerror})"
            ) from error

    def _read(self, path: Path) -> None:
        try:
            content = path.read_bytes()
            whole = content.rfind(b"\n") + 1
            if whole < len(content):
                logger.warning("%s: cut off a torn last line of a stopped search", path)
                os.truncate(path, whole)
        except OSError as error:
            raise RunError(
                f"{path}: cannot read the evaluation log of a stopped search ({error.strerror})"
            ) from error
        others = 0
        for number, line in enumerate(content[:whole].splitlines(), start=1):
            record = _intact(line)
            if isinstance(record, dict) and "gradient" in record:
                others += not self._read_gradient(record)
                continue
            found = _parse(record)
            if found is None:
                logger.warning("%s: line %d is damaged and not used", path, number)
                continue
            key, entry = found
            if entry.context == self.context:
                self._known[key] = entry
            else:
                others += 1
        if others:
            logger.warning(
                "%s: %d evaluations are of another model, calibration set or window: not used",
                path, others,
            )  # fmt: skip

    def _read_gradient(self, record: dict[str, Any]) -> bool:
        """Whether a gradient in the file is usable here."""
        try:
            context = _context(record)
            gradient = GateGradient(**record["gradient"])
            key = _gradient_key(HeadMask.from_key(record["mask"]), str(record["share"]))
        except (ValueError, KeyError, TypeError, AttributeError):
            return False
        if context == self.context:
            self._gradients[key] = gradient
        return context == self.context

    def _use_pooled(self, record: dict[str, Any]) -> None:
        found = _parse(record)
        if found is not None and found[1].context.exact == self.context.exact:
            self._pooled.setdefault(found[0], found[1].evaluation)

    def _make_up(self, pool: SharedLines) -> None:
        """Give the pool what a search that was killed between two files knows alone."""
        for key, entry in self._known.items():
            ours = entry.context.exact == self.context.exact and not entry.evaluation.is_bound
            if ours and key not in self._pooled:
                pool.append(_line(key, entry, "resumed"))


def _line(key: str, entry: _Entry, stage: str) -> dict[str, object]:
    return {"mask": key, **asdict(entry.context), "stage": stage, **asdict(entry.evaluation)}


def _gradient_key(mask: HeadMask, share: str) -> str:
    return f"{mask.key} {share}"


def _context(record: Any) -> EvaluationContext:
    return EvaluationContext(
        calibration=str(record["calibration"]),
        model=str(record["model"]),
        window_size=int(record["window_size"]),
        sinks=int(record["sinks"]),
        numerics=str(record.get("numerics", "")),
    )


def _parse(record: Any) -> tuple[str, _Entry] | None:
    try:
        context = _context(record)
        evaluation = Evaluation(
            score=float(record["score"]),
            log_likelihood=float(record["log_likelihood"]),
            seconds=float(record["seconds"]),
            full_forward_equivalents=float(record["full_forward_equivalents"]),
            whole_pass_equivalents=float(record.get("whole_pass_equivalents", 1.0)),
            is_bound=bool(record.get("is_bound", False)),
        )
        key = HeadMask.from_key(record["mask"]).key
        reused = bool(record.get("reused", False))
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
    if not (math.isfinite(evaluation.score) and math.isfinite(evaluation.log_likelihood)):
        return None
    return key, _Entry(evaluation, context, reused)


def _checksum(line: dict[str, Any]) -> str:
    return f"{zlib.crc32(json.dumps(line).encode()):08x}"


def _intact(line: bytes) -> Any:
    """The entry of a line; None where it is no JSON, or was changed after it was written."""
    try:
        record = json.loads(line)
    except ValueError:
        return None
    # Logs of earlier versions have no checksums.
    if not isinstance(record, dict) or "check" not in record:
        return record
    return record if record.pop("check") == _checksum(record) else None
