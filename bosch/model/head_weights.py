"""Which entries of an attention module's weights belong to which KV head, measured by gradients.

A few tokens pass through the model up to its first layer with full attention, where random numbers
take the place of attention's output. The gradients of one head's queries, keys and values, and of
what the module makes of this head's output, are zero at the entries of all other heads.
"""

from __future__ import annotations

import contextlib
import inspect
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from bosch.errors import UserError
from bosch.hybrid import AttentionCall, reorder_weight, required_state, set_head_state
from bosch.masks import HeadMask
from bosch.model.families import text_config
from bosch.model.interface import attention_modules
from bosch.model.search_mode import head_mask, mask_shape

# For weights of a decoder layer, by names like "self_attn.o_proj.weight": an axis and sizes. Along
# the axis there are, for each size in turn, as many entries of every KV head: a fused projection
# of queries, keys and values has three sizes.
HeadWeights: TypeAlias = Mapping[str, tuple[int, Sequence[int]]]
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.(.+)$")

_TOKENS, _DRAWS = 24, 3
# A head's own entries have a gradient so many times that of any other head's; a norm over all heads
# leaves them a small one.
_CLEAR = 100


def in_order(
    name: str, weight: Tensor, head_weights: HeadWeights, orders: Mapping[int, Sequence[int]]
) -> Tensor:
    """The weight `name` of a decoder, in a layer of `orders` with KV heads in this order.

    Other weights are returned unchanged, such as norms over one head's dimension.
    """
    place = _LAYER.search(name)
    order = orders.get(int(place[1]), ()) if place is not None else ()
    if place is None or place[2] not in head_weights or list(order) == sorted(order):
        return weight
    return reorder_weight(weight, *head_weights[place[2]], order)


class _Computed(Exception):
    """The module has computed its output."""


