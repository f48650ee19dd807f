"""mlx-lm's commands, also for hybrids: `python -m bosch.engines.mlx --help` lists them."""

from __future__ import annotations

import sys

from mlx_lm import cli

from bosch.engines.mlx.models import register
from bosch.errors import UserError, printable

_NO_DRAFTS = (
    "--draft-model: the windows of a hybrid cannot take back the tokens of a draft that are "
    "refused; leave it out, or run this model with transformers"
)
_NO_BATCHES = (
    "mlx-lm batches no hybrid with sinks; ask for one sequence at a time, or run this model with "
    "transformers"
)


def main() -> int:
    """Run one of mlx-lm's commands; faults of the model end in a one-line message."""
    register()
    try:
        cli.main()
    except UserError as fault:
        print(printable(f"error: {fault}"), file=sys.stderr)
        return 2
    except ValueError as fault:
        if "HybridLayerCache" not in str(fault) and "SinkLayerCache" not in str(fault):
            raise
        message = _NO_BATCHES if "batching" in str(fault) else _NO_DRAFTS
        print(f"error: {message}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
