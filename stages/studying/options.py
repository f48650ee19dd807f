"""What a study is told; nothing here imports torch."""

from __future__ import annotations

from dataclasses import dataclass

from stages.configs import CalibrationConfig, ModelConfig, Runtime, SearchConfig

STUDIES = ("optimality", "cost", "stability", "turnover")


@dataclass(frozen=True)
class StudyOptions:
    """Size of a study.

    `budgets` are evaluations per layer (kappa), `sizes` numbers of calibration examples, `held_out`
    the examples on which masks are compared. `methods` and `ratios` are in the order of the tables.
    """

    seeds: int = 5
    ratios: tuple[float, ...] = (0.25, 0.5, 0.75, 0.875)
    methods: tuple[str, ...] = ()
    budgets: tuple[int, ...] = (4, 8, 16)
    sizes: tuple[int, ...] = (4, 8, 16)
    held_out: int = 48


@dataclass(frozen=True)
class StudyConfig:
    """The parts of a recipe that a study uses: model, calibration set and search."""

    model: ModelConfig
    calibration: CalibrationConfig
    search: SearchConfig
    runtime: Runtime
    seed: int
    options: StudyOptions
