"""`python -m pipeline run|status|validate|plan RECIPE [key.path=value ...]`."""

import sys

if __name__ == "__main__":
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
