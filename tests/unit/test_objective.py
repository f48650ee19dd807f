"""S(z) against a plain re-implementation, exact reuse of lower layers, and refusals."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from bosch import hardware
from bosch.attention import LogitTransform, hybrid_attention
from bosch.attention.causal import masked_attention
from bosch.errors import RunError, UserError
from bosch.heads import HeadMask
from bosch.model.families import decoder_layers
from bosch.model.fingerprint import model_fingerprint
from bosch.model.search_mode import (
    apply_head_mask,
    mask_shape,
    prepare_for_search,
)
from bosch.objective import incremental_forward, memory
from bosch.objective.activation_cache import ActivationCache
from bosch.objective.answers import equal_but_rounding
from bosch.objective.block_bytes import BlockBytes, PeakMemory
from bosch.objective.calibration import CalibrationSet
from bosch.objective.decoder_shape import DecoderShape
from bosch.objective.evaluation_log import Evaluation
from bosch.objective.flops import sliding_pairs
from bosch.objective.incremental_forward import answer_attention
from bosch.objective.objective import Objective
from bosch.window import Window
from tests.attention_case import by_rows
from tests.hybrid_case import (
    KV_HEADS,
    LAYERS,
    OTHER_LAYERS,
    PLAIN,
    mask_of,
    random_mask,
    small_config,
    small_model,
    tokens,
)
from tests.search_case import WINDOW, answered, searchable

FULL = HeadMask.all_full(LAYERS, KV_HEADS)


def plain_score_of(model, calibration, mask, windows):
    """S(z) by its definition: one example at a time, with all logits."""
    apply_head_mask(model, mask, windows)
    exact, log_likelihood = 0, 0.0
    for example in calibration.examples:
        ids = torch.tensor([example.input_ids])
        with torch.inference_mode():
            logits = model(input_ids=ids, use_cache=False).logits[0]
        right = True
        for position in range(len(example.input_ids) - example.answer_length, ids.shape[1]):
            token = ids[0, position]
            right &= bool(logits[position - 1].argmax() == token)
            log_likelihood += float(logits[position - 1].log_softmax(-1)[token])
        exact += right
    return exact / len(calibration), log_likelihood / len(calibration)


def attention_flops(query, key, value, *args, **kwargs):
    """Operations on every pair of query and key that the CPU's kernel computes: logits, sums."""
    batch, heads, queries, dim = query.shape
    return 4 * batch * heads * queries * key.shape[2] * dim


def attention_backward_flops(gradient, query, key, value, *args, **kwargs):
    """Five products where the forward pass has two: logits again, and four gradients."""
    return attention_flops(query, key, value) * 5 // 2


FORMULAS = flop_registry | {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: attention_flops,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: attention_backward_flops,
}


class CountedFlops(TorchDispatchMode):
    """Operations by torch's formulas; before 2.15 torch lacks the CPU's attention kernels.

    torch's own mode takes twice the time, and cannot count by module if no gradient reaches a
    layer.
    """

    def __init__(self):
        super().__init__()
        self.total = 0
        # By operation: its formula, or None if it neither has one nor consists of others.
        self.formula_of = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func not in self.formula_of:
            formula = FORMULAS.get(func.overloadpacket)
            if formula is None:
                with self:
                    out = func.decompose(*args, **kwargs)
                if out is not NotImplemented:
                    return out
            self.formula_of[func] = formula
        out = func(*args, **kwargs)
        if formula := self.formula_of[func]:
            self.total += formula(*args, **kwargs, out_val=out)
        return out


@pytest.mark.parametrize("sinks", [0, 4])
@pytest.mark.parametrize("window", [8, 40])
def test_pairs_of_a_sliding_head_are_those_its_kernel_computes(window, sinks):
    for length in (3, 8, 12, 14, 40, 44, 45, 110, 200):
        query, layout = torch.randn(1, 2, length, 16), by_rows([False], Window(window, sinks))
        with torch.no_grad(), CountedFlops() as counter:
            hybrid_attention(query, query[:, :1], query[:, :1], layout)
        pairs = sliding_pairs(length, Window(window, sinks))
        assert counter.total == 4 * 16 * 2 * pairs


def masks_of_a_search():
    """As in Algorithm 1: the top layer first, then layers 1 and 2 with layer 0 changed before."""
    rng = np.random.default_rng(1)
    mask = FULL
    for layer in (2, 1, 0):
        for _ in range(4):
            mask = mask.with_layer(layer, rng.random(KV_HEADS) < 0.5)
            yield mask, layer
    for layer in (1, 2, 1):
        mask = mask.with_layer(0, rng.random(KV_HEADS) < 0.5)
        for _ in range(3):
            mask = mask.with_layer(layer, rng.random(KV_HEADS) < 0.5)
            yield mask, layer
    yield FULL, 0


