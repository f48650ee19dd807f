"""Bad input for hybrid models ends in one sentence that names it; no default replaces it."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.distributed.configuration_utils import DistributedConfig

from bosch.attention import BACKENDS
from bosch.errors import UserError
from bosch.heads import HeadMask
from bosch.model.loading import load_model
from bosch.model.materialize import materialize
from bosch.model.search_mode import apply_head_mask, prepare_for_search
from bosch.window import Window
from tests.hybrid_case import (
    KV_HEADS,
    LAYERS,
    PARTLY_SLIDING,
    mask_of,
    random_mask,
    small_model,
    tokens,
)

WINDOW = 7
ABSENT = [name for name, entry in BACKENDS.items() if not entry.usable()]


def _message_of(call: Callable[[], Any]) -> str:
    """The message of the UserError raised by `call`, which must be one sentence."""
    with pytest.raises(UserError) as caught:
        call()
    text = str(caught.value)
    assert "\n" not in text and ". " not in text and not text.endswith("."), text
    return text


def _change(folder: Path, **changes: Any) -> dict[str, Any]:
    """Write config.json with other values, and without those that are "gone"."""
    path = folder / "config.json"
    changed = json.loads(path.read_text()) | changes
    content = {name: value for name, value in changed.items() if value != "gone"}
    path.write_text(json.dumps(content))
    return content


@pytest.fixture(scope="module")
def base() -> Any:
    return small_model()


@pytest.fixture
def folder(base: Any, tmp_path: Path) -> Path:
    materialize(base, random_mask(), Window(WINDOW)).save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.parametrize(("layers", "heads"), [(LAYERS - 1, KV_HEADS), (LAYERS, 2 * KV_HEADS)])
def test_a_mask_of_another_model_is_refused(base: Any, layers: int, heads: int) -> None:
    mask = HeadMask.all_sliding(layers, heads)
    for use in (apply_head_mask, materialize):
        message = _message_of(lambda use=use: use(base, mask, Window(WINDOW)))
        assert f"{layers} layers of {heads} KV heads" in message
        assert f"has {LAYERS} of {KV_HEADS}" in message


def test_a_window_larger_than_any_sequence_is_refused(base: Any) -> None:
    for use in (apply_head_mask, materialize):
        message = _message_of(lambda use=use: use(base, random_mask(), Window(512)))
        assert "window_size is 512" in message and "no more than 512 tokens" in message
        message = _message_of(lambda use=use: use(base, random_mask(), Window(400, 112)))
        assert "is 400 with 112 sinks" in message
        use(base, random_mask(), Window(400, 111))


_ROWS = [[0, 7, 7, 9], [0, 0, 7, 9], [0, 0, 0, 7]]


@pytest.mark.parametrize(
    ("layout", "named"),
    [
        ("gone", "hybrid_attention is damaged"),
        (None, "hybrid_attention is damaged"),
        ({"windows": _ROWS}, "'sinks'"),
        ({"windows": _ROWS, "sinks": -1}, "sinks"),
        ({"windows": [[0, -1, 0, 0], *_ROWS[1:]], "sinks": 0}, "integer of at least 1"),
        ({"windows": [[0, "7", 0, 0], *_ROWS[1:]], "sinks": 0}, "found '7'"),
        ({"windows": [[0, 7.0, 0, 0], *_ROWS[1:]], "sinks": 0}, "found 7.0"),
        ({"windows": _ROWS[:2], "sinks": 0}, "3 rows of 4 heads"),
        ({"windows": [*_ROWS, [0] * 4], "sinks": 0}, "3 rows of 4 heads"),
        ({"windows": [*_ROWS[:2], [0, 7]], "sinks": 0}, "3 rows of 4 heads"),
        ({"windows": 7, "sinks": 0}, "'int' object is not iterable"),
    ],
)
def test_a_damaged_or_missing_layout_is_refused(folder: Path, layout: Any, named: str) -> None:
    _change(folder, hybrid_attention=layout)
    for load in (load_model, AutoModelForCausalLM.from_pretrained):
        message = _message_of(lambda load=load: load(folder))
        assert named in message and str(folder) in message


@pytest.mark.parametrize(
    ("family", "types"),
    [*((name, "gone") for name in PARTLY_SLIDING), ("olmo3", ["full_attention"]), ("olmo3", ["x"])],
)
def test_damaged_layer_types_of_the_base_model_are_refused(
    family: str, types: Any, tmp_path: Path
) -> None:
    """With the family's default pattern of sliding layers it would be another model."""
    model = small_model(family)
    config = materialize(model, mask_of(model.config), Window(WINDOW)).config
    config.save_pretrained(tmp_path)
    _change(tmp_path, layer_types=types)
    message = _message_of(lambda: load_model(tmp_path))
    assert "layer_types" in message and str(tmp_path) in message


