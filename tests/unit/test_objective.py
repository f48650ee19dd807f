"""S(z) against a plain re-implementation, exact reuse of lower layers, and what is refused."""

from __future__ import annotations

import contextlib
import json

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from bosch.calibration import CalibrationSet
from bosch.errors import RunError, UserError
from bosch.evaluation_log import EvaluationLog
from bosch.fingerprint import model_fingerprint
from bosch.heads import HeadMask
from bosch.method.bosch import bosch
from bosch.method.ledger import Ledger
from bosch.method.settings import SearchSettings
from bosch.modeling import apply_head_mask
from bosch.objective import Objective
from tests.hybrid_case import KV_HEADS, LAYERS, SEARCHABLE, random_mask, small_model
from tests.search_case import WINDOW, answered_records, searchable

FULL = HeadMask.all_full(LAYERS, KV_HEADS)


def plain_score(model, calibration, mask, sinks):
    """One example at a time, all logits, the definition word for word."""
    apply_head_mask(model, mask, WINDOW, sinks)
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


@pytest.mark.parametrize("sinks", [0, 2])
@pytest.mark.parametrize("batch_size", [1, 4])
def test_score_and_log_likelihood_by_definition(batch_size, sinks):
    model, calibration = searchable()
    objective = Objective(model, calibration, WINDOW, sinks, batch_size=batch_size)
    assert objective.evaluate(FULL).score == 1.0
    seen = set()
    for seed in range(4):
        mask = random_mask(seed)
        found = objective.evaluate(mask)
        score, log_likelihood = plain_score(model, calibration, mask, sinks)
        assert found.score == score
        assert found.log_likelihood == pytest.approx(log_likelihood, abs=1e-3)
        seen.add(found.log_likelihood)
    assert len(seen) == 4


def attention_flops(query, key, value, *args, **kwargs):
    """Every pair of query and key that the CPU's kernel is asked for: products, then sums."""
    batch, heads, queries, dim = query
    return 4 * batch * heads * queries * key[2] * dim


def attention_backward_flops(gradient, query, key, value, *args, **kwargs):
    """Five products of the forward kernel's two: scores once more, and four gradients."""
    return attention_flops(query, key, value) * 5 // 2


@contextlib.contextmanager
def counted_flops():
    """What torch itself counts; it has no formulas for the CPU's attention kernels."""
    kernels = {
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: attention_flops,
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: (
            attention_backward_flops
        ),
    }
    with FlopCounterMode(display=False, custom_mapping=kernels) as counter:
        yield counter


def masks_of_a_search():
    """Top layer first as stage 1, then a group of layers 1 and 2 with layer 0 changed before."""
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


@pytest.mark.parametrize("reuse_bytes", [20_000, 1 << 30])
def test_reuse_changes_no_bit_and_its_savings_are_real(reuse_bytes):
    model, calibration = searchable()
    plain = Objective(model, calibration, WINDOW, batch_size=2, reuse_bytes=0)
    expected = [plain.evaluate(mask) for mask, _ in masks_of_a_search()]
    objective = Objective(model, calibration, WINDOW, batch_size=2, reuse_bytes=reuse_bytes)
    objective.evaluate(FULL)
    with counted_flops() as counter:
        found = [objective.evaluate(mask, shared) for mask, shared in masks_of_a_search()]
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours.score, ours.log_likelihood) == (theirs.score, theirs.log_likelihood)
        assert ours.whole_pass_equivalents == theirs.whole_pass_equivalents
    reported = sum(e.full_forward_equivalents for e in found)
    assert reported < 0.9 * sum(e.full_forward_equivalents for e in expected)
    assert objective.kept.peak_bytes <= reuse_bytes
    assert objective.kept.bytes == sum(k.nbytes for k in objective.kept._kept.values())
    whole = sum(objective._operations(FULL))
    assert round(reported * whole) == counter.get_total_flops()
    assert model(torch.tensor([[5, 6, 7]])).logits.isfinite().all()