@torch.inference_mode(False)
def measure_head_weights(model: PreTrainedModel) -> tuple[HeadWeights, bool]:
    """The weights of heads, and whether packed documents see each other; UserError if unclear."""
    shape, decoder = mask_shape(model.config), model.get_decoder()
    module = attention_modules(model)[0]
    ids = torch.arange(_TOKENS, device=model.device)[None]
    takes_positions = "position_ids" in inspect.signature(decoder.forward).parameters
    # Two documents.
    options = {"position_ids": ids % (_TOKENS // 2)} if takes_positions else {}
    calls: list[AttentionCall] = []
    outputs: list[Tensor] = []
    draw = torch.Generator().manual_seed(0)

    def attend(_: nn.Module, call: AttentionCall) -> Tensor:
        assert isinstance(call.value, Tensor)
        calls.append(call)
        states = call.query[..., :1].expand(*call.query.shape[:3], call.value.shape[3])
        outputs.append(_random(states.transpose(1, 2), draw).requires_grad_())
        return outputs[0]

    def stop(_: nn.Module, arguments: Any, output: Any) -> None:
        outputs.append(output[0] if isinstance(output, tuple) else output)
        raise _Computed

    with contextlib.ExitStack() as stack:
        stack.enter_context(head_mask(model, HeadMask.all_full(*shape), "eager"))
        set_head_state(module, replace(required_state(module), attend=attend))
        stack.enter_context(_trained(module))
        stack.callback(module.register_forward_hook(stop).remove)
        stack.enter_context(torch.enable_grad())
        try:
            decoder(
                input_ids=ids % text_config(model.config).vocab_size, use_cache=False, **options
            )
        except _Computed:
            pass
        except Exception as error:
            reason = f"its layers do not run with another attention ({error!r:.200})"
            raise _refusal(model, reason) from error
        if len(outputs) != 2:
            raise _refusal(model, "its attention does not go through transformers' interface")
        capped = getattr(text_config(model.config), "attn_logit_softcapping", None) is not None
        if capped and calls[0].transform.softcap is None:
            raise _refusal(model, "it caps attention scores by a function of its own")
        weights = {name: x for name, x in module.named_parameters() if x.requires_grad}
        attended, output = outputs
        states = calls[0], attended, output
        sums = _gradients(*states, list(weights.values()), shape[1], draw)
    name = next(name for name, child in model.named_modules() if child is module)
    found = {}
    for weight, axes in zip(weights, sums, strict=True):
        place = _place(axes)
        if place is not None:
            found[f"{name.rpartition('.')[2]}.{weight}"] = place
        elif shape[1] > 1 and (total := axes[0].sum(1)).min() * _CLEAR < total.max():
            raise _refusal(model, f"the heads' entries in {name}.{weight} cannot be told apart")
    return found, calls[0].context.document is None


def _refusal(model: PreTrainedModel, reason: str) -> UserError:
    return UserError(f"models of type '{model.config.model_type}' cannot be made hybrid: {reason}")


@contextlib.contextmanager
def _trained(module: nn.Module) -> Iterator[None]:
    """Temporarily set requires_grad=True."""
    weights = filter(torch.is_floating_point, module.parameters())
    frozen = [weight for weight in weights if not weight.requires_grad]
    for weight in frozen:
        weight.requires_grad_()
    try:
        yield
    finally:
        for weight in frozen:
            weight.requires_grad_(False)


def _gradients(
    call: AttentionCall,
    attended: Tensor,
    output: Tensor,
    weights: list[Tensor],
    heads: int,
    draw: torch.Generator,
) -> list[list[Tensor]]:
    """Sums of absolute gradients [heads, entries] for each axis of each weight."""
    sums = [[x.new_zeros(heads, size, dtype=torch.float32) for size in x.shape] for x in weights]
    logits = call.transform.head_logits
    for _ in range(_DRAWS):
        (back,) = torch.autograd.grad(output, attended, _random(output, draw), create_graph=True)
        states: list[Any] = [call.query, call.key, call.value, back.transpose(1, 2)]
        normed = [*states[:3], attended.transpose(1, 2)]
        for head in range(heads):
            own, bases = ([x.chunk(heads, 1)[head] for x in xs] for xs in (states, normed))
            pairs = [
                (x, _orthogonal(base, draw))
                for x, base in zip(own, bases, strict=True)
                if x.requires_grad
            ]
            if logits is not None:
                pairs.append((logits.chunk(heads)[head].sum(), torch.ones_like(logits[0])))
            found = torch.autograd.grad(
                [x for x, _ in pairs], weights, [random for _, random in pairs],
                retain_graph=True, allow_unused=True,
            )  # fmt: skip
            for axes, gradient in zip(sums, found, strict=True):
                for axis, total in enumerate(axes if gradient is not None else ()):
                    others = [n for n in range(gradient.ndim) if n != axis]
                    absolute = gradient.abs().float()
                    total[head] += absolute.sum(others) if others else absolute
    return sums


def _random(like: Tensor, draw: torch.Generator) -> Tensor:
    return torch.randn(like.shape, generator=draw).to(like)


def _orthogonal(states: Tensor, draw: torch.Generator) -> Tensor:
    """Random numbers orthogonal to each token's states [1, n, T, D], as a norm over heads is."""
    random, dims, states = _random(states, draw), (1, 3), states.detach()
    share = (random * states).sum(dims, keepdim=True) / states.square().sum(dims, keepdim=True)
    return random - share.nan_to_num() * states  # the states of a padding token are zero


def _place(axes: list[Tensor]) -> tuple[int, list[int]] | None:
    """Axis and sizes of each head's entries, as in `HeadWeights`; None without."""
    for axis, sums in enumerate(axes if len(axes[0]) > 1 else ()):
        best, second = sums.topk(2, dim=0).values
        if not bool((best > _CLEAR * second).all()):
            continue
        runs = [(head, len(list(run))) for head, run in groupby(sums.argmax(0).tolist())]
        cycles = [runs[n : n + len(sums)] for n in range(0, len(runs), len(sums))]
        sizes = [cycle[0][1] for cycle in cycles]
        if cycles == [[(head, size) for head in range(len(sums))] for size in sizes]:
            return axis, sizes
    return None
