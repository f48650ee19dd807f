"""vLLM against transformers and against the plan: log-probabilities, tokens, and the cache."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from vllm.lora.request import LoRARequest
from vllm.model_executor.models import interfaces
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
from vllm.v1.kv_cache_interface import KVCacheLayout

from bosch.engines.vllm.plan import ModulePlan, Request, engine_heads, module_plan
from bosch.model.materialize import materialize
from bosch.window import Window
from stages.train.checkpoint import CheckpointWriter
from stages.train.stage import CHECKPOINTS, checkpoint_name
from tests.hybrid_case import KV_HEADS, small_model
from tests.tools import vllm_planner
from tests.tools.vllm_planner import two_kinds
from tests.vllm_case import (
    BATCH_TOKENS,
    BLOCK,
    SIZES,
    engine,
    generate,
    largest_difference,
    load_reference,
    mask_of_counts,
    random_prompts,
    save_hybrid,
    save_menu_hybrid,
)

WINDOW = 40  # not a multiple of a block
COUNTS = [1, 3, 2]
LAYERS = two_kinds(COUNTS, KV_HEADS, [WINDOW] * len(COUNTS))
LENGTHS = (5, WINDOW - 1, WINDOW, WINDOW + 1, 100, 200)
TOLERANCE = 1e-4
BYTES_PER_HEAD = 2 * SIZES["head_dim"] * 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("hybrid")
    save_hybrid(path, "qwen3", COUNTS, WINDOW)
    return path


@pytest.fixture(scope="module")
def reference(folder: Path) -> Any:
    return load_reference(folder)


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[Any]:
    with engine(folder, disable_log_stats=False) as running:
        yield running


def _agree(reference: Any, prompts: list[list[int]], outputs: list[Any]) -> None:
    for prompt, output in zip(prompts, outputs, strict=True):
        distance, greedy = largest_difference(reference, prompt, output)
        assert distance < TOLERANCE and greedy, len(prompt)


def _request(llm: Any) -> Request:
    config = llm.llm_engine.vllm_config
    return Request(256, BLOCK, config.max_in_flight_tokens)


def _check_cache(llm: Any, plan: ModulePlan) -> None:
    """The cache that the engine made holds as many requests as the plan's bytes say."""
    config, request = llm.llm_engine.vllm_config, _request(llm)
    worker = llm.llm_engine.model_executor.driver_worker.worker
    caches = [cache.untyped_storage() for cache in worker.model_runner.kv_caches]
    held = sum({cache.data_ptr(): cache.nbytes() for cache in caches}.values())
    tokens = held / plan.request_bytes(request, BYTES_PER_HEAD) * 256
    assert config.cache_config.kv_cache_size_tokens == pytest.approx(tokens, abs=1)


def test_a_mixed_batch_in_chunks_equals_transformers(llm: Any, reference: Any) -> None:
    """64 tokens a step: prompts are read in chunks, while other requests already generate."""
    prompts = random_prompts(LENGTHS)
    _agree(reference, prompts, generate(llm, prompts, 50))


def test_a_cached_prefix_equals_transformers(llm: Any, reference: Any) -> None:
    (prefix, tail, other) = random_prompts((170, 20, 25), seed=1)
    prompts = [prefix + tail, prefix + other]
    generate(llm, prompts[:1], 4, of_prompt=False)
    outputs = generate(llm, prompts, 20, of_prompt=False)
    assert all(output.num_cached_tokens >= 128 for output in outputs)
    _agree(reference, prompts, outputs)


def test_the_cache_equals_the_plan(llm: Any) -> None:
    _check_cache(llm, module_plan(LAYERS, _request(llm)))


def test_three_windows_equal_generate_and_the_plan(tmp_path: Path) -> None:
    mask = save_menu_hybrid(tmp_path, "qwen3", [WINDOW + 8, 24, 9])
    prompts = random_prompts(LENGTHS, seed=3)
    reference = load_reference(tmp_path)
    with engine(tmp_path) as llm:
        outputs = generate(llm, prompts, 30)
        plan = module_plan(engine_heads(mask.layers), _request(llm))
        assert plan.sliding_windows == {9, 24, WINDOW + 8}
        _check_cache(llm, plan)
    _agree(reference, prompts, outputs)
    for prompt, output in zip(prompts, outputs, strict=True):
        generated = reference.generate(
            torch.tensor([prompt]), max_new_tokens=30, min_new_tokens=30, do_sample=False
        )
        assert generated[0, len(prompt) :].tolist() == list(output.outputs[0].token_ids)


