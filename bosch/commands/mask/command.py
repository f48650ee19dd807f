"""`bosch mask export|import`: head masks to and from files of other projects."""

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
    "convert a head mask to or from another project's files, see docs/reference/format.md"
)
# By direction and format, the options that would have no effect.
_UNUSED_OPTIONS = {
    ("export", "duoattention"): ("attention_heads", "key_value_heads", "swa_ratio", "model"),
    ("export", "rtp_llm"): ("key_value_heads", "swa_ratio", "model"),
    ("import", "duoattention"): ("attention_heads", "key_value_heads"),
    ("import", "rtp_llm"): ("swa_ratio",),
}


def add_options(parser: argparse.ArgumentParser) -> None:
    """The arguments of both directions."""
    parser.add_argument(
        "direction", choices=("export", "import"), help="write another project's file, or read one"
    )
    parser.add_argument("source", type=Path, metavar="SOURCE", help="the file or folder to read")
    parser.add_argument("target", type=Path, metavar="TARGET", help="the file or folder to write")
    parser.add_argument(
        "--format", required=True, choices=WRITERS, help="the other project's file format"
    )
    parser.add_argument(
        "--attention-heads",
        type=int,
        metavar="N",
        help="query heads of a layer, for a format that lists query heads",
    )
    parser.add_argument(
        "--key-value-heads",
        type=int,
        metavar="N",
        help="KV heads of a layer, to import a format that lists query heads",
    )
    parser.add_argument(
        "--swa-ratio",
        type=float,
        metavar="RHO",
        help="share of heads that slide, to import DuoAttention's gate scores as a ranking",
    )
    parser.add_argument(
        "--model", default="", help="name of the model that an imported mask is for"
    )


def run(options: argparse.Namespace) -> int:
    """Write TARGET; UserError for wrong options, unreadable files, or masks it cannot hold."""
    # Nothing is overwritten, since the target could be a device or a model's config.json.
    if os.path.lexists(options.target):
        raise UserError(
            f"TARGET {options.target}: is there already; remove it or name another file"
        )
    for name in _UNUSED_OPTIONS[options.direction, options.format]:
        if getattr(options, name) not in (None, ""):
            flag = name.replace("_", "-")
            raise UserError(
                f"--{flag}: has no effect on {options.direction} of {options.format}; leave it out"
            )
    if options.direction == "import":
        return _import(options)
    file = HeadMaskFile.load(options.source)
    WRITERS[options.format](file, options.target, options.attention_heads)
    print(f"{options.target}: written for {options.format}")
    return 0


def _import(options: argparse.Namespace) -> int:
    if options.format == "duoattention":
        if options.swa_ratio is not None and not 0.0 <= options.swa_ratio <= 1.0:
            raise UserError(f"--swa-ratio: expected a share from 0 to 1, got {options.swa_ratio}")
        mask, size, sinks = read_duoattention(options.source, options.swa_ratio)
    else:
        mask, size, sinks = read_rtp_llm(options.source, *_head_counts(options))
    try:
        window = Window(size, sinks)
    except ValueError as error:
        raise UserError(f"{options.source}: {error}") from None
    file = HeadMaskFile.of(
        mask, window, model=options.model, method=options.format, swa_ratio=mask.swa_ratio
    )
    file.save(options.target)
    print(
        f"{options.target}: {mask.num_layers} layers of {mask.num_key_value_heads} KV heads, a "
        f"share of {mask.swa_ratio:.4g} sliding, window {size}, sinks {sinks}"
    )
    return 0


def _head_counts(options: argparse.Namespace) -> tuple[int, int]:
    """Query heads and KV heads of a layer; raises UserError if the options are missing or wrong."""
    queries, heads = options.attention_heads, options.key_value_heads
    if not queries or not heads or queries < 1 or heads < 1 or queries % heads:
        raise UserError(
            "--attention-heads and --key-value-heads: this format lists query heads; give both "
            "numbers of the model's config.json, the first a multiple of the second, got "
            f"{queries} and {heads}"
        )
    return queries, heads
