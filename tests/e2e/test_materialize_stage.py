"""The materialize stage on a small model: what it writes, what it checks, what it refuses."""

from __future__ import annotations

import errno
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

import bosch.model.materialize
from bosch.errors import RunError, UserError
from bosch.mask_files import Front, HeadMaskFile
from bosch.masks import HeadMask
from bosch.model.cache import held_bytes
from bosch.model.loading import load_model
from bosch.model.search_mode import apply_head_mask
from bosch.window import Window
from stages.context import ModelConfig, Runtime, StageConfig
from stages.materialize import run as materialize
from stages.materialize.model_card import UNTRAINED, base_licence, model_card
from stages.materialize.stage import MaterializeConfig
from stages.prepare.stage import PrepareConfig
from stages.search.stage import SearchConfig
from tests.front_case import nested_front
from tests.tiny_data import save_tiny_model

WINDOW = 16
CACHE = {"tokens": 100, "bytes": 8, "original": 16}


def _mask(layers: int = 2) -> HeadMaskFile:
    mask = HeadMask(((WINDOW, 0), (WINDOW, WINDOW), (0, 0))[:layers], 2)
    return HeadMaskFile(mask, "tiny", "bosch")


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return save_tiny_model(tmp_path / "base")


def _budget_of(front: Front, index: int) -> dict[str, Any]:
    """The sections of a recipe whose budget selects this point."""
    share = front.points[index].kv_slots / (4 * front.context)
    budget = {"kv_cache": f"{share + 1e-3:.4f} @ {front.context}"}
    prepare = {"train_tokens": 128, "sources": [{"name": "library", "kind": "python_docs"}]}
    search = SearchConfig(method="front", windows=[8, WINDOW], sinks=2, budget=budget)
    return {"search": search, "prepare": PrepareConfig(**prepare)}


def _run(
    base: Path, tmp_path: Path, dtype: Any = "float32", mask: Any = None, upstream: Any = None,
    point: int | None = None, **options: Any,
) -> dict[str, Any]:  # fmt: skip
    search, work = tmp_path / "search", tmp_path / "work"
    for folder in (search, work):
        folder.mkdir(exist_ok=True)
    (mask or _mask()).save(search / "head_mask.json")
    config = StageConfig(
        section=MaterializeConfig(max_shard_size="32KB", point=point),
        model=ModelConfig(path=str(base), dtype=dtype),
        seed=3,
        runtime=Runtime(),
        upstream=upstream or {},
        **options,
    )
    return materialize.run(config, {"search": search}, work)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_stage_writes_a_model_that_anyone_can_load(
    base: Path, tmp_path: Path, dtype: Any
) -> None:
    summary = _run(base, tmp_path, dtype)
    folder = tmp_path / "work" / "model"
    assert json.loads((tmp_path / "work" / "summary.json").read_text()) == summary
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.dtype == getattr(torch, dtype)
    original = load_model(base, dtype=dtype)
    apply_head_mask(original, _mask().mask)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer("import the module " * 12, return_tensors="pt")
    with torch.inference_mode():
        logits, expected = model(**ids).logits, original(**ids).logits
    torch.testing.assert_close(
        logits, expected, rtol=2e-2, atol=2e-2 if dtype == "bfloat16" else 1e-5
    )
    assert model.generate(**ids, max_new_tokens=4).shape[1] == ids["input_ids"].shape[1] + 4
    assert HeadMaskFile.load(folder / "head_mask.json") == _mask()
    assert not list(folder.glob("*.bin"))
    assert len(files := list(folder.glob("*.safetensors"))) > 1
    assert max(file.stat().st_size for file in files) < 80_000  # a layer, or a table


def test_the_directory_carries_its_code_and_its_card(base: Path, tmp_path: Path) -> None:
    front_matter = "license: other\nlicense_name: some-licence\ntags: [a]"
    (base / "README.md").write_text(f"---\n{front_matter}\n---\n# Base\n")
    _run(base, tmp_path)
    folder = tmp_path / "work" / "model"
    assert (folder / "modeling_hybrid.py").is_file()
    written_front_matter, card = (
        (folder / "README.md").read_text().removeprefix("---").split("\n---\n", 1)
    )
    front_matter = yaml.safe_load(written_front_matter)
    assert (front_matter["license"], front_matter["license_name"]) == ("other", "some-licence")
    assert "base_model" not in front_matter  # a local directory means nothing on other machines
    assert str(tmp_path) not in card
    for sentence in (
        "some-licence",
        f"| {WINDOW} with 2 sinks tokens",
        "trust_remote_code=True",
        "| 3 of 4, see head_mask.json |",
        UNTRAINED,
        "| its score in the search | unknown |",
    ):
        assert sentence in card, sentence


