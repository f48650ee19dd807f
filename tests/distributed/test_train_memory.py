"""Peak memory of each of two ranks in training, summed over tensors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import Qwen3Config, Qwen3ForCausalLM

from bosch.heads import HeadMask
from bosch.model.materialize import materialize
from bosch.window import Window
from stages.train.footprint import float32_bytes, load_host_bytes
from tests.training_case import DEEPSPEED, SEQUENCE_LENGTH, make_case, train_in_processes

HIDDEN, INTERMEDIATE = 768, 3072


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_case(tmp_path_factory.mktemp("case"))


def measured(case: Path, work_dir: Path, **changes: Any) -> list[dict[str, Any]]:
    done = train_in_processes(case, work_dir, 2, module="tests.measured_training", **changes)
    assert done.returncode == 0, done.stderr
    return [json.loads((work_dir / f"measured.{rank}.json").read_text()) for rank in (0, 1)]


def test_fsdp_shards_gradients_between_micro_batches_and_keeps_bf16_layer_inputs(
    case: Path, tmp_path: Path
) -> None:
    """The same bytes after every micro-batch: half of the model in float32, for two ranks."""
    weights = load_file(case / "materialize" / "model" / "model.safetensors")
    parameters = sum(value.numel() for value in weights.values())
    layers, hidden = 2, 32
    for accumulation, micro in ((1, 2), (2, 1)):
        ranks = measured(
            case,
            tmp_path / str(accumulation),
            train={"total_tokens": 256, "checkpoint_tokens": [], "mixed_precision": "bf16"},
            runtime={
                "sharding": "fsdp", "micro_batch_size": micro, "checkpointing": "full",
            },
        )  # fmt: skip
        for rank in ranks:
            assert len(rank["gradients"]) == 2 * accumulation
            assert len(set(rank["gradients"])) == 1
            assert rank["gradients"][0] == float32_bytes(parameters, shards=2)
            assert set(rank["layer_outputs"]) == {"torch.bfloat16"}
            # Besides the layers' inputs in bf16: the last one's output, its sum, and of the head
            # the normed states and their gradient.
            inputs = layers * micro * SEQUENCE_LENGTH * hidden * 2
            assert max(rank["layer_inputs"]) <= inputs * (layers + 4) / layers, (accumulation, rank)


@pytest.fixture(scope="module")
def large(case: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The case with a model of 71 million parameters in bf16."""
    config = Qwen3Config(
        vocab_size=64, hidden_size=HIDDEN, intermediate_size=INTERMEDIATE, num_hidden_layers=8,
        num_attention_heads=8, num_key_value_heads=4, head_dim=96, tie_word_embeddings=True,
        max_position_embeddings=128, bos_token_id=None, eos_token_id=0,
    )  # fmt: skip
    base = Qwen3ForCausalLM(config).to(torch.bfloat16)
    folder = tmp_path_factory.mktemp("large")
    mask = HeadMask.from_swa_kv_heads([[0]] * 8, config.num_key_value_heads)
    materialize(base, mask, Window(6)).save_pretrained(folder / "materialize" / "model")
    (folder / "prepare").symlink_to(case / "prepare")
    return folder


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="peaks need Linux's /proc")
@pytest.mark.parametrize("sharding", ["fsdp", DEEPSPEED])
def test_loading_takes_little_more_than_one_bf16_model_per_node(
    large: Path, tmp_path: Path, sharding: str
) -> None:
    """Beyond the float32 shards the ranks keep, which on a GPU are not in the host's memory."""
    done = train_in_processes(
        large, tmp_path, 2, module="tests.measured_load",
        runtime={"sharding": sharding, "micro_batch_size": 1},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    ranks = [json.loads((tmp_path / f"load.{rank}.json").read_text()) for rank in (0, 1)]
    parameters = ranks[0]["parameters"]
    saved = load_host_bytes(parameters, 2, 2, sharding, processes=2, on_gpu=False)
    shard = float32_bytes(parameters, shards=2)
    print({name: [rank[name] / saved for rank in ranks] for name in ("peak", "kept")})
    assert all(0.9 * shard < rank["kept"] < 1.5 * shard for rank in ranks)
    one_weight = 4 * HIDDEN * INTERMEDIATE  # in float32, on each rank
    assert sum(rank["peak"] - rank["kept"] for rank in ranks) < 1.2 * saved + 2 * one_weight
