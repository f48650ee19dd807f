"""Planned bytes of training, against sums worked out by hand."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from bosch.model.families import DecoderLayers
from bosch.model.interface import attention_modules
from bosch.objective.block_bytes import BlockBytes, PeakMemory, SavedBytes
from bosch.objective.decoder_shape import DecoderShape
from bosch.window import Window
from stages.context import Runtime
from stages.train.fit import memory_budget
from stages.train.footprint import (
    TrainingJob,
    chunk_tokens,
    exchanged_bytes,
    liger_loss_bytes,
    load_host_bytes,
    loss_bytes,
    optimizer_bytes,
    restart_point_bytes,
    step_traffic,
    training_memory,
)
from stages.train.stage import TrainConfig
from tests.hybrid_case import small_config, small_model, tokens


class Shape(DecoderShape):
    """Sizes of no model, with the feed-forward blocks of Qwen3's layers and experts."""

    def blocks(self, value_bytes: int) -> BlockBytes:
        experts = self.hidden * self.experts_per_token
        trained = value_bytes * (4.0 * self.active_width + 3 * experts)
        frozen = value_bytes * (3.0 * self.active_width + experts)
        return BlockBytes(
            0, 0, 0, 0, trained=SavedBytes(trained, trained), frozen=SavedBytes(frozen, frozen)
        )


# Two layers of 1,500 parameters, two tables of 100 x 10, and a norm.
SHAPE = Shape(
    layers=2, hidden=10, vocabulary=100, tied=False,
    kinds=DecoderLayers(2, (0, 1), heads=2, head_dim=4),
    query_size=16, own_query_size=0, experts=0, experts_per_token=0, active_width=20,
    parameters=5010, active_parameters=4000, layer_parameters=1500, attention_parameters=800,
    expert_parameters=0, largest_weight=1000, tables=2010, linear_sides=300, attention_sides=200,
)  # fmt: skip
# The second layer slides in the original, too.
OWN: dict[str, Any] = {"windows": {1: 5}, "own_heads": 3, "own_head_dim": 6}
TOKENS = 8


def held(
    train: dict[str, Any], runtime: dict[str, Any], shape: DecoderShape = SHAPE, **more: Any
) -> Any:
    options = {"processes": 1, "tokens": TOKENS, "accumulation": 1, **more}
    settings = Runtime(**{"checkpointing": "none", **runtime})
    length, layers = options.pop("length", TOKENS), options.pop("layers", ())
    job = TrainingJob(shape, TrainConfig(**train), settings, length, layers)
    return training_memory(job, **options)


