"""The model card of a hybrid model: its origin, its sliding heads, how to load it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

from bosch.mask_files import HeadMaskFile
from bosch.window import windows_text
from stages.context import ModelConfig
from stages.versions import installed_versions

_FRONT = "---"
_KEYS = ("license", "license_name", "license_link")
_PAPER = "https://arxiv.org/abs/2604.05942"
UNTRAINED = "| continual pretraining | none, the weights are the base model's |"

_LOADING = """\
```python
from transformers import AutoModelForCausalLM, AutoTokenizer

folder = "."  # this directory, or its name on the hub
model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
```

With the library `bosch` installed, `import bosch` takes the place of `trust_remote_code=True`.
Without either the model does not load, rather than running with all heads full. `generate` uses a
cache in which a sliding head keeps its window only.
"""

_LIMITS = """\
What lies further back than the window reaches a sliding head through the layers below it alone. The
score above is for short answers found in long texts: compare with the base model on your own task
and length before use. What holds of the base model otherwise, its licence included, holds here.
Attention weights are returned with `attn_implementation="eager"` alone, and of transformers' caches
the dynamic and the static one have a hybrid form.
"""


def model_card(
    mask_file: HeadMaskFile, model: ModelConfig, cache: dict[str, int], licence: dict[str, str]
) -> str:
    """The card as Markdown with the hub's front matter; `cache` has bytes of the KV cache."""
    local, mask = Path(model.path).exists(), mask_file.mask
    base = Path(model.path).resolve().name if local else model.path
    front: dict[str, Any] = {**licence, **({} if local else {"base_model": model.path})}
    front |= {"library_name": "transformers", "pipeline_tag": "text-generation"}
    front["tags"] = ["hybrid-attention", "sliding-window"]
    lines = [f"{key}: {json.dumps(value, ensure_ascii=False)}" for key, value in front.items()]
    score = "unknown"
    if mask_file.score is not None:
        score = f"{mask_file.score:.4g}, the share of calibration answers that are right"
    seed = "" if mask_file.seed is None else f" (seed {mask_file.seed})"
    licence_name = licence.get("license_name") or licence.get("license")
    tokens, held, whole = (f"{cache[name]:,}" for name in ("tokens", "bytes", "original"))
    return f"""{_FRONT}
{chr(10).join(lines)}
{_FRONT}

# {base}, hybrid attention

Of the KV heads of {base} a share of {mask.swa_ratio:.4g} sees a sliding window only; the others
see everything, as before. Made by BOSCH-pipeline, after [BOSCH]({_PAPER}).

| | |
|---|---|
| base model | {base}{f" ({model.revision})" if model.revision else ""} |
| licence of the base model | {licence_name or "not stated in its card"} |
| sliding KV heads | {mask.num_sliding} of {mask.is_full.size}, see head_mask.json |
| windows | {windows_text(mask.menu)} tokens, the query's own included |
| head mask found by | {mask_file.method}{seed} |
| its score in the search | {score} |
{UNTRAINED}
| KV cache at {tokens} tokens | {held} bytes instead of {whole} |
| made with | transformers {installed_versions(["transformers"])["transformers"]} |

## Load

{_LOADING}
## Limits

{_LIMITS}"""


def note_training(folder: Path, tokens: int) -> None:
    """Add to the card in `folder`, if there is one, how many tokens the model was trained on."""
    path = folder / "README.md"
    if path.is_file():
        card = path.read_text(encoding="utf-8")
        row = f"| continual pretraining | {tokens:,} tokens |"
        path.write_text(card.replace(UNTRAINED, row), encoding="utf-8")


def base_licence(model: ModelConfig) -> dict[str, str]:
    """Licence fields of the base model's card; empty if it cannot be read."""
    card = Path(model.path, "README.md")
    if not card.parent.is_dir():
        from huggingface_hub import hf_hub_download

        try:
            card = Path(hf_hub_download(model.path, "README.md", revision=model.revision))
        except (OSError, ValueError):  # no card or no network; the licence is optional
            return {}
    try:
        _, text, _ = card.read_text(encoding="utf-8").split(f"{_FRONT}\n", 2)
        front = yaml.safe_load(text)
        return {key: front[key] for key in _KEYS if isinstance(front.get(key), str)}
    except (OSError, ValueError, AttributeError, yaml.YAMLError):
        return {}
