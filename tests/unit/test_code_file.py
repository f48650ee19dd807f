"""A hybrid model loads by transformers alone, through the code file it carries."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from bosch import code_file
from bosch.configuration import hybrid_config_class
from bosch.families import FAMILIES
from bosch.modeling import load_model, materialize
from tests.elsewhere import run_elsewhere
from tests.hybrid_case import random_mask, small_config, small_model, tokens

WINDOW, SINKS = 7, 2
LENGTH, NEW = 40, 10


def _save(family: str, folder: Path, **changes: Any) -> Any:
    hybrid = materialize(small_model(family, **changes), random_mask(), WINDOW, SINKS)
    hybrid.save_pretrained(folder)
    return hybrid


def _wanted(hybrid: Any, ids: torch.Tensor) -> tuple[torch.Tensor, list[Any]]:
    with torch.inference_mode():
        logits = hybrid(ids).logits
    return logits, hybrid.generate(ids, max_new_tokens=NEW, do_sample=False).tolist()


def test_transformers_alone_loads_the_same_hybrids_and_saves_them_again(tmp_path: Path) -> None:
    """Two families in one process: each keeps its own attention."""
    ids = tokens(2, LENGTH)
    wanted = {name: _wanted(_save(name, tmp_path / name), ids) for name in ("qwen3", "llama")}
    torch.save({name: logits for name, (logits, _) in wanted.items()}, tmp_path / "logits.pt")
    code = f"""
ids = torch.tensor({ids.tolist()})
wanted = torch.load("logits.pt")
models = {{
    name: AutoModelForCausalLM.from_pretrained(name, trust_remote_code=True) for name in wanted
}}
models["qwen3"].save_pretrained("again")
models["again"] = AutoModelForCausalLM.from_pretrained("again", trust_remote_code=True)
wanted["again"] = wanted["qwen3"]
for name, model in models.items():
    with torch.inference_mode():
        logits = model(ids).logits
    report([
        type(model).__name__, torch.equal(logits, wanted[name]),
        model.generate(ids, max_new_tokens={NEW}, do_sample=False).tolist(),
        model.new_cache().layers[0].layout.window_size,
    ])
report(any(name.partition(".")[0] == "bosch" for name in sys.modules))
"""
    *found, imported = run_elsewhere(code, tmp_path, cache=tmp_path / "cache")
    assert imported is False
    assert found == [
        [f"Hybrid{prefix}ForCausalLM", True, wanted[name][1], WINDOW]
        for prefix, name in (("Qwen3", "qwen3"), ("Llama", "llama"), ("Qwen3", "qwen3"))
    ]
    again = load_model(tmp_path / "again", dtype="float32")
    with torch.inference_mode():
        assert torch.equal(again(ids).logits, wanted["qwen3"][0])
    names = {path.name for path in (tmp_path / "again").iterdir()}
    assert "modeling_hybrid.py" in names and len([n for n in names if n.endswith(".py")]) == 1


def test_a_plain_load_is_refused_without_bosch(tmp_path: Path) -> None:
    _save("qwen3", tmp_path / "model")
    code = """
for options in ({}, {"trust_remote_code": False}):
    for auto in (AutoConfig, AutoModelForCausalLM):
        try:
            auto.from_pretrained("model", **options)
            report("loaded")
        except ValueError as error:
            report("trust_remote_code=True" in str(error))
"""
    assert run_elsewhere(code, tmp_path, cache=tmp_path / "cache") == [True] * 4


_BY_CLASS = """
import json, transformers
for name, prefix in json.load(open("families.json")).items():
    family_class = getattr(transformers, prefix + "ForCausalLM")
    for options in ({}, {"attn_implementation": "sdpa"}):
        try:
            family_class.from_pretrained(name, **options)
        except Exception as error:  # its class differs between versions of transformers
            report([name, "load this model by AutoModelForCausalLM" in str(error)])
