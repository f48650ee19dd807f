"""How the answers' log-likelihood would change with each KV head, from one backward pass.

A gate g in [0, 1] blends a KV head's attention outputs: g full + (1 - g) sliding, so a head mask is
a corner of the gates' cube. At a corner the derivative with respect to every gate costs one forward
and one backward pass, as much as a few masks.

L layers, HKV key/value heads.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor, nn

from bosch.answers import answer_logits
from bosch.attention import HeadLayout, Span
from bosch.batches import Batch, final_states
from bosch.branches import Branches, branched_attention
from bosch.heads import HeadMask
from bosch.interface import Attend, HeadState, attention_modules, head_state, set_head_state
from bosch.layer_control import frozen
from bosch.search_mode import own_row
from bosch.sharding import sum_over_shards


def gate_gradients(
    model: Any,
    batch: Batch,
    mask: HeadMask,
    all_full: HeadLayout,
    all_sliding: HeadLayout,
) -> Tensor:
    """Gradient [L, HKV] of the answers' summed log-probability, on the CPU in float64.

    The model is in search mode. No parameter gets a gradient.
    """
    device = model.device
    gates = torch.tensor(mask.is_full, dtype=torch.float32, device=device, requires_grad=True)
    with contextlib.ExitStack() as stack:
        stack.enter_context(frozen(model))
        for module, gate in zip(attention_modules(model), gates.unbind(), strict=True):
            state = head_state(module)
            assert state is not None
            blend = _blend(
                own_row(model, gate), all_full, all_sliding, batch.branches, state.backend
            )
            set_head_state(module, HeadState(state.layout, state.backend, blend))
            stack.callback(set_head_state, module, state)
        stack.enter_context(torch.enable_grad())
        hidden = final_states(model.get_decoder(), batch, device)
        hidden = hidden[batch.rows.to(hidden.device), batch.columns.to(hidden.device)]
        chosen = torch.log_softmax(answer_logits(model, hidden), dim=-1)
        chosen = chosen.gather(1, batch.answers.to(device)[:, None])
        (gradient,) = torch.autograd.grad(chosen.sum(), gates)
    return sum_over_shards(model, gradient.double()).cpu()


def _blend(
    gate: Tensor,
    all_full: HeadLayout,
    all_sliding: HeadLayout,
    branches: Branches | None,
    backend: str,
) -> Attend:
    def attend(
        module: nn.Module, query: Tensor, key: Any, value: Any, span: Span | None, scale: float
    ) -> Tensor:
        full, sliding = (
            branched_attention(query, key, value, layout, branches, span, scale, backend)
            for layout in (all_full, all_sliding)
        )
        share = gate.repeat_interleave(query.shape[1] // key.shape[1])[:, None].to(full.dtype)
        return sliding + share * (full - sliding)

    return attend
