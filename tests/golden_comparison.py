"""Write the golden comparison page again: python -m tests.golden_comparison."""

from __future__ import annotations

import tempfile
from pathlib import Path

from tests.golden_page import COMPARED
from tests.unit.test_compare import Case, compared

if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        COMPARED.write_text(compared(Case(Path(folder) / "case")), encoding="utf-8")
