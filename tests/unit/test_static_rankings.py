"""Static head rankings against naive full-matrix versions, and the masks made from them."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from bosch.budget import swa_budget
from bosch.errors import RunError, UserError
from bosch.masks import HeadMask
from bosch.model.families import decoder_layers
from bosch.model.search_mode import apply_head_mask, prepare_for_search
from bosch.rankings import blocks
from bosch.rankings.apl import apl
from bosch.rankings.capture import visit_layers
from bosch.rankings.dcam import dcam
from bosch.rankings.fisher import fisher
from bosch.rankings.proxy import fractional_budgets, proxy
from bosch.rankings.qada import qada
from bosch.rankings.ranking import rank_units
from bosch.rankings.razor import mean_attention, razor
from bosch.score.calibration import CalibrationSet
from bosch.score.objective import Objective
from bosch.search.methods import METHODS
from bosch.search.runs import run_method, static_mask
from bosch.search.settings import SearchSettings
from bosch.window import Window
from tests.hybrid_case import sliding_heads, small_config, small_model, tokens
from tests.unit.test_training_loss import LargestTensor
from tests.window_landscapes import WindowLandscape

WINDOW, LENGTHS = 8, (40, 33, 36)
HALF = SearchSettings(0.5)
RANKINGS = [name for name, method in METHODS.items() if method.kind == "ranking"]
LAYERS, HEADS = 2, 8
CLOSE = {"rtol": 1e-4, "atol": 1e-6}


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Use a block size that divides no length, so that lengths end within a block."""
    monkeypatch.setattr(blocks, "ROWS", 7)


def case(family="qwen3", **changes):
    model = small_model(family, num_hidden_layers=LAYERS, **changes)
    records = [(tokens(1, n, seed=n)[0].tolist(), 2 + i) for i, n in enumerate(LENGTHS)]
    return model, CalibrationSet.from_records(records)


def eager_twin(model, family="qwen3", layers=LAYERS):
    """The same weights with transformers' eager attention, which returns probabilities."""
    config = small_config(family, num_hidden_layers=layers)
    config._attn_implementation = "eager"
    twin = type(model)(config)
    twin.load_state_dict(model.state_dict())
    return twin.eval()


def attentions(twin, example):
    """Attention probabilities [L, HQ, T, T] of one example."""
    with torch.no_grad():
        out = twin(torch.tensor([example.input_ids]), output_attentions=True, use_cache=False)
    return torch.cat(out.attentions).double()


def histogram_share(matrices, window):
    """Eq. 7 and 8, or 24 and 25, as printed: bin by lag, normalise, sum below W."""
    length = max(m.shape[-1] for m in matrices)
    mass = torch.zeros(LAYERS, matrices[0].shape[1], length, dtype=torch.float64)
    for matrix in matrices:
        for t in range(matrix.shape[-1]):
            for d in range(t + 1):
                mass[:, :, d] += matrix[:, :, t, t - d]
    share = mass / mass.sum(dim=-1, keepdim=True)
    return share[:, :, :window].sum(dim=-1).numpy()


@pytest.mark.parametrize("family", ["phi3", "qwen3_moe"])
def test_dcam_is_the_lag_histogram_in_any_family(family):
    model, calibration = case(family)
    twin = eager_twin(model, family)
    naive = histogram_share([attentions(twin, e) for e in calibration.examples], WINDOW)
    computed = dcam(model, calibration, WINDOW)
    np.testing.assert_allclose(computed, naive, **CLOSE)
    assert computed.std() > 0.005


