"""What a running search shows: tensorboard scalars, and a file with its best mask so far."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import get_args

from bosch.errors import RunError
from bosch.heads import HeadMask, HeadMaskFile
from bosch.method.ledger import Ledger, StageName
from stages.configs import SearchConfig

BEST = "best_so_far.json"
_STAGES = get_args(StageName)


def mask_file(
    mask: HeadMask, score: float, section: SearchConfig, model: str, seed: int
) -> HeadMaskFile:
    """`mask` as a file with what it was found for and how."""
    return HeadMaskFile(
        model=model,
        method=section.method,
        swa_ratio=section.swa_ratio,
        window_size=section.window_size,
        sinks=section.sinks,
        num_layers=mask.num_layers,
        num_key_value_heads=mask.num_key_value_heads,
        swa_kv_heads=mask.swa_kv_heads,
        score=score,
        seed=seed,
    )


class LiveView:
    """Written after each evaluation, on the first rank.

    A search that goes on asks for its first masks again, so the scalars begin afresh each time.
    Raises RunError where the work directory cannot be written.
    """

    def __init__(self, work_dir: Path, section: SearchConfig, model: str, seed: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.best_file = work_dir / BEST
        self._section, self._model, self._seed = section, model, seed
        self._best: HeadMask | None = None
        shutil.rmtree(work_dir / "tensorboard", ignore_errors=True)
        try:
            self._board = SummaryWriter(str(work_dir / "tensorboard"))
        except OSError as error:
            raise RunError(
                f"{work_dir}: the search cannot write there ({error.strerror})"
            ) from error

    def update(self, ledger: Ledger) -> None:
        """Show the last evaluation of `ledger`."""
        point, costs, best = ledger.trace[-1], ledger.costs(), ledger.best_on_budget
        values = {
            "score": point.score,
            "log_likelihood": point.log_likelihood,
            "best_score_of_unit": point.best_score,
            "stage": float(_STAGES.index(point.stage)),
            "evaluations": costs["evaluations"],
            "reused_evaluations": costs["reused_evaluations"],
            "full_forward_equivalents": costs["full_forward_equivalents"],
        }
        if best is not None:
            values |= {"best_score": best[1], "best_log_likelihood": best[2]}
            if best[0] != self._best:
                self._best = best[0]
                file = mask_file(best[0], best[1], self._section, self._model, self._seed)
                file.save(self.best_file)
        for name, value in values.items():
            self._board.add_scalar(f"search/{name}", value, point.step)

    def close(self) -> None:
        """Put the scalars on disk."""
        self._board.close()