def test_the_card_names_several_windows_and_the_base_on_the_hub() -> None:
    file = HeadMaskFile(HeadMask(((0, 20), (8, 20))), "m", "given", score=0.8125, seed=4)
    card = model_card(file, ModelConfig(path="org/model"), CACHE, {"license": "mit"})
    assert "a share of 0.75 sees" in card and "| windows | 8 and 20 tokens" in card
    assert "| given (seed 4) |" in card and "0.8125, the share" in card and "| mit |" in card
    assert "| KV cache at 100 tokens | 8 bytes instead of 16 |" in card
    card = model_card(_mask(), ModelConfig(path="org/model", revision="abc"), CACHE, {})
    front_matter = yaml.safe_load(card.split("---")[1])
    assert front_matter["base_model"] == "org/model" and "license" not in front_matter
    assert "org/model (abc)" in card and "not stated" in card


@pytest.mark.parametrize(
    "readme",
    [
        None,
        b"# Base",
        b"---\n: [\n---\n",
        b"---\nlicense: mit\n",
    ],
)
def test_a_base_card_without_licence_is_accepted(readme: bytes | None, tmp_path: Path) -> None:
    if readme is not None:
        (tmp_path / "README.md").write_bytes(readme)
    assert base_licence(ModelConfig(path=str(tmp_path))) == {}


@pytest.mark.parametrize("number", [None, 1])
def test_a_point_of_a_front_becomes_a_model(base: Path, tmp_path: Path, number: int | None) -> None:
    """That of the budget, or the one that the section names."""
    index = 2 if number is None else number - 1
    front = nested_front(2, 2, [Window(WINDOW, 2), Window(8, 2)], context=100)
    (tmp_path / "search").mkdir()
    front.save(tmp_path / "search" / "front.json")
    summary = _run(base, tmp_path, upstream=_budget_of(front, 2), point=number)
    assert summary["check"]["largest_difference"] < 1e-4 and summary["point"] == index
    folder = tmp_path / "work" / "model"
    original, model = (load_model(path, dtype="float32") for path in (base, folder))
    ids = torch.arange(3, 103)[None]
    mask = front.points[index].mask
    apply_head_mask(original, mask)
    with torch.inference_mode():
        logits = model(ids).logits
        torch.testing.assert_close(logits, original(ids).logits, rtol=2e-2, atol=1e-5)
    expected = HeadMaskFile(mask, str(base), "front", front.points[index].score, 3)
    assert HeadMaskFile.load(folder / "head_mask.json") == expected


def test_a_point_beyond_the_front_is_refused(base: Path, tmp_path: Path) -> None:
    front = nested_front(2, 2, [Window(WINDOW)], points=3, context=100)
    (tmp_path / "search").mkdir()
    front.save(tmp_path / "search" / "front.json")
    with pytest.raises(UserError, match=r"there is no point 4 in a front of 3"):
        _run(base, tmp_path, upstream=_budget_of(front, 0), point=4)


def test_the_summary_states_memory(base: Path, tmp_path: Path) -> None:
    summary = _run(base, tmp_path)
    assert summary["check"]["tokens"] == 2 * (WINDOW + 64)  # the window, and the tokens before it
    assert summary["check"]["precision"] == "float32"
    per_head = 2 * 8 * 4  # keys and values, head dimension 8, float32
    assert summary["kv_cache_bytes_per_token_before"] == 4 * per_head
    model = load_model(tmp_path / "work" / "model", dtype="float32")
    assert summary["parameters"] == sum(p.numel() for p in model.parameters())
    cache, tokens = model.new_cache(), summary["kv_cache"]["tokens"]
    with torch.inference_mode():
        model(torch.ones(1, tokens, dtype=torch.long), past_key_values=cache)
    assert summary["kv_cache"]["original"] == 4 * per_head * tokens
    assert held_bytes(cache) == summary["kv_cache"]["bytes"]


