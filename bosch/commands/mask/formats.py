"""Head masks in the files of other projects: DuoAttention and rtp-llm.

docs/reference/format.md says what each can hold; other masks are refused with the reason. L layers,
HKV key/value heads, HQ query heads.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from bosch import files
from bosch.baselines.ranking import rank_units
from bosch.errors import UserError
from bosch.heads import MAX_HEADS, HeadMask, HeadMaskFile
from bosch.window import Window, windows_text

# DuoAttention's files in a folder of attention patterns.
_GATES, _GATES_CONFIG = "full_attention_heads.tsv", "config.json"


def write_duoattention(file: HeadMaskFile, path: Path, query_heads: int | None) -> None:
    """Write a folder with gate scores, 1 (full) or 0 (streaming) per KV head, window and sinks."""
    window = _one_window(file, "DuoAttention")
    rows = ["\t".join(str(int(full)) for full in row) for row in file.mask.is_full]
    # recent_size counts the query's own position, as a window here does.
    sizes = {"model_name": file.model, "sink_size": window.sinks, "recent_size": window.size}
    with files.replacing(path) as folder:
        files.write_text(folder / _GATES, "\n".join(rows) + "\n")
        files.write_text(folder / _GATES_CONFIG, json.dumps(sizes, indent=1) + "\n")


def read_duoattention(path: Path, swa_ratio: float | None) -> tuple[HeadMask, int, int]:
    """Mask, window and sinks from DuoAttention's folder: its gate scores, read as a ranking.

    The ceil(rho N) heads with the lowest scores slide; among equal scores, those of lower index.
    Without `swa_ratio` every score must be 0 or 1. Raises UserError for an unreadable folder.
    """
    try:
        text = files.read_within(path / _GATES, files.CONFIG_LIMITS.max_bytes).decode()
        lines = text.split("\n")
        rows = [[float(x) for x in line.split("\t")] for line in lines if line.strip()]
    except OSError as error:
        raise UserError(
            f"{path / _GATES}: cannot be read ({error.strerror}); expected DuoAttention's folder "
            f"with {_GATES} and {_GATES_CONFIG}"
        ) from None
    except ValueError as error:
        raise UserError(f"{path / _GATES}: expected rows of numbers ({error})") from None
    if len({len(row) for row in rows}) != 1 or not np.isfinite(rows).all():
        raise UserError(
            f"{path / _GATES}: expected finite gate scores, a row of equal length for each layer"
        )
    scores = np.array(rows)
    _check_size(path / _GATES, *scores.shape)
    sizes = _read_json(path / _GATES_CONFIG)
    if swa_ratio is None:
        if not np.isin(scores, (0.0, 1.0)).all():
            raise UserError(
                f"{path / _GATES}: gate scores between 0 and 1 are a ranking; say with --swa-ratio "
                "what share of the heads slides"
            )
        mask = HeadMask(scores == 1.0)
    else:
        mask = rank_units(scores, scores.shape[1], swa_ratio, "smallest").mask
    where = path / _GATES_CONFIG
    return mask, _size(sizes, "recent_size", where, 1), _size(sizes, "sink_size", where, 0)


def write_rtp_llm(file: HeadMaskFile, path: Path, query_heads: int | None) -> None:
    """Write rtp-llm's `headwise_config`: 1 for a full and 0 for a sliding query head, by layer."""
    window = _one_window(file, "rtp-llm")
    per_head = _for_query_heads(file, query_heads)
    settings: dict[str, Any] = {
        "sink_token_num": window.sinks,
        # rtp-llm counts the keys before the query's own position.
        "swa_token_num": window.size - 1,
        # rtp-llm uses full heads below this length, where a window and its sinks see everything.
        "seqlen_threshold": window.size + window.sinks,
    }
    settings |= {str(layer): [int(full) for full in row] for layer, row in enumerate(per_head)}
    files.write_text(path, json.dumps({"headwise_config": settings}) + "\n")


