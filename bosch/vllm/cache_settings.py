"""Defaults of the engine settings on which a hybrid's cache depends, and a log line about them.

A sliding head's cache holds its window and, in whole blocks, the tokens of all concurrent steps,
which with vLLM's defaults can be many times the window.
"""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

from bosch.errors import UserError
from bosch.vllm import plan as planner
from bosch.vllm.checks import grouping_of, original_plan, plan_of, served_layouts

# vLLM configures the loggers below this name.
_logger = logging.getLogger("vllm.bosch")

# A setting is logged if with it the cache would hold at least this multiple of the tokens.
_LOGGED_GAIN = 1.1

_WRAPPED = "wrapped_by_bosch"

_OPTIONS = ("max_num_batched_tokens", "max_num_seqs")
# Those of these options that the user set; known while vLLM makes its configuration.
_user_options: ContextVar[tuple[str, ...]] = ContextVar("user options", default=_OPTIONS)


def choose_cache_settings(vllm_config: Any) -> None:
    """Set what the user has not set: tokens of a step, and on a CPU the block size.

    Raises UserError if a rank would hold more than for the original model.
    """
    model, cache = vllm_config.model_config, vllm_config.cache_config
    scheduler = vllm_config.scheduler_config
    ranks, engine = vllm_config.parallel_config.tensor_parallel_size, _engine()
    plan = plan_of(served_layouts(model.hf_config), ranks, grouping_of(vllm_config))
    if plan.sliding_windows and engine is planner.CPU and not cache.user_specified_block_size:
        cache.block_size = engine.block_size
        cache.user_specified_block_size = True  # or the platform would set its own later
    if (
        plan.sliding_windows
        and "max_num_batched_tokens" not in _user_options.get()
        and scheduler.enable_chunked_prefill
        and vllm_config.performance_mode != "throughput"
    ):
        scheduler.max_num_batched_tokens = _chosen_batch_tokens(vllm_config, plan)
        if "max_num_seqs" not in _user_options.get():
            # As in vLLM: each sequence needs a token of a step.
            scheduler.max_num_seqs = min(scheduler.max_num_seqs, scheduler.max_num_batched_tokens)
    # vLLM decides later whether steps overlap.
    steps = max(vllm_config.max_concurrent_batches, engine.concurrent_steps)
    request = planner.Request(
        model.max_model_len, cache.block_size, steps * scheduler.max_num_batched_tokens
    )
    one_rank = plan_of(served_layouts(model.hf_config), 1, grouping_of(vllm_config))
    original = original_plan(model.hf_config, ranks).request_bytes(request, 1)
    share = one_rank.request_bytes(request, 1) // plan.shards
    refusal = planner.padding_refusal(plan, original, plan.request_bytes(request, 1), share)
    if refusal:
        raise UserError(refusal)


def _engine() -> planner.Engine:
    from vllm.platforms import current_platform

    return planner.CPU if current_platform.is_cpu() else planner.SMALL_GPU


def _chosen_batch_tokens(vllm_config: Any, plan: planner.ModulePlan) -> int:
    sequences = _min_step_tokens(vllm_config) if "max_num_seqs" in _user_options.get() else 1
    return planner.batch_tokens(
        plan.sliding_windows, vllm_config.scheduler_config.max_num_batched_tokens, sequences
    )


def _min_step_tokens(vllm_config: Any) -> int:
    """Fewest tokens of a step: one for every sequence that may run."""
    return int(vllm_config.scheduler_config.max_num_seqs * (1 + vllm_config.num_speculative_tokens))