FSDP = {"sharding": "fsdp", "checkpointing": "full"}
EXPERTS = replace(SHAPE, experts=4, experts_per_token=2, expert_parameters=1000)
HEAD_LOGITS = replace(SHAPE, head_logits=True)
# Options, and bytes: differences from bf16 on one process without sharding and recomputation.
HELD: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any], dict[str, float]]] = {
    "one process": ({}, {}, {}, {
        "parameters": 4 * 5010, "gradients": 4 * 5010, "optimizer": 8 * 5010, "teacher": 0,
        # For a layer and token: norms 26 x 10, heads 12 x 16 + 10 x 8, MLP 4 x 2 x 20.
        "layer inputs": 2 * 8 * (260 + 272 + 160), "whole weights": 2 * 5010,
        "a layer's backward": 8 * (2 * 2 * 20 + 2 * 4 * 10),
        "attention workspace": 8 * 2 * 2 * (16 + 2 * 8), "exchanged keys": 0,
        "loss and logits": 3 * 8 * 100 * 4 + 8 * 10 * 2 + 100 * 10 * (4 + 2),
        "tables' gradients": 0, "peak": 81_212 + 20_040 + 1280 + 1024,
    }),
    "float32": ({"mixed_precision": "no"}, {}, {}, {
        "whole weights": 0, "layer inputs": 2 * 8 * ((8 + 16) * 10 + 20 * 16 + 16 * 8 + 16 * 20),
        "attention workspace": 2048, "loss and logits": 9600 + 320 + 8000,
        "a layer's backward": 8 * (160 + 80),
    }),
    "several processes": ({}, {}, {"processes": 4}, {
        "parameters": 4 * 5010, "gradients": 4 * 5010, "whole weights": 2 * 5010 + 4 * 5010,
    }),
    "accumulated": ({}, {}, {"accumulation": 2, "tokens": 800}, {
        "layer inputs": 2 * 800 * 692,
        "loss and logits": 3 * 800 * 400 + 800 * 20 + 6000,
        # At the loss, with the gradients of the micro-batch before.
        "peak": 20_040 + 2 * 20_040 + 1_107_200 + 10_020 + 982_000 + 20_040,
    }),
    "recomputed": ({}, {"checkpointing": "full"}, {}, {
        "layer inputs": 2 * 8 * 10 * 4, "a layer's backward": 8 * 692 + 1280,
    }),
    "attention kept": ({}, {"checkpointing": "attention"}, {}, {
        "layer inputs": 640 + 8 * (2 * 16 * 2 + 2 * 4 * 4), "a layer's backward": 8 * 692 + 1280,
    }),
    "offloaded": ({}, {"checkpointing": "full", "offload_activations": True}, {}, {
        "layer inputs": 320, "offloaded": 640,
    }),
    "fsdp": ({}, FSDP, {"processes": 2, "accumulation": 2}, {
        "parameters": 2 * 5010, "gradients": 2 * 5010, "optimizer": 4 * 5010,
        "layer inputs": 2 * 8 * 10 * 2,
        "whole weights": 2 * (1000 + 2 * 1500) + 2 * 1000,
        # Saved 16 x 10 + 272 + 160 a token; whole gradients of a layer, and of the embedding.
        "a layer's backward": 8 * 592 + 8 * (80 + 40) + 4 * 1500 + 2 * 1000,
        "tables' gradients": (2 + 4) * 2010,
        "peak": 10_020 + 20_040 + 320 + 10_000 + 10_020 + 13_696 + 1024, "ahead": 3000,
    }),
    "fsdp, first gradients": ({}, FSDP, {"processes": 2}, {
        "gradients": 2 * 5010 - 2 * (2 * 1500 + 1000),
    }),
    "fsdp, few tokens": ({}, FSDP, {"processes": 2, "tokens": 1}, {
        # Its own weights are more than activations.
        "a layer's backward": 2 * 1500 + 4 * 1500 + 2 * 1000,
    }),
    "fsdp, tied": ({}, FSDP, {"processes": 2, "shape": replace(SHAPE, tied=True)}, {
        "gradients": 2 * 5010 - 2 * 2 * 1500, "whole weights": 2 * (1000 + 2 * 1500),
    }),
    "fsdp, many tokens": ({}, FSDP, {"processes": 2, "tokens": 800, "accumulation": 2}, {
        # At the loss, without the layer that is gathered ahead.
        "peak": 10_020 + 20_040 + 32_000 + 10_000 + 982_000 + 10_020 - 3000,
    }),
    "deepspeed": ({}, {"sharding": "deepspeed", "checkpointing": "full"}, {"processes": 2}, {
        "optimizer": 4 * 5010 + 5010, "ahead": 0,
    }),
    "deepspeed, attention alone": (
        {"freeze": "attention_only"}, {"sharding": "deepspeed", "checkpointing": "full"},
        {"processes": 2}, {"parameters": 2 * 800, "optimizer": 4 * 800 + 5010},
    ),
    "attention alone": ({"freeze": "attention_only"}, {}, {}, {
        "gradients": 4 * 800, "optimizer": 8 * 800, "whole weights": 2 * 5010,
        "layer inputs": 2 * 8 * ((8 + 6) * 10 + 272 + 120), "loss and logits": 9600 + 160,
    }),
    "adapters": ({"lora": {"rank": 3}}, {}, {}, {
        "parameters": 4 * (5010 + 900), "gradients": 4 * 900, "whole weights": 2 * (5010 + 900),
        # Norms keep 18 bytes a number, not 26, queries and keys a number less.
        "layer inputs": 2 * 8 * (180 + 224 + 4 * 2 * 20), "loss and logits": 9600 + 160,
    }),
    "adapters of attention": ({"lora": {"rank": 3}, "freeze": "attention_only"}, {}, {}, {
        "parameters": 4 * (5010 + 600), "gradients": 4 * 600, "tables' gradients": 0,
    }),
    "adapters, fsdp": ({"lora": {"rank": 3}}, FSDP, {"processes": 2, "tokens": 1}, {
        # Three tenths of a layer's weights.
        "gradients": 2 * 900 - 2 * 900, "a layer's backward": 2 * 450 + 4 * 450,
        "tables' gradients": 0,
    }),
    "taught": ({"teacher": "original"}, {}, {}, {
        "teacher": 2 * 5010, "loss and logits": 6 * 8 * 400 + 3 * 160 + 6000,
        "peak": 81_212 + 10_020 + 25_680,  # at the loss
    }),
    "taught, fsdp": ({"teacher": "original"}, FSDP, {"processes": 2}, {
        "teacher": 5010 + 2 * 2010,
    }),
    "experts": ({}, {}, {"shape": EXPERTS}, {
        "whole weights": 2 * (5010 - 1000),
        "layer inputs": 2 * 8 * (260 + 272 + 4 * 4 * 20 + 3 * 4 * 10 * 2),
        "a layer's backward": 8 * (4 * 2 * 20 + 2 * 4 * 10),
    }),
    "experts, adapters": ({"lora": {"rank": 3}}, {}, {"shape": EXPERTS}, {
        "layer inputs": 2 * 8 * (180 + 224 + 3 * 4 * 20 + 4 * 10 * 2),
    }),
    "split": ({}, {"context_parallel": 2}, {"length": 8, "tokens": 16, "processes": 2}, {
        # Two sequences, two full heads, keys and values of 4 numbers of 2 bytes.
        "layer inputs": 2 * (8 * 692 + 2 * 16 * 2 * 8),
        "exchanged keys": 2 * 16 * 2 * 3 * 8, "attention workspace": 1024,
    }),
    "split and sliding": (
        {}, {"context_parallel": 2, "checkpointing": "full"},
        {"length": 8, "tokens": 8, "processes": 2, "layers": [{None: 0, Window(1): 2}] * 2}, {
            "layer inputs": 2 * 4 * 40, "exchanged keys": 16 * 2 * 4 + 16 * 2 * 4,
        },
    ),
    "split, own window": (
        # Two sequences: 16 bytes a head for 8 tokens, 24 a head for 10, those of chunks 1 and 2.
        {}, {"context_parallel": 2}, {
            "length": 8, "tokens": 16, "processes": 2, "shape": replace(
                SHAPE, kinds=replace(SHAPE.kinds, full=(0,), **OWN)
            ),
        }, {
            "layer inputs": 2 * 8 * 692 + 2 * 16 * 2 * 8 + 2 * 24 * 3 * 10,
            "exchanged keys": 2 * 16 * 2 * 3 * 8,
        },
    ),
    "split, only its own window": (
        {}, {"context_parallel": 2, "checkpointing": "full"}, {
            "length": 8, "tokens": 8, "processes": 2, "layers": [{None: 0, Window(1): 2}],
            "shape": replace(SHAPE, kinds=replace(SHAPE.kinds, full=(0,), **OWN)),
        }, {"exchanged keys": 24 * 3 * 10 + 24 * 3 * 10},
    ),
    "norms after the blocks": ({}, {}, {"shape": replace(SHAPE, norms=4)}, {
        "layer inputs": 2 * 8 * (2 * 260 + 272 + 160),
    }),
    "capped scores": (
        # 4 query heads, and 4 in the layer that slides: 8 tokens, 10 bytes each.
        {}, {}, {"length": 8, "shape": replace(
            SHAPE, softcap=True, kinds=replace(SHAPE.kinds, full=(0,), **OWN)
        )},
        {
            "layer inputs": 2 * 8 * 692 + 2 * 4 * 64 * 10,
            "a layer's backward": 4 * 64 * 8,  # gradients before and after the softmax
        },
    ),
    "capped scores of split sequences": (
        {}, {"context_parallel": 2}, {"processes": 2, "shape": replace(SHAPE, softcap=True)},
        {"layer inputs": 2 * (4 * 692 + 16 * 2 * 8) + 2 * 4 * 64 * 10 // 2},
    ),
    "logits of heads, fused": ({}, {}, {"length": 8, "shape": HEAD_LOGITS}, {
        "layer inputs": 2 * 8 * 692,
    }),
    "logits of heads": (
        {}, {"attention": "sdpa", "checkpointing": "full"}, {"length": 8, "shape": HEAD_LOGITS},
        {"a layer's backward": 8 * 692 + 4 * 64 * 6 + 4 * 64 * 8},
    ),
    "liger": ({"liger": True}, {}, {}, {
        "layer inputs": 2 * 8 * (12 * 10 + 8 * 16 + 6 * 8 + 6 * 20),
        # One chunk: 8 tokens over ten times more words than widths, rounded to a power of two.
        "loss and logits": 1 * 100 * 2 + 160 + 100 * 10 * 10,
    }),
}  # fmt: skip


@pytest.mark.parametrize(
    ("train", "sharding", "tied", "expected"),
    [
        ({}, "none", False, 12 * 5010),
        ({}, "fsdp", True, 12 * 5010 + 4 * 1000),
        ({"lora": {"rank": 3}}, "none", False, 4 * (5010 + 900) + 8 * 900),
        ({"freeze": "attention_only"}, "fsdp", False, 4 * 5010 + 8 * 800),
        ({"freeze": "attention_only"}, "deepspeed", True, 12 * 800),
        ({}, "deepspeed", True, 12 * 5010),
    ],
)
def test_a_restart_point_has_the_state_that_training_resumes_from(
    train: dict[str, Any], sharding: str, tied: bool, expected: int
) -> None:
    shape = replace(SHAPE, tied=tied)
    assert restart_point_bytes(shape, TrainConfig(**train), sharding) == expected


@pytest.mark.parametrize("name", HELD)
def test_planned_bytes_of_a_process_equal_the_sum_by_hand(name: str) -> None:
    train, runtime, more, expected = HELD[name]
    memory = held(train, runtime, **more)
    found = {
        **memory.breakdown, "peak": memory.peak, "offloaded": memory.offloaded,
        "ahead": memory.ahead,
    }  # fmt: skip
    assert {key: found[key] for key in expected} == pytest.approx(expected)


def test_a_recurrence_needs_the_measured_memory_of_its_block() -> None:
    shape = DecoderShape.of(small_config("bamba"))  # the layer in the middle has one
    without = replace(shape, kinds=replace(shape.kinds, states={}))
    blocks = shape.blocks(2)
    for checkpointing, more in (("none", 3 * blocks.others), ("full", 0)):
        options = {"checkpointing": checkpointing}
        found, plain = (held({}, options, shape=one) for one in (shape, without))
        assert found.layer_inputs - plain.layer_inputs == pytest.approx(TOKENS * more)
        if checkpointing == "none":
            assert found.layer == pytest.approx(TOKENS * blocks.added) and found.layer > plain.layer
    assert TOKENS * blocks.both_other < found.layer < 1.5 * TOKENS * blocks.both_other


# Activations of many operations, experts with clamped gates, layers with and without experts, maps
# in no block, and two maps instead of three.
@pytest.mark.parametrize(
    "family", ["qwen3", "apertus", "phi", "gpt_oss", "dots1", "opt", "nemotron", "qwen3_moe"]
)
@pytest.mark.parametrize("freeze", ["none", "attention_only"])
def test_wider_feed_forward_blocks_need_what_autograd_saves_more(family: str, freeze: str) -> None:
    if (family, freeze) == ("phi", "attention_only"):
        pytest.skip("its lowest block, parallel to attention, has no gradient")
    stated, saved = [], []
    name = {"opt": "ffn_dim", "qwen3_moe": "moe_intermediate_size"}.get(family, "intermediate_size")
    for width in (96, 384):
        model = small_model(family, **{name: width})
        if freeze == "attention_only":
            model.requires_grad_(False)
            for attention in attention_modules(model):
                attention.requires_grad_(True)
        with PeakMemory() as memory:
            logits = model(tokens(1, 128), use_cache=False).logits
            saved.append(memory.now)
        del logits
        options = {"mixed_precision": "no", "freeze": freeze}
        sizes = {"shape": DecoderShape.of(model.config), "tokens": 128, "length": 128}
        stated.append(held(options, {}, **sizes).layer_inputs)
    assert stated[1] - stated[0] == pytest.approx(saved[1] - saved[0], rel=0.1)


def test_a_block_that_cannot_be_measured_is_estimated_and_named(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    for family in ("gemma4_text", "mixtral"):  # a map of other inputs, experts without float32
        assert DecoderShape.of(small_config(family)).blocks(4).saved > 0
    assert not caplog.messages
    shape = DecoderShape.of(small_config("bamba", vocab_size=62))  # measured by no other test

    def refused(*args: Any, **kwargs: Any) -> Any:
        raise ValueError("a kernel for CUDA alone")

    block = shape.model.get_decoder().layers[1].mamba
    monkeypatch.setattr(type(block), "forward", refused)
    assert shape.blocks(2).others > 0
    [message] = caplog.messages
    assert type(block).__name__ in message and "a kernel for CUDA alone" in message


def test_extra_logits_are_kept_on_a_cpu_if_auto_is_sdpa() -> None:
    train = TrainConfig(batch_tokens=TOKENS, total_tokens=TOKENS, checkpoint_tokens=[])
    needs = {}
    for on_gpu, attention in product((False, True), ("auto", "sdpa")):
        runtime = Runtime(checkpointing="none", attention=attention)
        job = TrainingJob(HEAD_LOGITS, train, runtime, TOKENS)
        needs[on_gpu, attention] = memory_budget(job, 1, 1e9, on_gpu)
    peaks = {name: need.memory.peak for name, need in needs.items()}
    assert peaks[False, "auto"] == peaks[False, "sdpa"] == peaks[True, "sdpa"] > peaks[True, "auto"]
    assert needs[False, "auto"].runtime.attention == "auto"


@pytest.mark.parametrize(
    ("row", "ranks", "kept", "added"),
    [
        ({None: 1}, 2, 16, 48),
        # Chunks of 4 with two tokens before each: 4 + 6 on the first process, 6 + 6 on the second.
        ({Window(3): 1}, 2, 12, 12),
        ({Window(1): 1}, 2, 8, 8),
        ({Window(16): 1}, 2, 20, 20),
        ({None: 1, Window(3): 2}, 2, 16 + 24, 48 + 24),
        # Chunks of 2: 2 + 4, 4 + 4, 4 + 4, 4 + 4, with two tokens before each except the first.
        ({Window(3): 1}, 4, 8, 8),
    ],
)
def test_keys_that_a_process_holds_of_a_split_sequence(
    row: dict[Window | None, int], ranks: int, kept: int, added: int
) -> None:
    """Keys and values of 4 numbers of 2 bytes for 3 sequences; three own heads of 6 with W = 5."""
    each = 2 * 4 * 2 * 3
    shape = replace(SHAPE, kinds=replace(SHAPE.kinds, **OWN))
    # With a window of 5 tokens four before each chunk, if there are as many.
    own = 2 * 6 * 2 * 3 * 3 * (16 if ranks == 2 else 12)
    expected = [(each * kept, each * added), (own, own)]
    job = TrainingJob(shape, TrainConfig(), Runtime(context_parallel=ranks), 16, [row])
    assert exchanged_bytes(job, 3) == expected


@pytest.mark.parametrize(
    ("train", "checkpointing", "expected"),
    [
        ({}, "none", 2 * 2 * 2),  # bytes, passes, sequences of 16 in a step of 32
        ({}, "full", 2 * 3 * 2),
        ({"mixed_precision": "no"}, "attention", 4 * 3 * 2),
    ],
)
def test_bytes_that_a_step_sends(train: Any, checkpointing: Any, expected: int) -> None:
    """For a full head each of two processes receives 8 tokens, for a window of 3 twice 2, and 2."""
    options = TrainConfig(**train, batch_tokens=32, total_tokens=64)
    runtime = Runtime(context_parallel=2, checkpointing=checkpointing)
    values = 2 * 4 * (16 + 2 * (2 + 2 + 2 - 2))
    rows = [{None: 1}, {Window(3): 2}]
    full = 2 * 4 * (16 * 2 * 2)
    job = TrainingJob(SHAPE, options, runtime, 16, rows)
    sent = step_traffic(job)
    assert sent == expected * values
    taught = options.model_copy(update={"teacher": "original"})
    more = step_traffic(replace(job, train=taught)) - sent
    assert more == (4 if train else 2) * 2 * full


WORDS = 2**20  # a chunk is 64 tokens of these


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (chunk_tokens(WORDS), 64),
        (chunk_tokens(2**27), 1),
        (chunk_tokens(WORDS, distilled=True), 32),
        (chunk_tokens(2**26, distilled=True), 1),
        (loss_bytes(100, 3, WORDS, 2, True), 3 * 2**28 + 100 * 3 * 2 + WORDS * 3 * 6),
        (loss_bytes(100, 3, WORDS, 2, True, True), 6 * 2**27 + 3 * 600 + WORDS * 3 * 6),
        # 1,000 words of 10 numbers: chunks of a hundredth, 25 tokens, and so 32.
        (loss_bytes(100, 3, WORDS, 2, False, capped=True), 4 * 2**28 + 600),
        (loss_bytes(100, 3, WORDS, 2, False, True, True), 8 * 2**27 + 3 * 600),
        (SHAPE.score_bytes(8, 100, None, 2), 8 * 100 * 100 * 6),
        (SHAPE.score_bytes(8, 100, None, 4), 8 * 100 * 100 * 4),
        (SHAPE.score_bytes(8, 2**12, None, 2), (8 * 2**24 + 2**24) / 2 * 6),
        (SHAPE.score_bytes(8, 100, Window(20), 2), 8 * 100 * 40 * 6),
        (replace(SHAPE, softcap=True).score_bytes(1, 10, None, 2), 100 * 10),
        (replace(SHAPE, softcap=True).score_bytes(1, 10, None, 4), 100 * 8),
        (SHAPE.score_gradient_bytes(8, 100, None), 8 * 100 * 100 * 8),
        (SHAPE.score_gradient_bytes(8, 2**12, None), 2**24 * 8),
        (SHAPE.score_gradient_bytes(8, 100, Window(20)), 8 * 100 * 40 * 8),
        (liger_loss_bytes(2500, 10, 1000, 2, True), 32 * 1000 * 2 + 2500 * 20 + 10_000 * 10),
        (liger_loss_bytes(2500, 10, 1000, 4, True), 32 * 1000 * 4 + 2500 * 40 + 10_000 * 8),
        (liger_loss_bytes(30, 10, 10, 2, False), 30 * 10 * 2 + 30 * 20),
        (liger_loss_bytes(3200, 10, 1000, 2, False), 32 * 1000 * 2 + 3200 * 20),
        (optimizer_bytes(512, 2), 2048),
        (load_host_bytes(100, 2, 4, "none", 8, False), 3200),
        (load_host_bytes(100, 2, 4, "none", 8, True), 200),
        (load_host_bytes(100, 2, 4, "fsdp", 8, False), 200),
        (load_host_bytes(100, 2, 4, "deepspeed", 8, True), 400),
        (load_host_bytes(100, 4, 2, "deepspeed", 8, True), 400),
    ],
)
def test_formulas_give_known_bytes(found: float, expected: float) -> None:
    assert found == expected
