"""A head mask from a file in place of a search."""

from __future__ import annotations

from typing import Any

from bosch.budget import swa_budget
from bosch.errors import UserError
from bosch.heads import HeadMask, HeadMaskFile
from bosch.search.settings import SearchSettings
from bosch.window import windows_text


def given_mask(scorer: Any, settings: SearchSettings) -> HeadMask:
    """The mask of `settings.mask`, checked against the model, the ratio and the window.

    Raises UserError where the file is missing or damaged, or is for another of these.
    """
    path = settings.mask
    if not path:
        raise UserError("search.mask: method given reads the head mask from a file; name one")
    file = HeadMaskFile.load(path)
    shape = scorer.num_layers, scorer.num_key_value_heads
    if file.mask.is_full.shape != shape:
        raise UserError(
            f"{path}: a mask of {file.num_layers} layers with {file.num_key_value_heads} KV heads, "
            f"the model has {shape[0]} with {shape[1]}"
        )
    sliding = file.mask.num_sliding
    budget = swa_budget(shape[0] * shape[1], settings.swa_ratio)
    if sliding != budget:
        raise UserError(
            f"search.swa_ratio: {settings.swa_ratio:g} means {budget} sliding heads, {path} has "
            f"{sliding}; set it to {file.mask.swa_ratio:.6g}"
        )
    widest = file.windows[0]
    window = getattr(scorer, "window", widest)
    if window != widest:
        several = f"windows of {windows_text(file.windows)}, of which the widest counts"
        raise UserError(
            f"search.window_size: the window is {window}, {path} is a mask for "
            f"{several if len(file.windows) > 1 else f'a window of {widest}'}; "
            f"set window_size: {widest.size} and sinks: {widest.sinks}"
        )
    granularity = settings.head_granularity
    for layer, full in enumerate(file.mask.full_kv_heads_per_layer):
        if full % granularity:
            raise UserError(
                f"search.head_granularity: layer {layer} of {path} has {full} full KV heads, no "
                f"multiple of {granularity}; leave the field out or choose another mask"
            )
    return file.mask
