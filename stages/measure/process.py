"""The process of one run: prefill and decoding of one model at one length, memory, KV cache.

Its arguments are the files of the request and of the result.

Shapes: B batch, T tokens of the prompt.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers.utils import logging as transformers_logging

from bosch.errors import RunError, UserError, is_out_of_memory
from bosch.hardware import cpu_cores
from bosch.hybrid import CACHE_NAME, HybridCache
from bosch.masks import HeadMask
from bosch.model.cache import held_bytes, state_bytes, used_bytes
from bosch.model.cache_size import CacheSize
from bosch.model.families import decoder_layers, text_config
from bosch.this_process import die_with_parent
from stages.measure.measured_model import MeasuredModel, build_model, label
from stages.measure.stage import MeasureSettings

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
_RESET_HIGH_WATER = "5"


def measure_run(request: dict[str, Any]) -> dict[str, Any]:
    """Figures of one run; errors of the run pass.

    Raises RunError if the KV cache holds other bytes than the formula says.
    """
    settings = MeasureSettings.model_validate(request["settings"])
    mask, length, rows = HeadMask(**request["mask"]), int(request["length"]), settings.batch_size
    measured = build_model(request["model"], mask, settings)
    config, device = measured.model.config, measured.model.device
    meter, generator = memory_meter(device), torch.Generator().manual_seed(0)
    vocabulary = text_config(config).vocab_size
    ids = torch.randint(vocabulary, (rows, length), generator=generator).to(device)  # [B, T]
    with torch.inference_mode():
        _warm_up(measured, ids, settings.chunk)
        figures = _figures(measured, ids, settings, meter)
    itemsize, states = getattr(torch, settings.dtype).itemsize, state_bytes(measured.model)
    size = CacheSize.of(mask.layers, decoder_layers(config), itemsize, states)
    if figures["kv_cache_bytes"] != (expected := rows * size.dynamic(length)):
        raise RunError(
            f"the KV cache of {label(mask)} holds {figures['kv_cache_bytes']:,} bytes after "
            f"{length:,} tokens, the formula says {expected:,}"
        )
    parameters = list(measured.model.parameters())
    return {
        **figures,
        "attention": measured.attention,
        "model": {"parameters": sum(p.numel() for p in parameters),
                  "weights_bytes": sum(p.nbytes for p in parameters)},
        "hardware": _hardware(device),
    }  # fmt: skip


def _pass(measured: MeasuredModel, ids: Tensor, cache: Any) -> Tensor:
    """One forward pass; returns the next token of each row, [B, 1]."""
    out = measured.model(input_ids=ids, use_cache=True, logits_to_keep=1, **{CACHE_NAME: cache})
    return out.logits[:, -1:].argmax(-1)  # type: ignore[no-any-return]


def _warm_up(measured: MeasuredModel, ids: Tensor, chunk: int) -> None:
    """Each kind of pass once: a first chunk, a chunk after others, a token."""
    cache = measured.new_cache()
    for start in range(0, min(ids.shape[1], 2 * chunk), chunk):
        token = _pass(measured, ids[:, start : start + chunk], cache)
    _pass(measured, token, cache)


def _figures(
    measured: MeasuredModel, ids: Tensor, settings: MeasureSettings, meter: MemoryMeter
) -> dict[str, Any]:
    cache, peaks = measured.new_cache(), list[int]()

    def timed_pass(ids: Tensor) -> tuple[Tensor, float]:
        meter.restart()
        _wait(ids.device)
        started = time.perf_counter()
        token = _pass(measured, ids, cache)
        _wait(ids.device)
        seconds = time.perf_counter() - started
        peaks.append(meter.peak())
        return token, seconds

    prefill_seconds, token_seconds = [], []
    for start in range(0, ids.shape[1], settings.chunk):
        token, seconds = timed_pass(ids[:, start : start + settings.chunk])
        prefill_seconds.append(seconds)
    cache_bytes = held_bytes(cache) if isinstance(cache, HybridCache) else used_bytes(cache)
    for _ in range(settings.decode_tokens):
        token, seconds = timed_pass(token)
        token_seconds.append(seconds)
    return {
        "prefill_seconds": sum(prefill_seconds),
        "token_seconds": token_seconds,
        "memory_peak_bytes": max(peaks),
        "memory_p90_bytes": float(np.percentile(peaks, 90)),
        "kv_cache_bytes": cache_bytes,
    }


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _hardware(device: torch.device) -> dict[str, Any]:
    """Hardware of the run, without the machine's name."""
    facts: dict[str, Any] = {"device": device.type, "cpu": _cpu_model(), "cores": cpu_cores()}
    facts["threads"] = torch.get_num_threads()
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        facts |= {"gpu": properties.name, "gpu_memory_bytes": properties.total_memory}
        facts["cuda"] = torch.version.cuda
    return facts


def _cpu_model() -> str | None:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return None
    return next((line.split(":", 1)[1].strip() for line in lines if "model name" in line), None)


def main() -> None:
    """Measure the run of the request file; write its figures or its error to the result file."""
    die_with_parent()
    request_file, result_file = sys.argv[1:]
    transformers_logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        result = measure_run(json.loads(Path(request_file).read_text()))
    except UserError as fault:
        result = {"user_error": str(fault)}
    except RunError as failure:
        result = {"run_error": str(failure)}
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        result = {"out_of_memory": reason[:200]}
    Path(result_file).write_text(json.dumps(result))


class MemoryMeter(NamedTuple):
    """Functions that read memory: bytes `in_use` now, and their `peak` since `restart`."""

    restart: Callable[[], Any]
    peak: Callable[[], int]
    in_use: Callable[[], int]


def _status_bytes(name: str) -> int:
    line = next(line for line in _STATUS.read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) * 1024


def memory_meter(device: torch.device) -> MemoryMeter:
    """What torch allocated on a GPU; on the CPU of Linux the resident set of the process.

    Raises UserError on other systems.
    """
    cuda = torch.cuda
    if device.type == "cuda":
        return MemoryMeter(
            cuda.reset_peak_memory_stats, cuda.max_memory_allocated, cuda.memory_allocated
        )
    resident = MemoryMeter(
        lambda: _CLEAR.write_text(_RESET_HIGH_WATER),
        partial(_status_bytes, "VmHWM"), partial(_status_bytes, "VmRSS"),
    )  # fmt: skip
    try:
        resident.restart()
        resident.peak()
    except (OSError, StopIteration):
        raise UserError(
            f"memory is read from {_STATUS} and {_CLEAR}, which this system does not have; measure "
            "on Linux or on a GPU"
        ) from None
    return resident
