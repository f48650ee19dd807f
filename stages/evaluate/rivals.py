"""Untrained hybrids for comparison: masks of rules and rankings."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import broadcast_object_list

from bosch.files import exists
from bosch.heads import HeadMaskFile
from bosch.model.families import decoder_layers
from bosch.model.loading import load_model
from bosch.objective.calibration import CalibrationSet
from bosch.ranks import partners_alive
from bosch.search.methods import MethodName
from bosch.search.runs import unsearched_mask
from bosch.window import Window
from stages.context import StageConfig
from stages.evaluate.answers import EvaluatedModel
from stages.evaluate.models import process_state
from stages.evaluate.stage import EvaluateConfig
from stages.prepare.stage import PrepareConfig
from stages.search.budget import RequestCache
from stages.search.stage import EXAMPLES, SearchConfig

logger = logging.getLogger(__name__)


@partners_alive()
def rivals(
    config: StageConfig[EvaluateConfig], searched: HeadMaskFile, search: Path, work_dir: Path
) -> list[EvaluatedModel]:
    """The untrained hybrids of `evaluate.rivals`, in its order; called on every rank.

    The first rank computes the masks with the calibration set in `search`, and writes each to
    rivals/<method>.json below `work_dir`; if all files exist, it reads them instead.
    """
    if not config.section.rivals:
        return []
    state = process_state(config.runtime)
    folder = work_dir / "rivals"
    masks: list[list[HeadMaskFile]] = [[]]
    if state.is_main_process:
        paths = [folder / f"{method}.json" for method in config.section.rivals]
        if not all(map(exists, paths)):
            files = rival_masks(config, config.section.rivals, searched, search, state.device)
            for file, path in zip(files, paths, strict=True):
                file.save(path)
        masks[0] = [HeadMaskFile.load(path) for path in paths]
    if state.num_processes > 1:
        broadcast_object_list(masks)
    return [EvaluatedModel(file.method, config.model, mask=file) for file in masks[0]]


def rival_masks(
    config: StageConfig[Any],
    methods: Sequence[MethodName],
    searched: HeadMaskFile,
    search: Path,
    device: torch.device,
) -> list[HeadMaskFile]:
    """Masks of rules and rankings with as many sliding heads as the `searched` one, by one process.

    If that mask has several windows, they use its most common one, and the fewest sliding heads
    with no larger KV cache.
    """
    section = config.upstream_section(SearchConfig)
    calibration = CalibrationSet.load(search / EXAMPLES)
    model = load_model(
        config.model.path, device=config.runtime.place(device), **config.model.loading
    )
    window, ratio = searched.windows[0], searched.swa_ratio
    if len(searched.windows) > 1:
        kinds = decoder_layers(model.config)
        context = config.upstream_section(PrepareConfig).calibration.length
        cache = section.request_cache(kinds, config.model.dtype, context)
        window, ratio = one_window(searched, cache, section.head_granularity)
    settings = section.settings(config.seed, ratio)
    files = []
    for method in methods:
        mask = unsearched_mask(method, model, calibration, window.size, settings)
        files.append(
            HeadMaskFile.of(
                mask,
                window,
                model=config.model.path,
                method=method,
                swa_ratio=ratio,
                seed=settings.seed,
            )
        )
        logger.info("%s: mask of a rival", method)
    return files


def one_window(
    searched: HeadMaskFile, cache: RequestCache, granularity: int
) -> tuple[Window, float]:
    """The most common window of a mask, and the smallest ratio with no larger cache at this window.

    1.0 if there is no such ratio.
    """
    rows = searched.mask.heads_per_layer(searched.windows)
    counts = {window: sum(row[window] for row in rows) for window in searched.windows}
    window = max(searched.windows, key=lambda candidate: counts[candidate])
    heads = searched.mask.is_full.size
    sliding = cache.fewest_sliding(window, cache.bytes_of(rows), granularity)
    return window, (heads if sliding is None else sliding) / heads