def wrap_engine() -> None:
    """Wrap vLLM's functions to record the user's options and log the cache; idempotent."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.core import kv_cache_utils

    wrap(EngineArgs, "create_engine_config", recording_options)
    # If the engine's core is loaded, it has its own reference to the function.
    for module in (kv_cache_utils, sys.modules.get("vllm.v1.engine.core")):
        if module is not None:
            wrap(module, "update_kv_cache_capacity", with_cache_log)


def wrap(owner: Any, name: str, wrapper: Callable[[Any], Any]) -> None:
    """Replace a function of vLLM by `wrapper(function)`, once."""
    function = getattr(owner, name, None)
    if function is None:
        # Other models must start anyway.
        message = "vLLM has no %s.%s any more: it serves hybrids by its own settings"
        _logger.warning(message, owner.__name__, name)
    elif not hasattr(function, _WRAPPED):
        wrapped = functools.wraps(function)(wrapper(function))
        setattr(wrapped, _WRAPPED, True)
        setattr(owner, name, wrapped)


def recording_options(create_engine_config: Any) -> Any:
    """`EngineArgs.create_engine_config`, during which `_user_options` is set from its arguments."""

    def recording(self: Any, *args: Any, **kwargs: Any) -> Any:
        options = tuple(name for name in _OPTIONS if getattr(self, name) is not None)
        token = _user_options.set(options)
        try:
            return create_engine_config(self, *args, **kwargs)
        finally:
            _user_options.reset(token)

    return recording


def with_cache_log(update_kv_cache_capacity: Any) -> Any:
    """vLLM's function, followed by the log line about the cache."""

    def logging_cache(vllm_config: Any, kv_cache_config: Any) -> None:
        update_kv_cache_capacity(vllm_config, kv_cache_config)
        if getattr(vllm_config.model_config.hf_config, "hybrid_attention", None) is not None:
            log_cache(vllm_config, kv_cache_config)

    return logging_cache


def log_cache(vllm_config: Any, kv_cache_config: Any) -> None:
    """Log the tokens in the cache, the original's, and options that would hold more."""
    parallel = vllm_config.parallel_config
    if parallel.pipeline_parallel_size > 1 or parallel.decode_context_parallel_size > 1:
        return  # the plan covers only ranks with all layers and all tokens
    config, length = vllm_config.model_config.hf_config, vllm_config.model_config.max_model_len
    cache, scheduler = vllm_config.cache_config, vllm_config.scheduler_config
    ranks, steps = parallel.tensor_parallel_size, vllm_config.max_concurrent_batches
    plan = plan_of(served_layouts(config), ranks, grouping_of(vllm_config))
    spec = kv_cache_config.kv_cache_groups[0].kv_cache_spec
    bytes_per_head = spec.page_size_bytes // (spec.block_size * spec.num_kv_heads)
    size = kv_cache_config.kv_cache_tensors[0].size

    def tokens_of(modules: planner.ModulePlan, block_size: int, step: int) -> int:
        request = planner.Request(length, block_size, steps * step)
        return modules.cache_tokens(size // modules.block_bytes(request, bytes_per_head), request)

    current, tokens = scheduler.max_num_batched_tokens, cache.kv_cache_size_tokens
    original = tokens_of(original_plan(config, ranks), cache.block_size, current)
    text = (
        f"Hybrid KV cache: {tokens:,} tokens in requests of {length:,}; in the same memory "
        f"{original:,} of the original model ({tokens / original:.1f} times as many)"
    )
    chosen, minimum = _chosen_batch_tokens(vllm_config, plan), _min_step_tokens(vllm_config)
    block_size = min(cache.block_size, _engine().block_size)
    for step in (chosen, min(chosen, minimum)):
        possible = tokens_of(plan, block_size, step)
        options = []
        if scheduler.disable_hybrid_kv_cache_manager:
            options.append("without --disable-hybrid-kv-cache-manager")
        if step < current:
            options.append(f"with --max-num-batched-tokens {step}")
        if block_size < cache.block_size:
            options.append(f"with --block-size {block_size}")
        if not options or possible < _LOGGED_GAIN * tokens:
            continue
        text += f"; {possible:,} {' and '.join(options)}"
        if step == chosen:
            _logger.warning(text)
            return
        text += ", which reads prompts slower"
    _logger.info(text)
