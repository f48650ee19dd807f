"""S(z) and its gradients against plain re-implementations, and refusals."""

from __future__ import annotations

import json
from functools import partial
from types import SimpleNamespace
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from bosch import hardware
from bosch.attention import hybrid_attention
from bosch.errors import RunError, UserError
from bosch.masks import HeadMask
from bosch.model.families import decoder_layers
from bosch.model.fingerprint import model_fingerprint
from bosch.model.search_mode import (
    apply_head_mask,
    mask_shape,
)
from bosch.score import objective as objectives
from bosch.score.answers import equal_but_rounding
from bosch.score.calibration import CalibrationSet
from bosch.score.flops import sliding_pairs
from bosch.score.objective import Objective
from bosch.window import Window
from tests.attention_case import by_rows
from tests.hybrid_case import (
    KV_HEADS,
    LAYERS,
    TESTED,
    mask_of,
    of_choices,
    random_mask,
    small_model,
)
from tests.peak_memory import TensorBytes
from tests.search_case import WINDOW, answered, searchable

FULL = HeadMask.all_full(LAYERS, KV_HEADS)


def plain_score_of(model, calibration, mask):
    """S(z) by its definition: one example at a time, with all logits."""
    apply_head_mask(model, mask)
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


def attention_flops(query, key, *args, **kwargs):
    """Operations on every pair of query and key that the CPU's kernel computes: logits, sums."""
    batch, heads, queries, dim = query
    return 4 * batch * heads * queries * key[2] * dim


def attention_backward_flops(gradient, query, key, *args, **kwargs):
    """Five products where the forward pass has two: logits again, and four gradients."""
    return attention_flops(query, key) * 5 // 2


class CountedFlops(FlopCounterMode):
    """torch's own count, also of the CPU's attention kernels, which it lacks before 2.15.

    Not by module, which fails where no gradient reaches a layer.
    """

    def __init__(self):
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        formulas = {kernel: attention_flops, backward: attention_backward_flops}
        super().__init__(display=False, custom_mapping=formulas)
        self.mod_tracker = MagicMock(parents={"Global"})

    @property
    def total(self):
        return self.get_total_flops()


@pytest.mark.parametrize("sinks", [0, 4])
@pytest.mark.parametrize("window", [8, 40])
def test_pairs_of_a_sliding_head_are_those_its_kernel_computes(window, sinks):
    for length in (3, 8, 12, 14, 40, 44, 45, 110, 200):
        query, layout = torch.randn(1, 2, length, 16), by_rows([False], Window(window, sinks))
        with torch.no_grad(), CountedFlops() as counter:
            hybrid_attention(query, query[:, :1], query[:, :1], layout)
        pairs = sliding_pairs(length, Window(window, sinks))
        assert counter.total == 4 * 16 * 2 * pairs


@pytest.mark.parametrize("family", TESTED)
def test_a_mask_is_scored_by_definition_in_the_operations_that_torch_counts(family):
    model, window = small_model(family), Window(WINDOW, 2 * (family == "qwen3"))
    layers = mask_shape(model.config)[0]
    full = HeadMask.all_full(layers, KV_HEADS)
    calibration = answered(model, examples=2)
    objective = Objective(model, calibration, window)
    experts = any(parameter.ndim == 3 for parameter in model.parameters())
    objective.evaluate(full)
    layer, head = np.indices(full.shape)
    for is_full in ((layer != 1) | (head % 2 == 0), layer != layers - 1):
        mask = HeadMask.of(is_full, window)
        with CountedFlops() as counter:
            evaluation = objective.evaluate(mask)
        score, log_likelihood = plain_score_of(model, calibration, mask)
        assert evaluation.score == score
        assert evaluation.log_likelihood == pytest.approx(log_likelihood, abs=1e-4)
        passes = objective.whole_pass_operations(mask) / objective.full_pass_operations
        assert evaluation.full_forward_equivalents == passes
        # torch counts neither grouped products of experts nor recurrences
        if not experts and not decoder_layers(model.config).states:
            assert objective.whole_pass_operations(mask) == counter.total


