"""A head mask from a file instead of a search."""

from __future__ import annotations

from typing import Any

from bosch.budget import swa_budget
from bosch.errors import UserError
from bosch.heads import HeadMask, HeadMaskFile
from bosch.search.settings import SearchSettings
from bosch.window import window_menu, windows_text


def given_mask(scorer: Any, settings: SearchSettings) -> HeadMask:
    """The mask of `settings.mask`; UserError unless it fits model, ratio, windows and units.

    `scorer` has `num_layers`, `num_key_value_heads` and, where the windows are known, `windows`.
    """
    path = settings.mask
    if not path:
        raise UserError("method given takes the head mask from a file; name one", "search.mask")
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
            f"{settings.swa_ratio:g} means {budget} sliding heads, {path} has {sliding}; set it to "
            f"{file.mask.swa_ratio:.6g}",
            "search.swa_ratio",
        )
    menu = window_menu(getattr(scorer, "windows", file.windows))
    if menu != file.windows:
        sizes = [window.size for window in file.windows[::-1]]
        field = f"window_size: {sizes[0]}" if len(sizes) == 1 else f"windows: {sizes}"
        where = "window_size" if len(menu) == 1 else "windows"
        raise UserError(
            f"the window is {windows_text(menu)}, {path} is a mask for "
            f"{windows_text(file.windows)}; set {field} and sinks: {file.sinks}",
            f"search.{where}",
        )
    granularity = settings.head_granularity
    for layer, full in enumerate(file.mask.full_kv_heads_per_layer):
        if full % granularity:
            raise UserError(
                f"layer {layer} of {path} has {full} full KV heads, no multiple of {granularity}; "
                "leave the field out or choose another mask",
                "search.head_granularity",
            )
    return file.mask
