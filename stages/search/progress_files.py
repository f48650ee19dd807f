"""Output of a running search: tensorboard scalars, and a file with its best mask so far."""

from __future__ import annotations

from pathlib import Path

from bosch.errors import RunError
from bosch.files import remove
from bosch.mask_files import HeadMaskFile
from bosch.masks import HeadMask
from bosch.search.evaluator import Evaluator
from stages.context import StageConfig
from stages.published import TENSORBOARD
from stages.search.stage import SearchConfig

BEST = "best_so_far.json"


def mask_file(config: StageConfig[SearchConfig], mask: HeadMask, score: float) -> HeadMaskFile:
    """The head mask file of `mask`, with the settings of its search."""
    return HeadMaskFile(mask, config.model.path, config.section.method, score, config.seed)


class LiveView:
    """Writes scalars and the best mask after each evaluation, on the first rank.

    A resumed search replays its log, so the scalars start over. RunError if they are not written.
    """

    def __init__(self, work_dir: Path, config: StageConfig[SearchConfig]) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.best_file = work_dir / BEST
        self._config = config
        self._best: HeadMask | None = None
        remove(work_dir / TENSORBOARD)
        try:
            self._board = SummaryWriter(str(work_dir / TENSORBOARD))
        except OSError as error:
            raise RunError(
                f"{work_dir}: the search cannot write there ({error.strerror})"
            ) from error

    def update(self, evaluator: Evaluator) -> None:
        """Write the last evaluation of `evaluator`."""
        phases = list(dict.fromkeys(point.phase for point in evaluator.trace))
        point, costs, best = evaluator.trace[-1], evaluator.costs(), evaluator.best_on_budget
        values = {
            "score": point.score,
            "log_likelihood": point.log_likelihood,
            "phase": float(phases.index(point.phase)),
            "evaluations": costs["evaluations"],
            "full_forward_equivalents": costs["full_forward_equivalents"],
            "best_score_of_subproblem": point.best_score,
        }
        if best is not None:
            mask, evaluation = best
            values["best_score"] = evaluation.score
            values["best_log_likelihood"] = evaluation.log_likelihood
            if mask != self._best:
                self._best = mask
                mask_file(self._config, mask, evaluation.score).save(self.best_file)
        for name, value in values.items():
            self._board.add_scalar(f"search/{name}", value, point.step)

    def close(self) -> None:
        self._board.close()