def test_a_missing_activation_is_not_taken_from_the_family(folder: Path) -> None:
    _change(folder, base_hidden_act="gone")
    assert "hidden_act" in _message_of(lambda: load_model(folder))


def test_a_hybrid_of_another_version_is_refused_by_its_activation(folder: Path) -> None:
    content = _change(folder, hidden_act=["other words"])
    assert load_model(folder).config.hidden_act == content["base_hidden_act"]


@pytest.mark.parametrize("model_type", ["gpt2", "mamba"])
def test_an_unsupported_family_is_refused(model_type: str, tmp_path: Path) -> None:
    config = AutoConfig.for_model(
        model_type, vocab_size=61, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, intermediate_size=16, head_dim=8, state_size=2,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    model = load_model(tmp_path, dtype=torch.float32)
    for use in (
        lambda: prepare_for_search(model),
        lambda: materialize(model, HeadMask.all_full(1, 1), Window(WINDOW)),
    ):
        assert f"'{model_type}' are not supported" in _message_of(use)


@pytest.mark.parametrize("shape", [(2, 12, 12), (2, 1, 12, 12)])
def test_a_mask_that_is_no_padding_mask_is_refused(base: Any, shape: tuple[int, ...]) -> None:
    hybrid, searched = materialize(base, random_mask(), Window(WINDOW)), small_model()
    prepare_for_search(searched)
    expected = f"takes a 2-D attention mask .* not a {len(shape)}-D one"
    for model in (hybrid, searched):
        with pytest.raises(ValueError, match=expected):
            model(tokens(2, 12), attention_mask=torch.ones(shape))


@pytest.mark.parametrize("name", [*ABSENT, "triton"])
def test_a_missing_backend_is_refused(base: Any, folder: Path, name: str) -> None:
    for use in (
        lambda: prepare_for_search(base, name),
        lambda: load_model(folder, backend=name),
        lambda: AutoModelForCausalLM.from_pretrained(folder, attn_implementation=name),
    ):
        assert f"'{name}" in _message_of(use)


@pytest.mark.parametrize(
    "options",
    [
        {"tp_plan": "auto"},
        {"tp_size": 2},
        {"distributed_config": DistributedConfig(tp_size=2)},
        {"distributed_config": {"tp_size": 2}},
        {"distributed_config": {"pp_size": 2}},
    ],
)
def test_tensor_parallelism_of_transformers_is_refused(
    folder: Path, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    config = AutoConfig.from_pretrained(folder)
    for more in ({}, {"config": config}):
        for loader in (AutoModelForCausalLM, type(AutoModelForCausalLM.from_config(config))):
            load = functools.partial(loader.from_pretrained, folder, **options, **more)
            assert "cannot be split over processes" in _message_of(load)


def test_a_loaded_model_does_not_change_with_its_file(tmp_path: Path) -> None:
    """On the CPU safetensors maps the file, buffers too; a search reads its weights for days."""
    small_model("glm4_moe").save_pretrained(tmp_path)
    model = load_model(tmp_path, dtype="float32", device="cpu")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    weights = tmp_path / "model.safetensors"
    with weights.open("r+b") as file:
        first = 8 + int.from_bytes(file.read(8), "little")
        file.seek(first)
        file.write(b"x" * (weights.stat().st_size - first))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
