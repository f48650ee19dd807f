"""Defaults of the engine settings on which a hybrid's cache depends.

A sliding head's cache holds its window and, in whole blocks, the tokens of all concurrent steps,
which with vLLM's defaults can be many times the window.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

from bosch.engines.vllm.checks import plan_of
from bosch.engines.vllm.plan import CPU_BLOCK_SIZE, batch_tokens

# vLLM configures the loggers below this name.
_logger = logging.getLogger("vllm.bosch")

_WRAPPED = "wrapped_by_bosch"

_OPTIONS = ("max_num_batched_tokens", "max_num_seqs")
# Those of these options that the user set; known while vLLM makes its configuration.
_user_options: ContextVar[tuple[str, ...]] = ContextVar("user options", default=_OPTIONS)


def choose_cache_settings(vllm_config: Any) -> None:
    """Set what the user has not set: tokens of a step, and on a CPU the block size."""
    from vllm.platforms import current_platform

    cache, scheduler = vllm_config.cache_config, vllm_config.scheduler_config
    windows = plan_of(vllm_config).sliding_windows
    if windows and current_platform.is_cpu() and not cache.user_specified_block_size:
        cache.block_size = CPU_BLOCK_SIZE
        cache.user_specified_block_size = True  # or the platform would set its own later
    if (
        windows
        and "max_num_batched_tokens" not in _user_options.get()
        and scheduler.enable_chunked_prefill
        and vllm_config.performance_mode != "throughput"
    ):
        # As in vLLM: each sequence needs a token of a step, and its speculative tokens.
        sequences = scheduler.max_num_seqs * (1 + vllm_config.num_speculative_tokens)
        user_set = "max_num_seqs" in _user_options.get()
        scheduler.max_num_batched_tokens = batch_tokens(
            windows, scheduler.max_num_batched_tokens, sequences if user_set else 1
        )
        if not user_set:
            scheduler.max_num_seqs = min(scheduler.max_num_seqs, scheduler.max_num_batched_tokens)


def wrap_engine() -> None:
    """Wrap vLLM's function that makes a configuration, to record the user's options; idempotent."""
    from vllm.engine.arg_utils import EngineArgs

    wrap(EngineArgs, "create_engine_config", recording_options)


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