"""


def test_a_family_s_own_class_never_runs_full_attention_instead(tmp_path: Path) -> None:
    """It knows no hybrid model type, and by itself would only warn of it."""
    families = {family.model_type: family.prefix for family in FAMILIES.values()}
    for name in families:
        table = {"window_size": 7, "sinks": 0, "full_kv_heads_per_layer": [1, 2, 3]}
        content = {**small_config(name).to_dict(), "hybrid_attention": table}
        del content["model_type"]
        hybrid_config_class(FAMILIES[name])(**content).save_pretrained(tmp_path / name)
    (tmp_path / "families.json").write_text(json.dumps(families))
    cache = tmp_path / "cache"
    plain = run_elsewhere(_BY_CLASS, tmp_path, cache=cache)
    both = run_elsewhere("import bosch\n" + _BY_CLASS, tmp_path, cache=cache, blocked=False)
    assert plain == [[name, True] for name in families for _ in range(2)]
    assert both == plain + plain


@pytest.mark.parametrize("layer_types", [None, ["full_attention"] * 3])
def test_layer_types_come_back(layer_types: Any, tmp_path: Path) -> None:
    for name in ("qwen3", "llama"):
        made = _save(name, tmp_path / name, layer_types=layer_types).config
        found = AutoConfig.from_pretrained(tmp_path / name)
        assert getattr(found, "layer_types", None) == getattr(made, "layer_types", None)
        assert found.to_dict()["layer_types"] != ["full_attention"] * 3
        again = type(found)(**{k: v for k, v in found.to_dict().items() if k != "model_type"})
        assert again.to_diff_dict() == found.to_diff_dict()


def test_with_bosch_the_installed_code_runs_whatever_is_trusted(tmp_path: Path) -> None:
    """And a model loaded by its code file before bosch came goes on beside one of bosch's."""
    hybrid, ids = _save("qwen3", tmp_path / "model"), tokens(1, LENGTH)
    torch.save(_wanted(hybrid, ids)[0], tmp_path / "logits.pt")
    code = f"""
import torch
from transformers import AutoModelForCausalLM
carried = AutoModelForCausalLM.from_pretrained("model", trust_remote_code=True)
import bosch
models = [carried, *(
    AutoModelForCausalLM.from_pretrained("model", trust_remote_code=trusted)
    for trusted in (None, False, True)
)]
ids, wanted = torch.tensor({ids.tolist()}), torch.load("logits.pt")
for model in models:
    with torch.inference_mode():
        report([
            type(model).__module__.partition(".")[0], torch.equal(model(ids).logits, wanted)
        ])
"""
    found = run_elsewhere(code, tmp_path, cache=tmp_path / "cache", blocked=False)
    assert found == [["transformers_modules", True], *[["bosch", True]] * 3]


def test_whatever_bosch_loaded_carries_the_file_when_saved(tmp_path: Path) -> None:
    """Directories made before there was a code file gain it too."""
    _save("qwen3", tmp_path / "old")
    path = tmp_path / "old" / "config.json"
    config = json.loads(path.read_text())
    wanted = config.pop("auto_map")
    path.write_text(json.dumps(config))
    (tmp_path / "old" / "modeling_hybrid.py").unlink()
    AutoModelForCausalLM.from_pretrained(tmp_path / "old").save_pretrained(tmp_path / "new")
    assert json.loads((tmp_path / "new" / "config.json").read_text())["auto_map"] == wanted
    written = (tmp_path / "new" / "modeling_hybrid.py").read_text()
    assert written == code_file.code_file(FAMILIES["qwen3"])


@pytest.mark.parametrize("family", FAMILIES.values(), ids=str)
def test_the_code_file_is_python_that_names_no_bosch_module(family: Any) -> None:
    tree = ast.parse(code_file.code_file(family))
    modules = {
        module
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for module in (
            [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else [node.module or ""]
        )
    }
    assert "torch" in modules and not [m for m in modules if m.partition(".")[0] == "bosch"]


def test_modules_that_cannot_stand_in_one_file_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(code_file, "MODULES", ("errors.py", "errors.py"))
    with pytest.raises(RuntimeError, match=r"errors\.py defines .*UserError.* again"):
        code_file.code_file.__wrapped__(FAMILIES["qwen3"])
    monkeypatch.setattr(code_file, "MODULES", ("families.py",))
    with pytest.raises(RuntimeError, match=r"families\.py imports \['UserError'\]"):
        code_file.code_file.__wrapped__(FAMILIES["qwen3"])