def test_reuse_changes_no_bit_and_saves_operations():
    model, calibration = searchable()
    plain = Objective(model, calibration, Window(WINDOW), batch_size=2, reuse_bytes=0)
    expected = [plain.evaluate(mask) for mask, _ in masks_of_a_search()]
    for room in (20_000, 1 << 30):
        objective = Objective(model, calibration, Window(WINDOW), batch_size=2, reuse_bytes=room)
        objective.evaluate(FULL)
        with CountedFlops() as counter:
            measured = [objective.evaluate(mask, shared) for mask, shared in masks_of_a_search()]
        for ours, theirs in zip(measured, expected, strict=True):
            assert (ours.score, ours.log_likelihood) == (theirs.score, theirs.log_likelihood)
            assert ours.whole_pass_equivalents == theirs.whole_pass_equivalents
        reported = sum(e.full_forward_equivalents for e in measured)
        assert reported < 0.9 * sum(e.full_forward_equivalents for e in expected)
        assert objective.cache.peak_bytes <= room
        assert objective.cache.bytes == sum(e.nbytes for e in objective.cache.entries.values())
        whole = objective.whole_pass_operations(FULL)
        assert round(reported * whole) == counter.total
    assert model(torch.tensor([[5, 6, 7]])).logits.isfinite().all()


def test_a_mask_is_measured_first_on_the_examples_with_the_worst_earlier_results():
    """By running means in which the latest mask counts half."""
    model, calibration = searchable(examples=4)
    objective = Objective(model, calibration, Window(WINDOW), batch_size=1)
    for means in ((0.0, -8.0, 0.0, None), (-1.0, 0.0, 0.0, 0.0)):
        objective.observe(Evaluation(0.0, 0.0, round_likelihoods=means))
    bound = objective.evaluate(FULL, can_win=lambda *bounds: False)
    assert [mean is None for mean in bound.round_likelihoods] == [True, False, True, True]
    assert bound.is_bound and bound.score == 1.0
    assert not objective.evaluate(FULL, can_win=lambda *bounds: True).is_bound
    # Of a search with another batch size.
    objective.observe(Evaluation(0.0, 0.0, round_likelihoods=(-9.0,) * 5))
    again = objective.evaluate(FULL, can_win=lambda *bounds: False)
    assert again.round_likelihoods == bound.round_likelihoods


def test_attention_of_both_kinds_is_computed_once(monkeypatch):
    """By the first pass of a batch, in its first layer; later passes reuse it."""
    model, calibration = searchable()
    calls = []
    attention = incremental_forward.compute_attention

    def counted(*args, **kwargs):
        calls.append(args)
        return attention(*args, **kwargs)

    monkeypatch.setattr(incremental_forward, "compute_attention", counted)
    objective = Objective(model, calibration, Window(WINDOW), batch_size=2, reuse_bytes=1 << 30)
    mask = FULL
    for head in range(KV_HEADS):
        row = mask.is_full[0].copy()
        row[head] = False
        mask = mask.with_layer(0, row)
        objective.evaluate(mask)
        assert len(calls) == 2 * len({batch for _, _, batch in objective.cache.entries}) > 0


@pytest.mark.parametrize(("shared", "kept"), [(1, [True, True]), (0, [False, True])])
def test_attention_is_cached_in_higher_layers_where_passes_start(shared, kept):
    """At once if the search announces it, otherwise at the second pass."""
    torch.set_num_threads(1)
    objective = Objective(*searchable(), Window(WINDOW))
    objective.evaluate(FULL)
    for row, is_kept in zip(([False] * 4, [True, False] * 2), kept, strict=True):
        mask = FULL.with_layer(1, row)
        objective.evaluate(mask, shared)
        assert bool(objective.cache.get(mask, 1, 0).outputs) == is_kept


@pytest.mark.parametrize("family", [*PLAIN, *OTHER_LAYERS])
def test_operations_equal_torchs_count(family):
    """Also for the last layer's answers and reused attention outputs, in every family."""
    model, sinks = small_model(family), 2 * (family == "qwen3")
    layers = mask_shape(model.config)[0]
    full = HeadMask.all_full(layers, KV_HEADS)
    calibration = answered(model, examples=2)
    ours = Objective(model, calibration, Window(WINDOW, sinks))
    whole = Objective(model, calibration, Window(WINDOW, sinks), reuse_bytes=0, answers_only=False)
    other = full.with_layer(1, [True, False] * 2)
    masks = [full, other, other.with_layer(layers - 1, [False] * 4)]
    expected = [whole.evaluate(mask) for mask in masks]
    apply_head_mask(model, full, Window(WINDOW, sinks))
    ours.check_output_head(full)
    with CountedFlops() as counter:
        measured = [ours.evaluate(mask, shared_layers=1) for mask in masks]
    for mine, plain in zip(measured, expected, strict=True):
        assert plain.full_forward_equivalents == plain.whole_pass_equivalents
        assert mine.score == plain.score
        assert mine.log_likelihood == pytest.approx(plain.log_likelihood, abs=1e-4)
    assert ours.savings()["layer_inputs"]
    experts = any(parameter.ndim == 3 for parameter in model.parameters())
    if experts or decoder_layers(model.config).states:
        return  # torch counts neither grouped products of experts nor recurrences
    reported = sum(e.full_forward_equivalents for e in measured)
    assert round(reported * whole.whole_pass_operations(full)) == counter.total
    with CountedFlops() as counter:
        whole.evaluate(other)
    assert whole.whole_pass_operations(other) == counter.total


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("falcon_h1", {}),
        ("gemma2", {"layer_types": ["full_attention"] * 2 + ["sliding_attention"]}),
    ],
)
def test_a_last_layer_with_a_state_or_its_own_window_is_computed_at_all_positions(family, changes):
    """A state reads the tokens before, and a mask has no row for a window of the base model."""
    model = small_model(family, **changes)
    for name, weight in model.named_parameters():
        if "mamba" in name:
            weight.data *= 4  # a wrong state changes the likelihood of the answers
    calibration, window = answered(model, examples=2), Window(WINDOW)
    full = HeadMask.all_full(*mask_shape(model.config))
    objective = Objective(model, calibration, window)
    for mask in (full, full.with_layer(0, [True, False] * 2)):
        evaluation = objective.evaluate(mask)
        _, expected = plain_score_of(model, calibration, mask, window)
        assert evaluation.log_likelihood == pytest.approx(expected, abs=1e-4)
    assert not objective.savings()["last_layer_at_answers"]


