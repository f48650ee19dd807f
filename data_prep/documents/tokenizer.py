"""Loads the tokenizer of a model; imports nothing that is slow to load."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from bosch.errors import UserError
from bosch.files import check_hub_cache, load_user_json
from bosch.model.untrusted import check_faults, model_file_faults


@dataclass(frozen=True)
class TokenizerSpec:
    """Source of a tokenizer, small enough to send to a worker."""

    path: str
    revision: str | None = None
    trust_remote_code: bool = False


@lru_cache(maxsize=4)
def load_tokenizer(spec: TokenizerSpec) -> Any:
    """The tokenizer of a model directory or hub name.

    Raises UserError when it is missing or damaged.
    """
    from transformers import AutoTokenizer

    if os.path.isdir(spec.path):
        check_faults(model_file_faults(Path(spec.path)))
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            spec.path, revision=spec.revision, trust_remote_code=spec.trust_remote_code
        )
        assert isinstance(tokenizer.is_fast, bool)  # missing in classes with two tokenizers
        tokenizer("a")
    except Exception as error:
        check_hub_cache(error)
        for file in sorted(Path(spec.path).glob("*.json")):
            load_user_json(file, "get the model again")
        reason = " ".join(str(error).split())
        raise UserError(f"{spec.path}: no tokenizer could be loaded from here ({reason})") from None
    return tokenizer
