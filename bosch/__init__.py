"""BOSCH: black-box search for which attention heads may see a sliding window only.

`import bosch` makes hybrid models loadable by transformers' AutoModelForCausalLM. It loads neither
torch nor transformers; the names below load them on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from bosch.errors import RunError, UserError
from bosch.model import registration as _registration
from bosch.version import VERSION
from bosch.window import Window

if TYPE_CHECKING:
    from bosch.attention import hybrid_attention as hybrid_attention
    from bosch.budget import swa_budget as swa_budget
    from bosch.hybrid import HybridCache as HybridCache
    from bosch.mask_files import Front as Front
    from bosch.mask_files import HeadMaskFile as HeadMaskFile
    from bosch.masks import HeadMask as HeadMask
    from bosch.model.loading import load_model as load_model
    from bosch.model.materialize import materialize as materialize
    from bosch.model.search_mode import apply_head_mask as apply_head_mask
    from bosch.model.search_mode import head_mask as head_mask
    from bosch.model.search_mode import prepare_for_search as prepare_for_search

__version__ = VERSION

_LAZY = {
    "Front": "bosch.mask_files",
    "HeadMask": "bosch.masks",
    "HeadMaskFile": "bosch.mask_files",
    "swa_budget": "bosch.budget",
    "HybridCache": "bosch.hybrid",
    "hybrid_attention": "bosch.attention",
    "apply_head_mask": "bosch.model.search_mode",
    "head_mask": "bosch.model.search_mode",
    "load_model": "bosch.model.loading",
    "materialize": "bosch.model.materialize",
    "prepare_for_search": "bosch.model.search_mode",
}

__all__ = ["RunError", "UserError", "Window", *_LAZY]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'bosch' has no attribute '{name}'")


_registration.install()
