"""A learned logit for each query head of a sliding head, next to the logits of its window."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from inspect import signature
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from torch import Tensor

from bosch.attention import (
    BACKENDS,
    AttentionCall,
    HeadLayout,
    compute_attention,
    hybrid_attention,
    varlen,
)
from bosch.errors import UserError
from bosch.heads import HeadMask
from bosch.model.deploy_mode import deploy_layouts
from bosch.model.families import text_config
from bosch.model.interface import attention_modules
from bosch.model.loading import load_model
from bosch.model.materialize import materialize, materialize_front
from bosch.model.search_mode import apply_head_mask, mask_shape, prepare_for_search, set_sink_bias
from bosch.objective.calibration import CalibrationSet
from bosch.objective.gate_gradients import blended_attention
from bosch.objective.objective import Objective
from bosch.objective.patching import replace_attention
from bosch.objective.sink_bias import fit_sink_bias
from bosch.window import Window
from tests import fake_flash, search_case
from tests.attention_case import Case, cases
from tests.front_case import nested_front
from tests.hybrid_case import KV_HEADS, LAYERS, logits_of, mask_of, random_mask, small_model, tokens
from tests.search_case import WINDOW, searchable
from tests.unit.test_objective import plain_score_of

_NEAR = {"rtol": 1e-9, "atol": 1e-9}
_CLOSE = {"rtol": 1e-4, "atol": 1e-4}


@pytest.fixture(scope="module", autouse=True)
def _stand_ins() -> Iterator[None]:
    patch = pytest.MonkeyPatch()
    fake_flash.install(patch)
    operations = SimpleNamespace(
        _varlen_attn=_varlen_forward, _varlen_attn_backward=_varlen_backward
    )
    patch.setattr(varlen, "varlen_operations", lambda: operations)
    yield
    patch.undo()


def _varlen_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    is_causal: bool = False,
    scale: float | None = None,
    window_size: list[int] | None = None,
    enable_gqa: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """torch's operation of this name, computed by the stand-in for flash-attn's."""
    assert query.shape[1] == key.shape[1] or enable_gqa
    left, right = window_size or (-1, -1)
    assert right == 0 and is_causal == (left < 0)
    out, lse, _ = fake_flash.flash_attn_varlen_func(
        query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, 0.0, scale,
        window_size=(left, right), return_attn_probs=True,
    )  # fmt: skip
    return out, lse, torch.zeros(2, dtype=torch.uint64)


def _varlen_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    is_causal: bool,
    rng_state: Tensor,
    scale: float,
    window_size: list[int],
) -> list[Tensor]:
    gradients = [torch.empty_like(states) for states in (query, key, value)]
    borders, window = (cu_seq_q, cu_seq_k), (window_size[0], window_size[1])
    states = grad_out, query, key, value, out, lse, *gradients
    fake_flash.backward(*states, borders, scale, window)
    return gradients


def test_the_stand_ins_have_the_signatures_of_torchs_operations() -> None:
    stand_ins = {"_varlen_attn": _varlen_forward, "_varlen_attn_backward": _varlen_backward}
    for name, ours in stand_ins.items():
        schema = getattr(torch.ops.torch_attn, name).default._schema
        names = [argument.name for argument in schema.arguments]
        assert list(signature(ours).parameters) == names[: len(signature(ours).parameters)]


def _plain(query: Tensor, key: Tensor, value: Tensor, bias: Tensor, case: Case) -> Tensor:
    """Softmax over [logits, b] of one head at a time, without the extra column."""
    context, windows, rows = case.context(), case.windows(), []
    slots = torch.arange(context.kv_length)[None]
    for head in range(query.shape[1]):
        window = windows[head // case.q_per_kv]
        visible = context.visible(slots[:, context.q_offset :], slots, window)
        scores = query[:, head] @ key[:, head // case.q_per_kv].mT * query.shape[-1] ** -0.5
        scores = scores.masked_fill(~visible, float("-inf"))
        if window is not None:
            column = bias[head].expand(*scores.shape[:2], 1)
            weights = torch.cat([scores, column], dim=2).softmax(-1)[..., :-1]
        else:
            weights = scores.softmax(-1)
        rows.append(weights @ value[:, head // case.q_per_kv])
    return torch.stack(rows, dim=2)


@settings(max_examples=30, deadline=None)
@given(case=cases())
@example(case=Case(40, 8, 0, (True, False), padding="documents"))
@example(case=Case(5, 8, 0, (True, False), padding="left", batch=2, past=19))
@example(case=Case(300, 33, 0, (False, False), batch=2))
@example(case=Case(163, 32, 0, (True,), q_per_kv=1, padding="left"))
def test_every_backend_computes_the_softmax_with_the_extra_column(case: Case) -> None:
    case = replace(case, sinks=0)
    tensors = case.tensors()
    bias = torch.randn(tensors[0].shape[1], dtype=torch.float64, requires_grad=True)
    weight = torch.randn(case.batch, case.length, *bias.shape, 4, dtype=torch.float64)
    context = case.context()
    if context.valid is not None:  # outputs of padded queries do not matter
        weight *= context.valid[:, context.q_offset :, None, None]
    expected = _plain(*tensors, bias, case)
    leaves = (*tensors, bias)
    slides = not all(case.rows)
    gradients = torch.autograd.grad((expected * weight).sum(), leaves, allow_unused=not slides)
    backends = ["eager", "sdpa", "flex"]
    if case.padding in ("none", "documents"):  # flash leaves out the outputs of padded queries
        backends += ["flash", "varlen"]
    for backend in backends:
        out = hybrid_attention(
            *tensors, case.layout(), case.context(),
            head_logits=bias, sliding_only=True, backend=backend,
        )  # fmt: skip
        torch.testing.assert_close(out * weight, expected * weight, **_NEAR)
        ours = torch.autograd.grad((out * weight).sum(), leaves, allow_unused=not slides)
        for mine, theirs in zip(ours, gradients, strict=True):
            if theirs is None:
                assert mine is None or not mine.any()
            else:
                torch.testing.assert_close(mine, theirs, **_NEAR)


def _bias(model: Any, seed: int = 0) -> list[list[float]]:
    generator = torch.Generator().manual_seed(seed)
    layers = len(attention_modules(model))
    heads = text_config(model.config).num_attention_heads
    return torch.randn(layers, heads, generator=generator).tolist()


# Plain ones, fused projections, norms over heads, capped logits with layers that slide in the
# original, attention gates with linear layers.
@pytest.mark.parametrize("family", ["qwen3", "phi3", "olmo2", "gemma2", "gpt_neox", "qwen3_next"])
def test_a_hybrid_computes_what_was_searched(family: str, tmp_path: Path) -> None:
    """From masked base to permuted weights, a saved directory, both caches, and the code file."""
    model, ids = small_model(family), tokens(2, 40)
    mask = mask_of(model.config)
    attention = torch.ones_like(ids)
    attention[0, :7] = 0
    apply_head_mask(model, mask, Window(WINDOW))
    without = logits_of(model, ids)
    values = _bias(model)
    set_sink_bias(model, values)
    expected = logits_of(model, ids)
    assert (expected - without).abs().max() > 1e-3
    prepare_for_search(model, "eager")
    apply_head_mask(model, mask, Window(WINDOW))
    torch.testing.assert_close(logits_of(model, ids), expected, **_CLOSE)
    hybrid = materialize(model, mask, Window(WINDOW))
    torch.testing.assert_close(logits_of(hybrid, ids), expected, **_CLOSE)
    hybrid.save_pretrained(tmp_path)
    saved = load_model(tmp_path, dtype="float32")
    assert torch.equal(logits_of(saved, ids), logits_of(hybrid, ids))
    text = _greedy(saved, ids, attention, use_cache=False)
    for implementation in ("dynamic", "static"):
        assert torch.equal(
            _greedy(saved, ids, attention, cache_implementation=implementation), text
        )


def _greedy(model: Any, ids: Tensor, mask: Tensor, **options: Any) -> Tensor:
    options = {"max_new_tokens": 8, "do_sample": False, "attention_mask": mask, **options}
    with torch.no_grad():
        return model.generate(ids, **options)


def test_full_heads_have_no_bias() -> None:
    model, ids = small_model(), tokens(2, 40)
    expected = logits_of(model, ids)
    full = HeadMask.all_full(*mask_shape(model.config))
    apply_head_mask(model, full, Window(WINDOW))
    set_sink_bias(model, _bias(model))
    torch.testing.assert_close(logits_of(model, ids), expected, **_CLOSE)
    set_sink_bias(model, None)
    assert not [name for name in model.state_dict() if "sink_bias" in name]
    hybrid = materialize(model, full, Window(WINDOW))
    assert "sink" not in hybrid.config.hybrid_attention


def test_only_the_bias_of_sliding_heads_gets_gradients() -> None:
    """One for each query head, also with recomputation, and equal to a difference quotient."""
    model, ids = small_model().double(), tokens(2, 40)
    mask = random_mask()
    set_sink_bias(model, _bias(model))
    hybrid = materialize(model, mask, Window(WINDOW)).train()
    gradients = []
    for recomputed in (False, True):
        if recomputed:
            hybrid.gradient_checkpointing_enable({"use_reentrant": False})
        hybrid.zero_grad()
        _loss(hybrid, ids).backward()
        modules = attention_modules(hybrid)
        gradients.append([module.sink_bias.grad.clone() for module in modules])
    torch.testing.assert_close(gradients[0], gradients[1])
    hybrid.gradient_checkpointing_disable()
    for row, gradient in zip(mask.is_full, gradients[0], strict=True):
        q_per_kv = len(gradient) // len(row)
        full = int(row.sum()) * q_per_kv
        assert not gradient[:full].any() and bool((gradient[full:] != 0).all())
    with torch.no_grad():
        losses = []
        for step in (1e-3, -2e-3):
            modules[0].sink_bias[-1] += step
            losses.append(float(_loss(hybrid, ids)))
    difference = (losses[0] - losses[1]) / 2e-3
    assert float(gradients[0][0][-1]) == pytest.approx(difference, rel=1e-2)


def _loss(model: Any, ids: Tensor) -> Tensor:
    logits = model(ids, use_cache=False).logits[:, :-1]
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


@pytest.mark.parametrize(("family", "layers"), [("qwen3", LAYERS), ("gemma2", 2)])
def test_the_estimate_equals_the_mean_logarithm_of_the_originals_shares(
    family: str, layers: int
) -> None:
    """By definition: one example at a time, with all logits, which gemma2 caps."""
    model = small_model(family)
    calibration = search_case.answered(model)
    cap = getattr(model.config, "attn_logit_softcapping", None)
    objective = Objective(model, calibration, Window(WINDOW), batch_size=4)
    values = torch.tensor(fit_sink_bias(objective))
    assert values.shape == (layers, 8)
    set_sink_bias(model, None)
    apply_head_mask(model, HeadMask.all_full(layers, KV_HEADS), Window(WINDOW))
    shares: list[list[list[Tensor]]] = [[[], []] for _ in range(layers)]

    def attend(number: int, _module: Any, call: AttentionCall) -> Tensor:
        assert isinstance(call.key, Tensor)
        keys = call.key[0].repeat_interleave(2, dim=0)
        scores = call.query[0] @ keys.mT * call.transform.scaling
        scores = scores if cap is None else cap * (scores / cap).tanh()
        for t in torch.linspace(WINDOW + 4, scores.shape[1] - 1, 32).long().tolist():
            sinks = scores[:, t, :4].exp().sum(-1)
            window = scores[:, t, t - WINDOW + 1 : t + 1].exp().sum(-1)
            bias = values[number].exp()
            shares[number][0].append((sinks / (sinks + window)).log())
            shares[number][1].append((bias / (bias + window)).log())
        return compute_attention(call._replace(backend="sdpa"))

    with contextlib.ExitStack() as stack, torch.no_grad():
        for number, module in enumerate(attention_modules(model)):
            stack.enter_context(replace_attention(module, partial(attend, number)))
        for answered in calibration.examples:
            model(torch.tensor([answered.input_ids]), use_cache=False)
    for wanted, reached in shares:
        mean = torch.stack(wanted).mean(0)
        torch.testing.assert_close(torch.stack(reached).mean(0), mean, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("length", [2, WINDOW + 3, WINDOW + 4])
@pytest.mark.parametrize("batch_size", [1, 4])
def test_the_estimate_leaves_out_examples_shorter_than_the_window(
    length: int, batch_size: int
) -> None:
    model, calibration = searchable()
    expected = fit_sink_bias(Objective(model, calibration, Window(WINDOW), batch_size=batch_size))
    first = calibration.examples[0]
    short = replace(first, input_ids=first.input_ids[-length:], answer_length=1)
    with_short = CalibrationSet((*calibration.examples, short))
    estimate = fit_sink_bias(Objective(model, with_short, Window(WINDOW), batch_size=batch_size))
    torch.testing.assert_close(torch.tensor(estimate), torch.tensor(expected), **_CLOSE)


def test_scores_with_reuse_equal_those_of_plain_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)  # as in the processes of a search
    model, calibration = searchable()
    objective = Objective(model, calibration, Window(WINDOW), batch_size=2)
    plain = objective.evaluate(random_mask(1))
    context = objective.context
    fit_sink_bias(objective)
    assert objective.context != context  # its evaluations differ from those without
    masks = [random_mask(seed) for seed in (1, 2, 1, 3)]
    for mask in masks:
        evaluation = objective.evaluate(mask, 2)
        expected = plain_score_of(model, calibration, mask, Window(WINDOW))
        assert evaluation.rank == pytest.approx(expected, abs=1e-4)
    assert objective.savings()["attention_of_both_kinds"]
    assert objective.evaluate(random_mask(1)).log_likelihood != plain.log_likelihood


def test_gate_gradients_are_those_of_the_blend_with_the_bias() -> None:
    model, calibration = searchable()
    objective = Objective(model.double(), calibration, Window(WINDOW))
    fit_sink_bias(objective)
    mask = random_mask(1)
    gradient = torch.tensor(objective.gate_gradient(mask).values)
    layouts = [HeadLayout.search([kind] * KV_HEADS) for kind in (None, Window(WINDOW))]
    module = attention_modules(model)[1]
    for head in range(KV_HEADS):
        likelihoods = []
        for step in (1e-3, -1e-3):
            gates = torch.tensor(mask.is_full[1]).double()[:, None]
            gates[head] += step
            with replace_attention(module, blended_attention(gates, layouts)):
                likelihoods.append(_log_likelihood(model, calibration))
        difference = (likelihoods[0] - likelihoods[1]) / 2e-3
        assert float(gradient[1, head]) == pytest.approx(difference, rel=1e-2, abs=1e-5)


def _log_likelihood(model: Any, calibration: CalibrationSet) -> float:
    total = 0.0
    for answered in calibration.examples:
        ids = torch.tensor([answered.input_ids])
        logs = logits_of(model, ids)[0].log_softmax(-1)
        first = ids.shape[1] - answered.answer_length
        for place in range(first, ids.shape[1]):
            total += float(logs[place - 1, ids[0, place]])
    return total / len(calibration)


def test_models_that_cannot_have_a_bias_are_refused() -> None:
    with pytest.raises(UserError, match="have a learned sink logit in every head already"):
        set_sink_bias(small_model("gpt_oss"), [[0.0] * 8] * 2)
    model = small_model()
    with pytest.raises(UserError, match=r"of shape \[3, 7\], expected finite numbers for 3 layers"):
        set_sink_bias(model, [[0.0] * 7] * LAYERS)
    set_sink_bias(model, [[0.0] * 8] * LAYERS)
    hybrid = materialize(model, random_mask(), Window(WINDOW))
    lacking = BACKENDS["flex"]._replace(lacks=("head_logits",), usable=lambda: True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(BACKENDS, "flex", lacking)
        with pytest.raises(UserError, match="flex has no extra logit per head, the model has"):
            hybrid.set_attn_implementation("flex")
    with pytest.raises(UserError, match="full in another has no sink bias of its own"):
        materialize_front(model, nested_front(LAYERS, KV_HEADS, [Window(WINDOW)]))
    hybrid.config.hybrid_attention["sinks"] = 2
    with pytest.raises(UserError, match="sink must be missing, or bias where sinks is 0"):
        deploy_layouts(hybrid.config)