@pytest.mark.parametrize("room", [0, 2**30], ids=["recomputed", "kept"])
@pytest.mark.parametrize(
    ("family", "sinks", "changes"),
    [
        ("qwen3", 0, {}),
        ("qwen3", 2, {}),
        ("phi3", 0, {}),
        ("glm4", 0, {}),
        ("gemma3_text", 0, {"layer_types": ["sliding_attention"] * 2 + ["full_attention"]}),
        ("beam", 0, {}),
        ("biogpt", 0, {}),
        ("cohere2", 0, {"layer_types": ["sliding_attention"] + ["full_attention"] * 2}),
        ("gemma4_text", 0, {}),
        ("gpt_neox", 0, {}),
        ("gpt_neox", 0, {"use_parallel_residual": False}),
        ("granitemoeshared", 0, {}),
        ("hyperclovax", 0, {}),
        ("nemotron_h", 0, {"layers_block_type": ["full_attention", "mlp", "full_attention"]}),
        ("opt", 0, {}),
        ("opt", 0, {"do_layer_norm_before": False}),
        ("phi", 0, {}),
        ("stablelm", 0, {"use_parallel_residual": True}),
    ],
)
def test_operations_of_a_gradient_equal_torchs_count(family, sinks, changes, room):
    model = small_model(family, **changes)
    model.set_experts_implementation("eager")  # torch does not count grouped products
    calibration = answered(model, examples=5)
    objective = Objective(model, calibration, Window(WINDOW, sinks), batch_size=2, reuse_bytes=room)
    mask = mask_of(model.config)
    full = HeadMask.all_full(*mask.choices.shape)
    apply_head_mask(model, full, Window(WINDOW, sinks))
    objective.check_output_head(full)
    assert objective.sizes.shape.layers  # measured before the operations are counted
    with CountedFlops() as counter:
        measured = objective.gate_gradient(mask, share=1, shares=2)
    whole = objective.whole_pass_operations(full)
    assert round(measured.full_forward_equivalents * whole) == counter.total
    low, high = (1, 3.2) if room else (1.5, 4.5)
    assert low < measured.full_forward_equivalents * 5 / 2 < high
    assert measured.full_forward_equivalents <= objective.gradient_passes(1, 2)


@pytest.mark.parametrize("menu", [[WINDOW], [WINDOW, 5], [WINDOW, 5, 3]])
def test_cached_bytes_of_a_layer_are_those_that_plan_states(menu):
    """For an example at a layer where passes start: its input and its attention."""
    model, _ = searchable()
    calibration = CalibrationSet.from_records(([1, 2] * 12 + [row], 1) for row in range(3))
    windows = [Window(size) for size in menu]
    objective = Objective(model, calibration, windows, reuse_bytes=1 << 30)
    for seed in range(3):
        choices = FULL.choices.copy()
        choices[1:] = mask_of(model.config, seed).choices[1:]
        objective.evaluate(HeadMask.of_choices(choices), shared_layers=1)
    kept = [entry.nbytes for (layer, *_), entry in objective.cache.entries.items() if layer == 1]
    assert kept == [memory.activation_sizes(model).layer_entry(25, len(menu))] * 3


def blocks_of(value_bytes):
    """An MLP of 16 numbers, and two norms of 8 that keep float32 of half precision."""
    block = [16 * number * value_bytes for number in (4, 3, 4, 7)]
    return BlockBytes(block[0], block[1] + 64, *block[2:], norms=64, plain_feed_forward=block[0])


def narrow_shape():
    """Two layers of width 8, with two query heads of four numbers that share a KV head."""
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 4}
    return DecoderShape.of(small_config("qwen3", hidden_size=8, num_hidden_layers=2, **heads))


def searchable_with(family, reuse_bytes=0, **changes):
    model = small_model(family, **changes)
    calibration = answered(model, examples=2)
    objective = Objective(model, calibration, Window(WINDOW), batch_size=2, reuse_bytes=reuse_bytes)
    return objective, calibration


# The last one's feed-forward blocks return their routing, too.
@pytest.mark.parametrize("family", ["qwen3", "granitemoe", "cohere", "gpt_oss"])
def test_recomputed_layers_give_bit_identical_gradients(family):
    results = []
    for room in (0, 2**30):
        objective, _ = searchable_with(family, room)
        results.append(objective.gate_gradient(mask_of(objective.model.config)))
    assert results[0].values == results[1].values
    assert results[0].full_forward_equivalents > 1.2 * results[1].full_forward_equivalents


def test_a_window_must_be_shorter_than_the_longest_example():
    model, calibration = searchable()
    Objective(model, calibration, Window(calibration.max_length - 1))
    for window in (Window(calibration.max_length), Window(calibration.max_length - 4, sinks=4)):
        with pytest.raises(UserError, match="no shorter than the longest"):
            Objective(model, calibration, window)


