"""A head mask from a file instead of a search."""

from __future__ import annotations

from typing import Any

from bosch.budget import swa_budget
from bosch.errors import UserError
from bosch.mask_files import HeadMaskFile
from bosch.masks import HeadMask
from bosch.search.settings import SearchSettings
from bosch.window import windows_text


def given_mask(scorer: Any, settings: SearchSettings) -> HeadMask:
    """The mask of `settings.mask`; UserError unless it fits model, ratio, windows and units.

    `scorer` has `num_layers`, `num_key_value_heads` and, where the windows are known, `windows`.
    """
    path = settings.mask
    if not path:
        raise UserError("method given takes the head mask from a file; name one", "search.mask")
    mask = HeadMaskFile.load(path).mask
    shape = scorer.num_layers, scorer.num_key_value_heads
    if mask.shape != shape:
        raise UserError(
            f"{path}: a mask of {mask.shape[0]} layers with {mask.shape[1]} KV heads, the model "
            f"has {shape[0]} with {shape[1]}"
        )
    sliding = mask.num_sliding
    budget = swa_budget(shape[0] * shape[1], settings.swa_ratio)
    if sliding != budget:
        raise UserError(
            f"{settings.swa_ratio:g} means {budget} sliding heads, {path} has {sliding}; set it to "
            f"{mask.swa_ratio:.6g}",
            "search.swa_ratio",
        )
    menu = getattr(scorer, "windows", mask.menu)
    if mask.menu and menu != mask.menu:
        sizes = [window.size for window in mask.menu[::-1]]
        field = f"window_size: {sizes[0]}" if len(sizes) == 1 else f"windows: {sizes}"
        where = "window_size" if len(menu) == 1 else "windows"
        raise UserError(
            f"the window is {windows_text(menu)}, {path} is a mask for "
            f"{windows_text(mask.menu)}; set {field} and sinks: {mask.sinks}",
            f"search.{where}",
        )
    granularity = settings.head_granularity
    for layer, row in enumerate(mask.layers):
        if (full := row[None]) % granularity:
            raise UserError(
                f"layer {layer} of {path} has {full} full KV heads, no multiple of {granularity}; "
                "leave the field out or choose another mask",
                "search.head_granularity",
            )
    return mask
