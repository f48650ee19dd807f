"""A pass of a batch through the decoder that computes only what is not cached.

Three exact savings. Layers below the lowest changed layer are skipped. If a layer's attention is
cached for every choice, each head's output is taken from the cache. The last layer computes keys
and values at all positions and everything else only at the answers. E examples of a batch, T
tokens, A answer tokens of all, M most answer tokens of an example, HQ query heads, HKV key/value
heads, D head dimension, C hidden size.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from bosch.attention import (
    AttentionCall,
    AttentionContext,
    HeadLayout,
    LogitTransform,
    compute_attention,
)
from bosch.attention.kernels import fused_attention
from bosch.attention.logit_transform import dense_attention
from bosch.heads import HeadMask
from bosch.model.families import decoder_layers, known_family
from bosch.model.interface import Attend, attention_modules
from bosch.objective import patching
from bosch.objective.activation_cache import ActivationCache, LayerActivations
from bosch.objective.batches import Batch, final_states
from bosch.objective.flops import Flops
from bosch.window import Windows

logger = logging.getLogger(__name__)

_START, _MIXTURE = "start", "mixture"


class IncrementalForward:
    """Runs batches under head masks that `apply_head_mask` has set on the model.

    With `answers_only` the last layer is computed only at the answers, unless it has no full
    attention or holds a state.
    """

    def __init__(
        self,
        model: Any,
        windows: Windows,
        cache: ActivationCache,
        *,
        answers_only: bool,
    ) -> None:
        self.decoder = model.get_decoder()
        self.layers: list[nn.Module] = list(self.decoder.layers)
        # Rows of a mask are the layers with full attention; others are computed, or skipped.
        kinds = decoder_layers(model.config)
        self.full_layers = kinds.full
        self.attentions = attention_modules(model)
        self.family = known_family(model.config)
        self.device = model.device
        self.flops = Flops(model, windows)
        self.cache = cache
        last = kinds.count - 1
        only_full = kinds.full[-1] == last and last not in kinds.states
        self.answers_only = answers_only and only_full
        heads, self.q_per_kv = self.flops.num_key_value_heads, self.flops.q_per_kv
        # All heads under each choice: full, then each window.
        self.layouts = [HeadLayout.search([w] * heads) for w in (None, *self.flops.windows)]
        # Width of the outputs of all heads.
        width = heads * self.q_per_kv * kinds.head_dim
        self.bytes_per_position: int = len(self.layouts) * width * model.dtype.itemsize
        # CPU threads divide a batched product by its heads, so last bits may depend on other heads.
        self.can_mix = self.device.type != "cpu" or torch.get_num_threads() == 1
        self.verified: set[str] = set()
        # Savings that are off because they changed a result: 1 is _MIXTURE, 2 also _START.
        self.failed_savings = 0

    def answer_states(self, index: int, batch: Batch, mask: HeadMask) -> tuple[Tensor, float]:
        """Final hidden states [A, C] that predict the answers, and the operations done.

        `index` is the batch's key in the cache. At its first use, the result of a saving is
        compared with that of a plain pass. If a bit differs, attention outputs are no longer
        reused; if a bit still differs with reused layer inputs, nothing is reused.
        """
        reusing = BatchPass(self, index, batch, mask, self.cache.enabled)
        states = reusing.answer_states()
        if reusing.savings <= self.verified:
            return states, reusing.operations
        plain = BatchPass(self, index, batch, mask, reuse=False)
        expected = plain.answer_states()
        if torch.equal(expected, states):
            self.verified |= reusing.savings
        else:
            mixed = any(name.startswith(_MIXTURE) for name in reusing.savings)
            self.switch_off(1 if mixed else 2)
        return expected, reusing.operations + plain.operations

    def switch_off(self, failed_savings: int) -> None:
        """Switch off the savings that are not exact here, numbered as in `failed_savings`."""
        if failed_savings <= self.failed_savings:
            return
        self.failed_savings = failed_savings
        if failed_savings == 1:
            logger.warning(
                "reused attention outputs change the result for this model: switched off, which is "
                "slower and gives the same scores; the layers' inputs are still reused"
            )
            self.can_mix = False
            self.cache.clear()
        else:
            logger.warning(
                "reuse of earlier passes changes the result for this model: switched off"
            )
            self.cache.disable()

    @property
    def savings(self) -> dict[str, bool]:
        """Which savings are on."""
        return {
            "layer_inputs": self.cache.enabled,
            "attention_of_both_kinds": self.cache.enabled and self.can_mix,
            "last_layer_at_answers": self.answers_only,
        }


class BatchPass:
    """One pass of a batch under a mask; a layer's `number` is its row of the mask."""

    def __init__(
        self, owner: IncrementalForward, index: int, batch: Batch, mask: HeadMask, reuse: bool
    ) -> None:
        self.owner, self.index, self.batch, self.mask, self.reuse = owner, index, batch, mask, reuse
        self.start = owner.cache.deepest(mask, index) if reuse else 0
        self.last = len(owner.full_layers) - 1
        self.operations = float(owner.flops.outside * batch.positions)
        self.savings: set[str] = {_START} if self.start else set()

    def answer_states(self) -> Tensor:
        """Run the decoder, each layer's forward replaced by `_layer`."""
        with patching.replace_layers(self.owner.layers, self.owner.family, self._layer):
            states = final_states(self.owner.decoder, self.batch, self.owner.device)
        batch = self.batch
        columns = batch.answer_indices if self.owner.answers_only else batch.columns
        rows, columns = batch.rows.to(states.device), columns.to(states.device)
        return states[rows, columns]

    def _layer(
        self, layer: int, forward: Callable[..., Tensor], state: Tensor, kwargs: dict[str, Any]
    ) -> Tensor:
        full_layers = self.owner.full_layers
        if self.start and layer < full_layers[self.start]:
            return state  # Not computed: the layer of row `start` replaces it by its cached input.
        if layer not in full_layers:
            self.operations += self.owner.flops.other_layer(layer, self.batch)
            return forward(state, **kwargs)
        number = full_layers.index(layer)
        cached = self.owner.cache.get(self.mask, number, self.index) if self.reuse else None
        if number == self.start and number > 0:
            assert cached is not None and cached.state is not None
            cached.starts += 1
            state = cached.state
        elif number and (number < self.last or not self.owner.answers_only):
            self._add(number, state=state)
        if number == self.last and self.owner.answers_only:
            return self._last_layer(number, forward, state, kwargs, cached)
        return self._inner_layer(number, partial(forward, state, **kwargs), cached)

    def _inner_layer(
        self, number: int, run: Callable[[], Tensor], cached: LayerActivations | None
    ) -> Tensor:
        """A layer at all positions; `run` computes it with the installed attention."""
        row, flops = self.mask.choices[number], self.owner.flops
        costs, positions = flops.full_layers[number], self.batch.positions
        attention: Any = self.owner.attentions[number]
        mixed = self._cached_mixture(row, cached)
        if mixed is not None:
            self.savings.add(self._mixture_name(row))
            self.operations += costs.after_attention * positions
            with patching.attention_outputs(attention, self.owner.family, mixed):
                return run()
        pairs = flops.pairs(*self.batch.input_ids.shape)
        self.operations += costs.linear * positions
        if not self._every_choice_pays(number, cached):
            self.operations += flops.attention(row, pairs)
            return run()
        self.savings.add(self._mixture_name(row))
        self.operations += flops.every_choice(pairs)
        with patching.replace_attention(attention, self._attend_every_choice(number)):
            return run()

    def _mixture_name(self, row: Any) -> str:
        """Key of a row's mixture; on a GPU numbers of heads select kernels, so each is verified."""
        return _MIXTURE if self.owner.device.type == "cpu" else f"{_MIXTURE} {np.bincount(row)}"

    def _every_choice_pays(self, number: int, cached: LayerActivations | None) -> bool:
        """Whether to compute and cache this layer's attention under every choice.

        It pays if later passes start here with another row and the cache has room. That is assumed
        at row 0, at the second start, and if the search has announced it (`is_pinned`).
        """
        if not self.reuse or number != self.start or not self.owner.can_mix:
            return False
        size = self.owner.bytes_per_position * self.batch.positions
        if not self.owner.cache.has_room(self.mask, number, self.index, size):
            return False
        if number == 0 or self.owner.cache.is_pinned(number):
            return True
        return cached is not None and cached.starts > 1

    def _attend_every_choice(self, number: int) -> Attend:
        """Attention that computes and caches every choice, and returns the mask's mixture."""

        def attend(module: nn.Module, call: AttentionCall) -> Tensor:
            outputs = [
                compute_attention(call._replace(layout=layout)) for layout in self.owner.layouts
            ]
            self._add(number, outputs=outputs)
            return self.mix(self.mask.choices[number], outputs)

        return attend

    def _cached_mixture(self, row: Any, cached: LayerActivations | None) -> Tensor | None:
        """Attention output of a row of the mask, if all choices are cached."""
        if cached is None or not cached.outputs:
            return None
        return self.mix(row, cached.outputs)

    def mix(self, row: Any, outputs: Sequence[Tensor]) -> Tensor:
        """Outputs [..., HQ, D] with each head's choice in `row` [HKV]."""
        *others, last = np.unique(row).tolist()
        mixture: Tensor = outputs[last]
        choices = torch.tensor(row, device=mixture.device)
        choices = choices.repeat_interleave(self.owner.q_per_kv)[:, None]
        for choice in others:
            mixture = torch.where(choices == choice, outputs[choice], mixture)
        return mixture

    def _add(
        self, number: int, state: Tensor | None = None, outputs: Sequence[Tensor] = ()
    ) -> None:
        if self.reuse:
            self.owner.cache.add(self.mask, number, self.index, state, outputs)

    def _last_layer(
        self,
        number: int,
        forward: Callable[..., Tensor],
        state: Tensor,
        kwargs: dict[str, Any],
        cached: LayerActivations | None,
    ) -> Tensor:
        """The last layer only at the positions that predict answers: [E, M, C].

        Their queries need only the keys and values of the other positions. So the layer's forward
        runs twice: over all positions until its keys and values are known, then over the answers'
        positions with an attention that uses them. The cache holds input and attention at the
        answers' positions; if they are cached, the first run is skipped.
        """
        attention: Any = self.owner.attentions[number]
        flops, columns = self.owner.flops, self.batch.answer_columns.to(state.device)
        costs, row = flops.full_layers[number], self.mask.choices[number]
        narrow = _at_columns(kwargs, self.batch.input_ids.shape[1], columns)
        mixed = self._cached_mixture(row, cached)
        if number == self.start > 0 and mixed is not None:
            self.operations += costs.after_attention * columns.numel()
            with patching.attention_outputs(attention, self.owner.family, mixed):
                return forward(state, **narrow)
        key, value = patching.keys_and_values(attention, forward, state, kwargs)
        self.operations += costs.key_value * self.batch.positions + costs.linear * columns.numel()
        self.operations += len(self.owner.layouts) * flops.dense_attention(
            columns.numel(), self.batch.input_ids.shape[1]
        )
        state = state.gather(1, columns[:, :, None].expand(-1, -1, state.shape[2]))

        def attend(module: nn.Module, call: AttentionCall) -> Tensor:
            outputs = [
                answer_attention(call.query, key, value, columns, layout, call.transform)
                for layout in self.owner.layouts
            ]
            self._add(number, state, outputs)
            return self.mix(row, outputs)

        with patching.replace_attention(attention, attend):
            return forward(state, **narrow)


