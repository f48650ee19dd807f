"""Initial sink bias: the logit that takes the same probability mass as sink tokens would.

L layers, HQ query heads, HKV key/value heads, T tokens, N sampled queries, D head dimension.
"""

from __future__ import annotations

import contextlib
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from bosch.attention import AttentionCall, LogitTransform, compute_attention
from bosch.errors import UserError
from bosch.heads import HeadMask
from bosch.model.families import text_config
from bosch.model.interface import attention_modules
from bosch.model.search_mode import apply_head_mask, check_sink_bias, set_sink_bias
from bosch.model.tensor_parallel import gather_heads
from bosch.objective.batches import final_states
from bosch.objective.objective import Objective
from bosch.objective.patching import replace_attention
from bosch.window import SINK_TOKENS, Window

_QUERIES = 32  # of an example
_QUERIES_AT_ONCE = 16
_HALVINGS = 60


def fit_sink_bias(objective: Objective) -> list[list[float]]:
    """Estimate the sink bias [L][HQ] of every query head and set it on the objective's model.

    One pass over the calibration set with every head full gives w_t and s_t for sampled queries t,
    at least W + S tokens into their example: the log-sum-exp of the scores of the widest window and
    of the first S = 4 tokens. Sink tokens would take the share m_t = sigmoid(s_t - w_t) of a
    sliding head's softmax, a bias b takes sigmoid(b - w_t). b makes the means over t of the
    logarithms of both equal. For shares near 0 it is the mean of s_t. The mean of logarithms rises
    with b and the solution lies between the smallest and the largest s_t, so bisection finds it.
    Every head gets a bias, whether or not it will slide. Raises UserError if no example is long
    enough, or the family has its own extra logit.
    """
    model, ranks = objective.model, objective.ranks
    check_sink_bias(model.config)
    set_sink_bias(model, None)
    window = Window(objective.window.size, SINK_TOKENS)
    lengths = [len(example.input_ids) for example in objective.calibration.examples]
    if max(lengths) <= window.max_keys:
        raise UserError(
            f"search.sink: no calibration example is longer than the window and {SINK_TOKENS} "
            f"tokens ({window.max_keys}): lower search.window_size or raise "
            "prepare.calibration.length"
        )
    apply_head_mask(model, HeadMask.all_full(*objective.shape), objective.windows)
    modules, heads = attention_modules(model), text_config(model.config).num_attention_heads
    sums = torch.zeros(2, len(modules), heads, len(lengths), _QUERIES, dtype=torch.float64)
    with torch.inference_mode(), contextlib.ExitStack() as stack:
        columns: list[Tensor] = []  # of the current batch
        examples: list[int] = []
        for number, module in enumerate(modules):
            show = partial(_attend, columns, examples, window, sums[:, number])
            stack.enter_context(replace_attention(module, partial(show, model)))
        for batch in objective.local_batches():
            examples[:] = batch.examples.tolist()
            # Evenly spaced among the queries that see more than window and sinks.
            columns[:] = [
                torch.linspace(window.max_keys, lengths[example] - 1, _QUERIES).long()
                for example in examples
            ]
            final_states(model.get_decoder(), batch, model.device)
    (sums,) = ranks.merge(sums)
    long = torch.tensor([length > window.max_keys for length in lengths])
    sink_log_mass, window_log_mass = sums[:, :, :, long].flatten(3)  # [L, HQ, N]
    estimate = log_mass_bias(sink_log_mass, window_log_mass).to(model.dtype)
    values: list[list[float]] = ranks.from_first(estimate.tolist())
    set_sink_bias(model, values)
    objective.cache.clear()  # activations without the bias
    return values


def log_mass_bias(sink_log_mass: Tensor, window_log_mass: Tensor) -> Tensor:
    """The bias b [...] of `fit_sink_bias`, from s_t and w_t [..., N]."""
    target = nn.functional.logsigmoid(sink_log_mass - window_log_mass).mean(-1)
    low, high = sink_log_mass.amin(-1), sink_log_mass.amax(-1)
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        reached = nn.functional.logsigmoid(middle[..., None] - window_log_mass).mean(-1)
        low, high = middle.where(reached < target, low), high.where(reached < target, middle)
    return (low + high) / 2


def _attend(
    columns: list[Tensor],
    examples: list[int],
    window: Window,
    sums: Tensor,
    model: Any,
    module: nn.Module,
    call: AttentionCall,
) -> Tensor:
    """Full attention that stores log-sums of sinks and window in `sums` [2, HQ, examples, N]."""
    query, key = call.query, call.key
    assert isinstance(key, Tensor)
    for row, (example, positions) in enumerate(zip(examples, columns, strict=True)):
        if positions[-1] < window.max_keys:  # the example has no such query
            continue
        positions = positions.to(query.device)
        log_sums = _log_sums(query[row], key[row], positions, window, call.transform)
        sums[:, :, example] = gather_heads(model, log_sums).double().cpu()
    return compute_attention(call)


def _log_sums(
    query: Tensor, key: Tensor, positions: Tensor, window: Window, transform: LogitTransform
) -> Tensor:
    """Log-sum-exp of the scores of the sinks and of the window, [2, HQ, N].

    query [HQ, T, D], key [HKV, T, D]; `positions` [N] are those of the sampled queries.
    """
    slots = torch.arange(key.shape[1], device=key.device)
    outputs = []
    for start in range(0, len(positions), _QUERIES_AT_ONCE):
        chunk = positions[start : start + _QUERIES_AT_ONCE]
        queries = query[:, chunk].view(len(key), -1, len(chunk), query.shape[2])  # [HKV, G, n, D]
        scores = (queries @ key[:, None].mT).float().flatten(0, 1) * transform.scaling
        if transform.softcap is not None:
            scores = transform.softcap * torch.tanh(scores / transform.softcap)
        distance = chunk[:, None] - slots
        in_window = (distance >= 0) & (distance < window.size)
        is_sink = (slots < window.sinks).expand_as(in_window)
        masked = [scores.masked_fill(~keys, float("-inf")) for keys in (is_sink, in_window)]
        outputs.append(torch.stack(masked).logsumexp(-1))
    return torch.cat(outputs, dim=2)
