"""A hybrid loads by transformers alone, through its code file, or with bosch, imported any time."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

import bosch
from bosch import hybrid as hybrid_file
from bosch.model.loading import load_model
from bosch.model.materialize import materialize
from bosch.window import Window
from tests.elsewhere import run_elsewhere, run_python
from tests.hybrid_case import mask_of, of_choices, small_model, tokens

WINDOW, SINKS = 7, 2
LENGTH, NEW = 40, 10


def _save(family: str, folder: Path, **changes: Any) -> Any:
    model = small_model(family, **changes)
    window = Window(WINDOW, SINKS)
    mask = mask_of(model.config, window)
    if family == "llama":
        choices = np.indices(mask.shape).sum(0) % 3
        mask = of_choices(choices, [window, Window(WINDOW // 2, SINKS)])
    hybrid = materialize(model, mask)
    hybrid.save_pretrained(folder)
    return hybrid


def _wanted(hybrid: Any, ids: torch.Tensor) -> tuple[torch.Tensor, list[Any]]:
    with torch.inference_mode():
        logits = hybrid(ids).logits
    return logits, hybrid.generate(ids, max_new_tokens=NEW, do_sample=False).tolist()


def test_transformers_alone_loads_the_same_hybrids_and_saves_them_again(tmp_path: Path) -> None:
    """Two families in one process, one with several windows."""
    ids = tokens(2, LENGTH)
    expected = {name: _wanted(_save(name, tmp_path / name), ids) for name in ("qwen3", "llama")}
    torch.save({name: logits for name, (logits, _) in expected.items()}, tmp_path / "logits.pt")
    code = f"""
ids = torch.tensor({ids.tolist()})
wanted = torch.load("logits.pt")
models = {{
    name: AutoModelForCausalLM.from_pretrained(name, trust_remote_code=True) for name in wanted
}}
models["qwen3"].save_pretrained("again")
from transformers import AutoModel
decoder = AutoModel.from_pretrained("qwen3", trust_remote_code=True)
with torch.inference_mode():
    hidden = models["qwen3"].model(ids).last_hidden_state
    report([type(decoder).__name__, torch.equal(decoder(ids).last_hidden_state, hidden)])
models["again"] = AutoModelForCausalLM.from_pretrained("again", trust_remote_code=True)
wanted["again"] = wanted["qwen3"]
for name, model in models.items():
    with torch.inference_mode():
        logits = model(ids).logits
    report([
        type(model).__name__, torch.equal(logits, wanted[name]),
        model.generate(ids, max_new_tokens={NEW}, do_sample=False).tolist(),
    ])
report(any(name.partition(".")[0] == "bosch" for name in sys.modules))
"""
    decoder, *result, imported = run_elsewhere(code, tmp_path, cache=tmp_path / "cache")
    assert imported is False and decoder == ["HybridQwen3Model", True]
    assert result == [
        [f"Hybrid{prefix}ForCausalLM", True, expected[prefix.lower()][1]]
        for prefix in ("Qwen3", "Llama", "Qwen3")
    ]
    again = load_model(tmp_path / "again", dtype="float32")
    with torch.inference_mode():
        assert torch.equal(again(ids).logits, expected["qwen3"][0])
    names = {path.name for path in (tmp_path / "again").iterdir()}
    assert "modeling_hybrid.py" in names and len([n for n in names if n.endswith(".py")]) == 1


def test_experts_are_computed_together_in_a_process_that_has_only_the_hybrid(
    tmp_path: Path,
) -> None:
    """As those of the base model, and not one after the other."""
    _save("qwen3_moe", tmp_path / "model")
    code = """
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained("model", trust_remote_code=True)
report(model.config._experts_implementation)
"""
    for blocked in (True, False):
        found = run_elsewhere(code, tmp_path, cache=tmp_path / "cache", blocked=blocked)
    assert found == ["grouped_mm"] * 2


def test_without_bosch_only_the_model_is_refused_unless_code_is_trusted(
    tmp_path: Path,
) -> None:
    """Tools that only read files work, trusted or not, and ask the user nothing."""
    _save("qwen3", tmp_path / "model")
    words = Tokenizer(WordLevel({str(n): n for n in range(61)}, unk_token="0"))
    words.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(tmp_path / "model")
    code = """
from transformers import AutoTokenizer, GenerationConfig, PreTrainedConfig, PreTrainedTokenizerFast
for options in ({}, {"trust_remote_code": False}):
    for auto in (AutoConfig, AutoModelForCausalLM):
        try:
            auto.from_pretrained("model", **options)
            report("loaded")
        except ValueError as error:
            report("trust_remote_code=True" in str(error))
for options in ({}, {"trust_remote_code": False}, {"trust_remote_code": True}):
    report(AutoTokenizer.from_pretrained("model", **options)("7 9").input_ids)
