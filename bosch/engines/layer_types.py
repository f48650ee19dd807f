"""A hybrid whose layers are whole as a plain checkpoint, for engines that read `layer_types`."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
from transformers import CONFIG_MAPPING, PreTrainedConfig

from bosch.errors import UserError
from bosch.hybrid import CODE_FILE
from bosch.model.configuration import base_content, is_hybrid
from bosch.model.families import FULL_ATTENTION, base_type, decoder_layers, text_config
from bosch.model.loading import load_config, load_model

_SLIDING = "sliding_attention"
_MOST_DIFFERENT = 1e-3  # of logits in float32, relative to their deviation


def export(model_dir: Path, output: Path) -> Path:
    """Write the hybrid in `model_dir` to the new directory `output`, and return it.

    The weights are copied. Raises UserError for a mask with layers of both kinds, several windows
    or sinks, and where transformers' own class with this configuration has other logits than the
    hybrid on a text of twice the window.
    """
    config = load_config(str(model_dir))
    if not is_hybrid(config):
        raise UserError(f"{model_dir} is no hybrid model")
    plain = plain_config(config)
    if output.exists():
        raise UserError(f"{output} exists; name a new directory")
    left_out = shutil.ignore_patterns("config.json", CODE_FILE)
    shutil.copytree(model_dir, output, ignore=left_out)
    try:
        plain.save_pretrained(output)
        _check(model_dir, output, text_config(plain).sliding_window)
    except BaseException:
        shutil.rmtree(output)
        raise
    return output


def plain_config(config: PreTrainedConfig) -> Any:
    """The base model's configuration with the hybrid's layers in `layer_types`."""
    table, kinds = config.hybrid_attention, decoder_layers(config)
    rows = [set(row) for row in table["windows"]]
    sizes = set().union(*rows) - {0}
    if any(len(row) > 1 for row in rows) or len(sizes) > 1 or table["sinks"]:
        raise UserError(
            "layer_types holds whole layers of one window without sinks, and this mask has others: "
            "search with search.head_granularity = the KV heads of a layer (or a layer rule), or "
            "serve the mask with vLLM and the plugin (docs/guide/serving.md)"
        )
    if not sizes:
        raise UserError("no head of this model slides: use its original")
    plain: PreTrainedConfig = CONFIG_MAPPING[base_type(config)].from_dict(base_content(config))
    # Without a class's name vLLM takes the directory for a model that generates nothing.
    plain.architectures = [name.removeprefix("Hybrid") for name in config.architectures or ()]
    text, (size,) = text_config(plain), sizes
    own = getattr(text, "layer_types", None) or [FULL_ATTENTION] * text.num_hidden_layers
    if _SLIDING in own and text.sliding_window != size:
        raise UserError(
            f"the original's own layers slide with a window of {text.sliding_window}, and a "
            f"configuration holds one: search with search.window_size={text.sliding_window}"
        )
    types = list(own)
    for layer, row in zip(kinds.full, rows, strict=True):
        types[layer] = _SLIDING if size in row else FULL_ATTENTION
    text.layer_types, text.sliding_window = types, size
    # Qwen's configurations drop the window, or make the types anew, without these two.
    for name, value in (("use_sliding_window", True), ("max_window_layers", len(types))):
        if hasattr(text, name):
            setattr(text, name, value)
    return plain


@torch.no_grad()
def _check(model_dir: Path, output: Path, window: int) -> None:
    """Compare with the hybrid, and see that a dropped window would show."""
    vocabulary = text_config(load_config(str(output))).vocab_size
    ids = torch.randint(vocabulary, (1, 2 * window + 1), generator=torch.Generator().manual_seed(0))

    def logits(folder: Path, config: PreTrainedConfig | None = None) -> Any:
        model = load_model(folder, dtype="float32", config=config)
        return model(input_ids=ids, use_cache=False).logits[0, window:]

    expected = logits(model_dir)
    dropped = load_config(str(output))
    text_config(dropped).layer_types = [FULL_ATTENTION] * len(text_config(dropped).layer_types)
    deviation = float(expected.std())
    difference, of_dropped = (
        float((logits(output, config) - expected).abs().max()) / deviation
        for config in (None, dropped)
    )
    if not difference <= _MOST_DIFFERENT:  # also where it is no number
        kind = text_config(dropped).model_type
        raise UserError(
            f"transformers' class of {kind} does not compute this hybrid from layer_types: logits "
            f"differ by {difference:.1e} of their deviation, with every layer full by "
            f"{of_dropped:.1e}; serve it with vLLM and the plugin (docs/guide/serving.md)"
        )
    if of_dropped < 10 * _MOST_DIFFERENT:
        raise UserError(f"a text of {len(ids[0])} tokens does not show whether the layers slide")
