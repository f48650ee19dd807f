"""One pass of a batch through the decoder, in which each layer computes what is not known yet.

Three savings, all exact. Layers below the lowest one that changes are passed over. A layer whose
attention is known with every head full and with every head sliding takes each head's output from
one of them. The last layer computes keys and values everywhere and all else at the answers only.

B rows, T slots of a row, A answer positions of a row, HQ query heads, D head dimension, C hidden
size.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from bosch.attention import HeadLayout, Span
from bosch.batches import Batch, final_states
from bosch.branches import branched_attention, seen_attention
from bosch.flops import Flops
from bosch.heads import HeadMask
from bosch.interface import Attend, head_state
from bosch.kept_states import Kept, KeptStates
from bosch.layer_control import attending, controlled, keys_and_values, projected, replaced
from bosch.search_mode import own_row

logger = logging.getLogger(__name__)


class LayerPass:
    """Runs batches under head masks that `apply_head_mask` has set on the model.

    With `answers_only` off the last layer is computed everywhere, like the others. `agree` makes a
    decision the same in all processes that share one model.
    """

    def __init__(
        self,
        model: Any,
        window_size: int,
        sinks: int,
        kept: KeptStates,
        *,
        answers_only: bool = True,
        agree: Callable[[bool], bool] = bool,
    ) -> None:
        self.decoder = model.get_decoder()
        self.layers: list[nn.Module] = list(self.decoder.layers)
        self.device = model.device
        self.flops = Flops(model, window_size, sinks)
        self.kept, self.answers_only, self.agree = kept, answers_only, agree
        heads = self.flops.num_key_value_heads
        self.q_per_kv = model.config.num_attention_heads // heads
        self.mine = partial(own_row, model)
        mine = len(self.mine([True] * heads))
        self.all_full = HeadLayout.search([True] * mine, window_size, sinks)
        self.all_sliding = HeadLayout.search([False] * mine, window_size, sinks)
        # Threads of a CPU divide a batched product by the number of heads in it: the last bit of a
        # head then depends on which others are computed with it.
        self.mixes = self.device.type != "cpu" or torch.get_num_threads() == 1
        self._trusted: set[str] = set()

    def hidden(self, index: int, batch: Batch, mask: HeadMask) -> tuple[Tensor, float]:
        """Final hidden states that predict the answers [A of the batch, C], and operations spent.

        The first time that a saving is used its result is compared with a plain pass; one that is
        not the same bit for bit switches all reuse off.
        """
        run = _Run(self, index, batch, mask, self.kept.enabled)
        hidden = run.hidden()
        if not run.savings <= self._trusted:
            plain = _Run(self, index, batch, mask, reuse=False)
            whole = plain.hidden()
            run.spent += plain.spent
            if not self.agree(torch.equal(whole, hidden)):
                logger.warning("reuse of earlier passes is not exact for this model: switched off")
                self.kept.disable()
                return whole, run.spent
            self._trusted |= run.savings
        return hidden, run.spent


class _Run:
    """One batch under one mask."""

    def __init__(
        self, owner: LayerPass, index: int, batch: Batch, mask: HeadMask, reuse: bool
    ) -> None:
        self.owner, self.index, self.batch, self.mask, self.reuse = owner, index, batch, mask, reuse
        self.start = owner.kept.deepest(mask, index) if reuse else 0
        self.last = len(owner.layers) - 1
        self.spent = 0.0
        self.savings: set[str] = {"start"} if self.start else set()

    def hidden(self) -> Tensor:
        """Run the decoder with every layer under control."""
        with controlled(self.owner.layers, self._layer):
            states = final_states(self.owner.decoder, self.batch, self.owner.device)
        columns = self.batch.places if self.owner.answers_only else self.batch.columns
        return states[self.batch.rows.to(states.device), columns.to(states.device)]

    def _layer(
        self, number: int, forward: Callable[..., Tensor], state: Tensor, kwargs: dict[str, Any]
    ) -> Tensor:
        if number < self.start:
            return state
        kept = self.owner.kept.at(self.mask, number, self.index) if self.reuse else None
        if number == self.start and number > 0:
            assert kept is not None and kept.state is not None
            state = kept.state
        if number == self.last and self.owner.answers_only:
            return self._last_layer(number, forward, state, kwargs, kept)
        result = self._inner_layer(number, forward, state, kwargs, kept)
        if self.reuse and number + 1 < self.last + (not self.owner.answers_only):
            self.owner.kept.keep(self.mask, number + 1, self.index, state=result)
        return result

    def _inner_layer(
        self,
        number: int,
        forward: Callable[..., Tensor],
        state: Tensor,
        kwargs: dict[str, Any],
        kept: Kept | None,
    ) -> Tensor:
        """A layer at every position."""
        row, costs = self.mask.is_full[number], self.owner.flops.layers[number]
        attention: Any = self.owner.layers[number].self_attn
        pairs = self.owner.flops.pairs(self.batch)
        mixed = self._mixture(row, kept)
        if mixed is not None:
            self.savings.add("mixture")
            self.spent += costs.after_attention * self.batch.size
            with replaced(attention, partial(projected, attention, mixed)):
                return forward(state, **kwargs)
        self.spent += costs.linear * self.batch.size
        if not self._worth_both(number, kept):
            self.spent += self.owner.flops.attention(row, pairs)
            if self.batch.branches is None:
                return forward(state, **kwargs)
            with attending(attention, self._branched):
                return forward(state, **kwargs)
        self.savings.add("mixture")
        self.spent += self.owner.flops.both(pairs)
        with attending(attention, self._both(number, row)):
            return forward(state, **kwargs)

    def _worth_both(self, number: int, kept: Kept | None) -> bool:
        """Whether later passes will probably start at this layer too, with another row."""
        if not self.reuse or number != self.start or not self.owner.mixes:
            return False
        if kept is None:
            return number == 0
        kept.starts += 1
        return number == 0 or kept.starts > 1 or self.owner.kept.is_pinned(number)

    def _branched(
        self, module: nn.Module, query: Tensor, k: Any, v: Any, span: Span | None, scale: float
    ) -> Tensor:
        """Attention of rows with branches, as the layer's heads are."""
        state = head_state(module)
        assert state is not None
        branches = self.batch.branches
        return branched_attention(query, k, v, state.layout, branches, span, scale, state.backend)

    def _both(self, number: int, row: Any) -> Attend:
        """Attention that computes and keeps both kinds, and returns their mixture."""

        def attend(
            module: nn.Module, query: Tensor, key: Any, value: Any, span: Span | None, scale: float
        ) -> Tensor:
            state = head_state(module)
            assert state is not None
            full, sliding = (
                branched_attention(
                    query, key, value, layout, self.batch.branches, span, scale, state.backend
                )
                for layout in (self.owner.all_full, self.owner.all_sliding)
            )
            self.owner.kept.keep(self.mask, number, self.index, full=full, sliding=sliding)
            return self._mix(row, full, sliding)

        return attend

    def _mixture(self, row: Any, kept: Kept | None) -> Tensor | None:
        """Attention output [B, T, HQ, D] of a row of the mask, if what it needs is known."""
        if kept is None:
            return None
        if row.all():
            return kept.full
        if not row.any():
            return kept.sliding
        if kept.full is None or kept.sliding is None:
            return None
        return self._mix(row, kept.full, kept.sliding)

    def _mix(self, row: Any, full: Tensor, sliding: Tensor) -> Tensor:
        chosen = torch.tensor(self.owner.mine(row), device=full.device).repeat_interleave(
            self.owner.q_per_kv
        )
        return torch.where(chosen[:, None], full, sliding)

    def _last_layer(
        self,
        number: int,
        forward: Callable[..., Tensor],
        state: Tensor,
        kwargs: dict[str, Any],
        kept: Kept | None,
    ) -> Tensor:
        """The last layer: [B, A, C] at the positions that predict answers."""
        attention: Any = self.owner.layers[number].self_attn
        costs, slots = self.owner.flops.layers[number], self.batch.slots.to(state.device)
        narrow = _gathered(kwargs, slots)
        row = self.mask.is_full[number]
        mixed = self._mixture(row, kept)
        if number == self.start > 0 and mixed is not None:
            self.spent += costs.after_attention * slots.numel()
            with replaced(attention, partial(projected, attention, mixed)):
                return forward(state, **narrow)
        key, value = keys_and_values(attention, forward, state, kwargs)
        self.spent += costs.key_value * self.batch.size + costs.linear * slots.numel()
        self.spent += 2 * self.owner.flops.answers(slots.numel(), self.batch.input_ids.shape[1])
        few = state.gather(1, slots[:, :, None].expand(-1, -1, state.shape[2]))

        def attend(
            module: nn.Module, query: Tensor, k: Any, v: Any, span: Span | None, scale: float
        ) -> Tensor:
            full, sliding = (
                _slots_attention(query, key, value, slots, layout, self.batch, scale)
                for layout in (self.owner.all_full, self.owner.all_sliding)
            )
            if self.reuse:
                self.owner.kept.keep(
                    self.mask, number, self.index, state=few, full=full, sliding=sliding
                )
            return self._mix(row, full, sliding)

        with attending(attention, attend):
            return forward(few, **narrow)


def _slots_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    slots: Tensor,
    layout: HeadLayout,
    batch: Batch,
    scale: float,
) -> Tensor:
    """Attention of queries [B, HQ, A, D] that stand at `slots` [B, A]: [B, A, HQ, D]."""
    keys = torch.arange(key.shape[2], device=key.device)
    window = layout.window_size if layout.sliding else None
    if batch.branches is None:
        seen = Span(key.shape[2]).visible(slots, keys[None], window, layout.sinks)
    else:
        seen = batch.branches.visible(slots, keys, window, layout.sinks)
    return seen_attention(query, key, value, seen, scale).transpose(1, 2)


def _gathered(kwargs: dict[str, Any], slots: Tensor) -> dict[str, Any]:
    """A layer's arguments with positions at `slots` [B, A] only."""
    result = dict(kwargs)
    if (cos_sin := kwargs.get("position_embeddings")) is not None:
        result["position_embeddings"] = tuple(
            part.expand(len(slots), -1, -1).gather(
                1, slots[:, :, None].expand(-1, -1, part.shape[2])
            )
            for part in cos_sin
        )
    if (positions := kwargs.get("position_ids")) is not None:
        result["position_ids"] = positions.expand(len(slots), -1).gather(1, slots)
    return result
