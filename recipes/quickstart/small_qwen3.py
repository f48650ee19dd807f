"""The small models of this folder and of `recipes/study`, and how they learn to retrieve.

B rows, T tokens, HKV key/value heads.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, Qwen3Config, Qwen3ForCausalLM

from recipes.quickstart.training_rows import VOCABULARY

LOCAL_REACH = (1 / 16, 1 / 4)  # of a sequence


def small_config(
    *, width: int, feed_forward: int, layers: int, kv_heads: int, tokens: int, rope_theta: float
) -> Qwen3Config:
    """A Qwen3 with two query heads per KV head, D = 32, and the small models' vocabulary."""
    return Qwen3Config(
        initializer_range=0.06,
        vocab_size=VOCABULARY,
        hidden_size=width,
        intermediate_size=feed_forward,
        num_hidden_layers=layers,
        num_attention_heads=2 * kv_heads,
        num_key_value_heads=kv_heads,
        head_dim=32,
        max_position_embeddings=tokens,
        rope_parameters={"rope_type": "default", "rope_theta": rope_theta},
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=0,
    )


@torch.no_grad()
def look_back_one(model: Qwen3ForCausalLM, groups: int = 4) -> None:
    """Initialise the first layer's first `groups` KV groups to attend to the previous token.

    Copying needs such heads below the heads that match, and neither kind helps alone: from random
    weights a model this small stays on that plateau for thousands of steps. All embeddings get a
    common direction; queries and keys map it to a vector of high rotary frequencies, the query's
    turned back by one position.
    """
    config, embedding = model.config, model.model.embed_tokens.weight
    size = config.head_dim
    common = torch.randn(embedding.shape[1])
    common /= common.norm()
    embedding += common * embedding.norm(dim=1).mean()
    rate = config.rope_parameters["rope_theta"] ** (-torch.arange(0, size, 2) / size)
    key = torch.cat([(rate > 0.02).float(), torch.zeros(size // 2)])
    quarter_turn = torch.cat([-key[size // 2 :], key[: size // 2]])
    angle = -torch.cat([rate, rate])
    query = key * torch.cos(angle) + quarter_turn * torch.sin(angle)
    attention = model.model.layers[0].self_attn
    attention.q_norm.weight.fill_(1.5)
    attention.k_norm.weight.fill_(1.5)
    per_group = config.num_attention_heads // config.num_key_value_heads
    for weight, target, heads in (
        (attention.k_proj.weight, key, groups),
        (attention.q_proj.weight, query, groups * per_group),
    ):
        rows = weight[: heads * size]
        rows.mul_(0.3).add_(torch.outer(target, common).repeat(heads, 1))


@torch.no_grad()
def spread_retrieval(model: Qwen3ForCausalLM) -> None:
    """Swap the second half of the KV groups of layers 1 and 3, so that two layers can retrieve.

    Copying forms in the first layer that can learn it, and later layers then do not learn it. The
    heads also work in a higher layer, because their inputs stay in the residual stream. Rows in
    which whole layers are local keep both layers able to retrieve from then on.
    """
    config = model.config
    lower, upper = model.model.layers[1], model.model.layers[3]
    scale = lower.input_layernorm.weight / upper.input_layernorm.weight
    half = config.num_key_value_heads // 2 * config.head_dim
    per_group = config.num_attention_heads // config.num_key_value_heads
    for name, first in (("q_proj", half * per_group), ("k_proj", half), ("v_proj", half)):
        below, above = (getattr(layer.self_attn, name).weight[first:] for layer in (lower, upper))
        moved = below * scale
        below.copy_(above / scale)
        above.copy_(moved)
    below, above = (
        layer.self_attn.o_proj.weight[:, half * per_group :] for layer in (lower, upper)
    )
    moved = below.clone()
    below.copy_(above)
    above.copy_(moved)
    for norm in ("q_norm", "k_norm"):
        getattr(upper.self_attn, norm).weight.copy_(getattr(lower.self_attn, norm).weight)


class LocalHeads:
    """Restricts random KV groups and whole layers of every row to the latest tokens.

    Retrieval then cannot settle in one head or layer, because the others must be able to replace
    it. A local head loses what a sliding-window head loses.
    """

    def __init__(self, model: Qwen3ForCausalLM) -> None:
        self.groups = model.config.num_key_value_heads
        self.layers = [layer.self_attn for layer in model.model.layers]
        AttentionInterface.register("local_heads", local_heads_attention)
        model.set_attn_implementation("local_heads")

    def draw(
        self, rows: int, length: int, heads: float, layers: float, generator: torch.Generator
    ) -> None:
        """Draw the reaches for `rows` sequences of `length` tokens.

        `heads` and `layers` are the probabilities that a KV group or a whole layer is local.
        """
        shortest, longest = (int(share * length) for share in LOCAL_REACH)
        for layer in self.layers:
            local = torch.rand(rows, self.groups, generator=generator) < heads
            local |= torch.rand(rows, 1, generator=generator) < layers
            reach = torch.randint(shortest, longest + 1, (rows, 1), generator=generator)
            layer.reach = torch.where(local, reach, length)


def local_heads_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, _mask: None, **options: Any
) -> tuple[Tensor, None]:
    """Plain causal attention in which each row's KV groups reach back `module.reach` [B, HKV].

    Compiled, it trains twice as fast on a CPU as torch's own kernel.
    """
    q_per_kv = module.num_key_value_groups
    key, value = key.repeat_interleave(q_per_kv, 1), value.repeat_interleave(q_per_kv, 1)
    scores = query @ key.transpose(2, 3) * options["scaling"]
    position = torch.arange(query.shape[2])
    distance = position[:, None] - position
    reach = module.reach.repeat_interleave(q_per_kv, 1)[:, :, None, None]
    # Added, not filled in: the backward pass then needs no mask.
    bias = torch.where((distance < 0) | (distance >= reach), -1e30, 0.0).to(scores.dtype)
    weights = (scores + bias).softmax(-1, dtype=torch.float32).to(query.dtype)
    return (weights @ value).transpose(1, 2), None


def rate_scale(step: int, total: int, warmup: int, decay: int) -> float:
    """Factor of the learning rate: linear warm-up, then linear decay to 2 % in the last steps."""
    return min(1.0, (step + 1) / warmup, 0.02 + 0.98 * (total - step) / decay)


def token_losses(model: nn.Module, ids: Tensor, *, is_mixed: bool = True) -> Tensor:
    """Cross-entropy of every next token, [B, T - 1], from logits in bfloat16 where `is_mixed`."""
    with torch.autocast("cpu", torch.bfloat16, enabled=is_mixed):
        logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
    losses = nn.functional.cross_entropy(
        logits.float().flatten(0, 1), ids[:, 1:].flatten(), reduction="none"
    )
    return losses.view(len(ids), -1)


def update(
    model: nn.Module, optimizer: torch.optim.Optimizer, rate: float, loss: float, step: int
) -> float:
    """Take a step with the gradients of a loss; their norm. SystemExit where it is not finite."""
    if not math.isfinite(loss):
        raise SystemExit(f"the loss is {loss} at step {step}")
    for group in optimizer.param_groups:
        group["lr"] = rate
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return norm.item()
