"""One model at one length, in a process of its own: prefill, decoding, memory, KV cache.

    python -m stages.measuring.point REQUEST.json RESULT.json

Shapes: B batch, T tokens of the prompt.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers.utils import logging as transformers_logging

from bosch.cache import HybridCache
from bosch.errors import RunError, UserError
from stages.measuring.kernels import attention_kernels, check_kernels
from stages.measuring.memory import MemoryMeter, is_out_of_memory, limit_memory, memory_meter
from stages.measuring.settings import MeasureSettings, Variant, cache_formula
from stages.measuring.subject import Subject, build_subject, chosen_device


def measure_point(request: dict[str, Any]) -> dict[str, Any]:
    """Figures of one run; raises what the run raises."""
    settings = MeasureSettings(**request["settings"])
    variant, length = Variant(**request["variant"]), int(request["length"])
    device = chosen_device(settings)
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    if settings.memory_limit is not None:
        limit_memory(device, settings.memory_limit)
    meter = memory_meter(device)
    subject = build_subject(request["model"], request["original"], variant, settings)
    generator = torch.Generator().manual_seed(settings.seed)
    vocabulary, rows = subject.model.config.vocab_size, settings.batch_size
    ids = torch.randint(vocabulary, (rows, length), generator=generator).to(device)  # [B, T]
    with torch.inference_mode():
        kernels = attention_kernels(lambda: _warm_up(subject, ids, settings.chunk), device)
        check_kernels(subject.backend, kernels)
        figures = _measured(subject, ids, settings, meter)
    config = subject.model.config
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    per_head = 2 * head_dim * getattr(torch, settings.dtype).itemsize
    expected = cache_formula(variant, length, rows, config.num_key_value_heads, per_head)
    if figures["kv_cache_bytes"] != expected:
        raise RunError(
            f"the KV cache of {variant.name} holds {figures['kv_cache_bytes']:,} bytes after "
            f"{length:,} tokens, the formula says {expected:,}"
        )
    parameters = sum(p.numel() for p in subject.model.parameters())
    weights = sum(p.numel() * p.element_size() for p in subject.model.parameters())
    return {
        **figures,
        "attention": subject.describe(kernels),
        "model": {"parameters": parameters, "weights_bytes": weights, "head_dim": head_dim},
        "hardware": _hardware(device),
    }


def _pass(subject: Subject, ids: Tensor, cache: Any) -> Tensor:
    """One forward pass; returns the next token of each row, [B, 1]."""
    out = subject.model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
    return out.logits[:, -1:].argmax(-1)  # type: ignore[no-any-return]


def _warm_up(subject: Subject, ids: Tensor, chunk: int) -> None:
    """Every kind of pass once: a first chunk, a chunk with a past, a token."""
    cache = subject.new_cache()
    for start in range(0, min(ids.shape[1], 2 * chunk), chunk):
        token = _pass(subject, ids[:, start : start + chunk], cache)
    _pass(subject, token, cache)


def _measured(
    subject: Subject, ids: Tensor, settings: MeasureSettings, meter: MemoryMeter
) -> dict[str, Any]:
    cache, start_bytes = subject.new_cache(), meter.now()
    clock = time.process_time if settings.clock == "processor" else time.perf_counter
    peaks: list[int] = []

    def timed(part: Tensor) -> tuple[Tensor, float]:
        meter.restart()
        _wait(part.device)
        started = clock()
        token = _pass(subject, part, cache)
        _wait(part.device)
        seconds = clock() - started
        peaks.append(meter.peak())
        return token, seconds

    prefill, tokens = [], []
    for start in range(0, ids.shape[1], settings.chunk):
        token, seconds = timed(ids[:, start : start + settings.chunk])
        prefill.append(seconds)
    cache_bytes = held_bytes(cache)
    for _ in range(settings.decode_tokens):
        token, seconds = timed(token)
        tokens.append(seconds)
    return {
        "prefill_seconds": sum(prefill),
        "token_seconds": tokens,
        "memory_start_bytes": start_bytes,
        "memory_peak_bytes": max(peaks),
        "memory_p90_bytes": float(np.percentile(peaks, 90)),
        "memory_source": meter.source,
        "kv_cache_bytes": cache_bytes,
    }


def held_bytes(cache: Any) -> int:
    """Bytes of the storages in which a cache keeps keys and values, each counted once."""
    if isinstance(cache, HybridCache):
        return cache.num_bytes
    tensors = [states for layer in cache.layers for states in (layer.keys, layer.values)]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _hardware(device: torch.device) -> dict[str, Any]:
    """What it ran on; no name of the machine."""
    facts: dict[str, Any] = {"device": device.type, "cpu": _cpu_model(), "cores": os.cpu_count()}
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


def main(request_file: str, result_file: str) -> None:
    """Measure what the request says and write the figures, or how it ended, into the result."""
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    request = json.loads(Path(request_file).read_text())
    try:
        result = {"status": "measured", **measure_point(request)}
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


if __name__ == "__main__":
    main(*sys.argv[1:])
