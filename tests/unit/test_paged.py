"""Continuous batching of transformers on a hybrid: tokens, pages, and what is refused."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from transformers import ContinuousBatchingConfig
from transformers.generation.continuous_batching.cache import PagedAttentionCache
from transformers.generation.continuous_batching.distributed import DistributedHelper

from bosch.errors import UserError
from bosch.heads import HeadMask
from bosch.model.cache_size import PAGE_SIZE, CacheSize
from bosch.model.families import decoder_layers
from bosch.model.head_table import heads_by_window
from bosch.model.materialize import materialize
from bosch.model.search_mode import mask_shape
from bosch.window import Window
from tests.hybrid_case import OWN_WINDOW, mask_of, small_model, tokens

WINDOW, NEW, PAGE = int(OWN_WINDOW["sliding_window"]), 10, 4
PROMPTS = [tokens(1, length, seed=length)[0].tolist() for length in (3, 20, 11)]


def _hybrid(
    family: str = "qwen3", window: Window | None = None, mask: Callable[[Any], HeadMask] = mask_of,
    **changes: Any,
) -> Any:  # fmt: skip
    model = small_model(family, **changes)
    hybrid = materialize(model, mask(model.config), window or Window(WINDOW))
    hybrid.generation_config.update(do_sample=False, max_new_tokens=NEW, eos_token_id=-1)
    return hybrid


def _all_full(config: Any) -> HeadMask:
    return HeadMask.all_full(*mask_shape(config))


def _all_sliding(config: Any) -> HeadMask:
    return HeadMask.all_sliding(*mask_shape(config))


def _options(**options: Any) -> ContinuousBatchingConfig:
    return ContinuousBatchingConfig(**{"num_blocks": 40, "page_size": PAGE, **options})


def _greedy(model: Any, prompt: list[int]) -> list[int]:
    output = model.generate(torch.tensor([prompt]), max_new_tokens=NEW, do_sample=False)
    return list(output[0, len(prompt) :].tolist())


# Plain logits; capped ones and own windows; a logit of each head, experts.
@pytest.mark.parametrize(
    ("family", "mask"),
    [
        *((family, mask_of) for family in ("qwen3", "gemma2", "gpt_oss")),
        # Heads of one kind, for which transformers makes a single mask.
        *(("qwen3", _all_full), ("qwen3", _all_sliding), ("gemma2", _all_sliding)),
    ],
)
@pytest.mark.parametrize("backend", ["sdpa", "eager"])
def test_batched_tokens_equal_those_of_generate(
    family: str, mask: Callable[[Any], HeadMask], backend: str
) -> None:
    """Prompts are read in pieces of 8 tokens, together with requests that decode."""
    hybrid = _hybrid(family, mask=mask)
    hybrid.set_attn_implementation(backend)
    expected = [_greedy(hybrid, prompt) for prompt in PROMPTS]
    outputs = hybrid.generate_batch(
        PROMPTS, continuous_batching_config=_options(max_batch_tokens=8)
    )
    assert [output.generated_tokens for output in outputs.values()] == expected
    assert _greedy(hybrid, PROMPTS[1]) == expected[1], "the model is as it was"


def test_slices_have_equally_many_heads_of_a_kind() -> None:
    full = np.array([[True, True, False, False, False]] * 3)
    heads = {"num_attention_heads": 10, "num_key_value_heads": 5}
    hybrid = _hybrid(mask=lambda _: HeadMask(full), **heads)
    outputs = hybrid.generate_batch(PROMPTS[:1], continuous_batching_config=_options())
    assert [output.generated_tokens for output in outputs.values()] == [_greedy(hybrid, PROMPTS[0])]


def test_requests_hold_the_pages_of_the_formula() -> None:
    hybrid = _hybrid("gemma2")
    config = hybrid.init_continuous_batching(
        continuous_batching_config=_options(max_batch_tokens=64)
    ).model.config
    cache = PagedAttentionCache(
        config,
        _options(max_batch_tokens=64, max_memory_percent=0.5),
        "cpu",
        DistributedHelper(None, None, {}),
        hybrid.dtype,
    )
    kinds = decoder_layers(hybrid.config)
    rows = heads_by_window(hybrid.config)
    size = CacheSize.of(rows, kinds, hybrid.dtype.itemsize, state_bytes=0)
    for length in (1, PAGE, WINDOW, WINDOW + 1, 30):
        name = f"of {length}"
        for allocator in cache.cache_allocators.values():
            for _ in range(allocator.needs_new_sectors(name, 0, length)):
                cache.pool.allocate_sector(allocator.index)
            allocator.allocate_cache_to_request(name, 0, length)
        held = sum(
            len(a.block_table[name]) * a.bytes_per_block for a in cache.cache_allocators.values()
        )
        assert held == size.paged(length, PAGE), length
    assert ContinuousBatchingConfig().page_size == PAGE_SIZE
    assert size.paged(30, PAGE) < size.original(30)


@pytest.mark.parametrize(
    ("family", "window", "reason"),
    [
        ("qwen3", Window(WINDOW, 2), "sinks"),
        ("qwen3", Window(1), "a window of 1"),
        ("gemma2", Window(WINDOW + 3), f"the windows {WINDOW}, {WINDOW + 3}"),
        ("gemma4_text", Window(WINDOW), "heads of two sizes"),
        ("qwen3_next", Window(WINDOW), "layers with states of a fixed size"),
        ("stablelm", Window(WINDOW), "layers that do not hand"),
    ],
)
def test_hybrids_that_continuous_batching_does_not_support_are_refused(
    family: str, window: Window, reason: str
) -> None:
    hybrid = _hybrid(family, window)
    with pytest.raises(UserError, match=f"this model has {reason}.*; call generate"):
        hybrid.generate_batch([[5, 6, 7]])


def test_the_server_of_transformers_batches_a_hybrid() -> None:
    """What `transformers serve --continuous-batching` calls for a request."""
    serving = pytest.importorskip("transformers.cli.serving.utils", reason="needs the extra serve")
    hybrid, prompt = _hybrid(), PROMPTS[1]
    expected = _greedy(hybrid, prompt)
    manager = serving.CBGenerateManager(_options(max_batch_tokens=64))
    manager.init_cb(hybrid, hybrid.generation_config)

    class Numbers:
        def decode(self, ids: list[int], **options: Any) -> str:
            return str(ids)

    try:
        text, length, _ = asyncio.run(
            manager.generate_non_streaming(
                hybrid, Numbers(), {"input_ids": prompt}, hybrid.generation_config, "first"
            )
        )
    finally:
        manager.stop()
    assert (text, length) == (str(expected), len(prompt))