@pytest.mark.parametrize("layers", [2, 6])
def test_a_gradient_that_keeps_activations_stays_within_its_formula(layers):
    """With one byte less than the formula says, layers are recomputed."""
    objective, calibration = searchable_with("qwen3", 2**30, num_hidden_layers=layers)
    mask = HeadMask.all_sliding(layers, KV_HEADS)
    objective.gate_gradient(mask)
    with PeakMemory() as peak:
        kept = objective.gate_gradient(mask)
    sizes = memory.activation_sizes(objective.model)
    needed = sizes.gradient_without_recompute(
        1, calibration.max_length, WINDOW
    )  # a round is a batch
    assert peak.peak <= needed
    objective.cache.max_bytes = needed
    assert objective.gate_gradient(mask).full_forward_equivalents == kept.full_forward_equivalents
    for objective.cache.max_bytes, objective.cache.bytes in ((needed - 1, 0), (needed, 1)):
        recomputed = objective.gate_gradient(mask)
        assert recomputed.full_forward_equivalents > kept.full_forward_equivalents


@pytest.mark.parametrize(
    ("family", "most"),  # the last one has layers of three kinds
    [
        *((name, 1.35) for name in ("apertus", "nemotron", "granitemoe", "bamba")),
        ("nemotron_h", 1.5),
    ],
)
def test_memory_of_blocks_of_every_kind_is_stated(family, most):
    """For a pass, a gradient that recomputes layers, and one that keeps them."""
    model = small_model(family, hidden_size=128, intermediate_size=256)
    calibration = CalibrationSet.from_records([(tokens(1, 256)[0].tolist(), 4)])
    objective = Objective(model, calibration, Window(64), reuse_bytes=0)
    mask = HeadMask.all_sliding(*objective.shape)
    objective.evaluate(mask)  # with the checks of the first pass
    sizes = memory.activation_sizes(model)
    for stated, room, measure in (
        (sizes.plain_pass(1, 256), 0, objective.evaluate),
        (sizes.gradient(1, 256, 64), 0, objective.gate_gradient),
        (sizes.gradient_without_recompute(1, 256, 64), 2**30, objective.gate_gradient),
    ):
        objective.cache.max_bytes = room
        with PeakMemory() as peak:
            measure(mask)
        assert 1 <= stated / peak.peak <= most


@pytest.mark.parametrize(
    ("value_bytes", "shards", "sharing", "windows", "needed", "kept"),
    [
        (4, 1, 1, [8], 66560, 89344), (2, 1, 1, [8], 36864, 55424),
        (4, 1, 1, [8, 4], 70656, 107968), (4, 2, 1, [8], 43520, 52864),
        (4, 1, 2, [8], 47616, 65536),
    ],
)  # fmt: skip
def test_memory_of_a_gradient_by_formula_has_not_changed(
    value_bytes, shards, sharing, windows, needed, kept
):
    """Values of the last comparison with peaks."""
    sizes = memory.ActivationSizes(
        narrow_shape(), blocks_of(value_bytes), value_bytes, shards, sharing
    )
    assert sizes.gradient(2, 32, *windows) == needed
    assert sizes.gradient_without_recompute(2, 32, *windows) == kept


def test_no_pass_makes_logits_of_a_whole_example():
    """Those of 32k tokens and a large vocabulary take 20 GB."""
    model, calibration = searchable()
    counts = []
    model.get_output_embeddings().register_forward_pre_hook(
        lambda module, args: counts.append(args[0].shape[:-1].numel())
    )
    Objective(model, calibration, Window(WINDOW)).evaluate(FULL)
    assert 0 < max(counts) < min(len(example.input_ids) for example in calibration.examples)


def test_gradients_do_not_depend_on_how_many_tokens_are_recomputed_at_a_time(monkeypatch):
    objective, _ = searchable_with("qwen3")
    ours = np.array(objective.gate_gradient(random_mask(0)).values)
    monkeypatch.setattr("bosch.objective.patching.RECOMPUTED_TOKENS", 7)
    measured = np.array(objective.gate_gradient(random_mask(0)).values)
    assert np.allclose(measured, ours, rtol=1e-4, atol=1e-6 * np.abs(ours).max())


def test_a_gradient_keeps_only_the_input_of_each_layer():
    peaks = []
    for layers in (2, 6):
        objective, calibration = searchable_with("qwen3", num_hidden_layers=layers)
        mask = HeadMask.all_sliding(layers, KV_HEADS)
        objective.evaluate(mask)
        assert objective.sizes.shape.layers == layers  # measured before the peak
        with PeakMemory() as memory:
            objective.gate_gradient(mask)
        peaks.append(memory.peak)
    state = 4 * 2 * calibration.max_length * objective.model.config.hidden_size
    assert peaks[1] - peaks[0] <= 1.25 * 4 * state


def test_reuse_is_switched_off_if_a_layer_is_no_function_of_its_input(caplog):
    model, calibration = searchable()
    objective = Objective(model, calibration, Window(WINDOW), batch_size=2)
    calls = []

    def drift(module, args, output):
        calls.append(1)
        return output + 0.01 * len(calls)

    apply_head_mask(model, FULL, Window(WINDOW))
    objective.check_output_head(FULL)
    model.get_decoder().layers[2].register_forward_hook(drift)
    for _ in range(2):  # attention of both kinds fails first, then the layers' inputs
        objective.evaluate(FULL, shared_layers=1)
        objective.evaluate(FULL.with_layer(2, [False] * KV_HEADS), shared_layers=1)
    assert "switched off" in caplog.text
    assert not any(objective.savings()[n] for n in ("layer_inputs", "attention_of_both_kinds"))
    costs = [objective.evaluate(FULL, shared_layers=1).full_forward_equivalents for _ in range(2)]
    assert costs[0] == costs[1] > 0.7


