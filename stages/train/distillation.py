"""Distillation from the full-attention model: KL divergence, computed in chunks of tokens.

Shapes: B sequences of a micro-batch, T tokens of one, N = B·T, C hidden size, V vocabulary.
"""

from __future__ import annotations

from pathlib import Path
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from bosch.masks import HeadMask
from bosch.model.families import decoder_layers
from bosch.model.loading import load_config, load_model
from bosch.score.answers import scaled_logits
from stages.context import ModelConfig, Runtime
from stages.train.loss import IGNORED, HeadLoss, head_loss
from stages.train.memory import chunk_tokens
from stages.train.parallel import whole_weight
from stages.train.stage import TrainConfig


def load_teacher(
    model_dir: Path,
    model: ModelConfig,
    train: TrainConfig,
    runtime: Runtime,
    device: torch.device,
    backend: str = "auto",
) -> Any:
    """The model in `model_dir` with every head full, in the precision of training.

    It computes the original's function, since the order of heads does not matter. Its forward pass
    returns the states [B, T, C] before the output head; `backend` computes its attention. It is on
    `device` or, under FSDP, on the meta device.
    """
    config = load_config(str(model_dir), trust_remote_code=model.trust_remote_code)
    kinds = decoder_layers(config)
    config.hybrid_attention |= HeadMask.all_full(len(kinds.full), kinds.heads).content
    teacher = load_model(
        model_dir,
        dtype=torch.bfloat16 if train.mixed_precision == "bf16" else torch.float32,
        backend=backend,
        trust_remote_code=model.trust_remote_code,
        config=config,
        device=None if runtime.sharding == "fsdp" else device,
        weights=runtime.sharding != "fsdp",
    )
    teacher.requires_grad_(False)

    def forward(self: Any, input_ids: Tensor, position_ids: Tensor | None) -> Tensor:
        decoder = self.get_decoder()
        output = decoder(input_ids=input_ids, position_ids=position_ids, use_cache=False)
        return output.last_hidden_state

    teacher.forward = MethodType(forward, teacher)
    return teacher


class TeacherLoss:
    """KL(teacher ‖ student) in nats, summed over the predicted tokens."""

    def __init__(self, teacher: Any) -> None:
        self.teacher = teacher

    def __call__(
        self, config: Any, input_ids: Tensor, targets: Tensor, position_ids: Tensor | None
    ) -> HeadLoss:
        """The loss of a micro-batch: ids, next tokens or `IGNORED`, and positions, [B, T] each."""
        head = self.teacher.get_output_embeddings()
        with torch.no_grad():
            states = self.teacher(input_ids, position_ids).flatten(0, 1)
            # On a GPU autocast computes torch's norms in float32.
            states = states.to(head.weight.dtype)
        rows = (targets.flatten() != IGNORED).nonzero()[:, 0]

        def loss(student_head: Any, student_states: Tensor) -> Tensor:
            weight, bias = (
                None if weight is None else whole_weight(weight).detach()
                for weight in (head.weight, getattr(head, "bias", None))
            )
            assert weight is not None

            def divergence(logits: Tensor, tokens: Tensor) -> Tensor:
                """[n] in nats, from the student's `logits` [n, V] at `tokens` [n] of [0, N)."""
                with torch.no_grad():
                    teacher_logits = nn.functional.linear(states[tokens], weight, bias)
                    scaled = scaled_logits(self.teacher.config, teacher_logits.float())
                    expected = torch.log_softmax(scaled, dim=-1)
                    del teacher_logits, scaled
                    probabilities = expected.exp()
                # Not as a difference of two sums, which would cancel if the models agree.
                return (probabilities * (expected - torch.log_softmax(logits, dim=-1))).sum(-1)

            def chunk_loss(logits: Tensor, chunk: slice) -> Tensor:
                return divergence(logits, rows[chunk]).sum()

            size = chunk_tokens(student_head.weight.shape[0], distilled=True)
            return head_loss(student_head, student_states[rows], config, chunk_loss, size)

        return loss
