"""Trains like `tests.training_case`, and compiles nothing."""

import torch

from tests.training_case import main

if __name__ == "__main__":
    torch.compiler.set_stance("force_eager")
    main()
