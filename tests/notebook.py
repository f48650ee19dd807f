"""The notebook of the quickstart, run as Jupyter does: its cells in turn, in one namespace."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.elsewhere import ROOT

NOTEBOOK = ROOT / "docs" / "start" / "quickstart.ipynb"


def code_cells(path: Path) -> list[dict[str, Any]]:
    """The notebook's code cells."""
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return [cell for cell in cells if cell["cell_type"] == "code"]


def run_notebook(path: Path) -> dict[str, Any]:
    """Run every code cell; returns the names they defined."""
    names: dict[str, Any] = {"__name__": "__main__"}
    for cell in code_cells(path):
        exec(compile("".join(cell["source"]), f"{path.name}:{cell['id']}", "exec"), names)
    return names
