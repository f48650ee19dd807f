"""Sequences split over gloo processes: attention, losses and gradients equal those of one."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from bosch.attention import hybrid_attention
from bosch.errors import RunError, UserError
from bosch.hybrid import (
    AttentionCall,
    AttentionContext,
    LogitTransform,
    required_state,
    set_head_state,
)
from bosch.model.families import split_fault
from bosch.model.interface import attention_modules
from bosch.model.materialize import materialize
from bosch.parallel.context import (
    Communicator,
    ContextParallel,
    ContextSplit,
    SplitPass,
    split_attention,
)
from bosch.window import Window
from stages.train.loss import install_loss
from tests import fake_varlen
from tests.attention_case import layout_of
from tests.hybrid_case import TESTED, mask_of, small_config, small_model, tokens
from tests.rank_processes import on_ranks
from tests.training_case import make_case, metrics, train_here, train_in_processes

ROWS, CHUNK, DIM, Q_PER_KV = 2, 24, 8, 2
LENGTH = 48  # of the models' sequences
CPU = torch.device("cpu")
# Windows of the KV heads: below a chunk, over several chunks, beyond the sequence; two windows in
# one layer; one KV head.
WINDOWS: list[list[int | None]] = [
    [None, 7, 7], [None, 60, 7], [1, None, 1], [25, 24, None], [1000, None, None], [7, 7], [None],
]  # fmt: skip


def _documents(length: int) -> Tensor:
    """Document of each token: many in one row, some of them short; two in the other."""
    begins = torch.zeros(ROWS, length, dtype=torch.long)
    generator = torch.Generator().manual_seed(0)
    begins[0, torch.randperm(length, generator=generator)[:9]] = 1
    begins[0, 20:22] = begins[1, length // 2 + 5] = 1
    begins[:, 0] = 0
    return begins.cumsum(-1)


def tokens_sent(split: ContextSplit, window: Window | None) -> int:
    """Token by token: the tokens that a rank's queries see and another rank holds.

    For a full head every rank gathers the whole sequence.
    """
    if window is None:
        return (split.ranks - 1) * split.length
    owner = [
        min(slot // split.chunk, 2 * split.ranks - 1 - slot // split.chunk)
        for slot in range(split.length)
    ]
    received = set()
    for query in range(split.length):
        for key in range(query + 1):
            seen = query - key < window.size or key < window.sinks
            if seen and owner[key] != owner[query]:
                received.add((owner[query], key))
    return len(received)


def compare_attention(
    windows: list[int | None],
    sinks: int,
    packed: bool,
    backend: str,
    communicator: Communicator,
) -> None:
    """Compare outputs, all gradients, and the bytes sent with the formula."""
    size, rank = communicator.ranks, communicator.rank
    length = 2 * size * CHUNK
    split = ContextSplit(length, size)
    head_windows = [None if window is None else Window(window, sinks) for window in windows]
    layout = layout_of(head_windows)
    generator = torch.Generator().manual_seed(1)
    heads = len(windows)
    shapes = [(ROWS, heads * Q_PER_KV, length, DIM), (ROWS, heads, length, DIM)]
    query, key, value = (
        torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()
        for shape in (shapes[0], shapes[1], shapes[1])
    )
    weight = torch.randn(ROWS, length, heads * Q_PER_KV, DIM, generator=generator).double()
    document = _documents(length) if packed else None
    context = AttentionContext(length, 0, document=document)
    states = [query, key, value]
    expected_out = hybrid_attention(*states, layout, context, backend="eager")
    held_tokens = torch.cat(
        [torch.arange(c * CHUNK, (c + 1) * CHUNK) for c in split.chunks_of(rank)]
    )
    held_states = [x.detach()[:, :, held_tokens].requires_grad_() for x in states]
    communicator.sent_bytes = 0
    split_pass = SplitPass(split, ROWS, document, communicator, CPU)
    call = AttentionCall(*held_states, layout, context, LogitTransform(DIM**-0.5), backend)
    out = split_attention(call, split_pass)
    sent = [communicator.sent_bytes]
    grads = torch.autograd.grad((out * weight[:, held_tokens]).sum(), held_states)
    expected_grads = torch.autograd.grad((expected_out * weight).sum(), states)
    sent.append(communicator.sent_bytes - sent[0])
    pairs = [(out, expected_out[:, held_tokens])]
    pairs += [
        (ours, theirs[:, :, held_tokens])
        for ours, theirs in zip(grads, expected_grads, strict=True)
    ]
    name = f"{windows} sinks {sinks} packed {packed} {backend} on {size}"
    for ours, theirs in pairs:
        torch.testing.assert_close(ours, theirs, atol=1e-9, rtol=1e-9, msg=lambda m: f"{name}: {m}")
    totals = torch.tensor(sent)
    dist.all_reduce(totals)
    formula = sum(tokens_sent(split, kind) for kind in head_windows) * ROWS * 2 * DIM * 8
    # Other documents' sinks are near, or are not those that another chunk has here.
    sink_bytes = ROWS * heads * sinks * 2 * size * 2 * DIM * 8 if packed else 0
    assert all(formula - sink_bytes <= total <= formula + sink_bytes for total in totals), (
        name,
        totals,
    )


def attention_on_ranks() -> None:
    """Every case on these ranks."""
    fake_varlen.install(pytest.MonkeyPatch())
    communicator = Communicator(dist.group.WORLD)
    for windows, (sinks, packed) in itertools.product(WINDOWS, ((0, False), (3, True))):
        compare_attention(windows, sinks, packed, "sdpa", communicator)
    for sinks, packed in ((3, False), (0, True)):
        compare_attention([None, 60, 7], sinks, packed, "sdpa", communicator)
    compare_attention([None, 7, 7], 3, True, "eager", communicator)
    for packed in (False, True):
        compare_attention([None, 60, 7], 3 * packed, packed, "flex", communicator)


def test_split_attention_equals_that_of_one_process() -> None:
    on_ranks(4, f"{__name__}:attention_on_ranks")


def compare_models(family: str, shared: ContextParallel) -> None:
    """One row has two documents, each with its own sinks."""
    base = small_model(family)
    hybrid = materialize(base, mask_of(base.config, Window(5, 2))).eval()
    hybrid.requires_grad_()
    ids, labels = tokens(2, LENGTH), tokens(2, LENGTH, seed=1)
    positions = torch.arange(LENGTH).repeat(2, 1)
    positions[0, 19:] -= 19
    batch = {"input_ids": ids, "labels": labels, "position_ids": positions}
    losses, gradients = [], []
    for split in (None, shared):
        install_loss(hybrid, context_parallel=split)
        if split is not None:
            split.install(hybrid)
            split.check(hybrid)
        loss = hybrid(**batch, num_items_in_batch=90)["loss"]
        weights = [p for p in hybrid.parameters() if p.requires_grad]
        grads = torch.autograd.grad(loss, weights, allow_unused=True, materialize_grads=True)
        losses.append(loss.detach().double())
        gradients.append(torch.cat([grad.flatten() for grad in grads]))
        if split is not None:
            dist.all_reduce(losses[1])
            dist.all_reduce(gradients[1])
    torch.testing.assert_close(losses[0], losses[1], atol=0, rtol=1e-6, msg=family)
    torch.testing.assert_close(*gradients, atol=2e-6, rtol=1e-4, msg=family)


def refuse_models(shared: ContextParallel) -> None:
    """One whose layer computes attention in a chunk alone, and one that cannot be split."""
    base = small_model("qwen3")
    hybrid = materialize(base, mask_of(base.config, Window(5, 2)))
    shared.install(hybrid)
    layer = attention_modules(hybrid)[1]
    set_head_state(layer, replace(required_state(layer), attend=None))
    with pytest.raises(RunError, match="a layer of the model does not take part"):
        shared.check(hybrid)
    hybrid.config.attention_dropout = 0.1
    with pytest.raises(UserError, match=r"cannot be split: .*dropout.*; set 1"):
        shared.install(hybrid)


def models_on_ranks(*families: str) -> None:
    shared = ContextParallel(dist.group.WORLD)
    refuse_models(shared)
    for family in families:
        compare_models(family, shared)


def test_models_on_split_sequences_equal_those_of_one_process() -> None:
    """Of the tested families those whose sequences may be split."""
    families = [name for name in TESTED if split_fault(small_config(name)) is None]
    assert len(families) >= 5
    on_ranks(2, f"{__name__}:models_on_ranks", *families)


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Path:
    case = make_case(tmp_path_factory.mktemp("case"))
    (case / "search").mkdir()
    records = [{"input_ids": [*range(5 + n)], "answer_length": 1 + n} for n in range(3)]
    (case / "search" / "calibration.jsonl").write_text("\n".join(map(json.dumps, records)))
    return case


@pytest.mark.parametrize(
    ("ranks", "split", "sharding", "train"),
    [
        (2, 2, "none", {"document_masking": True}),
        (4, 2, "fsdp", {"teacher": "original"}),
    ],
)
def test_training_on_split_sequences_equals_that_of_one_process(
    case: Path, tmp_path: Path, ranks: int, split: int, sharding: str, train: dict[str, Any]
) -> None:
    """With 32 tokens, 8 or 4 to a chunk, and a window of 6."""
    changes: dict[str, Any] = {
        "train": {**train, "total_tokens": 384, "checkpoint_tokens": []},
        "runtime": {"micro_batch_size": 1, "answers_every_steps": 2},
    }
    train_here(case, tmp_path / "one", **changes)
    changes["runtime"] |= {
        "context_parallel": split, "sharding": sharding, "checkpointing": "full",
    }  # fmt: skip
    done = train_in_processes(case, tmp_path / "many", ranks, **changes)
    assert done.returncode == 0, done.stderr
    # AdamW scales up the rounding of a small divergence's gradients.
    near = 1e-4 if "teacher" in train else 1e-6
    for ours, theirs in zip(metrics(tmp_path / "many"), metrics(tmp_path / "one"), strict=True):
        assert ours.get("answers") == theirs.get("answers"), ours["step"]
        names = ("loss", "grad_norm", *(["answer_log_likelihood"] if "answers" in theirs else []))
        for name in names:
            assert ours[name] == pytest.approx(theirs[name], rel=near), (name, ours["step"])


def test_a_sequence_is_cut_into_two_chunks_for_each_process() -> None:
    with pytest.raises(ValueError, match="100 tokens cannot be cut into 8 chunks"):
        ContextSplit(100, 4)
    for ranks in (0, -1):
        with pytest.raises(ValueError, match="cannot be cut into"):
            ContextSplit(8, ranks)


QWEN3 = {
    "model_type": "qwen3", "layer_types": ["full_attention"] * 2, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
}  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"rope_scaling": {"rope_type": "yarn"}}, None),
        ({"rope_scaling": {"type": "dynamic"}}, "RoPE depends on the length"),
        ({"rope_parameters": {"full_attention": {"rope_type": "longrope"}}}, "RoPE depends"),
        ({"attention_dropout": 0.1}, "attention dropout"),
        ({"layer_types": ["full_attention", "linear_attention"]}, "states pass from token"),
        ({"model_type": "gpt_oss"}, "positions that follow each other"),
        ({"text_config": SimpleNamespace(**QWEN3)}, "takes more than text"),
    ],
)
def test_models_that_cannot_be_split_are_refused(
    changes: dict[str, Any], reason: str | None
) -> None:
    fault = split_fault(SimpleNamespace(**{**QWEN3, **changes}))
    assert fault is None if reason is None else reason in str(fault)