def answer_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    columns: Tensor,
    layout: HeadLayout,
    transform: LogitTransform,
    max_logits: int = 2**27,
) -> Tensor:
    """Attention [E, M, HQ, D] of queries [E, HQ, M, D] at `columns` [E, M], with one window.

    key and value [E, HKV, T, D]; `layout` has one group. Few fused kernels take a mask, and others
    keep all logits in memory: examples are computed in groups of at most `max_logits`.
    """
    keys = torch.arange(key.shape[2], device=key.device)
    (group,) = layout.groups
    transform = transform.of(layout, group, query.shape[1] // key.shape[1])
    visible = AttentionContext(key.shape[2]).visible(columns, keys[None], group.window)
    step = max(1, max_logits // (query.shape[1] * visible[0].numel()))
    groups = zip(*(torch.split(x, step) for x in (query, key, value, visible)), strict=True)
    outputs = [
        fused_attention(q, k, v, mask=seen[:, None], scale=transform.scaling)
        if transform.is_plain
        else dense_attention(q, k, v, seen[:, None], transform)
        for q, k, v, seen in groups
    ]
    return torch.cat(outputs).transpose(1, 2).contiguous()


def _at_columns(kwargs: dict[str, Any], length: int, columns: Tensor) -> dict[str, Any]:
    """Arguments [E or 1, T, ...], [E or 1, 1, T, X] or tuples of them, at `columns` [E, M]."""

    def narrowed(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(narrowed(item) for item in value)
        if isinstance(value, Tensor) and value.ndim == 4 and value.shape[1:3] == (1, length):
            return narrowed(value[:, 0])[:, None]  # as a factor of the queries of all heads
        if not isinstance(value, Tensor) or value.ndim < 2 or value.shape[1] != length:
            return value
        value = value.expand(len(columns), *value.shape[1:])
        index = columns.view(*columns.shape, *[1] * (value.ndim - 2))
        return value.gather(1, index.expand(*columns.shape, *value.shape[2:]))

    return {name: narrowed(value) for name, value in kwargs.items()}