@pytest.mark.skipif(
    not hasattr(interfaces, "SupportsKVCacheGrouping"), reason="vLLM 0.33 lets a model group"
)
def test_unequal_modules_equal_transformers(
    folder: Path, reference: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a layout that the CPU's backend does not state, though its kernels take any stride."""
    layouts = KVCacheLayout.LBHNC, KVCacheLayout.BLHNC
    monkeypatch.setattr(CPUAttentionBackend, "supported_kv_cache_layouts", lambda: layouts)
    monkeypatch.setenv("VLLM_KV_CACHE_LAYOUT", "BLHNC")
    prompts = random_prompts(LENGTHS)
    with engine(folder) as llm:
        _agree(reference, prompts, generate(llm, prompts, 20))
        plan = module_plan(LAYERS, _request(llm), own_groups=True)
        assert plan.kinds.total() == 6
        _check_cache(llm, plan)


def test_preempted_requests_equal_transformers(folder: Path, reference: Any) -> None:
    request = Request(256, BLOCK, BATCH_TOKENS)
    pool = module_plan(LAYERS, request).pool(request)
    least = pool.reserved // pool.block + 1
    with engine(folder, num_gpu_blocks_override=least + 2, disable_log_stats=False) as llm:
        prompts = random_prompts([30] * 8, seed=2)
        outputs = generate(llm, prompts, 100)
        preempted = [m.value for m in llm.get_metrics() if m.name == "vllm:num_preemptions"]
        _agree(reference, prompts, outputs)
    assert sum(preempted) > 0


def test_the_record_equals_the_planner() -> None:
    for case in (*vllm_planner.cases(), *vllm_planner.random_cases(1, 10)):
        for own_groups in vllm_planner.groupings():
            planned = vllm_planner.bytes_by_plan(case, own_groups)
            assert planned == vllm_planner.bytes_by_vllm(case, own_groups)


def test_a_checkpoint_of_the_training_stage_equals_transformers(
    folder: Path, tmp_path: Path
) -> None:
    """Written by the stage itself, in several files, after a step that changed all weights."""
    (prompt,) = random_prompts((100,))
    untrained, trained = load_reference(folder), load_reference(folder)
    tokens = torch.tensor([prompt])
    trained(tokens, labels=tokens).loss.backward()
    torch.optim.SGD(trained.parameters(), lr=0.1).step()
    CheckpointWriter(tmp_path, folder, torch.float32, "1MB").write(1000, trained)
    checkpoint = tmp_path / CHECKPOINTS / checkpoint_name(1000)
    assert len(list(checkpoint.glob("*.safetensors"))) > 1
    with engine(checkpoint) as llm:
        (output,) = generate(llm, [prompt], 20)
    _agree(load_reference(checkpoint), [prompt], [output])
    assert largest_difference(untrained, prompt, output)[0] > TOLERANCE


@pytest.mark.parametrize(
    "counts",
    [
        # Heads are distributed while the weights load, so that each rank has as many full ones.
        [2, 4, 0],
        # With an odd number, one rank has a sliding head with a full-length cache.
        [1, 3, 2],
    ],
)
def test_two_ranks_equal_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, counts: list[int]
) -> None:
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    save_hybrid(tmp_path, "qwen3", counts, WINDOW)
    reference = load_reference(tmp_path)
    prompts = random_prompts(LENGTHS)
    layers = two_kinds(counts, KV_HEADS, [WINDOW] * len(counts))
    with engine(tmp_path, tensor_parallel_size=2) as llm:
        _agree(reference, prompts, generate(llm, prompts, 20))
        config = llm.llm_engine.vllm_config
        # The last block that fits is a part of a request.
        request = _request(llm)
        plan = module_plan(layers, request, 2)
        tokens = 2**30 / plan.request_bytes(request, BYTES_PER_HEAD) * 256
        assert config.cache_config.kv_cache_size_tokens == pytest.approx(tokens, rel=1e-3)


@pytest.mark.parametrize("trusted", [False, True])
def test_without_the_plugin_nothing_is_served(folder: Path, trusted: bool) -> None:
    """Otherwise vLLM would give every head of a layer the same cache and window."""
    program = (
        "import sys; from vllm import LLM\n"
        "if __name__ == '__main__':\n"
        f"    LLM(sys.argv[1], trust_remote_code={trusted}, skip_tokenizer_init=True,\n"
        "        dtype='float32', enforce_eager=True, max_model_len=256, block_size=32)\n"
        "    print('served')"
    )
    variables = {**os.environ, "VLLM_PLUGINS": "none"}
    done = subprocess.run(
        [sys.executable, "-c", program, str(folder)],
        env=variables, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode != 0 and "served" not in done.stdout
    assert "hybrid" in done.stderr.lower()


RANK = 4


def test_an_adapter_of_the_base_moves_with_the_heads(tmp_path: Path) -> None:
    """As transformers computes the hybrid of the base with the adapter merged."""
    base, mask = small_model("qwen3", **SIZES).float(), mask_of_counts([1, 3, 2], Window(40))
    base.save_pretrained(tmp_path / "base")
    materialize(base, mask).save_pretrained(tmp_path / "hybrid")
    generator, weights = torch.Generator().manual_seed(1), {}
    for name, linear in base.named_modules():
        if isinstance(linear, torch.nn.Linear) and name != "lm_head":
            shapes = {"A": (RANK, linear.in_features), "B": (linear.out_features, RANK)}
            a, b = (torch.randn(shape, generator=generator) / 8 for shape in shapes.values())
            weights[f"base_model.model.{name}.lora_A.weight"] = a
            weights[f"base_model.model.{name}.lora_B.weight"] = b
            linear.weight.data += b @ a
    (tmp_path / "adapter").mkdir()
    save_file(weights, tmp_path / "adapter" / "adapter_model.safetensors")
    targets = sorted({name.split(".")[-3] for name in weights})
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "target_modules": targets}
    config["base_model_name_or_path"] = str(tmp_path / "base")
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps(config))
    reference, prompts = materialize(base, mask).eval(), random_prompts((5, 39, 100))
    request = LoRARequest("adapter", 1, str(tmp_path / "adapter"))
    with engine(tmp_path / "hybrid", enable_lora=True, max_lora_rank=8) as llm:
        without = generate(llm, prompts, 12, False)
        outputs = generate(llm, prompts, 12, False, lora_request=request)
    for prompt, output, other in zip(prompts, outputs, without, strict=True):
        distance, greedy = largest_difference(reference, prompt, output)
        assert distance < TOLERANCE and greedy
        assert largest_difference(reference, prompt, other)[0] > 0.05
