"""A checkpoint of the train stage loads by transformers alone, through the code file it carries."""

from __future__ import annotations

from pathlib import Path

import torch

from bosch.model.loading import load_model
from tests.elsewhere import run_elsewhere
from tests.training_case import SEQUENCE_LENGTH, VOCABULARY, make_case, train_here

_LOAD = """
model = AutoModelForCausalLM.from_pretrained(
    "checkpoint", trust_remote_code=True, dtype=torch.float32
)
ids, wanted = torch.load("wanted.pt")
with torch.inference_mode():
    logits = model(ids).logits
report([type(model).__name__, torch.equal(logits, wanted), "bosch" in sys.modules])
"""


def test_a_checkpoint_loads_by_transformers_alone(tmp_path: Path) -> None:
    case, tokens = make_case(tmp_path / "case"), 3 * 4 * SEQUENCE_LENGTH
    changes = {"total_tokens": tokens, "checkpoint_tokens": [tokens]}
    train_here(case, tmp_path / "train", train=changes)
    checkpoint = tmp_path / "train" / "checkpoints" / f"tokens-{tokens}"
    (tmp_path / "checkpoint").symlink_to(checkpoint)
    ids = torch.arange(SEQUENCE_LENGTH)[None] * 5 % VOCABULARY
    trained = load_model(checkpoint, dtype="float32")
    untrained = load_model(case / "materialize" / "model", dtype="float32")
    with torch.inference_mode():
        expected, before = trained(ids).logits, untrained(ids).logits
    assert (expected - before).abs().max() > 0.01
    torch.save((ids, expected), tmp_path / "wanted.pt")
    logits = run_elsewhere(_LOAD, tmp_path, cache=tmp_path / "cache")
    assert logits == [["HybridQwen3ForCausalLM", True, False]]
