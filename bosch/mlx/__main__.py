"""The commands of mlx-lm, which run hybrid models too: `python -m bosch.mlx --help` lists them."""

from __future__ import annotations

import sys

from mlx_lm import cli

from bosch.errors import UserError, printable
from bosch.mlx.models import register


def main() -> int:
    """Run one of mlx-lm's commands; a fault of the model is one message."""
    register()
    try:
        cli.main()
    except UserError as fault:
        print(printable(f"error: {fault}"), file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
