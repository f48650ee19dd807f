"""Static head rankings against naive full-matrix versions, and the masks made of them."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from bosch.baselines import blocks
from bosch.baselines.dcam import dcam
from bosch.baselines.ranking import rank_units
from bosch.baselines.static import STATIC_RANKINGS, static_mask
from bosch.calibration import CalibrationSet
from bosch.errors import RunError, UserError
from bosch.heads import HeadMask, swa_budget
from bosch.modeling import apply_head_mask, prepare_for_search
from tests.hybrid_case import FAMILY_NAMES, small_config, small_model, tokens

WINDOW, LENGTHS = 8, (40, 33)
LAYERS, HEADS = 2, 8
CLOSE = {"rtol": 1e-4, "atol": 1e-6}


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Blocks of a size that divides no length, so that borders are met."""
    for function in (blocks.row_blocks, blocks.attention_blocks):
        defaults = tuple(7 if value == blocks.ROWS else value for value in function.__defaults__)
        monkeypatch.setattr(function, "__defaults__", defaults)


def case(family="qwen3", **changes):
    model = small_model(family, num_hidden_layers=LAYERS, **changes)
    records = [(tokens(1, n, seed=n)[0].tolist(), 2 + i) for i, n in enumerate(LENGTHS)]
    return model, CalibrationSet.from_records(records)


def eager_twin(model, family="qwen3"):
    """The same weights under transformers' own eager attention, which returns probabilities."""
    config = small_config(family, num_hidden_layers=LAYERS)
    config._attn_implementation = "eager"
    twin = type(model)(config)
    twin.load_state_dict(model.state_dict())
    return twin.eval()


def attentions(twin, example):
    """alpha [L, HQ, T, T] of one example."""
    with torch.no_grad():
        out = twin(torch.tensor([example.input_ids]), output_attentions=True, use_cache=False)
    return torch.cat(out.attentions).double()


def histogram_share(matrices, window):
    """Eq. 7 and 8, or 24 and 25, word for word: bin by lag, normalise, sum below W."""
    length = max(m.shape[-1] for m in matrices)
    mass = torch.zeros(LAYERS, HEADS, length, dtype=torch.float64)
    for matrix in matrices:
        for t in range(matrix.shape[-1]):
            for d in range(t + 1):
                mass[:, :, d] += matrix[:, :, t, t - d]
    share = mass / mass.sum(dim=-1, keepdim=True)
    return share[:, :, :window].sum(dim=-1).numpy()


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_dcam_is_the_lag_histogram_of_any_family(family):
    model, calibration = case(family)
    twin = eager_twin(model, family)
    naive = histogram_share([attentions(twin, e) for e in calibration.examples], WINDOW)
    found = dcam(model, calibration, WINDOW)
    np.testing.assert_allclose(found, naive, **CLOSE)
    assert found.std() > 0.01


@pytest.mark.parametrize("ratio", [0.0, 0.1, 0.25, 0.5, 0.75, 1.0])
@pytest.mark.parametrize("most_local", ["largest", "smallest"])
def test_most_local_groups_become_sliding_exactly_on_budget(ratio, most_local):
    scores = np.random.default_rng(3).random((3, 8))
    ranked = rank_units(scores, 4, ratio, most_local)
    budget = swa_budget(12, ratio)
    means = [(row[2 * g] + row[2 * g + 1]) / 2 for row in scores for g in range(4)]
    chosen = sorted(range(12), key=lambda unit: means[unit], reverse=most_local == "largest")
    expected = {(unit // 4, unit % 4) for unit in chosen[:budget]}
    rows = enumerate(ranked.mask.swa_kv_heads)
    found = {(layer, head) for layer, heads in rows for head in heads}
    assert found == expected
    assert ranked.tied == 0


def test_equal_scores_go_by_index_and_are_counted():
    scores = np.array([[0.0, 0.0, 2.0, 2.0], [2.0, 2.0, 2.0, 2.0]])
    ranked = rank_units(scores, 2, 0.5, "largest")
    assert ranked.mask.swa_kv_heads == [[1], [0]]
    assert ranked.tied == 3
    assert rank_units(scores, 2, 0.75, "largest").tied == 0


def test_scores_that_are_not_finite_are_refused():
    with pytest.raises(ValueError, match="not finite"):
        rank_units(np.array([[1.0, math.nan]]), 2, 0.5, "largest")
    model, calibration = case()
    with torch.no_grad():
        model.get_decoder().layers[0].self_attn.q_proj.weight[0, 0] = math.nan
    with pytest.raises(RunError, match="float32"):
        static_mask("dcam", model, calibration, WINDOW, 0.5)


def test_a_ranking_leaves_the_model_as_it_was():
    model, calibration = case()
    prepare_for_search(model)
    ids = torch.tensor([calibration.examples[0].input_ids])
    apply_head_mask(model, HeadMask.all_sliding(LAYERS, 4), WINDOW)
    before = model(ids).logits
    for name in STATIC_RANKINGS:
        ranked = static_mask(name, model, calibration, WINDOW, 0.5)
        assert int((~ranked.mask.is_full).sum()) == LAYERS * 4 // 2
    assert torch.equal(model(ids).logits, before)
    assert all(p.requires_grad and p.grad is None for p in model.parameters())
    assert not any("forward" in layer.__dict__ for layer in model.get_decoder().layers)


def test_models_with_windows_of_their_own_are_refused():
    model, calibration = case("mistral", sliding_window=16)
    with pytest.raises(UserError, match="sliding window of its own"):
        dcam(model, calibration, WINDOW)
