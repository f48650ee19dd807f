"""Queries and keys of a fine-tuned hybrid, restored from the checkpoint before."""

from __future__ import annotations

import errno
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from bosch.commands.repair.weights import repair
from bosch.errors import DiskFullError, UserError
from bosch.model.materialize import materialize
from bosch.window import Window
from pipeline.cli import main
from tests.hybrid_case import mask_of, random_mask, small_model


def saved(folder: Path, family: str = "qwen3", tuned: float = 0.0, mask_seed: int = 0) -> Path:
    """A hybrid in which every weight is moved by this share of itself."""
    model = small_model(family)
    hybrid = materialize(model, mask_of(model.config, mask_seed), Window(6))
    with torch.no_grad():
        for weight in hybrid.parameters():
            weight.mul_(1 + tuned * torch.randn_like(weight))
    hybrid.save_pretrained(folder)
    return folder


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


@pytest.mark.parametrize("share", [1.0, 0.25])
@pytest.mark.parametrize(
    "family", ["qwen3", "phi3", "gemma3", "gemma4_text", "mistral3", "qwen3_5", "qwen3_vl"]
)
def test_queries_and_keys_are_restored_and_nothing_else_changes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], family: str, share: float
) -> None:
    """By the command, which restores all of them unless given a share."""
    tuned, older = saved(tmp_path / "tuned", family, 0.1), saved(tmp_path / "older", family)
    # A file in the model's folder that is not part of it.
    save_file({name: -value for name, value in weights(older).items()}, older / "z.safetensors")
    paths = [str(tuned), "--from", str(older), "--output", str(tmp_path / "out")]
    assert main(["repair", *paths, *([] if share == 1 else ["--share", str(share)])]) == 0
    ours, own, source = (weights(folder) for folder in (tmp_path / "out", tuned, older))
    changed = [name for name, value in ours.items() if not torch.equal(value, own[name])]
    summary = f"out: {len(changed)} query and key weights with a share of {share:g} of {older}\n"
    assert changed and capsys.readouterr().out.endswith(summary)
    config: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "out").config
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}
    for name in changed:
        rows = len(own[name])
        if family == "phi3":  # queries, keys and values in one weight
            assert name.endswith("qkv_proj.weight")
            values = rows // (config.num_attention_heads // config.num_key_value_heads + 2)
            assert torch.equal(ours[name][rows - values :], own[name][rows - values :])
            rows -= values
        else:
            assert ".q_proj." in name or ".k_proj." in name
            assert "vision" not in name
        expected = share * source[name][:rows] + (1 - share) * own[name][:rows]
        torch.testing.assert_close(ours[name][:rows], expected, rtol=0, atol=1e-7)
        assert share < 1 or torch.equal(ours[name][:rows], source[name][:rows])


def test_biases_that_were_zero_or_changed_sign_are_restored(tmp_path: Path) -> None:
    """Zero biases have no direction that would show their origin."""
    hybrid = materialize(small_model("qwen2"), random_mask(), Window(6))
    biases = [weight for name, weight in hybrid.named_parameters() if name.endswith("k_proj.bias")]
    for name, value in (("older", 0.0), ("tuned", 1e-3)):
        with torch.no_grad():
            for bias in biases:
                bias.fill_(value)
        hybrid.save_pretrained(tmp_path / name)
    for name, source in (("out", "tuned"), ("again", "older")):
        repair(tmp_path / source, tmp_path / "older", tmp_path / name, 1.0)
        restored = weights(tmp_path / name)
        assert all(not value.any() for name, value in restored.items() if "k_proj.bias" in name)


@pytest.mark.parametrize("names", ["itself", "stale shards"])
def test_a_weight_file_in_a_folder_with_an_index_is_mixed_once(tmp_path: Path, names: str) -> None:
    """As mlx-lm writes it; transformers reads the file, whatever the index names."""
    tuned, older = saved(tmp_path / "tuned", tuned=0.1), saved(tmp_path / "older")
    own, source = weights(tuned), weights(older)
    for folder in (tuned, older):
        file = "model.safetensors" if names == "itself" else "model-00001-of-00001.safetensors"
        index = {"metadata": {}, "weight_map": dict.fromkeys(own, file)}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        if names == "stale shards":
            save_file({name: -value for name, value in source.items()}, folder / file)
    count = repair(tuned, older, tmp_path / "out", 0.5)
    restored = weights(tmp_path / "out")
    changed = [name for name in own if not torch.equal(restored[name], own[name])]
    assert len(changed) == count
    for name in changed:
        torch.testing.assert_close(restored[name], (own[name] + source[name]) / 2)


