"""Questions that share a haystack: results, gradients and operations against one row for each."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from bosch.calibration import CalibrationSet
from bosch.heads import HeadMask
from bosch.objective import Objective
from tests.hybrid_case import KV_HEADS, LAYERS, random_mask, small_model, tokens
from tests.search_case import WINDOW
from tests.unit.test_objective import counted_flops, masks_of_a_search

# With fused projections, partial rotations, layers without positions, norms elsewhere, experts.
FAMILIES = ("qwen3", "qwen3_moe", "llama", "phi3", "glm", "smollm3", "olmo2", "cohere", "granite")
FULL = HeadMask.all_full(LAYERS, KV_HEADS)
MASKS = (FULL, HeadMask.all_sliding(LAYERS, KV_HEADS), random_mask(0), random_mask(1))


@pytest.fixture(autouse=True)
def two_parts(monkeypatch):
    """So that the four texts make batches of several rows."""
    monkeypatch.setattr("bosch.objective.MAX_PARTS", 2)


def records(questions=(3, 1, 2, 4), text=40):
    """Token ids, answer length and shared ids: texts of several lengths with their questions."""
    found = []
    for number, count in enumerate(questions):
        shared = tokens(1, text + 5 * number, seed=number)[0].tolist()
        for question in range(count):
            ids = tokens(1, 6 + question, seed=100 + 10 * number + question)[0].tolist()
            found.append((shared + ids, 1 + question % 2, len(shared) if count > 1 else 0))
    return found


def both(model, *, sinks=0, **options):
    """The same examples with a row for each text, and with a row for each example."""
    shared = CalibrationSet.from_records(records())
    apart = CalibrationSet.from_records((ids, answer) for ids, answer, _ in records())
    assert (len(shared.haystacks), len(apart.haystacks)) == (4, 10)
    ours = Objective(model, shared, WINDOW, sinks, **{"batch_size": 2, **options})
    assert [batch.input_ids.shape[0] for batch in ours._batches] == [2, 2]
    return ours, Objective(model, apart, WINDOW, sinks, batch_size=1, reuse_bytes=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_example_has_the_result_it_has_alone(family):
    """In float64 where experts know it: masks of full, sliding and both kinds of heads."""
    model, sinks = small_model(family), 2 * (family == "qwen3")
    experts = any(parameter.ndim == 3 for parameter in model.parameters())
    shared, apart = both(model if experts else model.double(), sinks=sinks)
    for mask in MASKS:
        ours, theirs = shared.example_results(mask), apart.example_results(mask)
        close = 1e-3 if experts else 1e-6
        torch.testing.assert_close(ours, theirs, rtol=close, atol=close)
        found, alone = shared.evaluate(mask), apart.evaluate(mask)
        assert found.score == alone.score
        assert found.log_likelihood == pytest.approx(alone.log_likelihood, abs=10 * close)
        assert found.full_forward_equivalents < 0.6 * alone.full_forward_equivalents


def test_a_window_reaches_from_a_question_into_the_end_of_its_text():
    """Texts of 40 tokens and more: what a sliding layer sees of them is their last few."""
    model = small_model().double()
    objective, _ = both(model)
    sliding = HeadMask.all_sliding(LAYERS, KV_HEADS)
    before = objective.example_results(sliding)
    reach = LAYERS * (WINDOW - 1)

    def changed(place):
        edited = [([*ids], answer, shared) for ids, answer, shared in records()]
        for ids, _, _ in edited[:3]:
            ids[place] = (ids[place] + 1) % 50
        ours = Objective(model, CalibrationSet.from_records(edited), WINDOW, batch_size=2)
        return (ours.example_results(sliding) != before).any(dim=1).tolist()

    assert changed(40 - 1) == [True] * 3 + [False] * 7
    assert changed(40 - reach + 1) == [False] * 10


@pytest.mark.parametrize("sinks", [0, 2])
def test_reuse_changes_no_bit_and_operations_are_torchs(sinks):
    model = small_model()
    reusing, _ = both(model, sinks=sinks)
    plain, _ = both(model, sinks=sinks, reuse_bytes=0)
    reusing.evaluate(FULL)
    with counted_flops() as counter:
        found = [reusing.evaluate(mask, shared) for mask, shared in masks_of_a_search()]
    expected = [plain.evaluate(mask) for mask, _ in masks_of_a_search()]
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours.score, ours.log_likelihood) == (theirs.score, theirs.log_likelihood)
    assert reusing.kept.enabled
    assert reusing.kept.peak_bytes > 0
    spent = sum(e.full_forward_equivalents for e in found)
    assert spent < 0.8 * sum(e.full_forward_equivalents for e in expected)
    assert round(spent * sum(reusing._operations(FULL))) == counter.get_total_flops()


def test_rows_are_computed_apart_where_their_scores_would_fill_the_memory(monkeypatch):
    objective, _ = both(small_model())
    together = objective.example_results(random_mask(0))
    monkeypatch.setattr("bosch.branches._MOST_SCORES", 1)
    asked = []
    kernel = torch.nn.functional.scaled_dot_product_attention

    def counted(query, *args, **kwargs):
        asked.append(len(query))
        return kernel(query, *args, **kwargs)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", counted)
    apart, _ = both(small_model(), reuse_bytes=0)
    torch.testing.assert_close(apart.example_results(random_mask(0)), together)
    assert asked.count(1) > asked.count(2) > 0  # the texts' own attention is of all rows


def test_gradients_are_those_of_the_examples_alone():
    shared, apart = both(small_model().double())
    mask = random_mask(0)
    shared.evaluate(mask)
    with counted_flops() as counter:
        ours = shared.gate_gradient(mask)
    whole = sum(shared._operations(FULL))
    assert round(ours.full_forward_equivalents * whole) == counter.get_total_flops()
    theirs = apart.gate_gradient(mask)
    np.testing.assert_allclose(ours.values, theirs.values, rtol=1e-5, atol=1e-6)
    assert np.abs(theirs.values).max() > 0.01
    assert ours.full_forward_equivalents < 0.6 * theirs.full_forward_equivalents


def test_damaged_records_are_refused():
    with pytest.raises(ValueError, match="leave no question"):
        CalibrationSet.from_records([([1, 2, 3, 4], 1, 3)])
    one, other = ([1, 2, 3, 4], 1, 2), ([1, 2, 5, 4], 1, 2)
    assert CalibrationSet.from_records([one, other]).haystacks == [[0, 1]]
    assert CalibrationSet.from_records([one, ([9, *other[0][1:]], 1, 2)]).haystacks == [[0], [1]]
    prints = {
        CalibrationSet.from_records(r).fingerprint for r in ([one, other], [one[:2], other[:2]])
    }
    assert len(prints) == 2