def test_inputs_of_layers_are_reused_even_if_attention_of_both_kinds_is_not_exact(
    monkeypatch, caplog
):
    """A kernel's last bits may depend on the heads that are computed together."""
    torch.set_num_threads(1)
    model, calibration = searchable()
    plain = Objective(model, calibration, Window(WINDOW), batch_size=2, reuse_bytes=0)
    expected = [plain.evaluate(mask).log_likelihood for mask, _ in masks_of_a_search()]
    objective = Objective(model, calibration, Window(WINDOW), batch_size=2)
    mix = incremental_forward.BatchPass.mix

    def noisy(self, row, outputs):
        mixed = mix(self, row, outputs)
        # At all positions, not only at the answers.
        return mixed if mixed.shape[1] < 10 else mixed * (1 + 1e-6)

    monkeypatch.setattr(incremental_forward.BatchPass, "mix", noisy)
    measured = [objective.evaluate(mask, shared) for mask, shared in masks_of_a_search()]
    assert [e.log_likelihood for e in measured] == expected
    assert objective.savings() == {
        "layer_inputs": True, "attention_of_both_kinds": False, "last_layer_at_answers": True,
    }  # fmt: skip
    assert measured[2].full_forward_equivalents < 0.5
    assert "layers' inputs are still reused" in caplog.text


def test_memory_for_reuse_is_the_free_memory_less_a_gradient(monkeypatch):
    model = small_model()
    needed = memory.activation_sizes(model).gradient(2, 64, WINDOW)
    monkeypatch.setattr(memory, "free_host_memory", lambda: 4 * needed + 100)
    assert memory.reuse_room(model, Window(WINDOW), 2, 64) == (3 * needed + 100) // 2
    assert memory.reuse_room(model, Window(WINDOW), 2, 64, processes=8) == 0


_UNLIMITED = 2**63 - 4096


@pytest.mark.parametrize(
    ("group", "files", "total", "free", "cores"),
    [
        ("", {}, 100, 50, 64),
        # cgroups version 2, at the root in a container, else in a folder: the smallest limit holds.
        ("0::/", {"memory.max": "40960", "memory.current": "30720"}, 40, 10, 64),
        ("0::/", {"cpu.max": "250 100"}, 100, 50, 3),
        ("0::/", {"memory.max": "max", "memory.current": "9", "cpu.max": "max 100"}, 100, 50, 64),
        (
            "0::/a/b",
            {
                "a/memory.max": "40960", "a/memory.current": "35840",
                "a/memory.stat": "anon 1\ninactive_file 15360", "a/b/memory.max": "81920",
                "a/b/memory.current": "1024", "a/b/cpu.max": "max 100", "a/cpu.max": "50 100",
            },
            40, 20, 1,
        ),
        ("0::/../../of/the/host", {"memory.max": "40960", "memory.current": "0"}, 40, 40, 64),
        # Version 1, alone or together with a version 2 that sets no limits.
        (
            "4:memory:/docker/1\n2:cpu,cpuacct:/docker/1\n0::/",
            {
                "memory/docker/1/memory.limit_in_bytes": "40960",
                "memory/docker/1/memory.usage_in_bytes": "30720",
                "memory/docker/1/memory.stat": "inactive_file 1\ntotal_inactive_file 5120",
                "memory/memory.limit_in_bytes": str(_UNLIMITED),
                "cpu,cpuacct/docker/1/cpu.cfs_quota_us": "400",
                "cpu,cpuacct/docker/1/cpu.cfs_period_us": "200",
            },
            40, 15, 2,
        ),
        (
            "4:memory:/path/of/the/host\n1:cpu:/path",
            {
                "memory/memory.limit_in_bytes": "40960", "memory/memory.usage_in_bytes": "0",
                "cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100",
            },
            40, 40, 64,
        ),
    ],
)  # fmt: skip
def test_memory_and_cores_are_those_of_the_machine_or_its_container(
    tmp_path, monkeypatch, group, files, total, free, cores
):
    """In KiB, on a machine with 100 KiB, of which 50 are free, and 64 cores."""
    proc, cgroups = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text("MemTotal:  100 kB\nMemAvailable: 50 kB\n")
    (proc / "self" / "cgroup").write_text(group)
    for name, content in files.items():
        (cgroups / name).parent.mkdir(parents=True, exist_ok=True)
        (cgroups / name).write_text(f"{content}\n")
    monkeypatch.setattr(hardware.os, "sched_getaffinity", lambda _: range(64))
    assert hardware.host_memory(proc, cgroups) == total * 1024
    assert hardware.free_host_memory(proc, cgroups) == free * 1024
    assert hardware.cpu_cores(proc, cgroups) == cores


def test_no_memory_is_stated_if_the_machine_does_not_report_it(tmp_path, monkeypatch):
    with pytest.raises(RunError, match="does not say the MemTotal"):
        hardware.host_memory(tmp_path)
    monkeypatch.setattr(memory, "free_host_memory", lambda: hardware.host_memory(tmp_path))
    with pytest.raises(RunError, match=r"set runtime\.reuse_memory to a size"):
        memory.reuse_room(small_model(), Window(WINDOW), 2, 64)