def read_rtp_llm(path: Path, query_heads: int, heads: int) -> tuple[HeadMask, int, int]:
    """Mask, window and sinks from a file with `headwise_config`, such as a config.json.

    Raises UserError if it is unreadable, or query heads of one of the `heads` KV heads differ.
    """
    settings = _read_json(path).get("headwise_config")
    if not isinstance(settings, dict):
        raise UserError(f"{path}: expected rtp-llm's file, with an object headwise_config")
    layers = sorted(int(key) for key in settings if re.fullmatch("0|[1-9][0-9]{0,4}", key))
    if not layers or layers != list(range(len(layers))):
        raise UserError(f'{path}: headwise_config must have a list for each layer, from "0" on')
    _check_size(path, len(layers), heads)
    rows = [settings[str(layer)] for layer in layers]
    for layer, row in enumerate(rows):
        if not isinstance(row, list) or not row or any(value not in (0, 1) for value in row):
            raise UserError(f"{path}: headwise_config.{layer} must be a list of 0 and 1")
    mask = _from_query_heads(path, [[bool(x) for x in row] for row in rows], query_heads, heads)
    window = _size(settings, "swa_token_num", path, 0) + 1
    return mask, window, _size(settings, "sink_token_num", path, 0)


def _check_size(path: Path, layers: int, heads: int) -> None:
    if layers > files.MAX_LAYERS or heads > MAX_HEADS:
        raise UserError(f"{path}: {layers:,} layers of {heads:,} KV heads; that is no model")


def _one_window(file: HeadMaskFile, project: str) -> Window:
    """The one window that heads use; raises UserError for several, or for a sink bias."""
    if file.sink_bias is not None:
        raise UserError(
            f"--format: {project} has sink tokens and no learned logit of a head, the mask has a "
            "sink bias"
        )
    used = [window for choice, window in enumerate(file.windows, 1) if choice in file.mask.choices]
    if len(used) > 1:
        raise UserError(
            f"--format: {project} takes one window for all sliding heads, the mask has windows of "
            f"{windows_text(used)}"
        )
    return used[0] if used else file.windows[0]


def _for_query_heads(file: HeadMaskFile, query_heads: int | None) -> npt.NDArray[np.bool_]:
    """`is_full` [L, HQ]: each KV head's value, repeated for its query heads."""
    heads = file.num_key_value_heads
    if query_heads is None or not heads <= query_heads <= MAX_HEADS or query_heads % heads:
        raise UserError(
            f"--attention-heads: rtp-llm lists query heads; expected a multiple of the mask's "
            f"{heads} KV heads, found {query_heads}"
        )
    return np.repeat(file.mask.is_full, query_heads // heads, axis=1)


def _from_query_heads(path: Path, rows: list[list[bool]], query_heads: int, heads: int) -> HeadMask:
    """The mask of KV heads from `rows` [L, HQ]; raises UserError where those of a group differ."""
    for layer, row in enumerate(rows):
        if len(row) != query_heads:
            raise UserError(
                f"{path}: layer {layer} has {len(row)} query heads, --attention-heads says "
                f"{query_heads}"
            )
    groups = np.array(rows, dtype=np.bool_).reshape(len(rows), heads, -1)
    mixed = groups.any(axis=2) != groups.all(axis=2)
    if mixed.any():
        layer, head = (int(index) for index in np.argwhere(mixed)[0])
        raise UserError(
            f"{path}: in layer {layer} the query heads of KV head {head} differ, and a head mask "
            "decides for a KV head with all its query heads (docs/reference/format.md)"
        )
    return HeadMask(groups[:, :, 0])


def _read_json(path: Path) -> dict[str, Any]:
    content: Any = files.load_user_json(path, "export it again", files.CONFIG_LIMITS)
    if not isinstance(content, dict):
        raise UserError(f"{path}: expected a JSON object")
    return content


def _size(settings: dict[str, Any], name: str, path: Path, least: int) -> int:
    value = settings.get(name)
    if type(value) is not int or value < least:
        raise UserError(
            f"{path}: {name} must be an integer of at least {least}, found {value!r:.60}"
        )
    return value


# FORMAT names of `mask export` and `mask import`.
WRITERS: dict[str, Callable[[HeadMaskFile, Path, int | None], None]] = {
    "duoattention": write_duoattention,
    "rtp_llm": write_rtp_llm,
}
