"""The result of evaluating a head mask, and the journal of all results."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

from bosch.journal import Journal
from bosch.masks import HeadMask
from bosch.ranks import Ranks

logger = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True)
class Evaluation:
    """Result of one pass over the calibration set.

    `score` is S(z) in [0, 1] (BOSCH Eq. 4), `log_likelihood` the mean over examples of the summed
    log-probability of the answer, in nats. `full_forward_equivalents` is the work done, relative to
    a pass with every head full.
    """

    score: float
    log_likelihood: float
    seconds: float = 0.0
    full_forward_equivalents: float = 1.0

    @property
    def rank(self) -> tuple[float, float]:
        """Order of masks: by score, then by log-likelihood."""
        return self.score, self.log_likelihood


@dataclass(frozen=True)
class GateGradient:
    """Derivative of the mean log-likelihood by gate, [L, HKV], or by choice, [L, HKV, choices]."""

    values: list[Any]
    seconds: float = 0.0
    full_forward_equivalents: float = 0.0


@dataclass(frozen=True)
class EvaluationContext:
    """All that S(z) depends on besides the mask; evaluations of other contexts are not used."""

    calibration: str
    model: str
    windows: list[int]  # the widest first
    sinks: int


class EvaluationLog:
    """The evaluations of one search, in a journal on disk.

    Of several `ranks` the first reads and writes the file and sends the entries to the others. A
    mask whose line was damaged counts as not evaluated. Without a path the log is only in memory.
    Raises RunError when the file cannot be read or written.
    """

    def __init__(
        self, path: Path | None, context: EvaluationContext, ranks: Ranks | None = None
    ) -> None:
        ranks = ranks or Ranks()
        self.path, self.context = path if ranks.is_first else None, context
        self._journal = None if self.path is None else Journal(self.path)
        self._evaluations: dict[str, Evaluation] = {}
        self._gradients: dict[str, GateGradient] = {}
        self._held_out: dict[str, Evaluation] = {}
        self._read_journal()
        self._evaluations, self._gradients, self._held_out = ranks.from_first(
            (self._evaluations, self._gradients, self._held_out)
        )

    def __len__(self) -> int:
        return len(self._evaluations)

    def get(self, mask: HeadMask) -> Evaluation | None:
        """The evaluation of `mask`, if any."""
        return self._evaluations.get(mask.key)

    def append(self, mask: HeadMask, evaluation: Evaluation, phase: str) -> None:
        """Append a new evaluation of a search's `phase`; returns when it is on disk."""
        self._evaluations[mask.key] = evaluation
        self._append(mask, {"phase": phase, **asdict(evaluation)})

    def gradient(self, mask: HeadMask, share: str) -> GateGradient | None:
        """The gradient at `mask` over a share of the examples, if any."""
        return self._gradients.get(f"{mask.key} {share}")

    def append_gradient(self, mask: HeadMask, share: str, gradient: GateGradient) -> None:
        """Append a gradient; returns when it is on disk."""
        self._gradients[f"{mask.key} {share}"] = gradient
        self._append(mask, {"share": share, "gradient": asdict(gradient)})

    def held_out(self, mask: HeadMask) -> Evaluation | None:
        """The evaluation of `mask` on the held-out examples, if any."""
        return self._held_out.get(mask.key)

    def append_held_out(self, mask: HeadMask, evaluation: Evaluation) -> None:
        """Append an evaluation on the held-out examples; returns when it is on disk."""
        self._held_out[mask.key] = evaluation
        self._append(mask, {"held_out": asdict(evaluation)})

    def _append(self, mask: HeadMask, entry: Mapping[str, Any]) -> None:
        if self._journal is not None:
            self._journal.append({"mask": mask.key, **asdict(self.context), **entry})

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
        if _from_fields(EvaluationContext, entry) != self.context:
            return False
        if "gradient" in entry:
            gradient = _from_fields(GateGradient, entry["gradient"])
            self._gradients[f"{entry['mask']} {entry['share']}"] = gradient
        elif "held_out" in entry:
            self._held_out[entry["mask"]] = _from_fields(Evaluation, entry["held_out"])
        else:
            self._evaluations[entry["mask"]] = _from_fields(Evaluation, entry)
        return True


def _from_fields(kind: type[T], entry: dict[str, Any]) -> T:
    return kind(**{f.name: entry[f.name] for f in fields(kind)})  # type: ignore[arg-type]