@pytest.mark.parametrize("family", ["gemma2", "gpt_oss"])
def test_probabilities_include_capped_logits_and_extra_logits(family):
    model, ids = small_model(family), tokens(1, 20)
    with torch.no_grad():
        out = eager_twin(model, family, 3)(ids, output_attentions=True, use_cache=False)
    full, seen = decoder_layers(model.config).full, []

    def compare(layer, states):
        alpha = out.attentions[full[layer]][0]
        torch.testing.assert_close(blocks.attention_rows(states, 5, 20), alpha[:, 5:])
        for offset, mean in enumerate(mean_attention(states, 5)):
            entries = torch.stack([alpha[:, m, m - 5 + offset] for m in range(5, 20)])
            torch.testing.assert_close(mean, entries.double().mean(0), rtol=1e-5, atol=1e-6)
        seen.append(layer)

    visit_layers(model, ids[0], compare)
    assert seen == [0, 1]


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_fisher_is_the_histogram_of_autograds_gradients(family):
    model, calibration = case(family)
    twin = eager_twin(model, family)
    saliency = []
    for example in calibration.examples:
        ids, answer = torch.tensor([example.input_ids]), example.answer_length
        out = twin(ids, output_attentions=True, use_cache=False)
        logits = out.logits[0, -answer - 1 : -1]
        loss = torch.nn.functional.cross_entropy(logits, ids[0, -answer:])
        gradients = torch.autograd.grad(loss, out.attentions)
        pairs = zip(gradients, out.attentions, strict=True)
        saliency.append(torch.cat([(g * a).double().square() for g, a in pairs]).detach())
    computed = fisher(model, calibration, WINDOW)
    np.testing.assert_allclose(computed, histogram_share(saliency, WINDOW), rtol=1e-3, atol=1e-5)
    assert computed.std() > 0.01


def test_fisher_works_in_bfloat16_with_embeddings_of_each_layer():
    model = small_model("gemma4_text").bfloat16()
    records = [(tokens(1, 12)[0].tolist(), 4)]
    scores = fisher(model, CalibrationSet.from_records(records), WINDOW)
    assert np.isfinite(scores).all() and scores.any()


def test_a_head_without_influence_is_local_for_fisher():
    model, calibration = case()
    layer = model.get_decoder().layers[1].self_attn
    with torch.no_grad():
        layer.o_proj.weight[:, : 2 * layer.head_dim] = 0  # both query heads of KV head 0
    computed = fisher(model, calibration, WINDOW)
    assert computed[1, :2].tolist() == [1.0, 1.0]
    assert (computed[1, 2:] < 1).all()


def test_apl_is_the_median_peak_of_the_last_answer_token():
    model, calibration = case()
    twin = eager_twin(model)
    peaks = []
    for example in calibration.examples:
        last_row = attentions(twin, example)[:, :, -1]
        peaks.append(len(example.input_ids) - 1 - last_row.argmax(dim=-1).numpy())
    peaks, window = np.sort(peaks, axis=0), 20
    computed = apl(model, calibration, window)
    np.testing.assert_allclose(computed, 1 - np.minimum(1, peaks[1] / window))
    assert 0 < (computed > 0).sum() < computed.size


def test_proxy_counts_the_blocks_each_row_needs():
    model, calibration = case()
    window = 40
    size = window // 8
    twin = eager_twin(model)
    needed = np.zeros((LAYERS, HEADS))
    for matrix in (attentions(twin, e).numpy() for e in calibration.examples):
        for layer, head, t in np.ndindex(LAYERS, HEADS, matrix.shape[-1]):
            proxy_row = matrix[layer, 0, t]
            starts = range(0, t + 1, size)
            order = sorted(starts, key=lambda b: -proxy_row[b : min(b + size, t + 1)].sum())
            own, reached, count = matrix[layer, head, t, : t + 1], 0.0, 0
            while reached < 0.95 * own.sum():
                reached += own[order[count] : order[count] + size].sum()
                count += 1
            needed[layer, head] += count / len(starts)
    computed = proxy(model, calibration, window)
    np.testing.assert_allclose(computed, needed / sum(LENGTHS), rtol=2e-3)
    assert (computed <= 1).all()


def test_proxy_counts_a_share_of_what_keys_get_beside_an_extra_logit():
    scores = torch.randn(4, 20, 20, generator=torch.Generator().manual_seed(0)).double()
    alpha = scores.masked_fill(torch.ones(20, 20).triu(1).bool(), -torch.inf).softmax(-1)
    budgets = fractional_budgets(alpha, 0, 3)
    assert len(budgets.unique()) > 5
    torch.testing.assert_close(fractional_budgets(0.5 * alpha, 0, 3), budgets)


