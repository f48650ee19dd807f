"""`bosch mask export|import`: a head mask to and from other projects' files."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from bosch.commands import Command
from bosch.commands.mask.formats import WRITERS, read_duoattention, read_rtp_llm
from bosch.errors import UserError
from bosch.heads import HeadMaskFile
from bosch.window import Window

COMMAND = Command(
    "write a head mask for another project, or read one, see docs/reference/format.md"
)
_WITHOUT_EFFECT = {
    ("export", "duoattention"): (
        "attention_heads", "key_value_heads", "swa_ratio", "model"
    ),
    ("export", "rtp_llm"): ("key_value_heads", "swa_ratio", "model"),
    ("import", "duoattention"): ("attention_heads", "key_value_heads"),
    ("import", "rtp_llm"): ("swa_ratio",),
}  # fmt: skip


def add_options(parser: argparse.ArgumentParser) -> None:
    """The arguments of both directions."""
    parser.add_argument("direction", choices=("export", "import"), help="from or to head_mask.json")
    parser.add_argument("source", type=Path, metavar="SOURCE", help="the file or folder to read")
    parser.add_argument("target", type=Path, metavar="TARGET", help="the file or folder to write")
    parser.add_argument("--format", required=True, choices=WRITERS, help="its file format")
    parser.add_argument(
        "--attention-heads",
        type=int,
        metavar="N",
        help="query heads of a layer, for formats that list these",
    )
    parser.add_argument(
        "--key-value-heads", type=int, metavar="N", help="KV heads of a layer, to import those"
    )
    parser.add_argument(
        "--swa-ratio",
        type=float,
        metavar="RHO",
        help="share of heads that slides, to import DuoAttention's gate scores as a ranking",
    )
    parser.add_argument("--model", default="", help="the model's name, to import a mask")


def run(options: argparse.Namespace) -> int:
    """Write the mask in the other form and say what was written."""
    # Nothing is overwritten: it could be a device, or a model's config.json.
    if os.path.lexists(options.target):
        raise UserError(
            f"TARGET {options.target}: is there already; remove it or name another file"
        )
    for name in _WITHOUT_EFFECT[options.direction, options.format]:
        if getattr(options, name) not in (None, ""):
            flag = name.replace("_", "-")
            raise UserError(
                f"--{flag}: has no effect on {options.direction} of {options.format}; leave it out"
            )
    if options.direction == "export":
        return _export(options)
    return _import(options)


def _export(options: argparse.Namespace) -> int:
    WRITERS[options.format](
        HeadMaskFile.load(options.source), options.target, options.attention_heads
    )
    print(f"{options.target}: written for {options.format}")
    return 0


def _import(options: argparse.Namespace) -> int:
    if options.format == "duoattention":
        if options.swa_ratio is not None and not 0.0 <= options.swa_ratio <= 1.0:
            raise UserError(f"--swa-ratio: expected a share from 0 to 1, got {options.swa_ratio}")
        mask, window, sinks = read_duoattention(options.source, options.swa_ratio)
    else:
        mask, window, sinks = read_rtp_llm(options.source, *_head_counts(options))
    try:
        windows = Window(window, sinks)
    except ValueError as error:
        raise UserError(f"{options.source}: {error}") from None
    file = HeadMaskFile.of(
        mask,
        windows,
        model=options.model,
        method=options.format,
        swa_ratio=mask.swa_ratio,
    )
    file.save(options.target)
    print(
        f"{options.target}: {mask.num_layers} layers of {mask.num_key_value_heads} KV heads, a "
        f"share of {mask.swa_ratio:.4g} sliding, window {window}, sinks {sinks}"
    )
    return 0


def _head_counts(options: argparse.Namespace) -> tuple[int, int]:
    """Query heads and KV heads of a layer."""
    queries, heads = options.attention_heads, options.key_value_heads
    if not queries or not heads or queries < 1 or heads < 1 or queries % heads:
        raise UserError(
            "--attention-heads and --key-value-heads: this format lists query heads; give both "
            f"numbers of the model's config.json, the first a multiple of the second, got "
            f"{queries} and {heads}"
        )
    return queries, heads
