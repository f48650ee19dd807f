"""The quickstart model's card states the figures of its measures.json."""

from __future__ import annotations

import json

import numpy as np

from pipeline.recipe.load import ROOT

FOLDER = ROOT / "recipes" / "quickstart" / "base_model"


def test_the_card_states_what_was_measured() -> None:
    card = (FOLDER / "README.md").read_text(encoding="utf-8")
    measures = json.loads((FOLDER / "measures.json").read_text(encoding="utf-8"))
    lost = (measures["search_full"] - np.array(measures["single_head"])) * 100
    quantiles = np.percentile(measures["random_masks"], [0, 10, 25, 50, 75, 90, 100])
    rows = [
        ["full", f"**{measures['full']:.3f}**"],
        [f"all sliding, W = {measures['window']}", f"**{measures['sliding']:.3f}**"],
        *([task, f"{score:.3f}"] for task, score in measures["by_task"].items()),
        *([str(layer), *(f"{points:.0f}" for points in row)] for layer, row in enumerate(lost)),
        ["this layer sliding", *(f"{score:.2f}" for score in measures["whole_layer"])],
        ["only this layer full", *(f"{score:.2f}" for score in measures["only_layer"])],
        ["exact match", *(f"{value:.2f}" for value in quantiles)],
        ["this model", f"{measures['text_loss']:.3f} ({measures['text_bits_per_byte']:.2f} bits"],
        ["token frequencies alone", f"{measures['unigram_loss']:.3f}"],
    ]
    for row in rows:
        assert f"| {' | '.join(row)}" in card, row[0]
