"""Scores of untrained hybrids and every checkpoint, with those of the original model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bosch.files import exists
from data_prep.documents.calibration import CalibrationNeedles
from data_prep.documents.tokenizer import TokenizerSpec
from stages.context import StageConfig
from stages.evaluate.answers import digest_of
from stages.evaluate.models import EvaluatedModel, evaluate_models
from stages.evaluate.scores import HYBRID
from stages.evaluate.stage import EvaluateConfig
from stages.materialize.stage import MODEL
from stages.prepare.stage import CALIBRATION, TOKENIZER
from stages.published import Manifest
from stages.train.stage import checkpoint_folders


def run(
    config: StageConfig[EvaluateConfig], inputs: Mapping[str, Path], work_dir: Path
) -> dict[str, Any]:
    """Write scores.json and samples.jsonl below `work_dir`; called on every rank.

    scores.json repeats the original model's scores from inputs["original"]. Raises UserError when a
    model or the essay folder is missing or damaged, and RunError when a sample shares a needle with
    the calibration set.
    """
    folders = {HYBRID: (inputs["materialize"] / MODEL, inputs["materialize"])}
    if "train" in inputs:
        checkpoints = checkpoint_folders(inputs["train"])
        folders |= {name: (folder, inputs["train"]) for name, folder in checkpoints.items()}
    prepared = inputs["prepare"]
    models = []
    for name, (folder, stage) in folders.items():
        model = config.model.model_copy(update={"path": str(folder), "revision": None})
        hashes = Manifest.read(stage).hashes if exists(stage / Manifest.FILE) else None
        identity = digest_of({"files": hashes}) if hashes else None
        models.append(EvaluatedModel(name, model, identity))
    return evaluate_models(
        config,
        models,
        TokenizerSpec(str(prepared / TOKENIZER), None, config.model.trust_remote_code),
        work_dir,
        calibration=CalibrationNeedles.load(prepared / CALIBRATION),
        original=inputs["original"],
    ).averages
