"""The plugin's entry point for vLLM: registers the hybrid architectures and their checks.

vLLM calls `register` in each of its processes, before the model is known. So no model class is
imported here: vLLM's registry imports those of `bosch.engines.vllm.models` by name.
"""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Any

from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CAUSAL,
)
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES as IMAGES,
)

from bosch.engines.vllm.adapters import reorder_base_adapters
from bosch.engines.vllm.cache_settings import choose_cache_settings, wrap_engine
from bosch.engines.vllm.checks import check_servable
from bosch.errors import UserError, printable


def register() -> None:
    """Register the hybrid architectures with vLLM; harmless when called again."""
    from vllm import ModelRegistry
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP

    show_user_errors_as_messages()
    wrap_engine()
    reorder_base_adapters()
    for base in {*CAUSAL.values(), *IMAGES.values()}:
        name = f"Hybrid{base}"
        ModelRegistry.register_model(name, f"bosch.engines.vllm.models:{name}")
        MODELS_CONFIG_MAP[name] = _checks_of(MODELS_CONFIG_MAP.get(base))


def show_user_errors_as_messages() -> None:
    """Print only the message of a UserError that ends the process, instead of a traceback."""
    previous = sys.excepthook

    def show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if isinstance(error, UserError):
            print(f"error: {printable(str(error))}", file=sys.stderr)
        else:
            previous(kind, error, trace)

    sys.excepthook = show


def _checks_of(base: Any) -> Any:
    """vLLM's hook for an architecture: check the hybrid, run the base's hook, choose settings."""
    from vllm.model_executor.models.config import VerifyAndUpdateConfig

    parent: Any = base or VerifyAndUpdateConfig

    class HybridChecks(parent):  # type: ignore[misc]
        @classmethod
        def verify_and_update_config(cls, vllm_config: Any) -> None:
            check_servable(vllm_config)
            parent.verify_and_update_config(vllm_config)
            choose_cache_settings(vllm_config)

    return HybridChecks