@pytest.mark.parametrize(
    ("family", "sinks", "changes", "recompute"),
    [
        ("qwen3", 2, {}, True),
        ("qwen3", 2, {}, False),
        ("phi3", 0, {}, False),
        ("gemma3_text", 0, {"layer_types": ["sliding_attention"] * 2 + ["full_attention"]}, False),
        ("gpt_neox", 0, {}, False),
        ("granitemoeshared", 0, {}, False),
        ("nemotron_h", 0, {"layers_block_type": ["full_attention", "mlp", "full_attention"]}, True),
        ("opt", 0, {}, False),
    ],
)
def test_operations_of_a_gradient_are_those_that_torch_counts(family, sinks, changes, recompute):
    model = small_model(family, **changes)
    model.set_experts_implementation("eager")  # torch does not count grouped products
    calibration = answered(model, examples=5)
    objective = Objective(model, calibration, Window(WINDOW, sinks), batch_size=2)
    objective._recomputes = recompute
    mask = mask_of(model.config, Window(WINDOW, sinks))
    full = HeadMask.all_full(*mask.shape)
    apply_head_mask(model, full)
    objective.check_output_head()
    with CountedFlops() as counter:
        measured = objective.gate_gradient(mask, share=1, shares=2)
    stated = measured.full_forward_equivalents * objective.full_pass_operations
    if recompute:  # torch need not recompute a layer's last maps
        assert 0.75 * stated <= counter.total <= round(stated)
    else:
        assert round(stated) == counter.total
    low, high = (1.5, 4.5) if recompute else (1, 3.2)
    assert low < measured.full_forward_equivalents * 5 / 2 < high
    assert measured.full_forward_equivalents <= objective.gradient_passes(1, 2)


def searchable_with(family, **changes):
    model = small_model(family, **changes)
    calibration = answered(model, examples=2)
    return Objective(model, calibration, Window(WINDOW), batch_size=2), calibration


# The last one's feed-forward blocks return their routing, too.
@pytest.mark.parametrize("family", ["qwen3", "gpt_oss"])
def test_layers_are_recomputed_bit_for_bit_once_a_gpu_is_too_small(family, monkeypatch, caplog):
    caplog.set_level("INFO")
    objective, _ = searchable_with(family)
    mask = mask_of(objective.model.config, Window(WINDOW))
    kept = objective.gate_gradient(mask)
    gradients, kinds = objectives.gate_gradients, []

    def small(*arguments, recompute=False):
        kinds.append(recompute)
        if not recompute:
            raise torch.OutOfMemoryError
        return gradients(*arguments, recompute=recompute)

    monkeypatch.setattr(objectives, "gate_gradients", small)
    recomputed = objective.gate_gradient(mask)
    assert recomputed.values == kept.values
    assert recomputed.full_forward_equivalents > 1.2 * kept.full_forward_equivalents
    assert kinds == [False, True, True] and "are recomputed" in caplog.text


def test_a_window_must_be_shorter_than_the_longest_example():
    model, calibration = searchable()
    Objective(model, calibration, Window(calibration.max_length - 1))
    for window in (Window(calibration.max_length), Window(calibration.max_length - 4, sinks=4)):
        with pytest.raises(UserError, match="no shorter than the longest"):
            Objective(model, calibration, window)


def test_no_pass_makes_logits_of_a_whole_example():
    """Those of 32k tokens and a large vocabulary take 20 GB."""
    model, calibration = searchable()
    counts = []
    model.get_output_embeddings().register_forward_pre_hook(
        lambda module, args: counts.append(args[0].shape[:-1].numel())
    )
    Objective(model, calibration, Window(WINDOW)).evaluate(FULL)
    assert 0 < max(counts) < min(len(example.input_ids) for example in calibration.examples)


