"""Self-contained pages from templates; their security policy forbids loading anything."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from stages.pages.colours import COLOURS
from stages.pages.tables import as_cell

_FOLDER = Path(__file__).parent
_TEMPLATES = Environment(
    loader=FileSystemLoader(_FOLDER.parents[1]),
    autoescape=True,
    trim_blocks=True,
    lstrip_blocks=True,
    undefined=StrictUndefined,
)
_TEMPLATES.filters["cell"] = as_cell


def render(template: str, **content: Any) -> str:
    """The page from the template at a path in the checkout; every text is escaped."""
    style = (_FOLDER / "page.css").read_text(encoding="utf-8")
    return _TEMPLATES.get_template(template).render(style=style, colours=COLOURS, **content)