def test_models_that_do_not_match_are_refused_and_leave_no_output(tmp_path: Path) -> None:
    tuned, other = saved(tmp_path / "tuned"), saved(tmp_path / "other", mask_seed=3)
    stranger = saved(tmp_path / "stranger", tuned=1.0)
    base = tmp_path / "base"
    small_model().save_pretrained(base)
    wide = tmp_path / "wide"
    materialize(small_model(hidden_size=64), random_mask(), Window(6)).save_pretrained(wide)
    part = saved(tmp_path / "part")
    rest = {name: value for name, value in weights(part).items() if "1.self_attn.k" not in name}
    save_file(rest, part / "model.safetensors", {"format": "pt"})
    with pytest.raises(UserError, match="has hybrid_attention = None, and"):
        repair(base, base, tmp_path / "out", 1.0)
    for source, share, reason in (
        (wide, 1.0, "_proj.weight of .*wide has another shape"),
        (part, 1.0, r"part has no weight model\.layers\.1\.self_attn\.k_.*, which .*tuned has"),
        (other, 1.0, "has hybrid_attention = "),
        (base, 1.0, "has model_type = qwen3, and"),
        (stranger, 1.0, "_proj.weight of .*stranger is not what .* was fine-tuned from"),
        (tuned, 0.0, "--share = 0: expected more than 0"),
        (tuned, 1.5, "at most 1"),
    ):
        with pytest.raises(UserError, match=reason):
            repair(tuned, source, tmp_path / "out", share)
    with pytest.raises(UserError, match="exists; name a new directory"):
        repair(tuned, tuned, other, 1.0)
    with pytest.raises(UserError, match=r"tuned/sub/out lies in .*tuned, which is copied"):
        repair(tuned, tuned, other / ".." / "tuned" / "sub" / "out", 1.0)
    assert {path.name for path in tmp_path.iterdir()} == {
        "tuned", "other", "base", "stranger", "wide", "part"
    }  # fmt: skip


@pytest.mark.parametrize(
    ("damage", "expected"),
    [
        ("pipe", r"notes\.json is a pipe, .*only regular files"),
        ("link", r"notes\.json cannot be copied .*No such file"),
        ("loop", "no such model directory"),
        ("cut", "safetensor"),
        ("cut source", "safetensor"),
    ],
)
def test_damaged_models_are_refused_in_one_sentence(
    tmp_path: Path, damage: str, expected: str
) -> None:
    tuned, older = saved(tmp_path / "tuned"), saved(tmp_path / "older")
    if damage == "pipe":
        os.mkfifo(tuned / "notes.json")
    elif damage == "link":
        (tuned / "notes.json").symlink_to("gone")
    elif damage == "loop":
        tuned = tmp_path / "loop"
        tuned.symlink_to("loop")
    else:
        file = (older if "source" in damage else tuned) / "model.safetensors"
        file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(UserError, match=expected):
        repair(tuned, older, tmp_path / "out", 1.0)
    assert not (tmp_path / "out").exists()


def test_fused_weights_of_queries_keys_and_values_by_head_are_not_restored(
    tmp_path: Path,
) -> None:
    model = saved(tmp_path / "model", "gpt_neox")
    with pytest.raises(UserError, match="has no query and key weights of their own to restore"):
        repair(model, model, tmp_path / "out", 1.0)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("missing", ["model", "source"])
def test_a_missing_directory_is_not_taken_for_a_hub_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    monkeypatch.chdir(tmp_path)
    tuned, gone = saved(Path("runs/tuned")), Path("runs/gone")
    model, source = (gone, tuned) if missing == "model" else (tuned, gone)
    with pytest.raises(UserError, match=r"^runs/gone: no such model directory$"):
        repair(model, source, Path("out"), 1.0)


