"""From the runs of each point to efficiency.json."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

import numpy as np

from stages.measuring.settings import Variant

# The figures that are set against the original's; a ratio above 1 is more of it.
_COMPARED = (
    "prefill_tokens_per_second",
    "decode_tokens_per_second",
    "memory_peak_bytes",
    "kv_cache_bytes",
)


def point_of(
    variant: Variant, length: int, batch: int, runs: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    """One point: medians over its runs, and every run's own figures.

    Tokens per second count all rows of the batch. `kv_cache_bytes_per_token` is the whole cache
    over the tokens of the prompt.
    """
    point: dict[str, Any] = {
        "model": variant.kind,
        **variant.model_dump(mode="json", exclude={"kind"}),
        "length": length,
    }
    lack = next((run["out_of_memory"] for run in runs if "out_of_memory" in run), None)
    point |= {"out_of_memory": lack is not None, "out_of_memory_reason": lack}
    if lack is not None:
        return point
    seconds = [run["prefill_seconds"] for run in runs]
    tokens = [run["token_seconds"] for run in runs]
    rates = [batch * len(run) / sum(run) for run in tokens]
    cache = runs[0]["kv_cache_bytes"]
    return {
        **point,
        "prefill_tokens_per_second": batch * length / statistics.median(seconds),
        "decode_tokens_per_second": statistics.median(rates),
        "decode_seconds_per_token_p90": float(np.percentile(np.concatenate(tokens), 90)),
        "memory_peak_bytes": statistics.median(run["memory_peak_bytes"] for run in runs),
        "memory_p90_bytes": statistics.median(run["memory_p90_bytes"] for run in runs),
        "memory_start_bytes": statistics.median(run["memory_start_bytes"] for run in runs),
        "kv_cache_bytes": cache,
        "kv_cache_bytes_per_token": cache / (batch * length),
        "attention": runs[0]["attention"],
        "runs": [
            {
                "prefill_seconds": run["prefill_seconds"],
                "token_seconds": run["token_seconds"],
                "memory_peak_bytes": run["memory_peak_bytes"],
                "memory_p90_bytes": run["memory_p90_bytes"],
            }
            for run in runs
        ],
    }


def set_against_original(points: Sequence[dict[str, Any]]) -> None:
    """Add to every hybrid's point its figures over the original's, None where one had no memory."""
    originals = {p["length"]: p for p in points if p["model"] == "original"}
    for point in points:
        original = originals[point["length"]]
        if point is original:
            continue
        missing = point["out_of_memory"] or original["out_of_memory"]
        point["over_original"] = (
            None if missing else {name: point[name] / original[name] for name in _COMPARED}
        )
