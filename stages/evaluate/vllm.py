"""A model in vLLM for lm-eval: its own `vllm`, with the log of answers and the prompts of `hf`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from lm_eval.api.registry import get_model
from lm_eval.models.utils import normalize_gen_kwargs

from stages.context import ModelConfig, StageConfig
from stages.evaluate.answers import AnswerLog
from stages.evaluate.lm import LoggedAnswers, template_without_date
from stages.evaluate.stage import EvaluateConfig


def vllm_model(
    config: StageConfig[EvaluateConfig], model: ModelConfig, tokenizer: Any, log: AnswerLog
) -> Any:
    """The model in an engine of its own, which finds the plugin for hybrids by its entry point."""

    class VLLM(LoggedAnswers, get_model("vllm")):  # type: ignore[misc]
        spare = -1  # vLLM generates a token after the text

        def tok_encode(self, string: Any, *options: Any, **named: Any) -> list[Any]:
            if isinstance(string, str):
                return super().tok_encode(string, *options, **named)
            return [self.tok_encode(one, *options, **named) for one in string]

        def computed(self, kind: str, requests: list[Any]) -> list[Any]:
            self.note_first(self.tok_encode(requests[0].args[0]))
            for prompt, options in (request.args for request in requests):
                if kind == "generate_until":
                    room = normalize_gen_kwargs(dict(options))["max_gen_toks"]
                    tokens = len(self.tok_encode(prompt))
                    self.note_length(prompt, tokens, self.max_length - room)
            answers = super().computed(kind, requests)
            for request, answer in zip(requests, answers, strict=True):
                self.add_partial(kind, request.args, answer)
            return answers

        def close(self) -> None:
            self.model.llm_engine.engine_core.shutdown()

    section, gpus = config.section, torch.cuda.device_count()
    shared = config.runtime.device_map == "auto"
    with nullcontext() if shared or gpus < 2 else own_gpu(gpus):
        engine = VLLM(
            pretrained=model.path,
            tokenizer=tokenizer.name_or_path,
            tokenizer_revision=model.revision,
            tensor_parallel_size=max(1, gpus) if shared else 1,
            enforce_eager=gpus == 0,
            enable_thinking=section.enable_thinking,
            think_end_token=section.think_end_token,
            **model.loading,
        )
    engine.tokenizer, engine.log = tokenizer, log
    engine.hf_chat_template = template_without_date(tokenizer).get("chat_template")
    return engine


@contextmanager
def own_gpu(gpus: int) -> Iterator[None]:
    """Let a process started in this block see only this rank's GPU; an engine takes the first."""
    before = os.environ.get("CUDA_VISIBLE_DEVICES")
    seen = (before or ",".join(map(str, range(gpus)))).split(",")
    os.environ["CUDA_VISIBLE_DEVICES"] = seen[int(os.environ.get("LOCAL_RANK", "0"))]
    try:
        yield
    finally:
        if before is None:
            del os.environ["CUDA_VISIBLE_DEVICES"]
        else:
            os.environ["CUDA_VISIBLE_DEVICES"] = before
