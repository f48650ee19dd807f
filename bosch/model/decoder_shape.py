"""A decoder's sizes, and what follows from them: parameters and operations. Needs no torch.

C hidden size, L layers, V vocabulary, T tokens of a sequence, W window; shares of sliding
heads are of those of the layers with full attention.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from bosch.model.families import DecoderLayers
from bosch.window import Window


@dataclass(frozen=True)
class DecoderShape:
    """MLP or experts, grouped-query attention; `experts` is 0 for a dense model.

    In a mixture of experts, `shared` is the width of those that every token visits, and
    `dense_layers` have an MLP of width `dense` in their place. `maps` of an MLP or expert are three
    with a gate, else two. `gate` is the width of the attention's gates. `layer_inputs` is the width
    of what each layer adds for a token, from tables of `layer_vocabulary` rows.
    """

    layers: int
    hidden: int
    attention_heads: int
    key_value_heads: int
    head_dim: int
    intermediate: int  # of the MLP, or of one expert
    vocabulary: int
    experts: int = 0
    experts_per_token: int = 0
    tied: bool = False
    kinds: DecoderLayers | None = None  # None: every layer has full attention
    gate: int = 0
    state_layer: int = 0  # parameters of linear attention and the like in one layer
    maps: int = 3
    shared: int = 0
    dense: int = 0
    dense_layers: int = 0
    values_are_keys: bool = False  # in layers with full attention
    positions: int = 0  # rows of a table of positions
    layer_inputs: int = 0
    layer_vocabulary: int = 0

    @property
    def full_layers(self) -> int:
        """Layers with full attention: the rows of a head mask."""
        return self.layers if self.kinds is None else len(self.kinds.full)

    @property
    def own_query_size(self) -> int:
        """`query_size` in a layer that slides by itself."""
        return self.attention_heads * self.kinds.own_head_dim if self.kinds else 0

    @property
    def query_size(self) -> int:
        """Width of all query heads together."""
        return self.attention_heads * self.head_dim

    @property
    def key_value_size(self) -> int:
        """Width of all key heads together, and of all value heads."""
        return self.key_value_heads * self.head_dim

    @property
    def active_width(self) -> int:
        """Intermediate width that a token passes through, over its experts."""
        width = self.intermediate * (self.experts_per_token if self.experts else 1)
        return max(width + self.shared, self.dense if self.dense_layers else 0)

    @property
    def attention_parameters(self) -> int:
        """Parameters of the attention of one layer with full attention."""
        maps = 1 if self.values_are_keys else 2
        return self.hidden * (2 * self.query_size + maps * self.key_value_size + self.gate)

    @property
    def layer_parameters(self) -> int:
        """Parameters of one layer with all experts, without norms of single heads and biases."""
        width = self.intermediate * max(self.experts, 1)
        return self.attention_parameters + self._feed_forward(width) + 2 * self.hidden

    @property
    def largest_weight(self) -> int:
        """Parameters of the largest single weight: a table, or the gates and ups of all experts."""
        widths = 2 * self.experts * self.intermediate, self.vocabulary, self.dense
        return self.hidden * max(*widths, self.query_size)

    @property
    def mixer_parameters(self) -> int:
        """Attention and what stands in its place or beside it, of all layers."""
        if self.kinds is None:
            return self.layers * self.attention_parameters
        key_value = self.kinds.own_heads * self.kinds.own_head_dim
        own = self.hidden * (2 * (self.own_query_size + key_value) + self.gate)
        return (
            len(self.kinds.full) * self.attention_parameters
            + len(self.kinds.windows) * own
            + len(self.kinds.states) * self.state_layer
        )

    @property
    def feed_forward_layers(self) -> int:
        """Layers with a feed-forward block: all, or those that have nothing else."""
        if self.kinds is None:
            return self.layers
        mixers = {*self.kinds.full, *self.kinds.windows, *self.kinds.states}
        return self.layers - len(mixers) or self.layers

    @property
    def table(self) -> int:
        """Parameters of the output head, V x C; an input table of its own has as many."""
        return self.vocabulary * self.hidden

    @property
    def tables(self) -> int:
        """Parameters outside the layers."""
        looked_up = self.positions * self.hidden
        looked_up += self.layer_vocabulary * self.layers * self.layer_inputs
        return (1 if self.tied else 2) * self.table + self.hidden + looked_up

    @property
    def parameters(self) -> int:
        """Parameters of the whole model."""
        norms = 2 * self.hidden * self.layers
        feed_forward = self._feed_forwards(self.intermediate * max(self.experts, 1))
        return self.mixer_parameters + feed_forward + norms + self.tables

    @property
    def active_parameters(self) -> int:
        """Parameters a token is multiplied with: only its experts, no table that is looked up."""
        width = self.intermediate * (self.experts_per_token if self.experts else 1)
        return self.mixer_parameters + self._feed_forwards(width) + self.table

    def _feed_forwards(self, width: int) -> int:
        """Parameters of all feed-forward blocks, experts `width` wide together."""
        sparse = self.feed_forward_layers - self.dense_layers
        dense = self.dense_layers * self.maps * self.hidden * self.dense
        # Each layer's inputs are made for all layers together, then gated and projected in each.
        inputs = 3 * self.layers * self.hidden * self.layer_inputs
        return sparse * self._feed_forward(width) + dense + inputs

    def _feed_forward(self, width: int) -> int:
        """Parameters of one block: experts or MLP, what is shared, and the router."""
        return self.hidden * (self.maps * (width + self.shared) + self.experts)

    def forward_flops(
        self, tokens: float, length: int, shares: Mapping[Window, float] | None = None
    ) -> float:
        """Operations of a forward pass over `tokens` in sequences of `length`.

        A full head's query costs the t keys before it, a sliding head's the W keys it sees;
        `shares` are those of the heads of each window. A multiplication and an addition are two
        operations; recurrences are left out.
        """
        full = keys = (length + 1) / 2
        for window, share in (shares or {}).items():
            keys += share * (_visible_keys(window.most_keys, length) - full)
        attention = self.full_layers * self.query_size * keys
        for own in self.kinds.windows.values() if self.kinds else ():
            attention += self.own_query_size * _visible_keys(own, length)
        return tokens * (2 * self.active_parameters + 4 * attention)

    def training_flops(
        self, tokens: float, length: int, shares: Mapping[Window, float] | None = None
    ) -> float:
        """Operations of forward and backward, nothing recomputed: what MFU counts."""
        return 3 * self.forward_flops(tokens, length, shares)


def _visible_keys(most: int, length: int) -> float:
    """Mean number of keys of a query that sees at most so many."""
    visible_keys = min(most, length)
    return visible_keys * (2 * length - visible_keys + 1) / (2 * length)