@pytest.mark.parametrize("full", ["copies", "weights"])
def test_a_full_disk_is_reported_for_the_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, full: str
) -> None:
    """The system would name the file that is read; safetensors names none."""
    tuned, older = saved(tmp_path / "tuned"), saved(tmp_path / "older")
    said = os.strerror(errno.ENOSPC)

    def copy(source: str, *args: Any, **kwargs: Any) -> None:
        raise OSError(errno.ENOSPC, said, source)

    def write(*args: Any, **kwargs: Any) -> None:
        raise SafetensorError(f"I/O error: {said} (os error 28)")

    if full == "copies":
        monkeypatch.setattr("shutil.copyfile", copy)
    else:
        monkeypatch.setattr("bosch.commands.repair.weights.save_file", write)
    with pytest.raises(DiskFullError, match=r"/out: (no space is left|cannot write the model)"):
        repair(tuned, older, tmp_path / "out", 1.0)
    assert {path.name for path in tmp_path.iterdir()} == {"tuned", "older"}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("q_proj.input_scale", torch.tensor(0.5)),
        ("k_proj.qweight", torch.ones(4, 48, dtype=torch.int32)),
        ("q_proj.weight", torch.ones(64, 48).to(torch.float8_e4m3fn)),
    ],
)
def test_quantised_weights_are_refused(tmp_path: Path, name: str, value: torch.Tensor) -> None:
    folders = [saved(tmp_path / "tuned", tuned=0.1), saved(tmp_path / "older")]
    for folder in folders:
        changed = {**weights(folder), f"model.layers.0.self_attn.{name}": value}
        save_file(changed, folder / "model.safetensors", {"format": "pt"})
    said = rf"tuned: model\.layers\.0\.self_attn\.{name} is quantised; repair the model before"
    with pytest.raises(UserError, match=said):
        repair(*folders, tmp_path / "out", 1.0)
    assert not (tmp_path / "out").exists()


def test_weights_of_a_quantised_source_are_refused(tmp_path: Path) -> None:
    """They have the direction of the weights, but another scale."""
    tuned, older = saved(tmp_path / "tuned", tuned=0.1), saved(tmp_path / "older")
    name, source = "model.layers.0.self_attn.q_proj.weight", weights(older)
    scaled = source[name] / source[name].abs().max() * 448
    changed = {**source, name: scaled.to(torch.float8_e4m3fn)}
    save_file(changed, older / "model.safetensors", {"format": "pt"})
    with pytest.raises(UserError, match=rf"--from: {re.escape(name)} of .*older is quantised"):
        repair(tuned, older, tmp_path / "out", 1.0)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("kind", "value"), [("k_proj.bias", float("nan")), ("q_proj.weight", 1e7)])
def test_results_that_would_not_be_finite_are_refused(
    tmp_path: Path, kind: str, value: float
) -> None:
    """A bias has no direction to compare, a direction no size: 1e7 is beyond float16."""
    folders = [saved(tmp_path / "tuned", "qwen2", 0.1), saved(tmp_path / "older", "qwen2")]
    own, source = (weights(folder) for folder in folders)
    name = f"model.layers.1.self_attn.{kind}"
    source[name] *= value
    for folder, changed in zip(
        folders, ({n: w.half() for n, w in own.items()}, source), strict=True
    ):
        save_file(changed, folder / "model.safetensors", {"format": "pt"})
    for share in (1.0, 0.5):
        with pytest.raises(
            UserError, match=rf"{re.escape(name)} of .*would not be finite in float16"
        ):
            repair(*folders, tmp_path / "out", share)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("where", ["tuned", "older"])
def test_weights_with_a_nan_are_refused(tmp_path: Path, where: str) -> None:
    folders = {"tuned": saved(tmp_path / "tuned", tuned=0.1), "older": saved(tmp_path / "older")}
    broken = weights(folders[where])
    broken["model.layers.1.self_attn.k_proj.weight"][0, 0] = float("nan")
    save_file(broken, folders[where] / "model.safetensors", {"format": "pt"})
    with pytest.raises(UserError, match=r"k_proj\.weight of .*older is not what "):
        repair(folders["tuned"], folders["older"], tmp_path / "out", 0.5)
    assert not (tmp_path / "out").exists()
