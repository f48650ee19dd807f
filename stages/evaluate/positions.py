"""Loss by position in long documents, which rises first where distant tokens are not seen."""

from __future__ import annotations

import importlib.util
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bosch.errors import UserError
from bosch.score.answers import answer_logits
from data_prep.source_files import files_of
from data_prep.text import encode_prompt, read_utf8
from stages.evaluate.answers import AnswerLog, ModelError, digest_of
from stages.evaluate.stage import PositionConfig
from stages.evaluate.tables import POSITIONS, edges
from stages.versions import installed_versions

# Tokens whose logits over the vocabulary are held at once.
CHUNK = 1024


def long_documents(section: PositionConfig, tokenizer: Any) -> list[np.ndarray]:
    """The first documents that are long enough, each once, as token ids [T] int32.

    Copies are skipped: they would narrow the interval without new information. Raises UserError
    when no document is long enough.
    """
    found, contents = list[np.ndarray](), set[bytes]()
    for text in documents(section.path, 8 * section.length + 1000):
        if len(found) == section.documents:
            break
        # No tokenizer makes more than four tokens of a character on average.
        if 4 * len(text) < section.length:
            continue
        ids = encode_prompt(tokenizer, text)
        document = np.asarray(ids[: section.length], np.int32)
        if len(ids) >= section.length and document.tobytes() not in contents:
            contents.add(document.tobytes())
            found.append(document)
    if not found:
        raise UserError(
            f"evaluate.positions: no document has {section.length:,} tokens; lower the length or "
            "name a folder of longer ones as path"
        )
    return found


def losses(model: Any, texts: Sequence[np.ndarray], log: AnswerLog) -> list[dict[str, Any]]:
    """Records of the loss of each document by bins of positions; called on every rank."""
    keys = [digest_of(ids.tolist()) for ids in texts]
    fresh = [at for at, key in enumerate(keys) if key not in log.known]
    with log.shared():
        for at in log.share(fresh):
            values, bounds = token_losses(model, texts[at]), edges(len(texts[at]))
            bins = [float(values[a - 1 : b - 1].mean()) for a, b in itertools.pairwise(bounds)]
            log.add(keys[at], bins)
    return [
        {
            "suite": POSITIONS, "task": "loss", "length": len(texts[at]), "index": at,
            "loss": log.known[key], "prompt": key,
        }
        for at, key in enumerate(keys)
    ]  # fmt: skip


def corpus_name(section: PositionConfig) -> str:
    """Where the documents come from, for reports."""
    name = "transformers"
    return section.path or f"models of {name} {installed_versions([name])[name]}"


@torch.inference_mode()
def token_losses(model: Any, ids: np.ndarray) -> np.ndarray:
    """Cross-entropy of every token except the first, nats [T - 1]: one pass, logits in chunks.

    In one pass, because RoPE may depend on its length (`rope_depends_on_length`).
    """
    tokens = torch.from_numpy(ids.astype(np.int64)).to(model.device)
    states = model.get_decoder()(input_ids=tokens[None, :-1], use_cache=False).last_hidden_state[0]
    parts = []
    for some, targets in zip(states.split(CHUNK), tokens[1:].split(CHUNK), strict=True):
        logits = answer_logits(model, some)
        parts.append(torch.nn.functional.cross_entropy(logits, targets, reduction="none").cpu())
    values = torch.cat(parts)
    if not values.isfinite().all():
        raise ModelError("its logits are no numbers (NaN)")
    return values.numpy()


def documents(path: str | None, characters: int) -> Iterator[str]:
    """The first characters of the folder's texts by name, or of transformers' models.

    A model's code begins at its first class, longest files first: licence, warnings and imports
    before it are similar in all files.
    """
    if path is not None:
        for file in files_of("evaluate.positions.path", path, (".txt", ".md")):
            yield read_utf8(file)[:characters]
        return
    spec = importlib.util.find_spec("transformers")
    assert spec is not None and spec.origin is not None
    files = Path(spec.origin).parent.glob("models/*/modeling_*.py")
    for file in sorted(files, key=lambda file: (-file.stat().st_size, file.name)):
        text = file.read_text(encoding="utf-8")
        yield text[text.find("\nclass ") + 1 :][:characters]
