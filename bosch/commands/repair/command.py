"""`bosch repair MODEL_DIR --from CHECKPOINT_DIR`: restore the recall of a fine-tuned hybrid."""

from __future__ import annotations

import argparse
import importlib
from pathlib import Path

from bosch.commands import Command

COMMAND = Command("restore the query and key weights that a hybrid had before its fine-tuning")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Options for both models and for the share of the older one."""
    parser.add_argument("model", metavar="MODEL_DIR", type=Path, help="the fine-tuned hybrid")
    parser.add_argument(
        "--from", dest="source", metavar="CHECKPOINT_DIR", type=Path, required=True,
        help="the hybrid that it was fine-tuned from",
    )  # fmt: skip
    parser.add_argument("--output", metavar="DIR", type=Path, required=True, help="a new directory")
    parser.add_argument(
        "--share", type=float, default=1.0,
        help="of the older weights, in (0, 1]: 1 restores them, 0.5 is the mean (default 1)",
    )  # fmt: skip


def run(options: argparse.Namespace) -> int:
    """Write the repaired model; raises UserError where the two models do not match."""
    # Imported here, since it loads torch.
    repair = importlib.import_module("bosch.commands.repair.weights").repair
    count = repair(options.model, options.source, options.output, options.share)
    print(
        f"{options.output}: {count} query and key weights with a share of {options.share:g} of "
        f"{options.source}"
    )
    return 0