def test_a_gradient_keeps_only_the_input_of_each_layer():
    peaks = []
    for layers in (2, 6):
        objective, calibration = searchable_with("qwen3", num_hidden_layers=layers)
        mask = HeadMask.all_sliding(layers, KV_HEADS, Window(WINDOW))
        objective.evaluate(mask)
        objective._recomputes = True
        with TensorBytes() as memory:
            objective.gate_gradient(mask)
        peaks.append(memory.peak - memory.before)
    state = 4 * 2 * calibration.max_length * objective.model.config.hidden_size
    assert peaks[1] - peaks[0] <= 1.25 * 4 * state


_UNLIMITED = 2**63 - 4096


@pytest.mark.parametrize(
    ("group", "files", "total", "cores"),
    [
        ("", {}, 100, 64),
        # cgroups version 2, at the root in a container, else in a folder: the smallest limit holds.
        ("0::/", {"memory.max": "40960"}, 40, 64),
        ("0::/", {"cpu.max": "250 100"}, 100, 3),
        ("0::/", {"memory.max": "max", "cpu.max": "max 100"}, 100, 64),
        (
            "0::/a/b",
            {
                "a/memory.max": "40960", "a/b/memory.max": "81920",
                "a/b/cpu.max": "max 100", "a/cpu.max": "50 100",
            },
            40, 1,
        ),
        ("0::/../../of/the/host", {"memory.max": "40960"}, 40, 64),
        # Version 1, alone or together with a version 2 that sets no limits.
        (
            "4:memory:/docker/1\n2:cpu,cpuacct:/docker/1\n0::/",
            {
                "memory/docker/1/memory.limit_in_bytes": "40960",
                "memory/memory.limit_in_bytes": str(_UNLIMITED),
                "cpu,cpuacct/docker/1/cpu.cfs_quota_us": "400",
                "cpu,cpuacct/docker/1/cpu.cfs_period_us": "200",
            },
            40, 2,
        ),
        (
            "4:memory:/path/of/the/host\n1:cpu:/path",
            {
                "memory/memory.limit_in_bytes": "40960",
                "cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100",
            },
            40, 64,
        ),
    ],
)  # fmt: skip
def test_memory_and_cores_are_those_of_the_machine_or_its_container(
    tmp_path, monkeypatch, group, files, total, cores
):
    """In KiB, on a machine with 100 KiB and 64 cores."""
    proc, cgroups = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text("MemTotal:  100 kB\n")
    (proc / "self" / "cgroup").write_text(group)
    for name, content in files.items():
        (cgroups / name).parent.mkdir(parents=True, exist_ok=True)
        (cgroups / name).write_text(f"{content}\n")
    monkeypatch.setattr(hardware.os, "sched_getaffinity", lambda _: range(64))
    assert hardware.host_memory(proc, cgroups) == total * 1024
    assert hardware.cpu_cores(proc, cgroups) == cores


def test_no_memory_is_stated_if_the_machine_does_not_report_it(tmp_path):
    with pytest.raises(RunError, match="does not say the MemTotal"):
        hardware.host_memory(tmp_path)


def test_masks_of_several_windows_are_scored_by_definition():
    """With the operations that torch counts."""
    model, calibration = searchable()
    windows = [Window(size, 2) for size in (WINDOW, 2 * WINDOW, 3)]
    objective = Objective(model, calibration, windows, batch_size=4)
    objective.evaluate(FULL)
    generator = np.random.default_rng(2)
    first = generator.integers(0, 4, (LAYERS, KV_HEADS))
    scored = set()
    for layer in range(LAYERS):
        first[layer] = generator.integers(0, 4, KV_HEADS)
        mask = of_choices(first, windows)
        with CountedFlops() as counter:
            ours = objective.evaluate(mask)
        full = objective.full_pass_operations
        assert round(ours.full_forward_equivalents * full) == counter.total
        exact, likelihood = plain_score_of(model, calibration, mask)
        assert ours.score == exact
        assert ours.log_likelihood == pytest.approx(likelihood, abs=1e-4)
        scored.add(ours.log_likelihood)
    assert len(scored) == LAYERS
    assert objective.context.windows == [2 * WINDOW, WINDOW, 3]
    # One window gives bit-identical results alone and in a menu.
    mask = random_mask(windows[0])
    one = Objective(model, calibration, windows[0], batch_size=4).evaluate(mask)
    menu = Objective(model, calibration, windows[::2], batch_size=4)
    assert menu.evaluate(mask).log_likelihood == one.log_likelihood


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