@pytest.mark.parametrize(("window", "family"), [(WINDOW, "qwen3"), (24, "llama")])
def test_qada_is_the_gaussian_estimate_with_its_covariance(window, family):
    model, calibration = case(family)
    size = window // 8
    naive = np.zeros((LAYERS, HEADS))

    def add(layer, states):
        query, key = states.query.double(), states.key.double()
        for head, t in np.ndindex(HEADS, query.shape[1]):
            q, k = query[head, t] * states.transform.scaling, key[head // 2]
            local = (k[max(0, t - window + 1) : t + 1] @ q).exp().sum()
            others = k[: max(0, t - window + 1)]
            rest = 0.0
            if len(others):
                edge = others[-size:]
                mean = edge.mean(dim=0)
                covariance = (edge - mean).T @ (edge - mean) / len(edge)
                rest = len(others) * (q @ mean + q @ covariance @ q / 2).exp()
            naive[layer, head] += float(local / (local + rest))

    for example in calibration.examples:
        visit_layers(model, torch.tensor(example.input_ids), add)
    computed = qada(model, calibration, window)
    np.testing.assert_allclose(computed, naive / sum(LENGTHS), **CLOSE)
    assert computed.std() > 0.01


def test_razor_reads_echo_and_induction_of_the_probe():
    """Induction is the token after the earlier occurrence."""
    model, calibration = case()
    probe = []
    hook = model.get_decoder().register_forward_pre_hook(
        lambda module, args, kwargs: probe.append(kwargs["input_ids"][0]), with_kwargs=True
    )
    computed = razor(model, calibration, WINDOW, seed=4)
    hook.remove()
    length = max(LENGTHS) // 4
    (ids,) = probe
    assert ids.tolist() == ids[:length].tolist() * 4
    assert len(set(ids.tolist())) > length // 2
    with torch.no_grad():
        out = eager_twin(model)(ids[None], output_attentions=True, use_cache=False)
    alpha = torch.cat(out.attentions).double().numpy()
    echo = np.mean([alpha[:, :, m, m - length] for m in range(length, 4 * length)], axis=0)
    induction = np.mean([alpha[:, :, m, m - length + 1] for m in range(length, 4 * length)], axis=0)
    naive = np.maximum(*((x - x.mean()) / x.std() for x in (echo, induction)))
    np.testing.assert_allclose(computed, naive, rtol=1e-3, atol=1e-4)


def test_razor_gives_0_if_heads_do_not_differ():
    """In floats the deviation of 36 equal means is not 0."""
    model = small_model(num_hidden_layers=3, num_attention_heads=12, num_key_value_heads=3)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "q_proj" in name:
                weight.zero_()
    scores = razor(model, CalibrationSet.from_records([(tokens(1, 36)[0].tolist(), 2)]), WINDOW)
    assert not scores.any()


def test_a_ranking_uses_the_seed_of_the_search():
    model, calibration = case()
    masks = set()
    for seed in range(4):
        ranked = static_mask("razor", model, calibration, WINDOW, replace(HALF, seed=seed))
        scores = razor(model, calibration, WINDOW, seed=seed)
        assert (ranked.is_full == rank_units(scores, HEADS // 2, 0.5, "smallest").is_full).all()
        masks.add(ranked.is_full.tobytes())
    assert len(masks) > 1


def test_scoring_needs_no_tensor_that_grows_with_the_square_of_the_length():
    """The largest tensor of a pass is a block of rows; twice the tokens make it twice as large."""

    model = small_model(num_hidden_layers=1)
    for name in RANKINGS:
        sizes = []
        for length in (128, 256):
            ids = tokens(1, length)[0].tolist()
            with LargestTensor() as largest:
                static_mask(name, model, CalibrationSet.from_records([(ids, 1)]), WINDOW, HALF)
            sizes.append(largest.elements)
        assert sizes[1] <= 2.2 * sizes[0], name
        assert sizes[1] < HEADS * 256 * 256, name


@pytest.mark.parametrize("ratio", [0.0, 0.1, 0.25, 0.5, 0.75, 1.0])
@pytest.mark.parametrize("most_local", ["largest", "smallest"])
def test_the_most_local_groups_become_sliding_exactly_on_budget(ratio, most_local):
    scores = np.random.default_rng(3).random((3, 8))
    ranked = rank_units(scores, 4, ratio, most_local)
    budget = swa_budget(12, ratio)
    means = [(row[2 * g] + row[2 * g + 1]) / 2 for row in scores for g in range(4)]
    chosen = sorted(range(12), key=lambda unit: means[unit], reverse=most_local == "largest")
    expected = {(unit // 4, unit % 4) for unit in chosen[:budget]}
    rows = enumerate(sliding_heads(ranked.is_full))
    computed = {(layer, head) for layer, heads in rows for head in heads}
    assert computed == expected
    assert ranked.tied == 0


def test_equal_scores_go_by_index_and_are_counted_and_units_by_their_mean():
    scores = np.array([[0.0, 0.0, 2.0, 2.0], [2.0, 2.0, 2.0, 2.0]])
    ranked = rank_units(scores, 2, 0.5, "largest")
    assert (sliding_heads(ranked.is_full), ranked.tied) == ([[1], [0]], 3)
    assert rank_units(scores, 2, 0.75, "largest").tied == 0
    assert rank_units(np.ones((2, 4)), 2, 0.0, "largest").tied == 0
    ranked = rank_units(np.array([[0.0, 10.0], [6.0, 6.0]]), 2, 0.5, "smallest", 2)
    assert sliding_heads(ranked.is_full) == [[0, 1], []]


def test_nan_and_infinite_scores_are_refused():
    model, calibration = case()
    with pytest.raises(ValueError, match="reshape"):  # other faults are not taken for this one
        static_mask("dcam", model, calibration, WINDOW, SearchSettings(0.5, head_granularity=3))
    with torch.no_grad():
        model.get_decoder().layers[0].self_attn.q_proj.weight[0, 0] = math.nan
    with pytest.raises(RunError, match=r"layers\.0\.self_attn\.q_proj\.weight of the model"):
        static_mask("dcam", model, calibration, WINDOW, HALF)


def test_a_ranking_leaves_the_model_as_it_was():
    model, calibration = case()
    prepare_for_search(model)
    ids = torch.tensor([calibration.examples[0].input_ids])
    apply_head_mask(model, HeadMask.all_sliding(LAYERS, 4, Window(WINDOW)))
    before = model(ids).logits
    frozen = model.get_input_embeddings().weight.requires_grad_(False)
    for name in RANKINGS:
        ranked = static_mask(name, model, calibration, WINDOW, HALF)
        assert int((~ranked.is_full).sum()) == LAYERS * 4 // 2
    assert torch.equal(model(ids).logits, before)
    assert all(p.grad is None for p in model.parameters())
    assert all(p.requires_grad == (p is not frozen) for p in model.parameters())
    assert not any("forward" in layer.__dict__ for layer in model.get_decoder().layers)


def test_models_that_slide_in_the_original_are_refused():
    model, calibration = case("mistral", sliding_window=16)
    with pytest.raises(UserError, match="sliding window of its own"):
        dcam(model, calibration, WINDOW)


def planted():
    """Heads that attend to neighbours need the narrowest window; the others need more."""
    model, calibration = case("qwen2")
    is_full = np.array([[False, True, False, True], [False, True, True, False]])
    with torch.no_grad():
        for layer, row in zip(model.get_decoder().layers, is_full, strict=True):
            for projection in (layer.self_attn.q_proj, layer.self_attn.k_proj):
                projection.weight.zero_()
                projection.bias.fill_(6.0)
            layer.self_attn.k_proj.bias.view(4, -1)[torch.tensor(row)] = 0.0
    return model, calibration, is_full


@pytest.mark.parametrize("name", RANKINGS)
def test_a_ranking_finds_the_planted_local_heads(name):
    """Equal queries and keys attend to neighbours, zero keys to all tokens alike.

    The first head is local: by it Proxy orders the blocks of the others.
    """
    model, calibration, is_full = planted()
    ranked = static_mask(name, model, calibration, WINDOW, HALF)
    assert (ranked.is_full == is_full).all()
    with pytest.raises(UserError, match=f"method '{name}' reads the attention of a model"):
        run_method(name, WindowLandscape("additive", (2, 4), (16,)), HALF)


@pytest.mark.parametrize(("name", "passes"), [("dcam", 1.0), ("razor", None), ("fisher", 4.0)])
def test_the_passes_of_a_ranking_count_as_those_of_a_search(name, passes):
    model, calibration, _ = planted()
    prepare_for_search(model)
    scorer = Objective(model, calibration, Window(WINDOW), batch_size=1)
    passes_of = {
        method: run_method(method, scorer, HALF).costs["full_forward_equivalents"]
        for method in (name, "intr")
    }
    expected = passes if name != "razor" else 1 / len(calibration)
    assert passes_of[name] - passes_of["intr"] == pytest.approx(expected, abs=0.05)
