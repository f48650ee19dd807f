"""Prompts too long for one process, prefilled by all processes together; the first one generates.

During prefill each process holds a part of the prompt's tokens. The first process then has the same
cache as after a prefill by itself, and generates; the others wait for the answer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from bosch.errors import UserError
from bosch.model.cache import HybridCache
from bosch.model.context_parallel import ContextParallel
from bosch.model.search_mode import prepare_for_search
from bosch.objective.answers import answer_logits, states_and_check
from stages.context import Runtime
from stages.evaluate.answers import ModelError

T = TypeVar("T")
# Tokens whose logits over the vocabulary are held at once.
_CHUNK = 1024


class SharedReading:
    """All processes of the run read prompts together; each calls the same methods alike."""

    def __init__(self) -> None:
        self._split = ContextParallel(dist.group.WORLD)

    @property
    def is_first(self) -> bool:
        """Whether this process generates, and writes the answers."""
        return self._split.communicator.rank == 0

    def on_all(self, work: Callable[[], T]) -> list[T]:
        """Call `work`, which must not communicate, in every process; returns all results.

        If it fails, all processes raise the error of the first one that failed.
        """
        outcome: tuple[T | None, Exception | None]
        try:
            outcome = work(), None
        except (UserError, ModelError) as error:
            outcome = None, error
        outcomes: list[Any] = [None] * self._split.ranks
        dist.all_gather_object(outcomes, outcome)
        for _, fault in outcomes:
            if fault is not None:
                raise fault
        return [result for result, _ in outcomes]

    def on_first(self, work: Callable[[], T]) -> T:
        """The result of `work` in the first process; the others do not call it."""
        result = self.on_all(lambda: work() if self.is_first else None)[0]
        assert result is not None
        return result

    def load(self, load: Callable[[], Any], runtime: Runtime) -> Any:
        """Load a model in every process; an original gets a head layout with all heads full.

        Raises ModelError if the model changes logits in a way that `token_losses` does not support.
        """
        loaded: list[Any] = []
        self.on_all(lambda: loaded.append(load()))
        (model,) = loaded
        if not hasattr(model.config, "hybrid_attention"):
            prepare_for_search(model, runtime.attention)
        self.on_all(lambda: _check_output_head(model))
        return model

    def cache(self, model: Any, ids: Tensor, mask: Tensor) -> HybridCache | None:
        """Prefill prompts [B, T] except their last tokens; returns the first process's cache."""
        if ids.shape[1] == 1:  # nothing before the last token
            return None
        return self._split.read(model, ids[:, :-1], mask[:, :-1])

    @torch.inference_mode()
    def token_losses(self, model: Any, tokens: Tensor) -> Tensor:
        """Cross-entropy of every token of [1, T] except the first, nats [T - 1]."""
        split, inputs, targets = self._split, tokens[:, :-1], tokens[:, 1:]
        with split.installed(model):
            output = model.get_decoder()(**split.inputs(inputs), use_cache=False)
        states = output.last_hidden_state[0]
        own_targets = split.local(split.whole_chunks(targets))[0]
        losses = [
            nn.functional.cross_entropy(answer_logits(model, chunk), labels, reduction="none")
            for chunk, labels in zip(states.split(_CHUNK), own_targets.split(_CHUNK), strict=True)
        ]
        return split.whole(torch.cat(losses)[None])[0, : targets.shape[1]]


def _check_output_head(model: Any) -> None:
    if not states_and_check(model, torch.arange(1, 17))[1]:
        raise ModelError(
            "it changes its logits after the output head in a way that shared reading does not "
            "support; set runtime.evaluate_parallel: data"
        )
