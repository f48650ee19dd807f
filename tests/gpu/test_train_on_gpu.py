"""Training on a GPU: bf16 with and without Liger kernels follows the float32 run."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.training_case import make_case, metrics, train_here


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_case(tmp_path_factory.mktemp("case"))


def losses(case: Path, work_dir: Path, **train: object) -> list[float]:
    train_here(case, work_dir, train=train)
    return [record["loss"] for record in metrics(work_dir)]


def test_bf16_follows_float32(case: Path, tmp_path: Path) -> None:
    exact = losses(case, tmp_path / "exact")
    rounded = losses(case, tmp_path / "rounded", mixed_precision="bf16")
    assert rounded == pytest.approx(exact, rel=2e-2)


def test_liger_follows_the_models_own_code(case: Path, tmp_path: Path) -> None:
    pytest.importorskip("liger_kernel")
    exact = losses(case, tmp_path / "exact")
    assert losses(case, tmp_path / "liger", liger=True) == pytest.approx(exact, rel=1e-2)
