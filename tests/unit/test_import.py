"""`import bosch`: light, and hybrid models load whichever of bosch and transformers comes first."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import bosch
from bosch.model.materialize import materialize
from bosch.window import Window
from tests.elsewhere import ROOT, run_python
from tests.hybrid_case import random_mask, small_model


def test_masks_and_errors_need_no_torch() -> None:
    code = (
        "import sys, bosch\n"
        "from bosch.errors import UserError\n"
        "from bosch.heads import HeadMask\n"
        "bosch.Window(4), bosch.HeadMask, bosch.swa_budget\n"
        "assert not {'torch', 'transformers'} & set(sys.modules), 'heavy import'\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def hybrid_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("hybrid")
    materialize(small_model(), random_mask(), Window(7)).save_pretrained(path)
    return path


_LOAD = "print(type(AutoModelForCausalLM.from_pretrained(path)).__name__)"


def test_bosch_first_then_transformers(hybrid_dir: Path) -> None:
    shown = run_python(
        f"import bosch; from transformers import AutoConfig; path = {str(hybrid_dir)!r}\n"
        "print(AutoConfig.from_pretrained(path).hybrid_attention['window_size'])\n"
        f"from transformers import AutoModelForCausalLM; {_LOAD}\n"
        "import sys; other = 'transformers.models.llama.modeling_llama'\n"
        "print('another family' if other in sys.modules else 'this family alone')"
    )
    assert shown.splitlines() == ["7", "HybridQwen3ForCausalLM", "this family alone"]


def test_transformers_first_refuses_until_bosch_is_there(hybrid_dir: Path) -> None:
    """A plain load must never run full attention under another name."""
    shown = run_python(
        f"from transformers import AutoModelForCausalLM; path = {str(hybrid_dir)!r}\n"
        "try:\n"
        "    AutoModelForCausalLM.from_pretrained(path)\n"
        "except ValueError as error:\n"
        "    print('trust_remote_code=True' in str(error))\n"
        f"import bosch; {_LOAD}"
    )
    assert shown.split()[-2:] == ["True", "HybridQwen3ForCausalLM"]


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        bosch.nothing  # noqa: B018
    assert all(getattr(bosch, name) is not None for name in bosch.__all__)


@pytest.mark.parametrize("name", ["PreTrainedModel", "Qwen3Config", "Trainer", "pipeline"])
def test_bosch_first_then_anything_of_transformers(name: str) -> None:
    """Registration must not import transformers' models while transformers itself is loading."""
    shown = run_python(
        f"import bosch; from transformers import {name}, AutoConfig\n"
        "print(type(AutoConfig.for_model('hybrid_qwen3')).__name__)"
    )
    assert shown.split() == ["HybridQwen3Config"]


def test_a_config_is_unpickled_in_a_process_that_has_made_none() -> None:
    """An engine hands a model's configuration to its processes."""
    pack = (
        "import pickle\n"
        "from bosch.model.configuration import hybrid_config_class\n"
        "from bosch.model.families import FAMILIES\n"
        "config = hybrid_config_class(FAMILIES['qwen3'])(hybrid_attention={'window_size': 5})\n"
        "print(pickle.dumps(config))"
    )
    unpack = f"import pickle; print(pickle.loads({run_python(pack).strip()}).hybrid_attention)"
    assert run_python(unpack).strip() == "{'window_size': 5}"
