"""torchrun for `pipeline.worker`, without its tracebacks: the runner says what went wrong.

`python -m pipeline.elastic [torchrun options] -m pipeline.worker ORDER`
"""

from __future__ import annotations

import logging
import os
import sys

from pipeline.worker import PARENT, die_with_parent


def main() -> int:
    """Start the processes of this node and wait for them; 1 when one of them failed."""
    die_with_parent()
    os.environ[PARENT] = str(os.getpid())
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main as torchrun

    logging.getLogger("torch.distributed").setLevel(logging.CRITICAL)
    try:
        torchrun(sys.argv[1:])
    except ChildFailedError:
        return 1
    except SignalException as stop:
        return 128 + stop.sigval
    return 0


if __name__ == "__main__":
    sys.exit(main())