@pytest.mark.parametrize("sinks", [0, 2])
def test_masks_of_several_windows_are_scored_by_definition(sinks):
    """With and without reuse, and with the operations that torch counts in a plain pass."""
    model, calibration = searchable()
    windows = [Window(size, sinks) for size in (WINDOW, 2 * WINDOW, 3)]
    reusing = Objective(model, calibration, windows, batch_size=4)
    plain = Objective(model, calibration, windows, batch_size=4, reuse_bytes=0, answers_only=False)
    generator = np.random.default_rng(sinks)
    first = generator.integers(0, 4, (LAYERS, KV_HEADS))
    scored = set()
    for layer in [*range(LAYERS), *range(LAYERS)]:
        first[layer] = generator.integers(0, 4, KV_HEADS)
        mask = HeadMask.of_choices(first)
        ours = reusing.evaluate(mask)
        apply_head_mask(model, mask, windows)
        plain.check_output_head(mask)
        with CountedFlops() as counter:
            whole = plain.evaluate(mask)
        assert ours.score == whole.score
        assert ours.log_likelihood == pytest.approx(whole.log_likelihood, abs=1e-4)
        full = plain.whole_pass_operations(FULL)
        assert round(whole.full_forward_equivalents * full) == counter.total
        exact, likelihood = plain_score_of(model, calibration, mask, windows)
        assert ours.score == exact
        assert ours.log_likelihood == pytest.approx(likelihood, abs=1e-4)
        scored.add(ours.log_likelihood)
    assert len(scored) == 2 * LAYERS and reusing.savings()["attention_of_both_kinds"]
    assert reusing.context.window_size == [2 * WINDOW, WINDOW, 3]
    # One window gives bit-identical results alone and in a menu.
    one = Objective(model, calibration, windows[0], batch_size=4).evaluate(random_mask())
    menu = Objective(model, calibration, windows[::2], batch_size=4)
    assert menu.evaluate(HeadMask(random_mask().is_full)).log_likelihood == one.log_likelihood


