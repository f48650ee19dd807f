"""What one evaluation of a head mask gave, and the file that remembers every one of them."""

from __future__ import annotations

import json
import logging
import math
import os
from dataclasses import asdict, dataclass
from pathlib import Path

from bosch.errors import RunError
from bosch.heads import HeadMask
from bosch.ranks import Ranks

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Evaluation:
    """Result of one pass over the calibration set.

    `score` is S(z) in [0, 1] (BOSCH Eq. 4), `log_likelihood` the mean over examples of the summed
    log-probability of the answer, in nats. `full_forward_equivalents` is the share of the layers
    that were computed: 1 for a whole pass, less where lower layers were reused.
    """

    score: float
    log_likelihood: float
    seconds: float = 0.0
    full_forward_equivalents: float = 1.0


@dataclass(frozen=True)
class EvaluationContext:
    """All that S(z) depends on besides the mask; evaluations of another context are not reused."""

    calibration: str
    model: str
    window_size: int
    sinks: int


class EvaluationLog:
    """Append-only JSONL file of evaluations, one line each, on disk before the search goes on.

    A last line that a killed process left torn is cut off; a damaged line elsewhere is skipped
    with a warning and its mask evaluated again. Without a path the log lives in memory only.
    """

    def __init__(self, path: Path | None, context: EvaluationContext) -> None:
        self.path, self.context = path, context
        self._known: dict[str, Evaluation] = {}
        if path is not None and path.exists():
            self._read(path)

    @classmethod
    def shared(cls, path: Path, context: EvaluationContext, ranks: Ranks) -> EvaluationLog:
        """One log for all ranks: the first reads and writes the file and tells the others."""
        log = cls(path if ranks.is_first else None, context)
        log._known = ranks.from_first(log._known)
        return log

    def __len__(self) -> int:
        return len(self._known)

    def get(self, mask: HeadMask) -> Evaluation | None:
        """The remembered evaluation of `mask` in this context."""
        return self._known.get(mask.key)

    def append(self, mask: HeadMask, evaluation: Evaluation, stage: str) -> None:
        """Remember an evaluation; returns when the line is on disk."""
        self._known[mask.key] = evaluation
        if self.path is None:
            return
        line = {"mask": mask.key, **asdict(self.context), "stage": stage, **asdict(evaluation)}
        try:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise RunError(
                f"{self.path}: cannot write the evaluation log ({error.strerror})"
            ) from error

    def _read(self, path: Path) -> None:
        content = path.read_bytes()
        whole = content.rfind(b"\n") + 1
        if whole < len(content):
            logger.warning("%s: cut off a torn last line of a stopped search", path)
            os.truncate(path, whole)
        others = 0
        for number, line in enumerate(content[:whole].splitlines(), start=1):
            entry = _parse(line)
            if entry is None:
                logger.warning("%s: line %d is damaged and not used", path, number)
                continue
            context, key, evaluation = entry
            if context == self.context:
                self._known[key] = evaluation
            else:
                others += 1
        if others:
            logger.warning(
                "%s: %d evaluations are of another model, calibration set or window: not used",
                path, others,
            )  # fmt: skip


def _parse(line: bytes) -> tuple[EvaluationContext, str, Evaluation] | None:
    try:
        entry = json.loads(line)
        context = EvaluationContext(
            calibration=str(entry["calibration"]),
            model=str(entry["model"]),
            window_size=int(entry["window_size"]),
            sinks=int(entry["sinks"]),
        )
        evaluation = Evaluation(
            score=float(entry["score"]),
            log_likelihood=float(entry["log_likelihood"]),
            seconds=float(entry["seconds"]),
            full_forward_equivalents=float(entry["full_forward_equivalents"]),
        )
        key = HeadMask.from_key(entry["mask"]).key
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
    if not (math.isfinite(evaluation.score) and math.isfinite(evaluation.log_likelihood)):
        return None
    return context, key, evaluation
