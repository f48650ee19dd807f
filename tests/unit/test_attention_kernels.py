"""Which kernels and backends attention runs, as far as a CPU can tell."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend
from torch.profiler import ProfilerActivity, profile

from bosch.attention import BACKENDS, causal, fastest_backend, hybrid_attention, kernels
from bosch.attention import context as contexts
from bosch.attention.kernels import FUSED_KERNELS, fused_attention
from bosch.model.families import logit_needs
from bosch.model.materialize import materialize
from bosch.window import Window
from tests.attention_case import Case
from tests.hybrid_case import mask_of, small_model

ROOT = Path(__file__).resolve().parents[2]


def test_one_place_calls_torchs_attention() -> None:
    callers = [
        path.relative_to(ROOT).as_posix()
        for package in ("bosch", "stages", "pipeline", "data_prep")
        for path in (ROOT / package).rglob("*.py")
        if ".scaled_dot_product_attention(" in path.read_text(encoding="utf-8")
    ]
    assert callers == ["bosch/attention/kernels.py"]
    assert SDPBackend.MATH not in FUSED_KERNELS


def states(queries: int, keys: int, dtype: torch.dtype) -> list[torch.Tensor]:
    torch.manual_seed(0)
    shapes = [(2, 6, queries, 16), (2, 2, keys, 16), (2, 2, keys, 16)]
    return [torch.randn(shape, dtype=dtype) for shape in shapes]


@pytest.mark.parametrize("masked", [False, True])
def test_heads_are_repeated_where_a_gpus_kernels_do_not_share_them(
    masked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU: same values, no grouped heads under a mask, and no math kernel among many."""
    query, key, value = states(64, 64, torch.float32)
    mask = torch.rand(2, 1, 64, 64).gt(0.3) | torch.eye(64, dtype=torch.bool) if masked else None
    expected = fused_attention(query, key, value, scale=0.3, mask=mask, is_causal=not masked)
    calls: list[dict[str, Any]] = []
    entered: list[Any] = []
    attend = torch.nn.functional.scaled_dot_product_attention

    def noted(*args: Any, **options: Any) -> torch.Tensor:
        calls.append(options)
        return attend(*args, **options)

    def allowed(backends: list[SDPBackend]) -> Any:
        entered.append(backends)
        return torch.no_grad()

    monkeypatch.setattr(kernels, "is_gpu", lambda states: True)
    monkeypatch.setattr(kernels, "can_use_flash_attention", lambda arguments: not masked)
    monkeypatch.setattr(kernels, "SMALL_LOGITS", 100)
    monkeypatch.setattr(kernels, "sdpa_kernel", allowed)
    monkeypatch.setattr(kernels.F, "scaled_dot_product_attention", noted)
    result = fused_attention(query, key, value, scale=0.3, mask=mask, is_causal=not masked)
    torch.testing.assert_close(result, expected)
    assert [call["enable_gqa"] for call in calls] == [not masked]
    assert entered == [FUSED_KERNELS]


def test_documents_need_no_mask_and_cost_their_own_squares() -> None:
    """Full heads: as many operations as the documents by themselves, and no mask of all pairs."""
    lengths = [100, 300, 112]
    numbers = torch.arange(3).repeat_interleave(torch.tensor(lengths))
    case = Case(512, 16, 0, (True, True))
    context = contexts.AttentionContext(512, document=numbers[None])
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
        hybrid_attention(*case.tensors(torch.float32), case.layout(), context)
    calls = [e for e in profiler.events() if e.name == "aten::scaled_dot_product_attention"]
    assert [call.input_shapes[0][2] for call in calls] == lengths


def test_padded_rows_need_no_mask_and_cost_their_own_squares(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rows padded on the left are computed one by one: outputs and gradients are eager's."""
    monkeypatch.setattr(causal, "LEAST_PADDED", 2)
    case = Case(40, 8, 0, (True, False), batch=3, padding="left", seed=3)
    padding = case.context().left_padding()
    assert padding is not None and len({*padding}) == 3
    calls = []

    def attention(query: Tensor, key: Tensor, *others: Any, **options: Any) -> Tensor:
        calls.append((query.shape, options["mask"]))
        return fused(query, key, *others, **options)

    fused = causal.fused_attention
    monkeypatch.setattr(causal, "fused_attention", attention)
    results = {}
    for backend in ("eager", "sdpa"):
        tensors = case.tensors()
        out = hybrid_attention(*tensors, case.layout(), case.context(), backend=backend)
        out = out * case.context().valid[:, :, None, None]
        results[backend] = [out, *torch.autograd.grad(out.square().sum(), tensors)]
    for eager, fast in zip(*results.values(), strict=True):
        torch.testing.assert_close(fast, eager)
    own = [(shape[0], shape[2]) for shape, mask in calls if shape[2] > 1 and mask is None]
    assert {(1, 40 - slots) for slots in padding} <= {*own}
    assert not [shape for shape, mask in calls if shape[2] == 40 and mask is not None]


@pytest.mark.parametrize("padding", ["right", "holes"])
def test_other_padding_takes_a_mask(padding: str) -> None:
    case = Case(40, 8, 0, (True, False), batch=3, padding=padding, seed=3)
    assert case.context().left_padding() is None
    assert Case(40, 8, 0, (True,)).context().left_padding() is None


def test_the_fastest_backend_is_the_first_that_has_what_is_needed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    half = torch.bfloat16
    assert fastest_backend(half) == ("sdpa" if not torch.cuda.is_available() else "flash")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for name in ("flash", "varlen", "flex"):
        monkeypatch.setitem(BACKENDS, name, BACKENDS[name]._replace(usable=lambda: True))
    assert fastest_backend(half) == "flash"
    assert fastest_backend(half, sinks=4) == fastest_backend(torch.float32) == "flex"
    assert fastest_backend(half, dropout=0.1) == "flash"
    assert fastest_backend(half, sinks=4, dropout=0.1) == "sdpa"
    assert fastest_backend(half, logits={"softcap"}) == "sdpa"
    assert fastest_backend(half, logits={"head_logits"}) == "flash"
    monkeypatch.setitem(BACKENDS, "flash", BACKENDS["flash"]._replace(usable=lambda: False))
    assert fastest_backend(half) == "varlen"


def test_families_say_what_their_logits_need() -> None:
    needs = {
        family: set(logit_needs(materialize(model, mask_of(model.config), Window(5)).config))
        for family in ("qwen3", "gemma2", "gpt_oss")
        for model in (small_model(family),)
    }
    assert needs == {"qwen3": set(), "gemma2": {"softcap"}, "gpt_oss": {"head_logits"}}