report(PreTrainedTokenizerFast.from_pretrained("model")("8").input_ids)
config = PreTrainedConfig.from_pretrained("model")
report([config.hidden_size, config.num_hidden_layers, config.layer_types])
report(GenerationConfig.from_pretrained("model").eos_token_id)
report(AutoConfig.from_pretrained("model", trust_remote_code=True).hidden_act)
"""
    result = run_elsewhere(code, tmp_path, cache=tmp_path / "cache")
    assert result[:4] == [True] * 4
    assert result[4:] == [[7, 9]] * 3 + [[8], [48, 3, ["full_attention"] * 3], None, "silu"]


@pytest.mark.parametrize("layer_types", [None, ["full_attention"] * 3])
def test_layer_types_are_restored(layer_types: Any, tmp_path: Path) -> None:
    for name in ("qwen3", "llama", "gemma2"):
        changes = {} if name == "gemma2" else {"layer_types": layer_types}
        saved = _save(name, tmp_path / name, **changes).config
        result = AutoConfig.from_pretrained(tmp_path / name)
        assert getattr(result, "layer_types", None) == getattr(saved, "layer_types", None)
        again = type(result)(**{k: v for k, v in result.to_dict().items() if k != "model_type"})
        assert again.to_diff_dict() == result.to_diff_dict()


def test_with_bosch_the_installed_code_runs_even_if_code_is_trusted(tmp_path: Path) -> None:
    """A model loaded by its code file before bosch still works next to bosch's."""
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
    result = run_elsewhere(code, tmp_path, cache=tmp_path / "cache", blocked=False)
    assert result == [["transformers_modules", True], *[["bosch", True]] * 3]


def test_models_loaded_with_bosch_carry_the_file_when_saved(tmp_path: Path) -> None:
    """Directories made before the code file existed get it, too."""
    _save("qwen3", tmp_path / "old")
    path = tmp_path / "old" / "config.json"
    config = json.loads(path.read_text())
    expected = config.pop("auto_map")
    path.write_text(json.dumps(config))
    (tmp_path / "old" / "modeling_hybrid.py").unlink()
    AutoModelForCausalLM.from_pretrained(tmp_path / "old").save_pretrained(tmp_path / "new")
    assert json.loads((tmp_path / "new" / "config.json").read_text())["auto_map"] == expected
    written = (tmp_path / "new" / "modeling_hybrid.py").read_text()
    assert written.startswith(Path(hybrid_file.__file__).read_text())


def test_the_code_file_imports_only_torch_and_transformers() -> None:
    """Also inside a function, which the tests above might not call."""
    text = Path(hybrid_file.__file__).read_text()
    imported = set(re.findall(r"^ *(?:from|import) +([\w.]*)", text, re.MULTILINE))
    roots = {name.partition(".")[0] for name in imported}
    assert roots - sys.stdlib_module_names == {"torch", "transformers"}


@pytest.fixture(scope="module")
def hybrid_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("hybrid")
    _save("qwen3", path)
    return path


def test_bosch_registers_the_models_whichever_is_imported_first(hybrid_dir: Path) -> None:
    """And imports no other family. Until then a plain load never runs full attention instead."""
    load = f"AutoModelForCausalLM.from_pretrained({str(hybrid_dir)!r})"
    shown = run_python(
        "import bosch; from transformers import AutoModelForCausalLM\n"
        f"print(type({load}).__name__)\n"
        "import sys; print('transformers.models.llama.modeling_llama' in sys.modules)"
    )
    assert shown.split() == ["HybridQwen3ForCausalLM", "False"]
    shown = run_python(
        f"from transformers import AutoModelForCausalLM\ntry:\n    {load}\n"
        "except ValueError as error:\n    print('trust_remote_code=True' in str(error))\n"
        f"import bosch; print(type({load}).__name__)"
    )
    assert shown.split()[-2:] == ["True", "HybridQwen3ForCausalLM"]


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        bosch.nothing  # noqa: B018
    assert all(getattr(bosch, name) is not None for name in bosch.__all__)


@pytest.mark.parametrize("name", ["PreTrainedModel", "Trainer"])
def test_importing_bosch_first_does_not_break_transformers(name: str) -> None:
    """Registration must not import transformers' models while transformers itself is loading."""
    shown = run_python(
        f"import bosch; from transformers import {name}, AutoConfig\n"
        "print(type(AutoConfig.for_model('hybrid_qwen3')).__name__)"
    )
    assert shown.split() == ["HybridQwen3Config"]


def test_a_configuration_can_be_unpickled_in_a_new_process() -> None:
    """An engine sends a model's configuration to its processes."""
    pack = (
        "import pickle\n"
        "from bosch.hybrid import hybrid_classes\n"
        "config = hybrid_classes('qwen3')[0](hybrid_attention={'window_size': 5})\n"
        "print(pickle.dumps(config))"
    )
    unpack = f"import pickle; print(pickle.loads({run_python(pack).strip()}).hybrid_attention)"
    assert run_python(unpack).strip() == "{'window_size': 5}"
