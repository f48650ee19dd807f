"""`python -m pipeline run|status|validate|plan RECIPE [key.path=value ...]`."""

import os
import sys

if __name__ == "__main__":
    # Looking for plugins reads the metadata of every installed package; `status` must be instant.
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")
    try:
        from pipeline.cli import main
    except ModuleNotFoundError as missing:
        print(
            f"error: this Python lacks {missing.name}; run launch/setup.sh and use "
            ".venv/bin/python, or launch/torchrun.sh",
            file=sys.stderr,
        )
        sys.exit(1)
    sys.exit(main())
