"""The quickstart model's card states what was measured, whatever that is."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from recipes.quickstart.base_model_card import Measures, model_card, write_card
from recipes.quickstart.make_base_model import learning_rate

MEASURES = Measures(
    window=128,
    context=2048,
    samples=200,
    search_length=512,
    search_samples=24,
    full=0.955,
    sliding=0.085,
    by_task={"niah_single_1": 1.0, "niah_multikey_2": 0.91},
    search_full=1.0,
    search_sliding=0.2,
    single_head=[[1.0, 0.75], [1.0, 1.0], [0.95, 1.0]],
    whole_layer=[1.0, 0.6, 0.9],
    only_layer=[0.2, 0.75, 0.65],
    random_masks=[0.0, 0.5, 1.0],
    text_loss=3.17,
    text_bits_per_byte=1.49,
    unigram_loss=6.48,
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    config = {
        "num_hidden_layers": 3,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "vocab_size": 512,
    }
    phase = {"steps": 40, "rate": 3e-3, "text": 0.25, "length": 64, "kinds": [1.0, 0.0]}
    training: dict[str, Any] = {"seed": 7, "steps": 40, "cpu_minutes": 3.2, "phases": [phase]}
    training |= {"torch": "2.13.0", "python": "3.11.7"}
    losses = {"first": 2.0, "rest": 1.0, "text": 3.0, "length": 64}
    log = [{"step": step, "rate": learning_rate(step), **losses} for step in (0, 10, 20)]
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "training.json").write_text(json.dumps(training))
    (tmp_path / "training_log.jsonl").write_text("".join(json.dumps(x) + "\n" for x in log))
    return tmp_path


def test_the_card_counts_what_was_measured(folder: Path) -> None:
    card = " ".join(model_card(folder, MEASURES).split())
    assert "2 of 3 layers (1, 2) can retrieve" in card
    assert "The dearest layer, 1, costs 40 points" in card
    assert "the dearest head costs 25 points" in card
    assert "| 0 | 0 | 25 | | 1 | 0 | 0 | | 2 | 5 | 0 |" in card
    assert "| niah_multikey_2 | 0.910 |" in card
    assert "| steps | rate | text | length | |---|---|---|---| | 40 | 0.003 | 25% | 64 |" in card
    assert "rates are those of the script" in card


def test_other_measures_give_other_sentences(folder: Path) -> None:
    measures = replace(MEASURES, only_layer=[0.2, 0.2, 0.2], whole_layer=[0.2, 1.0, 1.0])
    with (folder / "training_log.jsonl").open("a") as log:
        log.write(json.dumps({"step": 30, "rate": 1.0, "length": 64, "first": 1, "rest": 1}))
    card = " ".join(model_card(folder, measures).split())
    assert "0 of 3 layers can retrieve" in card
    assert "The dearest layer, 0, costs 80 points" in card
    assert "1 of 4 learning rates in the log are others than the script's" in card


def test_the_card_is_written_from_the_files(folder: Path) -> None:
    (folder / "measures.json").write_text(json.dumps(asdict(MEASURES)))
    write_card(folder)
    assert (folder / "README.md").read_text() == model_card(folder, MEASURES)
    assert (folder / "training_curve.png").read_bytes().startswith(b"\x89PNG")
