"""A tokenizer that makes much of little is refused, and models of the hub's cache are checked."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest

from bosch.errors import UserError
from bosch.model.loading import load_config
from data_prep.documents.tokenizer import TokenizerSpec, check_growth, load_tokenizer


def replace(pattern: dict[str, str], content: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": pattern, "content": content}


def charsmap(longest: str) -> dict[str, Any]:
    trie = b"t" * 400
    table = len(trie).to_bytes(4, "little") + trie + b"a\0" + longest.encode() + b"\0"
    return {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(table).decode()}


def sequence(*steps: dict[str, Any]) -> dict[str, Any]:
    return {"type": "Sequence", "normalizers": list(steps)}


@pytest.mark.parametrize(
    "normalizer",
    [
        None,
        sequence(charsmap("ﷺ" * 18), replace({"Regex": " {2,}"}, "▁")),  # XLM-R
        sequence({"type": "Prepend", "prepend": "▁"}, replace({"String": " "}, "▁")),  # Llama 2
        sequence({"type": "NFC"}, replace({"Regex": r"\s+"}, " "), {"type": "Lowercase"}),  # CLIP
        # The most that is accepted: 256 times.
        sequence(*[replace({"String": "e"}, "ee")] * 8),
        replace({"Regex": "(?=e)"}, "e" * 255),
        sequence(*[{"type": "ByteLevel"}] * 4),
        charsmap("x" * 256),
    ],
)
def test_real_normalizers_are_accepted(normalizer: dict[str, Any] | None) -> None:
    check_growth("tokenizer.json", {"normalizer": normalizer, "decoder": None})


@pytest.mark.parametrize("part", ["normalizer", "decoder"])
@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        (sequence(*[replace({"String": "e"}, "ee")] * 9), "512 times longer"),
        (replace({"Regex": "(?=e)"}, "e" * 300), "301 times longer"),
        (replace({"String": "ab"}, "e" * 514), "257 times longer"),
        (replace({"String": ""}, "e" * 300), "301 times longer"),
        ({"type": "Prepend", "prepend": "a" * 1000}, "1,001 times longer"),
        (sequence(*[{"type": "ByteLevel"}] * 5), "1,024 times longer"),
        (charsmap("x" * 300), "300 times longer"),
        ({"type": "Replace"}, "has a wrong value"),
        ({"type": "Precompiled", "precompiled_charsmap": 5}, "has a wrong value"),
    ],
)
def test_parts_that_lengthen_text_too_much_are_refused(
    part: str, steps: dict[str, Any], expected: str
) -> None:
    with pytest.raises(UserError, match=expected):
        check_growth("tokenizer.json", {part: steps})


def hub_snapshot(cache: Path, patch: pytest.MonkeyPatch) -> Path:
    """An empty snapshot of some/one in a cache of the hub."""
    repository = cache / "models--some--one"
    snapshot = repository / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(snapshot.name)
    patch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache))
    return snapshot


def test_a_tokenizer_on_the_hub_is_checked_before_it_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files that the repository lacks, here config.json, do not prevent the check of the others."""
    snapshot = hub_snapshot(tmp_path, monkeypatch)
    steps = sequence(*[replace({"String": "e"}, "ee")] * 9)
    (snapshot / "tokenizer.json").write_text(json.dumps({"normalizer": steps}))
    with pytest.raises(UserError, match=r"tokenizer\.json: its normalizer .* 512 times longer"):
        load_tokenizer(TokenizerSpec("some/one"))


def test_a_model_of_the_hub_needs_no_generation_config(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = hub_snapshot(tmp_path, monkeypatch)
    (snapshot / "config.json").write_text('{"model_type": "gpt2", "n_layer": 3}')
    assert load_config("some/one").num_hidden_layers == 3
    (snapshot / "generation_config.json").write_text("[]")
    with pytest.raises(UserError, match=r"generation_config\.json"):
        load_config("some/one")


def test_a_damaged_vocabulary_is_reported(tmp_path: Path) -> None:
    for name, text in (("config.json", '{"model_type": "gpt2"}'), ("vocab.json", "{")):
        (tmp_path / name).write_text(text)
    with pytest.raises(UserError, match=r"vocab\.json cannot be read as JSON"):
        load_tokenizer(TokenizerSpec(str(tmp_path)))
