"""Attention of full and sliding heads by loops over queries and keys, from the convention alone.

Imports nothing of the project, so that it shares no code with what it checks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np


def places_in_document(valid: Sequence[bool], document: Sequence[int]) -> list[int]:
    """Number of real tokens of the same document before each slot."""
    places, real_tokens = [], dict.fromkeys(document, 0)
    for real, number in zip(valid, document, strict=True):
        places.append(real_tokens[number])
        real_tokens[number] += int(real)
    return places


def visible_keys(
    query: int,
    valid: Sequence[bool],
    document: Sequence[int],
    places: Sequence[int],
    window: tuple[int, int] | None,
) -> list[int]:
    """Slots that slot `query` sees; window (W, S) of a sliding head, None of a full one."""
    keys = []
    for key in range(query + 1):
        near = window is None or query - key < window[0] or places[key] < window[1]
        if key == query or (valid[key] and document[key] == document[query] and near):
            keys.append(key)
    return keys


def plain_attention(
    query: np.ndarray,
    key: np.ndarray,
    value: np.ndarray,
    windows: Sequence[tuple[int, int] | None],
    valid: np.ndarray,
    document: np.ndarray,
) -> np.ndarray:
    """[B, T, HQ, D] of query [B, HQ, T, D], the last slots of key and value [B, HKV, Tk, D].

    `windows` [HKV]: (W, S) of a sliding head, None of a full one; valid and document [B, Tk].
    """
    batch, heads, length, dim = query.shape
    past, q_per_kv = key.shape[2] - length, heads // key.shape[1]
    output = np.zeros((batch, length, heads, dim))
    for row in range(batch):
        marks = valid[row].tolist(), document[row].tolist()
        places = places_in_document(*marks)
        for step in range(length):
            visible = {
                window: visible_keys(past + step, *marks, places, window) for window in set(windows)
            }
            for head in range(heads):
                group = head // q_per_kv
                keys = visible[windows[group]]
                logits = key[row, group, keys] @ query[row, head, step] / math.sqrt(dim)
                weights = np.exp(logits - logits.max())
                output[row, step, head] = weights @ value[row, group, keys] / weights.sum()
    return output