@pytest.mark.parametrize("is_full", [True, False])
def test_answers_are_computed_in_groups_if_their_logits_would_fill_the_memory(is_full):
    query, key, value = (torch.randn(3, heads, n, 8) for heads, n in ((4, 2), (2, 9), (2, 9)))
    columns = torch.tensor([[3, 4], [7, 8], [5, 5]])
    layout = by_rows([is_full] * 2, Window(3, 1))
    whole = answer_attention(query, key, value, columns, layout, LogitTransform(0.3))
    kernel, groups = torch.nn.functional.scaled_dot_product_attention, []

    def counted(query, *args, **kwargs):
        groups.append(len(query))
        return kernel(query, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.nn.functional, "scaled_dot_product_attention", counted)
        for size in (1, 4 * 2 * 9 * 2, 2**27):
            parts = answer_attention(
                query, key, value, columns, layout, LogitTransform(0.3), max_logits=size
            )
            torch.testing.assert_close(parts, whole)
    assert groups == [1, 1, 1, 2, 1, 3]
    for row in range(3):
        for number, column in enumerate(columns[row].tolist()):
            visible = [k for k in range(column + 1) if is_full or k > column - 3 or k < 1]
            for head in range(4):
                logits = key[row, head // 2, visible] @ query[row, head, number] * 0.3
                expected = logits.softmax(0) @ value[row, head // 2, visible]
                torch.testing.assert_close(whole[row, number, head], expected)


def test_nan_or_infinite_results_end_the_search():
    model, calibration = searchable()
    objective = Objective(model, calibration, Window(WINDOW))
    objective.evaluate(FULL)
    with torch.no_grad():
        model.get_decoder().norm.weight[0] = float("nan")
    with pytest.raises(RunError, match=r"not finite .* model\.norm\.weight of the model holds"):
        objective.evaluate(FULL)
    with pytest.raises(RunError, match="gradients are not finite"):
        objective.gate_gradient(FULL)
    with torch.no_grad():
        model.get_decoder().norm.weight[0] = 3e38
    with pytest.raises(RunError, match=r"not finite .* even in float32"):
        objective.evaluate(FULL)
    model.bfloat16()
    with pytest.raises(RunError, match=r"not finite .* try model\.dtype float32"):
        objective.evaluate(FULL)


def test_a_calibration_set_in_other_tokens_is_refused():
    for highest in (small_model().config.vocab_size, 999):
        examples = CalibrationSet.from_records([([4] * 40 + [highest], 1)])
        with pytest.raises(
            UserError, match=f"token id {highest}, the model's vocabulary ends at 60"
        ):
            Objective(small_model(), examples, Window(WINDOW))


def test_the_fingerprint_depends_on_weights_and_dtypes():
    one, same, other = small_model(seed=0), small_model(seed=0), small_model(seed=1)
    assert model_fingerprint(one) == model_fingerprint(same)
    assert model_fingerprint(one) != model_fingerprint(other)
    assert model_fingerprint(one) != model_fingerprint(same.bfloat16())
    norm = one.model.norm.weight
    prints = {model_fingerprint(one)}
    for index in range(len(norm)):  # for small weights, on every value
        with torch.no_grad():
            norm[index] += 1
        prints.add(model_fingerprint(one))
    assert len(prints) == 1 + len(norm)


def test_the_fingerprint_depends_on_the_configuration():
    one = small_model()
    before = model_fingerprint(one)
    for name, value in (("use_cache", False), ("_name_or_path", "elsewhere")):
        setattr(one.config, name, value)
        assert model_fingerprint(one) == before
    one.config.rope_parameters["rope_theta"] *= 2
    assert model_fingerprint(one) != before


def test_calibration_files_are_read_or_refused_with_the_reason(tmp_path):
    path = tmp_path / "calibration.jsonl"
    record = {"task": "x", "index": 0, "seed": 1, "input_ids": [1, 2, 3], "answer_length": 1}
    path.write_text(f"{json.dumps(record)}\n \n" + json.dumps({**record, "input_ids": [1, 2]}))
    loaded = CalibrationSet.load(path)
    assert (len(loaded), loaded.max_length) == (2, 3)
    assert loaded == CalibrationSet.from_records([([1, 2, 3], 1, "x"), ([1, 2], 1, "x")])
    assert loaded == CalibrationSet.load(tmp_path)  # as prepare writes it
    few = [([1, 2, 3], 1), ([1, 2, 3], 2), ([1, 2, 4], 1)]
    assert len({CalibrationSet.from_records([record]).fingerprint for record in few}) == 3
    for damage in (
        "",
        "{",
        "[" * 100_000,
        "\udcff",
        json.dumps({**record, "answer_length": 3}),
        json.dumps({**record, "answer_length": 0}),
        json.dumps({**record, "answer_length": 1.5}),
        json.dumps({**record, "input_ids": [1, -2, 3]}),
        json.dumps({**record, "input_ids": [1, 2**31, 3]}),
        json.dumps({**record, "input_ids": ["1", "2", "3"]}),
        '{"input_ids": 3}',
    ):
        path.write_text(damage, errors="surrogateescape")
        with pytest.raises(UserError, match=r"calibration\.jsonl"):
            CalibrationSet.load(path)
    for other in ("null", "7", '"x"', "[1]", "{}", '{"input_ids": 3, "answer_length": 1}'):
        path.write_text(other)
        with pytest.raises(UserError, match=r"\(expected input_ids and answer_length.*; name it"):
            CalibrationSet.load(path, "name it")
    with pytest.raises(UserError, match="cannot read"):
        CalibrationSet.load(tmp_path / "absent.jsonl")
    os.mkfifo(tmp_path / "pipe.jsonl")
    with pytest.raises(UserError, match="is a pipe"):
        CalibrationSet.load(tmp_path / "pipe.jsonl")


def test_results_by_example_have_the_mean_of_the_evaluation() -> None:
    model, calibration = searchable()
    objective = Objective(model, calibration, Window(WINDOW), batch_size=2)
    mask = HeadMask(np.arange(12).reshape(3, 4) % 3 > 0)
    results = objective.example_results(mask)
    evaluation = objective.evaluate(mask)
    assert results.shape == (len(calibration), 2) and objective.quantum == 1 / len(calibration)
    assert results[:, 0].mean().item() == pytest.approx(evaluation.score)
    assert results[:, 1].mean().item() == pytest.approx(evaluation.log_likelihood)
    for place in range(len(calibration)):
        alone = Objective(model, CalibrationSet((calibration.examples[place],)), Window(WINDOW))
        own = alone.evaluate(mask)
        assert results[place].tolist() == pytest.approx([own.score, own.log_likelihood], rel=1e-4)


def test_least_recently_used_activations_are_evicted() -> None:
    """Of two inputs that no late pass used, the one that was looked up last stays."""
    mask, cache = HeadMask.all_full(8, 1), ActivationCache(8, 12)
    for layer in (1, 2, 3):
        cache.begin(mask, 0)
        cache.add(mask, layer, 0, torch.zeros(1))
    assert cache.bytes == 12
    cache.begin(mask, 0)
    assert cache.get(mask, 1, 0) is not None and cache.get(mask, 5, 0) is None
    for _ in range(3):
        cache.begin(mask, 0)
    cache.add(mask, 4, 0, torch.zeros(1))
    assert [layer for layer, *_ in cache.entries] == [3, 1, 4] and cache.bytes == 12


def test_activations_of_the_last_two_passes_stay_unless_coming_passes_need_room() -> None:
    mask, cache = HeadMask.all_full(8, 1), ActivationCache(8, 8)
    cache.begin(mask, 0)
    for layer in (1, 2, 3):
        cache.add(mask, layer, 0, torch.zeros(1))
    cache.begin(mask, 0)
    cache.add(mask, 3, 0, torch.zeros(1))
    assert [layer for layer, *_ in cache.entries] == [1, 2]
    cache.begin(mask, 4)  # coming passes start at layer 4
    assert cache.is_pinned(4) and not cache.is_pinned(1)
    cache.add(mask, 4, 0, torch.zeros(1))
    assert [layer for layer, *_ in cache.entries] == [2, 4]
    for layer, batch, size in (
        (4, 1, 2),  # more than is free without evicting what is pinned
        (5, 0, 3),  # more than may be cached in all
    ):
        assert not cache.has_room(mask, layer, batch, 4 * size)
        cache.add(mask, layer, batch, torch.zeros(size))
        assert [layer for layer, *_ in cache.entries] == [2, 4]  # nothing is evicted in vain
    assert cache.has_room(mask, 4, 1, 4) and cache.bytes == cache.peak_bytes == 8


def test_attention_of_every_choice_is_computed_only_if_it_can_be_cached() -> None:
    """With too little memory for it, a search costs no more than without reuse."""
    costs = []
    for room in (0, 2000, 2**30):
        model, calibration = searchable(examples=4)
        prepare_for_search(model, "sdpa")
        objective = Objective(model, calibration, Window(8), batch_size=2, reuse_bytes=room)
        masks = [random_mask(seed) for seed in range(6)]
        costs.append(sum(objective.evaluate(mask).full_forward_equivalents for mask in masks))
    assert costs[0] >= costs[1] > costs[2]


def scaled_states(model, input_ids, use_cache=None):
    states = model.get_decoder()(input_ids, use_cache=False).last_hidden_state
    return SimpleNamespace(logits=model.get_output_embeddings()(1.05 * states))


def scaled_logits(forward, *args, **kwargs):
    output = forward(*args, **kwargs)
    output.logits = 1.05 * output.logits
    return output


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_that_computes_more_than_layers_and_head_is_refused(dtype):
    model, calibration = searchable()
    model.to(dtype)
    Objective(model, calibration, Window(WINDOW)).evaluate(random_mask())
    if dtype == torch.float32:
        model.forward = partial(scaled_states, model)
    else:
        model.forward = partial(scaled_logits, model.forward)
    with pytest.raises(UserError, match="head, or its logits after it, in a way that the search"):
        Objective(model, calibration, Window(WINDOW)).evaluate(random_mask())


def test_rounding_of_two_kernels_in_half_precision_counts_as_equal():
    states = torch.randn(200, 64)
    other = states + 0.005 * torch.randn(200, 64)
    assert equal_but_rounding(states, other, torch.bfloat16)
    assert not equal_but_rounding(states, other, torch.float32)
    assert equal_but_rounding(states, other, torch.float32, 10)
    other[:, 7] = -torch.inf  # as in a model that masks words of its vocabulary
    assert not equal_but_rounding(other, states, torch.bfloat16)
    assert not equal_but_rounding(states, other, torch.bfloat16)
    assert equal_but_rounding(other, other.clone(), torch.float32)


def test_norms_after_the_block_and_kept_scores_add_to_a_gradients_memory():
    """32 tokens x 2; of 8 query heads of 2 numbers 1,024 scores a row, a window's 24 a token."""
    blocks = replace(blocks_of(4), both_feed_forward=0)  # so that attention needs the most memory
    plain = memory.ActivationSizes(narrow_shape(), blocks, 4)
    follows = replace(plain, shape=replace(plain.shape, norm_follows=True))
    assert follows.gradient(2, 32, 8) == plain.gradient(2, 32, 8) + 64 * blocks.plain_feed_forward
    assert follows.gradient_without_recompute(2, 32, 8) == plain.gradient_without_recompute(
        2, 32, 8
    )
    shape = DecoderShape.of(small_config("gemma2", num_attention_heads=8, head_dim=8))
    assert shape.norms == 4 and shape.norm_follows and shape.softcap and shape.capped
    assert DecoderShape.of(small_config("gemma3_text")).capped
    gpt_oss = DecoderShape.of(small_config("gpt_oss"))
    assert gpt_oss.head_logits and memory.ActivationSizes.of(gpt_oss, 4).keeps_scores
    assert not memory.ActivationSizes.of(gpt_oss, 4, attention="flex").keeps_scores
    sizes = memory.ActivationSizes.of(shape, 4)
    scores = 8 * 2 * 8 * (32 * 32 + 32 * 24)
    fused = replace(sizes, keeps_scores=False)
    (window,) = shape.kinds.windows.values()  # of a layer with one choice, not those of a gate
    own = shape.score_bytes(16, 32, Window(window), 4)
    gated = shape.full_layers * scores
    assert (
        sizes.gradient_without_recompute(2, 32, 8)
        == fused.gradient_without_recompute(2, 32, 8) + gated + own
    )
    without = replace(fused, shape=replace(shape, kinds=replace(shape.kinds, windows={})))
    own = 4 * 64 * (2 * shape.own_query_size + 2 * shape.kinds.own_heads * shape.kinds.own_head_dim)
    assert (
        fused.gradient_without_recompute(2, 32, 8)
        == without.gradient_without_recompute(2, 32, 8) + own
    )
    piece = 8 * 2 * 8 * 32**2
    assert sizes.gradient(2, 32, 8) == fused.gradient(2, 32, 8) + scores + piece
    assert sizes.plain_pass(2, 32) == fused.plain_pass(2, 32) + 20 * 2 * 8 * 32**2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("softcap", [None, 30.0])
def test_scores_take_the_bytes_that_autograd_stores(
    dtype: torch.dtype, softcap: float | None
) -> None:
    """Without the mask, queries, keys and values, which are small beside 512 x 512 scores."""
    heads, length, dim = 8, 512, 8
    states = [torch.randn(1, heads, length, dim, dtype=dtype, requires_grad=True) for _ in "qkv"]
    head_logits = None if softcap else torch.zeros(heads, requires_grad=True)
    sizes: dict[int, int] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    transform = LogitTransform(dim**-0.5, softcap, head_logits)
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        masked_attention(*states, transform, 0.0, is_causal=True).sum()
    config = small_config("gemma2" if softcap else "gpt_oss")
    stated = DecoderShape.of(config).score_bytes(heads, length, None, dtype.itemsize)
    assert stated <= sum(sizes.values()) <= 1.1 * stated
