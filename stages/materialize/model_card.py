"""The model card of a hybrid model: its origin, its sliding heads, how to load it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bosch.mask_files import HeadMaskFile
from bosch.masks import HeadMask
from bosch.model.cache_size import OwnWindow
from stages.context import ModelConfig
from stages.materialize.stage import licence_of
from stages.versions import installed_versions

_FRONT = "---"
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
    mask_file: HeadMaskFile,
    model: ModelConfig,
    summary: dict[str, Any],
    layers: Sequence[int],
    licence: dict[str, str],
) -> str:
    """The card as Markdown with the hub's front matter.

    `summary` is that of the materialize stage, `layers` are the indices of the layers with full
    attention in the base model.
    """
    local = Path(model.path).exists()
    base = Path(model.path).resolve().name if local else model.path
    front: dict[str, Any] = dict(licence)
    if not local:
        front["base_model"] = model.path
    front |= {"library_name": "transformers", "pipeline_tag": "text-generation"}
    front["tags"] = ["hybrid-attention", "sliding-window"]
    lines = [f"{key}: {json.dumps(value, ensure_ascii=False)}" for key, value in front.items()]
    licence_name = licence.get("license_name") or licence.get("license")
    score = "unknown"
    if mask_file.score is not None:
        score = f"{mask_file.score:.4g}, the share of calibration answers that are right"
    mask = mask_file.mask
    sizes = " or ".join(str(window.size) for window in mask.menu)
    plural, order = "", ""
    if len(mask.menu) > 1:
        plural, order = "s", ", then those of each window from the widest down"
    seed = "" if mask_file.seed is None else f" (seed {mask_file.seed})"
    transformers = installed_versions(["transformers"])["transformers"]
    constant = f"{summary['sliding_bytes_constant']:,} once"
    before = summary["kv_cache_bytes_per_token_before"]
    after = summary["kv_cache_bytes_per_token_after"]
    own_windows = [OwnWindow(**window) for window in summary["own_windows"]]
    other_bytes = summary["state_bytes"]
    other_bytes += sum(window.bytes(window.window) for window in own_windows)
    where = ""
    if other_bytes:
        where = " in layers with full attention"
        constant += f", beside {other_bytes:,} of the other layers"
    return f"""{_FRONT}
{chr(10).join(lines)}
{_FRONT}

# {base}, hybrid attention

Of the KV heads of {base}{where} a share of {mask.swa_ratio:.4g} sees a sliding window
only; the others see everything, as before. Made by BOSCH-pipeline, after [BOSCH]({_PAPER}).

| | |
|---|---|
| base model | {base}{f" ({model.revision})" if model.revision else ""} |
| licence of the base model | {licence_name or "not stated in its card"} |
| sliding KV heads | {mask.num_sliding} of {mask.is_full.size} |
| window{plural} | {sizes} tokens, the query's own included |
| sinks | {mask.sinks} |
| head mask found by | {mask_file.method}{seed} |
| its score in the search | {score} |
{UNTRAINED}
| KV cache per token | {after:,} bytes instead of {before:,}, and at most {constant} |
| made with | transformers {transformers} |

## Load

{_LOADING}
## Head mask

One row per layer, one sign per KV head in the base model's order: ■ full,
{_legend(mask)}. In the weights here each layer's full heads come first{order}.

```
{_mask_rows(mask, layers)}
```

## Limits

{_LIMITS}"""


def note_training(folder: Path, tokens: int) -> None:
    """Add to the card in `folder`, if there is one, how many tokens the model was trained on."""
    path = folder / "README.md"
    if path.is_file():
        card = path.read_text(encoding="utf-8")
        row = f"| continual pretraining | {tokens:,} tokens |"
        path.write_text(card.replace(UNTRAINED, row), encoding="utf-8")


def _mask_rows(mask: HeadMask, layers: Sequence[int]) -> str:
    """The head mask as text, with a row for each of `layers`."""
    width, signs = len(str(layers[-1])), {0: "■", **_signs(mask)}
    return "\n".join(
        f"{layer:>{width}}  {' '.join(signs[size] for size in row)}"
        for layer, row in zip(layers, mask.windows, strict=True)
    )


def _signs(mask: HeadMask) -> dict[int, str]:
    """The sign of each window's heads: □, or with several windows their rank from the widest."""
    if len(mask.menu) == 1:
        return {mask.menu[0].size: "□"}
    return {window.size: str(place) for place, window in enumerate(mask.menu, start=1)}


def _legend(mask: HeadMask) -> str:
    if len(mask.menu) < 2:
        return "□ sliding"
    return ", ".join(f"{sign} a window of {size}" for size, sign in _signs(mask).items())


def base_licence(model: ModelConfig) -> dict[str, str]:
    """Licence fields of the base model's card; empty if it cannot be read."""
    card = Path(model.path, "README.md")
    if not card.parent.is_dir():
        from huggingface_hub import hf_hub_download

        try:
            card = Path(hf_hub_download(model.path, "README.md", revision=model.revision))
        except (OSError, ValueError):  # no card or no network; the licence is optional
            return {}
    return licence_of(card)