@pytest.mark.parametrize("family", SEARCHABLE)
def test_operations_are_counted_as_torch_counts_them(family):
    """Also the last layer's answers and the reuse of attention outputs, in every family."""
    model, sinks = small_model(family), 2 * (family == "qwen3")
    records = answered_records(model, examples=2)
    calibration = CalibrationSet.from_records(
        (record["input_ids"], record["answer_length"]) for record in records
    )
    ours = Objective(model, calibration, WINDOW, sinks)
    whole = Objective(model, calibration, WINDOW, sinks, reuse_bytes=0, answers_only=False)
    other = FULL.with_layer(1, [True, False] * 2)
    masks = [FULL, other, other.with_layer(2, [False] * 4)]
    expected = [whole.evaluate(mask) for mask in masks]
    apply_head_mask(model, FULL, WINDOW, sinks)
    ours._check_model(FULL)
    with counted_flops() as counter:
        found = [ours.evaluate(mask, shared_layers=1) for mask in masks]
    for mine, plain in zip(found, expected, strict=True):
        assert plain.full_forward_equivalents == plain.whole_pass_equivalents
        assert mine.score == plain.score
        assert mine.log_likelihood == pytest.approx(plain.log_likelihood, abs=1e-4)
    if any(parameter.ndim == 3 for parameter in model.parameters()):
        return  # torch does not count what experts compute
    reported = sum(e.full_forward_equivalents for e in found)
    assert round(reported * sum(whole._operations(FULL))) == counter.get_total_flops()
    with counted_flops() as counter:
        whole.evaluate(other)
    assert sum(whole._operations(other)) == counter.get_total_flops()


@pytest.mark.parametrize(("family", "sinks"), [("qwen3", 0), ("qwen3", 2), ("phi3", 0)])
def test_a_gradients_operations_are_counted_as_torch_counts_them(family, sinks):
    model = small_model(family)
    calibration = CalibrationSet.from_records(
        (record["input_ids"], record["answer_length"]) for record in answered_records(model, 5)
    )
    objective = Objective(model, calibration, WINDOW, sinks, batch_size=2)
    apply_head_mask(model, FULL, WINDOW, sinks)
    objective._check_model(FULL)
    with counted_flops() as counter:
        found = objective.gate_gradient(random_mask(0), share=1, shares=2)
    whole = sum(objective._operations(FULL))
    assert round(found.full_forward_equivalents * whole) == counter.get_total_flops()
    assert 2 < found.full_forward_equivalents * 5 / 2 < 3.5


def test_a_layer_that_is_no_function_of_its_input_switches_reuse_off(caplog):
    model, calibration = searchable()
    objective = Objective(model, calibration, WINDOW, batch_size=2)
    calls = []

    def drift(module, args, output):
        calls.append(1)
        return output + 0.01 * len(calls)

    apply_head_mask(model, FULL, WINDOW)
    objective._check_model(FULL)
    model.get_decoder().layers[2].register_forward_hook(drift)
    objective.evaluate(FULL, shared_layers=1)
    objective.evaluate(FULL.with_layer(2, [False] * KV_HEADS), shared_layers=1)
    assert "switched off" in caplog.text
    costs = [objective.evaluate(FULL, shared_layers=1).full_forward_equivalents for _ in range(2)]
    assert costs[0] == costs[1] > 0.7


def test_a_search_finds_the_same_mask_with_reuse_for_less():
    def search(reuse_bytes):
        model, calibration = searchable(seed=1)
        objective = Objective(model, calibration, WINDOW, batch_size=3, reuse_bytes=reuse_bytes)
        ledger = Ledger(objective, EvaluationLog(None, objective.context))
        result = bosch(ledger, SearchSettings(0.5, budget_per_layer=6, seed=2, break_ties=True))
        return result, ledger

    plain, expensive = search(0)
    reused, cheap = search(1 << 30)
    assert reused.mask == plain.mask
    assert [p.mask for p in cheap.trace] == [p.mask for p in expensive.trace]
    assert [p.log_likelihood for p in cheap.trace] == [p.log_likelihood for p in expensive.trace]
    naive = expensive.costs()["naive_full_forward_equivalents"]
    assert cheap.costs()["naive_full_forward_equivalents"] == naive
    assert expensive.costs()["full_forward_equivalents"] <= naive
    assert cheap.costs()["full_forward_equivalents"] < 0.6 * naive


