"""BOSCH: black-box search for which attention heads may see a sliding window only.

`import bosch` makes hybrid models loadable by transformers' AutoModelForCausalLM. It loads neither
torch nor transformers; the names below load what they need when they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from bosch import _registration
from bosch.errors import RunError, UserError

if TYPE_CHECKING:
    from bosch.attention import hybrid_attention
    from bosch.cache import HybridCache
    from bosch.heads import HeadMask, HeadMaskFile, swa_budget
    from bosch.modeling import apply_head_mask, load_model, materialize, prepare_for_search

__version__ = "0.1.0"

_LAZY = {
    "HeadMask": "bosch.heads",
    "HeadMaskFile": "bosch.heads",
    "swa_budget": "bosch.heads",
    "HybridCache": "bosch.cache",
    "hybrid_attention": "bosch.attention",
    "apply_head_mask": "bosch.modeling",
    "load_model": "bosch.modeling",
    "materialize": "bosch.modeling",
    "prepare_for_search": "bosch.modeling",
}

__all__ = [
    "HeadMask",
    "HeadMaskFile",
    "HybridCache",
    "RunError",
    "UserError",
    "apply_head_mask",
    "hybrid_attention",
    "load_model",
    "materialize",
    "prepare_for_search",
    "swa_budget",
]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'bosch' has no attribute '{name}'")


_registration.install()
