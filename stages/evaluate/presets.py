"""Presets of evaluation: named lists of benchmarks, with their sources, sizes and settings.

Tasks of the suite `harness` are lm-eval's (0.4.13). Sizes are approximate, from the published data:
documents, tokens of a prompt, tokens of an answer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal, get_args

from data_prep.tasks.tables import RulerTask
from stages.evaluate.prompts import PromptEvaluation
from stages.evaluate.section import Benchmark
from stages.evaluate.suites import SUITES

PresetName = Literal["short", "long", "reasoning"]


# Maximum tokens of a reasoning model's answer. Qwen3's settings have 32,768, but its base models
# have only 32,768 positions, and the prompt takes some of them.
_LONG_ANSWERS = {"max_gen_toks": 30_720}
# Reasoning models sample their answers (Qwen3's settings).
_SAMPLED_ANSWERS = {"do_sample": True, "temperature": 0.6, "top_p": 0.95, **_LONG_ANSWERS}

PRESETS: dict[PresetName, tuple[Benchmark, ...]] = {
    "short": (
        Benchmark("MMLU", "cais/mmlu", ("mmlu",), documents=14_042, parts=57, prompt=150),
        Benchmark("ARC", "allenai/ai2_arc", ("ai2_arc",), documents=3_548, parts=2, prompt=150),
        Benchmark("HellaSwag", "Rowan/hellaswag", ("hellaswag",), documents=10_042, prompt=400),
        Benchmark("WinoGrande", "allenai/winogrande", ("winogrande",), documents=1_267, prompt=60),
        Benchmark("GSM8K", "openai/gsm8k", ("gsm8k",), documents=1_319, prompt=900, answer=256),
    ),
    "long": (
        Benchmark("RULER", "squad.json and hotpotqa.json, as RULER downloads them, in "
                  "evaluate.needle.data_dir", get_args(RulerTask), "needle"),
        Benchmark("LongBench v1", "THUDM/LongBench", ("longbench",), documents=4_750, parts=21,
                  prompt=12_000, answer=150, packages=("jieba", "fuzzywuzzy", "rouge")),
        Benchmark("LongBench v2", "recursal/longbench-v2", ("longbench2",), documents=503, parts=20,
                  prompt=260_000),
        Benchmark("BABILong", "RMT-team/babilong-1k-samples", ("babilong_longctx",),
                  documents=5_000, parts=5, prompt=32_768, answer=16,
                  settings={"dataset_kwargs": {"max_seq_lengths": "32k"}}),
        Benchmark("LongProc", "PrincetonPli/LongProc",
                  ("longproc_path_traversal", "longproc_tom_tracking", "longproc_html_to_tsv",
                   "longproc_travel_planning"),
                  documents=1_700, parts=11, prompt=12_000, answer=3_000, packages=("pandas",),
                  excluded="countdown and pseudo_to_code, whose scores run what the model writes"),
        Benchmark("GraphWalks", "openai/graphwalks", ("graphwalks_128k",), documents=1_150,
                  prompt=40_000, answer=1_000),
        Benchmark("InfiniteBench", "xinrongzhang2022/InfiniteBench", ("infinitebench",),
                  documents=3_900, parts=11, prompt=180_000, answer=100, packages=("rouge_score",)),
        *(Benchmark(suite.title, suite.public_data, suite=name)
          for name, suite in SUITES.items() if issubclass(suite, PromptEvaluation)),
    ),
    "reasoning": (
        # Minerva's version: hendrycks_math500 does not accept an answer in \\boxed.
        Benchmark("MATH500", "HuggingFaceH4/MATH-500", ("minerva_math500",), documents=500,
                  prompt=120, answer=4_000, settings={"generation_kwargs": _LONG_ANSWERS},
                  packages=("math_verify", "sympy", "antlr4")),
        Benchmark("AIME 2024", "Maxwell-Jia/AIME_2024", ("aime24",), documents=30, prompt=150,
                  answer=12_000, settings={"repeats": 4, "generation_kwargs": _SAMPLED_ANSWERS}),
        Benchmark("AIME 2025", "math-ai/aime25", ("aime25",), documents=30, prompt=150,
                  answer=12_000, settings={"repeats": 4, "generation_kwargs": _SAMPLED_ANSWERS}),
    ),
}  # fmt: skip


def benchmarks(names: Sequence[PresetName]) -> Iterator[Benchmark]:
    for name in names:
        yield from PRESETS[name]