def test_logits_that_are_not_finite_end_the_search():
    model, calibration = searchable()
    objective = Objective(model, calibration, WINDOW)
    objective.evaluate(FULL)
    with torch.no_grad():
        model.get_decoder().norm.weight[0] = float("nan")
    with pytest.raises(RunError, match=r"not finite .* model\.norm\.weight of the model holds"):
        objective.evaluate(FULL)
    with torch.no_grad():
        model.get_decoder().norm.weight[0] = 3e38
    with pytest.raises(RunError, match=r"not finite .* even in float32"):
        objective.evaluate(FULL)


def test_a_head_with_a_hidden_transformation_is_refused():
    model, calibration = searchable()
    forward = model.forward

    def scaled(*args, **kwargs):
        output = forward(*args, **kwargs)
        output.logits = output.logits * 0.5
        return output

    model.forward = scaled
    with pytest.raises(UserError, match="after the output head"):
        Objective(model, calibration, WINDOW).evaluate(FULL)


def test_a_soft_cap_is_honoured():
    model, calibration = searchable()
    model.config.final_logit_softcapping = 2.0
    capped = Objective(model, calibration, WINDOW)
    capped._checked = True
    found = capped.evaluate(FULL)
    model.config.final_logit_softcapping = None
    assert found.score == 1.0
    assert (
        found.log_likelihood < Objective(model, calibration, WINDOW).evaluate(FULL).log_likelihood
    )


@pytest.mark.parametrize(("record", "word"), [(([1, 2, 3], 1), "window_size"), (None, "token 999")])
def test_a_calibration_set_that_does_not_fit_is_refused(record, word):
    records = [record or ([4] * 40 + [999], 1)]
    with pytest.raises(UserError, match=word):
        Objective(small_model(), CalibrationSet.from_records(records), WINDOW)


def test_the_fingerprint_follows_weights_and_types():
    one, same, other = small_model(seed=0), small_model(seed=0), small_model(seed=1)
    assert model_fingerprint(one) == model_fingerprint(same)
    assert model_fingerprint(one) != model_fingerprint(other)
    assert model_fingerprint(one) != model_fingerprint(same.bfloat16())


def test_calibration_files(tmp_path):
    path = tmp_path / "calibration.jsonl"
    record = {"task": "x", "index": 0, "seed": 1, "input_ids": [1, 2, 3], "answer_length": 1}
    path.write_text(json.dumps(record) + "\n")
    loaded = CalibrationSet.load(path)
    assert (len(loaded), loaded.max_length) == (1, 3)
    assert loaded.fingerprint == CalibrationSet.from_records([([1, 2, 3], 1)]).fingerprint
    assert loaded.fingerprint != CalibrationSet.from_records([([1, 2, 3], 2)]).fingerprint
    for damage in ("", "{", json.dumps({**record, "answer_length": 3}), '{"input_ids": 3}'):
        path.write_text(damage)
        with pytest.raises(UserError, match=r"calibration\.jsonl"):
            CalibrationSet.load(path)
    with pytest.raises(UserError, match="cannot read"):
        CalibrationSet.load(tmp_path / "absent.jsonl")


def test_results_of_each_example_have_the_evaluations_means() -> None:
    model, calibration = searchable()
    objective = Objective(model, calibration, WINDOW, batch_size=2)
    mask = HeadMask(np.arange(12).reshape(3, 4) % 3 > 0)
    results = objective.example_results(mask)
    evaluation = objective.evaluate(mask)
    assert results.shape == (len(calibration), 2)
    assert results[:, 0].mean().item() == pytest.approx(evaluation.score)
    assert results[:, 1].mean().item() == pytest.approx(evaluation.log_likelihood)
    for place in range(len(calibration)):
        alone = Objective(model, CalibrationSet((calibration.examples[place],)), WINDOW)
        own = alone.evaluate(mask)
        assert results[place].tolist() == pytest.approx([own.score, own.log_likelihood], rel=1e-4)