def test_the_fingerprint_depends_on_weights_dtypes_and_the_configuration():
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
    for name, value in (("use_cache", False), ("_name_or_path", "elsewhere")):
        setattr(same.config, name, value)
    before = model_fingerprint(same)
    assert before == model_fingerprint(small_model(seed=0).bfloat16())
    same.config.rope_parameters["rope_theta"] *= 2
    assert model_fingerprint(same) != before


def test_calibration_files_are_read_or_refused_with_the_reason(tmp_path):
    path = tmp_path / "calibration.jsonl"
    record = {"task": "x", "index": 0, "seed": 1, "input_ids": [1, 2, 3], "answer_length": 1}
    path.write_text(f"{json.dumps(record)}\n \n" + json.dumps({**record, "input_ids": [1, 2]}))
    loaded = CalibrationSet.load(path)
    assert (len(loaded), loaded.max_length) == (2, 3)
    assert loaded == CalibrationSet.from_records([([1, 2, 3], 1, "x"), ([1, 2], 1, "x")])
    few = [([1, 2, 3], 1), ([1, 2, 3], 2), ([1, 2, 4], 1)]
    assert len({CalibrationSet.from_records([record]).fingerprint for record in few}) == 3
    for damage in (
        "",
        "{",
        json.dumps({**record, "answer_length": 3}),
        json.dumps({**record, "input_ids": [1, -2, 3]}),
    ):
        path.write_text(damage, errors="surrogateescape")
        with pytest.raises(UserError, match=r"calibration\.jsonl"):
            CalibrationSet.load(path)


def test_results_by_example_have_the_mean_of_the_evaluation() -> None:
    model, calibration = searchable()
    objective = Objective(model, calibration, Window(WINDOW), batch_size=2)
    mask = HeadMask.of(np.arange(12).reshape(3, 4) % 3 > 0, Window(WINDOW))
    results = objective.example_results(mask)
    evaluation = objective.evaluate(mask)
    assert results.shape == (len(calibration), 2) and objective.quantum == 1 / len(calibration)
    assert results[:, 0].mean().item() == pytest.approx(evaluation.score)
    assert results[:, 1].mean().item() == pytest.approx(evaluation.log_likelihood)
    for place in range(len(calibration)):
        alone = Objective(model, CalibrationSet((calibration.examples[place],)), Window(WINDOW))
        own = alone.evaluate(mask)
        assert results[place].tolist() == pytest.approx([own.score, own.log_likelihood], rel=1e-4)


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
    Objective(model, calibration, Window(WINDOW)).evaluate(random_mask(Window(WINDOW)))
    if dtype == torch.float32:
        model.forward = partial(scaled_states, model)
    else:
        model.forward = partial(scaled_logits, model.forward)
    with pytest.raises(UserError, match="head, or its logits after it, in a way that the search"):
        Objective(model, calibration, Window(WINDOW)).evaluate(random_mask(Window(WINDOW)))


def test_rounding_of_two_kernels_in_half_precision_counts_as_equal():
    states = torch.randn(200, 64)
    other = states + 0.005 * torch.randn(200, 64)
    assert equal_but_rounding(states, other, torch.bfloat16)
    assert not equal_but_rounding(states, other, torch.float32)
    other[:, 7] = -torch.inf  # as in a model that masks words of its vocabulary
    assert not equal_but_rounding(other, states, torch.bfloat16)
    assert not equal_but_rounding(states, other, torch.bfloat16)
    assert equal_but_rounding(other, other.clone(), torch.float32)
