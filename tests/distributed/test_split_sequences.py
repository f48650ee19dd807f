"""Search and evaluation shared by gloo processes give the results of one."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from bosch.budget import LayerHeads
from bosch.context_split import ContextSplit
from bosch.heads import HeadMask
from bosch.model.cache import HybridCache, held_bytes
from bosch.model.context_parallel import ContextParallel
from bosch.model.families import decoder_layers
from bosch.model.materialize import materialize
from bosch.model.search_mode import mask_shape, prepare_for_search
from bosch.objective.calibration import CalibrationSet
from bosch.objective.objective import Objective
from bosch.ranks import Ranks
from bosch.window import Window
from stages.context import ModelConfig, Runtime, StageConfig
from stages.evaluate.generation import Question, generate
from stages.evaluate.shared_reading import SharedReading
from stages.evaluate.stage import EvaluateConfig
from stages.evaluate.suites.positions.suite import token_losses
from tests.hybrid_case import mask_of, small_model, tokens
from tests.rank_processes import on_ranks, run_order
from tests.search_case import order
from tests.tiny_data import save_tiny_model

MENU = (Window(9, 2), Window(5, 2))
EXAMPLES = (40, 33, 37, 21, 45)
# Batches with padding and without; the last is shorter than its chunks with padding at the end.
LENGTHS = ((7, 41, 60), (52,), (33, 33), (6,))
TOKENIZER: Any = SimpleNamespace(
    pad_token_id=0, decode=lambda ids, **_: " ".join(map(str, ids)), encode=None
)


def masks(layers: int, heads: int) -> list[tuple[HeadMask, int]]:
    """Masks with the windows of this menu, each with the layers it shares with later ones."""
    generator = np.random.default_rng(0)
    choices, tops = generator.integers(0, 3, (layers, heads)), generator.integers(0, 3, (4, heads))
    drawn = [(HeadMask.all_full(layers, heads), 0)]
    for top in tops:
        choices[-1] = top
        drawn.append((HeadMask.of_choices(choices), layers - 1))
    return drawn


def compare_search(family: str, split: ContextParallel) -> None:
    """Scores, log-likelihoods and gradients, with and without reuse of earlier passes."""
    model: Any = small_model(family)
    prepare_for_search(model)
    data = CalibrationSet.from_records((tokens(1, n, seed=n)[0].tolist(), 2) for n in EXAMPLES)
    ranks = Ranks(shard=split.communicator.rank, shards=split.ranks)
    single = Objective(model, data, MENU, batch_size=2, reuse_bytes=0)
    drawn_masks = masks(*single.shape)
    mask_for_gradients = drawn_masks[1][0]
    evaluations = [single.evaluate(mask) for mask, _ in drawn_masks]
    gradients = [
        single.gate_gradient(mask_for_gradients).values,
        single.window_gradient(mask_for_gradients).values,
    ]
    for reuse in (0, 1 << 26):
        shared = Objective(
            model, data, MENU, batch_size=2, ranks=ranks, split=split, reuse_bytes=reuse
        )
        for (mask, layers), expected_evaluation in zip(drawn_masks, evaluations, strict=True):
            evaluation = shared.evaluate(mask, layers)
            assert evaluation.score == expected_evaluation.score, family
            assert abs(evaluation.log_likelihood - expected_evaluation.log_likelihood) < 1e-6, (
                family
            )
        assert shared.savings()["layer_inputs"] == (shared.cache.peak_bytes > 0) == (reuse > 0)
        shared_gradients = (
            shared.gate_gradient(mask_for_gradients).values,
            shared.window_gradient(mask_for_gradients).values,
        )
        for values, expected in zip(shared_gradients, gradients, strict=True):
            np.testing.assert_allclose(values, expected, atol=1e-6, rtol=1e-5)


def count_bytes(split: ContextParallel) -> None:
    """Bytes of a pass and of a gradient, compared with the formula, over all ranks."""
    model: Any = small_model("qwen3")
    prepare_for_search(model)
    length = 48
    data = CalibrationSet.from_records([(tokens(1, length)[0].tolist(), 1)])
    ranks = Ranks(shard=split.communicator.rank, shards=split.ranks)
    objective = Objective(model, data, MENU, ranks=ranks, split=split, reuse_bytes=0)
    layers, heads = mask_shape(model.config)
    mask = masks(layers, heads)[1][0]
    split_of_tokens, per_head = (
        ContextSplit(length, split.ranks),
        2 * decoder_layers(model.config).head_dim,
    )
    objective.evaluate(mask)

    def formula(rows: list[LayerHeads]) -> int:
        return (
            4
            * per_head
            * sum(
                count * split_of_tokens.traffic(window)
                for row in rows
                for window, count in row.items()
            )
        )

    all_choices = [dict.fromkeys((None, *MENU), heads)] * layers
    # A gradient computes activations again; the first layer's input needs no gradient.
    for compute, expected in (
        (lambda: objective.evaluate(mask), formula(mask.heads_per_layer(MENU))),
        (
            lambda: objective.gate_gradient(mask),
            2 * formula(all_choices) + formula(all_choices[1:]),
        ),
    ):
        split.communicator.sent_bytes = 0
        compute()
        total = torch.tensor(split.communicator.sent_bytes)
        dist.all_reduce(total)
        # The states at the answer, or the gradients of the gates, are sent in addition.
        assert expected < total <= 1.05 * expected, (int(total), expected)


def search_on_ranks(*families: str) -> None:
    torch.set_num_threads(1)
    split = ContextParallel(dist.group.WORLD)
    for family in families:
        compare_search(family, split)
    count_bytes(split)


def compare_reading(model: Any, shared: SharedReading, name: str) -> None:
    """Compare caches, their bytes, generated tokens and losses of a model."""
    for lengths in LENGTHS:
        ids = torch.zeros(len(lengths), max(lengths), dtype=torch.long)
        for row, length in enumerate(lengths):
            ids[row, ids.shape[1] - length :] = tokens(1, length, seed=row)
        mask = (torch.arange(ids.shape[1]) >= ids.shape[1] - torch.tensor(lengths)[:, None]).long()
        positions = (mask.cumsum(1) - 1).clamp_min(0)  # as `generate` has them
        cache = shared.cache(model, ids, mask)
        expected = HybridCache.of(model)
        with torch.inference_mode():
            past = {"position_ids": positions[:, :-1], "past_key_values": expected}
            model(ids[:, :-1], attention_mask=mask[:, :-1], **past)
            assert (cache is not None) == shared.is_first
            if cache is not None:
                assert held_bytes(cache) == held_bytes(expected), name
                last_token = {"attention_mask": mask, "position_ids": positions[:, -1:]}
                logits = [
                    model(ids[:, -1:], past_key_values=filled, **last_token).logits
                    for filled in (cache, expected)
                ]
                torch.testing.assert_close(*logits, atol=1e-6, rtol=1e-5)
    for lengths in (*LENGTHS, (1,)):
        questions = [
            Question(n, np.asarray(tokens(1, length, seed=n)[0], np.int32), [])
            for n, length in enumerate(lengths)
        ]
        model.generation_config.eos_token_id = None
        ours, theirs = (
            list(generate(model, TOKENIZER, questions, 9, 3, shared=reading))
            for reading in (shared, None)
        )
        assert ours == theirs, name
    document = np.asarray(tokens(1, 61)[0])
    losses = [token_losses(model, document, reading) for reading in (shared, None)]
    assert len(losses[0]) == 60
    np.testing.assert_allclose(*losses, atol=1e-6, rtol=1e-6, err_msg=name)


def reading_on_ranks(*families: str) -> None:
    """For each family the original, and hybrids with one window and with two."""
    torch.set_num_threads(1)
    shared = SharedReading()
    for family in families:
        base = shared.load(lambda name=family: small_model(name), Runtime())
        compare_reading(base, shared, family)
        for windows in (Window(5, 2), (Window(19, 3), Window(6, 3))):
            mask = mask_of(base.config)
            if isinstance(windows, tuple):
                choices = mask.choices * np.arange(1, 3).repeat(mask.num_key_value_heads // 2)
                mask = type(mask).of_choices(choices)
            compare_reading(
                materialize(small_model(family), mask, windows), shared, f"{family} {windows}"
            )


@pytest.mark.parametrize("work", ["search", "reading"])
def test_search_and_reading_of_split_sequences_give_the_results_of_one_process(work: str) -> None:
    """Gemma 2 has layers with windows of their own and capped logits."""
    on_ranks(2, f"{__name__}:{work}_on_ranks", "qwen3", "gemma2")


def test_an_evaluation_by_two_processes_gives_the_answers_of_one(tmp_path: Path) -> None:
    """Bit for bit if each has its own samples; split prompts are rounded differently."""
    model = save_tiny_model(tmp_path / "model")
    section = EvaluateConfig.model_validate(
        {
            "needle": {
                "tasks": ["niah_single_1", "niah_single_3"], "lengths": [400], "samples": 3,
                "max_new_tokens": 4,
            },
            "positions": {"length": 300, "documents": 2},
        }
    )  # fmt: skip
    samples = []
    for parallel, ranks in (("data", 1), ("data", 2), ("context", 2)):
        config = StageConfig(
            section,
            ModelConfig(path=str(model), dtype="float32"),
            seed=1,
            runtime=Runtime(eval_batch_size=2, evaluate_parallel=parallel),
        )
        work = tmp_path / f"{parallel} {ranks}"
        work.mkdir()
        assert run_order(order(config, {}, work, "stages.original.run:run"), ranks) == 0
        assert not (work / "answers").exists()
        lines = (work / "samples.jsonl").read_text().splitlines()
        samples.append([json.loads(line) for line in lines])
        assert len(lines) == 8
    assert samples[0] == samples[1]
    for first, other in zip(samples[0], samples[2], strict=True):
        losses = first.pop("loss", []), other.pop("loss", [])
        assert first == other
        np.testing.assert_allclose(*losses, atol=1e-6, rtol=0)