def test_base_and_hybrid_are_not_in_memory_together(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base_is_empty = []

    def make_and_check_base(model: Any, *args: Any, **options: Any) -> Any:
        hybrid = make(model, *args, **options)
        base_is_empty.append(all(weight.is_meta for weight in model.state_dict().values()))
        return hybrid

    make = materialize.materialize
    monkeypatch.setattr(materialize, "materialize", make_and_check_base)
    _run(base, tmp_path, "bfloat16")
    assert base_is_empty == [True]


def test_leftovers_of_a_killed_run_are_replaced(base: Path, tmp_path: Path) -> None:
    leftovers = tmp_path / "work" / "model"
    leftovers.mkdir(parents=True)
    (leftovers / "model.safetensors").write_bytes(b"half")
    (leftovers / "stale.txt").write_text("old")
    _run(base, tmp_path)
    assert not (leftovers / "stale.txt").exists()
    load_model(leftovers)


def test_a_full_disk_is_reported_in_a_sentence(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left")

    monkeypatch.setattr(materialize, "save_model", fail)
    with pytest.raises(RunError, match=r"model: cannot write the model \(.*No space left"):
        _run(base, tmp_path)


def test_a_model_whose_logits_differ_is_refused(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unpermuted(model: Any, *_: Any) -> Iterator[tuple[str, torch.Tensor]]:
        yield from model.state_dict().items()  # the layout says permuted, the weights are not

    monkeypatch.setattr(bosch.model.materialize, "permute_heads", unpermuted)
    mask = HeadMaskFile(HeadMask(((WINDOW, 0),) * 2), "tiny", "bosch")
    with pytest.raises(RunError, match="differs from the searched one"):
        _run(base, tmp_path, mask=mask)
    assert not (tmp_path / "work" / "summary.json").exists()


def test_a_wrong_window_is_noticed_despite_many_sinks(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = materialize.materialize

    def wider(model: Any, mask: HeadMask, **options: Any) -> Any:
        return make(model, HeadMask.of(mask.is_full, Window(WINDOW + 8, mask.sinks)), **options)

    monkeypatch.setattr(materialize, "materialize", wider)
    mask = HeadMaskFile(HeadMask.all_sliding(2, 2, Window(WINDOW, 64)), "tiny", "bosch")
    with pytest.raises(RunError, match="differs from the searched one"):
        _run(base, tmp_path, mask=mask)


def test_faults_of_the_input_are_reported(base: Path, tmp_path: Path) -> None:
    (tmp_path / "search").mkdir()
    for layers, heads in ((3, 2), (2, 4)):
        front = nested_front(layers, heads, [Window(WINDOW)], context=100)
        front.save(tmp_path / "search" / "front.json")
        with pytest.raises(UserError, match=r"the head mask is for .* the model has 2 of 2"):
            _run(base, tmp_path, upstream=_budget_of(front, 0))
    (tmp_path / "search" / "front.json").unlink()
    with pytest.raises(UserError, match=r"head_mask\.json: .* 3 layers of 2 .* has 2 of 2"):
        _run(base, tmp_path, mask=_mask(3))
    with pytest.raises(UserError, match="no such model directory"):
        _run(tmp_path / "elsewhere", tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (base / name).unlink()
    with pytest.raises(UserError, match="no tokenizer"):
        _run(base, tmp_path)


@pytest.mark.parametrize(
    ("actual", "expected", "difference"),
    [
        ([[1.0, 1.0, 3.0, 1.0]], [[1.0, 1.0, 1.0, 1.0]], 2.0),
        ([[0.5, 0.0]], [[0.0, 0.0]], 0.5),
    ],
)
def test_logits_may_differ_by_the_tolerance_and_no_more(
    actual: list[Any], expected: list[Any], difference: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The difference is a share of the expected logits' root mean square, unless that is 0."""
    saved, searched = torch.tensor([actual]), torch.tensor([expected])
    monkeypatch.setitem(materialize.TOLERANCE, "float32", difference)
    check = materialize.compare_logits(saved, searched, "float32")
    assert check == {
        "largest_difference": difference, "precision": "float32", "tokens": len(actual),
    }  # fmt: skip
    monkeypatch.setitem(materialize.TOLERANCE, "float32", 0.999 * difference)
    for wrong in (saved, saved * float("nan")):
        with pytest.raises(RunError, match="the saved model differs from the searched one by"):
            materialize.compare_logits(wrong, searched, "float32")
