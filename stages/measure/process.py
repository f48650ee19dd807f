"""The process of one run: prefill and decoding of one model at one length, memory, KV cache.

Its arguments are the files of the request and of the result.

Shapes: B batch, T tokens of the prompt.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from transformers.utils import logging as transformers_logging

from bosch.backends import BACKENDS
from bosch.errors import RunError, UserError, is_out_of_memory
from bosch.hardware import cpu_cores
from bosch.hybrid import CACHE_NAME, NAME
from bosch.model.cache import held_bytes, state_bytes, used_bytes
from bosch.model.cache_size import CacheSize
from bosch.model.families import attention_needs, decoder_layers, text_config
from bosch.this_process import die_with_parent
from stages.measure.measured_model import MeasuredModel, Variant, build_model, chosen_device
from stages.measure.stage import MeasureSettings

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
_RESET_HIGH_WATER = "5"


def measure_run(request: dict[str, Any]) -> dict[str, Any]:
    """Figures of one run; errors of the run pass."""
    settings = MeasureSettings.model_validate(request["settings"], strict=False)
    variant = Variant.model_validate(request["variant"], strict=False)
    length = int(request["length"])
    device = chosen_device(settings)
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    if settings.memory_limit is not None:
        limit_memory(device, settings.memory_limit)
    meter = memory_meter(device)
    measured = build_model(request["model"], request["original"], variant, settings)
    generator = torch.Generator().manual_seed(settings.seed)
    vocabulary, rows = text_config(measured.model.config).vocab_size, settings.batch_size
    ids = torch.randint(vocabulary, (rows, length), generator=generator).to(device)  # [B, T]
    with torch.inference_mode():
        kernels = attention_kernels(lambda: _warm_up(measured, ids, settings.chunk), device)
        needs = attention_needs(measured.model.config).keys() & {"softcap", "head_logits"}
        own_logits = measured.implementation == NAME and bool(needs)
        check_kernels(measured.backend, kernels, own_logits)
        figures = _figures(measured, ids, settings, meter)
    layers = decoder_layers(measured.model.config)
    size = CacheSize.of(
        variant.mask.layers, layers,
        getattr(torch, settings.dtype).itemsize, state_bytes(measured.model),
    )  # fmt: skip
    expected = rows * size.dynamic(length)
    if figures["kv_cache_bytes"] != expected:
        raise RunError(
            f"the KV cache of {variant.name} holds {figures['kv_cache_bytes']:,} bytes after "
            f"{length:,} tokens, the formula says {expected:,}"
        )
    parameters = sum(p.numel() for p in measured.model.parameters())
    weights = sum(p.nbytes for p in measured.model.parameters())
    return {
        **figures,
        "attention": {
            "implementation": measured.implementation, "backend": measured.backend,
            "cache": type(measured.new_cache()).__name__, "kernels": kernels,
        },
        "model": {"parameters": parameters, "weights_bytes": weights, "head_dim": layers.head_dim},
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
    cache, start_bytes = measured.new_cache(), meter.in_use()
    clock = time.process_time if settings.clock == "processor" else time.perf_counter
    peaks: list[int] = []

    def timed_pass(ids: Tensor) -> tuple[Tensor, float]:
        meter.restart()
        _wait(ids.device)
        started = clock()
        token = _pass(measured, ids, cache)
        _wait(ids.device)
        seconds = clock() - started
        peaks.append(meter.peak())
        return token, seconds

    prefill_seconds, token_seconds = [], []
    for start in range(0, ids.shape[1], settings.chunk):
        token, seconds = timed_pass(ids[:, start : start + settings.chunk])
        prefill_seconds.append(seconds)
    cache_bytes = held_bytes(cache) if measured.implementation == NAME else used_bytes(cache)
    for _ in range(settings.decode_tokens):
        token, seconds = timed_pass(token)
        token_seconds.append(seconds)
    return {
        "prefill_seconds": sum(prefill_seconds),
        "token_seconds": token_seconds,
        "memory_start_bytes": start_bytes,
        "memory_peak_bytes": max(peaks),
        "memory_p90_bytes": float(np.percentile(peaks, 90)),
        "memory_source": meter.source,
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
    request = json.loads(Path(request_file).read_text())
    try:
        result = {"status": "measured", **measure_run(request)}
    except UserError as fault:
        result = {"status": "user_error", "reason": str(fault)}
    except RunError as failure:
        result = {"status": "run_error", "reason": str(failure)}
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        result = {"status": "out_of_memory", "reason": reason[:200]}
    Path(result_file).write_text(json.dumps(result))


class MemoryMeter(NamedTuple):
    """Functions that read memory: bytes `in_use` now, and their `peak` since `restart`."""

    source: str
    restart: Callable[[], Any]
    peak: Callable[[], int]
    in_use: Callable[[], int]


_CUDA = MemoryMeter(
    "allocated by torch on the GPU", torch.cuda.reset_peak_memory_stats,
    torch.cuda.max_memory_allocated, torch.cuda.memory_allocated,
)  # fmt: skip


def _status_bytes(name: str) -> int:
    line = next(line for line in _STATUS.read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) * 1024


_RESIDENT = MemoryMeter(
    "resident set of the process", lambda: _CLEAR.write_text(_RESET_HIGH_WATER),
    partial(_status_bytes, "VmHWM"), partial(_status_bytes, "VmRSS"),
)  # fmt: skip


def memory_meter(device: torch.device) -> MemoryMeter:
    """The meter of a device; raises UserError on systems without a meter for the CPU."""
    if device.type == "cuda":
        return _CUDA
    try:
        _RESIDENT.restart()
        _RESIDENT.peak()
    except (OSError, StopIteration):
        raise UserError(
            f"--device cpu: memory is read from {_STATUS} and {_CLEAR}, which this system does not "
            "have; measure on Linux or on a GPU"
        ) from None
    return _RESIDENT


def limit_memory(device: torch.device, limit: int) -> None:
    """Limit this process to `limit` bytes of GPU memory or, on the CPU, of private memory."""
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, limit / total))
    else:
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


_ATTENTION_WORDS = ("attention", "attn", "flash", "fmha", "softmax")
_NAME_LENGTH = 100

# For each attention implementation, a substring of the name of an operation that it always runs.
_OPERATIONS = {
    **{name: impl.kernel for key, impl in BACKENDS.items() for name in (key, *impl.aliases)},
    # Of transformers, for the original model only.
    **dict.fromkeys(("flash_attention_2", "flash_attention_3"), "flash_attn"),
}


def attention_kernels(work: Callable[[], None], device: torch.device) -> list[str]:
    """Names of the attention operations and kernels that `work` runs."""
    activities = [ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities) as profiler:
        work()
    names = {event.key[:_NAME_LENGTH] for event in profiler.key_averages()}
    return sorted(name for name in names if any(word in name.lower() for word in _ATTENTION_WORDS))


def check_kernels(backend: str, kernels: list[str], own_logits: bool) -> None:
    """Raise RunError unless `kernels` are those of the attention `backend`.

    sdpa's fused kernels do not support logits that a family caps or adds to (`own_logits`).
    """
    fused = any(_OPERATIONS["sdpa"] in name for name in kernels)
    expected = {_OPERATIONS[backend]}
    if own_logits and backend == "sdpa":
        expected.add(_OPERATIONS["eager"])
    ran = any(operation in name for name in kernels for operation in expected)
    if not ran or (backend == "eager" and fused):
        raise RunError(
            f"attention '{backend}' was requested, but what ran was "
            f"{', '.join(kernels) or 'another'}"
        )
