"""Presets of evaluation: named lists of tasks of lm-eval."""

from __future__ import annotations

from typing import Literal

PresetName = Literal["short", "long", "reasoning"]

PRESETS: dict[PresetName, tuple[str, ...]] = {
    "short": ("mmlu", "ai2_arc", "hellaswag", "winogrande", "gsm8k"),
    "long": ("longbench", "longbench2", "graphwalks_128k", "infinitebench"),
    # Minerva's version: hendrycks_math500 does not accept an answer in \\boxed.
    "reasoning": ("minerva_math500", "aime24", "aime25"),
}
